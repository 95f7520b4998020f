"""Reductions that remember, pools, pages and sketches: what they become, and what is refused."""

import pytest

from kvdsl.ir.nodes import PREVIOUS, Axis, Expr, Fold, Input, Number, Other, ParamRef, Reduce, call
from kvdsl.ir.printer import print_expression, print_policy
from kvdsl.ir.visitors import axes_of
from tests.diagnostics.expect import REDUCTIONS, body, check, expect_in, only, policy

ATTN = Input(name="attn")


def score(text: str, *statements: str) -> Expr:
    checked = policy("param budget = 64", *statements, f"score {text}").score
    assert checked is not None
    return checked


def test_ema() -> None:
    expected = Reduce(op="ema", axis=Axis.QUERY, body=ATTN, argument=Number(value=0.9))
    assert score("ema(attn, 0.9)") == expected
    assert score("ema(attn over queries, 0.9)") == expected
    assert print_expression(score("max(0, ema(dot(q, k), 1 / layers))")) == "max(0, ema(sum(q * k over dims), 1 / layers))"


def test_folds() -> None:
    step = call("max", call("*", Number(value=0.9), PREVIOUS), ATTN)
    expected = Fold(body=step, start=Number(value=0))
    assert score("fold(max(0.9 * prev, attn), 0)") == score("fold(max(0.9 * prev, attn) over queries, 0)") == expected
    assert print_expression(expected) == "fold(max(0.9 * prev, attn), 0)"
    assert print_expression(score("fold(prev + age over prunes, position)")) == "fold(prev + age over prunes, position)"
    assert axes_of(expected) == {Axis.SLOT}
    nested = score("fold(prev + fold(prev / 2 + attn, 1), 0)")
    assert print_expression(nested) == "fold(prev + fold(prev / 2 + attn, 1), 0)"


def test_pools() -> None:
    expected = call("max_pool", Reduce(op="sum", axis=Axis.QUERY, body=ATTN), Number(value=7))
    assert score("max_pool(sum(attn), 7)") == expected
    assert score("-mean_pool(age, prompt)") == call("neg", call("mean_pool", Input(name="age"), Input(name="prompt")))


def test_the_next_page() -> None:
    assert score("min(age over next page)", "pages 8") == Reduce(
        op="min", axis=Axis.SLOT, body=Input(name="age"), within="next"
    )
    checked = score("dot(k, max(k over next page))", "pages 8 after 4")
    assert print_expression(checked) == "sum(k * max(k over next page) over dims)"
    written = policy("param budget = 64", "param first = 4", "pages 8 after first", "score sum(age over next page)")
    assert written.pages_after == ParamRef(name="first")
    assert "pages 8 after first\n" in print_policy(written)
    assert only(body("param budget = 8", "score sum(age over next page)"), "KV0416")
    found = only(body("param budget = 8", "pages 4 after live", "score sum(age over page)"), "KV0308")
    assert found.message == "`live` changes from step to step, so the beginning of `pages` cannot read it"


def test_others() -> None:
    key, other = Input(name="k"), Other(body=Input(name="k"))
    product = Reduce(op="sum", axis=Axis.DIM, body=call("*", key, other))
    assert axes_of(product) == {Axis.SLOT, Axis.OTHER}
    assert score("max(dot(k, other(k)) over others)") == Reduce(op="max", axis=Axis.OTHER, body=product)
    vectors = "norm2(mean(k - other(k) over others))"
    assert axes_of(score(vectors)) == {Axis.SLOT}
    nested = "sum(where(other(max(other(position) over others)) == position, 0, 1) over others)"
    others = "over slots as j where j.position != position"
    assert print_expression(score(nested)) == f"sum(where(j.(max(j.position {others})) == position, 0, 1) {others})"
    assert policy("param budget = 64", "score age", "keep where max(where(other(age > 3), 1, 0) over others) == 1").keeps
    message = "what `select` ranks by cannot read `over others`: slots are compared in a settle, not for every query"
    assert only(body("select top 5 by dot(q, k) * max(other(age) over others)"), "KV0315").message == message
    prompt = ("param budget = 8", "when prefill", "score max(mean(dot(q, k) over text) * other(age) over others)")
    message = "slots are compared per KV head, so `over others` cannot read values per query head"
    assert only(body(*prompt), "KV0325").message == message


@pytest.mark.parametrize("text", ["sum(dot(q, k) over last 3 queries)", "ema(attn, 0.5)", "max_pool(age, 3)"])
def test_what_the_ir_says_of_axes_is_what_was_checked(text: str) -> None:
    assert axes_of(score(text)) == {Axis.SLOT}


EMA = "`ema(x, d)` is `fold(d * prev + (1 - d) * x, x)`"


@pytest.mark.parametrize(
    ("text", "code", "message", "at", "help"),
    [
        ("ema(attn)", "KV0306", "`ema` needs its argument `d`", "ema(attn)", "its form is `ema(x, d)`"),
        ("ema(attn, decay = 0.9)", "KV0306", "`ema` has no argument named `decay`", "decay", "its arguments are `x` and `d`"),
        ("ema(attn, 0.9 over slots)", "KV0306", "`ema` reduces nothing `over slots`", "over slots", "leave it out"),
        ("ema(age over slots, 0.5)", "KV0308", "a fold starts with a value known when the token arrives, which `age` is not",
         "ema(age over slots, 0.5)", EMA),
        ("ema(attn over last 3 queries, 0.5)", "KV0306", "`ema` reduces nothing `over last 3 queries`",
         "over last 3 queries", "leave it out"),
        ("last(attn over last 3 queries)", "KV0306", "`last` reduces nothing `over last 3 queries`", "over last 3 queries", "leave it out"),
        ("ema(sum(attn), 0.5)", "KV0305",
         "a fold runs query by query, so it cannot contain a reduction over all queries, only another fold over queries",
         "ema(sum(attn), 0.5)", EMA),
        ("ema(age, 0.5)", "KV0308", "a fold starts with a value known when the token arrives, which `age` is not", "ema(age, 0.5)", EMA),
        ("ema(random(), 0.5)", "KV0308", "a fold starts with a value known when the token arrives, which `random()` is not",
         "ema(random(), 0.5)", EMA),
        ("sum(ema(attn, 0.5))", "KV0305", "a reduction over queries cannot stand inside `sum(...)`, which is one as well",
         "ema(attn, 0.5)", "one of them is enough: `ema(attn, 0.5)`, or over the slots `sum(ema(attn, 0.5) over slots)`"),
        ("sum(attn over last live queries)", "KV0308",
         "`live` changes from step to step, so the N of `over last N queries` cannot read it", "live",
         "it can read params, `budget`, `prompt`, `layer`, `layers` and `everything`"),
        ("sum(attn over last max(age over slots) queries)", "KV0308",
         "the N of `over last N queries` cannot depend on what is cached, as `max(age over slots)` does",
         "max(age over slots)", "it can read params, `budget`, `prompt`, `layer`, `layers` and `everything`"),
        ("max_pool(age)", "KV0306", "`max_pool` takes a value and a width", "max_pool(age)", "write `max_pool(age, 7)`"),
        ("max_pool(age over slots, 3)", "KV0306", "`max_pool` is not a reduction of one value, so `over` has no meaning here",
         "over slots", REDUCTIONS),
        ("max_pool(attn, 7)", "KV0313", "`max_pool` pools along the slots, but `attn` has one number per query and slot",
         "attn", "reduce it over queries: `max_pool(sum(attn), 7)`"),
        ("max_pool(v, 7)", "KV0313", "`max_pool` pools along the slots, but `v` has one number per slot and dim", "v", None),
        ("mean_pool(3, 7)", "KV0313", "`mean_pool` pools along the slots, but `3` is a single number", "3", None),
        ("mean(max_pool(age, 7) over page)", "KV0313", "a pool cannot stand inside a reduction, as `mean(...)` is one",
         "mean(max_pool(age, 7) over page)", "pool the score as a whole"),
        ("mean(attn * max_pool(age, 7))", "KV0313", "a pool cannot stand inside a reduction, as `mean(...)` is one",
         "mean(attn * max_pool(age, 7))", "pool the score as a whole"),
        ("max_pool(1 + max_pool(age, 7), 7)", "KV0313", "a pool cannot stand inside another one",
         "max_pool(1 + max_pool(age, 7), 7)", "pool the score as a whole"),
        ("dot(q, k over slots)", "KV0306", "`dot` reduces nothing `over slots`", "over slots", "leave it out"),
        ("dot(q, k over last 3 queries)", "KV0306", "`dot` reduces nothing `over last 3 queries`", "over last 3 queries", "leave it out"),
        ("max(q over page)", "KV0304", "`q` has no slots to reduce over: it is one number per query and dim", "q",
         "did you mean `max(q over dims)`?"),
        ("max(attn over page)", "KV0312",
         "`over page` needs a value that does not depend on the query, but `attn` has one number per query and slot",
         "attn", "`max(sum(attn) over page)`, say"),
        ("sum(max(q * k over page) over dims)", "KV0312",
         "`over page` needs a value that does not depend on the query, but `q * k` has one number per query, slot and dim", "q * k", None),
        ("max(random() over page)", "KV0311", "`random()` cannot be reduced over pages", "random()", "move it out of the reduction"),
        ("rank(attn over queries)", "KV0306", "`rank` is a place among slots, or among those of a page, or of all KV heads of the layer",
         "rank(attn over queries)", "write `rank(attn)`"),
        ("rank(age over next page)", "KV0306", "`rank` is a place among slots, or among those of a page, or of all KV heads of the layer",
         "rank(age over next page)", "write `rank(age)`"),
        ("median(age over next page)", "KV0306", "`median` reduces over slots and the last N queries only",
         "median(age over next page)", "write `median(age over slots)`"),
        ("sum(attn * min(attn over next page))", "KV0312",
         "`over page` needs a value that does not depend on the query, but `attn` has one number per query and slot", "attn",
         "`min(sum(attn) over page)`, say"),
        ("rank(age, 3)", "KV0306", "`rank` orders by exactly one value", "rank(age, 3)", "for example `rank(sum(attn))`"),
        ("rank(budget)", "KV0320", "`rank` orders slots by one number each, but `budget` is a single number", "budget", None),
        ("rank(k)", "KV0320", "`rank` orders slots by one number each, but `k` has one number per slot and dim", "k",
         "reduce it over dims: `rank(sum(k over dims))`"),
        ("sum(rank(dot(q, q)))", "KV0320", "`rank` orders slots by one number each, but `dot(q, q)` has one number per query",
         "dot(q, q)", None),
        ("sum(rank(attn over page))", "KV0312",
         "`over page` needs a value that does not depend on the query, but `attn` has one number per query and slot",
         "attn", "`rank(sum(attn) over page)`, say"),
        ("mean(rank(max_pool(age, 3)) over page)", "KV0313", "a pool cannot stand inside a reduction, as `mean(...)` is one",
         "mean(rank(max_pool(age, 3)) over page)", "pool the score as a whole"),
        ("fold(attn)", "KV0306", "`fold` takes two arguments: the next value, in terms of `prev`, and the first one", "fold(attn)",
         "for example `fold(max(0.9 * prev, attn), 0)`"),
        ("fold(attn, 0)", "KV0306", "a fold continues from `prev`, which `attn` does not read", "attn", "`last(attn)` is the newest one"),
        ("fold(age over prunes, 0)", "KV0306", "a fold continues from `prev`, which `age` does not read", "age", "leave the fold out"),
        ("fold(attn + fold(prev + attn, 0), 0)", "KV0306",
         "a fold continues from `prev`, which `attn + fold(prev + attn, 0)` does not read",
         "attn + fold(prev + attn, 0)", "`last(attn + fold(prev + attn, 0))` is the newest one"),
        ("fold(prev + attn over slots, 0)", "KV0307", "a fold ranges over queries or prunes", "over slots", "write `fold(prev + attn, 0)`"),
        ("fold(prev + q * k, 0)", "KV0304",
         "a fold has one number per slot and query, but `prev + q * k` has one number per query, slot and dim",
         "prev + q * k", "reduce it over dims: `sum(prev + q * k over dims)`"),
        ("fold(prev + attn over prunes, 0)", "KV0304",
         "a fold has one number per slot and prune, but `prev + attn` has one number per query and slot",
         "prev + attn", "reduce the part that varies over queries"),
        ("fold(prev + sum(attn), 0)", "KV0305",
         "a fold runs query by query, so it cannot contain a reduction over all queries, only another fold over queries",
         "prev + sum(attn)", None),
        ("fold(prev + fold(prev + age over prunes, 0), 0)", "KV0305", "a fold over prunes cannot stand in another fold",
         "prev + fold(prev + age over prunes, 0)", None),
        ("sum(attn * fold(prev + attn, 0))", "KV0305", "a reduction over queries cannot stand inside `sum(...)`, which is one as well",
         "attn * fold(prev + attn, 0)", "move the inner reduction out of the outer one"),
        ("fold(sum(attn * prev) over prunes, 0)", "KV0305",
         "`prev` of a fold over prunes belongs to no query, and cannot stand in a reduction over queries", "sum(attn * prev)",
         "read `prev` outside of the reduction"),
        ("fold(prev + max_pool(age, 3) over prunes, 0)", "KV0313", "a pool cannot stand inside a fold",
         "fold(prev + max_pool(age, 3) over prunes, 0)", "pool the score as a whole"),
        ("fold(prev + attn, live)", "KV0308", "a fold starts with a value known when the token arrives, which `live` is not", "live",
         "start with a number, `position`, a value of its key or value, or of the first query"),
        ("mean(attn over text)", "KV0324", "`over text` ranges over queries that never saw the slot, so it cannot read `attn`", "attn",
         "`logit` is `dot(q, k) * scaling`"),
        ("max(random() * dot(q, k) over text)", "KV0324",
         "`over text` ranges over queries that never saw the slot, so it cannot read `random()`", "random() * dot(q, k)", None),
        ("mean(dot(q, k) over text)", "KV0324", "the prompt's queries are dropped once it has settled, so `over text` needs `when prefill`",
         "mean(dot(q, k) over text)", "add `when prefill`"),
        ("max(k over dims after 3)", "KV0307", "only `over text` takes `after N`, not `over dims`", "over dims after 3",
         "write `over dims`"),
        ("norm2(turn(v, 3))", "KV0323", "`turn` rotates a vector over the dims of a key, but `v` is not one", "v",
         "for example `turn(k, ...)`"),
        ("norm2(pairs(age))", "KV0323", "`pairs` rotates a vector over the dims of a key, but `age` is not one", "age",
         "for example `pairs(k)`"),
        ("norm2(turn(k, v))", "KV0323",
         "`turn` rotates all dims by the same number of positions, but `v` has one number per slot and dim", "v", None),
        ("norm2(turn(k))", "KV0306", "`turn` takes 2 arguments, but 1 is given", "turn(k)", "for example `turn(k, -position)`"),
        ("norm2(ahead(k, 0))", "KV0410", "how far `ahead` looks lies between 1 and 65536, but `0` is 0", "0", None),
        ("leverage(age, 1)", "KV0304", "`leverage` takes a vector of each slot, but `age` has one number per slot", "age",
         "for example `leverage(k, 0.01)`"),
        ("sum(age over others)", "KV0325", "`over others` compares a slot with each other slot, but `age` reads no other slot", "age",
         "`other(age)` is the value of the other slot"),
        ("sum(live over others)", "KV0325", "`over others` compares a slot with each other slot, but `live` reads no other slot", "live",
         "leave the reduction out"),
        ("sum(other(attn) over others)", "KV0325",
         "only a value that does not depend on the query can be read of another slot, but `attn` has one number per query and slot", "attn",
         "reduce it over queries: `other(mean(attn))`"),
        ("sum(attn * other(age) over others)", "KV0325",
         "slots are compared by values that do not depend on the query, but `attn * other(age)` "
         "has one number per query, slot and other slot",
         "attn * other(age)", "reduce the part that varies over queries"),
        ("other(age) + 1", "KV0301", "a score has one number per slot, but `other(age) + 1` has one number per other slot",
         "other(age) + 1", "reduce it over others: `sum(other(age) + 1 over others)`"),
        ("sum(dot(k, other(k)) over slots)", "KV0325", "`sum` cannot read another slot: only a reduction `over others` reads `other(...)`",
         "sum(dot(k, other(k)) over slots)", "reduce it first: `sum(dot(k, other(k)) over others)`"),
        ("max(other(age) over heads)", "KV0325", "`max` cannot read another slot: only a reduction `over others` reads `other(...)`",
         "max(other(age) over heads)", "reduce it first: `sum(other(age) over others)`"),
        ("rank(other(age))", "KV0325", "`rank` cannot read another slot: only a reduction `over others` reads `other(...)`",
         "rank(other(age))", "reduce it first: `sum(other(age) over others)`"),
        ("norm2(max(turn(other(k), 3) over others))", "KV0325",
         "`turn` cannot read another slot: only a reduction `over others` reads `other(...)`", "turn(other(k), 3)",
         "reduce it first: `sum(other(k) over others)`"),
        ("sum(attn * max(other(age) over others))", "KV0325",
         "slots are compared in a settle, not for every query, so `over others` cannot stand in a reduction over queries",
         "attn * max(other(age) over others)", "move it out of the reduction"),
        ("fold(prev + attn * max(other(age) over others), 0)", "KV0325",
         "slots are compared when a step settles, so `over others` cannot stand in a fold over queries",
         "prev + attn * max(other(age) over others)", "read it outside the fold, or in a fold over prunes"),
        ("sum(other(live) over others)", "KV0325",
         "`live` is the same for all slots, so it cannot be read of another slot: it is a single number", "live", "write `live`"),
        ("max(other(max_pool(age, 3)) over others)", "KV0313", "a pool cannot stand inside a reduction, as `max(...)` is one",
         "max(other(max_pool(age, 3)) over others)", "pool the score as a whole"),
        ("other(age, 3)", "KV0306", "`other` takes 1 argument, but 2 are given", "other(age, 3)", "write `other(age)`"),
        ("median(other(age) over others)", "KV0306", "`median` reduces over slots and the last N queries only",
         "median(other(age) over others)", "leave the reduction out"),
        ("prev + 1", "KV0201", "unknown name `prev`", "prev",
         "`prev` is the previous value of a fold, inside its first argument: `fold(max(0.9 * prev, attn), 0)`"),
        ("argsort(age)", "KV0202", "unknown function `argsort`", "argsort", "write `rank(age)`, the place in the order of x"),
        ("median(age over page)", "KV0306", "`median` reduces over slots and the last N queries only", "median(age over page)",
         "write `median(age over slots)`"),
    ],
)  # fmt: skip
def test_refused(text: str, code: str, message: str, at: str, help: str | None) -> None:
    expect_in(f"score {text}", code, message, at, help)


def test_the_prompts_queries_are_for_scores() -> None:
    found = only(body("param budget = 8", "when prefill", "score age", "keep top 2 by max(dot(q, k) over text)"), "KV0324")
    assert found.message == "what `keep top` ranks by cannot read `over text`: only a score can read the prompt's queries"
    found = only(body("param budget = 8", "when prefill", "score max(dot(q, k) over text)", "prefill blocks of 4"), "KV0324")
    assert found.message == "a prompt in blocks settles before all its queries exist, so the score cannot read `over text`"
    expr = score("dot(mean(turn(q, -query_position) over text after 2), ahead(k, 9, 2))", "when prefill")
    assert axes_of(expr) == {Axis.SLOT}
    assert print_expression(expr) == "sum(mean(turn(q, -query_position) over text after 2) * ahead(k, 9, 2) over dims)"
    assert print_expression(score("leverage(pairs(k) * age, 0.5)")) == "leverage(pairs(k) * age, 0.5)"


@pytest.mark.parametrize(
    ("text", "at", "axes", "help"),
    [
        ("dot(mean(q), k)", "q", "query and dim", "mean(dot(q, k))"),
        ("sum(sum(q * k) over dims)", "q * k", "query, slot and dim", "sum(sum(q * k over dims))"),
        ("norm1(max(attn * v over last 4 queries))", "attn * v", "query, slot and dim", "max(sum(attn * v over dims) over last 4 queries)"),
    ],
)  # fmt: skip
def test_no_column_holds_a_vector(text: str, at: str, axes: str, help: str) -> None:
    message = f"a token can remember a number, not a vector, but `{at}` has one number per {axes}"
    for statement in ("score {}", "score age\nkeep top 3 by {}", "score age\nkeep where {} > 0", "let x = {}\nscore x + 1"):
        expect_in(statement.format(text), "KV0317", message, at, f"reduce it over dims first: `{help}`")


@pytest.mark.parametrize("statement", ["keep top 3 by max_pool(age, 3)", "keep where mean_pool(age, 3) > 2"])
def test_only_a_score_pools(statement: str) -> None:
    found = only(body("param budget = 8", "score age", statement), "KV0313")
    assert "cannot pool: pools skip protected tokens, which are known only for a score" in found.message
    assert only(body("select top 8 by max_pool(age, 3)"), "KV0313")


def test_numbers_inside_of_lets_are_checked_where_they_stand() -> None:
    found = only(body("param budget = 8", "param n = 0", "let f(x, w) = max_pool(x, w)", "score f(age, n - 1)"), "KV0410")
    assert found.message == "the width of `max_pool` is at least 1, but `w` is -1"
    unused = check(body("param budget = 8", "let a = ema(attn, 2)", "score age")).diagnostics
    assert {one.code for one in unused} == {"KV0212", "KV0410"}


def test_a_fold_leaves_out_no_first_queries() -> None:
    found = only(body("param budget = 64", "score fold(max(0.9 * prev, attn) over queries after nonsense, 0)"), "KV0307")
    assert found.message == "a fold ranges over queries or prunes"
