"""Expressions as Triton: what stands in the kernels of a generated `kernels_triton.py` (`kvdsl/lower/triton.py` and `triton_prompt.py` have
these).

A value over slots is a block of floats in a loop over the slots; numbers per row are doubles. `ops.py` of `kvdsl/runtime/gpu` has what the
text calls.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

from kvdsl.ir.axes import axes_of
from kvdsl.ir.nodes import Axis, Call, Expr, GivenRef, Input, Number, Reduce, TensorRef
from kvdsl.ir.ops import POOLS, TABLED, functions_of
from kvdsl.ir.printer import print_number
from kvdsl.ir.visitors import children
from kvdsl.lower.expression import (
    Code,
    Fragment,
    NotLowerable,
    Printer,
    Target,
    Use,
    dims_of,
    fragment,
    is_vector,
    names_of,
    size_of,
    spelled,
    texts,
    uses_of,
)
from kvdsl.lower.step import Step

# Python's precedence, with & and | for conditions (they bind tighter than comparisons).
STRENGTH = {"or": 4, "and": 5, "*": 7, "/": 7, "%": 7, "+": 6, "-": 6}
STRENGTH |= {op: 3 for op in ("<", "<=", ">", ">=", "==", "!=")}
_UNARY = 8
CAN = Target(
    reduces={
        "queries": ("token", "sum", "squares", "max", "min", "last", "ema", "ring", "fold", "prune"),
        "history": ("sum", "mean", "var", "std", "max", "min"),
        "slots": ("sum", "mean", "max", "min"),
        "dims": ("sum", "mean", "var", "std", "max", "min"),
        "others": ("sum", "mean", "max", "min"),
        "heads": ("sum", "mean", "max", "min"),
    },
)
"""What Triton reduces, `over others` in a settle alone; `ops.py` of `kvdsl/runtime/gpu` has it."""


OF_VECTORS = "what a query gives every slot, where it is computed from keys, values or queries"
SKETCHED = "a sketch by anything but the query, dim by dim"
"""What there is no Triton for."""


class _TritonPrinter(Printer):
    can = CAN
    strength = STRENGTH
    unary = _UNARY
    functions: ClassVar[dict[str, str]] = functions_of("triton") | {"begun": "ops.begun"}
    squared, raised = "ops.square", "ops.power"

    def as_number(self, condition: Fragment) -> Fragment:
        return fragment("tl.where({}, 1.0, 0.0)", condition)

    def operand(self, side: Expr, whole: Call) -> Fragment:
        alone = Axis.SLOT in axes_of(whole) and Axis.SLOT not in axes_of(side)
        return fragment("ops.truth({})", self.truth(side)) if alone else super().operand(side, whole)

    def _where(self, expr: Call) -> Fragment:
        condition, yes, no = expr.args
        return fragment("tl.where({}, {}, {})", self.truth(condition), self.value(yes), self.value(no))

    code: ClassVar[Code] = {
        **Printer.code,
        **dict.fromkeys(functions, Printer.function),
        "**": Printer.power,
        "where": _where,
    }


class CountPrinter(_TritonPrinter):
    """One double per row and KV head."""

    raised = "ops.count_power"

    def number(self, value: float) -> Fragment:
        return _float64(value)

    def reduce(self, expr: Reduce) -> Fragment:
        raise NotLowerable("a number that is counted over slots")

    code: ClassVar[Code] = {
        **_TritonPrinter.code,
        **dict.fromkeys(TABLED, lambda _, expr: number(expr.name)),
        "live": lambda *_: Fragment("live.to(tl.float64)", uses=(Use("input", "live"),)),
        "seen": lambda *_: Fragment("(now + 1).to(tl.float64)", uses=(Use("input", "seen"),)),
        "param": lambda _, expr: number(spelled(expr.name)),
        "tensor": lambda _, expr: fragment("{}.to(tl.float64)", constant(expr)),
    }


@dataclass(frozen=True)
class BlockPrinter(_TritonPrinter):
    """Float32 values over a block of slots; or, where a reduction over dims has no slots, over the dims.

    `hoisted` names the reductions that stand before the loop.
    """

    hoisted: dict[Expr, str]

    def number(self, value: float) -> Fragment:
        if not math.isfinite(value):
            return Fragment(f'float("{value}")')
        text = print_number(value)
        return Fragment(f"{text}.0" if text.lstrip("-").isdigit() else text)

    def _rounded(self, expr: Call) -> Fragment:
        """Correctly rounded, so that equal quotients and roots are equal."""
        name = {"/": "tl.div_rn", "sqrt": "tl.sqrt_rn"}[expr.op]
        return fragment(f"{name}({', '.join('{}' for _ in expr.args)})", *map(self.value, expr.args))

    def power(self, expr: Call) -> Fragment:
        """In double precision but for squares."""
        made = super().power(expr)
        return made if expr.args[1] == Number(value=2) else fragment("{}.to(tl.float32)", made)

    def column(self, name: str) -> Fragment:
        return Fragment(name, uses=(Use("column", name),))

    def ring(self, name: str, op: str, *argument: Fragment) -> Fragment:
        use = Use("ring", name, op)
        return Fragment(ring_name(use), uses=(use,))

    def _input(self, expr: Input) -> Fragment:
        cast = {"position": "pos.to(tl.float32)", "age": "(now - pos).to(tl.float32)", "live": "live.to(tl.float32)"}
        return Fragment(cast.get(expr.name, expr.name), uses=(Use("input", expr.name),))

    def condition(self, expr: Expr) -> Fragment:
        """A condition that can be combined with others over slots."""
        return self.truth(expr) if Axis.SLOT in axes_of(expr) else fragment("ops.truth({})", self.truth(expr))

    def reduce(self, expr: Reduce) -> Fragment:
        name = self.hoisted.get(expr)
        if name is None:  # over dims: no loop over them stands before a block of slots
            raise NotLowerable(OF_VECTORS)
        return Fragment(name, uses=(Use("row", name),) if of_every_slot(expr) else ())

    def _pooled(self, expr: Call) -> Fragment:
        name = self.hoisted[expr]
        return Fragment(name, uses=(Use("row", name),))

    code: ClassVar[Code] = {
        **_TritonPrinter.code,
        **dict.fromkeys(("attn", "logit", "q", "k", "v", "position", "age", "live", "observed", "query_head"), _input),
        **dict.fromkeys(TABLED, lambda _, expr: fragment("{}.to(tl.float32)", number(expr.name))),
        **dict.fromkeys(("/", "sqrt"), _rounded),
        **dict.fromkeys(POOLS, _pooled),
        "**": power,
        "param": lambda _, expr: fragment("{}.to(tl.float32)", number(spelled(expr.name))),
        "tensor": lambda _, expr: constant(expr),
        "column": Printer.read_column,
        "random": lambda *_: Fragment("ops.random(random_key, pos, now)", uses=(Use("helper", "random_key"),)),
    }


@dataclass(frozen=True)
class TilePrinter(BlockPrinter):
    """Float32 values over a block of slots and the dims of their keys or values: what varies over one of both lies along it."""

    def parts(self, expr: Expr) -> Fragment:
        made = super().parts(expr)
        if children(expr) or expr.kind == "reduce" or expr in (Input(name="k"), Input(name="v")):
            return made
        if isinstance(expr, TensorRef) and expr.dims:
            return fragment("{}[None, :]", made)
        return fragment("{}[:, None]", made) if Axis.SLOT in axes_of(expr) else made

    def reduce(self, expr: Reduce) -> Fragment:
        made = super().reduce(expr)
        if of_every_slot(expr):
            return fragment("{}[:, None]", made)
        return fragment("{}[None, :]", made) if is_vector(expr) else made


def of_every_slot(expr: Reduce) -> bool:
    """Whether a reduction, over dims or others, has a number for every slot."""
    return Axis.SLOT in axes_of(expr)


class TokenPrinter(_TritonPrinter):
    """Float64 values over the dims of a new token's `k` and `v`, and one for the token: what it has by itself."""

    def number(self, value: float) -> Fragment:
        return _float64(value)

    def reduce(self, expr: Reduce) -> Fragment:
        return fragment(f"ops.ordered_{expr.op}({{}}, {dims_there(expr.body)})", self.value(expr.body))

    def _given(self, expr: GivenRef) -> Fragment:
        return Fragment(f"supplied_{spelled(expr.name)}.to(tl.float64)", uses=(Use("given", expr.name),))

    code: ClassVar[Code] = {
        **_TritonPrinter.code,
        **dict.fromkeys(("k", "v"), lambda _, expr: Fragment(expr.name, uses=(Use("input", expr.name),))),
        "tensor": lambda _, expr: fragment("{}.to(tl.float64)", constant(expr)),
        "given": _given,
    }


def dims_there(body: Expr) -> str:
    """Which of the dims are there, of those that a value varies over: a block has a power of two."""
    return "e < E" if dims_of(body) == "v" else "d < D"


class DimPrinter(BlockPrinter):
    """A number per query head and dim, of the query alone: what a sketch ranks the dims by."""

    def parts(self, expr: Expr) -> Fragment:
        fixed = expr.kind in ("number", "param") or (isinstance(expr, Input) and expr.name in (*TABLED, "q"))
        if not children(expr) and not fixed:
            raise NotLowerable(SKETCHED)
        return super().parts(expr)

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


def numbers_in(uses: Iterable[Use], numbers: tuple[str, ...]) -> tuple[tuple[str, int], ...]:
    """The numbers that are used, and the place of each in the table."""
    used = names_of(uses, "number")
    return tuple((name, n) for n, name in enumerate(numbers) if name in used)


def tensors_in(uses: Iterable[Use], kind: str, step: Step) -> tuple[tuple[str, int], ...]:
    """The tensors that are used as `constant` or `vector`: how kernels call them, and the place of each among the policy's."""
    used = names_of(uses, kind)
    return tuple((spelled(tensor.name), n) for n, tensor in enumerate(step.tensors) if tensor.name in used)


def column_rows(step: Step) -> tuple[tuple[tuple[str, int], ...], tuple[tuple[str, int], ...]]:
    """The columns of one number and the row of each in the table, and the rings and the place of each among the rings."""
    singles, rings = (tuple((name, n) for n, name in enumerate(names)) for names in (step.singles, step.rings))
    return singles, rings


# -- statements --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Loop:
    """One pass over the slots, in blocks: statements before it, in it and after it. Without any in it, there is none.

    Attributes:
        reads: `k`, `v`: what it reads of every slot; then blocks are smaller.
        inner: statements of a pass over all slots, the other ones, within every block. `behind`: those behind it, in the block.
    """

    before: tuple[str, ...]
    body: tuple[str, ...]
    after: tuple[str, ...] = ()
    reads: tuple[str, ...] = ()
    inner: tuple[str, ...] = ()
    behind: tuple[str, ...] = ()


@dataclass(frozen=True)
class Pass:
    """A loop in the making, and what its statements need."""

    before: tuple[Fragment, ...]
    body: tuple[Fragment, ...]
    after: tuple[Fragment, ...] = ()
    inner: tuple[Fragment, ...] = ()
    behind: tuple[Fragment, ...] = ()

    @property
    def uses(self) -> tuple[Use, ...]:
        """What all of them need."""
        return uses_of(*self.before, *self.body, *self.inner, *self.behind, *self.after)

    @property
    def reads(self) -> tuple[str, ...]:
        """`k`, `v`: what it reads of every slot."""
        return tuple(name for name in ("k", "v") if name in names_of(self.uses, "input"))

    def printed(self) -> Loop:
        """What a template places."""
        before, body, after = texts(self.before), texts(self.body), texts(self.after)
        return Loop(before, body, after, self.reads, texts(self.inner), texts(self.behind))
