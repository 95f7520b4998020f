"""The page of `kvdsl trace`: what it holds is what the cache held, and its script paints it."""

from __future__ import annotations

import base64
import json
import re
import shutil
import struct
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch

import kvdsl
from kvdsl.cli import main
from kvdsl.runtime.hf.versions import with_cache
from kvdsl_lab.eval import trace as tracing
from tests.cli.harness import run

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


def held(cache: Any, layer: int, head: int) -> set[int]:
    return {position for position in cache.positions(layer)[0, head].tolist() if position >= 0}


@pytest.mark.parametrize("policy", ["roco", "adakv", "tova"])
@pytest.mark.parametrize("chunk", [None, 5])
def test_the_page_says_what_positions_said_step_by_step(
    policy: str, chunk: int | None, tiny: str, model: Any, tokenizer: Any, tmp_path: Path
) -> None:
    out = tmp_path / "page.html"
    words = ["trace", "--policy", policy, "--set", "budget=9", "--model", tiny, "--prompt", PROMPT * 3, "--out", str(out)]
    words += ["--max-new-tokens", "8", "--backend", "torch"] + ([] if chunk is None else ["--chunk", str(chunk)])
    if policy == "adakv":
        words[4] = "budget=36"  # of which 32 are the window
    assert main(words) == 0
    data = Page(out.read_text(encoding="utf-8")).data

    cache: Any = kvdsl.load(policy)(model, budget=int(words[4].split("=")[1]), backend="torch")
    prompt = [tokenizer.bos_token_id, *tokenizer(PROMPT * 3, add_special_tokens=False)["input_ids"]]
    ids, seen, compared = torch.tensor([prompt]), 0, 0
    value = reader(data)
    for step, upto in enumerate(data["seen"]):
        with torch.inference_mode():
            logits = model(ids[:, seen:upto], **with_cache(cache), use_cache=True).logits
        for layer in range(2):
            for head in range(2):
                gone = data["gone"][layer][head]
                assert {t for t in range(upto) if not 0 <= gone[t] <= step} == held(cache, layer, head)
                for name, column in cache.state(layer).items():
                    slots = zip(cache.positions(layer)[0, head].tolist(), column[0, head].tolist(), strict=True)
                    for at, wanted in slots if column.dim() == 3 else ():
                        if at >= 0:
                            assert value(name, layer, head, at, step) == pytest.approx(wanted, rel=1e-3, abs=1e-12)
                            compared += 1
        seen = upto
        if upto >= len(prompt):
            ids = torch.cat([ids, logits[:, -1].argmax(-1, keepdim=True)], 1)
    assert data["tokens"] == tracing.pieces(tokenizer, ids[0].tolist())
    assert data["prompt_tokens"] == len(prompt) and len(ids[0]) == len(prompt) + 8 == seen + 1
    assert bool(compared) == (policy != "adakv"), "whose state is a ring of the last queries"


def reader(data: Any) -> Any:
    """A page's values by name, layer, KV head, token and step: the numbers in their order, one for every step that held the token."""
    seen, last = data["seen"], len(data["seen"]) - 1
    numbers = {name: iter(struct.unpack(f"<{len(raw) // 4}f", raw)) for name, raw in
               ((name, base64.b64decode(text)) for name, text in data["values"].items())}  # fmt: skip
    found = {}
    for layer, heads in enumerate(data["gone"]):
        for head, gone in enumerate(heads):
            for token in range(seen[-1]):
                first = next(step for step in range(last + 1) if seen[step] > token)
                for step in range(first, (last if gone[token] < 0 else gone[token]) + 1):
                    for name, one in numbers.items():
                        found[name, layer, head, token, step] = next(one)
    assert all(next(one, None) is None for one in numbers.values())
    return lambda *where: found[where]


def test_who_leaves_had_the_lowest_score_of_those_that_may(tiny: str, tmp_path: Path) -> None:
    out = tmp_path / "page.html"
    words = ["trace", "--policy", "h2o", "--set", "budget=9", "--model", tiny, "--prompt", PROMPT * 2, "--out", str(out)]
    assert main([*words, "--max-new-tokens", "8"]) == 0
    data = Page(out.read_text(encoding="utf-8")).data
    assert data["expression"] == "sum(attn)" and set(data["values"]) == {"score", "protected", "sum_attn"}
    value, left = reader(data), 0
    for layer, heads in enumerate(data["gone"]):
        for head, gone in enumerate(heads):
            for step, upto in enumerate(data["seen"]):
                live = [token for token in range(upto) if not 0 <= gone[token] < step]
                free = [token for token in live if not value("protected", layer, head, token, step)]
                going = [token for token in live if gone[token] == step]
                assert len(live) - len(free) == 4, "the recent half of the budget, floored"
                ranked = sorted(free, key=lambda token: value("score", layer, head, token, step))
                assert set(going) == set(ranked[: len(going)])
                left += len(going)
    assert left == 4 * (data["seen"][-1] - 9)


def test_the_page_needs_no_network_and_escapes_the_text(tiny: str, tmp_path: Path) -> None:
    out, nasty = tmp_path / "page.html", "</script><script>alert(1)</script> & <b>bold</b> <!-- x"
    words = ["trace", "--policy", "h2o", "--set", "budget=8", "--model", tiny, "--prompt", nasty, "--out", str(out)]
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


def test_json_and_mistakes(tiny: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "page.html"
    words = [
        "trace",
        "--policy",
        "window",
        "--set",
        "budget=8",
        "--model",
        tiny,
        "--backend",
        "torch",
        "--max-new-tokens",
        "4",
    ]
    found = run(capsys, *words, "--prompt", PROMPT, "--out", str(out), "--json", code=0).json()
    assert found["steps"] == 4 and found["out"] == str(out) and found["format_version"] == "1.0"
    tokens = found["prompt_tokens"] + 3
    assert found["evicted"] == 4 * (tokens - 8)
    for wrong, message in (
        (["--prompt", PROMPT, "--out", str(tmp_path / "no" / "page.html")], "there is no folder"),
        (["--prompt", " "], "the text is empty"), (["--prompt", PROMPT * 30], "use fewer"),
    ):  # fmt: skip
        assert message in run(capsys, *words, *wrong, code=2).err


# -- the script ------------------------------------------------------------------------------------------------------------

BROWSER = """
const drawn = (canvas) => ({clearRect() { canvas.filled = []; }, fillRect(x) { canvas.filled.push([this.fillStyle, x]); }});
const made = (tag) => ({tag, children: [], getContext() { return this.context ??= drawn(this); },
  dataset: {}, style: {}, value: "", textContent: "", className: "",
  classList: {on: new Set(), toggle(name, on) { on ? this.on.add(name) : this.on.delete(name); }, add(name) { this.on.add(name); },
              remove(name) { this.on.delete(name); }},
  listeners: {}, addEventListener(name, call) { this.listeners[name] = call; },
  appendChild(one) { this.children.push(one); one.parentNode = this; return one; },
  add(one) { this.children.push(one); if (!this.value) this.value = one.value; }, insertRow() { return this.appendChild(made("tr")); }});
const found = {};
globalThis.document = {getElementById: (id) => found[id] ??= made(id), createElement: made};
globalThis.Option = function (text, value) { this.value = String(value); };
document.getElementById("data").textContent = DATA;
eval(SCRIPT);
const painted = () => found.text.children.map((one) => one.classList.on.has("future") ? "future" : one.style.backgroundColor);
const states = [painted()];
const set = (id, value) => { found[id].value = value; found[id].listeners.input(); };
const bars = () => found.overview.children[0].children.slice(1).flatMap((row) => row.children.slice(1))
  .map((place) => [place.title, place.className, place.children[0].filled.map(([style, x]) => [style, x / place.children[0].width])]);
const held = [bars()[1]];
set("color", "left"); states.push(painted());
set("step", 0); states.push(painted());
set("step", 1); set("layer", "0"); set("head", "1"); states.push(painted());
found.text.listeners.pointerover({target: found.text.children[1]});
const read = () => found.details.children.at(-1).children.map((row) => row.children.map((cell) => cell.textContent));
const told = [[found.details.textContent, read()]];
set("step", 0); told.push([found.details.textContent, read()]);
set("step", 1); set("layer", "all"); set("head", "all"); set("color", "score"); states.push(painted());
found.overview.children[0].children[1].children[2].listeners.click(); held.push(...bars());
const clicked = [found.layer.value, found.head.value];
found.overview.children[0].children[1].children[2].listeners.click(); clicked.push(found.layer.value, found.head.value);
console.log(JSON.stringify({states, told, held, chosen: clicked}));
"""


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node to run the page's script")
def test_the_script_paints_what_the_data_say(tmp_path: Path) -> None:
    # Of every head and token, for each step that held it: a leaves with step 0; b stays in head 0, and leaves head 1 with step 1.
    score = [0.1, 0.5, 0.6, 0.9, 0.2, 0.25, 0.3, float("nan")]
    data = {
        "policy": "P", "expression": "e", "settings": "s", "model": "m", "environment": {"kvdsl": "0"}, "prompt_tokens": 2,
        "tokens": ["a", "b", "c", "d"], "seen": [2, 3], "layers": [0], "gone": [[[0, -1, -1, -1], [0, 1, -1, -1]]],
        "values": {"score": base64.b64encode(struct.pack("<8f", *score)).decode()},
    }  # fmt: skip
    page = Page(tracing.page(data))
    program = BROWSER.replace("DATA", json.dumps(page.parts["data"])).replace(
        "SCRIPT", json.dumps(page.parts["script"].replace('"use strict";', ""))
    )
    done = subprocess.run(["node", "-e", program], capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    kept, early, late = "rgb(0 114 178 / {})", "rgb(86 180 233 / {})", "rgb(230 159 0 / {})"
    assert found["states"] == [  # the newest token, which the step has written, is not in the future
        ["", kept.format("0.375"), kept.format("0.650"), ""],  # b is kept in one of two heads, c in both
        [early.format("0.550"), late.format("0.350"), "", ""],
        [early.format("0.550"), "", "", "future"],
        [early.format("0.550"), late.format("0.550"), "", ""],
        # by score, over both heads: in head 0, b is lower than c; in head 1 nothing is known of c
        ["", early.format("0.350"), late.format("0.350"), ""],
    ]
    blue, orange = "rgb(0 114 178)", "rgb(230 159 0)"
    assert found["held"] == [
        ["layer 0, KV head 1: 1 of 3 tokens cached", "here", [[blue, 0.5]]],
        ["layer 0, KV head 0: 2 of 3 tokens cached", "", [[blue, 0.25], [blue, 0.5], [orange, 0.25]]],  # b is pointed at
        ["layer 0, KV head 1: 1 of 3 tokens cached", "here", [[blue, 0.5], [orange, 0.25]]],
    ]
    assert found["chosen"] == ["0", "1", "all", "all"]  # the second click chooses all again
    (words, cells), (earlier_words, earlier) = found["told"]
    assert words == 'token 1 "b" (prompt), after step 1: cached in 0 of 1 heads.'
    assert cells == [["", "head 0", "head 1"], ["layer 0\nscore", "cached\n0.6", "left with step 1\n0.3"]]
    assert earlier_words == 'token 1 "b" (prompt), after step 0: cached in 1 of 1 heads.'
    assert earlier == [["", "head 0", "head 1"], ["layer 0\nscore", "cached\n0.5", "cached\n0.25"]]
