"""What docs/language.md says of corners is so, in the reference interpreter."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvdsl.budget import tokens_of, tokens_or_rate
from kvdsl.compiler import analyse
from tests.docs.pages import command, read

AGES = "prompt { attend 1; attend 0.5, 0.5; attend 0.25, 0.25, 0.5 }"
TURNS = (
    "prompt { attend 1; attend 0.5, 0.5; attend 0.5, 0.25, 0.25 }\nprompt { attend 0, 0, 0, 1; attend 0, 0, 0, 0.5, 0.5 }"
)
POOLED = "prompt { attend 1; attend 0.5, 0.5; attend 0.1, 0.1, 0.8; attend 0.1, 0.1, 0.4, 0.4 }"
LAST = "param budget = 9\nscore sum(attn over last 3 queries)"
POOL = "param budget = 9\nscore max_pool(last(attn), 3)"
PRUNES = "param budget = 4\nscore position\ntrigger overflow >= 4\nslack 1\nmax_drop 2"

CORNERS = {
    "more is protected than there is room": (
        "param budget = 2\nscore -position\nkeep where position < 9",
        "prompt { attend 1; attend 0.5, 0.5; attend 0.25, 0.25, 0.5 }\nexpect protected 0..2\nexpect evicted 1",
    ),
    "a sink is not for sale": (
        "param budget = 4\nscore -position\nkeep first 2\nkeep top 3 by position",
        "prompt { attend 1; attend 0.5, 0.5; attend 0.5, 0.25, 0.25; attend 1, 0, 0, 0; attend 1, 0, 0, 0, 0 }\n"
        "expect protected 0..4\nexpect evicted 3",
    ),
    "what yields, by its score": (
        "param budget = 2\nscore -position\nkeep first 1\nkeep where position > 1",
        "prompt { attend 1; attend 0.5, 0.5; attend 0.5, 0.25, 0.25; attend 1, 0, 0, 0 }\nexpect evicted 1, 2",
    ),
    "the last queries of all": (LAST, f"{TURNS}\nexpect score 0.5, 0.25, 0.25, 1.5, 0.5"),
    "the last queries of a prompt": (f"{LAST}\nwhen prefill", f"{TURNS}\nexpect score 0, 0, 0, 1.5, 0.5"),
    "a pool": (f"{POOL}\nkeep last 1", f"{POOLED}\nexpect score 0.1, 0.4, 0.4, 0.4"),
    "a pool whose neighbour is kept": (f"{POOL}\nkeep last 2", f"{POOLED}\nexpect score 0.1, 0.1, 0.4, 0.4"),
    "age": (
        "param budget = 9\nscore sum(age * (attn >= 0)) + 100 * age",
        f"{AGES}\nexpect score 203, 101, 0",
    ),
    "queries that gave something": (
        "param budget = 9\nscore mean(attn where attn > 0)",
        "prompt { attend 1; attend 0, 1; attend 0.5, 0, 0.5 }\nexpect score 0.75, 1, 0.5",
    ),
    "a slack that is too small": (PRUNES, "8 times attend rest 0\nexpect evicted 0..2\nexpect live 5"),
    "a turn of one token": (
        "param budget = 2\nscore position\nwhen prefill",
        "prompt { attend 1; attend 0.5, 0.5 }\nattend rest 0\nexpect evicted nothing\nexpect live 3",
    ),
}  # fmt: skip


@pytest.mark.parametrize("corner", CORNERS)
def test_corners_are_as_the_page_says(corner: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    policy, steps = CORNERS[corner]
    Path("corner.kv").write_text(f'kv 2\n\npolicy Corner {{\n"A corner."\n{policy}\n}}\n', encoding="utf-8")
    Path("corner_test.kv").write_text(
        f'kv 2\nimport "corner.kv"\n\ntest "it" {{\nuse Corner\n{steps}\n}}\n', encoding="utf-8"
    )
    assert "1 passed, 0 failed" in command("test corner_test.kv")


def test_what_the_checker_says_of_corners(tmp_path: Path) -> None:
    warned = {"KV0421": PRUNES, "KV0424": "param budget = 4\nscore position\nkeep first 2\nkeep top 3 by position"}
    for code, policy in warned.items():
        file = tmp_path / "corner.kv"
        file.write_text(f'kv 2\n\npolicy Corner {{\n"A corner."\n{policy}\n}}\n', encoding="utf-8")
        assert [one.code for one in analyse(file).diagnostics] == [code]
        assert code in read("docs/language.md")


def test_a_budget_with_a_point_is_a_rate() -> None:
    assert [tokens_of(tokens_or_rate(given), 400) for given in (1, 1.0, 2.0, 0.25, 0.001)] == [1, 400, 2, 100, 1]


def test_the_language_s_pages_are_short() -> None:
    lines = [line for page in ("docs/seven_words.md", "docs/language.md") for line in read(page).splitlines()]
    assert sum(not line.startswith("<!--") for line in lines) <= 350
