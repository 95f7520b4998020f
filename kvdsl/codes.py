"""Every diagnostic that kvdsl can give: its code, a title, an explanation, and a small example that fails with it.

KV01 reading and syntax · KV02 names, imports, inheritance · KV03 expressions and their axes · KV04 policies as a whole ·
KV05 not available yet. A code keeps its meaning for ever; a retired one is not used again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Severity = Literal["error", "warning"]


@dataclass(frozen=True)
class Code:
    """A kind of finding.

    Attributes:
        example: a file that has it, for documentation and tests.
        settings: `--set` values that the example needs, if any.
    """

    id: str
    severity: Severity
    title: str
    explanation: str
    example: str
    settings: tuple[tuple[str, str], ...] = ()


CODES: dict[str, Code] = {}


def _code(
    id: str,
    title: str,
    explanation: str,
    example: str,
    severity: Severity = "error",
    settings: tuple[tuple[str, str], ...] = (),
) -> Code:
    code = Code(id, severity, title, " ".join(explanation.split()), example, settings)
    assert id not in CODES, id
    CODES[id] = code
    return code


def _policy(*statements: str) -> str:
    """A file with one policy of these statements."""
    lines = "".join(f"  {statement}\n" for statement in statements)
    return f'kv 1\n\npolicy Example {{\n  "An example."\n{lines}}}\n'


_BUDGET = "param budget = 512"

# -- KV01: reading and syntax ----------------------------------------------------------------------------------------

SYNTAX = _code(
    "KV0101",
    "syntax error",
    "The text is not what the grammar expects at this place. The message says what could stand there instead.",
    _policy(_BUDGET, "score"),
)
CHARACTER = _code(
    "KV0102",
    "unexpected character",
    "The character has no meaning in the language. Outside of strings and comments a file consists of names, numbers, "
    "operators and brackets, all of them ASCII.",
    _policy(_BUDGET, "score sum(attn) × 2"),
)
STRING_END = _code(
    "KV0103",
    "string without an end",
    "A string in single or double quotes ends on its own line; one in triple quotes may run over several lines, but "
    "has to end before the file does.",
    'kv 1\n\npolicy Example {\n  "An example.\n}\n',
)
STATEMENT = _code(
    "KV0104",
    "unknown statement",
    "Each line of a policy begins with the name of a statement: `param`, `let`, `budget`, `score`, `keep` and so on.",
    _policy(_BUDGET, "scor sum(attn)"),
)
ENCODING = _code(
    "KV0105",
    "not a text in UTF-8",
    "Policies are text files in UTF-8. This one has bytes that are not, or characters that no text has, so it is "
    "perhaps not a policy at all.",
    'kv 1\n\npolicy Example { "An example.\0" }\n',
)
TOO_LARGE = _code(
    "KV0106",
    "file too large",
    "A policy is a dozen lines; files above 32 KiB are not read.",
    "kv 1\n" + "#" * 32_768,
)
TOO_DEEP = _code(
    "KV0107",
    "expression too large",
    "Expressions may be nested 100 deep and have 1,000 parts, with all their lets and functions put in. Every part is "
    "evaluated for every cached token, so a real policy stays far below that.",
    _policy(_BUDGET, "score " + "-" * 101 + "position"),
)
NUMBER = _code(
    "KV0108",
    "number out of range",
    "The number cannot be represented as a 64-bit float.",
    _policy("param budget = 1e400", "score position"),
)
EDITION_MISSING = _code(
    "KV0109",
    "no edition",
    "Every file says on its first line which edition of the language it is written in, so that a later kvdsl reads it "
    "as it was meant. Without the line the current edition is assumed.",
    'policy Example {\n  "An example."\n}\n',
    severity="warning",
)
EDITION = _code(
    "KV0110",
    "unknown edition",
    "This kvdsl does not know the edition that the file asks for, or the line does not stand first, or stands twice.",
    'kv 2\n\npolicy Example {\n  "An example."\n}\n',
)
BAD_NAME = _code(
    "KV0111",
    "name that cannot be used",
    "Names of params become Python keyword arguments and C++ names, a policy's name becomes a class and its file's "
    "stem a package. So the keywords of both languages, the arguments that every cache has (`model`, `backend`, "
    "`seed`, ...), names with two underscores in a row and names longer than 64 characters are refused.",
    _policy("param class = 3", "param budget = class", "score position"),
)
UNCLOSED = _code(
    "KV0112",
    "bracket without its partner",
    "Each `(` and `{` needs its `)` or `}`, and the other way round.",
    _policy(_BUDGET, "score sum(attn"),
)
ESCAPE = _code(
    "KV0113",
    "unknown escape in a string",
    r"A backslash in a string starts one of `\n`, `\t`, `\\`, `\"`, `\'` and `\u{...}` with a hexadecimal code point.",
    'kv 1\n\npolicy Example {\n  "An \\q example."\n}\n',
)
UNREADABLE = _code(
    "KV0114",
    "file cannot be read",
    "There is no such file, or it is a folder, or the system does not let kvdsl read it.",
    'kv 1\nimport "missing.kv"\n\npolicy Example {\n  "An example."\n}\n',
)

# -- KV02: names, imports, inheritance -------------------------------------------------------------------------------

UNKNOWN_NAME = _code(
    "KV0201",
    "unknown name",
    "The name is none of the policy's params and lets, of the imported lets, of the prelude's, or of the built-in inputs.",
    _policy(_BUDGET, "score mean(atn)"),
)
UNKNOWN_FUNCTION = _code(
    "KV0202",
    "unknown function",
    "There is no function of that name, neither built in nor in the prelude, the imports or the policy.",
    _policy(_BUDGET, "score average(attn)"),
)
UNKNOWN_POLICY = _code(
    "KV0203",
    "unknown policy",
    "A policy can extend the policies of imported files, by the name that stands after `policy` there.",
    'kv 1\n\npolicy Example extends H2O {\n  "An example."\n}\n',
)
IMPORT = _code(
    "KV0204",
    "import that is not allowed",
    "An import names a .kv file by a path relative to the importing file. A shipped policy is found by its file name "
    "from anywhere.",
    'kv 1\nimport "/etc/passwd"\n\npolicy Example {\n  "An example."\n}\n',
)
CYCLE = _code(
    "KV0205",
    "circle of definitions",
    "Something is defined by itself: a let that uses itself, or files that import each other. Lets and functions are "
    "put in where they are used, so they cannot be recursive.",
    _policy(_BUDGET, "let f(x) = f(x) + 1", "score f(position)"),
)
DUPLICATE = _code(
    "KV0206",
    "name defined twice",
    "A policy's params and lets share one set of names, in which each may be defined once.",
    _policy(_BUDGET, "param budget = 256", "score position"),
)
STATEMENT_TWICE = _code(
    "KV0207",
    "statement given twice",
    "Each statement but `param`, `let` and `keep` may stand once in a policy.",
    _policy(_BUDGET, "score position", "score sum(attn)"),
)
NEEDS_OVERRIDE = _code(
    "KV0208",
    "override not declared",
    "A policy that changes what it inherits says so with `override`, so that a reader sees it, and so that a new "
    "statement in the extended policy cannot be replaced by accident.",
    'kv 1\nimport "h2o.kv"\n\npolicy Example extends H2O {\n  "An example."\n  score position\n}\n',
)
NOTHING_TO_OVERRIDE = _code(
    "KV0209",
    "nothing to override",
    "`override` changes a statement of the extended policy, which has no such statement.",
    _policy(_BUDGET, "override score position"),
)
BUILTIN = _code(
    "KV0210",
    "built-in name",
    "The inputs (`attn`, `position`, ...) and the built-in functions cannot be redefined. The prelude's names can.",
    _policy(_BUDGET, "let attn = 3", "score position"),
)
ONE_POLICY = _code(
    "KV0211",
    "a file holds one policy",
    "The file's stem names the generated package and the command-line name, so a file holds exactly one policy, or, "
    "as a library to be imported, only lets.",
    "kv 1\n",
)
UNUSED = _code(
    "KV0212",
    "unused name",
    "Nothing reads the param or let. Perhaps a statement is missing, or reads another name by mistake.",
    _policy(_BUDGET, "param sinks = 4", "score position"),
    severity="warning",
)
NO_DOCSTRING = _code(
    "KV0213",
    "no docstring",
    "The first thing in a policy is a string that says what it does and where it comes from. It becomes the "
    "documentation of the generated class.",
    "kv 1\n\npolicy Example {}\n",
    severity="warning",
)
NO_SUCH_POLICY = _code(
    "KV0214",
    "no such policy file",
    "A policy is given by the stem of a shipped one (see `kvdsl list`) or by the path of a .kv file.",
    "",
)
UNKNOWN_SETTING = _code(
    "KV0215",
    "unknown param in a setting",
    "`--set NAME=VALUE` sets a param of the policy; it has none of that name.",
    _policy(_BUDGET, "score position"),
    settings=(("buget", "256"),),
)
BAD_SETTING = _code(
    "KV0216",
    "setting that is no number",
    "The value in `--set NAME=VALUE` is a finite number, written as in a policy.",
    _policy(_BUDGET, "score position"),
    settings=(("budget", "abc"),),
)

# -- KV03: expressions and their axes --------------------------------------------------------------------------------

SCORE_AXES = _code(
    "KV0301",
    "not one number per slot",
    "`score` and `keep top ... by` rank the cached tokens, so they need one number per slot. An expression that also "
    "varies over queries or dims has to be reduced first, for example by `mean(...)`, `sum(...)` or `last(...)`.",
    _policy(_BUDGET, "score attn"),
)
COUNT_AXES = _code(
    "KV0302",
    "not a single number",
    "Budgets, counts and defaults are numbers: they cannot vary over slots, queries or dims.",
    _policy(_BUDGET, "score position", "keep last age"),
)
CONDITION = _code(
    "KV0303",
    "not a condition",
    "`keep where`, `and`, `or`, `not` and the first argument of `where(...)` need a condition: a comparison, or "
    "several of them combined by `and`, `or` and `not`.",
    _policy(_BUDGET, "score position", "keep where position"),
)
REDUCTION = _code(
    "KV0304",
    "nothing to reduce",
    "A reduction takes away an axis, which its body must have: `mean(x)` needs an x with one value per query, `mean(x "
    "over slots)` one per slot, `mean(x over dims)` one per dim.",
    _policy(_BUDGET, "score mean(position)"),
)
NESTED = _code(
    "KV0305",
    "reduction over queries inside another",
    "A reduction over queries is kept up to date as queries come by, so its body can only read what one query sees.",
    _policy(_BUDGET, "score sum(attn > mean(attn))"),
)
ARGUMENTS = _code(
    "KV0306",
    "wrong arguments",
    "The function takes another number of arguments, or the argument makes no sense for it.",
    _policy(_BUDGET, "score where(position > 3, 1)"),
)
AXIS = _code(
    "KV0307",
    "unknown axis",
    "Reductions run `over queries` (the default), `over slots` or `over dims`.",
    _policy(_BUDGET, "score mean(attn over tokens)"),
)
NOT_HERE = _code(
    "KV0308",
    "not known at this place",
    "Budgets, counts and defaults are fixed when a text's prompt is known: they can read `prompt`, `layer`, `layers`, "
    "the budget and params, but nothing that changes from step to step; a default reads only the params before it.",
    _policy("param budget = live / 2", "score position"),
)
NOT_A_FUNCTION = _code(
    "KV0309",
    "function and value confused",
    "A function is called with its arguments in parentheses; anything else is not called.",
    _policy(_BUDGET, "score position(3)"),
)
OPTION = _code(
    "KV0310",
    "unknown word in a statement",
    "The statement takes one of a few words, which the message lists: `group mean`, `group max` and `group sum`, say.",
    _policy(_BUDGET, "score sum(attn)", "group average"),
)
RANDOM = _code(
    "KV0311",
    "random number inside a reduction over queries",
    "`random()` is drawn once per slot when tokens are evicted; there is none for each query.",
    _policy(_BUDGET, "score sum(attn * random())"),
)

# -- KV04: policies as a whole ---------------------------------------------------------------------------------------

NO_SCORE = _code(
    "KV0401",
    "budget without a score",
    "With a budget, tokens have to leave; the score says which.",
    _policy(_BUDGET),
)
NO_BUDGET = _code(
    "KV0402",
    "score without a budget",
    "Without a budget nothing is ever evicted, so a score or a keep has no meaning.",
    _policy("score position"),
)
BUDGET = _code(
    "KV0403",
    "budget below 1",
    "A policy keeps at least one token. A rate of the prompt is written `0.25 * prompt`; only the param `budget` "
    "itself may be given as a number between 0 and 1, which then means that.",
    _policy("param budget = 0", "score position"),
)
KEEPS = _code(
    "KV0404",
    "more kept than the budget holds",
    "What `keep first`, `keep last` and `keep top` protect has to fit into the budget. Different scopes may protect "
    "the same tokens, but the first and the last ones are different as soon as there is anything to evict.",
    _policy(_BUDGET, "score position", "keep first 300", "keep last 300"),
)
NEGATIVE = _code(
    "KV0405",
    "negative count",
    "A count of tokens is at least 0, whatever the values of the params that it is computed from.",
    _policy(_BUDGET, "score position", "keep first 0 - 4"),
)
OUT_OF_RANGE = _code(
    "KV0406",
    "value out of its range",
    "The param's default or setting lies outside of the range that its `in LO..HI` declares.",
    _policy("param budget = 512 in 1..256", "score position"),
)
EMPTY_RANGE = _code(
    "KV0407",
    "range without values",
    "A range `LO..HI` has constant ends, both belong to it, and the first is not above the second.",
    _policy("param budget = 512 in 1024..1", "score position"),
)
NO_VALUE = _code(
    "KV0408",
    "arithmetic without a result",
    "The constant part of the expression has no finite value: a division by zero, the root of a negative number, a "
    "number beyond the range of 64-bit floats.",
    _policy(_BUDGET, "score position / 0"),
)
BUDGET_CYCLE = _code(
    "KV0409",
    "budget defined by itself",
    "The budget is computed from something that itself reads the budget.",
    _policy("param sinks = budget / 8", "budget sinks * 2", "score position"),
)

# -- KV05: not available yet -----------------------------------------------------------------------------------------

NOT_YET = _code(
    "KV0501",
    "not available in this version",
    "The language has this construct, but this version of kvdsl does not compile it yet.",
    _policy(_BUDGET, "score position", "pages 16"),
)
