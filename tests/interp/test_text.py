"""A row's text: what a prompt is, and what the numbers are after each."""

from __future__ import annotations

import numpy as np
import pytest

from kvdsl.compiler import analyse
from kvdsl.interp import Text
from kvdsl.ir.nodes import Policy
from kvdsl.passes.columns import add_columns
from kvdsl.source import SourceFile


def policy(body: str, *, columns: bool = True) -> Policy:
    found = analyse(SourceFile("p.kv", f'kv 1\npolicy P {{\n"a test"\n{body}\n}}\n')).policy
    return add_columns(found) if columns else found


def run(text: Text, *forwards: int) -> list[list[int]]:
    """What the only head keeps after each forward of so many tokens."""
    rng, kept = np.random.default_rng(1), []
    for tokens in forwards:
        q, k, v = (rng.standard_normal((1, tokens, 4)) for _ in range(3))
        text.forward(q[:, :, None], k, v)
        kept.append(sorted(text.heads[0].position.tolist()))
    return kept


def test_a_rate_is_of_all_tokens_up_to_the_last_prompts_end() -> None:
    text = Text(policy("param budget = 8\nscore position"), {"budget": 0.25}, key_dim=4, value_dim=4)
    kept = run(text, 4, 1, 1, 18, 1)
    assert [len(positions) for positions in kept] == [1, 1, 1, 6, 6]
    assert kept[3] == [18, 19, 20, 21, 22, 23]


@pytest.mark.parametrize("columns", [True, False])
def test_who_evicts_in_prompts_does_so_in_every_one(columns: bool) -> None:
    text = Text(policy("param budget = 3\nwhen prefill\nscore sum(attn)", columns=columns), key_dim=4, value_dim=4)
    assert [len(positions) for positions in run(text, 5, 1, 1, 4, 1)] == [3, 4, 5, 3, 4]


def test_a_budget_that_reads_the_prompt_and_a_first_token_alone() -> None:
    text = Text(policy("budget prompt / 2 + 1\nscore position"), key_dim=4, value_dim=4)
    assert [len(positions) for positions in run(text, 1, 1, 2, 4)] == [1, 1, 3, 5]


def test_what_remembers_a_number_of_queries_by_the_prompt_takes_one() -> None:
    text = Text(policy("param budget = 8\nscore sum(attn over last prompt / 4 queries)"), key_dim=4, value_dim=4)
    run(text, 12, 1)
    with pytest.raises(ValueError, match="number of queries that depends on the prompt, and more of a prompt came"):
        run(text, 12)


def test_a_rate_is_of_the_prompt_that_is_expected() -> None:
    text = Text(policy("param budget = 8\nscore position"), {"budget": 0.5}, key_dim=4, value_dim=4, expected=12)
    assert [len(positions) for positions in run(text, 1, 1, 3, 5, 1, 9)] == [1, 2, 5, 6, 6, 10]
