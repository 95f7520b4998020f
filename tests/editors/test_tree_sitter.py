"""The grammar for tree-sitter: its trees are the compiler's, its words the language's, what is generated is up to date."""

from __future__ import annotations

import ctypes
import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvdsl.ir.ops import NAMED_FUNCTIONS, NAMED_INPUTS
from kvdsl.syntax.parser import keywords
from tests.docs.pages import blocks, documents, read
from tests.editors.test_made import make_editors

ROOT = Path(__file__).resolve().parents[2]
GRAMMAR = ROOT / "editors" / "tree-sitter-kv"
tree_sitter = pytest.importorskip("tree_sitter", reason="there is no tree_sitter (pip install tree-sitter)")
CC = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
CLI = shutil.which("tree-sitter")
needs_cli = pytest.mark.skipif(CLI is None, reason="there is no tree-sitter command (npm install tree-sitter-cli)")

FILES = [path for top in ("policies", "benchmarks", "lab", "grammar") for path in sorted((ROOT / top).rglob("*.kv"))]
FORMS = [
    "kv 1",
    "\n\n# only a comment\n;kv 1;;\n\npolicy P { };policy Q extends P\n\n{\n'doc' keep\n}\n",
    "kv 1\npolicy P {\n  score (age\n    + 1\n  ) * mean(\n attn  # why\n\n over slots\n)  # a comment\n\n\n  keep first 4.\n}",
    "kv 1\nlet a = 4. + 4.e2 + .5 + .5e-3 + 1e+5 + 12.25E1\npolicy P { layers 4..9; layers ..; layers .5..5.; layers 1..\n}",
    "kv 1\nlet a = -x ** -2 ** y * -3 % 2 - 1 < 4 and not -a == b or c != d and e\nlet f() = 3\nlet g(x, y = 2) = f(y = x)\n",
    'kv 1\npolicy P { """a "quoted" \\""" word""" ; score age }\npolicy Q {"" }\npolicy R {\'it\\\'s\'\nscore age}',
    "kv 1\npolicy P { score sum(dot(q, k) over text after sinks + 1) + max(attn over last 4 queries) + min(k over next page) }",
    "kv 1\npolicy P {\n  '''two\n  lines, and a '' ''' score top\n  param score = 3; param last name = 4 in 1..2; let policy = test\n}",
    "kv 1\ntest 'x' {\n prompt {\n 3 times token key 1, -2 / nan value -inf\n\n attend 1, rest 2\n }\n use P at layer 0 of 1\n"
    " token query 1 and 2 / 3 and 4 key 1; expect kept nothing / 1..2, 4\n expect state sum_attn 1 ; set budget = -3\n}",
]
"""Texts that the policies have nothing like."""


@pytest.fixture(scope="module")
def language(tmp_path_factory: pytest.TempPathFactory) -> object:
    """What `src/parser.c` compiles to."""
    if CC is None:
        pytest.skip("there is no C compiler")
    library = tmp_path_factory.mktemp("tree-sitter") / "kv.so"
    command = [
        CC,
        "-shared",
        "-fPIC",
        "-O0",
        "-I",
        str(GRAMMAR / "src"),
        "-o",
        str(library),
        str(GRAMMAR / "src" / "parser.c"),
    ]
    subprocess.run(command, check=True)
    pointer = ctypes.CDLL(str(library)).tree_sitter_kv
    pointer.restype = ctypes.c_void_p
    capsule = ctypes.pythonapi.PyCapsule_New
    capsule.restype, capsule.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
    return tree_sitter.Language(capsule(pointer(), b"tree_sitter.Language", None))


def root(language: object, text: str) -> object:
    return tree_sitter.Parser(language).parse(text.encode()).root_node


def tree(node: object, depth: int = 0) -> str:
    """The tree without comments, written as `make_editors.tree` writes the compiler's."""
    inner = "".join("\n" + tree(child, depth + 1) for child in node.named_children if child.type != "comment")
    return f"{'  ' * depth}({node.type}{inner})"


def holds(language: object, text: str) -> None:
    found = root(language, text)
    assert not found.has_error
    assert tree(found) == make_editors.tree(text)


@pytest.mark.parametrize("name", ["forms", "policies", "tests"])
def test_trees_are_the_compiler_s(language: object, name: str) -> None:
    """What `tree-sitter test` tries, without the command; `test_made` holds the corpus to the compiler."""
    corpus = (GRAMMAR / "test" / "corpus" / f"{name}.txt").read_text(encoding="utf-8")
    found = re.split(r"^=+\n(.*)\n=+\n\n", corpus, flags=re.MULTILINE)[1:]
    assert len(found) > 40
    for title, entry in zip(found[::2], found[1::2], strict=True):
        text, _, expected = entry.partition("\n\n---\n\n")
        assert tree(root(language, text)) == expected.strip(), title


@pytest.mark.parametrize("text", FORMS)
def test_odd_texts_have_the_compiler_s_trees(language: object, text: str) -> None:
    holds(language, text)


def test_every_policy_is_read(language: object) -> None:
    for path in FILES:
        holds(language, path.read_text(encoding="utf-8"))
    assert len(FILES) > 200


def test_every_policy_of_the_documents_is_read(language: object) -> None:
    texts = [block.text for page in documents() for block in blocks(read(page)) if block.language == "kv" and block.is_file]
    assert len(texts) > 5
    for text in texts:
        holds(language, text)


@pytest.mark.parametrize("text", ["", "policy", "kv 1\npolicy P {\n  score mean(\n  keep first 3\n}\n", "}{", "kv 1\n\0é`"])
def test_half_written_texts_have_a_tree(language: object, text: str) -> None:
    """A broken statement costs no other one its place."""
    found = root(language, text)
    assert found.has_error or not text
    assert found.end_byte <= len(text.encode())


def strings(rule: object) -> Iterator[str]:
    """The literal texts of a rule of `src/grammar.json`."""
    if isinstance(rule, dict):
        if rule.get("type") == "STRING":
            yield rule["value"]
        for part in rule.values():
            yield from strings(part)
    elif isinstance(rule, list):
        for part in rule:
            yield from strings(part)


def test_its_words_are_the_language_s() -> None:
    rules = json.loads((GRAMMAR / "src" / "grammar.json").read_text(encoding="utf-8"))["rules"]
    spelt = {"and", "or", "not"}
    assert {word for word in strings(rules) if word[0].isalpha()} == keywords() | spelt


def test_names_of_policies_are_coloured_once_each(language: object) -> None:
    """Every identifier has one colour, and what the language brings along has that of what is built in."""
    query = tree_sitter.Query(language, make_editors.highlights())
    for path in FILES:
        text = path.read_text(encoding="utf-8")
        seen: dict[int, list[str]] = {}
        for name, nodes in tree_sitter.QueryCursor(query).captures(root(language, text)).items():
            for node in nodes:
                seen.setdefault(node.start_byte, []).append(name)
                word = node.text.decode()
                assert name != "function.builtin" or word in NAMED_FUNCTIONS
                assert name != "variable.builtin" or word in NAMED_INPUTS
        words = [found.start() for found in re.finditer(rb"(?<![\w.])[A-Za-z_]\w*", _bare(text).encode())]
        assert {len(seen.get(place, [])) for place in words} == {1}, path


def _bare(text: str) -> str:
    """The text with blanks for its strings and comments."""
    return re.sub(r'""".*?"""|"[^"\n]*"|#[^\n]*', lambda found: " " * len(found[0].encode()), text, flags=re.DOTALL)


@needs_cli
def test_the_corpus(tmp_path: Path) -> None:
    """`tree-sitter test`, and the parser that `tree-sitter generate` makes is the committed one."""
    copy = shutil.copytree(GRAMMAR, tmp_path / "kv", ignore=shutil.ignore_patterns("node_modules"))
    done = subprocess.run([CLI, "test"], cwd=copy, capture_output=True, text=True, check=False, env=_environment(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr


@needs_cli
def test_the_parser_is_up_to_date(tmp_path: Path) -> None:
    wanted = json.loads((GRAMMAR / "package.json").read_text(encoding="utf-8"))["devDependencies"]["tree-sitter-cli"]
    version = subprocess.run([CLI, "--version"], capture_output=True, text=True, check=True).stdout.split()[1]
    if version != wanted:
        pytest.skip(f"the parser was made by tree-sitter {wanted}, this is {version}")
    copy = shutil.copytree(GRAMMAR, tmp_path / "kv", ignore=shutil.ignore_patterns("node_modules"))
    command = [CLI, "generate", "--no-bindings"]
    subprocess.run(command, cwd=copy, capture_output=True, check=True, env=_environment(tmp_path))
    for path in (copy / "src").rglob("*.*"):
        assert path.read_bytes() == (GRAMMAR / path.relative_to(copy)).read_bytes(), (
            "run `tree-sitter generate --no-bindings`"
        )


def _environment(home: Path) -> dict[str, str]:
    return os.environ | {"HOME": str(home), "XDG_CACHE_HOME": str(home / "cache"), "XDG_CONFIG_HOME": str(home / "config")}
