"""The intermediate representation as text, in the language's own notation: for messages, `explain` and generated comments.

What it prints of a policy can be parsed again, and means the same.
"""

from __future__ import annotations

from typing import Any

from kvdsl.ir.nodes import (
    AcrossLayers,
    Axis,
    Binary,
    Call,
    ColumnRef,
    Enough,
    Expr,
    Fold,
    FoldRef,
    Given,
    GivenRef,
    Input,
    Keep,
    LayerRange,
    Leverage,
    Number,
    Other,
    Param,
    ParamRef,
    Policy,
    Pool,
    Previous,
    Project,
    Random,
    Rank,
    Reduce,
    RingRef,
    Rotate,
    Select,
    Sketch,
    Tensor,
    TensorRef,
)
from kvdsl.ir.ops import FUNCTIONS, INPUTS, OPERATORS, Strength
from kvdsl.ir.visitors import bottom_up, mapped, walk

_OVER = {Axis.QUERY: "", Axis.SLOT: " over slots", Axis.DIM: " over dims"}
_OVER |= {Axis.HEAD: " over heads"}
_POSITION = Input(name="position")


_SLOT = "\N{OBJECT REPLACEMENT CHARACTER}"
"""Stands for the other slot until all other names are known."""


def print_expression(expr: Expr) -> str:
    """An expression, with as few parentheses as its meaning needs."""
    text = _text(expr, Strength.OR)
    if _SLOT not in text:
        return text
    taken = {part.name for part in walk(expr) if isinstance(part, (ParamRef, TensorRef, GivenRef, ColumnRef))}
    name = "j"
    while name in taken:
        name += "_"
    return text.replace(_SLOT, name)


def _text(expr: Expr, at_least: Strength) -> str:
    text, strength = _parts(expr)
    return text if strength >= at_least else f"({text})"


def _parts(expr: Expr) -> tuple[str, Strength]:
    if isinstance(expr, Number):
        return print_number(expr.value), Strength.ATOM if expr.value >= 0 else Strength.FACTOR
    if isinstance(expr, Input):
        return INPUTS[expr.name].written or expr.name, Strength.ATOM
    if isinstance(expr, Random):
        return "random()", Strength.ATOM
    if isinstance(expr, Binary):
        return _binary(expr)
    if isinstance(expr, Call):
        return _call(expr)
    if isinstance(expr, Reduce):
        decay = "" if expr.decay is None else f", {_text(expr.decay, Strength.OR)}"
        return f"{expr.op}({_text(expr.body, Strength.OR)}{_over(expr)}{_only(expr)}{decay})", Strength.ATOM
    if isinstance(expr, Other):
        named = isinstance(expr.body, (Input, GivenRef)) and expr.body.name != "observed"
        what = _text(expr.body, Strength.OR)
        return f"{_SLOT}.{what}" if named else f"{_SLOT}.({what})", Strength.ATOM
    if isinstance(expr, Fold):
        over = " over prunes" if expr.over == "prunes" else ""
        return f"fold({_text(expr.body, Strength.OR)}{over}, {_text(expr.start, Strength.OR)})", Strength.ATOM
    if isinstance(expr, Previous):
        return "prev", Strength.ATOM
    if isinstance(expr, Project):
        return f"project({_text(expr.body, Strength.OR)}, {_text(expr.matrix, Strength.OR)})", Strength.ATOM
    if isinstance(expr, Rotate):
        return (
            f"{expr.op}({', '.join(_text(part, Strength.OR) for part in (expr.body, expr.by, expr.factor) if part is not None)})",
            Strength.ATOM,
        )
    if isinstance(expr, Leverage):
        return f"leverage({_text(expr.body, Strength.OR)}, {_text(expr.ridge, Strength.OR)})", Strength.ATOM
    if isinstance(expr, Rank):
        over = "" if expr.within == "all" else f" over {expr.within}"
        return f"rank({_text(expr.body, Strength.OR)}{over}{_by(expr)})", Strength.ATOM
    if isinstance(expr, Enough):
        order = () if expr.by == expr.body else (expr.by,)
        return f"enough({', '.join(_text(part, Strength.OR) for part in (expr.body, expr.share, *order))})", Strength.ATOM
    if isinstance(expr, Pool):
        return f"{expr.op}_pool({_text(expr.body, Strength.OR)}, {_text(expr.size, Strength.OR)})", Strength.ATOM
    if isinstance(expr, RingRef):
        return f"{expr.op}({expr.name})", Strength.ATOM
    assert isinstance(expr, (ParamRef, TensorRef, GivenRef, ColumnRef, FoldRef))
    return expr.name, Strength.ATOM


def _over(expr: Reduce) -> str:
    """What a reduction ranges over; queries go without saying, but beside `max(a, b)`."""
    if expr.last is not None:
        return f" over last {_text(expr.last, Strength.OR)} queries"
    if expr.axis is Axis.OTHER:
        return f" over slots as {_SLOT}"
    if expr.within != "all":
        after = "" if expr.after is None else f" after {_text(expr.after, Strength.OR)}"
        return " over next page" if expr.within == "next" else f" over {expr.within}{after}"
    return " over queries" if expr.axis is Axis.QUERY and expr.op in FUNCTIONS else _OVER[expr.axis]


def _only(expr: Reduce) -> str:
    """The rest of a range: where it counts, and by which key."""
    others = Binary(op="!=", left=Other(body=_POSITION), right=_POSITION)
    where = expr.where
    if expr.axis is Axis.OTHER and expr.within == "all":
        where = others if where is None else Binary(op="and", left=others, right=where)
    return ("" if where is None else f" where {_text(where, Strength.OR)}") + _by(expr)


def _by(expr: Reduce | Rank) -> str:
    return "" if expr.by is None else f" by {_text(expr.by, Strength.OR)}"


def _binary(expr: Binary) -> tuple[str, Strength]:
    row = OPERATORS[expr.op]
    left, right = row.sides
    return f"{_text(expr.left, left)} {expr.op} {_text(expr.right, right)}", row.strength


def _call(expr: Call) -> tuple[str, Strength]:
    if expr.function == "neg":
        return f"-{_text(expr.args[0], Strength.FACTOR)}", Strength.FACTOR
    if expr.function == "not":
        return f"not {_text(expr.args[0], Strength.NOT)}", Strength.NOT
    return f"{expr.function}({', '.join(_text(arg, Strength.OR) for arg in expr.args)})", Strength.ATOM


def print_number(value: float) -> str:
    """A number as one would write it, which every target reads as the same double."""
    return str(int(value)) if abs(value) < 2**53 and value == int(value) else repr(value)


def print_policy(policy: Policy) -> str:
    """A whole policy, flat: with what it inherits, and without its lets; in edition 1, which has a word for all that there is but for ends
    that leave last, and with these in edition 2.
    """
    edition = 2 if policy.ends_last else 1
    policy = _in_edition_2(policy) if edition == 2 else policy
    lines = [quote(policy.doc)] if policy.doc else []
    lines += [_param(param) for param in policy.params]
    outside = [*map(print_tensor, policy.tensors), *map(print_given, policy.given)]
    lines += [f"input {line.partition(' ')[2]}" if edition == 2 else line for line in outside]
    shared = _across(policy.across) + print_across_layers(policy.across_layers)
    if policy.budget is not None and (policy.budget != ParamRef(name="budget") or shared or policy.measured):
        lines.append(f"budget {print_budget(policy)}{shared}")
    if policy.score is not None:
        lines.append(f"score {print_expression(policy.score)}")
    lines += [print_keep(keep) for keep in policy.keeps]
    protects = policy.budget is not None or policy.select is not None
    if edition == 1 and protects and not any(keep.scope == "last" for keep in policy.keeps):
        lines.append("keep last 0")
    lines += _rest(policy)
    if edition == 2 and policy.prefill_block is not None:
        lines = [line for line in lines if not line.startswith(("when ", "prefill "))]
        lines.append(f"when {policy.when} blocks of {print_expression(policy.prefill_block)}")
    body = "".join(f"  {line}\n" for line in lines)
    return f"kv {edition}\n\npolicy {policy.name} {{\n{body}}}\n"


def _in_edition_2(policy: Policy) -> Policy:
    """The policy in the words of edition 2: pages by their key, heads that agree by their mean, a budget's bound as a minimum."""
    changes: dict[str, Any] = {"pages": None, "pages_after": None}
    if policy.pages is not None:
        key = _page_key(policy.pages, policy.pages_after)
        policy = mapped(policy, lambda expr: bottom_up(expr, lambda part: _by_page(part, key)))
    if policy.victims == "heads" and policy.score is not None:
        changes |= {"victims": "own", "score": Reduce(op="mean", axis=Axis.HEAD, body=policy.score)}
    if policy.measured is not None and policy.budget not in (None, Input(name="everything")):
        bound = Call(function="min", args=(policy.measured, policy.budget))
        changes |= {"measured": bound, "budget": Input(name="everything")}
    return policy.model_copy(update=changes)


def _page_key(size: Expr, after: Expr | None) -> Expr:
    """By which key slots are of one page."""
    place: Expr = _POSITION if after is None else Binary(op="-", left=_POSITION, right=_floored(after))
    least = Call(function="max", args=(_floored(size), Number(value=1)))
    return Call(function="floor", args=(Binary(op="/", left=place, right=least),))


def _floored(count: Expr) -> Expr:
    return Call(function="floor", args=(count,))


def _by_page(expr: Expr, key: Expr) -> Expr:
    """`over page` and `over next page` by the key that counts pages."""
    if not isinstance(expr, (Rank, Reduce)) or expr.within not in ("page", "next"):
        return expr
    if expr.within == "page":
        return expr.model_copy(update={"within": "all", "by": key})
    assert isinstance(expr, Reduce)
    where: Expr = Binary(op="==", left=Other(body=key), right=Binary(op="+", left=key, right=Number(value=1)))
    if expr.where is not None:
        where = Binary(op="and", left=where, right=Other(body=expr.where))
    return Reduce(op=expr.op, axis=Axis.OTHER, within="self", body=Other(body=expr.body), where=where)


def _param(param: Param) -> str:
    unit = f" {param.unit}" if param.unit else ""
    text = f"param {param.name}{unit} = {print_expression(param.default)}"
    if param.low is None and param.high is None:
        return text
    low, high = ("" if end is None else print_number(end) for end in (param.low, param.high))
    return f"{text} in {low}..{high}"


def print_tensor(tensor: Tensor) -> str:
    """A `tensor` statement."""
    return f"tensor {tensor.name} [{', '.join(tensor.axes)}] from {quote(tensor.file)}"


def print_given(given: Given) -> str:
    """A `given` statement."""
    return f"given {given.name}" + ("" if given.default is None else f" = {print_number(given.default)}")


def print_budget(policy: Policy) -> str:
    """What a policy with a budget keeps: `512`, or `0.5 * seen at most 4096`."""
    assert policy.budget is not None
    return _at_most(policy.measured, policy.budget)


def print_count(select: Select) -> str:
    """How many tokens a `select` attends to."""
    return print_expression(select.count if select.measured is None else select.measured)


def _at_most(measured: Expr | None, most: Expr) -> str:
    """A number that reads the data, and its bound; or the bound alone."""
    if measured is None:
        return print_expression(most)
    bound = "" if most == Input(name="everything") else f" at most {print_expression(most)}"
    return print_expression(measured) + bound


def print_keep(keep: Keep) -> str:
    """A `keep` statement."""
    parts = ["keep", keep.scope]
    if keep.count is not None:
        parts.append(print_expression(keep.count))
    if keep.scope == "top":
        parts.append("by")
    if keep.by is not None:
        parts.append(print_expression(keep.by))
    return " ".join(parts)


def print_select(select: Select) -> str:
    """A `select` statement."""
    layers = LayerRange(low=select.low, high=select.high)
    where = "" if layers == LayerRange() else f" in layers {print_range(layers)}"
    where = f" in layers {print_choosing(select)} reused above" if select.choosing else where
    weight = "" if select.weight is None else f" weight {print_expression(select.weight)}"
    return f"select top {print_count(select)} by {print_expression(select.by)}{weight}{where}"


def print_choosing(select: Select) -> str:
    """The layers that choose for those above."""
    return ", ".join(print_expression(layer) for layer in select.choosing)


def print_sketch(sketch: Sketch) -> str:
    """A `sketch` statement."""
    count, by, every = (print_expression(expr) for expr in (sketch.count, sketch.by, sketch.every))
    return f"sketch top {count} dims by {by} every {every} queries"


def print_range(layers: LayerRange) -> str:
    """A range of layers: `2..`."""
    low, high = ("" if end is None else print_expression(end) for end in (layers.low, layers.high))
    return f"{low}..{high}"


def _across(floor: Expr | None) -> str:
    if floor is None:
        return ""
    return " across heads" if floor == Number(value=0) else f" across heads floor {print_expression(floor)}"


def print_across_layers(shared: AcrossLayers | None) -> str:
    """The end of a `budget`: ` across layers by ... floor 0.1`."""
    if shared is None:
        return ""
    by = "" if shared.by is None else f" by {print_expression(shared.by)}"
    floor = "" if shared.floor == Number(value=0) else f" floor {print_expression(shared.floor)}"
    return f" across layers{by}{floor}"


def _rest(policy: Policy) -> list[str]:
    """The statements that differ from their defaults."""
    lines = []
    for name, prefix in (
        ("trigger", "trigger overflow >= "),
        ("slack", "slack "),
        ("max_drop", "max_drop "),
        ("pages", "pages "),
    ):
        value = getattr(policy, name)
        if value != Policy.model_fields[name].default:
            after = (
                f" after {print_expression(policy.pages_after)}"
                if name == "pages" and policy.pages_after is not None
                else ""
            )
            lines.append(prefix + print_expression(value) + after)
    if policy.sketch is not None:
        lines.append(print_sketch(policy.sketch))
    if policy.select is not None:
        lines.append(print_select(policy.select))
    if policy.layers is not None:
        lines.append(f"layers {print_range(policy.layers)}")
    for name, prefix in _WORDS.items():
        value = getattr(policy, name)
        if value != Policy.model_fields[name].default:
            lines.append(prefix + value + _size(policy, name))
    return lines


_WORDS = {
    "victims": "victims shared by ", "cap": "cap ", "when": "when ", "group": "group ", "positions": "positions ",
    "storage": "storage ", "rope": "rope ", "prefill": "prefill ",
}  # fmt: skip


def _size(policy: Policy, name: str) -> str:
    """The rest of `storage blocks N` and `prefill blocks of N`."""
    size = {"storage": policy.block, "prefill": policy.prefill_block}.get(name)
    if size is None:
        return ""
    return (" of " if name == "prefill" else " ") + print_expression(size)


def quote(text: str) -> str:
    """A string in the language: one line, everything unusual escaped."""
    escapes = {"\\": r"\\", '"': r"\"", "\n": r"\n", "\t": r"\t"}
    return '"' + "".join(escapes.get(c, c if c.isprintable() else f"\\u{{{ord(c):x}}}") for c in text) + '"'
