"""The three ways to show diagnostics."""

import io

from kvdsl.diagnostics import (
    DiagnosticError,
    did_you_mean,
    listed,
    render_github,
    render_human,
    render_json,
    summary,
    wants_color,
)
from kvdsl.source import SourceFile
from tests.diagnostics.expect import body, check

ERROR = body("param budget = 512", "score mean(atn)")


def test_human_shows_the_line_the_place_and_the_help() -> None:
    assert render_human(check(ERROR).diagnostics) == (
        "error[KV0201]: unknown name `atn`\n"
        " --> example.kv:5:12\n"
        "  |\n"
        "5 | score mean(atn)\n"
        "  |            ^^^\n"
        "  = help: did you mean `attn`?\n"
        "\n"
        "1 error\n"
    )


def test_human_shows_other_places_with_labels() -> None:
    shown = render_human(check(body("param budget = 1", "score age", "score position")).diagnostics)
    assert " ::: example.kv:5:1\n" in shown
    assert "  | --------- first here\n" in shown


def test_human_without_color_has_no_escapes_and_with_color_says_the_same() -> None:
    import re

    found = check(ERROR).diagnostics
    plain, colored = render_human(found), render_human(found, color=True)
    assert "\x1b" not in plain
    assert "\x1b[" in colored
    assert re.sub(r"\x1b\[[0-9;]*m", "", colored) == plain


def test_terminal_codes_in_a_source_are_not_passed_on() -> None:
    shown = render_human(check(body("param budget = 512", "score \x1b[31m position")).diagnostics)
    assert "\x1b" not in shown
    assert "\\x1b" in shown


def test_the_caret_stands_under_wide_characters_and_behind_tabs() -> None:
    shown = render_human(check(body("param budget = 512", "\tscore atn # 漢字")).diagnostics)
    line, under = shown.split("\n")[3:5]
    assert under.index("^") == line.index("atn")
    shown = render_human(check('kv 1\npolicy P { "漢字"; score atn; param budget = 1 }').diagnostics)
    line, under = shown.split("\n")[3:5]
    assert under.index("^") == line.index("atn") + 2


def test_a_long_line_is_cut_around_the_place() -> None:
    text = body("param budget = 512", "score " + "position + " * 60 + "atn" + " + position" * 60)
    shown = render_human(check(text).diagnostics)
    assert max(len(line) for line in shown.split("\n")) < 140
    assert "^^^" in shown


def test_the_end_of_an_empty_file_can_be_shown() -> None:
    assert "there is no policy" in render_human(check("").diagnostics)


def test_json_has_the_documented_shape() -> None:
    (found,) = render_json(check(ERROR).diagnostics)
    assert found == {
        "code": "KV0201",
        "severity": "error",
        "message": "unknown name `atn`",
        "help": "did you mean `attn`?",
        "file": "example.kv",
        "range": {"start": {"line": 5, "column": 12}, "end": {"line": 5, "column": 15}},
        "labels": [],
        "fixes": [
            {
                "message": "write `attn`",
                "file": "example.kv",
                "range": {"start": {"line": 5, "column": 12}, "end": {"line": 5, "column": 15}},
                "text": "attn",
            }
        ],
    }


def test_github_escapes_what_its_commands_would_read() -> None:
    source = SourceFile("a,b:c%.kv", body("param budget = 512", "score mean(atn)"))
    from kvdsl.compiler import analyse

    lines = render_github(analyse(source).diagnostics).splitlines()
    assert all(line.startswith(("::error file=a%2Cb%3Ac%25.kv,", "::warning file=a%2Cb%3Ac%25.kv,")) for line in lines)
    assert any(line.endswith("::unknown name `atn`%0Ahelp: did you mean `attn`?") for line in lines)


def test_summary_counts() -> None:
    assert summary(()) == "no findings"
    assert summary(check("policy P { score a; score b }").diagnostics).startswith("2 errors, 2 warnings")


def test_color_needs_a_terminal_and_honours_no_color(monkeypatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert wants_color(Terminal())
    assert not wants_color(io.StringIO())
    monkeypatch.setenv("NO_COLOR", "1")
    assert not wants_color(Terminal())


def test_did_you_mean_offers_only_what_is_close() -> None:
    assert did_you_mean("buget", ["budget", "sinks"]) == "did you mean `budget`?"
    assert did_you_mean("ROCO", ["roco"]) == "did you mean `roco`?"
    assert did_you_mean("zebra", ["budget", "sinks"]) is None
    assert did_you_mean("x", []) is None


def test_words_are_listed() -> None:
    assert listed(["a"]) == "`a`"
    assert listed(["a", "b", "c"]) == "`a`, `b` or `c`"


def test_an_error_says_its_diagnostics() -> None:
    error = DiagnosticError(check(ERROR).diagnostics)
    assert "unknown name `atn`" in str(error)
