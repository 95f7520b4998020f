"""A .kv file is untrusted: nothing in it reaches generated code unescaped."""

from __future__ import annotations

import ast
import shutil
import subprocess
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvdsl.build.cxx import INCLUDE
from kvdsl.compiler import analyse, find_policy, package
from kvdsl.ir.nodes import Policy
from kvdsl.ir.printer import quote
from kvdsl.ir.visitors import with_policy
from kvdsl.source import SourceFile
from tests.quick import thinned

BAIT = "__import__('os').system('touch /tmp/owned')"

PAYLOADS = [
    f'"""\n{BAIT}\n"""',
    f"'''\n{BAIT}\n'''",
    f'ends with a quote"\n{BAIT}',
    'ends with two quotes""',
    "ends with a backslash\\",
    f"ends with a backslash \\\n{BAIT}",
    "ends with three \\\\\\",
    '\\"""',
    f'\\"""\n{BAIT}#',
    "\\N{BULLET} \\x41 \\u0041 \\",
    "*/ int owned = 1; /*",
    "// \\\nint owned = 1;",
    "??/\nint owned = 1;",
    "{{ 7 * 7 }} {{ name }} {{ undefined }}",
    "{% raw %} {% endraw %} {% include '/etc/passwd' %} {# comment #}",
    "{% for x in ().__class__.__mro__ %}{{ x }}{% endfor %}",
    "braces } { }} {{ %} %",
    f"a\u2028{BAIT}\u2029{BAIT}\x85{BAIT}\x0b{BAIT}\x0c{BAIT}",
    f"a\r{BAIT}\r\n{BAIT}",
    "#include </etc/passwd>\n#error owned",
    "right\u202eto left, zero\u200bwidth, \x1b[31mred",
    "%s %(name)s {0} {name!r}",
    "\n\n\n",
    "   indented\n        more\n",
]


STEMS = ("vatp_h2o", "scissorhands_window", "sparcas")
"""Policies with columns, a ring, a selection and a sketch."""


def policy(doc: str, stem: str = "vatp_h2o") -> Policy:
    return with_policy(analyse(find_policy(stem)).policy, doc=doc)


def shape(text: str) -> str:
    """A module's syntax tree without its docstrings."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list) and body and isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant):
            body[0].value.value = ""
    return ast.dump(tree)


def code_of(text: str, folder: Path) -> str:
    """C++ without comments, as the compiler itself sees it."""
    file = folder / "kernels.cpp"
    file.write_text(text, encoding="utf-8")
    command = ["g++", "-std=c++17", "-fpreprocessed", "-dD", "-E", "-P", str(file)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def source(doc: str) -> str:
    return f"kv 1\n\npolicy Mine {{\n  {doc}\n  param budget = 512\n  score mean(attn)\n}}\n"


PLAIN = package(policy("Plain."), "")


@pytest.mark.parametrize("stem", STEMS)
@pytest.mark.parametrize("doc", thinned(PAYLOADS, 4))
def test_docstrings_stay_docstrings_in_python(doc: str, stem: str) -> None:
    made, plain = package(policy(doc, stem), doc), package(policy("Plain.", stem), "")
    for name in ("__init__.py", "cache.py", "kernels_torch.py"):
        assert shape(made[name]) == shape(plain[name])


@settings(max_examples=40)
@given(st.text(st.characters(exclude_categories=["Cs"])), st.sampled_from(PAYLOADS))
def test_any_text_stays_a_docstring(text: str, payload: str) -> None:
    made = package(policy(text + payload + text), "")
    for name in ("__init__.py", "cache.py", "kernels_torch.py"):
        assert shape(made[name]) == shape(PLAIN[name])


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
@pytest.mark.parametrize("stem", STEMS[:2])
@pytest.mark.parametrize("doc", thinned(PAYLOADS, 4))
def test_docstrings_stay_comments_in_cpp(doc: str, stem: str, tmp_path: Path) -> None:
    made, plain = (package(policy(text, stem), text)["kernels_cpu.cpp"] for text in (doc, "Plain."))
    assert code_of(made, tmp_path) == code_of(plain, tmp_path)


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
def test_the_cpp_of_all_payloads_together_compiles(tmp_path: Path) -> None:
    file = tmp_path / "kernels.cpp"
    file.write_text(package(policy("\n".join(PAYLOADS)), "")["kernels_cpu.cpp"], encoding="utf-8")
    command = ["g++", "-std=c++17", "-fopenmp", "-Wall", "-Wextra", "-fsyntax-only", f"-I{INCLUDE}", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("doc", PAYLOADS)
def test_docstrings_survive_the_language(doc: str) -> None:
    found = analyse(SourceFile("mine.kv", source(quote(doc)), Path("mine.kv")))
    assert found.ok, found.diagnostics
    text = package(found.policy, doc)["cache.py"]
    tree = ast.parse(text)
    kind = next(node for node in tree.body if isinstance(node, ast.ClassDef))
    assert kind.name == "MineCache"
    documented = ast.get_docstring(kind) or ""
    for word in doc.split():
        if word.isascii() and word.isprintable():
            assert word in documented


@pytest.mark.parametrize(
    "statement",
    [
        "param a\u2028b = 3",
        "param x\\ny = 3",
        'param "quoted" = 3',
        "param {{x}} = 3",
        "param __class__ = 3",
        "param self = 3",
        "param class = 3",
        "param int = 3",
        "param x*/y = 3",
        "param été = 3",
        "param x [tokens'] = 3",
        "let __import__ = 3",
        'keep first "1"',
        'score "attn"',
        'select top "4" by dot(q, k)',
        'select top 4 by "dot(q, k)"',
        "select top 4 by dot(q, k) in layers __import__..",
        "layers os.system..",
        "pages 4; import os",
        'sketch top 4 dims by abs(q) every "8" queries',
        "when {{ prefill }}",
        "when __class__",
        "victims shared by heads, layers",
        "positions compact'",
        "prefill blocks of {{ 7 }}",
        "storage blocks */ 7",
        "cap hard\\",
        "budget 8 across heads floor __import__",
    ],
)
def test_names_that_are_none_are_refused(statement: str) -> None:
    text = source('"Mine."').replace("  score", f"  {statement}\n  score")
    found = analyse(SourceFile("mine.kv", text, Path("mine.kv")))
    assert not found.ok
    assert not found.policies


@pytest.mark.parametrize("name", ["Mi{ne", 'Mi"ne', "Mi__ne", "class", "True", "Mi-ne", "Mïne", "1st", "a" * 65])
def test_policy_names_that_are_none_are_refused(name: str) -> None:
    found = analyse(SourceFile("mine.kv", source('"Mine."').replace("Mine {", f"{name} {{"), Path("mine.kv")))
    assert not found.ok


@pytest.mark.parametrize("stem", ['a"b', "a'b", "a\nb", "a b", "a;b", "a*b", "{{a}}", "..", "class", "été", "a" * 65, "1a"])
def test_file_names_that_are_no_package_are_refused(stem: str) -> None:
    file = SourceFile(f"{stem}.kv", source('"Mine."'), Path(f"{stem}.kv"))
    assert not analyse(file).ok


@pytest.mark.parametrize("number", ["1e400", "0x10", "1_000", "1;2", "nan", "inf", "-0", "1e-320", "9" * 400])
def test_numbers(number: str) -> None:
    """What is accepted comes out as the same number."""
    found = analyse(SourceFile("mine.kv", source('"Mine."').replace("512", number), Path("mine.kv")))
    if found.ok:
        tree = ast.parse(package(found.policy, "")["cache.py"])
        assert float(number) in {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)}


STATEMENTS = (
    "trigger overflow >= {}",
    "layers {}..",
    "keep top {} by sum(attn over last 4 queries)",
    "select top {} by dot(q, k)",
    "select top 4 by dot(q, k) in layers ..{}",
    "prefill blocks of {}",
)


@pytest.mark.parametrize("statement", STATEMENTS)
@pytest.mark.parametrize("number", ["1e400", "0x10", "1_000", "1;2", "nan", "inf", "-3", "1e-320", "7.25", "3"])
def test_numbers_in_statements(number: str, statement: str) -> None:
    """The same: whatever is accepted is printed as a number."""
    text = source('"Mine."').replace("  score", f"  {statement.format(number)}\n  score")
    found = analyse(SourceFile("mine.kv", text, Path("mine.kv")))
    assert found.ok or number != "3"
    if found.ok:
        made = package(found.policy, "")
        values = {node.value for name in ("cache.py", "kernels_torch.py") for node in ast.walk(ast.parse(made[name]))
                  if isinstance(node, ast.Constant)}  # fmt: skip
        assert {float(number), -float(number)} & values


@pytest.mark.parametrize("setting", ["1)", "1, x=2", "__import__('os')", "1\n2", "1e999", "", "0x1", "½", "١"])
def test_settings_are_plain_numbers(setting: str) -> None:
    assert not analyse(find_policy("roco"), settings={"budget": setting}).ok
