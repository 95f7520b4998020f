"""The intermediate representation as text, in the language's own notation: for messages, `explain` and generated comments.

What it prints of a policy can be parsed again, and means the same.
"""

from __future__ import annotations

from kvdsl.ir.nodes import Axis, Binary, Call, ColumnRef, Expr, Input, Keep, Number, Param, ParamRef, Policy, Random, Reduce

_OR, _AND, _NOT, _COMPARE, _SUM, _PRODUCT, _FACTOR, _POWER, _ATOM = range(9)

_STRENGTH = {
    "or": _OR, "and": _AND, "<": _COMPARE, "<=": _COMPARE, ">": _COMPARE, ">=": _COMPARE, "==": _COMPARE, "!=": _COMPARE,
    "+": _SUM, "-": _SUM, "*": _PRODUCT, "/": _PRODUCT, "%": _PRODUCT, "**": _POWER,
}  # fmt: skip

_OVER = {Axis.QUERY: "", Axis.SLOT: " over slots", Axis.DIM: " over dims"}


def print_expression(expr: Expr) -> str:
    """An expression, with as few parentheses as its meaning needs."""
    return _text(expr, _OR)


def _text(expr: Expr, at_least: int) -> str:
    text, strength = _parts(expr)
    return text if strength >= at_least else f"({text})"


def _parts(expr: Expr) -> tuple[str, int]:
    if isinstance(expr, Number):
        return print_number(expr.value), _ATOM if expr.value >= 0 else _FACTOR
    if isinstance(expr, Input):
        return ("count()" if expr.name == "observed" else expr.name), _ATOM
    if isinstance(expr, Random):
        return "random()", _ATOM
    if isinstance(expr, Binary):
        return _binary(expr)
    if isinstance(expr, Call):
        return _call(expr)
    if isinstance(expr, Reduce):
        over = " over queries" if expr.axis is Axis.QUERY and expr.op in ("min", "max") else _OVER[expr.axis]
        return f"{expr.op}({_text(expr.body, _OR)}{over})", _ATOM
    assert isinstance(expr, (ParamRef, ColumnRef))
    return expr.name, _ATOM


def _binary(expr: Binary) -> tuple[str, int]:
    strength = _STRENGTH[expr.op]
    left, right = strength, strength + 1
    if strength == _COMPARE:
        left = strength + 1
    elif strength == _POWER:
        left, right = _ATOM, _FACTOR
    return f"{_text(expr.left, left)} {expr.op} {_text(expr.right, right)}", strength


def _call(expr: Call) -> tuple[str, int]:
    if expr.function == "neg":
        return f"-{_text(expr.args[0], _FACTOR)}", _FACTOR
    if expr.function == "not":
        return f"not {_text(expr.args[0], _NOT)}", _NOT
    return f"{expr.function}({', '.join(_text(arg, _OR) for arg in expr.args)})", _ATOM


def print_number(value: float) -> str:
    """A number as one would write it."""
    return str(int(value)) if value == int(value) and abs(value) < 2**53 else repr(value)


def print_policy(policy: Policy) -> str:
    """A whole policy, flat: with what it inherits, and without its lets."""
    lines = [quote(policy.doc)] if policy.doc else []
    lines += [_param(param) for param in policy.params]
    if policy.budget is not None and policy.budget != ParamRef(name="budget"):
        lines.append(f"budget {print_expression(policy.budget)}")
    if policy.score is not None:
        lines.append(f"score {print_expression(policy.score)}")
    lines += [print_keep(keep) for keep in policy.keeps]
    if policy.budget is not None and not any(keep.scope == "last" for keep in policy.keeps):
        lines.append("keep last 0")
    lines += _rest(policy)
    body = "".join(f"  {line}\n" for line in lines)
    return f"kv {policy.edition}\n\npolicy {policy.name} {{\n{body}}}\n"


def _param(param: Param) -> str:
    unit = f" {param.unit}" if param.unit else ""
    text = f"param {param.name}{unit} = {print_expression(param.default)}"
    if param.low is None and param.high is None:
        return text
    low, high = ("" if end is None else print_number(end) for end in (param.low, param.high))
    return f"{text} in {low}..{high}"


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


def _rest(policy: Policy) -> list[str]:
    """The statements that differ from their defaults."""
    lines = []
    for name, prefix in (("trigger", "trigger overflow >= "), ("slack", "slack "), ("max_drop", "max_drop ")):
        value = getattr(policy, name)
        if value != Policy.model_fields[name].default:
            lines.append(prefix + print_expression(value))
    for name in ("group", "positions"):
        value = getattr(policy, name)
        if value != Policy.model_fields[name].default:
            lines.append(f"{name} {value}")
    return lines


def quote(text: str) -> str:
    """A string in the language: one line, everything unusual escaped."""
    escapes = {"\\": r"\\", '"': r"\"", "\n": r"\n", "\t": r"\t"}
    return '"' + "".join(escapes.get(c, c if c.isprintable() else f"\\u{{{ord(c):x}}}") for c in text) + '"'
