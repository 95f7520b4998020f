"""Print expressions as Triton, for the statements that `triton.py` and `triton_prompt.py` plan.

A value over slots is a float32 block in a loop over the slots. A number per row is a double. The text calls device functions of
`kvdsl/runtime/gpu/ops.py`.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

from kvdsl.ir.nodes import Axis, Call, Expr, GivenRef, Input, Number, Reduce, TensorRef
from kvdsl.ir.ops import POOLS, TABLED, functions_of
from kvdsl.ir.printer import print_number
from kvdsl.ir.visitors import axes_of, children
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
    keeps=("first", "last", "top", "where"),
)
"""What has a Triton form; `over others` only where slots are ranked for eviction."""


OF_VECTORS = "what a query gives every slot, where it is computed from keys, values or queries"
SKETCHED = "a sketch by anything but the query, dim by dim"
"""Computations without a Triton form, as `NotLowerable` quotes them."""


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
    """Print a double per row and KV head."""

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
    """Print float32 values over a block of slots, or over the dims if a reduction over dims reads no slots.

    Attributes:
        hoisted: names of the reductions that earlier loops compute.
    """

    hoisted: dict[Expr, str]

    def number(self, value: float) -> Fragment:
        if not math.isfinite(value):
            return Fragment(f'float("{value}")')
        text = print_number(value)
        return Fragment(f"{text}.0" if text.lstrip("-").isdigit() else text)

    def _rounded(self, expr: Call) -> Fragment:
        """Print a correctly rounded operation, so that equal scores compare as equal on every backend."""
        name = {"/": "tl.div_rn", "sqrt": "tl.sqrt_rn"}[expr.op]
        return fragment(f"{name}({', '.join('{}' for _ in expr.args)})", *map(self.value, expr.args))

    def power(self, expr: Call) -> Fragment:
        """Print a power in double precision, a square in float32."""
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
        """Print a condition that `&` and `|` combine with others over slots."""
        return self.truth(expr) if Axis.SLOT in axes_of(expr) else fragment("ops.truth({})", self.truth(expr))

    def reduce(self, expr: Reduce) -> Fragment:
        name = self.hoisted.get(expr)
        if name is None:  # a reduction over dims, outside a loop that reads vectors
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
    """Print float32 tiles [slots, dims of keys or values]. A value that varies over one axis has size 1 along the other."""

    def parts(self, expr: Expr) -> Fragment:
        made = super().parts(expr)
        if children(expr) or expr.kind == "reduce" or expr in (Input(name="k"), Input(name="v")):
            return made
        if expr.kind == "tensor" and expr.dims:
            return fragment("{}[None, :]", made)
        return fragment("{}[:, None]", made) if Axis.SLOT in axes_of(expr) else made

    def reduce(self, expr: Reduce) -> Fragment:
        made = super().reduce(expr)
        if of_every_slot(expr):
            return fragment("{}[:, None]", made)
        return fragment("{}[None, :]", made) if is_vector(expr) else made


def of_every_slot(expr: Reduce) -> bool:
    """Whether a reduction, over dims or others, has a number per slot."""
    return Axis.SLOT in axes_of(expr)


class TokenPrinter(_TritonPrinter):
    """Print float64 values of a new token: over the dims of its `k` and `v`, and scalars."""

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
    """Print the mask of a value's dims: a block is padded to a power of two."""
    return "e < E" if dims_of(body) == "v" else "d < D"


class DimPrinter(BlockPrinter):
    """Print the score of a sketch's dims, [query heads, dims], which reads the query alone."""

    def parts(self, expr: Expr) -> Fragment:
        fixed = expr.kind in ("number", "param") or (expr.kind == "input" and expr.name in (*TABLED, "q"))
        if not children(expr) and not fixed:
            raise NotLowerable(SKETCHED)
        return super().parts(expr)

    def reduce(self, expr: Reduce) -> Fragment:
        raise NotLowerable(SKETCHED)


def constant(ref: TensorRef) -> Fragment:
    """Print the KV head's row of a tensor of a file, as the kernels load it: a float32 number, or a block over dims."""
    return Fragment(f"constant_{spelled(ref.name)}", uses=(Use("vector" if ref.dims else "constant", ref.name),))


def number(name: str) -> Fragment:
    """Print one of the policy's numbers, as the kernels load it."""
    return Fragment(f"number_{name}", uses=(Use("number", name),))


def ring_name(use: Use) -> str:
    """Return the name of a reduced ring."""
    return f"{use.op}_of_{use.name}"


def ring_size(ring: str) -> Fragment:
    """Print the number of queries in a ring."""
    return fragment("ops.count({})", number(size_of(ring)))


def _float64(value: float) -> Fragment:
    """Print a double literal. Triton passes a bare one to functions as float32, so a value that float32 cannot hold is wrapped."""
    if not math.isfinite(value):
        return Fragment(f'tl.full([], float("{value}"), tl.float64)')
    return Fragment(print_number(value) if _is_float32(value) else f"tl.full([], {value!r}, tl.float64)")


def _is_float32(value: float) -> bool:
    try:
        return bool(struct.unpack("f", struct.pack("f", value))[0] == value)
    except OverflowError:
        return False


def numbers_in(uses: Iterable[Use], numbers: tuple[str, ...]) -> tuple[tuple[str, int], ...]:
    """List the numbers in use, each with its index in the table."""
    used = names_of(uses, "number")
    return tuple((name, n) for n, name in enumerate(numbers) if name in used)


def tensors_in(uses: Iterable[Use], kind: str, step: Step) -> tuple[tuple[str, int], ...]:
    """List the tensors used as `constant` or `vector`: name in the kernels, and index among the policy's tensors."""
    used = names_of(uses, kind)
    return tuple((spelled(tensor.name), n) for n, tensor in enumerate(step.tensors) if tensor.name in used)


def column_rows(step: Step) -> tuple[tuple[tuple[str, int], ...], tuple[tuple[str, int], ...]]:
    """List the columns of one number, each with its row in the table, and the rings, each with its index among the rings."""
    singles, rings = (tuple((name, n) for n, name in enumerate(names)) for names in (step.singles, step.rings))
    return singles, rings


# -- statements --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Loop:
    """One pass over the slots in blocks: statements before, in and after the loop. Without a body, there is no loop.

    Attributes:
        reads: `k`, `v`, if the body reads keys or values; blocks are then smaller.
        inner: statements of a nested loop over all slots. `behind`: statements of the body after the nested loop.
    """

    before: tuple[str, ...]
    body: tuple[str, ...]
    after: tuple[str, ...] = ()
    reads: tuple[str, ...] = ()
    inner: tuple[str, ...] = ()
    behind: tuple[str, ...] = ()


@dataclass(frozen=True)
class Pass:
    """A loop whose statements still carry their uses."""

    before: tuple[Fragment, ...]
    body: tuple[Fragment, ...]
    after: tuple[Fragment, ...] = ()
    inner: tuple[Fragment, ...] = ()
    behind: tuple[Fragment, ...] = ()

    @property
    def uses(self) -> tuple[Use, ...]:
        """Uses of all statements."""
        return uses_of(*self.before, *self.body, *self.inner, *self.behind, *self.after)

    @property
    def reads(self) -> tuple[str, ...]:
        """`k`, `v`, if a statement reads keys or values."""
        return tuple(name for name in ("k", "v") if name in names_of(self.uses, "input"))

    def printed(self) -> Loop:
        """Return the loop as text for a template."""
        before, body, after = texts(self.before), texts(self.body), texts(self.after)
        return Loop(before, body, after, self.reads, texts(self.inner), texts(self.behind))
