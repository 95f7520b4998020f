"""How statements go together: what each becomes in the IR, and what is refused, where, and with what help."""

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvdsl.compiler import analyse
from kvdsl.ir.nodes import Axis, Number, ParamRef, Reduce, call
from kvdsl.ir.printer import print_policy
from tests.diagnostics.expect import body, check, only, policy

BUDGET = ("param budget = 64", "score sum(attn)")
SKETCH = "sketch top 8 dims by abs(q) every 16 queries"


def refused(code: str, message: str, at: str, help: str | None, *statements: str, because: str | None = None) -> None:
    """Asserts the one finding of a policy, and the other statement that it shows."""
    found = only(body(*statements), code)
    assert (found.message, found.span.text, found.help) == (message, at, help)
    assert [label.span.text for label in found.labels] == ([] if because is None else [because])


# -- what is accepted --------------------------------------------------------------------------------------------------


def test_defaults() -> None:
    checked = policy(*BUDGET)
    assert (checked.across, checked.victims, checked.cap, checked.layers, checked.when) == (
        None,
        "own",
        "soft",
        None,
        "both",
    )
    assert (checked.select, checked.sketch, checked.pages) == (None, None, None)
    assert (checked.storage, checked.block, checked.rope) == ("in_place", None, "fused")
    assert (checked.prefill, checked.prefill_block) == ("whole", None)


def test_blocks() -> None:
    checked = policy("param n = 128", *BUDGET, "prefill blocks of 2 * n")
    assert checked.prefill == "blocks"
    assert checked.prefill_block == call("*", Number(value=2), ParamRef(name="n"))


def test_budgets_across_heads() -> None:
    assert policy("budget 64 across heads", "score sum(attn)", "when prefill").across == Number(value=0)
    checked = policy("param r = 0.2 in 0..1", *BUDGET, "budget budget across heads floor r", "when prefill")
    assert (checked.budget, checked.across) == (ParamRef(name="budget"), ParamRef(name="r"))


def test_an_override_of_the_budget_says_anew_whether_heads_share_it(tmp_path: Path) -> None:
    parent = "budget 64 across heads floor 0.5; score sum(attn); when prefill"
    (tmp_path / "base.kv").write_text(f'kv 1\npolicy Base {{ "d"; {parent} }}\n')
    for statement, across in (("budget 2 * budget", None), ("budget budget across heads", Number(value=0))):
        child = tmp_path / "child.kv"
        child.write_text(f'kv 1\nimport "base.kv"\npolicy Child extends Base {{ "d"; override {statement} }}\n')
        assert analyse(child).policy.across == across


def test_pages_can_be_read_by_a_score() -> None:
    score = policy("param budget = 8", "pages 4", "score max(norm2(k) * prompt over page)").score
    assert isinstance(score, Reduce)
    assert (score.op, score.axis, score.within) == ("max", Axis.SLOT, "page")


@pytest.mark.parametrize("by", ["age", "random()", "norm1(v)", "dot(q, k)", "mean(dot(q, k) over slots) - age"])
def test_what_select_ranks_by(by: str) -> None:
    assert policy(f"select top 8 by {by}").select is not None


def test_evicting_and_selecting_compose() -> None:
    checked = policy(*BUDGET, "keep last 8", SKETCH, "select top budget / 2 by dot(q, k over sketch)")
    assert checked.budget is not None
    assert checked.select is not None


# -- without a budget --------------------------------------------------------------------------------------------------


def test_the_budget_can_be_read_only_where_there_is_one() -> None:
    message, help = "the policy has no budget that could be read here", "add `param budget = 512` and `score sum(attn)`, say"
    refused("KV0402", message, "budget / 2", help, "select top budget / 2 by age")
    refused("KV0402", message, "budget / 2", help, "param tokens = budget / 2", "select top tokens by age")


# -- phases ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("statement", ["trigger overflow >= 1", "slack 4", "max_drop 4", "cap hard"])
def test_under_when_prefill_nothing_leaves_step_by_step(statement: str) -> None:
    keyword = statement.split()[0]
    message = f"under `when prefill` nothing is evicted while decoding, so `{keyword}` has no meaning"
    help = f"leave out `{keyword}` or `when prefill`"
    refused("KV0411", message, statement, help, *BUDGET, statement, "when prefill", because="when prefill")


def test_under_when_decode_the_prompt_has_no_blocks() -> None:
    message = "under `when decode` nothing is evicted while the prompt is read, so `prefill blocks` has no meaning"
    statements = (*BUDGET, "when decode", "prefill blocks of 8")
    refused("KV0411", message, "prefill blocks of 8", "leave out one of them", *statements, because="when decode")


# -- heads and layers together -----------------------------------------------------------------------------------------


def test_heads_share_a_budget_after_the_prompt_only() -> None:
    message = "heads share a budget once, after the prompt, so `across heads` needs `when prefill`"
    statements = ("budget 64 across heads", "score sum(attn)")
    refused("KV0412", message, statements[0], "add `when prefill`", *statements)
    refused("KV0412", message, statements[0], "add `when prefill`", *statements, "when decode", because="when decode")


def test_heads_that_share_a_budget_cannot_agree_on_victims() -> None:
    message = "heads that share a budget keep different tokens, so they cannot agree on the victims"
    budget, victims = "budget 64 across heads", "victims shared by layers"
    help = "leave out `victims` or `across heads`"
    refused("KV0412", message, victims, help, budget, "score sum(attn)", "when prefill", victims, because=budget)


def test_layers_cannot_agree_on_the_victims_of_a_block() -> None:
    message = "a block is evicted before the next layer has seen it, so layers cannot agree on its victims"
    help = "write `victims shared by heads`, or leave out `prefill blocks`"
    prefill, victims = "prefill blocks of 8", "victims shared by layers"
    refused("KV0419", message, prefill, help, *BUDGET, prefill, victims, because=victims)


# -- positions ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("statement", [SKETCH, "pages 16"])
def test_keys_at_compact_positions_have_no_pages_and_no_sketch(statement: str) -> None:
    keyword = statement.split()[0]
    message = f"`{keyword}` reads keys as stored, but compact positions rotate them differently"
    select = "select top 8 by dot(q, k over sketch)" if keyword == "sketch" else "select top 8 by age"
    help = f"leave out `{keyword}` or `positions`"
    statements = (*BUDGET, select, statement, "positions compact")
    refused("KV0413", message, statement, help, *statements, because="positions compact")


@pytest.mark.parametrize("word", ["cached", "fused"])
def test_rope_is_about_compact_positions(word: str) -> None:
    message = "`rope` says how compact positions are computed, but this policy uses original positions"
    help = "add `positions compact`, or leave out `rope`"
    refused("KV0414", message, f"rope {word}", help, *BUDGET, f"rope {word}")
    original = "positions original"
    refused("KV0414", message, f"rope {word}", help, *BUDGET, f"rope {word}", original, because=original)


# -- pages, sketches, selections ---------------------------------------------------------------------------------------


def test_what_nothing_reads() -> None:
    help = "for example `select top 2048 by dot(q, k over sketch)`"
    refused("KV0415", "nothing reads what `sketch` finds", SKETCH, help, SKETCH)
    refused("KV0415", "nothing reads what `sketch` finds", SKETCH, help, SKETCH, "select top 8 by dot(q, k)")
    help = "select by page, read `max(k over page)`, or leave out `pages`"
    refused("KV0415", "nothing reads what `pages` finds", "pages 16", help, *BUDGET, "pages 16")


def test_what_reads_nothing() -> None:
    by = "sum(q * max(k over page) over dims)"
    refused("KV0416", "`over page` needs the length of a page", by, "add `pages 16`, say", f"select top 8 by {by}")
    help = "add `sketch top 16 dims by abs(q) every 64 queries`, say"
    message = "`over sketch` needs a statement that chooses dims"
    refused("KV0417", message, "dot(q, k over sketch)", help, "select top 8 by dot(q, k over sketch)")


def test_nothing_follows_from_a_broken_statement() -> None:
    assert only(body("pages", "select top 8 by sum(q * max(k over page) over dims)"), "KV0101")
    assert only(body("sketch top 3 by q", "select top 8 by dot(q, k over sketch)"), "KV0101")
    assert only(body(SKETCH, "select top 8 by"), "KV0101")
    assert only(body(SKETCH, "select top 8 by dot(q, k over skech)"), "KV0307")
    assert only(body("budget 8 across heads", "score age", "when"), "KV0101")


@pytest.mark.parametrize("statement", ["score mean(logit)", "keep where last(logit) > 0", "keep top 3 by std(logit)"])
def test_a_policy_that_selects_reads_no_logits(statement: str) -> None:
    message = "a query that selects computes no `logit` for skipped tokens, so the policy cannot read it"
    others = ("param budget = 64", "select top 8 by age", *(() if statement.startswith("score") else ("score age",)))
    at = statement.split(" by ")[-1].removeprefix("score ").removeprefix("keep where ")
    help = "read `attn`, which is 0 there"
    refused("KV0418", message, at, help, *others, statement, because="select top 8 by age")


@pytest.mark.parametrize(
    ("by", "has", "help"),
    [
        ("k", "has one number per slot and dim", "reduce it over slots: `mean(k over slots)`"),
        ("dot(q, k)", "has one number per query and slot", "for example `abs(q)`"),
        ("norm1(q)", "has one number per query", "for example `abs(q)`"),
    ],
)
def test_sketch_ranks_dims(by: str, has: str, help: str) -> None:
    message = f"what `sketch` ranks by has one number per dim, and may vary over queries, but `{by}` {has}"
    statements = ("select top 8 by dot(q, k over sketch)", f"sketch top 8 dims by {by} every 1 queries")
    refused("KV0314", message, by, help, *statements)


@pytest.mark.parametrize(
    ("by", "message"),
    [
        ("{}", "{} is computed before the query attends, so there is no `attn` yet"),
        ("{} * sum(attn over slots)", "{} is computed before the query attends, so there is no `attn` yet"),
        ("max(logit over slots) * {}", "{} is computed before the query attends, so there is no `logit` yet"),
        ("sum({})", "{} cannot be reduced over queries: it is computed for each query alone"),
        ("{} * count()", "{} cannot be reduced over queries: it is computed for each query alone"),
    ],
)
def test_select_and_sketch_come_before_attention(by: str, message: str) -> None:
    help = "it reads queries, keys, values and numbers, for example `dot(q, k)`"
    select = by.format("attn")
    refused("KV0315", message.format("what `select` ranks by"), select, help, f"select top 8 by {select}")
    if by != "{}":
        sketch = by.format("q")
        help = help.replace("dot(q, k)", "abs(q)")
        statements = ("select top 8 by dot(q, k over sketch)", f"sketch top 8 dims by {sketch} every 1 queries")
        refused("KV0315", message.format("what `sketch` ranks by"), sketch, help, *statements)


@pytest.mark.parametrize("read", ["random()", "over page"])
def test_a_sketch_reads_neither_pages_nor_random_numbers(read: str) -> None:
    by = {"random()": "mean(k * random() over slots)", "over page": "mean(max(k over page) over slots)"}[read]
    statements = ("pages 4", "select top 8 by dot(q, k over sketch)", f"sketch top 8 dims by {by} every 1 queries")
    help = "it reads queries, keys, values and numbers"
    refused("KV0315", f"what `sketch` ranks by cannot read `{read}`", by, help, *statements)


@pytest.mark.parametrize(
    ("what", "statements"),
    [
        ("a score", ("param budget = 8", "score {}")),
        ("what `keep top` ranks by", ("param budget = 8", "score age", "keep top 3 by {}")),
        ("a condition on slots", ("param budget = 8", "score age", "keep where {} > 0")),
    ],
)
def test_only_select_reads_the_sketch(what: str, statements: tuple[str, ...]) -> None:
    message = f"{what} cannot read `over sketch`: a sketch is for `select`"
    by = "sum(dot(q, k over sketch))"
    found = only(body(SKETCH, *(statement.format(by) for statement in statements)), "KV0316")
    assert (found.message, found.help) == (message, "write `over dims`")


# -- numbers -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("statements", "message", "at"),
    [
        (("pages 1 - 1", "select top 8 by age"), "`pages` is at least 1, but `1 - 1` is 0", "1 - 1"),
        (("select top 0 by age",), "the count of `select` is at least 1, but `0` is 0", "0"),
        (("select top 8 by age in layers -1..",), "the first layer of `select` is at least 0, but `-1` is -1", "-1"),
        ((*BUDGET, "layers ..0 - 2"), "the last layer of `layers` is at least 0, but `0 - 2` is -2", "0 - 2"),
        ((*BUDGET, "storage blocks 0"), "the size of `storage blocks` is at least 1, but `0` is 0", "0"),
        ((*BUDGET, "prefill blocks of 0"), "the size of `prefill blocks` is at least 1, but `0` is 0", "0"),
        (("budget 64 across heads floor 1.5", "score age", "when prefill"), "the floor lies between 0 and 1, but `1.5` is 1.5", "1.5"),
        (("select top 8 by dot(q, k over sketch)", "sketch top 257 dims by q every 1 queries"),
         "the count of `sketch` lies between 1 and 256, but `257` is 257", "257"),
        (("param n = 0", "select top 8 by dot(q, k over sketch)", "sketch top 8 dims by q every n queries"),
         "the interval of `sketch` is at least 1, but `n` is 0", "n"),
        (("param budget = 64", "score ema(attn, -0.1)"), "the decay of `ema` lies between 0 and 1, but `-0.1` is -0.1", "-0.1"),
        (("param budget = 64", "score max_pool(age, 0)"), "the width of `max_pool` is at least 1, but `0` is 0", "0"),
        (("param n = budget - 64", "param budget = 64", "score sum(attn over last n queries)"),
         "the N of `over last N queries` is at least 1, but `n` is 0", "n"),
    ],
)  # fmt: skip
def test_numbers_have_bounds(statements: tuple[str, ...], message: str, at: str) -> None:
    refused("KV0410", message, at, None, *statements)


@pytest.mark.parametrize("keyword", ["layers", "select"])
def test_ranges_of_layers(keyword: str) -> None:
    def statements(layers: str) -> tuple[str, ...]:
        return (*BUDGET, f"layers {layers}") if keyword == "layers" else (f"select top 8 by age in layers {layers}",)

    refused(
        "KV0407", f"the range of `{keyword}` is empty: 3 is above 2", "3..2", "did you mean `2..3`?", *statements("3..2")
    )
    help = "it can read `layers`, and params that do not depend on it"
    for varying in ("layer", "prompt", "budget"):
        if keyword == "layers" or varying != "budget":
            message = f"the range of `{keyword}` cannot depend on `{varying}`"
            refused("KV0308", message, varying, help, *statements(f"{varying}.."))
    message = f"the range of `{keyword}` cannot depend on `prompt`"
    refused("KV0308", message, "n", help, "param n = prompt", *statements("..n"))
    assert policy("param n = layers / 2", *statements("n..")).name == "P"


@pytest.mark.parametrize(
    ("statement", "message", "at", "help"),
    [
        ("storage blocks", "`storage blocks` needs the number of tokens in a block", "blocks", "for example `storage blocks 16`"),
        ("prefill blocks", "`prefill blocks` needs the number of tokens in a block", "blocks", "for example `prefill blocks of 512`"),
        ("storage in_place 3", "`storage in_place` takes no number", "3", "did you mean `storage blocks 16`?"),
        ("prefill whole of 3", "`prefill whole` takes no number", "3", "did you mean `prefill blocks of 512`?"),
    ],
)  # fmt: skip
def test_blocks_have_a_size_and_nothing_else_has(statement: str, message: str, at: str, help: str) -> None:
    refused("KV0420", message, at, help, *BUDGET, statement)


def test_keeps_fit_into_what_is_selected() -> None:
    message = "`keep first 60` and `keep last 10` protect 70 tokens, but the number of selected tokens is 64"
    found = only(body("select top 64 by age", "keep first 60", "keep last 10"), "KV0404")
    assert (found.message, found.help) == (message, "protect fewer, or select more")
    assert [label.span.text for label in found.labels] == ["keep last 10", "64"]
    assert policy("select top 64 by age", "keep first 63").select is not None


def test_a_scope_protects_from_eviction_only() -> None:
    assert policy("param budget = 512", "score age", "select top 64 by age", "keep top 65 by age").select is not None
    for statement in ("keep top 3 by age", "keep where position < prompt"):
        message = f"without a budget nothing is evicted, so `{' '.join(statement.split()[:2])}` has no meaning"
        refused(
            "KV0402",
            message,
            statement,
            "add `param budget = 512` and `score sum(attn)`, say",
            "select top 64 by age",
            statement,
        )


# -- warnings ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("statements", "message", "at", "help"),
    [
        (("slack 4",), "without `max_drop` a prune goes down to the budget, so `slack` has no effect", "4", "add `max_drop 8`, say"),
        (("max_drop 4",), "in the long run a prune drops everything above the budget (1 token), as without `slack` and `max_drop`", "4",
         "choose `max_drop` below the `trigger`"),
        (("trigger overflow >= 8", "max_drop 4"),
         "in the long run a prune drops everything above the budget (8 tokens), as without `slack` and `max_drop`", "4",
         "raise the `slack`"),
        (("trigger overflow >= 32", "slack 4", "max_drop 8"), "in the long run a prune drops 28 tokens, although `max_drop` is 8", "8",
         "a `slack` of 24 makes it 8"),
        (("trigger overflow >= 32", "slack 31", "max_drop 1"), "in the long run a prune drops a single token, at every step", "1",
         "choose a larger `max_drop`"),
        (("trigger overflow >= 0", "max_drop 8"), "with `trigger overflow >= 0` nothing is ever pruned, so this has no effect", "8", None),
        (("keep last 0.1",), "`keep last 0.1` protects no token: 0.1 is floored to 0, so not even the newest one is protected",
         "keep last 0.1", "a ratio of the budget is written `0.1 * budget`"),
        (("keep first budget / 128",), "`keep first budget / 128` protects no token: 0.5 is floored to 0", "keep first budget / 128", None),
        (("select top 65 by age",), "no more than 65 tokens are cached while decoding, so nothing is skipped", "65",
         "select fewer, or raise the budget"),
    ],
)  # fmt: skip
def test_what_has_no_effect(statements: tuple[str, ...], message: str, at: str, help: str | None) -> None:
    refused("KV0421", message, at, help, *BUDGET, *statements)


def test_drops_are_those_of_the_formula() -> None:
    """Warned of exactly where max(min(d, R), R - s), found by playing the rule, is R, above d, or 1."""
    for trigger, slack, most in itertools.product((1, 2, 5, 8), (0, 1, 3, 7), (1, 2, 4, 9)):
        statements = (f"trigger overflow >= {trigger}", f"slack {slack}", f"max_drop {most}")
        found = check(body(*BUDGET, *statements)).diagnostics
        drops = list(itertools.islice(_drops(trigger, slack, most), 50, 60))
        assert len(set(drops)) == 1
        assert (drops[0] == trigger or drops[0] > most or drops[0] == 1) == (found != ())


def _drops(trigger: int, slack: int, most: int) -> Iterator[int]:
    """How many tokens each prune drops; `over` is how many more than the budget are cached."""
    over = 0
    while True:
        over += 1
        if over >= trigger:
            target = min(max(over - most, 0), slack)
            if over > target:
                yield over - target
            over = min(over, target)


@pytest.mark.parametrize("statement", ["storage blocks 16", "rope cached"])
def test_layouts_are_nothing_to_warn_of(statement: str) -> None:
    analysis = check(body(*BUDGET, "positions compact", statement))
    assert analysis.ok and not analysis.diagnostics
    assert statement in print_policy(analysis.policy)
