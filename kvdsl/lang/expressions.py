"""Expressions of the language as Python objects. Operators and calls build larger ones, which know their text and Python line."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from inspect import isfunction, signature
from numbers import Integral
from typing import Any, NoReturn, Union

from kvdsl.budget import is_number
from kvdsl.errors import KvdslError
from kvdsl.ir.ops import OPERATORS, Strength
from kvdsl.lang.places import Place, Text, here, joined
from kvdsl.syntax.reader import MAX_BYTES

NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_WORDS = re.compile(r"[A-Za-z_]\w*( [A-Za-z_]\w*)*", re.ASCII)

Operand = Union["Expression", float]
"""An operand: an expression or a number."""


class MisusedError(KvdslError, TypeError):
    """Python code that the language cannot express. `help`: what to write instead."""

    def __init__(self, message: str, help: str | None = None) -> None:
        super().__init__(message if help is None else f"{message}; {help}")
        self.message, self.help = message, help

    def __reduce__(self) -> tuple[type[MisusedError], tuple[str, str | None]]:
        return type(self), (self.message, self.help)


def _operator(op: str) -> tuple[Callable[[Any, Operand], Expression], Callable[[Any, Operand], Expression]]:
    """Return an operator's methods: of its left operand, and of its right one if the left is a number."""
    return lambda left, right: _binary(op, left, right), lambda right, left: _binary(op, left, right)


class Expression:
    """An expression of the language. It has no value in Python."""

    __slots__ = ("strength", "text")
    __array_ufunc__ = None  # NumPy's numbers defer to our operators

    def __init__(self, text: Text, strength: Strength, place: Place | None = None) -> None:
        if len(text.text) > MAX_BYTES:
            raise MisusedError(f"the expression is larger than {MAX_BYTES // 1024} KiB", "use `p.let` for repeated parts")
        self.text = text if place is None else text.made(place)
        self.strength = strength

    def __repr__(self) -> str:
        return self.text.text

    # -- operators -----------------------------------------------------------------------------------------------------

    __add__, __radd__ = _operator("+")
    __sub__, __rsub__ = _operator("-")
    __mul__, __rmul__ = _operator("*")
    __truediv__, __rtruediv__ = _operator("/")
    __mod__, __rmod__ = _operator("%")
    __pow__, __rpow__ = _operator("**")
    __and__, __rand__ = _operator("and")
    __or__, __ror__ = _operator("or")
    __lt__, __le__, __gt__, __ge__ = (_operator(op)[0] for op in ("<", "<=", ">", ">="))
    __eq__, __ne__ = _operator("==")[0], _operator("!=")[0]  # type: ignore[assignment]

    def __neg__(self) -> Expression:
        return Expression(joined("-", _side(self, Strength.FACTOR)), Strength.FACTOR, here())

    def __pos__(self) -> Expression:
        return self

    def __invert__(self) -> Expression:
        return Expression(joined("not ", _side(self, Strength.NOT)), Strength.NOT, here())

    def __abs__(self) -> Expression:
        return Expression(joined("abs(", self.text, ")"), Strength.ATOM, here())

    def __call__(
        self,
        *arguments: Operand | OfSlot,
        over: str | None = None,
        last: Operand | None = None,
        where: Operand | OfSlot | None = None,
        by: Operand | OfSlot | None = None,
        **named: Operand,
    ) -> Expression:
        """Call a name: `mean(x, over="slots", where=age > 8)`, `sum(x, last=32)`, `pyramid(budget, beta=10)`.

        Args:
            over: the range of a reduction. `last=32` means the last 32 queries.
            where: a filter. `by`: a key that groups slots.
            arguments, where, by: a function of the other slot compares each slot with it: `max(lambda j: dot(k, j.k), over="slots")`.
        """
        if NAME.fullmatch(self.text.text) is None:
            raise MisusedError(f"`{_short(self)}` is not a function", "leave out the parentheses after it")
        slot = _slot(*arguments, where, by)
        texts = [written(_of(one, slot)) for one in arguments]
        texts += [joined(f"{key} = ", written(one)) for key, one in named.items()]
        rest = joined(_over(over, last, slot), _clause("where", _of(where, slot)), _clause("by", _of(by, slot)))
        reduced = -1 if self.text.text == "dot" else 0
        if texts:
            texts[reduced] = joined(texts[reduced], rest)
        elif rest.text:
            raise MisusedError(f"`{self}` has nothing to reduce", f"write `{self}(x, over=...)`")
        inner = [part for text in texts for part in (", ", text)][1:]
        return Expression(joined(self.text, "(", *inner, ")"), Strength.ATOM, here())

    # -- operations that need a value ----------------------------------------------------------------------------------

    def __bool__(self) -> bool:
        raise MisusedError(
            f"`{_short(self)}` is neither true nor false in Python: it has a value for every cached token",
            "write `(a > 0) & (b > 0)`, `|` and `~` for `and`, `or` and `not`, `where(c, a, b)` for `a if c else b`, "
            "`(a < b) & (b < c)` for `a < b < c`, and import `max` and `min` from `kvdsl.lang`",
        )

    def __iter__(self) -> NoReturn:
        raise MisusedError(
            f"`{_short(self)}` is not a list",
            'import `sum`, `max` and `min` from `kvdsl.lang`, and write `sum(x, over="slots")`',
        )

    def __getitem__(self, item: object) -> NoReturn:
        raise MisusedError(
            f"`{_short(self)}` is not indexed: it has a value for every cached token",
            "`mean(x, last=32)` selects the last queries, `where(position < 4, x, y)` tokens",
        )


def name(text: str) -> Expression:
    """Return a name of the language; the compiler knows whether it is a value or a function.

    There is one class of expressions, because Python lets the right side of `a < b` go first if its class is a subclass of the left's.
    """
    return Expression(Text(text), Strength.ATOM)


class OtherSlot:
    """The slot that each is compared with: `j.position` reads its value of a name, `j(age % 3)` of an expression."""

    def __init__(self, slot: str) -> None:
        self._slot = slot

    def __getattr__(self, text: str) -> Expression:
        if text.startswith("__"):  # Python looks up special methods
            raise AttributeError(text)
        return Expression(Text(f"{self._slot}.{text}"), Strength.ATOM)

    def __call__(self, expression: Operand) -> Expression:
        return Expression(joined(f"{self._slot}.(", written(expression), ")"), Strength.ATOM, here())


OfSlot = Callable[[OtherSlot], Operand]


def _slot(*values: Any) -> OtherSlot | None:
    """Return the other slot, named like the first function's parameter."""
    functions = [one for one in values if isfunction(one)]
    return OtherSlot(next(iter(signature(functions[0]).parameters), "j")) if functions else None


def _of(value: Any, slot: OtherSlot | None) -> Any:
    return value(slot) if isfunction(value) else value


def _clause(word: str, value: Operand | None) -> Text:
    return Text("") if value is None else joined(f" {word} ", written(value))


def _over(over: str | None, last: Operand | None, slot: OtherSlot | None) -> Text:
    """Return the range of a call, with a leading space."""
    if last is not None:
        if over not in (None, "queries") or slot is not None:
            raise MisusedError("`last=32` means the last 32 queries", "leave out the other `over=`")
        return joined(" over last ", written(last), " queries")
    if over is None:
        if slot is not None:
            raise MisusedError("`over=` is missing", 'write `max(lambda j: ..., over="slots")`')
        return Text("")
    if not isinstance(over, str) or _WORDS.fullmatch(over) is None:
        raise MisusedError(f"`over=` is a word, not `{over!r:.40}`", 'write `over="slots"`, say')
    return joined(f" over {over}", "" if slot is None else f" as {slot._slot}")


def _binary(op: str, left: Operand, right: Operand) -> Expression:
    row, place = OPERATORS[op], here()
    first, second = row.sides
    return Expression(joined(_side(left, first), f" {op} ", _side(right, second)), row.strength, place)


def _short(expression: Expression) -> str:
    """Shorten an expression for a message."""
    text = repr(expression)
    return text if len(text) <= 60 else f"{text[:59]}…"


def _side(value: Operand, strength: Strength) -> Text:
    """Return an operand, in parentheses if it binds too weakly."""
    made = _expression(value)
    return made.text if made.strength >= strength else joined("(", made.text, ")")


def written(value: Operand) -> Text:
    """Return an expression or number as text of the language."""
    return _expression(value).text


def _expression(value: Any) -> Expression:
    """Return an operand as an expression."""
    if isinstance(value, Expression):
        return value
    if not is_number(value):
        raise MisusedError(f"`{value!r:.40}` cannot be part of an expression", "use names of `kvdsl.lang` and numbers")
    if not math.isfinite(value):
        raise MisusedError(
            f"`{float(value)}` is not a number of the language", "use `everything` for an unlimited number of tokens"
        )
    text = str(int(value)) if isinstance(value, Integral) else repr(float(value))
    return Expression(Text(text), Strength.ATOM if float(value) >= 0 else Strength.FACTOR)
