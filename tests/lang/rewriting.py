"""A policy's syntax tree as what Python would have to write: the calls of `kvdsl.lang` that make the same policy."""

from __future__ import annotations

import operator
from functools import partial
from typing import Any

from kvdsl import lang
from kvdsl.ir.ops import KEEPS, Strength
from kvdsl.lang.expressions import Expression, OtherSlot, name, written
from kvdsl.lang.policies import Draft, Policy, policy
from kvdsl.syntax import nodes as syn

_OPERATORS = {
    "+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv, "%": operator.mod, "**": operator.pow,
    "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge, "==": operator.eq, "!=": operator.ne,
    "and": operator.and_, "or": operator.or_, "-x": operator.neg, "not": operator.invert,
}  # fmt: skip


def rewritten(module: syn.Module) -> Policy:
    """The policy of a file, written in Python."""
    (found,) = module.policies

    def body(p: Draft) -> None:
        for statement in found.statements:
            _statement(p, statement)

    body.__doc__ = None if found.doc is None else found.doc.text
    imports = [one.name.text for one in module.imports]
    parent = {} if found.parent is None else {"changes": found.parent.text}
    return policy(name=found.name.text, imports=imports, **parent)(body)


def _statement(p: Draft, one: syn.Statement) -> None:
    if isinstance(one, syn.Param):
        p.param(one.name.text, _expr(one.value), in_=one.range and _range(one.range))
    elif isinstance(one, syn.Let):
        p.let(one.name.text, _expr(one.value) if one.parameters is None else _function(one.parameters, one.value))
    elif isinstance(one, syn.Tensor):
        p.input(one.name.text, *(axis.text for axis in one.axes), from_=one.file.text)
    elif isinstance(one, syn.Given):
        p.input(one.name.text, _maybe(one.default), from_=one.source and one.source.text)
    elif isinstance(one, syn.Keep):
        _keep(p, one)
    elif isinstance(one, syn.Setting):
        _setting(p, one)
    else:
        _clauses(p, one)


def _keep(p: Draft, one: syn.Keep) -> None:
    first, *rest = KEEPS[one.scope].parts
    p.keep(**{one.scope: _expr(getattr(one, first))}, **{part: _expr(getattr(one, part)) for part in rest})


def _setting(p: Draft, one: syn.Setting) -> None:
    word, value = one.word and one.word.text, _maybe(one.value)
    if one.keyword == "trigger":
        p.trigger(overflow=value)
    elif one.keyword == "when":
        p.when(word, every=value)
    else:
        getattr(p, one.keyword)(*(part for part in (word, value) if part is not None))


def _clauses(p: Draft, one: Any) -> None:
    if isinstance(one, syn.Budget):
        heads, layers = one.across, one.across_layers
        p.budget(
            _expr(one.value),
            at_most=_maybe(one.most),
            across_heads=heads and heads.floor is None,
            across_heads_floor=_maybe(heads and heads.floor),
            across_layers=bool(layers),
            across_layers_by=_maybe(layers and layers.by),
            across_layers_floor=_maybe(layers and layers.floor),
        )
    elif isinstance(one, syn.Select):
        layers = {"in_layers": one.range and _range(one.range)}
        if one.choosing:
            layers = {"from_layers": [_expr(layer) for layer in one.choosing]}
        weight = {"weight": _maybe(one.weight)}
        if one.count is None:
            p.select(where=_expr(one.by), **weight, **layers)
        else:
            p.select(top=_expr(one.count), by=_expr(one.by), **weight, **layers)
    else:
        p.sketch(top=_expr(one.count), by=_expr(one.by), every=_expr(one.every))


def _range(one: syn.Range) -> tuple[Any, Any]:
    return tuple(... if end is None else _expr(end) for end in (one.low, one.high))


def _function(parameters: tuple[syn.Parameter, ...], value: syn.Expr) -> Any:
    """A function of Python with these parameters, whose value is an expression of the names that it is given."""
    names = [one.name.text for one in parameters]
    heads = [f"{name}=defaults['{name}']" if one.default else name for name, one in zip(names, parameters, strict=True)]
    given = ", ".join(f"{name}={name}" for name in names)
    defaults = {one.name.text: _maybe(one.default) for one in parameters}
    return eval(f"lambda {', '.join(heads)}: make(dict({given}))", {"make": partial(_expr, value), "defaults": defaults})


def _maybe(node: Any) -> Expression | None:
    return None if node is None else _expr(node)


def _expr(node: Any, given: dict[str, Expression] | None = None) -> Expression:
    """An expression. Numbers become objects, too: two of them Python would compute itself."""
    if isinstance(node, syn.Constant):
        number = int(node.value) if node.value == int(node.value) else node.value
        return Expression(written(number), Strength.ATOM)
    if isinstance(node, syn.Name):
        return (given or {}).get(node.name, _name(node.name))
    if isinstance(node, syn.Unary):
        return _OPERATORS["-x" if node.op == "-" else node.op](_expr(node.operand, given))
    if isinstance(node, syn.Binary):
        return _OPERATORS[node.op](_expr(node.left, given), _expr(node.right, given))
    if isinstance(node, syn.Member):
        slot = (given or {}).get(node.owner.text, OtherSlot(node.owner.text))
        return getattr(slot, node.value.name) if isinstance(node.value, syn.Name) else slot(_expr(node.value, given))
    assert isinstance(node, syn.Call)
    ranging = next((one for one in node.arguments if one.over or one.only or one.key), None)
    slot = ranging and ranging.over and ranging.over.name
    values = [_expr(one.value, given) for one in node.arguments if one.keyword is None]
    if slot is not None:
        first = node.arguments[0].value
        values[0] = eval(
            f"lambda {slot.text}: make(dict({slot.text}={slot.text}))", {"make": lambda j: _expr(first, (given or {}) | j)}
        )
    named = {one.keyword.text: _expr(one.value, given) for one in node.arguments if one.keyword is not None}
    return _name(node.function.text)(*values, **named, **({} if ranging is None else _ranges(ranging, given)))


def _ranges(one: syn.Argument, given: dict[str, Any] | None) -> dict[str, Any]:
    over, found = one.over, {"where": one.only and _expr(one.only, given), "by": one.key and _expr(one.key, given)}
    if over is None:
        return found
    if over.last is not None:
        return found | {"last": _expr(over.last, given)}
    return found | {"over": over.axis.text} | ({} if over.after is None else {"after": _expr(over.after, given)})


def _name(text: str) -> Expression:
    return getattr(lang, text) if text in lang.__all__ else name(text)
