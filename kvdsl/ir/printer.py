"""Print the intermediate representation in the language's own notation, for messages, `explain` and generated comments.

A printed policy parses to the same policy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from kvdsl.ir.nodes import (
    AcrossLayers,
    Axis,
    Call,
    Expr,
    Fold,
    Given,
    Input,
    Keep,
    LayerRange,
    Number,
    Other,
    Param,
    ParamRef,
    Policy,
    Rank,
    Reduce,
    Select,
    Sketch,
    Tensor,
    call,
)
from kvdsl.ir.ops import FUNCTIONS, INPUTS, OPERATORS, Strength
from kvdsl.ir.visitors import bottom_up, mapped, walk

_OVER = {Axis.QUERY: "", Axis.SLOT: " over slots", Axis.DIM: " over dims", Axis.HEAD: " over heads"}
_POSITION = Input(name="position")

_SLOT = "\N{OBJECT REPLACEMENT CHARACTER}"
"""Stands for the other slot until all other names are known."""


def print_expression(expr: Expr) -> str:
    """Print an expression with as few parentheses as possible."""
    text = _text(expr, Strength.OR)
    if _SLOT not in text:
        return text
    taken = {part.name for part in walk(expr) if part.kind in ("param", "tensor", "given", "column")}
    name = "j"
    while name in taken:
        name += "_"
    return text.replace(_SLOT, name)


def _text(expr: Expr, at_least: Strength) -> str:
    text, strength = _parts(expr)
    return text if strength >= at_least else f"({text})"


def _parts(expr: Expr) -> tuple[str, Strength]:
    return _PARTS[expr.kind](expr)


def _atom(text: str) -> tuple[str, Strength]:
    return text, Strength.ATOM


def _number(expr: Number) -> tuple[str, Strength]:
    return print_number(expr.value), Strength.ATOM if expr.value >= 0 else Strength.FACTOR


def _call(expr: Call) -> tuple[str, Strength]:
    row = OPERATORS.get(expr.op)
    if expr.op == "!=" and expr.args[0].kind == "given" and expr.args[0].marked:
        return _atom(expr.args[0].name)
    if row is not None:
        left, right = (_text(arg, at_least) for arg, at_least in zip(expr.args, row.sides, strict=True))
        return f"{left} {expr.op} {right}", row.strength
    if expr.op in _SIGNS:
        sign, strength = _SIGNS[expr.op]
        return f"{sign}{_text(expr.args[0], strength)}", strength
    if expr.op == "begun":
        return _parts(expr.args[0])
    repeats = expr.op == "enough" and expr.args[0] == expr.args[2]  # the order goes without saying
    return _atom(f"{expr.op}({', '.join(_text(part, Strength.OR) for part in expr.args[: 2 if repeats else None])})")


_SIGNS = {"neg": ("-", Strength.FACTOR), "not": ("not ", Strength.NOT)}


def _reduce(expr: Reduce) -> tuple[str, Strength]:
    argument = "" if expr.argument is None else f", {_text(expr.argument, Strength.OR)}"
    return _atom(f"{expr.op}({_text(expr.body, Strength.OR)}{_over(expr)}{_only(expr)}{argument})")


def _rank(expr: Rank) -> tuple[str, Strength]:
    over = "" if expr.within == "all" else f" over {expr.within}"
    return _atom(f"rank({_text(expr.body, Strength.OR)}{over}{_by(expr)})")


def _other(expr: Other) -> tuple[str, Strength]:
    what = _text(expr.body, Strength.OR)
    named = expr.body.kind in ("input", "given") and what.isidentifier()
    return _atom(f"{_SLOT}.{what}" if named else f"{_SLOT}.({what})")


def _fold(expr: Fold) -> tuple[str, Strength]:
    over = " over prunes" if expr.over == "prunes" else ""
    return _atom(f"fold({_text(expr.body, Strength.OR)}{over}, {_text(expr.start, Strength.OR)})")


_PARTS: Mapping[str, Callable[[Any], tuple[str, Strength]]] = {
    **dict.fromkeys(("param", "tensor", "given"), lambda expr: _atom(expr.name)),
    "number": _number,
    "input": lambda expr: _atom(INPUTS[expr.name].written or expr.name),
    "column": lambda expr: _atom(expr.name if expr.op is None else f"{expr.op}({expr.name})"),
    "call": _call,
    "reduce": _reduce,
    "rank": _rank,
    "other": _other,
    "fold": _fold,
}


def _over(expr: Reduce) -> str:
    """Print a range; queries are the default, except next to `max(a, b)`."""
    if expr.last is not None:
        return f" over last {_text(expr.last, Strength.OR)} queries"
    if expr.axis is Axis.OTHER:
        return f" over slots as {_SLOT}"
    if expr.within != "all":
        after = "" if expr.after is None else f" after {_text(expr.after, Strength.OR)}"
        return " over next page" if expr.within == "next" else f" over {expr.within}{after}"
    return " over queries" if expr.axis is Axis.QUERY and expr.op in FUNCTIONS else _OVER[expr.axis]


def _only(expr: Reduce) -> str:
    """Print the filter and key of a range."""
    others = call("!=", Other(body=_POSITION), _POSITION)
    where = expr.where
    if expr.axis is Axis.OTHER and expr.within == "all":
        where = others if where is None else call("and", others, where)
    return ("" if where is None else f" where {_text(where, Strength.OR)}") + _by(expr)


def _by(expr: Reduce | Rank) -> str:
    return "" if expr.by is None else f" by {_text(expr.by, Strength.OR)}"


def print_number(value: float) -> str:
    """Print a number in a form that every target reads as the same double."""
    return str(int(value)) if abs(value) < 2**53 and value == int(value) else repr(value)


def print_policy(policy: Policy) -> str:
    """Print a whole policy, flat: with inherited statements and without lets.

    The text is edition 1, or edition 2 if `keep first` and `keep last` yield after other keeps, which edition 1 cannot express.
    """
    edition = 2 if policy.ends_last else 1
    policy = _in_edition_2(policy) if edition == 2 else policy
    lines = [quote(policy.doc)] if policy.doc else []
    lines += [_param(param) for param in policy.params]
    outside = [*map(print_tensor, policy.tensors)]
    outside += [print_given(one) for one in policy.given if one.source != one.name]  # inputs need no statement
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
    """Rewrite a policy for edition 2: pages as keys, agreeing heads as a mean, a budget's bound as a minimum."""
    changes: dict[str, Any] = {"pages": None, "pages_after": None}
    if policy.pages is not None:
        key = _page_key(policy.pages, policy.pages_after)
        policy = mapped(policy, lambda expr: bottom_up(expr, lambda part: _by_page(part, key)))
    if policy.victims == "heads" and policy.score is not None:
        changes |= {"victims": "own", "score": Reduce(op="mean", axis=Axis.HEAD, body=policy.score)}
    if policy.measured is not None and policy.budget not in (None, Input(name="everything")):
        bound = call("min", policy.measured, policy.budget)
        changes |= {"measured": bound, "budget": Input(name="everything")}
    return policy.model_copy(update=changes)


def _page_key(size: Expr, after: Expr | None) -> Expr:
    """Return the key that counts pages."""
    place: Expr = _POSITION if after is None else call("-", _POSITION, _floored(after))
    least = call("max", _floored(size), Number(value=1))
    return call("floor", call("/", place, least))


def _floored(count: Expr) -> Expr:
    return call("floor", count)


def _by_page(expr: Expr, key: Expr) -> Expr:
    """Write `over page` and `over next page` with the key that counts pages."""
    match expr:
        case Rank(within="page") | Reduce(within="page"):
            return expr.model_copy(update={"within": "all", "by": key})
        case Reduce(within="next"):
            where: Expr = call("==", Other(body=key), call("+", key, Number(value=1)))
            if expr.where is not None:
                where = call("and", where, Other(body=expr.where))
            return Reduce(op=expr.op, axis=Axis.OTHER, within="self", body=Other(body=expr.body), where=where)
    return expr


def _param(param: Param) -> str:
    unit = f" {param.unit}" if param.unit else ""
    text = f"param {param.name}{unit} = {print_expression(param.default)}"
    if param.low is None and param.high is None:
        return text
    low, high = ("" if end is None else print_number(end) for end in (param.low, param.high))
    return f"{text} in {low}..{high}"


def print_tensor(tensor: Tensor) -> str:
    """Print a `tensor` statement."""
    return f"tensor {tensor.name} [{', '.join(tensor.axes)}] from {quote(tensor.file)}"


def print_given(given: Given) -> str:
    """Print a `given` statement; for a span, its `input`."""
    if given.source == "spans":
        return f"input {given.name} from spans"
    return f"given {given.name}" + ("" if given.default is None else f" = {print_number(given.default)}")


def print_budget(policy: Policy) -> str:
    """Print what a policy with a budget keeps: `512`, or `0.5 * seen at most 4096`."""
    assert policy.budget is not None
    return _at_most(policy.measured, policy.budget)


def print_count(select: Select) -> str:
    """Print the number of tokens that a `select` attends to."""
    return print_expression(select.count if select.measured is None else select.measured)


def _at_most(measured: Expr | None, most: Expr) -> str:
    """Print a data-dependent number with its bound; or the bound alone."""
    if measured is None:
        return print_expression(most)
    bound = "" if most == Input(name="everything") else f" at most {print_expression(most)}"
    return print_expression(measured) + bound


def print_keep(keep: Keep) -> str:
    """Print a `keep` statement."""
    printed = {part: print_expression(getattr(keep, part)) for part in keep.row.parts}
    return f"keep {keep.scope} {keep.row.written.format(**printed)}"


def print_select(select: Select) -> str:
    """Print a `select` statement."""
    layers = LayerRange(low=select.low, high=select.high)
    where = "" if layers == LayerRange() else f" in layers {print_range(layers)}"
    where = f" in layers {print_choosing(select)} reused above" if select.choosing else where
    weight = "" if select.weight is None else f" weight {print_expression(select.weight)}"
    return f"select top {print_count(select)} by {print_expression(select.by)}{weight}{where}"


def print_choosing(select: Select) -> str:
    """Print the layers that choose for those above."""
    return ", ".join(print_expression(layer) for layer in select.choosing)


def print_sketch(sketch: Sketch) -> str:
    """Print a `sketch` statement."""
    count, by, every = (print_expression(expr) for expr in (sketch.count, sketch.by, sketch.every))
    return f"sketch top {count} dims by {by} every {every} queries"


def print_range(layers: LayerRange) -> str:
    """Print a range of layers, such as `2..`."""
    low, high = ("" if end is None else print_expression(end) for end in (layers.low, layers.high))
    return f"{low}..{high}"


def _across(floor: Expr | None) -> str:
    if floor is None:
        return ""
    return " across heads" if floor == Number(value=0) else f" across heads floor {print_expression(floor)}"


def print_across_layers(shared: AcrossLayers | None) -> str:
    """Print the end of a `budget`: ` across layers by ... floor 0.1`."""
    if shared is None:
        return ""
    by = "" if shared.by is None else f" by {print_expression(shared.by)}"
    floor = "" if shared.floor == Number(value=0) else f" floor {print_expression(shared.floor)}"
    return f" across layers{by}{floor}"


def _rest(policy: Policy) -> list[str]:
    """Print the statements that differ from their defaults."""
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
    """Print the rest of `storage blocks N` and `prefill blocks of N`."""
    size = {"storage": policy.block, "prefill": policy.prefill_block}.get(name)
    if size is None:
        return ""
    return (" of " if name == "prefill" else " ") + print_expression(size)


def quote(text: str) -> str:
    """Print a string of the language on one line, with unusual characters escaped."""
    escapes = {"\\": r"\\", '"': r"\"", "\n": r"\n", "\t": r"\t"}
    return '"' + "".join(escapes.get(c, c if c.isprintable() else f"\\u{{{ord(c):x}}}") for c in text) + '"'
