"""Complete a text: the grammar provides words, this module names."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeVar

from lsprotocol import types as lsp

from kvdsl.ir.ops import ENDS, INPUTS, NAMED_FUNCTIONS, NAMED_INPUTS, RANGES
from kvdsl.lsp import Document
from kvdsl.lsp.expressions import axes_in_words
from kvdsl.lsp.names import ancestry
from kvdsl.reference import (
    ITEMS,
    NO_NUMBERS,
    PLACES,
    STATEMENTS,
    STEPS,
    VALUES,
    VECTORS,
    first_word,
    meaning,
    old_words,
    written,
)
from kvdsl.sema.editions import GONE
from kvdsl.sema.files import prelude_syntax
from kvdsl.sema.modules import Module
from kvdsl.shipped import all_policies, stems_by_name
from kvdsl.syntax import nodes as syn
from kvdsl.syntax.ahead import Ahead, ahead
from kvdsl.syntax.nodes import WORDS
from kvdsl.syntax.parser import Place
from kvdsl.tensorfile import AXES

_Kind = lsp.CompletionItemKind
Named = TypeVar("Named", syn.Param, syn.Given)
_FIXED = {"budget", "trigger", "slack", "max_drop", "pages", "layers", "param", "storage", "prefill"}
"""Statements that hold numbers fixed once the prompt is known."""
_LOOKS_BACK = {"attn", "logit"}
"""Inputs unknown before a query attends, which neither `select` nor `sketch` can read."""


def completion(document: Document, position: lsp.Position) -> list[lsp.CompletionItem]:
    """Return the items, the likeliest first."""
    offset = document.offset(position)
    here = ahead(document.source, offset)
    if here is None:
        return list(_paths(document, offset))
    gone: frozenset[str] = frozenset()
    if document.module is not None and document.module.edition > 1:
        gone = old_words() | (GONE.keys() if here.place is Place.POLICY and not here.statement else set())
    items = [*_names(document, here, offset), *(item for item in _keywords(here) if item.label not in gone)]
    seen: dict[str, lsp.CompletionItem] = {}
    for item in items:
        seen.setdefault(item.label, item)
    for index, item in enumerate(seen.values()):
        item.sort_text = f"{index:04}"
    return list(seen.values())


# -- keywords ----------------------------------------------------------------------------------------------------------


def _keywords(here: Ahead) -> Iterator[lsp.CompletionItem]:
    order = [first_word(rule) for rule in (*ITEMS, *STATEMENTS, *STEPS)]
    rank = {word: index for index, word in reversed(list(enumerate(order)))}
    begins = not [word for word in here.statement if word != "override"]
    for word in sorted(here.words, key=lambda one: (rank.get(one, len(order)), one)):
        yield lsp.CompletionItem(word, kind=_Kind.Keyword, detail=_doc(word, here.place) if begins else None)


def _doc(word: str, place: Place) -> str | None:
    if place is Place.POLICY:
        return next(
            (
                text
                for rule, (text, _) in STATEMENTS.items()
                if first_word(rule) == word and not rule.startswith(("keep_", "expect_"))
            ),
            None,
        )
    table = STEPS if place in (Place.TEST, Place.PROMPT) else ITEMS
    return next(
        (text for rule, text in table.items() if first_word(rule) == word and not rule.startswith(("keep_", "expect_"))),
        None,
    )


# -- names -------------------------------------------------------------------------------------------------------------


def _names(document: Document, here: Ahead, offset: int) -> Iterator[lsp.CompletionItem]:
    words = [word for word in here.statement if word != "override"]
    first, last = (words[0], words[-1]) if words else ("", "")
    if last == "over":
        yield from (
            _item(text.removeprefix("over "), _Kind.EnumMember) for name, text in RANGES.items() if name != "history"
        )
    elif first == "import":
        yield from (_item(path.stem, _Kind.Module) for path in all_policies())
    elif first == "policy" and last in ("extends", "="):
        yield from _policies(document)
    elif first == "use" and last == "use":
        yield from _known_policies(document)
    elif first in ("tensor", "input") and "[" in words and "]" not in words:
        yield from (_item(axis, _Kind.EnumMember) for axis in AXES if axis not in words)
    elif first == "set" and last == "set":
        yield from (_item(one, _Kind.Property) for one in ("layer", "layers"))
        yield from (
            _item(one.name.text, _Kind.Property, one.value.span.quoted()) for one in _of_test(syn.Param, document, offset)
        )
    elif last == "given" and here.place in (Place.TEST, Place.PROMPT):
        yield from (_item(one.name.text, _Kind.Property) for one in _of_test(syn.Given, document, offset))
    elif here.place in (Place.TEST, Place.PROMPT) and here.name:
        yield from _of_step(first, last, document, offset)
    elif here.name and not here.expression and (named := _axes_of(first, words)):
        yield from (_item(word, _Kind.EnumMember) for word in named)
    elif first in WORDS and here.name and not here.expression:
        yield from (_item(word, _Kind.EnumMember) for word in WORDS[first])
    elif here.expression and here.place in (Place.POLICY, Place.FILE) and words:
        yield from _readable(document, words)


def _axes_of(first: str, words: list[str]) -> tuple[str, ...]:
    """Return the axes that may follow `across` or a number at the end of a statement."""
    if words[-1] == "across":
        return syn.AXES["across"][0]
    if words[-3:-1] == ["over", "last"]:
        return syn.AXES["over_last"][0]
    return syn.AXES["sketch"]["every" in words] if first == "sketch" else ()


def _of_step(first: str, last: str, document: Document, offset: int) -> Iterator[lsp.CompletionItem]:
    """Yield the names in a step of a test: expectations, a token's values, and special numbers."""
    if last == "expect":
        yield from (_item(name, _Kind.Property, doc) for name, doc in (*PLACES.items(), *VALUES.items()))
        yield _item("error", _Kind.Property, STEPS["expect_error"])
    elif first == "expect" or last in (",", "/", "-", "rest", "and", "attend", *VECTORS):
        yield from (_item(name, _Kind.Constant) for name in (*NO_NUMBERS, "nothing"))
    elif first not in ("use", "set"):
        yield from (_item(name, _Kind.Property) for name in VECTORS)
        yield from (_item(one.name.text, _Kind.Property) for one in _of_test(syn.Given, document, offset))


def _item(label: str, kind: lsp.CompletionItemKind, detail: str | None = None) -> lsp.CompletionItem:
    return lsp.CompletionItem(label, kind=kind, detail=detail)


def _policies(document: Document) -> Iterator[lsp.CompletionItem]:
    """Yield known policies, and shipped ones with the import that they need."""
    known = list(_known_policies(document))
    yield from known
    syntax = syn.Module(document.source) if document.module is None else document.module.syntax
    ends = [one.span.end for one in syntax.imports] + [one.span.end for one in syntax.editions]
    above = max(ends, default=None)
    at = 0 if above is None else (document.text.find("\n", above) + 1 or len(document.text))
    for name, stem in stems_by_name().items():
        if name not in {item.label for item in known}:
            edit = lsp.TextEdit(document.positions.range(at, at), f"import {stem}\n")
            yield lsp.CompletionItem(name, kind=_Kind.Class, detail=f"import {stem}", additional_text_edits=[edit])


def _known_policies(document: Document) -> Iterator[lsp.CompletionItem]:
    if document.module is not None:
        own = {policy.name.text for policy in document.module.syntax.policies}
        yield from (
            _item(one.name.text, _Kind.Class, where.file.name)
            for one, where in document.module.policies()
            if one.name.text not in own
        )


def _of_test(kind: type[Named], document: Document, offset: int) -> Iterator[Named]:
    """Yield the params or given values of the policy used by the test at an offset."""
    if document.module is None:
        return
    tests = [test for test in document.module.syntax.tests if test.span.start <= offset]
    used = [step.policy.text for test in tests[-1:] for step in test.of(syn.Use)]
    for policy, module in document.module.policies():
        if policy.name.text in used:
            yield from _defined(kind, policy, module)


def _defined(kind: type[Named], policy: syn.Policy, module: Module) -> Iterable[Named]:
    """Return a policy's params or given values; overrides replace inherited ones."""
    found: dict[str, Named] = {}
    for one, _ in ancestry(policy, module):
        for statement in one.of(kind):
            found.setdefault(statement.name.text, statement)
    return found.values()


def _readable(document: Document, words: list[str]) -> Iterator[lsp.CompletionItem]:
    """Yield what an expression of a statement can read: the policy's own names, then inputs and functions."""
    first = words[0]
    if first == "given" or (first == "let" and "=" not in words):
        return
    fixed = first in _FIXED or (first == "keep" and words[1:2] in [[end] for end in ENDS])
    module = document.module
    if module is not None:
        for policy in module.syntax.policies:
            for param in _defined(syn.Param, policy, module):
                yield _item(param.name.text, _Kind.Property, param.span.quoted())
            for given in _defined(syn.Given, policy, module) if not fixed else ():
                yield _item(given.name.text, _Kind.Property, given.span.quoted())
            yield from map(_let, policy.of(syn.Let))
            for tensor in policy.of(syn.Tensor) if not fixed else ():
                yield _item(tensor.name.text, _Kind.Property, tensor.span.quoted())
    for name in sorted(NAMED_INPUTS - NAMED_FUNCTIONS):
        row = INPUTS[name]
        looks_back = first in ("select", "sketch") and name in _LOOKS_BACK
        if not looks_back and (row.fixed or not fixed):
            yield _item(name, _Kind.Variable, f"{axes_in_words(row.axes)}: {row.doc}")
    if module is not None:
        yield from (_let(let) for let, _ in module.lets())
    for name in sorted(NAMED_FUNCTIONS):
        yield _item(name, _Kind.Function, f"{written(name)}: {meaning(name)}")
    yield from (_let(let) for let in prelude_syntax().lets)


def _let(let: syn.Let) -> lsp.CompletionItem:
    kind = _Kind.Constant if let.parameters is None else _Kind.Function
    return _item(let.name.text, kind, let.span.quoted())


# -- paths -------------------------------------------------------------------------------------------------------------


def _paths(document: Document, offset: int) -> Iterator[lsp.CompletionItem]:
    """Yield .kv files for the string of an import, and tensors' files for that of a `tensor`."""
    line = document.text[document.text.rfind("\n", 0, offset) + 1 : offset]
    path = document.source.path
    kind = {"import": "kv", "tensor": "safetensors"}.get((line.lstrip().removeprefix("override ").split() or [""])[0])
    if path is None or kind is None or line.count('"') != 1:
        return
    try:
        files = sorted([*path.parent.glob(f"*.{kind}"), *path.parent.glob(f"*/*.{kind}")])
    except OSError:
        return
    for file in files:
        if file != path and not file.stem.endswith("_test"):
            yield _item(file.relative_to(path.parent).as_posix(), _Kind.File)
