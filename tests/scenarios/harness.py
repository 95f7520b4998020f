"""Files with one test, what is said of them, and how they run."""

from __future__ import annotations

from pathlib import Path

from kvdsl.compiler import Analysis, analyse
from kvdsl.files import resource
from kvdsl.scenarios.check import Scenario
from kvdsl.scenarios.run import Outcome, run_scenario
from kvdsl.source import SourceFile

POLICIES = ("h2o", "roco", "snapkv", "sparcas", "streaming_llm", "vatp_h2o", "tova", "full", "scissorhands_window")


def text(*steps: str) -> str:
    """A file with one test, which may use the shipped policies above."""
    imports = "".join(f"import {stem}\n" for stem in POLICIES)
    return f'kv 1\n{imports}\ntest "it works" {{\n' + "\n".join(steps) + "\n}\n"


def check(source: str) -> Analysis:
    return analyse(SourceFile("example_test.kv", source, resource("policies") / "example_test.kv"))


def scenario(*steps: str) -> Scenario:
    """The test, which has nothing wrong with it."""
    analysis = check(text(*steps))
    assert not analysis.diagnostics, [found.message for found in analysis.diagnostics]
    (only,) = analysis.scenarios
    return only


def outcome(*steps: str) -> Outcome:
    return run_scenario(scenario(*steps))


def failures(*steps: str) -> list[tuple[str, str]]:
    """The messages of what failed, each with the text that is marked."""
    return [(failure.message, failure.span.text) for failure in outcome(*steps).failures]


def found(*steps: str) -> list[tuple[str, str, str, str | None]]:
    """What is said of the test: code, message, marked text and help."""
    return [(one.code, one.message, one.span.text, one.help) for one in check(text(*steps)).diagnostics]


def own_outcome(folder: Path, policy: str, *steps: str) -> Outcome:
    """How a test of a policy of these statements runs; both are written into a folder."""
    (folder / "own.kv").write_text(f'kv 1\n\npolicy Own {{\n  "A test."\n  {policy}\n}}\n')
    lines = "\n  ".join(("use Own", *steps))
    (folder / "own_test.kv").write_text(f'kv 1\nimport "own.kv"\n\ntest "it works" {{\n  {lines}\n}}\n')
    analysis = analyse(folder / "own_test.kv")
    assert not analysis.diagnostics, [found.message for found in analysis.diagnostics]
    (only,) = analysis.scenarios
    return run_scenario(only)
