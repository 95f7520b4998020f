"""Explain a token that the grammar does not expect."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from lark import Token

from kvdsl import codes
from kvdsl.codes import Code
from kvdsl.diagnostics import Label, did_you_mean, listed, printable
from kvdsl.helps import add, instead, leave_out, offer, prefix
from kvdsl.reference import NO_NUMBERS, VECTORS
from kvdsl.source import SourceFile, Span
from kvdsl.syntax import forms, habits
from kvdsl.syntax.lexer import span_of

Explanation = tuple[Code, Span, str, str | None, tuple[Label, ...]]


@dataclass(frozen=True)
class Stuck:
    """The state of the parser at an unexpected token.

    Attributes:
        begin: the index of the statement's first token.
        at: the index of the unexpected token.
        token: the unexpected token; a keyword has its own type.
        accepts: the terminals that could stand here.
        keywords: the keywords' spelling by terminal.
        clause: in a one-line policy, the indices of its last clause's first token and of the token after the clause.
    """

    source: SourceFile
    tokens: list[Token]
    begin: int
    at: int
    token: Token
    accepts: frozenset[str]
    keywords: dict[str, str]
    clause: tuple[int, int] | None = None

    @property
    def before(self) -> Token | None:
        """The token before the unexpected one."""
        return self.tokens[self.at - 1] if self.at > 0 else None

    @property
    def goes_on(self) -> bool:
        """Whether a line ends after an operator, as if the next line continued it."""
        ends = self.token.type == "_SEP" and self.token == "\n"
        return ends and self.at > self.begin and self.before is not None and ends_in_operator(self.before)

    @property
    def statement(self) -> Span:
        """The statement up to the end of its line, or the clause."""
        if self.clause is not None:
            first, behind = (self.tokens[index].start_pos or 0 for index in self.clause)
            return self.source.span(first, behind)
        begin = self.tokens[self.begin].start_pos or 0
        ends = [token.start_pos or 0 for token in self.tokens[self.at :] if token.type in ("_SEP", "$END")]
        return self.source.span(begin, ends[0] if ends else len(self.source.text))

    @property
    def span(self) -> Span:
        """The span of the unexpected token; for a missing rest, the place right after the text."""
        if self.token.type in ("_SEP", "$END", "RBRACE") and self.at > self.begin and self.before is not None:
            end = self.before.end_pos or 0
            return self.source.span(end, end + 1)
        return span_of(self.source, self.token)


def ends_in_operator(last: Token) -> bool:
    """Return whether an expression with this last token lacks its right side."""
    return last.type in _OPERATORS | {"NOT"} or last in ("and", "or", "not")


def explain(stuck: Stuck) -> Explanation:
    """Return the code, place, message, help and labels for an unexpected token."""
    for case in (_unclosed, _stray_bracket, _step, _next_statement, _form, _statement, _operator, _docstring):
        explanation = case(stuck)
        if explanation is not None:
            return explanation
    return _expected(stuck)


_EXPRESSION = {"NUMBER", "LPAR", "MINUS"}
_OPERATORS = {"OR", "AND", "LT", "LE", "GT", "GE", "EQ", "NE", "PLUS", "MINUS", "STAR", "SLASH", "PERCENT", "POWER"}
_COMPARISONS = {"LT", "LE", "GT", "GE", "EQ", "NE"}
_STEPS = {"USE", "SET", "PROMPT", "ATTEND", "TOKEN", "EXPECT"}
_SHOWN = {
    "NAME": "a name", "NUMBER": "a number", "STRING": "a string", "LPAR": "`(`", "RPAR": "`)`", "LBRACE": "`{`",
    "RBRACE": "`}`", "LSQB": "`[`", "RSQB": "`]`", "EQUAL": "`=`", "COMMA": "`,`", "RANGE": "`..`",
    "$END": "the end of the file", "GE": "`>=`",
}  # fmt: skip


def _unclosed(stuck: Stuck) -> Explanation | None:
    """Explain a statement or file that ends inside a bracket."""
    if stuck.token.type == "$END" and "RBRACE" in stuck.accepts | ({"RBRACE"} if stuck.at > stuck.begin else set()):
        brace = _last_open(stuck.tokens[: stuck.at], "LBRACE", "RBRACE")
        parenthesis = _last_open(stuck.tokens[stuck.begin : stuck.at], "LPAR", "RPAR")
        if parenthesis is None and brace is not None and "RBRACE" in stuck.accepts:
            span = span_of(stuck.source, brace)
            return codes.UNCLOSED, span, "this `{` has no closing `}`", add("add `}`", " after the last statement"), ()
    if "RPAR" in stuck.accepts and stuck.token.type in ("_SEP", "$END", "RBRACE", "LBRACE"):
        opened = _last_open(stuck.tokens[stuck.begin : stuck.at], "LPAR", "RPAR")
        if opened is not None:
            end = stuck.source.span(stuck.span.start, stuck.span.start)
            help = instead("add `)`", ")", end)
            return codes.UNCLOSED, span_of(stuck.source, opened), "this `(` has no closing `)`", help, ()
    if stuck.token in ("policy", "test") and stuck.accepts & {"OVERRIDE", "EXPECT", "ATTEND"}:
        brace = _last_open(stuck.tokens[: stuck.at], "LBRACE", "RBRACE")
        labels = () if brace is None else (Label(span_of(stuck.source, brace), "this `{` is still open"),)
        return codes.UNCLOSED, stuck.span, f"expected `}}` before the next {stuck.token}", None, labels
    return None


def _last_open(tokens: Iterable[Token], left: str, right: str) -> Token | None:
    opened: list[Token] = []
    for token in tokens:
        if token.type == left:
            opened.append(token)
        elif token.type == right and opened:
            opened.pop()
    return opened[-1] if opened else None


def _stray_bracket(stuck: Stuck) -> Explanation | None:
    """Explain an extra closing bracket."""
    partner = {"RPAR": ("LPAR", "("), "RBRACE": ("LBRACE", "{")}.get(stuck.token.type)
    if partner is None or stuck.token.type in stuck.accepts:
        return None
    begin = stuck.begin if partner[0] == "LPAR" else 0
    if _last_open(stuck.tokens[begin : stuck.at], partner[0], stuck.token.type) is not None:
        return None
    message = f"this `{stuck.token}` has no opening `{partner[1]}`"
    return codes.UNCLOSED, stuck.span, message, leave_out("leave it out", stuck.span), ()


def _form(stuck: Stuck) -> Explanation | None:
    """Explain a statement of a known form."""
    explained = forms.explain(stuck.statement, stuck.span.start)
    if explained is None:
        return None
    span, message, help = explained
    return codes.SYNTAX, span, message, help, ()


def _next_statement(stuck: Stuck) -> Explanation | None:
    """Explain a statement right after another complete one."""
    from kvdsl.reference import STATEMENTS, first_word

    begins = {"use", "set", "prompt", "attend", "expect", *map(first_word, STATEMENTS)} - {
        "policy",
        "test",
        "import",
        "budget",
    }  # which expressions name
    if "_SEP" not in stuck.accepts or "LBRACE" in stuck.accepts or stuck.at == stuck.begin or str(stuck.token) not in begins:
        return None
    if stuck.clause is not None:
        return codes.SYNTAX, stuck.span, f"expected `,` before `{stuck.token}`", prefix("write `,` between clauses", ","), ()
    help = prefix("write `;` between statements, or begin a new line", ";")
    return codes.SYNTAX, stuck.span, f"expected a new line or `;` before `{stuck.token}`", help, ()


def _step(stuck: Stuck) -> Explanation | None:
    """Explain a word that begins no step of a test; `turn` takes no arguments."""
    from kvdsl.reference import STEPS, first_word

    first = stuck.tokens[stuck.begin] if stuck.begin < stuck.at else None
    if first is None or first.type != "NAME" or stuck.at != stuck.begin + 1 or stuck.accepts - {"_SEP", "RBRACE"}:
        return None
    if str(first) == "turn":
        return codes.SYNTAX, stuck.span, "`turn` takes nothing: it ends a turn of the chat", None, ()
    word, start = printable(str(first)[:64]), stuck.statement.start
    span = stuck.statement.file.span(start, start + len(first))
    help = did_you_mean(word, [*map(first_word, STEPS)])
    return codes.STATEMENT, span, f"unknown statement `{word}`", help, ()


def _statement(stuck: Stuck) -> Explanation | None:
    """Explain a word that begins no statement."""
    begins = stuck.accepts & {"OVERRIDE", "KEEP", "POLICY", "EXPECT", "ATTEND"}
    if not begins or stuck.token.type != "NAME":
        return None
    known = [stuck.keywords[name] for name in stuck.accepts if name in stuck.keywords]
    word = printable(str(stuck.token)[:64])
    if "POLICY" in stuck.accepts:
        help = did_you_mean(word, known) or "a file holds `kv 1`, imports, lets and a policy"
        return codes.STATEMENT, stuck.span, f"expected `policy`, `let`, `import` or `test`, not `{word}`", help, ()
    if word == "override" and "KEEP" in stuck.accepts:
        help = leave_out(habits.OVERRIDE, stuck.span)
        return codes.STATEMENT, stuck.span, "`override` is not needed after `with`", help, ()
    habit = habits.STATEMENTS.get(word) if "KEEP" in stuck.accepts else None
    if habit is not None and habit.startswith("write "):
        habit = offer(habit, at=stuck.statement)
    elif habit == habits.STATEMENTS["for"]:
        habit = leave_out(habit, stuck.statement)
    return codes.STATEMENT, stuck.span, f"unknown statement `{word}`", habit or did_you_mean(word, known), ()


def _operator(stuck: Stuck) -> Explanation | None:
    """Explain operators of other languages."""
    kind, before = stuck.token.type, stuck.before
    if kind == "EQUAL" and stuck.accepts >= _EXPRESSION and before is not None:
        message = f"`{before}` takes its expression without `=`"
        return codes.SYNTAX, stuck.span, message, leave_out("leave out the `=`", stuck.span), ()
    if kind == "EQUAL" and "OR" in stuck.accepts:
        return codes.SYNTAX, stuck.span, "`=` does not compare", offer("write `==`"), ()
    if kind in _COMPARISONS and "OR" in stuck.accepts:
        return codes.SYNTAX, stuck.span, "comparisons do not chain", "write `a < b and b < c`", ()
    if kind == "SLASH" and before is not None and before.type == "SLASH":
        rounded = instead(
            "a comment starts with `#`; `floor(a / b)` rounds down", "#", span_of(stuck.source, before).to(stuck.span)
        )
        return codes.SYNTAX, stuck.span, "unexpected `/` after `/`", rounded, ()
    return None


def _docstring(stuck: Stuck) -> Explanation | None:
    if stuck.token.type == "STRING" and "OVERRIDE" in stuck.accepts:
        help = "the docstring is one string, before the first statement"
        return codes.SYNTAX, stuck.span, "a string is not a statement", help, ()
    return None


def _expected(stuck: Stuck) -> Explanation:
    """Explain any other token by what could stand here."""
    choices = _choices(stuck)
    found = {"_SEP": "the end of the line", "$END": "the end of the file"}.get(stuck.token.type)
    if stuck.token == ";":
        found = "`;`"
    found = found or (f"`{printable(str(stuck.token)[:40])}`" if stuck.token.type != "STRING" else "this string")
    help = _help(stuck)
    if choices == ["a new line"]:
        message = f"expected a new line or `;` before {found}"
    elif stuck.before is not None and stuck.at > stuck.begin and stuck.token.type in ("_SEP", "$END", "RBRACE"):
        message = f"expected {_alternatives(choices)} after `{printable(str(stuck.before)[:40])}`"
    else:
        message = f"expected {_alternatives(choices)}, not {found}"
    return codes.SYNTAX, stuck.span, message, help, ()


def _help(stuck: Stuck) -> str | None:
    """Return a help where one can be guessed."""
    kind, before = stuck.token.type, stuck.before
    if "OVERRIDE" in stuck.accepts and kind == "SLASH" and _text_follows(stuck, "/"):
        return instead("a comment starts with `#`", "#", stuck.source.span(stuck.span.start, stuck.span.start + 2))
    if stuck.goes_on or ("OVERRIDE" in stuck.accepts and kind in _OPERATORS):
        return _GO_ON
    if {"FIRST", "LAST", "WHERE"} <= stuck.accepts and str(stuck.token) in habits.KEEPS:
        return offer(f"write `{habits.KEEPS[str(stuck.token)]}`")
    if stuck.token == "if" and "OR" in stuck.accepts:
        return habits.CHOICE
    if kind in _STEPS and stuck.accepts & {"POLICY", "OVERRIDE"}:
        return f'`{stuck.token}` belongs inside a test: `test "..." {{ ... }}`'
    if "POLICY" in stuck.accepts and kind in stuck.keywords and _behind_with(stuck):
        return CLAUSES
    if stuck.accepts == {"LBRACE", "_SEP"} and before is not None and before == "\n" and _behind_with(stuck):
        return CLAUSES
    if "POLICY" in stuck.accepts and kind in stuck.keywords:
        return f"`{stuck.token}` belongs inside a policy: `policy NAME {{ ... }}`"
    if "OR" in stuck.accepts and kind == "OVER":
        return "`over` belongs inside the parentheses: `mean(x over slots)`"
    if "_SEP" in stuck.accepts and kind == "COMMA":
        return "each statement starts on its own line, or after `;`"
    is_name = before is not None and before.type == "NAME" and before not in stuck.keywords.values()
    if before is not None and is_name and kind in ("NAME", "NUMBER") and stuck.accepts & {"LPAR", "OR"}:
        at = span_of(stuck.source, before).to(stuck.span)
        return offer(f"arguments need parentheses: `{printable(before[:40])}({printable(stuck.token[:40])})`", at=at)
    words = [stuck.keywords[name] for name in stuck.accepts if name in stuck.keywords]
    return (did_you_mean(str(stuck.token), words) if kind == "NAME" else None) or _its_form(stuck)


def _its_form(stuck: Stuck) -> str | None:
    """Return the form of the statement with the error, if its first word is known."""
    from kvdsl.reference import STATEMENTS, first_word, form

    words = [str(token) for token in stuck.tokens[stuck.begin : stuck.at] if token != "override"][:1]
    rules = [rule for rule in STATEMENTS if [first_word(rule)] == words and rule != "keep_nothing"]
    return f"its form is {listed([form(rule) for rule in rules])}" if rules else None


CLAUSES = "after `with`, commas separate clauses on one line; in braces, lines or `;` do: `policy A = B with { ... }`"
_GO_ON = "to continue on a new line, put the expression in parentheses"


def _behind_with(stuck: Stuck) -> bool:
    """Return whether the last policy before has no braces: `A = B with ...`."""
    words = [str(token) for token in stuck.tokens[: stuck.at]]
    last = max((index for index, word in enumerate(words) if word == "policy"), default=len(words))
    return words[last + 2 : last + 3] == ["="] and "{" not in words[last:]


def _text_follows(stuck: Stuck, text: str) -> bool:
    """Return whether a text follows the unexpected token."""
    return stuck.source.text.startswith(text, stuck.token.end_pos or 0)


def _choices(stuck: Stuck) -> list[str]:
    """Return what could stand here, in words, the most useful first."""
    accepts = set(stuck.accepts)
    accepts -= {"EQUAL"} if "COMMA" in accepts else {"NAME", "LPAR"} if "EQUAL" in accepts else set()
    if "OVERRIDE" in accepts:
        return ["a statement", "`}`"]
    if "EXPECT" in accepts:
        return ["a step of the test", "`}`"]
    if "POLICY" in accepts:
        return ["`policy`", "`let`", "`import`", "`test`"]
    if "SCORE" in accepts and "KEEP" in accepts:
        return ["a statement"]
    choices = []
    if accepts >= _EXPRESSION:
        choices.append("an expression")
        accepts -= _EXPRESSION | {"NAME", "NOT"}
    elif "OR" in accepts:
        accepts -= _OPERATORS | {"DOT"}
        accepts -= {"LPAR"} if len(accepts) > 1 else set()
    if "_SEP" in accepts:
        accepts -= {"_SEP", "RBRACE", "$END"}
        if not accepts and not choices:
            return ["a new line"]
    named: tuple[str, ...] = ()
    if "REST" in accepts or ("GIVEN" in accepts and "NAME" in accepts):  # of a test
        named = NO_NUMBERS if "REST" in accepts else VECTORS
        accepts -= {"NAME", "GIVEN"}
    choices += [_SHOWN[name] for name in _SHOWN if name in accepts]
    choices += sorted(
        f"`{word}`" for word in (*named, *(stuck.keywords[name] for name in accepts if name in stuck.keywords))
    )
    return choices or ["something else"]


def _alternatives(choices: list[str]) -> str:
    shown = choices[:6]
    return shown[0] if len(shown) == 1 else f"{', '.join(shown[:-1])} or {shown[-1]}"
