"""Runs command lines in this process."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import pytest

from kvdsl.cli import main


@dataclass(frozen=True)
class Result:
    code: int
    out: str
    err: str

    def json(self) -> dict[str, Any]:
        content: dict[str, Any] = json.loads(self.out)
        assert content["format_version"] == "1.0"
        environment = {"kvdsl", "python", "torch", "transformers", "triton", "cpu", "threads", "gpu", "dtype", "seed"}
        assert environment <= content["environment"].keys()
        return content


def run(capsys: pytest.CaptureFixture[str], *arguments: str, code: int | None = None) -> Result:
    """The exit code, which is `code` if one is given, and the output of `kvdsl ARGUMENTS`. No failure may ever show a traceback."""
    capsys.readouterr()
    found = main(arguments)
    out, err = capsys.readouterr()
    assert "Traceback" not in out + err
    assert "internal error" not in err, err
    assert code in (None, found), err
    return Result(found, out, err)
