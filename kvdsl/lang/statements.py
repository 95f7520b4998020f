"""Statements as Python calls, read from the grammar. The words before a value, joined by `_`, name its argument.

    keep top expr by expr                        p.keep(top=budget / 2, by=std(attn))
    budget expr [across heads [floor expr]]      p.budget(budget, across_heads_floor=0.2)
    select ... [within | choosing | reused]      p.select(top=64, by=dot(q, k), in_layers=(2, ...))

A value right after the statement's own word has no name: `p.score(mean(attn))`, `p.when("prefill")`. Words after a value that name
none, as in `top expr dims` and `every expr queries`, are implied.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from kvdsl.diagnostics import listed
from kvdsl.lang.expressions import NAME, MisusedError, written
from kvdsl.lang.places import Text, joined
from kvdsl.reference import STATEMENTS, first_word, grammar_rules, old_rules
from kvdsl.sema.editions import GONE
from kvdsl.syntax.nodes import AXES

NAMED = ("param", "let", "input")
"""The statements that define names. They return these, and `kvdsl.lang.policies` has a method for each."""


@dataclass(frozen=True)
class Slot:
    """An argument; positional if `name` is empty."""

    kind: str
    name: str = ""


@dataclass(frozen=True)
class Group:
    """An optional or alternative part. `flag`: the argument that selects it if it needs no value."""

    choices: tuple[Parts, ...]
    optional: bool
    flag: str = ""


Parts = tuple[str | Slot | Group, ...]


@lru_cache(maxsize=1)
def forms() -> Mapping[str, tuple[Parts, ...]]:
    """Return the newest edition's statements that define no name, by first word: each form without that word."""
    found: dict[str, tuple[Parts, ...]] = {}
    for rule in STATEMENTS:
        word = first_word(rule)
        if word not in NAMED and word not in GONE:
            found[word] = (*found.get(word, ()), tuple(_named(_read(rule)[1:])))
    return found


def write(word: str, values: Sequence[Any], named: Mapping[str, Any]) -> Text:
    """Write a statement from positional and named arguments; None means missing.

    Raises:
        MisusedError: if no form of the statement fits.
    """
    for form in forms()[word]:
        writer = _Writer([*values], {name: value for name, value in named.items() if value is not None})
        try:
            parts = [*writer.write(form)]
        except _MisfitError:
            continue
        if not writer.values and not writer.named:
            return joined(word, *parts)
    raise MisusedError(f"`{word}` has no such form", f"write {listed(ways(word))}")


def ways(word: str) -> Iterator[str]:
    """Yield the calls of a statement."""
    for form in forms()[word]:
        yield f"p.{word}({', '.join(_signature(form))})"


# -- from the grammar --------------------------------------------------------------------------------------------------

_TOKEN = re.compile(r'"\S+?"|\w+|[\[\]()|]')
_LIST = re.compile(r'expr \("," expr\)\*')
_KINDS = ("expr", "NAME", "range", "list")


def _read(rule: str) -> Parts:
    """Return the parts of a rule, with the rules that it names expanded."""
    return _with_axes(rule, *(axes[0] for axes in AXES.get(rule, ())))


def _with_axes(rule: str, *axes: str) -> Parts:
    """Return the parts of a rule with these axes filled in."""
    text = _LIST.sub("list", grammar_rules()[rule])
    for axis in axes:
        text = text.replace("NAME", f'"{axis}"', 1)
    return _sequence(_TOKEN.findall(text))


def _sequence(tokens: list[str]) -> Parts:
    """Read parts up to the end, or to a closing or alternative sign."""
    found: list[str | Slot | Group] = []
    while tokens and tokens[0] not in ("]", ")", "|"):
        token = tokens.pop(0)
        if token in ("[", "("):
            choices = [_sequence(tokens)]
            while tokens.pop(0) == "|":
                choices.append(_sequence(tokens))
            choices = [one for one in choices if one]
            found += [Group(tuple(choices), token == "[")] if choices else []
        elif token.startswith('"'):
            found.append(token.strip('"'))
        elif token in _KINDS:
            found.append(Slot(token))
        elif token in AXES:  # one for each axis that it can name
            found += [Group((_with_axes(token, axis),), optional=True) for axis in AXES[token][0]]
        elif token not in old_rules():
            found += _read(token)
    return tuple(found)


def _named(parts: Parts, outer: tuple[str, ...] = (), behind: tuple[str, ...] = ()) -> Iterator[str | Slot | Group]:
    """Yield the parts with names for their slots; `outer` are words before them, `behind` words after them that tell choices apart."""
    words, first = outer, True
    for part in parts:
        match part:
            case Slot():
                yield Slot(part.kind, "_".join((*(words if first else words[-1:]), *behind)))
                words, first = (), False
            case Group():
                yield _named_group(part, words if first else ())
            case str():
                yield part
                words += (part,) if part.isidentifier() else ()


def _named_group(group: Group, outer: tuple[str, ...]) -> Group:
    several = len(group.choices) > 1
    choices = tuple(
        tuple(_named(one, outer, _words(one) if several and isinstance(one[0], Slot) else ())) for one in group.choices
    )
    needs_none = all(isinstance(part, str) or (isinstance(part, Group) and part.optional) for part in choices[0])
    return Group(choices, group.optional, "_".join((*outer, *_words(choices[0]))) if needs_none else "")


def _words(parts: Parts) -> tuple[str, ...]:
    return tuple(part for part in parts if isinstance(part, str) and part.isidentifier())


def _names(parts: Parts) -> Iterator[str]:
    """Yield the names of arguments."""
    for part in parts:
        match part:
            case Slot(name=name):
                yield name
            case Group(choices=choices, flag=flag):
                yield flag
                yield from (name for one in choices for name in _names(one))


def _signature(parts: Parts) -> Iterator[str]:
    """Yield the arguments of a call, optional ones in brackets."""
    for part in parts:
        match part:
            case Slot(kind=kind, name=name):
                yield f"{name}={_SHOWN[kind]}" if name else _SHOWN[kind].strip("()")
            case Group():
                flag = [f"{part.flag}=True"] if part.flag else []
                inner = " or ".join(", ".join(_signature(one)) for one in part.choices)
                text = ", ".join([*flag, *([inner] if inner else [])])
                yield f"[{text}]" if part.optional else text


_SHOWN = {"expr": "x", "NAME": '"word"', "range": "(low, high)", "list": "[a, b]"}


# -- to the language ---------------------------------------------------------------------------------------------------


class _MisfitError(Exception):
    """This form of a statement does not take the values."""


@dataclass
class _Writer:
    """Writes a statement, consuming its values."""

    values: list[Any]
    named: dict[str, Any]

    def write(self, parts: Parts) -> Iterator[str | Text]:
        """Yield the parts, each with a leading space."""
        for part in parts:
            match part:
                case str():
                    yield f" {part}"
                case Slot():
                    yield joined(" ", _WRITE[part.kind](self._take(part)))
                case Group():
                    yield from self.write(self._choice(part))

    def _take(self, slot: Slot) -> Any:
        if slot.name and slot.name in self.named:
            return self.named.pop(slot.name)
        if slot.kind == "range" and len(self.values) == 2:
            low, high = self.values
            self.values.clear()
            return low, high
        if not slot.name and self.values:
            return self.values.pop(0)
        raise _MisfitError

    def _choice(self, group: Group) -> Parts:
        """Return the chosen alternative of a group; nothing if an optional one is left out."""
        flagged = group.flag in self.named and self.named.pop(group.flag) is not False
        for parts in group.choices:
            names = {*_names(parts)} - {""}
            if flagged or names & self.named.keys() or (Slot("expr") in parts and self.values):
                return parts
        return () if group.optional else group.choices[0]


def _word(value: Any) -> Text:
    if not isinstance(value, str) or NAME.fullmatch(value) is None:
        raise MisusedError(f"`{value!r:.40}` is not a word", 'write `p.when("prefill")`, say')
    return Text(value)


def range_of(value: Any) -> Text:
    """Write `(2, ...)` as `2..`."""
    match value:
        case (first, last) if isinstance(value, tuple):
            low, high = (Text("") if end is ... else written(end) for end in (first, last))
            return joined(low, "..", high)
    raise MisusedError(f"`{value!r:.40}` is not a range", "write `(2, 9)`, both ends included, or `(2, ...)`")


def _list(value: Any) -> Text:
    if not isinstance(value, (list, tuple)) or not value:
        raise MisusedError(f"`{value!r:.40}` is not a list of numbers", "write `[2, 13]`, say")
    return joined(*[part for one in value for part in (", ", written(one))][1:])


_WRITE = {"expr": written, "NAME": _word, "range": range_of, "list": _list}
