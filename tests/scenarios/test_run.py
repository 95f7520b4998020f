"""How tests run: what they are given, what is compared, and what is said of a failure."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.scenarios.harness import failures, outcome, own_outcome

H2O = ("use H2O", "set budget = 2", "set recent = 1")
PROMPT = "prompt { attend 1; attend 0.5, 0.5 }"


def test_what_is_as_expected_passes() -> None:
    assert outcome(*H2O, PROMPT, "attend 0.5, 0.25, 0.25", "expect evicted 1", "expect kept 0, 2").passed


@pytest.mark.parametrize(
    ("expected", "message"),
    [
        ("evicted 0", "evicted: expected 0, found 1"),
        ("evicted nothing", "evicted: expected nothing, found 1"),
        ("evicted 0..1", "evicted: expected 0, 1, found 1"),
        ("kept 0, 1", "kept: expected 0, 1, found 0, 2"),
        ("kept nothing", "kept: expected nothing, found 0, 2"),
        ("protected 1", "protected: expected 1, found 2"),
        ("score 2, 0.75, 0.5", "score: expected 2, 0.75, 0.5, found 2, 0.75, 0.25"),
        ("score 2, 0.75", "score: expected 2, 0.75, found 2, 0.75, 0.25"),
        ("score rest 2", "score: expected 2, 2, 2, found 2, 0.75, 0.25"),
        ("score nan, 0.75, 0.25", "score: expected nan, 0.75, 0.25, found 2, 0.75, 0.25"),
        ("attn 0.5, 0.25, 0.26", "attn: expected 0.5, 0.25, 0.26, found 0.5, 0.25, 0.25"),
        ("state sum_attn 1, 0.75, 0.25", "sum_attn: expected 1, 0.75, 0.25, found 2, 0.75, 0.25"),
        ("live 3", "live: expected 3, found 2"),
    ],
)
def test_what_is_not_as_expected_fails_at_its_step(expected: str, message: str) -> None:
    steps = (*H2O, PROMPT, "attend 0.5, 0.25, 0.25", f"expect {expected}")
    assert failures(*steps) == [(message, f"expect {expected}")]


def test_every_failure_is_told_and_shows_what_the_policy_went_by() -> None:
    found = outcome(*H2O, PROMPT, "attend 0.5, 0.25, 0.25", "expect evicted 0", "expect kept 0, 2", "expect live 3")
    assert [failure.span.text for failure in found.failures] == ["expect evicted 0", "expect live 3"]
    assert found.failures[0].state == (
        "position   0    1     2",
        "attn       0.5  0.25  0.25",
        "sum_attn   2    0.75  0.25",
        "protected  .    .     yes",
        "score      2    0.75  0.25",
        "evicted    .    yes   .",
    )


def test_what_keep_top_ranks_by_is_shown() -> None:
    steps = ("use RoCo", "set budget = 1", "set protect = 1", PROMPT, "expect evicted 1")
    (failure,) = outcome(*steps).failures
    assert "keep top by       0.25  0" in failure.state


def test_numbers_agree_within_a_millionth() -> None:
    steps = (*H2O, "attend 1")
    assert outcome(*steps, "expect score 1.0000009").passed
    assert not outcome(*steps, "expect score 1.000003").passed
    assert outcome(*H2O, "attend 1000000", "expect score 1000000.9").passed


def test_no_number_is_as_expected_where_it_is_expected() -> None:
    assert outcome(*H2O, "attend nan", "expect score nan").passed
    assert outcome(*H2O, "attend -inf", "expect score -inf").passed
    assert not outcome(*H2O, "attend 1", "expect score nan").passed


def test_rows_need_not_sum_to_1_but_have_the_right_count() -> None:
    assert outcome(*H2O, PROMPT, "attend 7, 0, 0", "expect evicted 1").passed
    message = "expected 3 numbers, for the tokens 0, 1, 2, not 2"
    assert failures(*H2O, PROMPT, "attend 0.5, 0.5", "expect evicted 1") == [(message, "0.5, 0.5")]
    message = "expected 3 numbers, for the tokens 0, 2, 3, not 4"
    steps = (*H2O, PROMPT, "attend 0.5, 0.25, 0.25", "attend 1, 1, 1, 1", "expect live 9")
    assert failures(*steps) == [(message, "1, 1, 1, 1")]  # and the test goes no further


def test_heads_are_given_and_expected_apart() -> None:
    steps = (*H2O, PROMPT, "attend 0.5, 0.25, 0.25 / 0, 1, 0")
    assert outcome(*steps, "expect evicted 1 / 0", "expect score 2, 0.75, 0.25 / 1.5, 1.5, 0", "expect live 2").passed
    assert failures(*steps, "expect evicted 1") == [("evicted in KV head 1: expected 1, found 0", "expect evicted 1")]
    message = "expected 4 numbers, for the tokens 0, 1, 2, 3, not 3 in KV head 1"
    assert failures("use H2O", PROMPT, "attend rest 1", "attend rest 1 / 1, 1, 1", "expect live 4") == [(message, "1, 1, 1")]


def test_values_and_keys() -> None:
    steps = (
        "use VATP_H2O",
        "set budget = 2",
        "set recent = 1",
        "set sinks = 0",
        "prompt { attend 1 value 2, -2; attend 1, 1 }",
    )
    assert outcome(*steps, "expect score 8, 0", "attend 1, 1, 1 value 1, 0", "expect evicted 1").passed


def test_attention_follows_from_vectors() -> None:
    """Softmax of q · k; 0.880797 is that of 2 against 0."""
    steps = ("use H2O", "prompt { token key 2, 1; token query 1, 0 }")
    assert outcome(*steps, "expect attn 0.880797, 0.119203").passed
    assert outcome(*steps, "token key 1, 1", "expect attn 0.333333, 0.333333, 0.333333").passed  # a query of zeros


def test_query_heads_are_averaged() -> None:
    steps = ("use H2O", "token key 2 query 0 and 0", "token key 0 query 1 and 0")
    assert outcome(*steps, "expect attn 0.690399, 0.309601").passed  # of 0.880797 and 0.5


def test_tokens_without_a_prompt_come_one_by_one() -> None:
    """So that the policy settles after each."""
    assert outcome("use TOVA", "set budget = 1", "attend 1", "attend 0.5, 0.2", "attend 0.1, 0.3", "expect kept 2").passed
    assert outcome("use SnapKV", "set budget = 32", "40 times attend rest 1", "expect live 40").passed


def test_a_prompt_settles_once() -> None:
    steps = ("use TOVA", "set budget = 1", "prompt { attend 1; attend 0.5, 0.2; attend 0.5, 0.1, 0.3 }")
    assert outcome(*steps, "expect evicted 1, 2", "expect kept 0").passed


def test_the_text_says_whether_a_budget_is_a_rate() -> None:
    prompt = "prompt { 8 times attend rest 0 }"
    for budget, live in (("1.0", 8), ("1", 1), ("0.5", 4), ("2.0", 2)):
        assert outcome("use TOVA", f"set budget = {budget}", prompt, f"expect live {live}").passed


def test_a_chat_has_a_prompt_each_turn() -> None:
    """A quarter of 8 tokens, then of 8, one that was decoded and 7: the budget follows, and nothing else makes room."""
    first = ("use TOVA", "set budget = 0.25", "prompt { 8 times attend rest 0 }", "expect kept 6, 7")
    assert outcome(*first, "attend 0, 1, 0", "expect kept 7, 8").passed
    later = "prompt { attend rest 0; attend 1, rest 0; 5 times attend rest 0 }"
    assert outcome(*first, "attend 0, 1, 0", later, "expect kept 12..15").passed
    steps = ("use SnapKV", "set budget = 32", "40 times attend rest 1", "expect live 40", "prompt { 2 times attend rest 1 }")
    assert outcome(*steps, "expect live 32").passed


def test_a_prompt_attends_to_what_was_kept() -> None:
    steps = (
        "use TOVA",
        "set budget = 1",
        "prompt { attend 1; attend 1, 0 }",
        "expect kept 0",
        "prompt { attend 1, 0; attend 0, 1, 0 }",
    )
    assert outcome(*steps, "expect attn 0, 1, 0", "expect kept 2").passed
    assert failures("use TOVA", "prompt { 2 times attend rest 0 }", "prompt { 2 times attend 1 }", "expect live 4") == [
        ("expected 3 numbers, for the tokens 0, 1, 2, not 1", "1")
    ]


def test_the_layer_is_known() -> None:
    tokens = ("set tokens = 1", "set dims = 1", "prompt { 3 times token query 1 }", "token query 1")
    assert outcome("use SparCas at layer 1 of 4", *tokens, "expect selected 0..3").passed
    assert outcome("use SparCas at layer 2 of 4", *tokens, "expect selected 3").passed


# -- refusals that only the prompt makes known -------------------------------------------------------------------------


def test_a_refusal_at_run_time_can_be_expected() -> None:
    steps = ("use SnapKV", "set budget = 0.5", "prompt { 40 times attend rest 0 }")
    message = "32 tokens are kept first and last, but the budget holds 20"
    assert outcome(*steps, 'expect error "budget holds 20"').passed
    assert failures(*steps, "expect live 20") == [(message, '"it works"')]
    assert failures(*steps, 'expect error "nonsense"') == [(message, 'expect error "nonsense"')]


def test_what_a_refused_policy_never_came_to_is_a_failure() -> None:
    """Whether the numbers alone refuse it, or the prompt does."""
    told = "nothing can be expected here: the policy was refused earlier"
    late = (
        "use SnapKV",
        "set budget = 0.5",
        "prompt { 40 times attend rest 0 }",
        "expect kept 77",
        'expect error "budget holds"',
    )
    assert failures(*late) == [(told, "expect kept 77")]
    early = (
        "use StreamingLLM",
        "set budget = 2",
        "prompt { attend 1; attend 1, 0 }",
        "expect live 12",
        'expect error "protect"',
    )
    assert failures(*early) == [(told, "expect live 12")]
    before = ("prompt { 100 times attend rest 0 }", "expect live 50", *late[2:3], late[-1])
    assert failures("use SnapKV", "set budget = 0.5", *before) == [
        ("expected an error, but `SnapKV` accepts this", late[-1])
    ]


def test_without_tokens_a_rate_is_refused_where_no_prompt_bears_it() -> None:
    """Half of a short prompt may be too little, and half of a long one is not."""
    steps = ("use StreamingLLM", "set budget = 0.5", 'expect error "kept first and last"')
    assert failures(*steps) == [("expected an error, but `StreamingLLM` accepts this", steps[-1])]


def test_an_error_that_does_not_come_is_a_failure() -> None:
    message = "expected an error, but `H2O` accepts this"
    assert failures(*H2O, 'expect error "budget"') == [(message, 'expect error "budget"')]


def test_a_sketch_of_more_dims_than_there_are_is_refused() -> None:
    steps = ("use SparCas at layer 2 of 3", "set dims = 3", "token query 1, 2")
    assert outcome(*steps, 'expect error "3 dims, but the vectors have 2"').passed


def test_many_tokens_are_shown_in_parts() -> None:
    (failure,) = outcome("use Full", "prompt { 20 times attend rest 0 }", "expect live 1").failures
    assert [line.split()[1:3] for line in failure.state if line.startswith("position")] == [["0", "1"], ["16", "17"]]


def test_the_very_first_token_is_a_prompt(tmp_path: Path) -> None:
    """As a cache takes it: `prompt` is 1 from then on."""
    first = "param budget = 2\n  score position\n  keep first prompt\n  keep last 0"
    for begins in ("attend 1", "prompt { attend 1 }"):
        assert own_outcome(tmp_path, first, begins, "expect protected 0", "2 times attend rest 1", "expect evicted 1").passed


def test_a_rate_of_a_prompt_that_comes_token_by_token_is_refused() -> None:
    steps = ("use TOVA", "set budget = 0.5", "attend 1", "attend 0.5, 0.5", "expect live 1")
    ((message, at),) = failures(*steps)
    assert (message, at) == (
        "`budget` of TOVA is a ratio of the prompt, but the prompt is a single token",
        "attend 0.5, 0.5",
    )
    assert not failures(*steps[:-1], 'expect error "is a ratio of the prompt"')
    assert not failures(
        "use TOVA", "set budget = 0.5", "prompt { 4 times attend rest 1 }", "attend 1, rest 0", "expect live 2"
    )


def test_vectors_that_no_token_brings_are_zero(tmp_path: Path) -> None:
    assert own_outcome(tmp_path, "param budget = 4\n  score norminf(v) + 1", "prompt { attend 1 }", "expect score 1").passed
