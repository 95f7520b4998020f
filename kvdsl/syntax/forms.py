"""Patterns of statements from papers and other languages: what is wrong, and the equivalent here.

A pattern matches only what no valid statement contains (`tests/diagnostics/test_forms.py` checks every policy). So a match that
begins before a syntax error explains the error. Patterns may contain

    <x>    an expression, as short as possible, with closed parentheses
    <x!>   an operand: a name, a call, a number, or something in parentheses
    <x#>   a literal number

The edit replaces the whole match, or its group `here`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

from kvdsl.diagnostics import printable
from kvdsl.files import read_resource
from kvdsl.helps import Help, fixes_of, instead, offer
from kvdsl.source import Span
from kvdsl.syntax import habits
from kvdsl.syntax.nodes import WORDS

Code = Callable[[re.Match[str]], "str | None"]

STATEMENTS = tuple(re.findall(r'^\??\w+: "(\w+)"', read_resource("grammar", "kv.lark"), re.MULTILINE))
"""The first words of statements and of items of a file."""

DEFINERS = ("def", "fn", "func", "function", "fun", "const", "var", "val", "define", "local")
"""Words that begin a definition in other languages."""

LONGEST = 400
"""The length in characters above which statements are not matched."""


@dataclass(frozen=True)
class Form:
    """A pattern with its explanation.

    Attributes:
        message: what is wrong; `{x}` is the text matched by `<x>`.
        codes: replacements; a function returns None if it has none.
        help: the text around them, which stand at `{code}`.
    """

    pattern: re.Pattern[str]
    message: str
    codes: tuple[str | Code, ...]
    help: str

    def offered(self, match: re.Match[str]) -> list[str]:
        """Return the replacements for a match."""
        groups = _groups(match)
        made = [code.format_map(groups) if isinstance(code, str) else code(match) for code in self.codes]
        return [" ".join(code.split()) for code in made if code is not None]

    def explain(self, match: re.Match[str]) -> tuple[str, str | None]:
        """Return the message and help for a match."""
        groups = _groups(match)
        offered = " or ".join(f"`{code}`" for code in self.offered(match))
        before, _, after = self.help.format_map(groups | {"code": "\0"}).partition("\0")
        help = offer(before + offered, after) if offered else None if "{code}" in self.help else before
        return printable(self.message.format_map(groups)), help


def _groups(match: re.Match[str]) -> dict[str, str]:
    return {name: " ".join((text or "").split()) for name, text in match.groupdict().items()}


_NUMBER = r"(?:\d+(?:\.\d+)?(?:[eE][-+]?\d+)?|\.\d+)"
_PARENTHESES = r"\([^()]*\)"
for _ in range(3):
    _PARENTHESES = rf"\((?:[^()]|{_PARENTHESES})*\)"
_OPERAND = rf"(?:(?<![\w.])[A-Za-z_]\w*(?:{_PARENTHESES})?|(?<![\w.]){_NUMBER}(?![\w.])|(?<!\w){_PARENTHESES})"
_EXPRESSION = rf"(?=[^\s,])(?:[^(){{}}\[\];#\n\"',=:]|[<>=!]=|{_PARENTHESES})+?"
_KINDS = {"": _EXPRESSION, "!": _OPERAND, "#": _NUMBER}


def _form(pattern: str, message: str, *codes: str | Code, help: str = "write {code}") -> Form:
    text = re.sub(r"(?<!P)<([a-z]\w*)([!#]?)>", lambda group: f"(?P<{group[1]}>{_KINDS[group[2]]})", pattern)
    return Form(re.compile(text), message, codes, help)


def explain(place: Span, at: int) -> tuple[Span, str, str | None] | None:
    """Return the place, message and help for a statement with a syntax error at `at`; None if no form explains it."""
    statement = place.text.partition("#")[0].rstrip()
    statement = statement.removesuffix("}").rstrip() if statement.count("}") > statement.count("{") else statement
    explained = []
    for form, match in found(statement):
        start, end = match.span("here" if "here" in form.pattern.groupindex else 0)
        if start <= at - place.start:
            explained.append((at - place.start >= end, form, match, place.file.span(place.start + start, place.start + end)))
    if not explained:
        return None
    _, form, match, here = min(explained, key=lambda one: one[0])  # prefer a match that contains the error
    message, help = form.explain(match)
    return here, message, _closed(help, here) if help is not None and "{`" in help else help


def _closed(help: str, place: Span) -> Help:
    """Return a help that opens a brace, whose edit also closes it at the end of the file."""
    text, (fix, *_) = place.file.text, fixes_of(help, place)
    rest = text[place.end :].rstrip("\n")
    return instead(help, f"{fix.text}{rest}\n}}\n", place.file.span(place.start, len(text)))


def found(statement: str) -> list[tuple[Form, re.Match[str]]]:
    """Return the matching forms of a statement, the most certain first."""
    if len(statement) > LONGEST:
        return []
    all = [(form, match) for form in forms() for match in form.pattern.finditer(statement)]
    return [(form, match) for form, match in all if " ".join(match[0].split()) not in form.offered(match)]


# -- what is written instead, where that depends on the statement -------------------------------------------------------

_OF = {"select": "seen", "sketch": None, "param": None, "let": None, "budget": "prompt"}
"""What a ratio refers to, by statement; the budget in all others."""


def _share(match: re.Match[str]) -> str:
    """Write a percentage as a ratio of what the statement counts."""
    share, whole = f"{float(match['n']) / 100:g}", match["whole"]
    keyword = match.string.split()[0]
    of = whole or _OF.get(keyword, "budget")
    return share if of is None else f"{share} * {of}"


def _called(match: re.Match[str]) -> str | None:
    """Write a method of an array as a function."""
    name, given = match["f"], match["args"][1:-1].strip()
    if given and not re.search(r"=|\b(dim|axis|keepdim)\b|^-?\d$", given):
        return f"{name}({match['x']}, {given})"
    return f"{name}({match['x']})"


def _layers_that(match: re.Match[str]) -> str:
    """Write a list of layers as a range, or else as a budget that keeps everything in the other layers."""
    numbers = sorted({int(number) for number in re.findall(r"\d+", match["list"])})
    if numbers == list(range(numbers[0], numbers[-1] + 1)):
        return f"layers {numbers[0]}..{numbers[-1]}"
    return f"budget where({' or '.join(f'layer == {number}' for number in numbers)}, budget, everything)"


def _by_layer(match: re.Match[str]) -> str:
    """Write a list of numbers as a choice by layer."""
    *numbers, last = re.findall(_NUMBER, match["list"])
    for index, number in reversed(list(enumerate(numbers))):
        last = f"where(layer == {index}, {number}, {last})"
    return f"budget {last}"


def _more(match: re.Match[str]) -> str:
    """Add one to the trigger's number."""
    return f"trigger overflow >= {int(match['n']) + 1}" if match["n"].isdigit() else f"trigger overflow >= {match['n']} + 1"


def _kept(match: re.Match[str]) -> str:
    """Write `keep` with one of its own words."""
    word = habits.KEEPS.get(match["word"], match["word"])
    return f"keep {word} {match['n']} by mean(attn)" if word == "top" else f"keep {word} {match['n']}"


def _word(match: re.Match[str]) -> str | None:
    """Write a setting with the known word among others; None without one."""
    keyword = match["keyword"]
    same = {word: word for word in WORDS[keyword]} | habits.SETTINGS.get(keyword, {})
    words = list(dict.fromkeys(same[one] for one in re.findall(r"\w+", match["rest"]) if one in same))
    if not words:
        return None
    word = "both" if keyword == "when" and len(words) > 1 else words[0]
    return f"victims shared by {word}" if keyword == "victims" else f"{keyword} {word}"


def _phase(match: re.Match[str]) -> str:
    return f"when {habits.SETTINGS['when'].get(match['word'], match['word'])}"


def _whole(match: re.Match[str]) -> str:
    """Write out a number with a unit of thousands."""
    return f"{float(match['n']) * (1024 if match['unit'] in 'Kk' else 1024**2):.0f}"


def _last_layer(match: re.Match[str]) -> str:
    high = int(match["n"]) - (match["op"] == "<")
    return f"layers ..{high}"


def _first_layer(match: re.Match[str]) -> str:
    return f"layers {int(match['n']) + (match['op'] == '>')}.."


def _again(match: re.Match[str]) -> str:
    """Write a reassignment as a `let` with a new name."""
    name, op, value = match["name"], match["op"] or "", match["value"]
    if op:
        value = f"{name} {op} {value}"
    new = f"{name}2" if re.search(rf"\b{name}\b", value) else name
    return f"let {new} = {value}"


_PHASES = "|".join([*WORDS["when"], *habits.SETTINGS["when"]])
_KEEPS = "|".join(habits.KEEPS)
_BEGINS = r"(?:(?<=score )|(?<=where )|(?<=by )|(?<=budget )|(?<=[=(,]))\s*"
_ENDS = r"(?=\s*(?:$|[,)]|(?:by|at|across|in|every|where|and|dims)\b))"
_MODULES = r"(?:torch|np|numpy|math|jnp|jax|tf|F|nn|functional|linalg|special|self|cache)"


@cache
def forms() -> tuple[Form, ...]:
    """Return all forms, the most certain first."""
    return (
        # -- the head of a file --
        _form(
            r"^(?:kv|version|edition)\s*[=:]?\s*\"?v?(?P<n>[12])(?:\.0+)?\"?$",
            "a file begins with its edition",
            "kv {n}",
        ),
        _form(
            r"^from\s+(?P<name>\w+)\s+import\s+(?P<names>.+)$",
            "an import has no `from`: it defines a policy under its own name",
            "import {name}",
        ),
        _form(
            r"^import\s+(?P<name>\w+)\.kv$",
            "a file's path needs quotes",
            'import "{name}.kv"',
            "import {name}",
            help="{code}: with quotes a file of yours, without them the shipped policy",
        ),
        _form(r"^import\s+(?P<name>\w+)\s+as\s+\w+$", "an import cannot rename a policy", "import {name}"),
        _form(
            r"^import\s+(?P<name>\w+)\s*,\s*(?P<names>[\w, ]+)$",
            "each import is a separate statement",
            lambda m: "; ".join(f"import {one.strip()}" for one in m[0][6:].split(",")),
        ),
        _form(
            r"^(?:policy|class)\s+(?P<name>\w+)\s*\(\s*(?P<base>\w+)\s*\)|^policy\s+(?P<name2>\w+)\s*[:<]\s*(?P<base2>\w+)(?=\s*\{)",
            "a policy names its base after `=`",
            lambda m: f"policy {m['name'] or m['name2']} = {m['base'] or m['base2']} with",
        ),
        _form(
            r"^policy\s+(?P<name>\w+)\s+extends\s+(?P<base>\w+)\s*(?:,|and\b)[\w\s,]*\w",
            "a policy has only one base",
            "policy {name} = {base} with",
        ),
        _form(r"^policy\s+[\"'](?P<name>[A-Za-z]\w*)[\"']", "a policy's name has no quotes", "policy {name}"),
        _form(r"^(?P<here>policy)\s*(?=\{)", "the policy has no name", "policy Example"),
        _form(
            r"^(?P<here>(?:class|def|kvpolicy)\s+(?P<name>[A-Z]\w*))\s*(?=\{)",
            "a policy begins with `policy`",
            "policy {name}",
        ),
        _form(
            r"^policy\s+(?P<name>\w+)(?P<base>(?:\s+extends\s+\w+)?)\s*:\s*$",
            "a policy's statements are in braces",
            "policy {name} {base} {{",
            help="write {code}, and `}}` after the last one",
        ),
        # -- shares --
        _form(
            rf"<n#>\s*%(?:\s+of(?:\s+the)?\s+<whole!>)?{_ENDS}",
            "`%` is the remainder of a division, not a percentage",
            _share,
        ),
        _form(
            rf"<n#>\s+(?:percent|per\s*cent)\b(?:\s+of(?:\s+the)?\s+<whole!>)?{_ENDS}",
            "a ratio is written as a number",
            _share,
        ),
        _form(r"(?<=[\s=(])(?P<n>\d+(?:\.\d+)?)(?P<unit>[KkM])\b", "a number is written without letters", _whole),
        _form(r"(?<![\w.])(?P<n>\d+(?:_\d+)+)\b", "a number is written without `_`", lambda m: m["n"].replace("_", "")),
        _form(
            r"(?P<n>\d+(?:\.\d+)?)\s*(?P<unit>[GMK]i?B)\b",
            "a budget is a number of tokens, not of bytes",
            help="`kvdsl explain` shows the bytes per token",
        ),
        # -- methods, modules, indices --
        _form(rf"\b(?:{_MODULES}\.)+(?P<name>[A-Za-z_]\w*(?:{_PARENTHESES})?)", "there are no modules", "{name}"),
        _form(rf"<x!>\.(?P<f>[A-Za-z_]\w*)(?P<args>{_PARENTHESES})", "a function is not called with a `.`", _called),
        _form(r"(?<![\w.])(?P<x>[A-Za-z_]\w*)\.T\b", "vectors are not transposed: `dot` sums over their dims", "{x}"),
        _form(r"^keep\s*\[\s*:\s*<n>\s*\]$", "`keep` takes a word and a number", "keep first {n}"),
        _form(r"^keep\s*\[\s*-\s*<n>\s*:\s*\]$", "`keep` takes a word and a number", "keep last {n}"),
        _form(
            r"\b(?P<f>mean|sum|max|min|std|var|abs|exp|log|sqrt|dot|norm1|norm2)\[<x>\]",
            "arguments are in round parentheses",
            "{f}({x})",
        ),
        _form(
            r"\b(?P<f>mean|sum|max|min|std|var)\(\s*<x!>\[\s*-\s*(?P<n>\w+)\s*:\s*\]\s*\)",
            "values are not indexed",
            "{f}({x} over last {n} queries)",
        ),
        _form(r"<x!>\[\s*-\s*1\s*\]", "values are not indexed", "last({x})", help="{code} is the value of the newest query"),
        _form(r"<x!>\[\s*-\s*(?P<n>\w+)\s*:\s*\]", "values are not indexed", "mean({x} over last {n} queries)"),
        _form(
            r"(?<![\w.])(?P<x>[A-Za-z_]\w*)\[\s*(?:layer|layer_idx|l|i)\s*\]",
            "values are not indexed",
            "{x}",
            help='{code} is the layer\'s own number if it is a `tensor {x} [layers] from "{x}.safetensors"`',
        ),
        _form(
            r"(?<![\w.])(?P<x>[A-Za-z_]\w*)(?P<index>\[[^\[\]]*\])(?!\s*from)",
            "values are not indexed",
            "{x}",
            help="{code} has a value for every cached token, head and layer",
        ),
        _form(
            r"^layers\s*(?:=|:|in\b)?\s*(?P<list>\[\s*\d+(?:\s*,\s*\d+)*\s*\]|\(?\d+(?:\s*,\s*\d+)+\)?)$",
            "`layers` takes one range, not a list",
            _layers_that,
            help="write {code}: the other layers keep everything",
        ),
        _form(
            r"^budget\s*(?:=|:)?\s*\[(?P<list>\s*\d+(?:\s*,\s*\d+)*\s*)\]$",
            "a budget is one expression, which may read `layer`",
            _by_layer,
        ),
        _form(
            r"^param\s+(?P<name>\w+)\s*=\s*\[[^\[\]]*\]$",
            "a param is one number",
            'tensor {name} [layers] from "{name}.safetensors"',
            help="numbers per layer or head come from a file: {code}",
        ),
        _form(
            r"^param\s+(?P<name>\w+)\s*=\s*(?:\"[^\"]*\"|'[^']*')$",
            "a param is a number",
            help="write an alternative behaviour as another policy, which may extend this one",
        ),
        _form(
            r"\bin\s+(?:range)?[\[(]\s*(?P<low>-?[\w.]+)\s*(?:,|:|\.\.|-)\s*(?P<high>-?[\w.]+)\s*[\])]",
            "a range is written with two points",
            "in {low}..{high}",
        ),
        _form(r"(?<![\w.])(?P<low>\d+)\.\.\.(?P<high>\d+)", "a range is written with two points", "{low}..{high}"),
        _form(r"(?<![\w)\]])(?<![\w)\]] )\[\s*<x>\s*\](?!\s*from)", "parentheses are round", "({x})"),
        _form(r"^pages\s*(?:of|=|:|size)\s*<n!>$", "`pages` takes a number of tokens", "pages {n}"),
        _form(
            r"^layers\s+(?:all|every|each|\*)(?:\s+layers?)?$",
            "`layers` is a range, and without it all layers evict",
            "layers 0..",
        ),
        _form(
            r"<x!>\s*,\s*over\s+(?P<axis>[A-Za-z]\w*(?:\s+\w+\s+queries)?)(?=\s*\))",
            "`over` follows what is reduced, without a comma",
            "{x} over {axis}",
        ),
        # -- ranges of layers --
        _form(
            r"^(?P<here>layers\s+(?:from\s+)?(?P<low>\d+)\s*(?:-|–|to|:|until|through|up to)\s*(?P<high>\d+))$",
            "a range is written with two points",
            "layers {low}..{high}",
        ),
        _form(r"^layers\s*(?P<op>>=?)\s*(?P<n>\d+)$", "`layers` is a range", _first_layer),
        _form(r"^layers\s*(?P<op><=?)\s*(?P<n>\d+)$", "`layers` is a range", _last_layer),
        _form(
            r"^layers\s+(?:from\s+)?(?P<n>\d+)\s*(?:\+|:|-|on|onwards?|and above|and up)$",
            "a range is written with two points",
            "layers {n}..",
        ),
        _form(
            r"\bin\s+layers\s+(?:from\s+)?(?P<low>\d+)\s*(?:\+|:|-|on|onwards?|and above|and up)$",
            "a range is written with two points",
            "in layers {low}..",
        ),
        _form(
            r"\bin\s+layers\s+(?:from\s+)?(?P<low>\d+)\s*(?:-|–|to|:)\s*(?P<high>\d+)$",
            "a range is written with two points",
            "in layers {low}..{high}",
        ),
        # -- statements that hold a word --
        *(
            _form(
                rf"^(?P<keyword>{keyword})\b(?!.*\bevery\b)\s*[=:]?\s*"
                rf"(?P<rest>[\w\s,]*\b(?:{'|'.join([*words, *habits.SETTINGS.get(keyword, ())])})\b[\w\s,]*)$",
                f"`{keyword}` takes one word: {', '.join(words[:-1])} or {words[-1]}",
                _word,
            )
            for keyword, words in WORDS.items()
            if keyword not in ("prefill", "storage")  # their words have numbers
        ),
        _form(
            rf"^(?:on|during|in|at|after|phase|only|evict\s+(?:on|at|in|during|after))\s*[=:]?\s*(?:the\s+)?(?P<word>{_PHASES})$",
            "`when` sets the phase in which tokens are evicted",
            _phase,
        ),
        _form(
            r"^victims(?:\s+shared)?(?:\s+by)?$",
            "`victims` needs `heads` or `layers`",
            "victims shared by heads",
            help="write {code}, say",
        ),
        # -- counts --
        _form(
            r"^trigger\s+overflow\s*>\s*<n>$", "`trigger` compares `overflow`, the number of tokens above the budget", _more
        ),
        _form(
            r"^trigger\s+(?:live|len|size|cached)\s*>\s*budget\s*\+\s*<n>$",
            "`trigger` compares `overflow`, the number of tokens above the budget",
            _more,
        ),
        _form(
            r"^trigger\s+(?:live|len|size|cached)\s*>=\s*budget\s*\+\s*<n>$|^trigger\s+(?:overflow\s*>=\s*)?budget\s*\+\s*<n2>$",
            "`trigger` compares `overflow`, the number of tokens above the budget",
            lambda m: f"trigger overflow >= {m['n'] or m['n2']}",
        ),
        _form(
            r"^trigger\s+(?:(?:at|every|after)\s+)?(?:[a-z_]+\s*(?:>=?|==?|:)\s*)?<n!>(?:\s+tokens)?$",
            "`trigger` compares `overflow`, the number of tokens above the budget",
            "trigger overflow >= {n}",
        ),
        _form(
            r"^budget\s+<n>\s+(?:tokens\s+)?(?:per|for each|for every|in each|a)\s+(?:kv\s+)?(?:head|layer)s?$",
            "the budget is already per KV head and layer",
            "budget {n}",
        ),
        _form(
            r"^budget\s+<n>\s+(?:shared|pooled)\s+(?:by|across|over|between|among)\s+(?P<sharers>heads|layers)$",
            "heads and layers share a budget `across` them",
            "budget {n} across {sharers}",
        ),
        _form(
            r"^budget\s+<n>\s+across\s+heads\s+(?:and|,)\s+layers$",
            "`across layers` includes the heads of all layers",
            "budget {n} across layers",
        ),
        _form(
            r"^budget\s+<n>\s+(?:for|over|between|among|per)\s+(?P<sharers>heads|layers)$",
            "heads and layers share a budget `across` them",
            "budget {n} across {sharers}",
        ),
        _form(
            r"^(?P<head>(?:param|let)\s+\w+\s*[=:]|budget\s*=?|slack|max_drop|keep\s+(?:first|last)|sketch\s+top|pages)\s*<n!>\s+(?:tokens?|slots?|positions?|queries|entries|keys)$",
            "a number has no unit",
            "{head} {n}",
        ),
        # -- keep --
        _form(rf"^(?P<word>{_KEEPS}|first|last)\s+<n!>(?:\s+tokens?)?$", "`keep` protects tokens", _kept),
        _form(rf"^keep\s+(?:the\s+)?(?P<word>{_KEEPS})\b\s*[=:]?\s*<n>$", "`keep` does not know `{word}`", _kept),
        _form(
            r"^keep\s+<n!>\s+(?P<end>first|last)(?:\s+tokens?)?$",
            "the number of tokens comes after `{end}`",
            "keep {end} {n}",
        ),
        _form(
            r"^keep\s+(?:the\s+)?(?P<end>first|last)\s+<n!>\s*(?:,|and|&&?|\|\|?|\+|or)\s*(?:keep\s+)?(?:the\s+)?(?P<end2>first|last)\s+<n2!>$",
            "each `keep` is a separate statement",
            "keep {end} {n}; keep {end2} {n2}",
        ),
        _form(
            r"^keep\s+top\s+<n!>$",
            "`keep top` needs `by` and a value to rank tokens by",
            "keep top {n} by mean(attn)",
            help="write {code}, say",
        ),
        _form(
            r"^keep\s+(?:the\s+)?(?:<n!>\s+top|top\s+<n2!>)\s+(?:(?:of|in|from|with)\s+)?<x!>$",
            "`keep top` needs `by` and a value to rank tokens by",
            lambda m: f"keep top {m['n'] or m['n2']} by {m['x']}",
        ),
        _form(
            r"^keep\s*(?:\(\s*<n>\s*\)|<n2#>)$",
            "`keep` needs a word before the number",
            lambda m: f"keep first {m['n'] or m['n2']}",
            lambda m: f"keep last {m['n'] or m['n2']}",
        ),
        _form(
            r"^keep\s+(?:if|when|all where|tokens where)\s+<c>$", "`keep` takes a condition after `where`", "keep where {c}"
        ),
        # -- select, sketch, pages --
        _form(
            r"^select\s+top\s+<n!>\s+pages\s+by\s+<x>$",
            "`select` counts tokens, even with pages",
            "select top {n} * 16 by {x}",
            help="with pages of 16 tokens write {code}",
        ),
        _form(
            r"^select\s+(?:the\s+)?(?:top\s+)?<n!>\s+(?:tokens\s+|best\s+|highest\s+)?(?:by|of|with)\s+<x>$",
            "`select` is `select top N by` and a value to rank tokens by",
            "select top {n} by {x}",
        ),
        _form(
            r"^sketch\s+top\s+<n!>\s+by\s+<x>\s+dims\s+every\s+<m!>(?:\s+queries)?$",
            "the number of dims comes before `by`",
            "sketch top {n} dims by {x} every {m} queries",
        ),
        _form(
            r"^select\s+top\s+<n!>\s+by\s+<x>\s+over\s+(?:last\s+)?\w+(?:\s+queries)?$",
            "each query ranks slots for `select` alone, before it attends",
            "select top {n} by dot(q, k)",
        ),
        # -- definitions --
        _form(
            r"^let\s+(?P<name>\w+)\s*=\s*(?:lambda\s+(?P<a>[\w, ]+):|\(?(?P<b>[\w, ]+?)\)?\s*[-=]>)\s*(?P<value>.+)$",
            "a function's arguments come after its name",
            lambda m: f"let {m['name']}({(m['a'] or m['b']).strip()}) = {m['value'].strip()}",
        ),
        _form(
            r"^(?:def|fn|func|function|fun)\s+(?P<name>\w+)\s*\((?P<args>[\w, ]*)\)\s*"
            r"(?:=|:|->|=>)?\s*(?:return\b)?\s*(?P<value>[^\s={].*)$",
            "`let` defines a function",
            "let {name}({args}) = {value}",
        ),
        _form(
            r"^let\s+(?P<name>\w+)\s*=\s*(?P<end>first|last|top)\s+<n!>$",
            "a `let` names an expression",
            "keep {end} {n}",
            help="write {code} as a separate statement",
        ),
        _form(
            r"^(?:const|var|val|define|local|def|final|float|int)\s+(?P<name>\w+)\s*(?::\s*\w+)?\s*=\s*(?P<value>.+)$",
            "`let` defines a name, and `param` a number that the user can set",
            "let {name} = {value}",
            "param {name} = {value}",
        ),
        _form(
            r"^param\s+(?P<name>\w+)\s*:\s*\w+\s*=\s*(?P<value>.+)$",
            "a param has no type: it is a number",
            "param {name} = {value}",
        ),
        _form(
            r"^param\s+(?:int|float|double|number|uint)\s+(?P<name>\w+)\s*=\s*(?P<value>.+)$",
            "a param has no type: it is a number",
            "param {name} = {value}",
        ),
        _form(
            r"^param\s+(?P<name>\w+)\s+(?P<range>in\s+\S+)\s*=\s*(?P<value>.+)$",
            "the range comes after the default",
            "param {name} = {value} {range}",
        ),
        _form(
            r"^param\s+budget(?:\s*(?P<range>in\s+\S+))?$",
            "a param needs a default",
            "param budget = 512 {range}",
            help="write {code}, say",
        ),
        _form(
            r"^param\s+(?P<name>\w+)(?:\s*(?P<range>in\s+\S+))?$",
            "a param needs a default",
            "param {name} = 4 {range}",
            help="write {code}, say",
        ),
        _form(
            rf"^(?!(?:{'|'.join(STATEMENTS)})\b)(?P<name>[A-Za-z_]\w*)\s*(?P<op>[-+*/])?=(?!=)\s*(?P<value>.+)$",
            "a statement does not begin with a name: `let` defines one, once",
            _again,
        ),
        _form(
            r"^(?P<kind>param|let)\s+(?P<name>\w+)\s*:?\s+<n#>(?=\s*(?:$|in\b))", "`{kind}` takes `=`", "{kind} {name} = {n}"
        ),
        # -- tensors and given values --
        _form(
            r"^tensor\s+(?P<name>\w+)\s*(?:=|:|from|=\s*from)\s*(?P<file>\"[^\"]*\"|'[^']*')$",
            "a tensor names its axes, in the order of the file",
            "tensor {name} [layers, heads] from {file}",
            help="write {code}, say",
        ),
        _form(
            r"^tensor\s+(?P<name>\w+)\s*\((?P<axes>[\w, ]+)\)\s*from\s*(?P<file>\"[^\"]*\"|'[^']*')$",
            "a tensor's axes are in square brackets",
            "tensor {name} [{axes}] from {file}",
        ),
        _form(
            r"^given\s+(?P<name>\w+)\s+(?:from|by|of)\s+.+$", "a given value always comes from the caller", "given {name}"
        ),
        _form(
            r"(?P<here>\s*,\s*(?P<next>(?:keep|score|param|let|select|when|trigger)\s+[A-Za-z(].*))$",
            "each statement starts on its own line, or after `;`",
            "; {next}",
        ),
        # -- the score --
        _form(
            rf"{_BEGINS}(?P<here><a>\s+if\s+<c>\s+else\s+<b>)(?=\s*(?:[),]|$))",
            "a choice between two values is written as a function",
            "where({c}, {a}, {b})",
        ),
        _form(
            r"(?<=\()\s*<x!>\s+(?:if|where|when|for)\s+<c>(?=\))",
            "a choice between two values is written as a function",
            "where({c}, {x}, 0)",
        ),
        _form(
            r"^(?:override\s+)?score\s+<x>\s+(?:where|when|for|if)\s+<c>$(?<!else)",
            "a score is one number per slot",
            "score where({c}, {x}, 0)",
            help="to choose by a condition write {code}",
        ),
        _form(
            r"^score\s*(?:\(\s*<c>\s*,\s*<d>\s*\)|<a>\s*,\s*<b>)$",
            "a score is one number per slot",
            "score {a}{c} + {b}{d}",
            help="for example {code}",
        ),
        _form(
            r"^(?:return|yield|rank by|rank|sort by|sort|importance)\s*[=:]?\s+<x>$",
            "the score ranks the tokens, and the lowest is evicted first",
            "score {x}",
        ),
        _form(
            r"^(?:evict|drop|remove|discard|delete|prune)\s+(?:tokens\s+)?(?:where|if|when)\s+<c>$",
            "a condition protects tokens, it does not evict them",
            "keep where not ({c})",
        ),
        _form(
            r"^(?:evict|drop|remove|discard|delete|prune)\s+(?:(?:(?:the\s+)?(?:lowest|bottom|top|last|first|least)\s+)?(?:<n#>\s+)?by|lowest|min)\s+<x>$",
            "the score decides which tokens are evicted: the lowest first",
            "score {x}",
        ),
        _form(
            r"^(?:evict|drop|remove|discard|delete|prune)\s+<n#>(?:\s+tokens?)?$",
            "`max_drop` sets how many tokens are evicted at a time",
            "trigger overflow >= {n}; max_drop {n}",
            help="write {code}, and rank the tokens by `score`",
        ),
        _form(
            r"^(?:evict|drop|remove|discard|delete|prune)\s+<x>$",
            "the score decides which tokens are evicted: the lowest first",
            "score {x}",
        ),
        # -- control flow --
        _form(
            r"^if\s+\(?<c>\)?\s*:?\s*\{\s*budget\s+<x>\s*\}$",
            "a statement has no condition, but a number in it may depend on one",
            "budget where({c}, {x}, budget)",
        ),
        _form(
            r"^if\s+\(?<c>\)?\s*:?\s*\{\s*score\s+<x>\s*\}$",
            "a statement has no condition, but a number in it may depend on one",
            "score where({c}, {x}, mean(attn))",
        ),
        _form(
            r"^for\b[^{}]*\{\s*(?P<inner>[^{}]*?)\s*\}$",
            "there are no loops: an expression is evaluated for every slot, head and layer",
            "{inner}",
        ),
        # -- over --
        _form(
            r"\b(?:mean|sum|max|min)\(\s*<x>\s+over\s+(?:the\s+)?(?:last|newest|current)\s+(?:query|token|step)\s*\)",
            "`last` takes the value of the newest query",
            "last({x})",
        ),
        _form(
            r"\bover\s+(?:the\s+)?last\s+<n!>(?:\s+(?:tokens?|steps?|slots?|keys?|positions?|query))?(?=\s*[),])",
            "`over last N` counts queries",
            "over last {n} queries",
        ),
        _form(
            r"\bover\s+(?:the\s+)?<n#>\s+(?:last\s+|recent\s+)?(?:queries|tokens|steps)",
            "`over` takes an axis, or the last queries",
            "over last {n} queries",
        ),
        _form(
            r"\bover\s+(?:all|the|every|each)\s+(?:the\s+)?(?P<axis>queries|slots|dims|heads)\b",
            "`over` takes the name of an axis",
            "over {axis}",
        ),
        _form(
            r"(?:(?<=score )|(?<=where )|(?<=by )|(?<== ))(?P<f>mean|sum|max|min|std|var|median)\(<x>\)\s+"
            r"over\s+(?P<axis>queries|slots|dims|heads|page|others|text)\b",
            "`over` belongs inside the parentheses",
            "{f}({x} over {axis})",
        ),
        _form(
            r"^(?P<here>(?:override\s+)?score\s+<x>\s+over\s+(?P<axis>queries|slots|dims))$",
            "`over` belongs inside a reduction",
            "score mean({x} over {axis})",
            help="write {code}, say",
        ),
        # -- comments --
        _form(r"^/\*\s*(?P<text>.*?)\s*\*/$", "a comment begins with `#`", "# {text}"),
        _form(r"(?P<here>//)(?=\s*[A-Za-z]\w*\s+[A-Za-z]\w*)", "a comment begins with `#`", "#"),
        # -- operators --
        _form(r"<a!>\s*//\s*<b!>(?=\s*(?:$|[-+*/),<>=]))", "`//` is not an operator", "floor({a} / {b})"),
        _form(
            rf"{_BEGINS}(?P<here><c>\s*\?\s*<a>\s*:\s*<b>)(?=\s*(?:[),]|$))",
            "a choice between two values is written as a function",
            "where({c}, {a}, {b})",
        ),
        _form(r"\|\|\s*<x!>\s*\|\|", "a norm is written as a function", "norm2({x})"),
        _form(r"(?<!\|)\|\s*<x!>\s*\|(?!\|)", "a magnitude is written as a function", "abs({x})"),
        _form(r"<a!>\s*@\s*<b!>(?:\.T\b)?", "`dot` multiplies vectors", "dot({a}, {b})"),
        _form(
            r"(?<!=)(?<!= )(?P<x>(?<![\w.])[A-Za-z_]\w*)\s+in\s+(?P<low>[\w.]*[^\s.])\s*\.\.\s*(?P<high>\w+)(?=\s*(?:$|\)|and\b|or\b))",
            "a range is not a condition",
            "{low} <= {x} and {x} <= {high}",
        ),
        _form(
            r"<x!>\s*==\s*(?P<low>[\w.]*[^\s.])\s*\.\.\s*(?P<high>\w+)",
            "a range is not a number",
            "{low} <= {x} and {x} <= {high}",
        ),
        _form(
            r"<a!>\s*(?P<op><=?|>=?)\s*<b!>\s*(?P<op2><=?|>=?)\s*<d!>",
            "comparisons do not chain",
            "{a} {op} {b} and {b} {op2} {d}",
        ),
        _form(
            rf"(?P<a>(?<![\w.]){_NUMBER}|(?<![\w.])[A-Za-z_]\w*{_PARENTHESES})\s+(?P<b>[A-Za-z_]\w*{_PARENTHESES})(?=\s*(?:$|[-+*/),]))",
            "an operator is missing between `{a}` and `{b}`",
            "{a} * {b}",
        ),
    )
