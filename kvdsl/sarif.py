"""Diagnostics as SARIF 2.1.0, a format of findings for code hosts and editors."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any
from urllib.parse import quote

from kvdsl.abi import VERSION
from kvdsl.codes import CODES
from kvdsl.diagnostics import Diagnostic
from kvdsl.source import Span

SCHEMA = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"


def render_sarif(diagnostics: Iterable[Diagnostic], exit_code: int) -> dict[str, Any]:
    """Return the log of one run: the findings, and the rules that they name.

    Args:
        exit_code: of the command; 2 means that it could not check everything.
    """
    found = list(diagnostics)
    rules = sorted({one.code for one in found})
    # A result has a place in a file. A command that could not run has none and becomes a notification of the run.
    placed, notices = ([one for one in found if _is_file(one.span) is here] for here in (True, False))
    invocation: dict[str, Any] = {"executionSuccessful": exit_code < 2, "exitCode": exit_code}
    if notices:
        invocation["toolExecutionNotifications"] = [_notice(one) for one in notices]
    run = {
        "tool": {"driver": {"name": "kvdsl", "version": VERSION, "rules": [_rule(code) for code in rules]}},
        "invocations": [invocation],
        "columnKind": "unicodeCodePoints",
        "results": [_result(one, rules.index(one.code)) for one in placed],
    }
    return {"$schema": SCHEMA, "version": "2.1.0", "runs": [run]}


def _rule(name: str) -> dict[str, Any]:
    code = CODES[name]
    return {
        "id": code.id,
        "shortDescription": {"text": code.title},
        "fullDescription": {"text": code.explanation},
        "help": {"text": f"{code.explanation} `kvdsl explain {code.id}` shows an example."},
        "defaultConfiguration": {"level": code.severity},
    }


def _result(found: Diagnostic, rule: int) -> dict[str, Any]:
    result = {"ruleId": found.code, "ruleIndex": rule, "level": found.severity, "message": _message(found)}
    result["locations"] = [_location(found.span)]
    related = [label for label in found.labels if _is_file(label.span)]
    if related:
        result["relatedLocations"] = [_location(label.span) | {"message": {"text": label.text}} for label in related]
    return result


def _notice(found: Diagnostic) -> dict[str, Any]:
    return {"associatedRule": {"id": found.code}, "level": found.severity, "message": _message(found)}


def _message(found: Diagnostic) -> dict[str, str]:
    return {"text": found.message if found.help is None else f"{found.message}\nhelp: {found.help}"}


def _is_file(span: Span) -> bool:
    """Return whether a place is in a file or standard input, as opposed to a name or a setting on the command line."""
    return span.file.path is not None or span.file.name == "-"


def _location(span: Span) -> dict[str, Any]:
    (line, column), (end_line, end_column) = span.file.location(span.start), span.file.location(span.end)
    region = {"startLine": line, "startColumn": column, "endLine": end_line, "endColumn": end_column}
    return {"physicalLocation": {"artifactLocation": {"uri": _uri(span)}, "region": region}}


def _uri(span: Span) -> str:
    """Return a relative URI for a relative name: code hosts resolve it in the repository."""
    name = Path(span.file.name)
    return name.as_uri() if name.is_absolute() else quote(name.as_posix())
