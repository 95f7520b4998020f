"""Expressions as torch code: what `kernels_torch.py` and `cache.py` hold. See `kvdsl.runtime.torch.view` for shapes."""

from __future__ import annotations

import math
from typing import ClassVar

from kvdsl.ir.axes import axes_of
from kvdsl.ir.nodes import Axis, Binary, Call, ColumnRef, Expr, Input, Number, ParamRef, Pool, Reduce, RingRef
from kvdsl.ir.ops import OPERATORS
from kvdsl.lower.expression import ATOM, Leaf, Printer, Target, as_float32, literal, pair, reads
from kvdsl.lower.spelling import spelled

# Python's precedence, with & and | for conditions (they bind tighter than comparisons).
_STRENGTH = {"or": 4, "and": 5, "**": 9, "*": 7, "/": 7, "%": 7, "+": 6, "-": 6}
_STRENGTH |= {op: 3 for op in ("<", "<=", ">", ">=", "==", "!=")}
_UNARY = 8
_OVER_DIMS = {"sum": "sum(-1)", "mean": "mean(-1)", "max": "amax(-1)", "min": "amin(-1)"}
_OVER_DIMS |= {"var": "var(-1, correction=0)", "std": "std(-1, correction=0)"}
_FUNCTIONS = {name: f"torch.{name}" for name in ("abs", "sqrt", "exp", "log", "floor", "ceil")}
_MASKED = ("sum", "mean", "var", "std", "max", "min")
CAN = Target(
    reduces={
        "queries": ("token", "sum", "squares", "max", "min", "last", "ema", "ring"),
        "history": (*_MASKED, "median"),
        "slots": (*_MASKED, "median"),
        "dims": _OVER_DIMS,
        "sketch": _MASKED,
        "page": ("max", "min"),
    },
    functions=("neg", "not", "where", "max", "min", *_FUNCTIONS),
    operators=OPERATORS,
    pools=("max", "mean"),
)
"""What the torch backend has code for: everything that is accepted. `kvdsl.runtime.torch.view` has the masked reductions."""


class _TorchPrinter(Printer):
    can = CAN
    strength = _STRENGTH
    spelling: ClassVar[dict[str, str]] = {"and": "&", "or": "|"}
    negation = ("-", _UNARY)

    def number(self, value: float) -> str:
        """A literal."""
        return literal(value)

    def of_dtype(self, value: float) -> str:
        """A literal that has the dtype of values by itself, where no tensor stands beside it: float32."""
        text = self.number(value)
        return text if not text.lstrip("-").isdigit() else f"{text}.0"

    def as_number(self, condition: str) -> str:
        return f"({condition}).float()"

    def binary(self, expr: Binary) -> tuple[str, int]:
        if expr.op == "**" and expr.right == Number(value=2):
            return f"{self.value(expr.left, ATOM)}.square()", ATOM
        if expr.op == "**":
            return f"{self.value(expr.left, ATOM)} ** {self.value(expr.right, ATOM)}", _STRENGTH["**"]
        if expr.op in ("and", "or"):
            # & and | bind tighter than comparisons, so every operand that is not an atom is bracketed.
            left, right = (self.truth(side, ATOM) for side in (expr.left, expr.right))
            return f"{left} {self.spelling[expr.op]} {right}", _STRENGTH[expr.op]
        return super().binary(expr)

    def call(self, expr: Call) -> tuple[str, int]:
        if expr.function == "not":
            return f"~{self.truth(expr.args[0], ATOM)}", _UNARY
        if expr.function == "where":
            condition, yes, no = expr.args
            chosen = self.of_dtype(yes.value) if isinstance(yes, Number) and isinstance(no, Number) else self.value(yes)
            return f"torch.where({self.truth(condition)}, {chosen}, {self.value(no)})", ATOM
        if expr.function in ("min", "max"):
            return self._extreme(expr)
        return f"{_FUNCTIONS[expr.function]}({self.value(expr.args[0])})", ATOM

    def _extreme(self, expr: Call) -> tuple[str, int]:
        """Min and max; against a literal it is a clamp."""
        left, right = pair(expr)
        if isinstance(left, Number):
            left, right = right, left
        if isinstance(right, Number):
            bound = "min" if expr.function == "max" else "max"
            return f"({self.value(left)}).clamp({bound}={self.number(right.value)})", ATOM
        return f"torch.{expr.function}imum({self.value(left)}, {self.value(right)})", ATOM


class NumberPrinter(_TorchPrinter):
    """One value per row. `param` and `given` say how params and inputs are spelled in the place where the text goes."""

    def __init__(self, param: str, given: dict[str, str]) -> None:
        self._param = param
        self.given = given

    def leaf(self, expr: Leaf) -> str:
        if isinstance(expr, Number):
            return literal(expr.value)
        if isinstance(expr, ParamRef):
            return self._param.format(spelled(expr.name))
        assert isinstance(expr, Input)
        return self.given[expr.name]

    def of_dtype(self, value: float) -> str:
        return f"torch.tensor({literal(value)}, dtype=torch.float64)"

    def reduce(self, expr: Reduce) -> tuple[str, int]:
        raise AssertionError("a number reduces nothing")


class TensorPrinter(_TorchPrinter):
    """Values over queries and slots, read from a `View` called `view`; state columns are locals of their names.

    `grouped` and `dims` tell which axes beyond the four the surroundings have: a body that reads q has the group's, and inside a
    reduction over dims there are dims.
    """

    def __init__(self, view: str, *, grouped: bool = False, dims: bool = False) -> None:
        self._view = view
        self._grouped = grouped
        self._dims = dims

    def body(self, expr: Expr) -> str:
        """What is made of one query: per query head where it reads q, then reduced over the group."""
        if not reads(expr, "q"):
            return self.value(expr)
        return f"{self._view}.over_group({self._inside(grouped=True).value(expr)})"

    def _inside(self, *, grouped: bool | None = None, dims: bool | None = None) -> TensorPrinter:
        return TensorPrinter(
            self._view,
            grouped=self._grouped if grouped is None else grouped,
            dims=self._dims if dims is None else dims,
        )

    def number(self, value: float) -> str:
        """A literal beside float32 tensors."""
        known = as_float32(value)
        return literal(known) if math.isfinite(known) else f"{'-' if known < 0 else ''}torch.inf"

    def leaf(self, expr: Leaf) -> str:
        if isinstance(expr, Number):
            return self.number(expr.value)
        if isinstance(expr, Input) and expr.name == "q":
            return f"{self._view}.q"
        if isinstance(expr, Input) and expr.name in ("k", "v"):
            return f"{self._view}.{expr.name}" + (".unsqueeze(2)" if self._grouped else "")
        return self._lift(self._four_axes(expr))

    def _four_axes(self, expr: Leaf) -> str:
        if isinstance(expr, ColumnRef):
            return expr.name
        if isinstance(expr, RingRef):
            return f'{self._view}.ring("{expr.name}", "{expr.op}")'
        if isinstance(expr, ParamRef):
            return f'{self._view}.number("{spelled(expr.name)}")'
        if isinstance(expr, Input):
            is_number = expr.name in ("budget", "prompt", "layer", "layers")
            return f'{self._view}.number("{expr.name}")' if is_number else f"{self._view}.{expr.name}"
        return f"{self._view}.random()"

    def _lift(self, text: str) -> str:
        """Make room for the axes that a value over queries and slots lacks here."""
        return text + (".unsqueeze(2)" if self._grouped else "") + (".unsqueeze(-1)" if self._dims else "")

    def reduce(self, expr: Reduce) -> tuple[str, int]:
        if expr.axis is Axis.DIM:
            return self._over_dims(expr)
        if expr.within == "page":
            return self._over_page(expr)
        flags = "".join(f", {name}=True" for name, on in (("grouped", self._grouped), ("dims", self._dims)) if on)
        return f'{self._view}.over_slots("{expr.op}", {self.value(expr.body)}{flags})', ATOM

    def _over_dims(self, expr: Reduce) -> tuple[str, int]:
        product = Binary(op="*", left=Input(name="q"), right=Input(name="k"))
        if expr.op == "sum" and expr.body == product:
            text = f"{self._view}.dot_{'sketch' if expr.within == 'sketch' else 'qk'}"
        elif expr.within == "sketch":
            text = f'{self._view}.over_sketch("{expr.op}", {self._inside(dims=True).value(expr.body)})'
        else:
            text = f"({self._inside(dims=True).value(expr.body)}).{_OVER_DIMS[expr.op]}"
        return text + (".unsqueeze(-1)" if self._dims else ""), ATOM

    def _over_page(self, expr: Reduce) -> tuple[str, int]:
        """What pages hold has nothing to do with the query: it is found once for the whole group."""
        dims = Axis.DIM in axes_of(expr.body)
        inside = self._inside(grouped=False, dims=dims)
        text = f'{self._view}.over_page("{expr.op}", {inside.value(expr.body)}{", dims=True" if dims else ""})'
        lifted = (".unsqueeze(2)" if self._grouped else "") + (".unsqueeze(-1)" if self._dims and not dims else "")
        return text + lifted, ATOM

    def pool(self, expr: Pool) -> tuple[str, int]:
        return f"{self._view}.{expr.op}_pool({self.value(expr.body)}, {self.value(expr.size)})", ATOM
