"""Policies written in Python: a function writes a policy into a draft."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType
from typing import Any, overload

from kvdsl.diagnostics import Diagnostic, Sink, nearest
from kvdsl.ir.printer import quote
from kvdsl.lang.expressions import NAME, Expression, MisusedError, Operand, written
from kvdsl.lang.expressions import name as _name
from kvdsl.lang.places import MadeFile, Place, Text, definition, here, joined, laid_out
from kvdsl.lang.statements import NAMED, forms, range_of, ways, write
from kvdsl.reference import STATEMENTS, first_word
from kvdsl.sema.editions import GONE
from kvdsl.sema.modules import EDITION
from kvdsl.shipped import combine
from kvdsl.source import SourceFile
from kvdsl.syntax.formatter import format_source

Body = FunctionType


class Draft:
    """A policy being written. Every statement of the language is a method."""

    def __init__(self) -> None:
        self._statements: list[Text] = []

    def param(self, name: str, default: Operand, *, in_: tuple[Any, Any] | None = None) -> Expression:
        """`param NAME = default in low..high`: `p.param("sigma", 24, in_=(0, ...))`."""
        self._add("param ", _checked(name), " = ", written(default), *(() if in_ is None else (" in ", range_of(in_))))
        return _name(name)

    @overload
    def let(self, name: str, value: Operand | Callable[..., Operand]) -> Expression: ...
    @overload
    def let(self, name: Callable[..., Operand]) -> Expression: ...

    def let(self, name: Any, value: Any = None) -> Expression:
        """`let NAME = value`. A Python function becomes a function: `p.let("share", lambda x: x / sum(x, over="slots"))`.

        `@p.let` decorates a `def`, too.
        """
        if value is None and inspect.isfunction(name):
            name, value = name.__name__, name
        head: tuple[str | Text, ...] = (" ", _checked(name))
        if inspect.isfunction(value):
            parameters = inspect.signature(value).parameters.values()
            value = value(*(_name(_checked(one.name)) for one in parameters))
            inner = [part for one in parameters for part in (", ", _parameter(one))][1:]
            head = (*head, "(", *inner, ")")
        self._add("let", *head, " = ", written(value))
        return _name(name)

    @overload
    def input(self, name: str, default: Operand | None = None) -> Expression: ...
    @overload
    def input(self, name: str, *axes: str, from_: str) -> Expression: ...

    def input(self, name: str, default: Any = None, *axes: str, from_: str | None = None) -> Expression:
        """`input NAME = default`, a number per token from the caller; `input NAME [axes] from "file"`; or a span.

        `p.input("basis", "layers", "heads", "dims", from_="basis.safetensors")`, `p.input("tool", from_="spans")`
        """
        if from_ == "spans" and default is None and not axes:
            self._add(f"input {_checked(name)} from spans")
        elif from_ is None:
            self._add("input ", _checked(name), *(() if default is None else (" = ", written(default))))
        else:
            named = ", ".join(map(_checked, (default, *axes)))
            self._add("input ", f"{_checked(name)} [{named}] from {quote(from_)}")
        return _name(name)

    def __getattr__(self, word: str) -> Callable[..., None]:
        if word in GONE:
            raise AttributeError(f"edition {EDITION} of the language has no `{word}`: {GONE[word]}")
        if word not in forms():
            near = nearest(word, (*forms(), *NAMED))
            raise AttributeError(f"the language has no statement `{word}`" + (f"; did you mean `{near}`?" if near else ""))

        def statement(*values: Any, **named: Any) -> None:
            self._put(write(word, values, named))

        statement.__name__, statement.__doc__ = word, _explained(word)
        return statement

    def __dir__(self) -> Iterable[str]:
        return [*super().__dir__(), *forms()]

    def _add(self, *parts: str | Text) -> None:
        self._put(joined(*parts))

    def _put(self, statement: Text) -> None:
        self._statements.append(statement.made(here()))


def _explained(word: str) -> str:
    """Return a statement's meaning and its calls."""
    docs = {STATEMENTS[rule][0]: None for rule in STATEMENTS if first_word(rule) == word}
    return "\n\n".join(("; ".join(docs), *ways(word)))


def _checked(name: Any) -> str:
    """Check a name of the language."""
    if not isinstance(name, str) or NAME.fullmatch(name) is None:
        raise MisusedError(f"`{name!r:.40}` is not a name", "a name has ASCII letters, digits and `_`")
    return name


def _parameter(one: inspect.Parameter) -> Text:
    """Return a function's parameter as text."""
    if one.kind is not inspect.Parameter.POSITIONAL_OR_KEYWORD:
        raise MisusedError(f"a function of the language cannot have `{one}`", "name each of its arguments")
    return Text(one.name) if one.default is one.empty else joined(f"{one.name} = ", written(one.default))


# -- the finished policy -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Policy:
    """A policy written in Python. `kvdsl.load` makes a cache class of it, as of a policy's name.

    Attributes:
        name: as in `policy NAME`. `stem`: the name of its package.
        source: the text that the compiler reads; diagnostics in it point at the Python code that wrote it.
        place: the place of its definition.
    """

    name: str
    stem: str
    source: SourceFile
    place: Place

    def __repr__(self) -> str:
        return f"<kvdsl policy {self.name}, {self.place.file}:{self.place.line}>"

    @property
    def kv(self) -> str:
        """The policy as a .kv file. A policy with clauses is flattened, and must have no errors."""
        from kvdsl.sema.files import file_text

        return file_text(self.source)

    def with_(self, clauses: str) -> Policy:
        """Return the policy with clauses, `with_("when prefill, keep last 64")`, as in `policy A = B with ...`.

        Raises:
            DiagnosticError: if the clauses cannot be text of a policy.
        """
        combined = combine(self.source, clauses)
        return Policy(combined.policy, combined.stem, combined, here())

    def check(self, **settings: Any) -> tuple[Diagnostic, ...]:
        """Return errors and warnings of the policy with these values of params."""
        from kvdsl.sema.files import analyse

        return analyse(self.source, settings={name: str(value) for name, value in settings.items()}).diagnostics


@overload
def policy(body: Body) -> Policy: ...
@overload
def policy(
    *, name: str | None = None, changes: str | None = None, imports: str | Iterable[str] = ()
) -> Callable[[Body], Policy]: ...


def policy(
    body: Body | None = None,
    *,
    name: str | None = None,
    changes: str | None = None,
    imports: str | Iterable[str] = (),
) -> Any:
    """Makes a policy of a function that writes it, at once: `@kvdsl.policy`.

    The function is given the policy to write (`kvdsl.lang.policies.Draft`). Its other parameters are the policy's params, with their
    defaults, and its docstring is the policy's. What the policy has from elsewhere it reads by `kvdsl.lang.name("recent")`.

    Args:
        name: the policy's [default: the function's, `Calm` for `calm`].
        changes: the policy that this one changes, by its name in the language: `policy Once = H2O with { ... }`.
        imports: shipped policies and .kv files to import, `"h2o"`.

    Raises:
        MisusedError: if the function writes what is none of the language. What is wrong with the policy is found by `check` and `load`.
    """
    if body is None:
        return lambda body: policy(body, name=name, changes=changes, imports=imports)  # type: ignore[call-overload]
    own = body.__name__
    called = "".join(part[:1].upper() + part[1:] for part in own.split("_")) if name is None else name
    stem = own if name is None else called.lower()
    place = definition(body)
    heads = [_import(one) for one in ((imports,) if isinstance(imports, str) else imports)]
    before = "" if changes is None else f" = {_checked(changes)} with"
    head = Text(f"policy {_checked(called)}{before} {{").made(place)
    statements = [_docstring(body.__doc__).made(place)] if body.__doc__ else []
    statements += _statements(body)
    parts: list[str | Text] = [
        f"kv {EDITION}\n\n",
        *heads,
        head,
        "\n",
        *(joined("  ", one, "\n") for one in statements),
        "}\n",
    ]
    return Policy(called, stem, _file(stem, place, joined(*parts)), place)


def _file(stem: str, place: Place, written: Text) -> SourceFile:
    """Lay out the text as a file next to the Python file, so that relative paths start there."""
    text = format_source(SourceFile(f"<{stem}>", written.text), Sink())
    beside = Path(place.file).with_name(f"{stem}.kv") if Path(place.file).is_file() else None
    if text is None:  # it has mistakes, which `check` tells
        return MadeFile(f"<{stem}>", written.text, beside, tuple(written.marks()), place=place)
    return MadeFile(f"<{stem}>", text, beside, laid_out(written, text), place=place)


def _statements(body: Body) -> list[Text]:
    """Return the statements that the function writes."""
    parameters = [*inspect.signature(body).parameters.values()][1:]
    statements: list[Text] = []
    for one in parameters:
        if one.default is one.empty:
            raise MisusedError(
                f"`{one.name}` of `{body.__name__}` has no default, which a param needs", f"write `{one.name}=512`, say"
            )
        statements.append(joined("param ", _parameter(one)).made(definition(body, one.name)))
    draft = Draft()
    draft._statements += statements
    body(draft, **{one.name: _name(one.name) for one in parameters})
    return draft._statements


def _import(name: str) -> str:
    return f"import {quote(name) if name.endswith('.kv') else _checked(name)}\n\n"


def _docstring(doc: str) -> Text:
    """Return an equivalent string of the language with as many lines."""
    lines = inspect.cleandoc(doc).split("\n")
    if len(lines) == 1:
        return Text(quote(lines[0]))
    shown = (quote(line)[1:-1].replace('\\"', '"').replace('"""', r"\"\"\"") for line in lines)
    return Text("\n".join(['"""', *(f"  {line}" if line else "" for line in shown), '  """']))
