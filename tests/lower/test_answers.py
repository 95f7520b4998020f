"""Which policies rank an answer by itself, behind a prompt that stays: the proof, and that what it makes keeps the same tokens."""

from __future__ import annotations

import numpy as np
import pytest

from kvdsl.compiler import analyse, find_policy
from kvdsl.interp.text import Text
from kvdsl.ir.nodes import Call, Input, Number, Policy, call
from kvdsl.ir.printer import print_policy
from kvdsl.lower.without import statement
from kvdsl.passes.answers import Answers, NotByItselfError, counts_from_the_prompt, least, of_answers
from kvdsl.passes.columns import add_columns
from kvdsl.passes.normal import normal
from kvdsl.shipped import all_policies
from kvdsl.source import SourceFile

SHIPPED = {
    "h2o_answer": None,
    "keydiff_answer": None,
    "lazy_answer": None,
    "rkv_answer": None,
    "random_answer": None,
    "recent_answer": None,
    "roco_easykv": None,
    "raas": 19,  # a page may begin in the prompt and end in the answer
}
"""Those whose budget counts from the prompt on: None where it is proven, else the line that stands against it."""

GIVEN: dict[str, dict[str, float]] = {
    "roco_easykv": {"generated": 8},
    "lazy_answer": {"budget": 8, "window": 2},
    "rkv_answer": {"budget": 8, "window": 3, "buffer": 3},
}
"""Params of those that take more than a budget of 8."""


def policy(text: str) -> Policy:
    found = analyse(SourceFile("<test>", text))
    assert found.ok, [one.message for one in found.diagnostics]
    return found.policy


def written(*lines: str, budget: str = "prompt + generated", kept: str = "keep first prompt") -> Policy:
    body = "\n  ".join(["param generated = 8 in 1..", f"budget {budget}", kept, *lines])
    return policy(f"kv 2\npolicy Written {{\n  {body}\n}}\n")


def test_of_the_shipped_policies_these_are_served_so() -> None:
    found = {}
    for path in all_policies():
        one = analyse(path).policy
        if not counts_from_the_prompt(one):
            with pytest.raises(NotByItselfError, match="budget"):
                of_answers(one)
            continue
        try:
            of_answers(one)
            found[path.stem] = None
        except NotByItselfError as error:
            place = statement(error.what, path.read_text())
            assert place is not None
            found[path.stem] = place[0]
    assert found == SHIPPED


ADMITTED = [
    ("score sum(attn)", "keep last 2"),
    ("score mean(attn) * norm1(v)", "keep top 3 by where(position < prompt, -1, std(attn))"),
    ("score max(sum(attn), 3)", "keep where age < 4"),
    ("score where(position >= prompt, last(attn), 0)",),
    ("score sum(attn over last 3 queries)", "keep last 1"),
    ("score mean(attn) / max(sum(mean(attn) over slots where position >= prompt), 1)",),
    ("score rank(mean(attn) by position < prompt) + rank(-age by position < prompt)",),
    ("score -max(dot(k, j.k) over slots as j where j.position >= prompt and j.position != position)",),
    ("score max_pool(mean(attn), 3)", "keep last 2"),
    ("score mean(mean(attn) over slots by position < prompt) - mean(attn)",),
    ("score fold(max(0.9 * prev, attn), 0)", "trigger overflow >= 3"),
    ("score random()",),
]


@pytest.mark.parametrize("lines", ADMITTED, ids=lambda lines: lines[0])
def test_what_is_made_keeps_of_an_answer_what_the_policy_keeps(lines: tuple[str, ...]) -> None:
    """The interpreter with both, told the same probabilities: of the answer's policy those of its own slots."""
    whole = written(*lines)
    _compare(whole, of_answers(whole), {"generated": 8})


@pytest.mark.parametrize("stem", [stem for stem, line in SHIPPED.items() if line is None])
def test_what_is_made_of_a_shipped_policy_keeps_the_same(stem: str) -> None:
    whole = analyse(find_policy(stem)).policy
    _compare(whole, of_answers(whole), GIVEN.get(stem, {"budget": 8}))


def _compare(whole: Policy, answers: Answers, given: dict[str, float], prompt: int = 7, tokens: int = 40) -> None:
    rng = np.random.default_rng(5)
    both, behind = (_text(one, given) for one in (whole, answers.policy))
    behind.heads[0].seen = prompt
    q_k_v = rng.normal(size=(3, 1, prompt + tokens, 4))
    rows = np.tril(rng.random((prompt, prompt)))
    both.prompt(prompt).observe_rows(both.heads, [rows], q_k_v[1][:, :prompt], q_k_v[2][:, :prompt], {})
    left = 0
    for token in range(prompt, prompt + tokens):
        k, v = q_k_v[1][:, token], q_k_v[2][:, token]
        row = rng.dirichlet(np.full(both.heads[0].live + 1, 0.3))
        both.decoding.observe_row(both.heads, [row], k, v, {})
        own = row[prompt:]
        if token == prompt:
            behind.prompt(1).observe_rows(behind.heads, [own[None]], k[:, None], v[:, None], {})
        else:
            behind.decoding.observe_row(behind.heads, [own], k, v, {})
        kept = both.heads[0].position
        assert kept[:prompt].tolist() == list(range(prompt))
        assert kept[prompt:].tolist() == behind.heads[0].position.tolist()
        left = token + 1 - len(kept)
    assert left >= tokens - 8 - 3


def _text(one: Policy, given: dict[str, float]) -> Text:
    return Text(add_columns(normal(one)), given, 0, 1, heads=1, key_dim=4, value_dim=4)


REFUSED = [
    (("score mean(attn) / max(mean(attn) over slots)",), 6, "reads the prompt's slots, by `max(", "over slots where position >= prompt"),
    (("score rank(mean(attn))",), 6, "ranks tokens together with those of the prompt", "by position < prompt"),
    (("score sum(attn > mean(attn over slots))",), 6, "`mean(attn over slots)`", "where position >= prompt"),
    (("score leverage(k, 0.1)",), 6, "compares tokens with those of the prompt", "leave it out"),
    (("score max(dot(k, j.k) over slots as j where j.position != position)",), 6, "reads the prompt's slots", "j.position >= prompt"),
    (("score sum(attn) * live",), 6, "reads `live`", "leave it out"),
    (("score sum(attn) * prompt",), 6, "reads `prompt`", "leave it out"),
    (("score sum(attn)", "keep last budget / 2"), 7, "reads `budget`", "write `budget - prompt`"),
    (("score sum(attn)", "keep top 3 by mean(attn)"), 7, "may protect prompt tokens", "where(position < prompt, -1"),
    (("score sum(attn)", "keep top 3 by where(position < prompt, 1, mean(attn))"), 7, "may protect prompt tokens", "never lower"),
    (("score sum(attn)", "when prefill"), 7, "evicts nothing of an answer", "leave it out"),
    (("score mean(mean(attn) over heads)",), 6, "is reduced over heads", "leave it out"),
    (("positions compact", "score sum(attn)"), 6, "counts the prompt's tokens", "leave it out"),
]  # fmt: skip


@pytest.mark.parametrize(("lines", "line", "what", "mend"), REFUSED, ids=str)
def test_what_is_not_proven_is_refused_with_the_line(lines: tuple[str, ...], line: int, what: str, mend: str) -> None:
    with pytest.raises(NotByItselfError) as caught:
        of_answers(written(*lines))
    assert what in caught.value.what and mend in caught.value.mend
    body = ["kv 2", "policy Written {", "param generated = 8", "budget prompt + generated", "keep first prompt", *lines]
    place = statement(caught.value.what, "\n".join(body))
    assert place is not None and place[0] == line


def test_the_prompt_must_stay() -> None:
    with pytest.raises(NotByItselfError, match="no `keep` protects all of it"):
        of_answers(written("score sum(attn)", kept="keep first 4"))
    with pytest.raises(NotByItselfError, match="no `keep` protects all of it"):
        of_answers(written("score sum(attn)", kept="keep where position <= prompt / 2"))
    with pytest.raises(NotByItselfError, match="counts tokens of the prompt"):
        of_answers(written("score sum(attn)", "keep first 4"))


def test_protected_tokens_may_not_cost_the_prompt_its_place() -> None:
    """`keep where` yields with `keep top`: the prompt's tokens would be among those that leave. `keep first` yields last."""
    lines = ("score sum(attn)", "keep top 6 by where(position < prompt, -1, mean(attn))", "keep last 2")
    where = of_answers(written(*lines, kept="keep where position < prompt"))
    where.check_room({"generated": 8}, 0, 1)
    with pytest.raises(NotByItselfError, match="more of an answer than the budget keeps"):
        where.check_room({"generated": 7}, 0, 1)
    of_answers(written(*lines)).check_room({"generated": 7}, 0, 1)
    with pytest.raises(NotByItselfError, match="may protect more tokens"):
        of_answers(written("score sum(attn)", "keep where age < 4", kept="keep where position < prompt"))


@pytest.mark.parametrize(
    ("budget", "counts"),
    [
        ("prompt + generated", True),
        ("generated + prompt - 1", True),
        ("where(layer < 2, prompt + generated, prompt + 4)", True),
        ("2 * prompt", False),
        ("prompt + prompt", False),
        ("max(prompt, generated)", False),
        ("where(layer < 2, prompt + generated, 4)", False),
        ("generated", False),
    ],
)
def test_which_budgets_count_from_the_prompt(budget: str, counts: bool) -> None:
    found = written("score sum(attn)", budget=budget)
    assert counts_from_the_prompt(found) is counts
    if counts:
        made = of_answers(found).policy
        assert made.budget is not None and "prompt" not in print_policy(made).replace("the prompt", "")


def test_lower_bounds() -> None:
    attn, position, k = (Input(name=name) for name in ("attn", "position", "k"))
    assert least(call("+", attn, Number(value=-2))) == -2
    assert least(call("*", attn, Number(value=3))) == 0
    assert least(call("max", position, Number(value=5))) == 5
    for unknown in (
        k,
        call("-", attn, position),
        call("*", attn, Number(value=-1)),
        call("max", k, attn),
        call("log", attn),
    ):
        assert isinstance(unknown, (Call, Input)) and least(unknown) is None
