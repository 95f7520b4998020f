"""Print expressions as C++, for the functions of a generated `kernels_cpu.cpp` (`kvdsl/lower/cpp.py`).

Values over slots are floats computed in a loop over i; numbers per row are doubles. kvdsl/runtime/cpu/include/kvdsl/view.hpp defines
`row` and `head`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar

from kvdsl.ir.nodes import Axis, Call, Expr, Input, Number, Other, Rank, Reduce, TensorRef
from kvdsl.ir.ops import POOLS, RANGES, REDUCTIONS, TABLED, functions_of
from kvdsl.ir.printer import print_number
from kvdsl.ir.visitors import axes_of
from kvdsl.lower.expression import (
    Code,
    Fragment,
    NotLowerable,
    Printer,
    Target,
    Use,
    as_float32,
    dims_of,
    fragment,
    is_vector,
    spelled,
)

_STRENGTH = {"or": 6, "and": 8, "==": 9, "!=": 9, "<": 10, "<=": 10, ">": 10, ">=": 10, "+": 12, "-": 12, "*": 13, "/": 13}
_UNARY = 14
_FOLDED = ("sum", "mean", "var", "std", "max", "min")
CAN = Target(
    reduces={
        "queries": ("token", "sum", "squares", "max", "min", "last", "ema", "ring", "fold", "prune"),
        "history": _FOLDED,
        "slots": _FOLDED,
        "dims": _FOLDED,
        "sketch": _FOLDED,
        "page": _FOLDED,
        "next": _FOLDED,
        "others": ("sum", "mean", "max", "min"),
        "heads": ("sum", "mean", "max", "min"),
    },
    keeps=("first", "last", "top", "where"),
)
"""What the C++ target has, in `view.hpp` and `head.hpp` of `kvdsl/runtime/cpu/include/kvdsl`."""


class _CppPrinter(Printer):
    can = CAN
    strength = _STRENGTH
    unary = _UNARY
    inversion = "!"
    functions: ClassVar[dict[str, str]] = functions_of("cpp") | {"begun": "kvdsl::begun"}
    squared, raised = "kvdsl::square", "std::pow"
    one, zero = "1.0", "0.0"

    def as_number(self, condition: Fragment) -> Fragment:
        return fragment(f"({{}} ? {self.one} : {self.zero})", condition)

    def _where(self, expr: Call) -> Fragment:
        condition, yes, no = expr.args
        return fragment("({} ? {} : {})", self.truth(condition, _STRENGTH["or"]), self.value(yes), self.value(no))

    code: ClassVar[Code] = {
        **Printer.code,
        **dict.fromkeys(functions, Printer.function),
        "**": Printer.power,
        "where": _where,
    }


@dataclass(frozen=True)
class CountPrinter(_CppPrinter):
    """One double per row and KV head, or query head, read from `view`, `row` or `head`.

    The result is rounded down, so its last bit matters: products are rounded. `hoisted` names the reductions inside those over slots,
    whose values are added as doubles; `alone`: see `SlotPrinter`.
    """

    view: str = "head"
    hoisted: Mapping[Expr, str] = field(default_factory=dict)
    alone: bool = False

    def number(self, value: float) -> Fragment:
        return Fragment(_double(value))

    def _product(self, expr: Call) -> Fragment:
        return fragment("kvdsl::rounded({})", self.binary(expr))

    def _rounded_power(self, expr: Call) -> Fragment:
        made = self.power(expr)
        return fragment("kvdsl::rounded({})", made) if expr.args[1] == Number(value=2) else made

    def reduce(self, expr: Reduce) -> Fragment:
        slots = SlotPrinter(self.view, self.hoisted, alone=self.alone)
        if expr.axis is Axis.DIM:
            return fragment("double{{{}}}", slots.value(expr))
        value = fragment("double{{{}}}", slots.value(expr.body))
        return fragment(f"{self.view}.{expr.op}({{}})", function_of(value, SLOT))

    def _enough(self, expr: Call) -> Fragment:
        slots = SlotPrinter(self.view, self.hoisted, alone=self.alone)
        values, share, order = expr.args
        body, by = (function_of(slots.value(part), SLOT) for part in (values, order))
        return fragment(f"{self.view}.enough({{}}, {{}}, {{}})", body, self.value(share), by)

    code: ClassVar[Code] = {
        **_CppPrinter.code,
        **dict.fromkeys(TABLED, lambda self, expr: Fragment(f"{self.view}.param(Number::{expr.name})")),
        "live": lambda self, _: Fragment(f"static_cast<double>({self.view}.live)"),
        "seen": lambda self, _: Fragment(f"static_cast<double>({self.view}.newest + 1)"),
        "param": lambda self, expr: Fragment(f"{self.view}.param(Number::{spelled(expr.name)})"),
        "tensor": lambda self, expr: fragment("double{{{}}}", constant(self.view, expr)),
        "*": _product,
        "**": _rounded_power,
        "enough": _enough,
    }


def varies(expr: Expr) -> bool:
    """Return whether an expression varies over slots."""
    return Axis.SLOT in axes_of(expr)


SLOT, DIM, HEAD, OTHER = (Use("index", name) for name in "idgo")
PAGES = Use("helper", "pages")
"""The page of each slot."""


def size_of_dims(view: str, body: Expr) -> str:
    """Return the number of dims over which a body varies."""
    return f"{view}.value_dim" if dims_of(body) == "v" else f"{view}.key_dim"


@dataclass(frozen=True)
class SlotPrinter(_CppPrinter):
    """One float per slot i, read from `view`: `row` (a query and the slots that it saw) or `head` (the live slots).

    Attributes:
        hoisted: names of the reductions over slots, ranks and pools computed before the loop.
        over_dims: whether it prints the body of a loop over d.
        alone: whether the row has one query head.
        at: the index: `o` for the other slot of a comparison.
    """

    view: str
    hoisted: Mapping[Expr, str]
    over_dims: bool = False
    alone: bool = False
    at: str = "i"

    one, zero = "1.0f", "0.0f"

    @property
    def slot(self) -> Use:
        """The index that a slot's value needs."""
        return Use("index", self.at)

    def number(self, value: float) -> Fragment:
        return Fragment(literal(value))

    def column(self, name: str) -> Fragment:
        return Fragment(f"{name}[{self.at}]", uses=(Use("column", name), self.slot))

    def ring(self, name: str, op: str, *argument: Fragment) -> Fragment:
        use = Use("ring", name, op)
        return Fragment(f"{ring_name(use)}[{self.at}]", uses=(use, self.slot))

    def _of_slot(self, expr: Input) -> Fragment:
        view, at = self.view, self.at
        text = {
            "attn": f"row.attn[{at}]",
            "logit": f"row.logit[{at}]",
            "position": f"static_cast<float>({view}.position[{at}])",
            "age": f"static_cast<float>({view}.age({at}))",
            "observed": f"{view}.observed({at})",
        }[expr.name]
        return Fragment(text, uses=(Use("input", expr.name), self.slot))

    def _vector(self, expr: Input) -> Fragment:
        return Fragment(f"{self.view}.{expr.name}({self.at}, d)", uses=(Use("input", expr.name), self.slot, DIM))

    def _query(self, expr: Input) -> Fragment:
        return Fragment(f"row.q({'0' if self.alone else 'g'}, d)", uses=(Use("input", "q"), *self._heads, DIM))

    def _query_head(self, expr: Input) -> Fragment:
        offset = "" if self.alone else " + g"
        return Fragment(f"static_cast<float>(row.query_head{offset})", uses=(Use("input", expr.name), *self._heads))

    @property
    def _heads(self) -> tuple[Use, ...]:
        return () if self.alone else (HEAD,)

    def _number(self, expr: Input) -> Fragment:
        number = "live" if expr.name == "live" else f"param(Number::{expr.name})"
        return Fragment(f"static_cast<float>({self.view}.{number})", uses=(Use("input", expr.name),))

    def reduce(self, expr: Reduce) -> Fragment:
        if expr in self.hoisted:
            return self._hoisted(expr, self.hoisted[expr])
        if expr.axis is not Axis.DIM:
            raise NotLowerable(f"a reduction {RANGES[expr.over]} here")
        if self.over_dims:
            raise NotLowerable("a reduction over dims inside another one")
        body = replace(self, over_dims=True).value(expr.body)
        if expr.within == "sketch":
            if body.needs("input", "v"):
                raise NotLowerable("values (`v`) over a sketch's dims")
            return fragment(f"kvdsl::{expr.op}_over({self.view}.dims, {{}})", _of_sketch(body))
        return fragment(f"kvdsl::{expr.op}_over({size_of_dims(self.view, expr.body)}, {{}})", function_of(body, DIM))

    def _other(self, expr: Other) -> Fragment:
        return replace(self, at=OTHER.name)(expr.body)

    def _hoisted(self, expr: Reduce, name: str) -> Fragment:
        """Read a value computed before the loop: one for all slots, per dim, per page, or per slot."""
        if expr.axis is Axis.DIM and Axis.OTHER in axes_of(expr):
            return Fragment(f"{name}({self.at}, {OTHER.name})", uses=(self.slot, OTHER))
        if expr.axis is Axis.HEAD or (expr.axis is Axis.DIM and varies(expr)):
            return Fragment(f"{name}[{self.at}]", uses=(self.slot,))
        size = size_of_dims(self.view, expr.body) if dims_of(expr.body) else ""
        if expr.axis is Axis.OTHER:
            place = f"{self.at} * {size} + d" if size else self.at
            return Fragment(f"{name}[{place}]", uses=(self.slot, *((DIM,) if size else ())))
        if expr.within not in ("page", "next"):
            return Fragment(f"{name}[d]", uses=(DIM,)) if is_vector(expr) else Fragment(name)
        page = f"pages.of[{self.at}]" if expr.within == "page" else f"pages.next({self.at})"
        at = (
            Fragment(f"{name}[{page} * {size} + d]", uses=(PAGES, self.slot, DIM))
            if size
            else Fragment(f"{name}[{page}]", uses=(PAGES, self.slot))
        )
        if expr.within == "page":
            return at
        return fragment(f"({page} < 0 ? {literal(REDUCTIONS[expr.op].of_nothing)} : {{}})", at)

    def _found_before(self, expr: Rank | Call) -> Fragment:
        return Fragment(f"{self.hoisted[expr]}[{self.at}]", uses=(self.slot,))

    code: ClassVar[Code] = {
        **_CppPrinter.code,
        **dict.fromkeys(("attn", "logit", "position", "age", "observed"), _of_slot),
        **dict.fromkeys(("k", "v"), _vector),
        **dict.fromkeys((*TABLED, "live"), _number),
        **dict.fromkeys(("rank", *POOLS), _found_before),
        "q": _query,
        "query_head": _query_head,
        "param": lambda self, expr: Fragment(f"static_cast<float>({self.view}.param(Number::{spelled(expr.name)}))"),
        "tensor": lambda self, expr: constant(self.view, expr),
        "column": Printer.read_column,
        "random": lambda self, _: Fragment(f"{self.view}.random({self.at})", uses=(self.slot,)),
        "other": _other,
    }

    def body(self, expr: Expr) -> Fragment:
        """Print the body of a column. If it reads q it is evaluated per query head and reduced over the group."""
        return over_group(self.value(expr))


@dataclass(frozen=True)
class TokenPrinter(_CppPrinter):
    """One double per new token, `slot`; see `kvdsl/ordered.hpp`."""

    over_dims: bool = False

    def number(self, value: float) -> Fragment:
        return Fragment(_double(value))

    def reduce(self, expr: Reduce) -> Fragment:
        if self.over_dims:
            raise NotLowerable("a reduction over dims inside another one")
        size = "slot.value_dim" if dims_of(expr.body) == "v" else "slot.key_dim"
        body = TokenPrinter(over_dims=True).value(expr.body)
        return fragment(f"kvdsl::ordered::{expr.op}_over({size}, {{}})", function_of(body, DIM))

    code: ClassVar[Code] = {
        **_CppPrinter.code,
        **dict.fromkeys(("k", "v"), lambda _, expr: Fragment(f"slot.{expr.name}(d)", uses=(DIM,))),
        "tensor": lambda _, expr: fragment("double{{{}}}", constant("slot", expr)),
        "given": lambda _, expr: Fragment(f"slot.given(Given::{spelled(expr.name)})"),
    }


def constant(view: str, ref: TensorRef) -> Fragment:
    """Read a tensor's value for the head, per dim if it has dims."""
    at = f"Tensor::{spelled(ref.name)}" + (", d" if ref.dims else "")
    return Fragment(f"{view}.constant({at})", uses=(DIM,) if ref.dims else ())


def over_group(value: Fragment) -> Fragment:
    """Reduce over the group's query heads; other values stay as they are."""
    return fragment("kvdsl::over_group<group>(row.group, {})", function_of(value, HEAD)) if HEAD in value.uses else value


def _of_sketch(value: Fragment) -> Fragment:
    """Make a function of an index into the sketch's dims."""
    if DIM not in value.uses:
        return function_of(value, Use("index", "j"))
    return _without((DIM,), fragment("[&](int j) {{ const int d = row.sketch[j]; return {}; }}", value))


def function_of(value: Fragment, *indices: Use) -> Fragment:
    """Make a lambda of indices; an index that the value does not use is unnamed."""
    arguments = ", ".join(f"int {index.name}" if index in value.uses else "int" for index in indices)
    return _without(indices, fragment(f"[&]({arguments}) {{{{ return {{}}; }}}}", value))


def _without(indices: tuple[Use, ...], made: Fragment) -> Fragment:
    """Return the fragment without the uses of indices that it binds itself."""
    return replace(made, uses=tuple(use for use in made.uses if use not in indices))


class DimPrinter(SlotPrinter):
    """One float per dim d, in `sketch`. `hoisted` names the reductions over slots, arrays over dims or numbers."""

    def reduce(self, expr: Reduce) -> Fragment:
        if expr not in self.hoisted:
            raise NotLowerable("a sketch that ranks dims by a reduction over dims")
        return super().reduce(expr)


def ring_name(ref: Use) -> str:
    """Return the name of a reduced ring."""
    return f"{ref.op}_of_{ref.name}"


def literal(value: float) -> str:
    """Return a float32 literal."""
    if math.isinf(as_float32(value)):
        return "-INFINITY" if value < 0 else "INFINITY"
    if math.isnan(value):
        return "NAN"
    text = print_number(value)
    return f"{text}.0f" if text.lstrip("-").isdigit() else f"{text}f"


def _double(value: float) -> str:
    if not math.isfinite(value):
        return literal(value)
    text = print_number(value)
    return f"{text}.0" if text.lstrip("-").isdigit() else text
