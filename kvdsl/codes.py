"""Every diagnostic of kvdsl, with its code, title, explanation, and a small failing example.

KV01 reading and syntax · KV02 names, imports, inheritance · KV03 expressions and their axes · KV04 policies as a whole ·
KV06 tests. Codes never change their meaning, and retired ones are never reused: KV0501, "not available in this version", for parts of
the language that could not be compiled; KV0502, "layout that kernels do not have", before Triton kernels had tables.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Severity = Literal["error", "warning"]


@dataclass(frozen=True)
class Code:
    """A kind of diagnostic.

    Attributes:
        example: a file that produces it, for documentation and tests.
        settings: `--set` values of the example.
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
    """Return a file with one policy of these statements."""
    lines = "".join(f"  {statement}\n" for statement in statements)
    return f'kv {edition}\n\npolicy Example {{\n  "An example."\n{lines}}}\n'


_BUDGET = "param budget = 512"

# -- KV01: reading and syntax ----------------------------------------------------------------------------------------

SYNTAX = _code(
    "KV0101",
    "syntax error",
    "The text does not match the grammar at this place. The message lists what could stand there instead.",
    _policy(_BUDGET, "score"),
)
CHARACTER = _code(
    "KV0102",
    "unexpected character",
    "The character has no meaning in the language. Outside strings and comments a file consists of names, numbers, "
    "operators and brackets, all in ASCII.",
    _policy(_BUDGET, "score sum(attn) × 2"),
)
STRING_END = _code(
    "KV0103",
    "string without an end",
    "A string in single or double quotes ends on its own line. A string in triple quotes may span several lines, but must "
    "end before the file does.",
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
    "not UTF-8 text",
    "Policies are text files in UTF-8. This file has invalid bytes or control characters, so it may not be a policy at all.",
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
    "Expressions may be nested 100 deep and have 1,000 parts, after lets and functions are inlined. Every part is evaluated "
    "for every cached token, so real policies stay far below that.",
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
    "The first line of a file states its edition of the language, so that later versions of kvdsl read it the same way. "
    "Without it the newest edition is assumed.",
    'policy Example {\n  "An example."\n}\n',
    severity="warning",
)
GONE = _code(
    "KV0117",
    "not in this edition",
    "Edition 2 removed some words of edition 1 that few policies used, and expresses them with others. A file of edition 1 "
    "keeps its meaning; `kvdsl fmt --upgrade` rewrites it.",
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
    "Names of params become Python keyword arguments and C++ names, a policy's name becomes a class, and its file's stem a "
    "package. So keywords of both languages, arguments of every cache (`model`, `backend`, `seed`, ...), names with `__` "
    "and names longer than 64 characters are refused.",
    _policy("param class = 3", "param budget = class", "score position"),
)
UNCLOSED = _code(
    "KV0112",
    "bracket without its partner",
    "Each `(` and `{` needs its `)` or `}`, and the reverse.",
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
    "The Python file of the policy raised an error at this place while it was executed. Expressions of `kvdsl.lang` have no "
    "value in Python: they are neither true nor false, and support only the operations of the language.",
    "",
)

# -- KV02: names, imports, inheritance -------------------------------------------------------------------------------

UNKNOWN_NAME = _code(
    "KV0201",
    "unknown name",
    "The name is not a param or let of the policy, an imported let, a name of the prelude, or a built-in input.",
    _policy(_BUDGET, "score mean(atn)"),
)
UNKNOWN_FUNCTION = _code(
    "KV0202",
    "unknown function",
    "There is no function of that name, neither built-in nor in the prelude, the imports or the policy.",
    _policy(_BUDGET, "score average(attn)"),
)
UNKNOWN_POLICY = _code(
    "KV0203",
    "unknown policy",
    "A policy can extend the policies of imported files, by the name after `policy` in that file.",
    'kv 1\n\npolicy Example extends H2O {\n  "An example."\n}\n',
)
IMPORT = _code(
    "KV0204",
    "import that is not allowed",
    '`import roco` imports a shipped policy from `kvdsl list`. `import "mine.kv"`, in quotes, imports a file by a path '
    "relative to the importing file.",
    'kv 1\nimport "/etc/passwd"\n\npolicy Example {\n  "An example."\n}\n',
)
CYCLE = _code(
    "KV0205",
    "circle of definitions",
    "Something is defined through itself: a let that uses itself, or files that import each other. Lets and functions are "
    "inlined, so they cannot be recursive.",
    _policy(_BUDGET, "let f(x) = f(x) + 1", "score f(position)"),
)
DUPLICATE = _code(
    "KV0206",
    "name defined twice",
    "The params and lets of a policy share one set of names, each defined once. Two tests of a file cannot have the same "
    "title.",
    _policy(_BUDGET, "param budget = 256", "score position"),
)
STATEMENT_TWICE = _code(
    "KV0207",
    "statement given twice",
    "Each statement except `param`, `let` and `keep` may occur once in a policy.",
    _policy(_BUDGET, "score position", "score sum(attn)"),
)
NEEDS_OVERRIDE = _code(
    "KV0208",
    "override not declared",
    "A policy that changes an inherited statement declares it with `override`. So readers see the change, and a new "
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
    "Nothing reads the param, let, tensor or given value. A statement may be missing, or read another name by mistake.",
    _policy(_BUDGET, "param sinks = 4", "score position"),
    severity="warning",
)
NO_DOCSTRING = _code(
    "KV0213",
    "no docstring",
    "A policy starts with a string that states what it does and its source. It becomes the documentation of the generated "
    "class.",
    "kv 1\n\npolicy Example {}\n",
    severity="warning",
)
NO_SUCH_POLICY = _code(
    "KV0214",
    "no such policy file",
    "A policy is named by the stem of a shipped one (see `kvdsl list`), by the path of a .kv file, or, if it is written in "
    "Python, as `module.py:policy`.",
    "",
)
UNKNOWN_SETTING = _code(
    "KV0215",
    "unknown param in a setting",
    "`--set NAME=VALUE` sets a param of the policy, which has no param of that name.",
    _policy(_BUDGET, "score position"),
    settings=(("buget", "256"),),
)
BAD_SETTING = _code(
    "KV0216",
    "setting that is not a number",
    "The value in `--set NAME=VALUE` must be a finite number, written as in a policy.",
    _policy(_BUDGET, "score position"),
    settings=(("budget", "abc"),),
)

SHIPPED_BY_FILE = _code(
    "KV0217",
    "file or shipped policy",
    '`import "roco.kv"` imports a file next to the importing one, and `import roco` the shipped policy. A shipped policy\'s '
    "file name without a folder is ambiguous: the shipped policy is imported unless such a file exists. Write `import roco` "
    'or `import "./roco.kv"` instead. In `roco_test.kv`, `import "roco.kv"` is the file under test.',
    'kv 1\nimport "h2o.kv"\n\npolicy Example extends H2O {\n  "An example."\n  keep first 4\n}\n',
    severity="warning",
)
TENSOR = _code(
    "KV0218",
    "tensor over an unknown axis",
    "The axes of a tensor are in brackets, in the order of the file: `layers` of the model, `heads` for the KV heads of a "
    "layer, and `dims` of a key, each at most once.",
    _policy(_BUDGET, 'tensor filter [layers, head, dims] from "filter.safetensors"', "score -dot(filter, k)"),
)
TENSOR_FILE = _code(
    "KV0219",
    "tensor from a file that is not allowed",
    "Tensors are read from safetensors files, which hold only numbers. The path is relative to the folder of the policy and "
    "stays inside it, so a policy cannot read unrelated files.",
    _policy(_BUDGET, 'tensor filter [layers, heads, dims] from "../filter.safetensors"', "score -dot(filter, k)"),
)
GIVEN_DEFAULT = _code(
    "KV0220",
    "default of a given value that is not a constant",
    "A value from the caller may have a default, for forwards in which it is not given. The default is a number that reads "
    "nothing.",
    _policy(_BUDGET, "given importance = budget / 2", "score importance"),
)

# -- KV03: expressions and their axes --------------------------------------------------------------------------------

SCORE_AXES = _code(
    "KV0301",
    "not one number per slot",
    "`score` and `keep top ... by` rank the cached tokens, so they need one number per slot. An expression that also varies "
    "over queries or dims must be reduced first, for example by `mean(...)`, `sum(...)` or `last(...)`.",
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
    "A reduction removes an axis, which its body must have: `mean(x)` needs an x with one value per query, `mean(x over "
    "slots)` one per slot, `mean(x over dims)` one per dim.",
    _policy(_BUDGET, "score mean(position)"),
)
NESTED = _code(
    "KV0305",
    "reduction over queries inside another",
    "A reduction over queries is updated by every query, so its body can only read what one query sees.",
    _policy(_BUDGET, "score sum(attn > mean(attn))"),
)
ARGUMENTS = _code(
    "KV0306",
    "wrong arguments",
    "The function takes a different number of arguments, or an argument is invalid for it.",
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
    "not available here",
    "Budgets, counts and defaults are fixed once the prompt is known. They can read `prompt`, `layer`, `layers`, the budget "
    "and params, but nothing that changes from step to step; a default reads only earlier params. Budgets, and counts of "
    "kept or selected tokens, may read tensors and so differ between the KV heads of a layer; numbers that the heads share "
    "may not. A condition in `select where` tests single tokens, not pages.",
    _policy("param budget = live / 2", "score position"),
)
NOT_A_FUNCTION = _code(
    "KV0309",
    "function and value confused",
    "A function is called with its arguments in parentheses; a value is not called.",
    _policy(_BUDGET, "score position(3)"),
)
OPTION = _code(
    "KV0310",
    "unknown word in a statement",
    "The statement takes one of a few words, which the message lists, for example `group mean`, `group max` and `group "
    "sum`.",
    _policy(_BUDGET, "score sum(attn)", "group average"),
)
RANDOM = _code(
    "KV0311",
    "random number over pages",
    "The value of a page is the same for every query, but `random()` is drawn again by every query and at every settle.",
    _policy(_BUDGET, "pages 16", "score max(random() over page)"),
)
PAGE = _code(
    "KV0312",
    "value that depends on the query",
    "A reduction `over page` reads values of tokens that do not depend on the query: keys and values, state that was "
    "reduced over queries, positions. Reduce values that vary over queries first.",
    _policy(_BUDGET, "pages 16", "score mean(attn over page)"),
)
POOL = _code(
    "KV0313",
    "pool at the wrong place",
    "`max_pool(x, n)` and `mean_pool(x, n)` pool one number per slot over the unprotected tokens. So they belong in a "
    "`score`, which is evaluated once protection is known, and not inside a reduction or another pool.",
    _policy(_BUDGET, "score sum(max_pool(attn, 7))"),
)
RANK = _code(
    "KV0320",
    "nothing to rank by",
    "`rank(x)` is a slot's place in the order of x, so x is one number per slot. In a reduction over queries or in a "
    "`select` it may also vary over queries.",
    _policy(_BUDGET, "score rank(budget)"),
)
PROJECT = _code(
    "KV0321",
    "dims that do not fit",
    "`project(x, basis)` maps a vector over the dims of a key to the `rank` of a tensor, `tensor basis [layers, heads, "
    "dims, rank] from ...`. Projected dims are not those of a key: `dot(project(q, basis), project(k, basis))` is valid, "
    "`dot(project(q, basis), k)` is not.",
    _policy('tensor basis [dims, rank] from "basis.safetensors"', "select top 64 by dot(project(q, basis), k)"),
)
ROTATE = _code(
    "KV0323",
    "nothing to rotate",
    "`turn`, `ahead` and `pairs` apply the model's rotation to a key, a query, or an elementwise expression of one. Values "
    "have no positions, and `project` returns other dims.",
    _policy(_BUDGET, "score norm2(turn(v, 3))"),
)
TEXT = _code(
    "KV0324",
    "not over the text",
    "`over text` ranges over all queries of the current prompt, whether they saw the slot or not. These exist until the "
    "prompt has settled: for a score under `when prefill`, and not in a prompt that settles block by block. Queries before "
    "a slot have no `attn` or `logit` for it, so these cannot be read.",
    _policy(_BUDGET, "score mean(dot(q, k) over text)"),
)
OTHERS = _code(
    "KV0325",
    "no slot to compare with",
    "A reduction `over slots as j` compares each slot with all live slots of its KV head, one by one: `max(dot(k, j.k) over "
    "slots as j where j.position != position)`. `j.x` is the value of x of the slot j, and `j.(x + y)` that of an "
    "expression. Slots are compared in a settle, by values that do not depend on the query, and `j` has no meaning "
    "elsewhere.",
    _policy(_BUDGET, "score sum(dot(k, j.k) over slots)"),
)
KEY = _code(
    "KV0326",
    "not a key",
    "`mean(x over slots by key)` gives every slot the mean over the slots with its key, as for pages: `by floor(position / "
    "16)`. Key and x are one number per slot that does not depend on the query. A policy has one size of pages: if its "
    "score reads pages and it selects as well, it selects whole pages.",
    _policy(_BUDGET, "score mean(k over slots by attn)"),
)
SELECT_AXES = _code(
    "KV0314",
    "not one number per slot or dim",
    "`select` ranks slots, so it needs one number per slot; `sketch` ranks dims, so it needs one number per dim. Both may "
    "vary over queries, since each query ranks alone.",
    _policy("select top 64 by q"),
)
LOOKS_BACK = _code(
    "KV0315",
    "not known before a query attends",
    "A query selects and sketches before it attends, and alone. So it ranks by queries, keys, values and numbers, but not "
    "by `attn`, `logit` or reductions over queries; a sketch cannot read `random()` or `over page` either.",
    _policy("select top 64 by attn"),
)
SKETCH_READ = _code(
    "KV0316",
    "`over sketch` outside `select`",
    "The dims of a sketch are chosen for queries that select. Scores, keeps and the sketch itself read all dims.",
    _policy(_BUDGET, "score sum(dot(q, k over sketch))"),
)
VECTOR = _code(
    "KV0317",
    "a vector per token",
    "A reduction over queries is one number per cached token, which every query updates. So its body may vary over queries "
    "and slots, but not over dims: `mean(dot(q, k))` can be stored, `dot(mean(q), k)` would need a whole vector per token.",
    _policy(_BUDGET, "score dot(mean(q), k)"),
)

# -- KV04: policies as a whole ---------------------------------------------------------------------------------------

NO_SCORE = _code(
    "KV0401",
    "budget without a score",
    "A budget evicts tokens, and a score decides which.",
    _policy(_BUDGET),
)
NO_BUDGET = _code(
    "KV0402",
    "score without a budget",
    "Without a budget nothing is ever evicted, so a score and other statements about eviction have no meaning. In a policy "
    "that selects, `keep first` and `keep last` have one: their tokens are always selected.",
    _policy("score position"),
)
BUDGET = _code(
    "KV0403",
    "budget below 1, or with a fraction",
    "A policy keeps at least one token, and whole ones. A ratio of the prompt is written `0.25 * prompt`. Only the param "
    "`budget` itself may be a ratio above 0 and up to `1.0`, written with a point; `1` is one token.",
    _policy("param budget = 0", "score position"),
)
KEEPS = _code(
    "KV0404",
    "more kept than the budget holds",
    "The tokens of `keep first`, `keep last` and `keep top` must fit into the budget. First and last tokens are always "
    "selected as well, so they must fit into the selected tokens. Different scopes may protect the same tokens, but the "
    "first and the last tokens are distinct once there is anything to evict.",
    _policy(_BUDGET, "score position", "keep first 300", "keep last 300"),
)
KEEPS_IN_LAYER = _code(
    "KV0423",
    "more kept than the budget of a layer holds",
    "The budget differs from layer to layer, and in a model of 32 layers the protected tokens exceed the smallest one. "
    "Models with fewer layers may have room; otherwise a cache raises an error that states a sufficient budget.",
    _policy(_BUDGET, "budget budget / (1 + layer)", "score position", "keep last 32"),
    severity="warning",
)
OVERPROTECTED = _code(
    "KV0424",
    "more protected than the budget keeps",
    "If protection leaves too few tokens to evict, protected tokens are evicted: those of `keep top` and `keep where` "
    "before those of `keep first` and `keep last`, the lowest-scored first; in edition 1 all alike. `keep where position < "
    "prompt` protects a prompt of any length, which exceeds a budget that does not grow with it; so may several `keep` "
    "lines together. Under `cap hard`, room is made before a token arrives, so one token less is kept then. At the end of a "
    "prompt, a cache warns if this happens.",
    _policy(_BUDGET, "score sum(attn)", "keep where position < prompt"),
    severity="warning",
)
NEGATIVE = _code(
    "KV0405",
    "negative count",
    "A count of tokens is at least 0, whatever the values of its params.",
    _policy(_BUDGET, "score position", "keep first 0 - 4"),
)
OUT_OF_RANGE = _code(
    "KV0406",
    "value out of its range",
    "The param's default or setting is outside the range of its `in LO..HI`.",
    _policy("param budget = 512 in 1..256", "score position"),
)
EMPTY_RANGE = _code(
    "KV0407",
    "range without values",
    "In a range `LO..HI`, of a param or of layers, the first end is not above the second; both are included. The ends of a "
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
    "The budget depends on something that reads the budget.",
    _policy("param sinks = budget / 8", "budget sinks * 2", "score position"),
)

BOUNDS = _code(
    "KV0410",
    "number out of bounds",
    "Each number has bounds. A page, a block, a pool and a history have at least 1 token. A sketch has 1 to 256 dims (no "
    "supported model has larger heads) and an interval of at least 1 query. At least 1 token is selected. The floor of "
    "`across heads` or `across layers` and the decay of `ema` are between 0 and 1.",
    _policy("select top 64 by dot(q, k)", "pages 0"),
)
PHASE = _code(
    "KV0411",
    "statement about a phase in which nothing is evicted",
    "Under `when prefill` nothing is evicted while decoding, so `trigger`, `slack`, `max_drop` and `cap hard`, which "
    "control step-by-step eviction, have no meaning. Under `when decode` nothing is evicted while the prompt is read, so "
    "`prefill blocks` has none.",
    _policy(_BUDGET, "score sum(attn)", "when prefill", "slack 4", "max_drop 8"),
)
MEASURED = _code(
    "KV0440",
    "conflict with a data-dependent budget",
    "A budget that depends on cached tokens, or on `seen`, is evaluated at every settle, for each KV head alone. So nothing "
    "else can read `budget`, heads cannot share it, and room cannot be made before a token is placed.",
    _policy("budget 0.5 * seen at most 512", "score sum(attn)", "keep last budget / 4"),
)
ACROSS = _code(
    "KV0412",
    "heads or layers that cannot share a budget",
    "`budget ... across heads` distributes a layer's tokens among its heads once, after the prompt, and `across layers` "
    "those of all layers; this needs `when prefill`. Heads that agree on victims have nothing to distribute, and budgets "
    "from a tensor are per head. The weight in `across layers by ...` is one number for all KV heads of a layer; in it "
    "`over heads` reduces one number per head. `over heads` is also valid in `select`, where heads hold the same tokens, "
    "and in the score of heads that share a budget; `rank(x over heads)` only in the latter.",
    _policy("budget 512 across heads", "score sum(attn)"),
)
REUSED = _code(
    "KV0441",
    "layers that cannot reuse a selection",
    "With `select ... from layers (2, 13)` other layers attend to the same positions as these layers select. So they must "
    "hold the same tokens, which evicting layers do not. A weight belongs to the selecting layer, and is not passed to "
    "others.",
    _policy(_BUDGET, "score sum(attn)", "select top 64 by dot(q, k) from layers (2)"),
)
EACH = _code(
    "KV0442",
    "one number for query heads that select separately",
    "Under `group each` every query head selects for itself, and nothing is reduced over the query heads of a KV head. They "
    "still share its tokens, its budget and its sketch, and the heads of a layer vote as KV heads. So a score, a budget, a "
    "`keep`, a `sketch` and `over heads` can read keys, values and positions, but not `attn` or `q`. Without `select` there "
    "is nothing to choose. A condition on tokens that reads `q`, such as `select where dot(q, k) > 0`, needs `group each`.",
    _policy(_BUDGET, "score sum(attn)", "select top 64 by dot(q, k)", "group each"),
)
COMPACT = _code(
    "KV0413",
    "sketch or pages with compact positions",
    "A sketch and the minima and maxima of a page are computed from keys as stored: rotated by the tokens' positions in the "
    "text. With `positions compact` attention rotates them differently, so they would not predict attention.",
    _policy(_BUDGET, "score sum(attn)", "positions compact", "pages 16", "select top 64 by dot(q, k)"),
)
ROPE = _code(
    "KV0414",
    "rope without compact positions",
    "`rope` sets how keys are rotated to compact positions. Original positions need no rotation: keys are stored as they "
    "arrive, rotated by their positions in the text.",
    _policy(_BUDGET, "score sum(attn)", "rope fused"),
)
NEVER_READ = _code(
    "KV0415",
    "sketch or pages that nothing reads",
    "A sketch is read by `over sketch` in `select`. Pages are read by `over page`, and by `select`, which selects by page. "
    "Unread, they cost time and memory for nothing.",
    _policy("select top 64 by dot(q, k)", "sketch top 16 dims by abs(q) every 64 queries"),
)
NO_PAGES = _code(
    "KV0416",
    "`over page` without pages",
    "`over page` reduces over pages, and `pages N` sets the number of tokens in a page.",
    _policy("select top 64 by sum(q * max(k over page) over dims)"),
)
NO_SKETCH = _code(
    "KV0417",
    "`over sketch` without a sketch",
    "`over sketch` reads some of the dims, and `sketch top D dims by ... every U queries` chooses them.",
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
    "Heads with the same victims hold the same tokens, so no count of tokens may differ between them, for example through a "
    "tensor. Under `victims shared by layers` all layers hold the same tokens: no count may depend on `layer`, and the "
    "victims are known only after the last layer, too late for `prefill blocks`.",
    _policy("budget 64 + layer", "score sum(attn)", "victims shared by layers"),
)
BLOCKS = _code(
    "KV0420",
    "blocks without a size, or a size without blocks",
    "`storage blocks N` and `prefill blocks of N` set the number of tokens in a block; `storage in_place` and `prefill "
    "whole` have no blocks.",
    _policy(_BUDGET, "score sum(attn)", "prefill blocks"),
)
NO_EFFECT = _code(
    "KV0421",
    "statement without its apparent effect",
    "With `max_drop` d above 0, `slack` s and `trigger overflow >= R`, each prune of a long text drops max(min(d, R), R - "
    "s) tokens. If that is R, `slack` and `max_drop` have no effect; if it is more than d, `max_drop` is no bound; if it is "
    "1, every step prunes. Without `max_drop`, `slack` has no effect. A `select` of as many tokens as are ever cached skips "
    "none. Counts are rounded down: a `keep` of less than one token protects none.",
    _policy(_BUDGET, "score position", "trigger overflow >= 32", "slack 4", "max_drop 8"),
    severity="warning",
)
HISTORY = _code(
    "KV0422",
    "history larger than a key and value",
    "`over last N queries` stores N numbers of 4 bytes for each cached token. Above 128 queries that is more than the "
    "token's key and value in 16 bits, with heads of 128 dims: a cache twice as large would cost less.",
    _policy(_BUDGET, "score sum(attn over last 400 queries)"),
    severity="warning",
)

# -- KV06: tests -----------------------------------------------------------------------------------------------------


def _test(*steps: str) -> str:
    """Return a file with one test of these steps."""
    lines = "".join(f"  {step}\n" for step in steps)
    return f'kv 1\nimport h2o\n\ntest "an example" {{\n{lines}}}\n'


_PROMPT = "prompt { attend 1; attend 0.5, 0.5 }"

TESTS_APART = _code(
    "KV0601",
    "tests beside a policy",
    "Tests are in a file of their own, `h2o_test.kv` for `h2o.kv`, which imports the policy and holds nothing else. So a "
    "policy's file has only what it is compiled from.",
    _policy() + '\ntest "an example" {\n  use Example\n  attend 1\n  expect kept 0\n}\n',
)
TEST_POLICY = _code(
    "KV0602",
    "test without its policy",
    "A test begins with `use NAME`, which names the policy under test once.",
    _test("attend 1", "expect kept 0"),
)
TEST_SETTING = _code(
    "KV0603",
    "setting that the policy refuses",
    "`set NAME = NUMBER` in a test does what `--set` does for `kvdsl check`: the policy must have the param, and accept "
    'the value. A test can expect a refusal: `expect error "..."`.',
    _test("use H2O", "set buget = 4", "attend 1", "expect kept 0"),
)
TEST_ORDER = _code(
    "KV0604",
    "step at the wrong place",
    "A test first names the policy and its params, then lists tokens: a prompt, if there is one, and others one by one; a "
    "chat has several prompts. An expectation comes after the token to which it refers.",
    _test("use H2O", "expect kept 0, 1", _PROMPT),
)
TEST_SIZE = _code(
    "KV0605",
    "wrong count of numbers",
    "A row of attention has one number per live token, with the new one last. All keys and queries of a test have the same "
    "size, and so have all values. Separate the values of several KV heads by `/`; a single value applies to all of them.",
    _test("use H2O", "prompt { attend 1; attend 0.2, 0.3, 0.5 }", "expect kept 0, 1"),
)
TEST_STEP = _code(
    "KV0606",
    "step without a meaning",
    "The policy lacks what the step refers to: a test can expect `selected` of a policy with `select`, and a score of one "
    "with a budget. A policy that reads queries or logits needs `token` with its vectors, since `attend` gives only "
    "probabilities.",
    _test("use H2O", "attend 1", "expect selected 0"),
)
TEST_OF_NOTHING = _code(
    "KV0607",
    "test that expects nothing",
    "A test without `expect` can only fail if a row has the wrong number of values.",
    _test("use H2O", "attend 1"),
    severity="warning",
)
