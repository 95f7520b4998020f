"""Every diagnostic that kvdsl can give: its code, a title, an explanation, and a small example that fails with it.

KV01 reading and syntax · KV02 names, imports, inheritance · KV03 expressions and their axes · KV04 policies as a whole ·
KV06 tests. A code keeps its meaning for ever; a retired one is not used again: KV0501, "not available in this version", was of the
version that could not compile the whole language; KV0502, "layout that kernels do not have", of those without tables in Triton.
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


def _policy(*statements: str, edition: int = 1) -> str:
    """A file with one policy of these statements."""
    lines = "".join(f"  {statement}\n" for statement in statements)
    return f'kv {edition}\n\npolicy Example {{\n  "An example."\n{lines}}}\n'


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
    "Policies are text files in UTF-8. This file has other bytes, or control characters, and may not be a policy.",
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
    "A 64-bit float cannot represent the number.",
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
GONE = _code(
    "KV0117",
    "not in this edition",
    "Edition 2 has fewer words than edition 1: what one policy used, or none, is said with others. A file of edition 1 goes on meaning "
    "what it means; `kvdsl fmt --upgrade` rewrites it.",
    _policy(_BUDGET, "score mean(sum(attn) over page)", edition=2),
)
EDITION = _code(
    "KV0110",
    "unknown edition",
    "This kvdsl does not support the edition, or the edition line is not the first line, or occurs twice.",
    'kv 9\n\npolicy Example {\n  "An example."\n}\n',
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
    "The file does not exist, is a folder, or cannot be read by this user.",
    'kv 1\nimport "missing.kv"\n\npolicy Example {\n  "An example."\n}\n',
)
PYTHON = _code(
    "KV0115",
    "the Python file fails",
    """The Python file in which a policy is written raised an error while it was run, at this place. Expressions of `kvdsl.lang` have no
    value in Python: they are not true or false, and nothing can be done with them but what the language has.""",
    "",
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
    '`import roco` names a shipped policy, as `kvdsl list` shows them. `import "mine.kv"`, in quotes, names a file by a path '
    "relative to the importing file.",
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
    "A policy's params and lets share one set of names, in which each may be defined once. No two tests of a file have the "
    "same title.",
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
    'kv 1\nimport h2o\n\npolicy Example extends H2O {\n  "An example."\n  score position\n}\n',
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
    "Nothing reads the param, let, tensor or given value. Perhaps a statement is missing, or reads another name by mistake.",
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
    """A policy is given by the stem of a shipped one (see `kvdsl list`), by the path of a .kv file, or, if it is written in Python, as
    `module.py:policy`.""",
    "",
)
UNKNOWN_SETTING = _code(
    "KV0215",
    "unknown param in a setting",
    "`--set NAME=VALUE` sets a param of the policy; it has no param of that name.",
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

SHIPPED_BY_FILE = _code(
    "KV0217",
    "file or shipped policy",
    '`import "roco.kv"` names a file beside the importing one, and `import roco` the shipped policy. A file name without a '
    "folder may also name a shipped policy. kvdsl takes the file if it exists, else the shipped policy. "
    'So the import should say which: `import roco`, or `import "./roco.kv"`. In `roco_test.kv`, '
    '`import "roco.kv"` is the file that it tests.',
    'kv 1\nimport "h2o.kv"\n\npolicy Example extends H2O {\n  "An example."\n  keep first 4\n}\n',
    severity="warning",
)
TENSOR = _code(
    "KV0218",
    "tensor over an unknown axis",
    "What a tensor of a file varies over stands in brackets, in the order in which the file has it: `layers` of the model, `heads`, "
    "the KV heads of a layer, and `dims` of a key, each once at most.",
    _policy(_BUDGET, 'tensor filter [layers, head, dims] from "filter.safetensors"', "score -dot(filter, k)"),
)
TENSOR_FILE = _code(
    "KV0219",
    "tensor from a file that is not allowed",
    "Tensors are read from safetensors files, which hold numbers and nothing that could run. The path is relative to the policy's "
    "folder and must not lead out of it, so that a policy reads no other files.",
    _policy(_BUDGET, 'tensor filter [layers, heads, dims] from "../filter.safetensors"', "score -dot(filter, k)"),
)
GIVEN_DEFAULT = _code(
    "KV0220",
    "default of a given value that is no constant",
    "What the caller gives of each token may have a default, for forwards in which nothing is given: a number that reads nothing.",
    _policy(_BUDGET, "given importance = budget / 2", "score importance"),
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
    "Reductions run `over queries` (the default), `over last N queries`, `over slots`, `over others`, `over dims`, `over page` or `over "
    "sketch`.",
    _policy(_BUDGET, "score mean(attn over tokens)"),
)
NOT_HERE = _code(
    "KV0308",
    "not known at this place",
    "Budgets, counts and defaults are fixed when a text's prompt is known: they can read `prompt`, `layer`, `layers`, "
    "the budget and params, but nothing that changes from step to step; a default reads only the params before it. Budgets, and counts of "
    "tokens that are kept or selected, may read tensors and differ between the KV heads of a layer; what these have in common may not. "
    "A condition by which tokens are selected is of a token, and known of no page.",
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
    "random number where pages are read",
    "A page's value is the same for every query, but `random()` is drawn again by every query and at every settle.",
    _policy(_BUDGET, "pages 16", "score max(random() over page)"),
)
PAGE = _code(
    "KV0312",
    "no value of a token alone",
    "A reduction `over page` takes what every token of the page has whatever the query: keys and values, state that was reduced over "
    "queries, positions. What varies over queries is reduced over queries first.",
    _policy(_BUDGET, "pages 16", "score mean(attn over page)"),
)
POOL = _code(
    "KV0313",
    "pool at the wrong place",
    "`max_pool(x, n)` and `mean_pool(x, n)` pool one number per slot along the tokens that are not protected. So they stand in a "
    "`score`, which is found when it is known what is protected, neither inside of a reduction nor of another pool.",
    _policy(_BUDGET, "score sum(max_pool(attn, 7))"),
)
RANK = _code(
    "KV0320",
    "nothing to rank by",
    "`rank(x)` is a slot's place in the order of x, so x is one number per slot; in a reduction over queries or in a `select` it may vary "
    "over queries as well.",
    _policy(_BUDGET, "score rank(budget)"),
)
PROJECT = _code(
    "KV0321",
    "dims that do not fit",
    "`project(x, basis)` makes a vector over the dims of a key one over the `rank` of a tensor, `tensor basis [layers, heads, dims, rank] "
    "from ...`. Such dims are others than a key's: `dot(project(q, basis), project(k, basis))` has a meaning, `dot(project(q, basis), k)` "
    "has none.",
    _policy('tensor basis [dims, rank] from "basis.safetensors"', "select top 64 by dot(project(q, basis), k)"),
)
ROTATE = _code(
    "KV0323",
    "nothing to rotate",
    "`turn`, `ahead` and `pairs` apply the model's rotation to a key, a query, or an elementwise expression of one. Values have no "
    "positions, and what `project` gives has other dims.",
    _policy(_BUDGET, "score norm2(turn(v, 3))"),
)
TEXT = _code(
    "KV0324",
    "not over the text",
    "`over text` ranges over all queries of the prompt that has come, whether they saw the slot or not. These are there until the "
    "prompt has settled: for a score under `when prefill`, and not in a prompt that settles block by block. What a query gave "
    "(`attn`, `logit`) it did not give to slots behind it, and so cannot be read.",
    _policy(_BUDGET, "score mean(dot(q, k) over text)"),
)
OTHERS = _code(
    "KV0325",
    "no slot to compare with",
    "A reduction `over slots as j` compares each slot with all live slots of its KV head, one by one: `max(dot(k, j.k) over slots as j "
    "where j.position != position)`. `j.x` is what the slot j has of x, and `j.(x + y)` of an expression. It is found in a settle, from "
    "what slots have whatever the query, and `j` means nothing elsewhere.",
    _policy(_BUDGET, "score sum(dot(k, j.k) over slots)"),
)
KEY = _code(
    "KV0326",
    "not a key",
    "`mean(x over slots by key)` gives every slot the mean of the slots that have the same key as it, as pages do: `by floor(position / "
    "16)`. The key and the reduced value are one number per slot for all queries. A policy has one kind of pages: if its score "
    "reads pages, its `select` also selects whole ones.",
    _policy(_BUDGET, "score mean(k over slots by attn)"),
)
SELECT_AXES = _code(
    "KV0314",
    "not one number per slot or dim",
    "`select` ranks slots, so it needs one number per slot; `sketch` ranks dims, so it needs one number per dim. Both may vary "
    "over queries, since each query ranks for itself.",
    _policy("select top 64 by q"),
)
LOOKS_BACK = _code(
    "KV0315",
    "not known before a query attends",
    "A query selects and sketches before it attends, and for itself. So what they rank by reads queries, keys, values and "
    "numbers, but no `attn`, no `logit` and no reduction over queries; what a sketch ranks by has no `random()` and no `over "
    "page` either.",
    _policy("select top 64 by attn"),
)
SKETCH_READ = _code(
    "KV0316",
    "`over sketch` outside of `select`",
    "The dims of a sketch are found for the queries that select. Scores and keeps read all dims, and so does the sketch itself.",
    _policy(_BUDGET, "score sum(dot(q, k over sketch))"),
)
VECTOR = _code(
    "KV0317",
    "a vector of every token",
    "A reduction over queries is one number per cached token, which every query moves. So what it reduces may vary over queries and "
    "slots, but no longer over dims: `mean(dot(q, k))` can be remembered, `dot(mean(q), k)` would take a whole vector of every token.",
    _policy(_BUDGET, "score dot(mean(q), k)"),
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
    "Without a budget nothing is ever evicted, so a score has no meaning, nor has anything else that is about eviction. In a "
    "policy that selects, `keep first` and `keep last` have one: what they protect is never skipped.",
    _policy("score position"),
)
BUDGET = _code(
    "KV0403",
    "budget below 1, or with a fraction",
    "A policy keeps a whole number of tokens, at least one. Write a ratio of the prompt as `0.25 * prompt`. Only the param `budget` "
    "accepts a ratio directly, as a number above 0 and up to `1.0` with a decimal point; `1` is one token.",
    _policy("param budget = 0", "score position"),
)
KEEPS = _code(
    "KV0404",
    "more kept than the budget holds",
    "What `keep first`, `keep last` and `keep top` protect has to fit into the budget; the first and the last tokens "
    "are always selected as well, and have to fit into what is selected. Different scopes may protect the same tokens, "
    "but the first and the last tokens are different ones once there is anything to evict.",
    _policy(_BUDGET, "score position", "keep first 300", "keep last 300"),
)
KEEPS_IN_LAYER = _code(
    "KV0423",
    "more kept than the budget of a layer holds",
    "The budget differs from layer to layer, and in a model of 32 layers the protected tokens do not fit into the smallest one. They may "
    "fit in models with fewer layers. If not, the cache raises an error that names a sufficient budget.",
    _policy(_BUDGET, "budget budget / (1 + layer)", "score position", "keep last 32"),
    severity="warning",
)
OVERPROTECTED = _code(
    "KV0424",
    "more protected than the budget keeps",
    "If what is protected leaves too few tokens to evict, protected tokens leave: what `keep top` and `keep where` protect before what "
    "`keep first` and `keep last` do, of either the lowest-scored first; in edition 1 all alike. `keep where position < prompt` "
    "protects a prompt of any length, which a budget that does not grow with it cannot hold; so may several `keep` lines together. "
    "Under `cap hard`, room for a token is made before it comes, so that one token less is kept then. At a prompt's end, a cache "
    "warns where that happens.",
    _policy(_BUDGET, "score sum(attn)", "keep where position < prompt"),
    severity="warning",
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
    "In a range `LO..HI`, of a param or of layers, the first end is not above the second; both belong to it. The ends of a "
    "param's range are constants.",
    _policy("param budget = 512 in 1024..1", "score position"),
)
NO_VALUE = _code(
    "KV0408",
    "arithmetic without a result",
    "The constant part of the expression is not finite: it divides by zero, takes the root of a negative number, or exceeds "
    "64-bit floats.",
    _policy(_BUDGET, "score position / 0"),
)
BUDGET_CYCLE = _code(
    "KV0409",
    "budget defined by itself",
    "The budget is computed from something that itself reads the budget.",
    _policy("param sinks = budget / 8", "budget sinks * 2", "score position"),
)

BOUNDS = _code(
    "KV0410",
    "number out of bounds",
    "Each number has bounds: a page, a block, a pool and a history have at least 1 token, a sketch has 1 to 256 dims (no "
    "supported model's heads have more) and is renewed every 1 query or more, what is selected is at least 1 token, the floor "
    "of `across heads` or `across layers` and the decay of `ema` lie between 0 and 1.",
    _policy("select top 64 by dot(q, k)", "pages 0"),
)
PHASE = _code(
    "KV0411",
    "statement about a phase in which nothing is evicted",
    "Under `when prefill` nothing leaves while decoding: `trigger`, `slack`, `max_drop` and `cap hard` say how tokens leave "
    "step by step, so they have no meaning there. Under `when decode` nothing leaves while the prompt is read, so `prefill "
    "blocks` has none.",
    _policy(_BUDGET, "score sum(attn)", "when prefill", "slack 4", "max_drop 8"),
)
MEASURED = _code(
    "KV0440",
    "what a budget that reads the data does not go with",
    """A budget that reads what is cached, or `seen`, is found at every settle, for each KV head by itself. So nothing else can read
    `budget` then, heads cannot share it, and room cannot be made before a token is placed.""",
    _policy("budget 0.5 * seen at most 512", "score sum(attn)", "keep last budget / 4"),
)
ACROSS = _code(
    "KV0412",
    "budget across heads or layers that cannot share it",
    "`budget ... across heads` shares out a layer's tokens among its heads once, after the prompt, and `across layers` those of all "
    "layers; that is possible under `when prefill` only. Heads that agree on their victims share nothing, and neither do budgets per head "
    "from a tensor. What a layer's share depends on, `across layers by ...`, is one number for all its KV heads; there "
    "`over heads` reduces what each of them has. So it does in what `select` ranks by, where heads hold the same tokens, and in the "
    "score of heads that share a budget, of one number each; `rank(x over heads)` is for the latter alone.",
    _policy("budget 512 across heads", "score sum(attn)"),
)
REUSED = _code(
    "KV0441",
    "layers that cannot take over a choice",
    "`select ... from layers (2, 13)` has the layers above attend to what these choose, token by token of the text. So they "
    "have to hold the same tokens, which layers that evict do not. A weight is of the layer that chose, and is handed to no other.",
    _policy(_BUDGET, "score sum(attn)", "select top 64 by dot(q, k) from layers (2)"),
)
EACH = _code(
    "KV0442",
    "one number of query heads that nothing reduces",
    "Under `group each` every query head selects for itself: nothing reduces what the query heads of a KV head find. They still share "
    "its tokens, its budget and its sketch, and the heads of a layer vote as KV heads. So what a score, a budget, a `keep`, a `sketch` "
    "or `over heads` reads is the same for all of them: keys, values and positions, but no `attn` and no `q`. Without `select` "
    "there is nothing to choose. A condition on tokens that reads `q`, `select where dot(q, k) > 0`, needs `group each`.",
    _policy(_BUDGET, "score sum(attn)", "select top 64 by dot(q, k)", "group each"),
)
COMPACT = _code(
    "KV0413",
    "sketch or pages with compact positions",
    "A sketch and the minima and maxima of a page are read from keys as they are stored: rotated at the tokens' places in the "
    "text. With `positions compact` attention rotates them otherwise, so what is read would not tell what is attended to.",
    _policy(_BUDGET, "score sum(attn)", "positions compact", "pages 16", "select top 64 by dot(q, k)"),
)
ROPE = _code(
    "KV0414",
    "rope without compact positions",
    "`rope` says how keys are rotated to compact positions. Original positions need no rotation: keys are stored as they "
    "arrive, rotated at their places in the text.",
    _policy(_BUDGET, "score sum(attn)", "rope fused"),
)
NEVER_READ = _code(
    "KV0415",
    "sketch or pages that nothing reads",
    "A sketch is read by `over sketch` in `select`. Pages are read by `over page`, and by `select`, which selects by page. "
    "Without a reader they cost time and memory for nothing.",
    _policy("select top 64 by dot(q, k)", "sketch top 16 dims by abs(q) every 64 queries"),
)
NO_PAGES = _code(
    "KV0416",
    "`over page` without pages",
    "`over page` reads what pages have, and `pages N` says how many tokens a page has.",
    _policy("select top 64 by sum(q * max(k over page) over dims)"),
)
NO_SKETCH = _code(
    "KV0417",
    "`over sketch` without a sketch",
    "`over sketch` reads some of the dims, and `sketch top D dims by ... every U queries` says which.",
    _policy("select top 64 by dot(q, k over sketch)"),
)
LOGIT = _code(
    "KV0418",
    "`logit` in a policy that selects",
    "A query that selects computes no scores for the tokens that it skips. Its probability for them is 0, so `attn` can be "
    "read, but there is no `logit`.",
    _policy(_BUDGET, "score mean(logit)", "select top 64 by dot(q, k)"),
)
SHARED = _code(
    "KV0419",
    "victims that layers or heads cannot share",
    "Heads with the same victims hold the same tokens, so that no count of tokens may differ between them, as a tensor may make it. Under "
    "`victims shared by layers` all layers hold the same ones: no count may depend on `layer`, and the victims are known only after the "
    "last layer, which is too late for `prefill blocks`.",
    _policy("budget 64 + layer", "score sum(attn)", "victims shared by layers"),
)
BLOCKS = _code(
    "KV0420",
    "blocks without a size, or a size without blocks",
    "`storage blocks N` and `prefill blocks of N` say how many tokens a block has; `storage in_place` and `prefill whole` have "
    "no blocks.",
    _policy(_BUDGET, "score sum(attn)", "prefill blocks"),
)
NO_EFFECT = _code(
    "KV0421",
    "statement without the effect that it seems to have",
    "With `max_drop` d above 0, `slack` s and `trigger overflow >= R`, each prune of a long text drops max(min(d, R), R - s) "
    "tokens. Where that is R, `slack` and `max_drop` change nothing; where it is more than d, `max_drop` does not bound it; "
    "where it is 1, something is pruned at every step. Without `max_drop`, `slack` changes nothing. A `select` of as many tokens as "
    "are ever cached skips none. Counts are floored: a `keep` of less than one token protects none.",
    _policy(_BUDGET, "score position", "trigger overflow >= 32", "slack 4", "max_drop 8"),
    severity="warning",
)
HISTORY = _code(
    "KV0422",
    "history larger than what is cached",
    "`over last N queries` has to remember N numbers of 4 bytes for each cached token. Beyond 128 queries that is more than the "
    "token's key and value take, with heads of 128 dims in 16 bits: a cache that is twice as large would cost less.",
    _policy(_BUDGET, "score sum(attn over last 400 queries)"),
    severity="warning",
)

# -- KV06: tests -----------------------------------------------------------------------------------------------------


def _test(*steps: str) -> str:
    """A file with one test of these steps."""
    lines = "".join(f"  {step}\n" for step in steps)
    return f'kv 1\nimport h2o\n\ntest "an example" {{\n{lines}}}\n'


_PROMPT = "prompt { attend 1; attend 0.5, 0.5 }"

TESTS_APART = _code(
    "KV0601",
    "tests beside a policy",
    "Tests stand in a file of their own, `h2o_test.kv` for `h2o.kv`, that imports the policy and holds nothing else. So a "
    "policy's file has only what it is compiled from.",
    _policy() + '\ntest "an example" {\n  use Example\n  attend 1\n  expect kept 0\n}\n',
)
TEST_POLICY = _code(
    "KV0602",
    "test without its policy",
    "A test begins with `use NAME`, which says once what policy it is about.",
    _test("attend 1", "expect kept 0"),
)
TEST_SETTING = _code(
    "KV0603",
    "setting that the policy refuses",
    "`set NAME = NUMBER` in a test does what `--set` does for `kvdsl check`: the policy has to have the param, and has to make "
    'sense with the value. That it is refused can be what a test expects: `expect error "..."`.',
    _test("use H2O", "set buget = 4", "attend 1", "expect kept 0"),
)
TEST_ORDER = _code(
    "KV0604",
    "step at the wrong place",
    "A test first says the policy and its params, then the tokens that come in: a prompt, if there is one, and others one by "
    "one; a chat has several prompts. What is expected stands behind the token after which it holds.",
    _test("use H2O", "expect kept 0, 1", _PROMPT),
)
TEST_SIZE = _code(
    "KV0605",
    "wrong count of numbers",
    "A row of attention has one number for each token that is there, the new one last; all keys and queries of a test have the "
    "same size, and so have all values. Where there are several KV heads, `/` stands between what each of them is given, and "
    "what is given once holds for all.",
    _test("use H2O", "prompt { attend 1; attend 0.2, 0.3, 0.5 }", "expect kept 0, 1"),
)
TEST_STEP = _code(
    "KV0606",
    "step without a meaning",
    "The policy has nothing that the step speaks of: what a query selects can be expected of a policy with `select`, a score of "
    "one with a budget. A policy that reads queries or logits needs `token` with its vectors, since `attend` gives only "
    "probabilities.",
    _test("use H2O", "attend 1", "expect selected 0"),
)
TEST_OF_NOTHING = _code(
    "KV0607",
    "test that expects nothing",
    "A test without `expect` can only fail where a row has the wrong count of numbers.",
    _test("use H2O", "attend 1"),
    severity="warning",
)
