"""`kvdsl lsp` as an editor meets it: a real client over pipes, without torch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from lsprotocol import types as lsp
from pygls.exceptions import JsonRpcException

from kvdsl.lsp import Document, read_document
from kvdsl.lsp.diagnostics import diagnostics
from kvdsl.lsp.navigation import RenameError, references, rename
from kvdsl.lsp.positions import Positions
from kvdsl.lsp.workspace import Workspace
from tests.lsp.harness import LONG, Client, client, marked

HEAD = 'kv 1\nimport h2o\n\npolicy Mine extends H2O {\n  "Mine."\n'
GOOD = HEAD + "  param weight = 2\n  let mine = mean(attn)\n  override score mine * weight\n}\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The workspace's folder, in which tests may put files; most have texts elsewhere."""
    return tmp_path_factory.mktemp("workspace")


@pytest.fixture(scope="module")
def editor(folder: Path) -> Iterator[Client]:
    with client(folder) as one:
        yield one


@pytest.fixture
def uri(editor: Client, tmp_path: Path) -> Iterator[str]:
    uri = (tmp_path / "mine.kv").as_uri()
    yield uri
    editor.close(uri)


def asked(uri: str, text: str) -> tuple[str, lsp.TextDocumentIdentifier, lsp.Position]:
    plain, position = marked(text)
    return plain, lsp.TextDocumentIdentifier(uri), position


def test_diagnostics_while_typing(editor: Client, uri: str) -> None:
    """Several at once, each with its hint; none once they are mended."""
    found = editor.open(uri, HEAD + "  scor 3\n  override score mean(atn)\n  keep lst 3\n}\n")
    assert [(one.code, one.range.start.line) for one in found] == [("KV0104", 5), ("KV0201", 6), ("KV0101", 7)]
    assert all("help: did you mean" in one.message for one in found)
    assert editor.open(uri, GOOD) == []


def test_a_fix(editor: Client, uri: str) -> None:
    text, document, position = asked(uri, GOOD.replace("mine * weight", "mine * we|igth"))
    editor.open(uri, text)
    params = lsp.CodeActionParams(document, lsp.Range(position, position), lsp.CodeActionContext([]))
    (action,) = editor.wait(editor.ask.text_document_code_action_async(params)) or ()
    assert isinstance(action, lsp.CodeAction)
    assert action.title == "write `weight`"
    assert action.edit is not None
    (edit,) = (action.edit.changes or {})[uri]
    assert (edit.new_text, edit.range.start.line) == ("weight", 7)


def test_hover_and_signature(editor: Client, uri: str) -> None:
    text, document, position = asked(uri, GOOD.replace("mean(attn)", "me|an(attn)"))
    editor.open(uri, text)
    found = editor.wait(editor.ask.text_document_hover_async(lsp.HoverParams(document, position)))
    assert found is not None
    assert isinstance(found.contents, lsp.MarkupContent)
    for said in ("the mean", "`mean(attn)` · slot", "`sum_attn`", "4 bytes a slot"):
        assert said in found.contents.value
    text, document, position = asked(uri, GOOD.replace("mean(attn)", "norm1(|v)"))
    editor.open(uri, text)
    help = editor.wait(editor.ask.text_document_signature_help_async(lsp.SignatureHelpParams(document, position)))
    assert help is not None
    assert help.signatures[0].label == "norm1(x)"


def test_completion(editor: Client, uri: str) -> None:
    text, document, position = asked(uri, HEAD + "  keep top 3 by std(|")
    editor.open(uri, text)
    found = editor.wait(editor.ask.text_document_completion_async(lsp.CompletionParams(document, position)))
    assert found is not None
    assert not isinstance(found, lsp.CompletionList)
    labels = {item.label for item in found}
    assert {"attn", "logit", "recent", "norm1", "mean"} <= labels
    assert "score" not in labels


def test_definition_references_and_rename(editor: Client, uri: str, tmp_path: Path) -> None:
    """Through other open texts; what comes with kvdsl is not renamed."""
    child = (tmp_path / "child.kv").as_uri()
    text, document, position = asked(uri, GOOD.replace("param weight", "param we|ight"))
    editor.open(uri, text)
    editor.open(child, 'kv 1\nimport "mine.kv"\n\npolicy Child extends Mine {\n  "C."\n  override param weight = 3\n}\n')
    params = lsp.ReferenceParams(lsp.ReferenceContext(include_declaration=True), document, position)
    found = editor.wait(editor.ask.text_document_references_async(params)) or ()
    assert [(one.uri, one.range.start.line) for one in found] == [(uri, 5), (uri, 7), (child, 5)]
    place = editor.wait(
        editor.ask.text_document_definition_async(
            lsp.DefinitionParams(lsp.TextDocumentIdentifier(child), lsp.Position(5, 20))
        )
    )
    assert isinstance(place, lsp.Location)
    assert (place.uri, place.range.start.line) == (uri, 5)
    edit = editor.wait(editor.ask.text_document_rename_async(lsp.RenameParams(document, position, "share")))
    assert edit is not None
    assert {one: len(edits) for one, edits in (edit.changes or {}).items()} == {uri: 2, child: 1}
    refused = lsp.RenameParams(document, position, "attn")
    with pytest.raises(JsonRpcException, match="built in"):
        editor.wait(editor.ask.text_document_rename_async(refused))
    parent = lsp.PrepareRenameParams(document, lsp.Position(3, 22))
    with pytest.raises(JsonRpcException, match="comes with kvdsl"):
        editor.wait(editor.ask.text_document_prepare_rename_async(parent))
    editor.close(child)


def test_what_an_open_text_imports_need_not_be_saved(editor: Client, uri: str, tmp_path: Path) -> None:
    """And a change of it is told in what imports it."""
    library = (tmp_path / "library.kv").as_uri()
    editor.open(library, "kv 1\n\nlet mine = mean(attn)\n")
    text = 'kv 1\nimport "library.kv"\n\npolicy Mine {\n  "Mine."\n  param budget = 9\n  score mine\n}\n'
    assert editor.open(uri, text) == []
    editor.open(library, "kv 1\n\nlet mine = attn\n")
    assert [one.code for one in editor.diagnostics(uri)] == ["KV0301"]
    editor.close(library)


def test_a_file_that_was_missing_is_read_once_it_is_opened(editor: Client, uri: str, tmp_path: Path) -> None:
    text = 'kv 1\nimport "later.kv"\n\npolicy Mine {\n  "Mine."\n  param budget = 9\n  score mine\n}\n'
    assert [one.code for one in editor.open(uri, text)] == ["KV0114"]
    later = (tmp_path / "later.kv").as_uri()
    editor.open(later, "kv 1\n\nlet mine = mean(attn)\n")
    assert editor.diagnostics(uri) == []
    editor.close(later)


def test_what_has_nothing_to_do_with_a_text_is_not_read_again(tmp_path: Path) -> None:
    texts = Workspace()
    mine, other = ((tmp_path / name).as_uri() for name in ("mine.kv", "other.kv"))
    for uri in (mine, other):
        assert texts.put(uri, "kv 1\npolicy") == [uri]
        texts.document(uri)
    assert texts.put(mine, "kv 1\n") == [mine]


def test_outline_folding_format_tokens_hints_and_lenses(editor: Client, uri: str) -> None:
    editor.open(uri, GOOD.replace("  param weight = 2", "  param   weight=2"))
    document, ask = lsp.TextDocumentIdentifier(uri), editor.ask
    symbols = editor.wait(ask.text_document_document_symbol_async(lsp.DocumentSymbolParams(document))) or ()
    assert [symbol.name for symbol in symbols] == ["Mine"]
    (folding,) = editor.wait(ask.text_document_folding_range_async(lsp.FoldingRangeParams(document))) or ()
    assert (folding.start_line, folding.end_line) == (3, 7)
    options = lsp.FormattingOptions(2, insert_spaces=True)
    (edit,) = editor.wait(ask.text_document_formatting_async(lsp.DocumentFormattingParams(document, options))) or ()
    assert (edit.range.start.line, edit.new_text) == (5, "  param weight = 2\n")
    tokens = editor.wait(ask.text_document_semantic_tokens_full_async(lsp.SemanticTokensParams(document)))
    assert tokens is not None
    assert len(tokens.data) > 5 * 20
    whole = lsp.Range(lsp.Position(0, 0), lsp.Position(99, 0))
    hints = editor.wait(ask.text_document_inlay_hint_async(lsp.InlayHintParams(document, whole))) or ()
    assert [hint.label for hint in hints] == [": slot", " · 520 bytes a token"]
    lenses = editor.wait(ask.text_document_code_lens_async(lsp.CodeLensParams(document))) or ()
    assert [lens.command.title for lens in lenses if lens.command] == ["explain", "test", "compile"]


def test_commands_say_what_the_command_line_says(editor: Client, uri: str, tmp_path: Path) -> None:
    unsaved = lsp.ExecuteCommandParams("kvdsl.explain", [uri])
    editor.open(uri, GOOD)
    assert editor.wait(editor.ask.workspace_execute_command_async(unsaved)) == "save the text first"
    (tmp_path / "mine.kv").write_text(GOOD)
    said = editor.wait(editor.ask.workspace_execute_command_async(unsaved))
    assert isinstance(said, str)
    assert said.startswith("Mine (mine.kv)")


def test_half_written_texts_are_answered(editor: Client, uri: str) -> None:
    """At every line's end of a policy, as far as it is written."""
    text = GOOD.replace("mean(attn)", "where(\n    age > 3,\n    attn,\n    0)")
    document = lsp.TextDocumentIdentifier(uri)
    for end in [at for at, char in enumerate(text) if char in "\n( "]:
        before = text[:end]
        place = lsp.Position(before.count("\n"), len(before.rpartition("\n")[2]))
        editor.open(uri, before)
        editor.wait(editor.ask.text_document_hover_async(lsp.HoverParams(document, place)))
        found = editor.wait(editor.ask.text_document_completion_async(lsp.CompletionParams(document, place)))
        assert found is not None


def test_columns_are_in_the_units_that_were_agreed_on(tmp_path: Path) -> None:
    one = Client()
    started = one.start(tmp_path, [lsp.PositionEncodingKind.Utf8])
    assert started.capabilities.position_encoding == "utf-8"
    (found,) = one.open((tmp_path / "x.kv").as_uri(), GOOD.replace("mine * weight", '"é😀" * weight'))
    assert found.range.end.character - found.range.start.character == len('"é😀"'.encode())
    assert one.stop() == 0


@pytest.mark.parametrize(("encoding", "units"), [("utf-8", 7), ("utf-16", 4), ("utf-32", 3)])
def test_columns_in_all_units(encoding: str, units: int) -> None:
    text = "a\né😀b\n\n"
    positions = Positions(text, encoding)
    assert positions.position(text.index("b") + 1) == lsp.Position(1, units)
    for offset in range(len(text) + 1):
        assert positions.offset(positions.position(offset)) == offset
    assert positions.offset(lsp.Position(1, 99)) == text.index("b") + 1
    assert positions.offset(lsp.Position(99, 0)) == len(text)


def test_the_client_is_asked_to_watch_files(tmp_path: Path) -> None:
    with client(tmp_path) as one:
        asked_for = one.registered.get(timeout=LONG)
    assert asked_for.method == lsp.WORKSPACE_DID_CHANGE_WATCHED_FILES
    assert "**/*.kv" in str(asked_for.register_options)


def test_files_of_the_folder_that_are_not_open_are_renamed_in(editor: Client, folder: Path) -> None:
    """One that has not the word is not read as a policy."""
    (folder / "mine.kv").write_text(GOOD)
    (folder / "child.kv").write_text(
        'kv 1\nimport "mine.kv"\n\npolicy Child extends Mine {\n  "C."\n  keep first weight\n}\n'
    )
    (folder / "broken.kv").write_text("\0")
    text, document, position = asked((folder / "mine.kv").as_uri(), GOOD.replace("param weight", "param we|ight"))
    editor.open(document.uri, text)
    edit = editor.wait(editor.ask.text_document_rename_async(lsp.RenameParams(document, position, "share")))
    assert edit is not None
    counts = {Path(uri).name: len(edits) for uri, edits in (edit.changes or {}).items()}
    assert counts == {"mine.kv": 2, "child.kv": 1}
    editor.close(document.uri)


def test_a_folder_behind_a_link_is_one_folder(tmp_path: Path) -> None:
    """What is open by the link's name is not read from the disk once more."""
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    for name in ("mine", "other"):
        (tmp_path / "real" / f"{name}.kv").write_text(GOOD)
    texts = Workspace()
    texts.folders = [tmp_path / "link"]
    mine = (tmp_path / "link" / "mine.kv").as_uri()
    texts.put(mine, GOOD)
    assert [Path(document.uri).name for document in texts.others(mine, "weight")] == ["other.kv"]


@pytest.mark.parametrize(
    "score",
    [
        "mean(dot(q, k) over text where query_position >= sinks)\n  when prefill",
        "mean(sum(attn) over slots where position >= sinks)",
        "sum(attn) - max(sum(attn) over slots where position < sinks by floor(position / 4))",
    ],
)
def test_a_name_inside_a_range_is_found(tmp_path: Path, score: str) -> None:
    text = f'kv 2\n\npolicy P {{\n  "A test."\n  param budget = 64\n  param sinks = 4\n  score {score}\n}}\n'
    document = read_document((tmp_path / "p.kv").as_uri(), text, "utf-16")
    assert not document.diagnostics
    assert len(references(document, document.positions.position(text.index("sinks")), [])) == 2


def _document(path: Path, text: str) -> Document:
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    return read_document(path.as_uri(), text, "utf-16")


def _at(document: Document, what: str) -> lsp.Position:
    return document.positions.position(document.text.index(what))


TWO_NAMES = (
    'kv 1\n\npolicy P {\n  "A test."\n  param budget = 9\n  param w = 2\n  let g(x) = x * w\n  score g(sum(attn))\n}\n'
)


@pytest.mark.parametrize(("old", "new"), [("w = 2", "x"), ("x) =", "w")])
def test_a_name_that_would_mean_something_else_is_refused(tmp_path: Path, old: str, new: str) -> None:
    """`let g(x) = x * x` is right, and another policy."""
    document = _document(tmp_path / "mine.kv", TWO_NAMES)
    with pytest.raises(RenameError, match=f"`{new}` already means something else in"):
        rename(document, _at(document, old), new, [])
    assert rename(document, _at(document, old), "third", []).changes is not None


def test_a_name_that_is_taken_is_refused_as_the_checker_refuses_it(tmp_path: Path) -> None:
    """One error more is enough, also beside errors that were there."""
    taken = TWO_NAMES.replace("param w = 2", "param w = 2\n  param a = 3")
    for text in (taken, taken.replace("score g(sum(attn))", "score g(sum(attn)) + nothing")):
        document = _document(tmp_path / "mine.kv", text)
        with pytest.raises(RenameError, match="`a` is defined twice"):
            rename(document, _at(document, "w = 2"), "a", [])


def test_who_is_defined_where_nobody_looks_is_refused(tmp_path: Path) -> None:
    library = _document(tmp_path / "lib" / "b.kv", "kv 1\n\nlet half(x) = x / 2\n")
    text = 'kv 1\nimport "lib/b.kv"\n\npolicy P {\n  "A test."\n  param budget = 9\n  score half(sum(attn))\n}\n'
    document = _document(tmp_path / "mine.kv", text)
    with pytest.raises(RenameError, match=r"`half` is defined in `.*b.kv`, which is neither open nor in the folder"):
        rename(document, _at(document, "half(sum"), "third", [])
    changes = rename(document, _at(document, "half(sum"), "third", [library]).changes or {}
    assert {Path(uri).name: len(edits) for uri, edits in changes.items()} == {"mine.kv": 1, "b.kv": 1}
    broken = _document(tmp_path / "lib" / "b.kv", "kv 1\n\nlet half(x) = x / 2\nlet = 3\n")
    with pytest.raises(RenameError, match=r"`.*b.kv` has syntax errors"):
        rename(document, _at(document, "half(sum"), "third", [broken])


def test_what_is_wrong_in_an_import_is_told_at_it(tmp_path: Path) -> None:
    _document(tmp_path / "a.kv", "kv 1\n\nlet one(x) = x + 1\n")
    _document(tmp_path / "b.kv", "kv 1\n\nlet two(x) = x + nothing\n")
    text = (
        'kv 1\nimport "a.kv"\nimport "b.kv"\n\npolicy P {\n  "A test."\n  param budget = 9\n  score one(two(sum(attn)))\n}\n'
    )
    found = diagnostics(_document(tmp_path / "mine.kv", text))
    assert [one.range.start.line for one in found if one.severity == lsp.DiagnosticSeverity.Error] == [2]


@pytest.mark.nightly
def test_a_folder_is_found_by_its_address(tmp_path: Path) -> None:
    """In which `#` and spaces are spelled otherwise; and one that is added later is one of them."""
    child = 'kv 1\nimport "../mine.kv"\n\npolicy Child extends Mine {\n  "C."\n  keep first weight\n}\n'
    for name, file in (("c# d", "there"), ("later", "later")):
        (tmp_path / name).mkdir()
        (tmp_path / name / f"{file}.kv").write_text(child)
    mine = (tmp_path / "mine.kv").as_uri()
    rename_weight = lsp.RenameParams(lsp.TextDocumentIdentifier(mine), lsp.Position(5, 8), "share")

    def renamed_in(one: Client) -> set[str]:
        edit = one.wait(one.ask.text_document_rename_async(rename_weight))
        assert edit is not None
        return {Path(uri).name for uri in edit.changes or {}}

    with client(tmp_path / "c# d") as one:
        one.open(mine, GOOD)
        assert renamed_in(one) == {"mine.kv", "there.kv"}
        later = lsp.WorkspaceFolder((tmp_path / "later").as_uri(), "later")
        change = lsp.DidChangeWorkspaceFoldersParams(lsp.WorkspaceFoldersChangeEvent([later], []))
        one.do(lambda: one.ask.workspace_did_change_workspace_folders(change))
        assert renamed_in(one) == {"mine.kv", "there.kv", "later.kv"}
