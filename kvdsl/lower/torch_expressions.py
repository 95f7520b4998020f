"""Print expressions as torch code, for `kernels_torch.py` (`kvdsl/lower/torch.py`) and `cache.py`.

See `kvdsl.runtime.torch.view` for shapes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from copy import copy
from types import MappingProxyType
from typing import ClassVar

from kvdsl.ir.nodes import Axis, Call, Expr, Input, Number, Rank, Reduce, TensorRef, call, is_call
from kvdsl.ir.ops import INPUTS, KEEPS, OF_QUERY_HEADS, POOLS, RANGES, REDUCTIONS, TABLED, functions_of
from kvdsl.ir.printer import print_number
from kvdsl.ir.visitors import axes_of, has, of_query_heads
from kvdsl.lower.expression import (
    ATOM,
    Code,
    Fragment,
    Printer,
    Target,
    Use,
    as_float32,
    dims_of,
    fragment,
    of_slot_and_other,
    pair,
    spelled,
)

# Python's precedence, with & and | for conditions (they bind tighter than comparisons).
_STRENGTH = {"or": 4, "and": 5, "**": 9, "*": 7, "/": 7, "%": 7, "+": 6, "-": 6}
_STRENGTH |= {op: 3 for op in ("<", "<=", ">", ">=", "==", "!=")}
_UNARY = 8
_OVER_DIMS = {"sum": "sum(-1)", "mean": "mean(-1)", "max": "amax(-1)", "min": "amin(-1)"}
_OVER_DIMS |= {"var": "var(-1, correction=0)", "std": "std(-1, correction=0)"}
CAN = Target(
    reduces={
        **{over: [row.name for row in REDUCTIONS.values() if over in row.over] for over in RANGES},
        "queries": ("token", "sum", "squares", "max", "min", "last", "ema", "ring", "fold", "prune"),
        "dims": _OVER_DIMS,
    },
    keeps=KEEPS,
)
"""The torch target has everything that the checker accepts. `kvdsl.runtime.torch.view` has the masked ones."""


TORCH, VECTORS = Use("helper", "torch"), Use("helper", "vectors")


class _TorchPrinter(Printer):
    can = CAN
    strength = _STRENGTH
    unary = _UNARY
    functions: ClassVar[dict[str, str]] = functions_of("torch")
    library = (TORCH,)

    def number(self, value: float) -> Fragment:
        """Print a literal."""
        if math.isinf(value):
            return Fragment("-torch.inf" if value < 0 else "torch.inf", uses=(TORCH,))
        if math.isnan(value):
            return Fragment("torch.nan", uses=(TORCH,))
        return Fragment(print_number(value))

    def of_dtype(self, value: float) -> Fragment:
        """Print a literal with the dtype of values, float32, for a place without a tensor next to it."""
        made = self.number(value)
        return made if not made.text.lstrip("-").isdigit() else fragment("{}.0", made)

    def as_number(self, condition: Fragment) -> Fragment:
        return fragment("({}).float()", condition)

    def _power(self, expr: Call) -> Fragment:
        base, exponent = expr.args
        if exponent == Number(value=2):
            return fragment("{}.square()", self.value(base, ATOM))
        return fragment("{} ** {}", self.value(base, ATOM), self.value(exponent, ATOM), binds=_STRENGTH["**"])

    def _where(self, expr: Call) -> Fragment:
        condition, yes, no = expr.args
        chosen = self.of_dtype(yes.value) if yes.kind == no.kind == "number" else self.value(yes)
        return fragment("torch.where({}, {}, {})", self.truth(condition), chosen, self.value(no), uses=[TORCH])

    def _extreme(self, expr: Call) -> Fragment:
        """Print min and max; with a literal it is a clamp."""
        match pair(expr):
            case (Number(value=bound), x) | (x, Number(value=bound)):
                side = "min" if expr.op == "max" else "max"
                return fragment(f"({{}}).clamp({side}={{}})", self.value(x), self.number(bound))
        return self.function(expr)

    code: ClassVar[Code] = {
        **Printer.code,
        **dict.fromkeys(functions, Printer.function),
        **dict.fromkeys(("min", "max"), _extreme),
        "**": _power,
        "where": _where,
    }


class NumberPrinter(_TorchPrinter):
    """One value per row, or per row and KV head. The arguments are the spellings of params, inputs and tensors in their context."""

    def __init__(self, param: str, inputs: dict[str, str], tensor: str) -> None:
        self._param = param
        self._tensor = tensor
        self.inputs = inputs

    def _input(self, expr: Input) -> Fragment:
        return Fragment(self.inputs[expr.name])

    def of_dtype(self, value: float) -> Fragment:
        return Fragment(f"torch.tensor({print_number(value)}, dtype=torch.float64)", uses=(TORCH,))

    def reduce(self, expr: Reduce) -> Fragment:
        raise AssertionError("a number reduces nothing")

    code: ClassVar[Code] = {
        **_TorchPrinter.code,
        **dict.fromkeys((*TABLED, "live", "seen"), _input),
        "param": lambda self, expr: Fragment(self._param.format(spelled(expr.name))),
        "tensor": lambda self, expr: Fragment(self._tensor.format(expr.name)),
    }


class CountPrinter(NumberPrinter):
    """A data-dependent count, float64 like all counts, with one number per KV head.

    Args:
        view: the `View` of a settle, or of a query that selects.
        grouped: whether each query head of a group has its own count.
        agreed: whether a layer's heads agree, so that values are averaged over them.
    """

    def __init__(self, view: str, *, grouped: bool = False, agreed: bool = False) -> None:
        room = ".unsqueeze(2)" if grouped else ""
        number = f'{view}.exact("{{}}"){room}'
        super().__init__(
            number,
            {name: number.format(name) for name in (*TABLED, "live", "seen")},
            f'{view}.constants.scalar("{{}}"){room}.double()',
        )
        self._slots = TensorPrinter(view, grouped=grouped)
        self._view, self._grouped, self._mean = view, grouped, ".mean(1, keepdim=True)" if agreed else ""

    def reduce(self, expr: Reduce) -> Fragment:
        if expr.axis is Axis.DIM:
            return fragment(f"({{}}).double(){self._mean}", self._slots.value(expr))
        flag = ", grouped=True" if self._grouped else ""
        return fragment(f'{self._view}.visible.counted("{expr.op}", {{}}{flag}){self._mean}', self._slots.value(expr.body))

    def _enough(self, expr: Call) -> Fragment:
        values, share, order = expr.args
        parts = [self._slots.value(values), self(share), self._slots.value(order)]
        flag = ", grouped=True" if self._grouped else ""
        return fragment(f"{self._view}.visible.enough({{}}, {{}}, {{}}{flag}){self._mean}", *parts)

    code: ClassVar[Code] = {**NumberPrinter.code, "enough": _enough}


class TokenPrinter(_TorchPrinter):
    """Values of new tokens, read from `NewTokens` called `new`; see `kvdsl.runtime.torch.tokens`."""

    def of_dtype(self, value: float) -> Fragment:
        return Fragment(f"new.number({print_number(value)})")

    def _sqrt(self, expr: Call) -> Fragment:
        return fragment("new.sqrt({})", self.value(expr.args[0]))

    def reduce(self, expr: Reduce) -> Fragment:
        body = self.of_dtype(expr.body.value) if expr.body.kind == "number" else self.value(expr.body)
        alike = "" if dims_of(expr.body) else ", alike=True"
        return fragment(f'new.over_dims("{expr.op}", {{}}{alike})', body)

    code: ClassVar[Code] = {
        **_TorchPrinter.code,
        **dict.fromkeys(("k", "v"), lambda _, expr: Fragment(f"new.{expr.name}")),
        "tensor": lambda _, expr: Fragment(f'new.tensor("{expr.name}", dims={expr.dims})'),
        "sqrt": _sqrt,
        "given": lambda _, expr: Fragment(f'new.given("{expr.name}")'),
    }


class TensorPrinter(_TorchPrinter):
    """Values over queries and slots, read from a `View` called `view`; state columns are locals of their names.

    Args:
        grouped: whether the context has a group axis, as in a body that reads q.
        dims: whether the context has a dims axis, as inside a reduction over dims.
        names: locals of reductions over the text.
    """

    def __init__(
        self, view: str, *, grouped: bool = False, dims: bool = False, names: Mapping[Expr, str] = MappingProxyType({})
    ) -> None:
        self._view = view
        self._grouped = grouped
        self._dims = dims
        self._names = names

    def body(self, expr: Expr) -> Fragment:
        """Print a value of one query. If it reads q it is evaluated per query head and reduced over the group."""
        if not of_query_heads(expr):
            return self.value(expr)
        return fragment(f"{self._view}.over_group({{}})", self._inside(grouped=True).value(expr))

    def _inside(self, *, grouped: bool | None = None, dims: bool | None = None) -> TensorPrinter:
        return TensorPrinter(
            self._view,
            grouped=self._grouped if grouped is None else grouped,
            dims=self._dims if dims is None else dims,
            names=self._names,
        )

    def _sqrt(self, expr: Call) -> Fragment:
        return fragment(f"{self._view}.sqrt({{}})", self.value(expr.args[0]))

    def number(self, value: float) -> Fragment:
        """Print a literal next to float32 tensors."""
        return super().number(as_float32(value))

    def _of_view(self, member: str, *, grouped: bool = False, dims: bool = False) -> Fragment:
        """Print a member of the view, with axes for the group and dims if it lacks them here."""
        room = ".unsqueeze(2)" * (grouped and self._grouped) + ".unsqueeze(-1)" * (dims and self._dims)
        return Fragment(f"{self._view}.{member}{room}")

    def _input(self, expr: Input) -> Fragment:
        named = {"query_position": "query_position.float()"} | {name: f'number("{name}")' for name in TABLED}
        of_query_heads = expr.name in OF_QUERY_HEADS
        return self._of_view(
            named.get(expr.name, expr.name), grouped=not of_query_heads, dims=Axis.DIM not in INPUTS[expr.name].axes
        )

    def _tensor(self, expr: TensorRef) -> Fragment:
        return self._of_view(
            f'constants.{"vector" if expr.dims else "scalar"}("{expr.name}")', grouped=True, dims=not expr.dims
        )

    def column(self, name: str) -> Fragment:
        return self._lift(Fragment(name, uses=(Use("column", name),)))

    def ring(self, name: str, op: str, *argument: Fragment) -> Fragment:
        made = self._of_view(f'ring("{name}", "{op}"' + ", {}" * len(argument) + ")", grouped=True, dims=True)
        return fragment(made.text, *argument, uses=made.uses)

    def _lift(self, made: Fragment) -> Fragment:
        """Add the axes that a value over queries and slots lacks here."""
        return fragment("{}" + (".unsqueeze(2)" if self._grouped else "") + (".unsqueeze(-1)" if self._dims else ""), made)

    def reduce(self, expr: Reduce) -> Fragment:
        if expr.axis is Axis.DIM:
            return self._over_dims(expr)
        if expr.axis is Axis.HEAD:  # what each KV head has is its group's
            body = TensorPrinter(self._view).body(expr.body)
            return self._lift(fragment(f'{self._view}.visible.over_heads("{expr.op}", {{}})', body))
        if expr.axis is Axis.OTHER:
            return self._over_others(expr)
        if expr.within in ("page", "next"):
            return self._over_page(expr)
        if expr.within == "text":
            return self._over_text(expr)
        if (weighted := _weighted_vectors(expr)) is not None:
            weights, vectors = weighted
            made = self._inside(dims=False).value(weights)
            flag = ", grouped=True" if self._grouped else ""
            return fragment(f"{self._view}.visible.weighted({{}}, {self._view}.{vectors}{flag})", made)
        flags = "".join(f", {name}=True" for name, on in (("grouped", self._grouped), ("dims", self._dims)) if on)
        uses = _vectors(expr) if self._dims else ()
        return fragment(f'{self._view}.visible.over("{expr.op}", {{}}{flags})', self.value(expr.body), uses=uses)

    def _over_dims(self, expr: Reduce) -> Fragment:
        product = call("*", Input(name="q"), Input(name="k"))
        sides = _of_query_and_slot(expr) if self._view == "text" else None
        if sides is not None:
            inside = self._inside(dims=True)
            made = fragment(f"{self._view}.product({{}}, {{}})", *map(inside.value, sides))
        elif expr.op == "sum" and expr.body == product:
            dot = "dot_qk" if expr.within != "sketch" else f"sketch.dot({self._view}.query, {self._view}.key)"
            made = Fragment(f"{self._view}.{dot}")
        else:
            body = self._inside(dims=True).value(expr.body)
            sketched = expr.within == "sketch"
            reduced = f'{self._view}.sketch.over("{expr.op}", {{}})' if sketched else f"({{}}).{_OVER_DIMS[expr.op]}"
            made = fragment(reduced, body, uses=_vectors(expr))
        return fragment("{}" + (".unsqueeze(-1)" if self._dims else ""), made)

    def _over_text(self, expr: Reduce) -> Fragment:
        """Print the body as a function of the text's queries, evaluated block by block."""
        grouped, dims = of_query_heads(expr.body), Axis.DIM in axes_of(expr.body)
        lifted = (".unsqueeze(2)" if self._grouped and not grouped else "") + (
            ".unsqueeze(-1)" if self._dims and not dims else ""
        )
        if expr in self._names:
            return Fragment(self._names[expr] + lifted)
        body = TensorPrinter("text", grouped=grouped, dims=dims).value(expr.body)
        after = [] if expr.after is None else [TensorPrinter(self._view).value(expr.after)]
        flags = ", grouped=True" * grouped + ", dims=True" * dims + ", after={}" * len(after)
        return fragment(f'{self._view}.text.over("{expr.op}", lambda text: {{}}{flags}){lifted}', body, *after)

    def _over_page(self, expr: Reduce) -> Fragment:
        """Pages do not depend on the query, so they are reduced once per group, except values from the prompt's queries."""
        grouped, dims = of_query_heads(expr.body), Axis.DIM in axes_of(expr.body)
        inside = self._inside(grouped=grouped, dims=dims)
        lifted = (".unsqueeze(2)" if self._grouped and not grouped else "") + (
            ".unsqueeze(-1)" if self._dims and not dims else ""
        )
        flags = ", grouped=True" * grouped + ", dims=True" * dims + ", following=True" * (expr.within == "next")
        return fragment(f'{self._view}.pages.over("{expr.op}", {{}}{flags}){lifted}', inside.value(expr.body))

    def _over_others(self, expr: Reduce) -> Fragment:
        """Compare each slot with the others, once per group: the body is a function of both slots' values."""
        dims = Axis.DIM in axes_of(expr.body)
        pairs = _PairPrinter(self._view, dims=dims, names=self._names)
        body = pairs.value(expr.body)
        vectors = ", vectors=True" if pairs.compares_vectors else ""
        lifted = (".unsqueeze(2)" if self._grouped else "") + (".unsqueeze(-1)" if self._dims and not dims else "")
        flags = f"{', dims=True' if dims else ''}{vectors}{', itself=True' if expr.within == 'self' else ''}"
        own, others = (fragment("[" + ", ".join("{}" for _ in parts) + "]", *parts) for parts in (pairs.own, pairs.others))
        made = f'{self._view}.visible.over_others("{expr.op}", lambda own, other: {{}}, {{}}, {{}}{flags}){lifted}'
        return fragment(made, body, own, others)

    def _begun(self, expr: Call) -> Fragment:
        held, start = (TensorPrinter(self._view).value(arg) for arg in expr.args)
        return self._lift(fragment("torch.where({}.isnan(), {}, {})", held, start, held, uses=[TORCH]))

    def _project(self, expr: Call) -> Fragment:
        vector, matrix = expr.args
        assert matrix.kind == "tensor"
        name = "project_group" if matrix.group else "project"
        return fragment(f'{self._view}.constants.{name}("{matrix.name}", {{}})', self.value(vector))

    def _pairs(self, expr: Call) -> Fragment:
        return fragment(f"{self._view}.rotation.pairs({{}})", self.value(expr.args[0], ATOM))

    def _turn(self, expr: Call) -> Fragment:
        vector, by = expr.args
        return fragment(
            f"{self._view}.rotation.turn({{}}, {{}})", self.value(vector, ATOM), self._inside(dims=False).value(by)
        )

    def _ahead(self, expr: Call) -> Fragment:
        vector, *numbers = expr.args
        parts = [self.value(vector, ATOM), *map(TensorPrinter(self._view).value, numbers)]
        return fragment(f"{self._view}.rotation.ahead({', '.join('{}' for _ in parts)})", *parts)

    def _leverage(self, expr: Call) -> Fragment:
        vector, ridge = expr.args
        parts = self._inside(dims=True).value(vector), TensorPrinter(self._view).value(ridge)
        lifted = ".unsqueeze(-1)" if self._dims else ""
        return fragment(
            f"{self._view}.visible.leverage({{}}, {{}}{', grouped=True' if self._grouped else ''}){lifted}", *parts
        )

    def _rank(self, expr: Rank) -> Fragment:
        grouped = of_query_heads(expr.body) and expr.within != "heads"  # what these have of it has been pooled
        inside = self._inside(grouped=grouped, dims=False)
        lifted = (".unsqueeze(2)" if self._grouped and not grouped else "") + (".unsqueeze(-1)" if self._dims else "")
        name = {"all": "visible.rank", "page": "pages.rank", "heads": "visible.rank_over_heads"}[expr.within]
        flag = ", grouped=True" if grouped else ""
        return fragment(f"{self._view}.{name}({{}}{flag}){lifted}", inside.value(expr.body))

    def _enough(self, expr: Call) -> Fragment:
        values, share, order = expr.args
        parts = [self.value(values), CountPrinter(self._view)(share), self.value(order)]
        return fragment(f"{self._view}.visible.enough({{}}, {{}}, {{}}).float()", *parts)

    def _pool(self, expr: Call) -> Fragment:
        flat = TensorPrinter(self._view, names=self._names)  # what it pools is the group's
        values, size = expr.args
        op = expr.op.removesuffix("_pool")
        pool = f'{self._view}.visible.pool("{op}", {{}}, {{}}, {self._view}.protected)'
        return self._lift(fragment(pool, flat.body(values), flat.value(size)))

    code: ClassVar[Code] = {
        **_TorchPrinter.code,
        **dict.fromkeys(INPUTS.keys() - {"prev"}, _input),
        **dict.fromkeys(POOLS, _pool),
        "param": lambda self, expr: self._of_view(f'number("{spelled(expr.name)}")', grouped=True, dims=True),
        "tensor": _tensor,
        "vectors": lambda self, expr: self._of_view(f'constants.vectors("{expr.name}")'),
        "column": Printer.read_column,
        "sqrt": _sqrt,
        "rank": _rank,
        "random": lambda self, _: self._of_view("random()", grouped=True, dims=True),
        "begun": _begun,
        "project": _project,
        "turn": _turn,
        "ahead": _ahead,
        "pairs": _pairs,
        "leverage": _leverage,
        "enough": _enough,
    }


class _PairPrinter(TensorPrinter):
    """The body of a reduction over others, as a function of `own`, a block of slots, and `other`.

    Attributes:
        own, others: the values in these, computed once for all slots.
        compares_vectors: whether there is a value for every slot, other slot and dim.
    """

    def __init__(self, view: str, *, dims: bool = False, names: Mapping[Expr, str] = MappingProxyType({})) -> None:
        super().__init__(view, dims=dims, names=names)
        self.own: list[Fragment] = []
        self.others: list[Fragment] = []
        self.compares_vectors = dims

    def _inside(self, *, grouped: bool | None = None, dims: bool | None = None) -> TensorPrinter:
        inner = copy(self)  # which adds to the same lists
        inner._dims = self._dims if dims is None else dims
        return inner

    def __call__(self, expr: Expr, at_least: int = 0) -> Fragment:
        slots = TensorPrinter(self._view, dims=self._dims, names=self._names)
        if expr.kind == "other":
            return _listed(self.others, "other", slots(expr.body))
        if Axis.OTHER not in axes_of(expr) and (axes_of(expr) or has(expr, Reduce)):
            return _listed(self.own, "own", slots(expr))
        return super().__call__(expr, at_least)

    def _over_dims(self, expr: Reduce) -> Fragment:
        inside = self._inside(dims=True)
        if (sides := of_slot_and_other(expr)) is not None:
            made = fragment(f"{self._view}.product({{}}, {{}})", *map(inside.value, sides))
        else:
            self.compares_vectors = True
            made = fragment(f"({{}}).{_OVER_DIMS[expr.op]}", inside.value(expr.body))
        return fragment("{}" + (".unsqueeze(-1)" if self._dims else ""), made)


def _listed(parts: list[Fragment], name: str, part: Fragment) -> Fragment:
    """Return a part's place in a list, adding it if it is missing."""
    if part not in parts:
        parts.append(part)
    return Fragment(f"{name}[{parts.index(part)}]")


def _of_query_and_slot(expr: Reduce) -> tuple[Expr, Expr] | None:
    """Return the factors of a product of a query's and a slot's vector, which is a matrix product."""
    body = expr.body
    if expr.op != "sum" or expr.within != "all" or not is_call(body, "*"):
        return None
    for left, right in (body.args, body.args[::-1]):
        if axes_of(left) == {Axis.QUERY, Axis.DIM} and axes_of(right) == {Axis.SLOT, Axis.DIM}:
            return left, right
    return None


def _vectors(expr: Reduce) -> tuple[Use, ...]:
    """Return `VECTORS` if there is a value for every query, slot and dim, which takes much more memory than one per query and slot."""
    return (VECTORS,) if axes_of(expr.body) == {Axis.QUERY, Axis.SLOT, Axis.DIM} else ()


def _weighted_vectors(expr: Reduce) -> tuple[Expr, str] | None:
    """Return weights and vectors of `sum(weight * v over slots)`: a matrix product, without a value per query, slot and dim."""
    body = expr.body
    if expr.op != "sum" or expr.over != "slots" or not is_call(body, "*"):
        return None
    for weights, vectors in (body.args, body.args[::-1]):
        if vectors in (Input(name="k"), Input(name="v")) and {Axis.QUERY, Axis.SLOT} == axes_of(weights):
            return weights, "key" if vectors == Input(name="k") else "value"
    return None
