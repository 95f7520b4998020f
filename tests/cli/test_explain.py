"""`kvdsl explain`: the facts against the policies' own numbers, and that each is said."""

from __future__ import annotations

import re
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

from kvdsl.codes import CODES
from kvdsl.compiler import compile_file, shipped_policies
from kvdsl.explain.facts import as_data, facts
from kvdsl.explain.words import rows
from tests.cli.harness import run

STEMS = [path.stem for path in shipped_policies()]
Capture = pytest.CaptureFixture[str]


def explained(capsys: Capture, body: str) -> tuple[str, dict[str, object]]:
    """What is said of a policy with these statements, as one line of text and as data."""
    Path("mine.kv").write_text(f'kv 1\n\npolicy Mine {{\n  "Mine."\n  {body}\n}}\n')
    result = run(capsys, "explain", "mine.kv")
    assert (result.code, result.err) == (0, "")
    return " ".join(result.out.split()), run(capsys, "explain", "mine.kv", "--json").json()


@pytest.mark.parametrize("stem", STEMS)
def test_policies(capsys: Capture, stem: str) -> None:
    result = run(capsys, "explain", stem)
    assert (result.code, result.err) == (0, "")
    for word in ("keeps", "evicts", "tracks", "costs", "peak", "reads", "backends"):
        assert f"\n  {word}" in result.out
    content = run(capsys, "explain", stem, "--json").json()
    assert {"name", "params", "state", "requires", "bytes_per_token", "backends", "peak"} <= content.keys()
    assert {"name", "axes", "dtype", "bytes_per_slot"} <= {
        key for column in content["state"] for key in column
    } or not content["state"]
    assert all(column["read_by"] for column in content["state"])


def test_bytes(capsys: Capture) -> None:
    roco = run(capsys, "explain", "roco", "--json", "--head-dim", "64", "--dtype", "float32").json()
    assert [column["name"] for column in roco["state"]] == ["sum_attn", "sum_attn_squared"]
    assert [column["read_by"] for column in roco["state"]] == [["score", "keep top"], ["keep top"]]
    assert all(column["dtype"] == "float32" and column["bytes_per_slot"] == 4 for column in roco["state"])
    assert roco["bytes_per_token"] == 2 * 64 * 4 + 4 + 2 * 4
    ring = run(capsys, "explain", "scissorhands_window", "--json", "--set", "history=100").json()
    assert [column["bytes_per_slot"] for column in ring["state"]] == [400]
    assert ring["bytes_per_token"] == 2 * 128 * 2 + 4 + 400
    compact = run(capsys, "explain", "equip_h2o", "--json").json()
    assert compact["bytes"]["position"] == 8, "the position, and the rank"
    assert compact["bytes_per_token"] == 2 * 128 * 2 + 8 + 4
    assert "8 for the position and the rank, 4 of state" in " ".join(run(capsys, "explain", "equip_h2o").out.split())


def test_requires(capsys: Capture) -> None:
    def requires(stem: str) -> object:
        return run(capsys, "explain", stem, "--json").json()["requires"]

    assert requires("roco") == ["attn"]
    assert requires("vatp_h2o") == ["attn", "v"]
    assert requires("window") == []
    assert requires("sparcas") == requires("quest") == ["q", "k"]


def test_layouts(capsys: Capture) -> None:
    _, blocks = explained(capsys, "param budget = 64; score position; storage blocks 16")
    assert (blocks["storage"], blocks["block"], blocks["rope"]) == ("blocks", "16", "fused")
    whys = {one["name"]: one["why_not"] for one in blocks["backends"]}  # type: ignore[attr-defined]
    assert whys == {"cpu": None, "torch": None, "triton": None}
    _, plain = explained(capsys, "param budget = 64; score position")
    assert (plain["storage"], plain["block"], plain["bytes"]["rotated_half"]) == ("in_place", None, 0)  # type: ignore[index]


def test_options_of_the_cache(capsys: Capture) -> None:
    found = run(capsys, "explain", "streaming_llm", "--storage", "blocks:32", "--rope", "cached", "--json").json()
    assert (found["storage"], found["block"], found["rope"], found["bytes"]["rotated_half"]) == (
        "blocks",
        "32",
        "cached",
        256,
    )
    refused = run(capsys, "explain", "h2o", "--rope", "cached")
    assert refused.code == 2 and "leave out `rope`" in refused.err


def test_what_kernels_keep_beside_keys(capsys: Capture) -> None:
    """Keys over the sketch's dims, and two keys a page; see `kvdsl.runtime.state.copies`."""
    sketch, pages = (run(capsys, "explain", name, "--json").json()["bytes"] for name in ("sparcas", "quest"))
    assert (sketch["sketch"], sketch["pages"]) == (16 * 2, 0)
    assert (pages["sketch"], pages["pages"]) == (0, 2 * 128 * 2 / 16)
    assert "32 more for the bounds of the key's page, in kernels" in " ".join(run(capsys, "explain", "quest").out.split())


BASE = "param budget = 64; score position"


@pytest.mark.parametrize(
    ("body", "prompt", "decode"),
    [
        (BASE, None, 65),
        (f"{BASE}; trigger overflow >= 8", None, 72),
        (f"{BASE}; trigger overflow >= 8; slack 12; max_drop 2", None, 77),
        (f"{BASE}; cap hard", None, 64),
        (f"{BASE}; cap hard; slack 4; max_drop 2", None, 68),
        (f"{BASE}; trigger overflow >= 0", None, None),
        (f"{BASE}; when prefill", None, None),
        (f"{BASE}; when decode", None, None),  # the whole prompt has slots when decoding begins
        (f"{BASE}; cap hard; trigger overflow >= 0", None, None),
        (f"{BASE}; prefill blocks of 16", 80, 80),
        (f"{BASE}; prefill blocks of 16; trigger overflow >= 10", 64 + 9 + 16, 64 + 9 + 16),
        (f"{BASE}; prefill blocks of 16; trigger overflow >= 4; slack 12; max_drop 2", 64 + 12 + 16, 64 + 12 + 16),
        (f"{BASE}; prefill blocks of 16; trigger overflow >= 0", None, None),
        ("budget prompt / 2; score position", None, None),
    ],
)
def test_peak(capsys: Capture, body: str, prompt: int | None, decode: int | None) -> None:
    """C + R while decoding, with slack and max_drop C + max(R, slack + 1); what a settle may leave, and N, in blocks of a prompt.

    The last block, where it is not full, is still there when the first token is decoded.
    """
    _, content = explained(capsys, body)
    peak = {one["phase"]: one["slots"] for one in content["peak"]}  # type: ignore[attr-defined]
    assert peak == {"prompt": prompt, "decode": decode}


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (f"{BASE}; group max", "by the max over the query heads"),
        (f"{BASE}; victims shared by heads", "the same tokens in the KV heads of a layer"),
        (f"{BASE}; layers 2..", "in layers 2..; every token in the others"),
        (f"{BASE}; when decode", "the prompt stays whole"),
        (f"{BASE}; positions compact", "its rank among the live tokens"),
        (f"{BASE}; positions compact; rope cached", "256 more for the key's rotated half (1.5× the key and value)"),
        (f"{BASE}; storage blocks 16", "in blocks of 16 slots, from one pool for the rows of a batch"),
        (f"{BASE}; trigger overflow >= 0", "never: the trigger is 0"),
        (f"{BASE}; trigger overflow >= 0; when decode; cap hard", "no more than the prompt + 1, or budget + 0"),
        (f"{BASE}; trigger overflow >= 9; max_drop 4; slack 2", "4 tokens at a time more if that would leave more than 2"),
        (f"{BASE}; cap hard", "before a new token would exceed the budget"),
        (f"{BASE}; keep where age < 3", "the tokens where age < 3"),
        ("param budget = 64; score ema(attn, 0.9)", "the moving average of attn over the queries that see the token, which keeps 0.9"),
        ("param budget = 64; score random()", "by lot"),
        ("param budget = 64; score budget * random()", "by lot"),
        ("param budget = 64; score sum(attn) + 0.001 * random()",
         "the token with the lowest sum(attn) + 0.001 * random() first; `random()` is drawn again for each token"),
        ("param budget = 64; score norm2(k)", "once, when the token comes in"),
        ("param budget = 64; score sum(attn over last 9 queries)", "attn, from each of the last 9 queries"),
        ("select top 9 by dot(q, k) in layers 1..", "attends to 9 tokens: the protected ones"),
        ("pages 4; select top 9 by sum(q * max(k over page) over dims)", "as whole pages of 4"),
    ],
)  # fmt: skip
def test_words(capsys: Capture, body: str, said: str) -> None:
    assert said in explained(capsys, body)[0]


def test_a_docstring_cannot_steer_a_terminal(capsys: Capture) -> None:
    Path("mine.kv").write_text('kv 1\n\npolicy Mine {\n  "\\u{1b}[31m \\u{202e} \\u{7}"\n}\n')
    out = run(capsys, "explain", "mine.kv").out
    assert r"\x1b[31m \u202e \x07" in out
    assert all(char.isprintable() or char == "\n" for char in out)


@pytest.mark.parametrize("what", ["roco", "loki", "KV0301"])
def test_lines_are_as_wide_as_the_terminal(capsys: Capture, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    """A code's example is shown as it is."""
    widest = {}
    for columns in (60, 80, 300):
        monkeypatch.setenv("COLUMNS", str(columns))
        widest[columns] = max(map(len, run(capsys, "explain", what).out.partition("For example")[0].splitlines()))
    assert 50 < widest[60] <= 60 < widest[80] <= 80 < widest[300] <= 100


@pytest.mark.parametrize("what", ["roco", "loki", "KV0301"])
def test_terminals_get_colour(capsys: Capture, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    """The same text, with bold heads; NO_COLOR is honoured."""
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    plain = run(capsys, "explain", what).out
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    painted = run(capsys, "explain", what).out
    assert "\x1b[1m" in painted and "\x1b[" not in plain
    assert re.sub(r"\x1b\[\d+m", "", painted) == plain
    monkeypatch.setenv("NO_COLOR", "1")
    assert run(capsys, "explain", what).out == plain


@pytest.mark.parametrize("code", CODES)
def test_codes(capsys: Capture, code: str) -> None:
    result = run(capsys, "explain", code.lower(), code=0)
    assert CODES[code].title in result.out
    assert CODES[code].severity == "error" or "refuses" not in result.out
    assert run(capsys, "explain", code, "--json").json()["title"] == CODES[code].title


def test_the_state_is_that_of_the_compiled_policy(tmp_path: Path) -> None:
    """Constants are folded before columns are found; `explain` used to name columns of the text."""
    file = tmp_path / "folds.kv"
    file.write_text('kv 1\npolicy Folds {\n"A test."\nparam budget = 8\nscore sum(attn * (1 + 1))\n}\n', encoding="utf-8")
    compiled = compile_file(file)
    state = [column["name"] for column in as_data(facts(compiled.policy))["state"]]
    assert state == ["sum_attn_times_2"]
    assert f'columns=("{state[0]}",)' in compiled.files["cache.py"]


class _Tags(HTMLParser):
    """The tags that are open, and the text; a tag that is closed out of turn is an error."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in ("meta", "br"):
            self.open.append(tag)
        assert not any(name in ("src", "href") for name, _ in attrs), "a page needs nothing else"

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def test_html_says_what_text_says(capsys: Capture) -> None:
    Path("mine.kv").write_text(
        'kv 1\n\npolicy Mine {\n  "Less < more & `code`."\n  param budget = 8\n  score sum(attn > 0.5)\n}\n'
    )
    page = _Tags(run(capsys, "explain", "mine.kv", "--format", "html").out)
    assert page.open == []
    assert Path("mine.kv").read_text() in page.text
    found = facts(compile_file("mine.kv").policy)
    for title, lines in rows(found).items():
        assert title in page.text
        assert all(line in page.text for line in lines)
    assert "Less < more & code." in page.text


def test_html_of_a_code(capsys: Capture) -> None:
    page = _Tags(run(capsys, "explain", "KV0301", "--format", "html").out)
    assert page.open == []
    assert CODES["KV0301"].example in page.text
    assert CODES["KV0301"].title in page.text


@pytest.mark.parametrize(
    ("budget", "said", "budgets", "in_bytes"),
    [
        ("where(w > 0.5, sinks + 60, 256)", "sinks + 60 = 64 tokens or 256 tokens per KV head, chosen by w, after eviction", [64, 256],
         [33024, 132096]),
        ("where(w > 0.5, 64, everything)", "64 tokens or every token per KV head, chosen by w, after eviction", [64, None], [33024, None]),
        ("where(w > 0.9, 8, where(w > 0.5, 64, 64))", "8 tokens or 64 tokens per KV head", [8, 64], [4128, 33024]),
        ("1000 * w", "1000 * w tokens per KV head, chosen by w, after eviction", [None], [None, None]),
        ("small", "small tokens per KV head, chosen by w, after eviction", [None], [None, None]),
    ],
)  # fmt: skip
def test_budgets_that_a_tensor_tells(
    capsys: Capture, budget: str, said: str, budgets: list[int | None], in_bytes: list[int | None]
) -> None:
    tensor = 'tensor w [layers, heads] from "w.safetensors"'
    text, data = explained(
        capsys, f"{tensor}\n  param sinks = 4\n  param small = 9 * w + sinks\n  budget {budget}\n  score age * small"
    )
    assert said in text
    assert [one["tokens"] for one in data["budgets"]] == budgets
    assert data["bytes_per_head"] == in_bytes
    known = [f"{size:,}" for size in in_bytes if size is not None]
    assert all(f"{size} " in text for size in known) and "a KV head takes" in text


def test_a_policy_whose_heads_keep_the_same_says_nothing_of_them(capsys: Capture) -> None:
    text, data = explained(capsys, "param budget = 64\n  score sum(attn)")
    assert data["budgets"] == [] and data["bytes_per_head"] is None
    assert "a KV head takes" not in text


def test_layers_that_share(capsys: Capture) -> None:
    """The peak is the whole prompt; decoded tokens know nothing of it, so that all backends serve them."""
    out, content = explained(
        capsys, "param budget = 8; score sum(attn); when prefill; budget budget across layers by 1 + layer floor 0.1"
    )
    shown = " ".join(out.split())
    assert (
        "each gets the tokens that it protects at the ends or 0.1 of its budget, and a share of the rest by 1 + layer"
        in shown
    )
    assert "in the prompt: the prompt, in all layers at a time" in shown
    assert all(one["ok"] for one in content["backends"])  # type: ignore[attr-defined]
    shown = " ".join(
        explained(capsys, "param budget = 8; score sum(attn); when prefill; budget budget across layers floor 0.5")[
            0
        ].split()
    )
    assert "all layers and heads share their budgets after the prompt, each head 0.5 of its budget at least" in shown


def test_heads_that_vote(capsys: Capture) -> None:
    Path("votes.kv").write_text('kv 1\n\npolicy Votes {\n  "A."\n  select top 4 by sum(dot(q, k) over heads)\n}\n')
    backends = run(capsys, "explain", "votes.kv", "--json").json()["backends"]
    assert [one["name"] for one in backends if not one["ok"]] == []


def test_what_goes_wrong_is_json_too(capsys: Capture) -> None:
    for words in (("--format", "json"), ("--format=json",)):
        said = run(capsys, "explain", "h2oo", *words)
        assert said.code == 2 and "h2oo" in said.json()["error"]["message"]


def test_a_param_may_stand_before_what_it_is_said_by(capsys: Capture) -> None:
    lines = ["param N = budget / 2", "param budget = 64"]
    told = []
    for params in (lines, lines[::-1]):
        Path("mine.kv").write_text("\n".join(["kv 1", "policy Mine {", *params, "score sum(attn over last N queries)", "}"]))
        told.append(run(capsys, "explain", "mine.kv", "--json").json()["bytes_per_token"])
    assert told[0] == told[1]
