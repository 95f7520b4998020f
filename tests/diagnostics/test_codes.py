"""Every code's example gives that code and nothing else; explanations and messages follow the style guide."""

import re
from pathlib import Path

import pytest

from kvdsl.codes import CODES, Code
from kvdsl.compiler import analyse, find_policy
from kvdsl.diagnostics import Diagnostic, DiagnosticError

WITH_EXAMPLE = [code for code in CODES.values() if code.example]


def findings(code: Code, folder: Path) -> tuple[Diagnostic, ...]:
    path = folder / "example.kv"
    path.write_bytes(code.example.encode())
    return analyse(path, settings=dict(code.settings)).diagnostics


@pytest.mark.parametrize("code", WITH_EXAMPLE, ids=lambda code: code.id)
def test_the_example_has_the_code_and_nothing_else(code: Code, tmp_path: Path) -> None:
    found = findings(code, tmp_path)
    assert {one.code for one in found} == {code.id}
    assert {one.severity for one in found} == {code.severity}


@pytest.mark.parametrize("code", WITH_EXAMPLE, ids=lambda code: code.id)
def test_messages_follow_the_style_guide(code: Code, tmp_path: Path) -> None:
    for found in findings(code, tmp_path):
        for text in (found.message, found.help or "x"):
            assert text[0].islower() or text[0] == "`", text
            assert not text.endswith((".", "!")), text
            assert "\n" not in text
            assert not re.search(r"\b(None|NoneType|str|float|dict|tuple|Token|Tree|KeyError)\b", text), text


@pytest.mark.parametrize("code", CODES.values(), ids=lambda code: code.id)
def test_every_code_is_explained(code: Code) -> None:
    assert re.fullmatch(r"KV0[1-6][0-9]{2}", code.id)
    assert code.title[0].islower() or code.title.startswith("`")
    assert not code.title.endswith(".")
    assert code.explanation.endswith(".")
    assert len(code.explanation) > 40


def test_a_policy_that_does_not_exist_has_a_code_of_its_own() -> None:
    with pytest.raises(DiagnosticError) as raised:
        find_policy("rocko")
    (found,) = raised.value.diagnostics
    assert found.code == "KV0214"
    assert found.message == "there is no policy `rocko`"
    assert found.help == "did you mean `roco`?"
    assert {code.id for code in CODES.values() if not code.example} == {"KV0115", "KV0214"}  # neither is of a .kv file
