"""A policy in words: titles with a few lines each, for `kvdsl explain` and the policies' pages."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kvdsl.diagnostics import listed
from kvdsl.explain.facts import Budget, Facts, State, tensors_of
from kvdsl.ir.nodes import Call, Expr, Given, Input, Keep, LayerRange, Number, Param, ParamRef, Policy, Tensor
from kvdsl.ir.ops import ENDS, INPUTS, KEEPS, RULES
from kvdsl.ir.printer import print_choosing, print_expression, print_number, print_range, quote
from kvdsl.ir.visitors import has, parts_of, walk

Rows = dict[str, list[str]]


def rows(found: Facts) -> Rows:
    """Return all descriptions by title; inapplicable ones are left out."""
    policy = found.policy
    described = {
        "keeps": list(_keeps(found)),
        "evicts": list(_evicts(policy)),
        "protects": [*(_protects(keep, policy) for keep in policy.keeps), *_beyond(policy)],
        "selects": list(_selects(policy)),
        "when": list(_when(policy)),
        "positions": list(_positions(policy)),
        "storage": list(_storage(policy)),
        "params": [_param(param) for param in policy.params],
        "tensors": [_tensor(tensor) for tensor in policy.tensors],
        "given": [_given(given) for given in policy.given],
        "tracks": [f"{one.name}: {meaning(one)} (for {', '.join(one.why)})" for one in found.state]
        or ["only each token's position"],
        "costs": list(_costs(found)),
        "peak": list(_peak(found)),
        "reads": [INPUTS[name].reads for name in found.requires]
        or ["positions only, so any attention implementation serves it"],
        "backends": [f"{one['name']:<7} {_serves(one)}" for one in found.backends],
    }
    return {title: lines for title, lines in described.items() if lines}


def _serves(backend: dict[str, Any]) -> str:
    if not backend["ok"]:
        return f"no: {backend['why_not']}"
    return f"yes; torch evicts: {backend['torch_evicts']}" if "torch_evicts" in backend else "yes"


# -- what it does ------------------------------------------------------------------------------------------------------


def _keeps(found: Facts) -> Iterator[str]:
    policy = found.policy
    if policy.budget is None:
        yield "every token"
        return
    if found.budgets:
        tensors = " and ".join(tensors_of(policy.budget, policy))
        yield f"{' or '.join(map(_budget, found.budgets))} per KV head, chosen by {tensors}, after eviction"
    elif policy.measured is not None:
        yield f"{print_expression(policy.measured)} tokens per KV head, counted again at every eviction"
        bound = (
            "no bound: the cache grows with the tokens that it keeps" if policy.budget == Input(name="everything") else None
        )
        yield bound or f"at most {_count(policy.budget, policy)}"
    else:
        yield f"{_count(policy.budget, policy)} tokens per KV head, after eviction"
        if any(node == ParamRef(name="budget") and policy.budget != node for node in walk(policy.budget)):
            yield "`budget` is the param here, and this number of tokens in other statements"
    if policy.across is not None:
        floor = (
            ""
            if policy.across == Number(value=0)
            else f", each head {print_expression(policy.across)} of its share at least"
        )
        yield f"the heads of a layer share their budgets{floor}"
    yield from _shares(policy)
    if policy.layers is not None:
        yield f"in layers {print_range(policy.layers)}; every token in the others"


def _shares(policy: Policy) -> Iterator[str]:
    """Describe how layers share their budgets."""
    layers = policy.across_layers
    if layers is None:
        return
    floor = "" if layers.floor == Number(value=0) else print_expression(layers.floor)
    if layers.by is None:
        least = f", each head {floor} of its budget at least" if floor else ""
        yield f"all layers and heads share their budgets after the prompt{least}"
        return
    least = f" or {floor} of its budget" if floor else ""
    yield (
        f"the layers share their budgets after the prompt: each gets the tokens that it protects at the ends{least}, and a share of "
        f"the rest by {print_expression(layers.by)}"
    )


def _budget(budget: Budget) -> str:
    if budget.text == "everything":
        return "every token"
    known = "" if budget.tokens is None or budget.text.isdigit() else f" = {budget.tokens}"
    return f"{budget.text}{known} tokens"


def _evicts(policy: Policy) -> Iterator[str]:
    if policy.budget is None or policy.score is None:
        yield "never"
        return
    score, chance = print_expression(policy.score), has(policy.score, Call, op="random")
    if chance and not any(INPUTS[node.name].axes for node in parts_of(policy.score, Input)):
        yield f"by lot: the token with the lowest {score} is evicted first"
    else:
        lots = "; `random()` is drawn again for each token" if chance else ""
        yield f"the token with the lowest {score} first{lots}; among equals, the older one"
    if policy.trigger == Number(value=0):
        yield "never: the trigger is 0" if policy.cap == "soft" else "none after the prompt: the trigger is 0"
    elif policy.trigger != Number(value=1):
        yield f"only once it holds {_count(policy.trigger, policy)} tokens more than the budget; 0 would mean never"
    if policy.max_drop != Number(value=0):
        yield f"{_count(policy.max_drop, policy)} tokens at a time"
        yield f"more if that would leave more than {_count(policy.slack, policy)} tokens above the budget"
    if policy.cap == "hard":
        yield f"before a new token would exceed the budget plus {_count(policy.slack, policy)}"
    if policy.victims != "own":
        whose = "the KV heads of a layer" if policy.victims == "heads" else "all layers and KV heads"
        yield f"the same tokens in {whose}: scores are averaged over them"
    if policy.group not in ("mean", "each"):
        yield f"by the {policy.group} over the query heads that share a KV head"


def _protects(keep: Keep, policy: Policy) -> str:
    if keep.row.place and keep.count == Number(value=1):
        return f"the {keep.scope} token"
    which = keep.row.words.format(by=keep.by and print_expression(keep.by))
    return f"the {which}" + ("" if keep.count is None else f": {_count(keep.count, policy)} of them")


def _beyond(policy: Policy) -> Iterator[str]:
    """Describe evictions of protected tokens."""
    if policy.budget is not None and not all(keep.row.place for keep in policy.keeps):
        others = listed((f"keep {form}" for form in KEEPS if form not in ENDS), "and")
        which = f"the lowest-scored tokens of {others}" if policy.ends_last else "its lowest-scored tokens"
        yield f"if that exceeds the budget, {which} are evicted, and a cache warns at the prompt's end"


def _selects(policy: Policy) -> Iterator[str]:
    if policy.select is None:
        return
    unit = "" if policy.pages is None else f", as whole pages of {_count(policy.pages, policy)}"
    yield (
        f"attends to {_selected(policy)} tokens{unit}: the protected ones, and those with the highest "
        f"{print_expression(policy.select.by)}; a prompt attends to all"
    )
    if policy.select.weight is not None:
        yield "each selected token counts in the softmax as many times as its weight"
    if policy.group == "each":
        yield "each query head selects for itself"
    layers = LayerRange(low=policy.select.low, high=policy.select.high)
    if layers != LayerRange():
        yield f"in layers {print_range(layers)}; the others attend to all"
    if policy.reuses:
        head = "query head" if policy.group == "each" else "KV head"
        yield (
            f"layers {print_choosing(policy.select)} select, and attend to all; each other layer uses the selection of the nearest "
            f"of these below, {head} by {head}; layers below them attend to all"
        )
    if policy.sketch is not None:
        yield (
            f"the sketch is the {_count(policy.sketch.count, policy)} dims with the highest {print_expression(policy.sketch.by)}, "
            f"updated every {_count(policy.sketch.every, policy)} generated tokens"
        )


def _selected(policy: Policy) -> str:
    assert policy.select is not None
    if policy.select.measured is not None:
        return f"{print_expression(policy.select.measured)}, counted for each query,"
    return _count(policy.select.count, policy)


def _when(policy: Policy) -> Iterator[str]:
    if policy.budget is None:
        return
    if policy.when == "prefill":
        yield "once, after the prompt; generated tokens stay"
    elif policy.when == "decode":
        yield "while decoding; the prompt stays whole"
    elif policy.prefill_block is not None:
        yield f"after every {_count(policy.prefill_block, policy)} tokens of the prompt, and after every generated token"
    else:
        yield "after the prompt, and after every generated token"
    if policy.when == "prefill" and policy.prefill_block is not None:
        yield f"after every {_count(policy.prefill_block, policy)} tokens of the prompt"


def _positions(policy: Policy) -> Iterator[str]:
    if policy.positions == "compact":
        yield "a token's rotary position is its rank among the live tokens"


def _storage(policy: Policy) -> Iterator[str]:
    if policy.storage == "blocks" and policy.block is not None:
        yield f"in blocks of {_count(policy.block, policy)} slots, from one pool for the rows of a batch"


# -- numbers -----------------------------------------------------------------------------------------------------------


def _count(expr: Expr, policy: Policy) -> str:
    """Print an expression, and the default of a param."""
    default = {param.name: param.default for param in policy.params}.get(getattr(expr, "name", ""))
    text = print_expression(expr)
    return text if default is None else f"{text} = {print_expression(default)}"


def _param(param: Param) -> str:
    unit = f" {param.unit}" if param.unit else ""
    low, high = ("" if end is None else f"{end:g}" for end in (param.low, param.high))
    bounds = f", in {low}..{high}" if low or high else ""
    ratio = "; 0.25 is a ratio of the prompt, 1.0 all of it" if param.name == "budget" else ""
    return f"{param.name} = {print_expression(param.default)}{unit}{bounds}{ratio}"


def _tensor(tensor: Tensor) -> str:
    called = {
        "layers": "layer",
        "heads": "KV head",
        "group": "query head",
        "dims": "dim of a key",
        "rank": "dim that it projects to",
    }
    *most, last = (called[axis] for axis in tensor.axes)
    return f"{tensor.name}: a number per {', '.join(most)}{' and ' if most else ''}{last}, from {quote(tensor.file)}"


def _given(given: Given) -> str:
    if given.source == "spans":
        return f"{given.name}: whether a token lies in this span, which the caller marks"
    if given.source == given.name:
        return f"{given.name}: {INPUTS[given.name].doc}, counted by the cache"
    default = "who must provide it" if given.default is None else f"or {print_number(given.default)}"
    return f"{given.name}: a number per token and KV head, from the caller, {default}"


# -- what it remembers and costs ---------------------------------------------------------------------------------------


def meaning(column: State) -> str:
    """Describe what a state column holds."""
    return RULES[column.rule].doc.format(column.body, decay=column.decay, size=column.size)


def _costs(found: Facts) -> Iterator[str]:
    share = 100 * (found.bytes_per_token / found.key_and_value - 1)
    stands = "the position and the rank" if found.policy.positions == "compact" else "the position"
    yield (
        f"{found.bytes_per_token} bytes a token and KV head at head size {found.head_dim} in "
        f"{found.dtype if found.kv_dtype == 'model' else found.kv_dtype}: "
        f"{found.key_and_value} for key and value, {found.position_bytes} for {stands}, {found.state_bytes} of state "
        f"({share:.1f} % on top)"
    )
    for column in found.state:
        if column.rule == "ring":
            known = column.bytes_per_slot
            size = f"4 * {column.size}" if known is None else known
            if found.goes(column):
                yield f"{size} more for {column.name} while a prompt is read"
            else:
                yield f"{size} more for {column.name}" if known is None else f"of them {size} for {column.name}"
    if found.budgets:
        yield f"a KV head {_range(found)}"
    if found.rotated_half:
        times = 1 + found.rotated_half / found.key_and_value
        yield f"{found.rotated_half} more for the key's rotated half ({times:g}× the key and value)"
    if found.sketch_bytes != 0:
        yield f"{_known(found.sketch_bytes)} more for the key over the sketch's dims, in kernels and in the layers that select"
    if found.page_bytes != 0:
        yield f"{_known(found.page_bytes)} more for the bounds of the key's page, in kernels and in the layers that select"


def _known(size: float | None) -> str:
    return "some" if size is None else f"{size:g}"


def _range(found: Facts) -> str:
    """Describe the bytes of a KV head, where they are known before the file and the prompt."""
    least, most = found.bytes_per_head
    if least is None:
        return f"takes {found.bytes_per_token} bytes for every token of its budget"
    if most is None:
        return f"takes {least:,} bytes, or {found.bytes_per_token} for every token of a budget that the text decides"
    return f"takes {least:,} bytes" if least == most else f"takes {least:,} to {most:,} bytes"


def _peak(found: Facts) -> Iterator[str]:
    for peak in found.peaks:
        slots = "" if peak.slots is None else f" = {peak.slots}"
        unit = " slots per KV head" if peak.text.startswith("budget") else ""
        yield f"{_PHASES[peak.phase]}: {peak.text}{slots}{unit}"


_PHASES = {"always": "always", "prompt": "in the prompt", "decode": "while decoding"}
