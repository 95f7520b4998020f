"""Words from papers and other languages, and what to write here. `kvdsl.syntax.forms` has patterns of several words."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from kvdsl.helps import add, offer
from kvdsl.helps import operand as operand_of
from kvdsl.syntax.nodes import Call


def _all(help: str, words: str) -> Iterable[tuple[str, str]]:
    return ((word, help) for word in words.split())


OVERRIDE = "leave out `override`: a clause after `with` replaces what it names"


def _same(help: str, words: str, more: str = "") -> Iterable[tuple[str, str]]:
    made = offer(help, more) if help.startswith("write ") else help
    return ((word, made) for word in words.split())


CHOICE = "a choice is `where(condition, a, b)`"

NAMES: dict[str, str] = dict([
    *_same("write `attn`", "attention attentions attn_weights attn_weight attention_weights weight weights prob probs A",
           ": the probability that the query gives the slot"),
    *_same("write `logit`", "logits scores qk", ": the score before the softmax"),
    *_same("write `q`", "query queries Q query_states"),
    *_same("write `k`", "key keys K key_states"),
    *_same("write `v`", "value values V value_states"),
    *_same("write `position`", "pos idx index i token_index", ": the token's place in the text"),
    *_same("write `age`", "recency distance time", ": how many tokens came after it"),
    *_same("write `live` or `prompt`", "n N len length seq_len seqlen size num_tokens",
           ": the number of cached tokens, or the length of the prompt"),
    *_same("write `layers`", "num_layers n_layers"),
    *_same("write `layer`", "layer_idx layer_id"),
    *_same("`prev` is the previous value of a fold, inside its first argument: `fold(max(0.9 * prev, attn), 0)`", "prev previous"),
    *_same("write `1`", "true True yes on", ": conditions count as 0 or 1"),
    *_same("write `0`", "false False no off", ": conditions count as 0 or 1"),
    *_same("write `everything`", "inf infinity Infinity all unlimited none None never",
           ", a budget that keeps all tokens; scores have no infinity, but `keep where` protects tokens with any score"),
    *_same("each KV head scores its own slots, with `attn` reduced over its query heads, for example by `group max`",
           "head head_idx head_id kv_head num_heads n_heads"),
    *_same("write `random()`", "rand noise"),
    *_same("the previous value is `prev`, inside `fold(0.9 * prev + 0.1 * attn, 0)`; this mean is `ema(attn, 0.9)`", "score"),
])  # fmt: skip
"""Names in expressions."""

IDS = frozenset(
    [
        "is_special",
        "special",
        "newline",
        "separator",
        "text",
        "word",
        "role",
    ]
)
"""Names of token properties that a policy cannot read, but a caller can pass."""

TURNS = frozenset(["current_turn", "turn_start", "last_turn"])


def of_name(name: str) -> str | None:
    """Return the help for an unknown or misused name in an expression."""
    if name in ("token_id", "token_ids", "input_ids", "id"):
        return offer("write `token`", ", which is the token's id")
    if name in IDS:
        return add(f"a policy cannot read text: add `given {name} = 0`", ", a number per token that the caller passes")
    if name in TURNS:
        return "`turn` is the token's turn, and `turns` the number of ended turns: `keep where turn == turns`, say"
    return NAMES.get(name)


@dataclass(frozen=True)
class Habit:
    """A function of other languages.

    Attributes:
        parameters: names in `help` that stand for the call's arguments, in order.
        help: text whose codes in backticks do the same.
        more: text that follows it.
    """

    parameters: tuple[str, ...]
    help: str
    more: str = ""

    def filled(self, call: Call) -> str:
        """Return the help for a call, in general terms for another number of positional arguments. Keywords usually name an axis."""
        arguments = [one.span.quoted() for one in call.arguments if one.keyword is None]
        if len(arguments) != len(self.parameters):
            return self.help + self.more
        by_name = dict(zip(self.parameters, arguments, strict=True))
        return offer(re.sub(r"`[^`]*`", lambda code: fill(code[0], by_name), self.help), self.more, at=call.span)


def fill(code: str, arguments: Mapping[str, str]) -> str:
    """Replace names in a code by texts, with parentheses where they are needed."""
    names = re.compile(rf"\b({'|'.join(map(re.escape, arguments))})\b")

    def operand(name: re.Match[str]) -> str:
        text, around = arguments[name[0]], name.string[name.start() - 1] + name.string[name.end()]
        before = name.string[: name.start()].rstrip()[-1:]
        alone = before in "(,`" and around[1] in "),`"
        return text if alone else operand_of(text)

    return names.sub(operand, code) if arguments else code


def _call(help: str, words: str, parameters: str = "x", more: str = "") -> Iterable[tuple[str, Habit]]:
    return ((word, Habit(tuple(parameters.split()), help, more)) for word in words.split())


FUNCTIONS = dict([
    *_call("write `mean(x)`", "avg average"),
    *_call("write `min(max(x, low), high)`", "clip clamp", "x low high"),
    *_call("write `(x - mean(x over slots)) / std(x over slots)`", "zscore z_score standardize standardise"),
    *_call("write `x / sum(x over slots)`", "normalize normalise"),
    *_call("write `norm2(x)`, `norm1(x)` or `norminf(x)`", "norm l1 l2 linf norm_2 l2norm l2_norm magnitude"),
    *_call("write `x ** n`", "pow power", "x n"),
    *_call("write `x ** 2`", "square"),
    *_call("write `max(x, 0)`", "relu"),
    *_call("write `1 / (1 + exp(-x))`", "sigmoid"),
    *_call("write `floor(x + 0.5)`", "round"),
    *_call("write `floor(x)`", "int"),
    *_call("write `log(x)`", "ln log2 log10"),
    *_call("write `random()`", "rand randn uniform", "", ", a number in [0, 1) per slot"),
    *_call("write `sum(x)`", "accumulate cumsum total cumulative running_sum", more=": it is updated by every query"),
    *_call("write `fold(x, start)`", "scan recurrence accumulate_by state", "x start", ", in which `prev` is the previous value"),
    *_call("write `ema(x, decay)`", "ewma moving_average", "x decay"),
    *_call("write `sum(where(x > 0, -x * log(x), 0))`", "entropy"),
    *_call("write `cosine(x, y)`", "cosine_similarity cos cos_sim similarity", "x y"),
    *_call("write `rank(x) >= p / 100 * live`", "percentile", "x p", ": the tokens above it"),
    *_call("write `max_pool(x, n)` or `mean_pool(x, n)`", "maxpool avgpool avg_pool pool smooth", "x n"),
    *_call("", "topk top_k", more="the statement `keep top n by x` protects them, and `select top n by x` attends to them"),
    *_call("write `rank(x)`", "argsort rankdata order", more=", the place in the order of x"),
    *_call("write `max(x)`", "argmax amax"),
    *_call("write `min(x)`", "argmin amin"),
    *_call("write `live` or `prompt`", "len length", "x", ": the number of cached tokens, or the length of the prompt"),
    *_call("write `sum(x)`", "count_if countif", more=": a condition counts as 0 or 1"),
    *_call("write `where(c, a, b)`", "if ifelse select choose cond", "c a b"),
    *_call("write `dot(x, y)`", "matmul bmm mm inner einsum", "x y"),
    *_call("write `x`", "float abs_ detach clone item contiguous to half"),
])  # fmt: skip
"""Functions, by their parameters."""

STATEMENTS: dict[str, str] = dict([
    *_all("`score` ranks the tokens: the lowest is evicted first", "evict drop remove discard delete rank sort prune"),
    *_all("`keep first`, `keep last`, `keep top` or `keep where` protects tokens", "retain protect pin preserve"),
    *_all("write `keep last 16`, say", "recent window local last"),
    *_all("write `keep first 4`, say", "sink sinks first initial"),
    *_all("write `keep top 8 by mean(attn)`, say", "top heavy heavy_hitters"),
    *_all("`keep where` protects the tokens for which a condition holds", "where filter mask"),
    *_all("tokens are kept or evicted, not merged, quantized or moved",
           "merge compress quantize quantise offload store move swap"),
    *_all("write `param budget = 512`, say", "size capacity cache cache_size limit max_size max_tokens num_tokens"),
    *_all("only a number can depend on a condition, not a statement: `where(condition, a, b)`", "if else elif switch match"),
    *_all("there are no loops: an expression is evaluated for every slot, head and layer", "for while loop foreach each"),
    *_all("`let NAME = ...` defines a name", "var const def fn function lambda"),
    *_all("`when prefill` or `when decode` sets the phase", "on during phase at after before"),
    *_all("write `group max`, say", "gqa heads head_reduction"),
    *_all("a comment begins with `#`", "rem comment note"),
])  # fmt: skip
"""First words of a line in a policy. After "write" the help has the whole line."""

KEEPS = dict([
    *((word, "last") for word in ["recent", "latest", "newest", "window", "local"]),
    *((word, "first") for word in ["sink", "sinks", "oldest", "initial", "start", "beginning", "prefix"]),
    *((word, "top") for word in ["highest", "largest", "best", "heavy", "most"]),
])  # fmt: skip
"""Words after `keep`, and their equivalents."""

SETTINGS = {
    "when": dict([
        *((word, "decode") for word in ["generation", "generating", "decoding", "decoded", "generate", "answer"]),
        *((word, "prefill") for word in ["prefilling", "prompt", "prompting", "context", "encoding", "encode"]),
        *((word, "both") for word in ["always", "all", "ever"]),
    ]),
    "group": dict([
        *((word, "mean") for word in ["average", "avg"]),
        *((word, "max") for word in ["maximum", "amax"]),
        *((word, "each") for word in ["none", "separate", "independent", "no"]),
    ]),
    "positions": dict([
        *((word, "compact") for word in ["contiguous", "rerotated", "relative", "cache", "packed", "shifted", "new"]),
        *((word, "original") for word in ["absolute", "text", "kept", "old"]),
    ]),
    "prefill": {word: "blocks" for word in ["chunks", "chunked", "block", "chunk"]},
    "storage": {word: "blocks" for word in ["paged", "pages", "block"]},
    "victims": dict([
        *((word, "heads") for word in ["head", "kv_heads", "all", "group"]),
        *((word, "layers") for word in ["layer"]),
        *((word, "nobody") for word in ["none", "no"]),
    ]),
}  # fmt: skip
"""Words of settings, and their equivalents."""

AXES = dict([
    *((word, "slots") for word in ["tokens", "keys", "cache", "positions", "sequence", "seq"]),
    *((word, "queries") for word in ["time", "steps", "rows"]),
    *((word, "dims") for word in ["channels", "features", "hidden", "head_dim"]),
    *((word, "heads") for word in ["group", "kv_heads"]),
])  # fmt: skip
"""Other names of axes, and their equivalents."""

APART = ("batch", "rows", "layers", "layer", "samples", "sequences")
"""What no reduction ranges over: rows and layers are separate."""
