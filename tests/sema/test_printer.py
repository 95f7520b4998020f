"""What is printed of a policy can be read again and means the same: a folded `-2` is read as a negated 2, which folds again."""

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from kvdsl.ir.nodes import ColumnRef, Policy
from kvdsl.ir.printer import print_expression, print_policy
from kvdsl.passes.fold import fold
from tests.diagnostics.expect import body, check

EVERYTHING = {
    "evicts": """
      param budget tokens = 64 in 8..4096; param n = 2 ** 3; param by = 3 in ..9; param queries = 4; param dims = 1 in 1..
      score max_pool(ema(attn * -n, 1 / n) + sum(attn over last queries + 1 queries), n - 1) - mean_pool(age, dims) ** -2
      keep first n; keep last by; keep top n / 2 by std(attn over last 2 queries); keep where position % 7 == (n < 3)
      trigger overflow >= n; slack n - 2; max_drop n - 3; cap hard; victims shared by heads; layers 2..layers - 3; group max
      positions compact; rope cached; storage blocks 2 * n; prefill blocks of n + 1
    """,
    "shares": """
      param budget = 64; score sum(attn) / count(); keep last 0; when prefill; budget 2 * budget + 1 across heads floor 1 / 3
    """,
    "layers share": """
      param budget = 64; param n = 2; score sum(attn); when prefill
      budget 4 * n across heads floor 1 / 3 across layers by -sum(max(age over slots) over heads) * n floor n / 4
    """,
    "one pool": "param budget = 64; score sum(attn); when prefill; budget budget across layers floor 0.5",
    "selects": """
      param tokens = 64; param dims = 16; param top = 2
      sketch top dims dims by abs(q) * mean(k over slots) every top ** 3 queries
      select top tokens by max(dot(q, k over sketch), -max(k over sketch)) in layers top..layers / 2
    """,
    "by pages": """
      budget prompt + 250; score max(norm2(k) * layer over page); keep first 4; pages 2 ** 4
      select top 8 by sum(max(q * min(k over page), q * max(k over page)) over dims) in layers ..2.5
    """,
    "everywhere": "param budget = 3; score age; budget budget across heads; when prefill; layers ..; pages 2; select top 1 by age",
}


def again(policy: Policy) -> tuple[Policy, ...]:
    return check(print_policy(policy)).policies


@pytest.mark.parametrize("text", EVERYTHING.values(), ids=EVERYTHING)
def test_every_statement(text: str) -> None:
    policy = check(body(text)).policy
    assert again(policy) == (policy,)
    assert tuple(map(fold, again(fold(policy)))) == (fold(policy),)


NUMBERS = st.sampled_from(["3", "n", "2 + n", "n / 2", "layers - 1", "max(1, n)", "-n ** 2 + 99", "(n < 9)"])
PLAIN = st.sampled_from(["age", "sum(attn)", "random()", "norm1(v)", "count()", "-position", "last(max(q * k over dims))"])


def _grown(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    return st.one_of(
        st.builds("({} {} {})".format, inner, st.sampled_from(["+", "-", "*", "**", "%"]), inner),
        st.builds("where({} > {}, {}, {})".format, inner, NUMBERS, inner, inner),
        st.builds("sum(attn * {} over last {} queries)".format, NUMBERS, NUMBERS),
        st.builds("ema(abs(attn - {}), 1 / max(2, {}))".format, NUMBERS, NUMBERS),
        st.builds("sum({}(k over page) * v over dims)".format, st.sampled_from(["min", "max"])),
        st.builds("-{}".format, inner),
    )


SCORES = st.recursive(PLAIN, _grown, max_leaves=6)
STATEMENTS = st.one_of(
    st.builds("keep top {} by {}".format, NUMBERS, SCORES),
    st.builds("keep where {} < {}".format, SCORES, NUMBERS),
    st.builds("select top {} by dot(q, k) * {} in layers {}..".format, NUMBERS, NUMBERS, st.sampled_from(["", "1", "n"])),
    st.builds("layers ..{}".format, NUMBERS),
    st.builds("prefill blocks of {}".format, NUMBERS),
    st.builds("budget 4 * n + 64 across heads floor 1 / {}".format, NUMBERS),
    st.builds("slack {}".format, NUMBERS),
    st.sampled_from(["when prefill", "when decode", "cap hard", "keep last 0", "victims shared by layers", "positions compact"]),
)  # fmt: skip


@pytest.mark.nightly
@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(SCORES, st.sampled_from(["max_pool({}, {})", "{} + {}"]), NUMBERS, st.lists(STATEMENTS, max_size=4))
def test_random_policies(score: str, form: str, number: str, statements: list[str]) -> None:
    analysis = check(
        body("param n = 4", "param budget = 512", "pages n", f"score {form.format(score, number)}", *statements)
    )
    assume(analysis.ok)
    assert again(analysis.policy) == (analysis.policy,)
    assert tuple(map(fold, again(fold(analysis.policy)))) == (fold(analysis.policy),)


def test_what_passes_make_is_readable() -> None:
    assert print_expression(ColumnRef(name="attn_last_32", op="mean")) == "mean(attn_last_32)"
