"""Files: encodings, line ends, sizes, editions; whatever lies at a path, the result is a diagnostic."""

from pathlib import Path

import pytest

from kvdsl.compiler import analyse, compile_file
from kvdsl.diagnostics import DiagnosticError, Sink
from kvdsl.source import SourceFile
from kvdsl.syntax.reader import MAX_BYTES, decode
from tests.diagnostics.expect import check, expect, only

FULL = 'kv 1\npolicy Full {\n  "Keeps all."\n}\n'


def write(folder: Path, data: bytes) -> Path:
    path = folder / "full.kv"
    path.write_bytes(data)
    return path


def test_byte_order_marks_and_line_ends_do_not_matter(tmp_path: Path) -> None:
    plain = analyse(write(tmp_path, FULL.encode())).policies
    assert plain
    for data in (
        b"\xef\xbb\xbf" + FULL.encode(),
        FULL.replace("\n", "\r\n").encode(),
        FULL.replace("\n", "\r").encode(),
        FULL.rstrip("\n").encode(),
        FULL.replace("\n", " # comment\n").encode(),
        FULL.replace("\n", "\t \n\n").encode(),
    ):
        assert analyse(write(tmp_path, data)).policies == plain


def test_lines_are_counted_the_same_with_every_line_end(tmp_path: Path) -> None:
    text = 'kv 1\npolicy P {\n  "d"\n  score atn\n param budget = 1\n}\n'
    for end in ("\n", "\r\n", "\r"):
        (found,) = analyse(write(tmp_path, text.replace("\n", end).encode())).diagnostics
        assert found.span.file.location(found.span.start) == (4, 9)


def test_other_encodings(tmp_path: Path) -> None:
    (found,) = analyse(write(tmp_path, FULL.replace("all", "älles").encode("latin-1"))).diagnostics
    assert found.code == "KV0105"
    assert found.message.endswith("is not UTF-8: line 3 has the byte 0xe4")
    assert found.help == "save the file as UTF-8"
    assert (found.span.file.location(found.span.start), found.span.text) == ((3, 10), "\ufffd")
    for codec in ("utf-16", "utf-32"):
        assert not analyse(write(tmp_path, FULL.encode(codec))).ok


def test_nul_characters(tmp_path: Path) -> None:
    assert only(FULL.replace("all", "\0"), "KV0105").span.start == FULL.index("all")


def test_large_files(tmp_path: Path) -> None:
    (found,) = analyse(write(tmp_path, b"kv 1\n" + b"#" * MAX_BYTES)).diagnostics
    assert (found.code, found.help) == ("KV0106", "a policy is a dozen lines: is this the right file?")
    assert only("#" * MAX_BYTES + "#", "KV0106")


def test_files_that_are_not_there(tmp_path: Path) -> None:
    (found,) = analyse(tmp_path / "none.kv").diagnostics
    assert (found.code, found.severity) == ("KV0114", "error")
    assert found.message == f"cannot read `{tmp_path / 'none.kv'}`: there is no such file"
    (found,) = analyse(tmp_path).diagnostics
    assert found.message.endswith("it is a folder")
    assert not analyse("a\0b").ok
    assert not analyse("x" * 5_000).ok


def test_standard_input_has_a_stem() -> None:
    analysis = analyse(SourceFile("-", FULL))
    assert analysis.policy.stem == "policy"
    assert decode(b"\xff", Sink(), "-") is None


def test_editions() -> None:
    missing = only(FULL.removeprefix("kv 1\n"), "KV0109")
    assert (missing.severity, missing.help) == ("warning", "write `kv 2` on the first line")
    assert check(FULL.replace("kv 1", "kv 2")).policy == check(FULL).policy
    expect(
        FULL.replace("kv 1", "kv 3"), "KV0110", "unknown edition `3`", "kv 3", "the newest edition of this kvdsl is `kv 2`"
    )
    assert only(FULL.removeprefix("kv 1\n") + "kv 1\n", "KV0110").message == "the edition must come first"
    assert only("kv 1\n" + FULL, "KV0110").message == "the edition is given twice"


@pytest.mark.parametrize("text", ["", "\n\n", "# nothing\n", "kv 1", "   ", ";;;"])
def test_empty_files(text: str) -> None:
    assert "KV0211" in {found.code for found in check(text).diagnostics}


def test_separators() -> None:
    one_line = check('kv 1; policy P { "d"; param budget = 8; score age };').policy
    many = check('kv 1\n\npolicy P\n{\n"d"\n\n;param budget = 8\n# c\nscore (age\n)\n}').policy
    assert one_line == many


def test_keywords_are_not_reserved() -> None:
    text = 'kv 1\npolicy P { "d"\n param first = 1\n param by = 2\n param top = 3\n param score = 4\n param queries = 1\n'
    text += " param budget = 512\n score where(age > score, queries, age)\n keep first first\n keep last by\n keep top top by age\n}"
    policy = check(text).policy
    assert [param.name for param in policy.params] == ["first", "by", "top", "score", "queries", "budget"]


def test_a_file_that_cannot_be_read_is_not_compiled(tmp_path: Path) -> None:
    with pytest.raises(DiagnosticError, match="is not UTF-8: line 3 has the byte 0xe4"):
        compile_file(write(tmp_path, FULL.replace("all", "älles").encode("latin-1")))
