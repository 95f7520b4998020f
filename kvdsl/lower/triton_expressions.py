"""Expressions as Triton: what stands in the kernels of a generated `kernels_triton.py` (`kvdsl/lower/triton.py` and `triton_prompt.py` have
these).

A value over slots is a block of floats in a loop over the slots; numbers per row are doubles. `ops.py` of `kvdsl/runtime/gpu` has what the
text calls.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from typing import ClassVar

from kvdsl.ir.axes import axes_of
from kvdsl.ir.nodes import (
    Axis,
    Binary,
    Call,
    ColumnRef,
    Expr,
    FoldRef,
    GivenRef,
    Input,
    Number,
    ParamRef,
    Random,
    Reduce,
    RingRef,
    TensorRef,
)
from kvdsl.ir.ops import FIXED, LOGICAL, OPERATORS
from kvdsl.ir.printer import print_number
from kvdsl.lower.expression import (
    ATOM,
    Fragment,
    Leaf,
    NotLowerable,
    Printer,
    Target,
    Use,
    dims_of,
    fragment,
    is_vector,
    names_of,
    pair,
    texts,
    uses_of,
)
from kvdsl.lower.spelling import size_of, spelled

# Python's precedence, with & and | for conditions (they bind tighter than comparisons).
STRENGTH = {"or": 4, "and": 5, "*": 7, "/": 7, "%": 7, "+": 6, "-": 6}
STRENGTH |= {op: 3 for op in ("<", "<=", ">", ">=", "==", "!=")}
_UNARY = 8
_FUNCTIONS = {name: f"tl.{name}" for name in ("abs", "exp", "log", "floor", "ceil")}
CAN = Target(
    reduces={
        "queries": ("token", "sum", "squares", "max", "min", "last", "ema", "ring", "fold"),
        "history": ("sum", "mean", "var", "std", "max", "min"),
        "slots": ("sum", "mean", "max", "min"),
        "dims": ("sum", "mean", "var", "std", "max", "min"),
    },
    functions=("neg", "not", "where", "max", "min", "sqrt", *_FUNCTIONS),
    operators=OPERATORS,
    tensors=True,
    given=True,
)
"""What there is Triton for; `ops.py` of `kvdsl/runtime/gpu` has it."""


OF_VECTORS = "what a query gives every slot, where it is computed from keys, values or queries"
SKETCHED = "a sketch by anything but the query, dim by dim"
"""What there is no Triton for."""


class _TritonPrinter(Printer):
    can = CAN
    strength = STRENGTH
    spelling: ClassVar[dict[str, str]] = {"and": "&", "or": "|"}
    negation = ("-", _UNARY)
    sqrt: ClassVar[str] = "tl.sqrt"
    raised: ClassVar[str] = "ops.power"

    def as_number(self, condition: Fragment) -> Fragment:
        return fragment("tl.where({}, 1.0, 0.0)", condition)

    def binary(self, expr: Binary) -> Fragment:
        if expr.op == "**":
            return self.power(expr)
        if expr.op == "%":
            return fragment("ops.modulo({}, {})", self.value(expr.left), self.value(expr.right))
        if expr.op in LOGICAL:
            # & and | bind tighter than comparisons, so every operand that is not an atom is bracketed.
            left, right = (self._operand(side, expr) for side in (expr.left, expr.right))
            return fragment(f"{{}} {self.spelling[expr.op]} {{}}", left, right, binds=STRENGTH[expr.op])
        return super().binary(expr)

    def power(self, expr: Binary) -> Fragment:
        """A power, in double precision but for squares."""
        if expr.right == Number(value=2):
            return fragment("ops.square({})", self.value(expr.left))
        return fragment(f"{self.raised}({{}}, {{}})", self.value(expr.left), self.value(expr.right))

    def _operand(self, side: Expr, whole: Expr) -> Fragment:
        alone = Axis.SLOT in axes_of(whole) and Axis.SLOT not in axes_of(side)
        return fragment("ops.truth({})", self.truth(side)) if alone else self.truth(side, ATOM)

    def call(self, expr: Call) -> Fragment:
        if expr.function == "not":
            return fragment("~{}", self.truth(expr.args[0], ATOM), binds=_UNARY)
        if expr.function == "where":
            condition, yes, no = expr.args
            return fragment("tl.where({}, {}, {})", self.truth(condition), self.value(yes), self.value(no))
        if expr.function in ("min", "max"):
            left, right = pair(expr)
            return fragment(f"ops.{expr.function}imum({{}}, {{}})", self.value(left), self.value(right))
        function = self.sqrt if expr.function == "sqrt" else _FUNCTIONS[expr.function]
        return fragment(f"{function}({{}})", self.value(expr.args[0]))


class CountPrinter(_TritonPrinter):
    """One double per row and KV head."""

    raised = "ops.count_power"

    def leaf(self, expr: Leaf) -> Fragment:
        if isinstance(expr, Number):
            return _float64(expr.value)
        if isinstance(expr, ParamRef):
            return number(spelled(expr.name))
        if isinstance(expr, TensorRef):
            return fragment("{}.to(tl.float64)", constant(expr))
        assert isinstance(expr, Input)
        if expr.name == "live":
            return Fragment("live.to(tl.float64)", uses=(Use("input", "live"),))
        if expr.name == "seen":
            return Fragment("(now + 1).to(tl.float64)", uses=(Use("input", "seen"),))
        return number(expr.name)

    def reduce(self, expr: Reduce) -> Fragment:
        raise NotLowerable("a number that is counted over slots")


@dataclass(frozen=True)
class BlockPrinter(_TritonPrinter):
    """Float32 values over a block of slots; or, where a reduction over dims has no slots, over the dims.

    `hoisted` names the reductions that stand before the loop.
    """

    hoisted: dict[Expr, str]

    sqrt = "tl.sqrt_rn"

    def binary(self, expr: Binary) -> Fragment:
        if expr.op == "/":  # correctly rounded, so that equal quotients are equal
            return fragment("tl.div_rn({}, {})", self.value(expr.left), self.value(expr.right))
        return super().binary(expr)

    def power(self, expr: Binary) -> Fragment:
        made = super().power(expr)
        return made if expr.right == Number(value=2) else fragment("{}.to(tl.float32)", made)

    def leaf(self, expr: Leaf) -> Fragment:
        if isinstance(expr, Number) and not math.isfinite(expr.value):
            return Fragment(f'float("{expr.value}")')
        if isinstance(expr, Number):
            text = print_number(expr.value)
            return Fragment(f"{text}.0" if text.lstrip("-").isdigit() else text)
        if isinstance(expr, ParamRef):
            return fragment("{}.to(tl.float32)", number(spelled(expr.name)))
        if isinstance(expr, Random):
            return Fragment("ops.random(random_key, pos, now)", uses=(Use("helper", "random_key"),))
        if isinstance(expr, ColumnRef):
            return Fragment(expr.name, uses=(Use("column", expr.name),))
        if isinstance(expr, RingRef):
            use = Use("ring", expr.name, expr.op)
            return Fragment(ring_name(use), uses=(use,))
        if isinstance(expr, TensorRef):
            return constant(expr)
        if expr.name in FIXED:
            return fragment("{}.to(tl.float32)", number(expr.name))
        plain = {"position": "pos.to(tl.float32)", "age": "(now - pos).to(tl.float32)", "live": "live.to(tl.float32)"}
        return Fragment(plain.get(expr.name, expr.name), uses=(Use("input", expr.name),))

    def condition(self, expr: Expr) -> Fragment:
        """A condition that can be combined with others over slots."""
        return self.truth(expr) if Axis.SLOT in axes_of(expr) else fragment("ops.truth({})", self.truth(expr))

    def reduce(self, expr: Reduce) -> Fragment:
        name = self.hoisted[expr]
        return Fragment(name, uses=(Use("row", name),) if of_every_slot(expr) else ())

    def fold(self, expr: FoldRef) -> Fragment:
        held = Fragment(expr.name, uses=(Use("column", expr.name),))
        return fragment("ops.begun({}, {})", held, self.value(expr.start))


@dataclass(frozen=True)
class TilePrinter(BlockPrinter):
    """Float32 values over a block of slots and the dims of their keys or values: what varies over one of both lies along it."""

    def leaf(self, expr: Leaf) -> Fragment:
        if isinstance(expr, Input) and expr.name in ("k", "v"):
            return Fragment(expr.name, uses=(Use("input", expr.name),))
        made = super().leaf(expr)
        if isinstance(expr, TensorRef) and expr.dims:
            return fragment("{}[None, :]", made)
        return fragment("{}[:, None]", made) if Axis.SLOT in axes_of(expr) else made

    def reduce(self, expr: Reduce) -> Fragment:
        made = super().reduce(expr)
        if of_every_slot(expr):
            return fragment("{}[:, None]", made)
        return fragment("{}[None, :]", made) if is_vector(expr) else made


def of_every_slot(expr: Reduce) -> bool:
    """Whether a reduction over dims has a number for every slot."""
    return expr.axis is Axis.DIM and Axis.SLOT in axes_of(expr)


class TokenPrinter(_TritonPrinter):
    """Float64 values over the dims of a new token's `k` and `v`, and one for the token: what it has by itself."""

    def leaf(self, expr: Leaf) -> Fragment:
        if isinstance(expr, Number):
            return _float64(expr.value)
        if isinstance(expr, TensorRef):
            return fragment("{}.to(tl.float64)", constant(expr))
        if isinstance(expr, GivenRef):
            return Fragment(f"supplied_{spelled(expr.name)}.to(tl.float64)", uses=(Use("given", expr.name),))
        assert isinstance(expr, Input)
        return Fragment(expr.name, uses=(Use("input", expr.name),))

    def reduce(self, expr: Reduce) -> Fragment:
        return fragment(f"ops.ordered_{expr.op}({{}}, {dims_there(expr.body)})", self.value(expr.body))


def dims_there(body: Expr) -> str:
    """Which of the dims are there, of those that a value varies over: a block has a power of two."""
    return "e < E" if dims_of(body) == "v" else "d < D"


class DimPrinter(BlockPrinter):
    """A number per query head and dim, of the query alone: what a sketch ranks the dims by."""

    def leaf(self, expr: Leaf) -> Fragment:
        if isinstance(expr, (Number, ParamRef)) or (isinstance(expr, Input) and expr.name in FIXED):
            return super().leaf(expr)
        if expr != Input(name="q"):
            raise NotLowerable(SKETCHED)
        return Fragment("q", uses=(Use("input", "q"),))

    def reduce(self, expr: Reduce) -> Fragment:
        raise NotLowerable(SKETCHED)


def constant(ref: TensorRef) -> Fragment:
    """What a tensor of a file has for the head, float32: a number, or a block over dims, as the kernels load it."""
    return Fragment(f"constant_{spelled(ref.name)}", uses=(Use("vector" if ref.dims else "constant", ref.name),))


def number(name: str) -> Fragment:
    """One of the policy's numbers, as the kernels load it."""
    return Fragment(f"number_{name}", uses=(Use("number", name),))


def ring_name(use: Use) -> str:
    """What a ring, reduced, is called."""
    return f"{use.op}_of_{use.name}"


def ring_size(ring: str) -> Fragment:
    """How many queries a ring remembers."""
    return fragment("ops.count({})", number(size_of(ring)))


def _float64(value: float) -> Fragment:
    """A literal among doubles: one that is an operand of a function becomes a float32 first."""
    if not math.isfinite(value):
        return Fragment(f'tl.full([], float("{value}"), tl.float64)')
    return Fragment(print_number(value) if _is_float32(value) else f"tl.full([], {value!r}, tl.float64)")


def _is_float32(value: float) -> bool:
    try:
        return bool(struct.unpack("f", struct.pack("f", value))[0] == value)
    except OverflowError:
        return False


# -- statements --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Loop:
    """One pass over the slots, in blocks: statements before it, in it and after it. Without any in it, there is none.

    Attributes:
        reads: `k`, `v`: what it reads of every slot; then blocks are smaller.
    """

    before: tuple[str, ...]
    body: tuple[str, ...]
    after: tuple[str, ...] = ()
    reads: tuple[str, ...] = ()


@dataclass(frozen=True)
class Pass:
    """A loop in the making, and what its statements need."""

    before: tuple[Fragment, ...]
    body: tuple[Fragment, ...]
    after: tuple[Fragment, ...] = ()

    @property
    def uses(self) -> tuple[Use, ...]:
        """What all of them need."""
        return uses_of(*self.before, *self.body, *self.after)

    @property
    def reads(self) -> tuple[str, ...]:
        """`k`, `v`: what it reads of every slot."""
        return tuple(name for name in ("k", "v") if name in names_of(self.uses, "input"))

    def printed(self) -> Loop:
        """What a template places."""
        return Loop(texts(self.before), texts(self.body), texts(self.after), self.reads)
