"""The page of `kvdsl trace`: what it holds is what the cache held, and its script paints it."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch

import kvdsl
from kvdsl.cli import main
from kvdsl.eval import trace as tracing

PROMPT = "Once upon a time, in a house by the sea, "


class Page(HTMLParser):
    """The data of a page, its script, and every address in it."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.parts: dict[str, str] = {}
        self.addresses: list[str] = []
        self._inside = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.addresses += [value for name, value in attrs if name in ("src", "href") and value]
        self._inside = given.get("id") or tag if tag == "script" else ""

    def handle_data(self, data: str) -> None:
        if self._inside:
            self.parts[self._inside] = self.parts.get(self._inside, "") + data

    def handle_endtag(self, tag: str) -> None:
        self._inside = ""

    @property
    def data(self) -> Any:
        return json.loads(self.parts["data"])


@pytest.fixture
def folder(model: Any, tokenizer: Any, tmp_path: Path) -> str:
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    return str(tmp_path / "model")


def held(cache: Any, layer: int, head: int) -> set[int]:
    return {position for position in cache.positions(layer)[0, head].tolist() if position >= 0}


@pytest.mark.parametrize("policy", ["roco", "adakv", "tova"])
@pytest.mark.parametrize("chunk", [None, 5])
def test_the_page_says_what_positions_said_step_by_step(
    policy: str, chunk: int | None, folder: str, model: Any, tokenizer: Any, tmp_path: Path
) -> None:
    out = tmp_path / "page.html"
    words = ["trace", "--policy", policy, "--set", "budget=9", "--model", folder, "--prompt", PROMPT * 3, "--out", str(out)]
    words += ["--max-new-tokens", "8", "--backend", "torch"] + ([] if chunk is None else ["--chunk", str(chunk)])
    if policy == "adakv":
        words[4] = "budget=36"  # of which 32 are the window
    assert main(words) == 0
    data = Page(out.read_text(encoding="utf-8")).data

    cache: Any = kvdsl.load(policy)(model, budget=int(words[4].split("=")[1]), backend="torch")
    prompt = [tokenizer.bos_token_id, *tokenizer(PROMPT * 3, add_special_tokens=False)["input_ids"]]
    ids, seen, columns = torch.tensor([prompt]), 0, {}
    for step, upto in enumerate(data["seen"]):
        with torch.inference_mode():
            logits = model(ids[:, seen:upto], past_key_values=cache, use_cache=True).logits
        for layer in range(2):
            for head in range(2):
                gone = data["gone"][layer][head]
                assert {t for t in range(upto) if not 0 <= gone[t] <= step} == held(cache, layer, head)
                for name, column in cache.state(layer).items():
                    if column.dim() == 3:
                        slots = zip(cache.positions(layer)[0, head].tolist(), column[0, head].tolist(), strict=True)
                        columns.update({(name, layer, head, at): value for at, value in slots if at >= 0})
        seen = upto
        if upto >= len(prompt):
            ids = torch.cat([ids, logits[:, -1].argmax(-1, keepdim=True)], 1)
    assert data["tokens"] == tracing.pieces(tokenizer, ids[0].tolist())
    assert data["prompt_tokens"] == len(prompt) and len(ids[0]) == len(prompt) + 8 == seen + 1
    for (name, layer, head, at), value in columns.items():
        assert data["columns"][name][layer][head][at] == pytest.approx(value, rel=1e-3, abs=1e-12)
    flat = torch.tensor([[[[one is not None for one in head] for head in heads] for heads in values]
                         for values in data["columns"].values()])  # fmt: skip
    assert int(flat.sum()) == len(columns)


def test_the_page_needs_no_network_and_escapes_the_text(folder: str, tmp_path: Path) -> None:
    out, nasty = tmp_path / "page.html", "</script><script>alert(1)</script> & <b>bold</b> <!-- x"
    words = ["trace", "--policy", "h2o", "--set", "budget=8", "--model", folder, "--prompt", nasty, "--out", str(out)]
    assert main([*words, "--max-new-tokens", "3", "--backend", "torch"]) == 0
    text = out.read_text(encoding="utf-8")
    page = Page(text)
    assert page.addresses == [] and not re.search(r"https?:|@import|url\(", text)
    assert set(page.parts) == {"data", "script"} and "alert(1)" not in page.parts["script"]
    assert "".join(page.data["tokens"]).startswith("<s>" + nasty)


def test_characters_of_several_tokens_are_shown_once(tokenizer: Any) -> None:
    text = "Über die “Stürme” — naïve"
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    found = tracing.pieces(tokenizer, ids)
    assert "".join(found) == text and len(found) == len(ids) and "" in found
    broken = tracing.pieces(tokenizer, ids[:1])
    assert broken == ["\ufffd"], "the half of a character that the text ends with"


def test_json_and_mistakes(folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "page.html"
    words = [
        "trace",
        "--policy",
        "window",
        "--set",
        "budget=8",
        "--model",
        folder,
        "--backend",
        "torch",
        "--max-new-tokens",
        "4",
    ]
    assert main([*words, "--prompt", PROMPT, "--out", str(out), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["steps"] == 4 and found["out"] == str(out) and found["format_version"] == "1.0"
    tokens = found["prompt_tokens"] + 3
    assert found["evicted"] == 4 * (tokens - 8)
    for wrong, message in (
        (["--prompt", PROMPT, "--out", str(tmp_path / "no" / "page.html")], "No such file"),
        (["--prompt", " "], "nothing to go on from"), (["--prompt", PROMPT * 30], "ask for fewer"),
    ):  # fmt: skip
        assert main([*words, *wrong]) == 2
        assert message in capsys.readouterr().err


# -- the script ------------------------------------------------------------------------------------------------------------

BROWSER = """
const made = (tag) => ({tag, children: [], dataset: {}, style: {}, value: "", textContent: "", className: "",
  classList: {on: new Set(), toggle(name, on) { on ? this.on.add(name) : this.on.delete(name); }, add(name) { this.on.add(name); },
              remove(name) { this.on.delete(name); }},
  listeners: {}, addEventListener(name, call) { this.listeners[name] = call; }, appendChild(one) { this.children.push(one); return one; },
  add(one) { this.children.push(one); if (!this.value) this.value = one.value; }, insertRow() { return this.appendChild(made("tr")); }});
const found = {};
globalThis.document = {getElementById: (id) => found[id] ??= made(id), createElement: made};
globalThis.Option = function (text, value) { this.value = String(value); };
document.getElementById("data").textContent = DATA;
eval(SCRIPT);
const painted = () => found.text.children.map((one) => one.classList.on.has("future") ? "future" : one.style.background);
const states = [painted()];
found.step.value = 0; found.step.listeners.input(); states.push(painted());
found.step.value = 1; found.layer.value = "0"; found.head.value = "1"; found.head.listeners.input(); states.push(painted());
found.text.listeners.pointerover({target: found.text.children[1]});
const cells = found.details.children[0].children.map((row) => row.children.map((cell) => cell.textContent));
console.log(JSON.stringify({states, words: found.details.textContent, cells}));
"""


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node to run the page's script")
def test_the_script_paints_what_the_data_say(tmp_path: Path) -> None:
    data = {
        "policy": "P", "settings": "s", "model": "m", "environment": {"kvdsl": "0"}, "tokens": ["a", "b", "c", "d"],
        "prompt_tokens": 2, "seen": [2, 3], "layers": [0], "gone": [[[0, -1, -1, -1], [0, 1, -1, -1]]],
        "columns": {"sum_attn": [[[None, 0.5, 1, None], [None, 0.25, 2, None]]]},
    }  # fmt: skip
    page = Page(tracing.page(data))
    program = BROWSER.replace("DATA", json.dumps(page.parts["data"])).replace(
        "SCRIPT", json.dumps(page.parts["script"].replace('"use strict";', ""))
    )
    done = subprocess.run(["node", "-e", program], capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    early, late = "hsl(210 90% 55% / {})", "hsl(0 90% 55% / {})"
    assert found["states"] == [
        [early.format("0.8"), late.format("0.475"), "", "future"],
        [early.format("0.8"), "", "future", "future"],
        [early.format("0.8"), late.format("0.8"), "", "future"],
    ]
    assert found["words"].startswith('token 1 "b" (prompt): evicted in 1 of 1 heads.')
    assert found["cells"] == [["layer", "head 0", "head 1"], [0, "stays · 0.5", "1 · 0.25"]]
