"""What the playground asks of the compiler. It runs in a web worker; what it answers is JSON."""

from __future__ import annotations

import json

from kvdsl.compiler import Compiled, analyse, compile_text, shipped_policies
from kvdsl.diagnostics import DiagnosticError, Sink, printable
from kvdsl.errors import KvdslError
from kvdsl.explain.facts import facts
from kvdsl.explain.words import rows
from kvdsl.ir.ops import NAMED_FUNCTIONS, NAMED_INPUTS
from kvdsl.provenance import prose
from kvdsl.source import SourceFile
from kvdsl.syntax.formatter import format_source
from kvdsl.syntax.parser import keywords

NAME = "policy.kv"
"""What messages call the text."""


def language() -> str:
    """The language's words, for colours, and the policies that come with it, text by name."""
    return json.dumps({
        "keywords": sorted(keywords()),
        "functions": sorted(NAMED_FUNCTIONS),
        "inputs": sorted(NAMED_INPUTS),
        "policies": {path.stem: path.read_text(encoding="utf-8") for path in shipped_policies()},
    })  # fmt: skip


def check(text: str) -> str:
    """Findings of a text, with positions in UTF-16 units."""
    found = analyse(SourceFile(NAME, text)).diagnostics
    return json.dumps([
        {
            "from": _units(text, one.span.start) if one.span.file.name == NAME else 0,
            "to": _units(text, one.span.end) if one.span.file.name == NAME else 0,
            "severity": one.severity,
            "code": one.code,
            "message": printable(one.message),
            "help": one.help and printable(one.help),
            "line": one.span.file.location(one.span.start)[0],
        }
        for one in found
    ])  # fmt: skip


def explain(text: str) -> str:
    """What `kvdsl explain` says of a text's policy, lines by title; null where it has errors."""
    analysis = analyse(SourceFile(NAME, text))
    if not analysis.policies:
        return json.dumps(None)
    policy = analysis.policies[0]
    params = {param.name: None for param in policy.params}
    found = facts(policy)
    params = {param.name: found.values.get(param.name) for param in policy.params}
    return json.dumps({"name": policy.name, "doc": prose(policy.doc), "rows": rows(found), "params": params})


def generate(text: str) -> str:
    """The files of the text's package, by name; null where it has errors."""
    try:
        compiled: Compiled = compile_text(text)
    except DiagnosticError:
        return json.dumps(None)
    except KvdslError as error:
        return json.dumps({"error": str(error)})
    return json.dumps(compiled.files)


def layout(text: str) -> str:
    """The text in the canonical layout; null where it has syntax errors."""
    return json.dumps(format_source(SourceFile(NAME, text), Sink()))


def hover(text: str, line: int, character: int) -> str:
    """What stands at a place, explained in Markdown as `kvdsl lsp` has it, and where it begins and ends, as line and character; else null.

    The language server's types take a second to import, so that they are imported when somebody first asks.
    """
    from lsprotocol.types import MarkupContent, Position

    from kvdsl.lsp import read_document
    from kvdsl.lsp.hover import hover as explained

    found = explained(read_document(f"untitled:{NAME}", text, "utf-16", {}), Position(line, character))
    if found is None or found.range is None or not isinstance(found.contents, MarkupContent):
        return json.dumps(None)
    begin, end = found.range.start, found.range.end
    return json.dumps({"text": found.contents.value, "from": [begin.line, begin.character], "to": [end.line, end.character]})


def _units(text: str, offset: int) -> int:
    """An offset in characters as one in UTF-16 code units."""
    return len(text[:offset].encode("utf-16-le")) // 2
