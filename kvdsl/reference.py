"""The meaning of each word of the language in one line, for the reference and for editors.

Statements are here; `kvdsl.ir.ops` has inputs, functions and reductions, and the checker of statements the words of options.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from functools import lru_cache

from kvdsl.files import read_resource
from kvdsl.ir import ops
from kvdsl.syntax.nodes import AXES, WORDS

_SPAN = "whether a token lies in a part of the text that the caller marks: `cache.mark`"
_GIVEN = "a number per token and KV head from the caller, required unless it has a default"
_TENSOR = (
    "a tensor from a file; expressions read this layer's and KV head's slice. Without `dims` it may set a head's budget"
)

STATEMENTS = {
    "param": (
        "a number that the user can set; `budget` takes a whole number of tokens, or a ratio of the prompt",
        "",
    ),
    "let": ("a name for an expression, or a function", ""),
    "input": (_GIVEN, ""),
    "input_file": (_TENSOR, ""),
    "tensor": (_TENSOR, ""),
    "input_span": (_SPAN, ""),
    "given": (_GIVEN, ""),
    "budget": (
        "tokens kept per KV head; `param budget` implies it; may read `layer`, `prompt`, tensors and cached tokens; heads and layers may "
        "share it",
        "",
    ),
    "score": ("one number per slot; the lowest is evicted first", ""),
    **{f"keep_{row.name}": (row.doc, "") for row in ops.KEEPS.values()},
    "keep_nothing": ("`override keep` removes the inherited ones", ""),
    "victims": ("heads or layers that share their victims: scores are averaged over them", ""),
    "trigger": ("prune only once live - budget reaches this, floored but at least 1; 0 never", "1"),
    "slack": ("with `max_drop`, how many tokens above the budget a prune may leave", "0"),
    "max_drop": ("how many tokens a prune evicts, floored but at least 1; 0: all above the budget", "0"),
    "cap": ("`hard`: after a prompt never more than budget + slack, not even while attending", ""),
    "select": (
        "attend only to these tokens and to the first and last that `keep` names, but keep all; each counts `weight` times in the "
        "softmax; `from layers`: these layers select for those above",
        "all",
    ),
    "sketch": ("the dims that `over sketch` reads, updated after the given number of queries", ""),
    "pages": (
        "`over page` reduces over pages of this many tokens, `over next page` over the following one; selection is by page",
        "",
    ),
    "layers": ("where the policy evicts; counted from 0, both ends included", "all"),
    "when": ("the phase in which it evicts; `every N`: a prompt settles after every N tokens of it", ""),
    "group": ("how a group's query heads are reduced; `each`: not at all, each one selects its own tokens", ""),
    "positions": ("how keys are rotated: by the place in the text, or by the rank among the live slots", ""),
    "storage": ("edition 1: the memory layout, unless the cache's option `storage` sets it", ""),
    "rope": ("edition 1: how compact positions are computed, unless the option `rope` sets it", ""),
    "prefill": ("one settle after the prompt, or one after every block of it", ""),
}
"""Rule of the grammar -> meaning of the statement, and its default if that is not a word."""

ITEMS = {
    "edition": "the edition of the language that the file is written in; comes first",
    "import": "imports a shipped policy, or, in quotes, the policies and lets of a file",
    "policy": "a policy",
    "extended": "a policy that inherits the statements of another",
    "with": "the other policy with clauses, each replacing what it names there",
    "test": "a test, in a file of tests: `kvdsl test` runs it",
}
"""Rule of the grammar -> meaning of the item of a file."""

STEPS = {
    "use": "the policy under test",
    "set": "a value for one of the policy's params; `layer` and `layers` set its layer, by default layer 0 of 1",
    "prompt": "tokens that arrive together",
    "attend": "a token, by its attention to the live tokens and, last, to itself",
    "token": "a token, by its vectors: they determine its attention",
    "times": "the same token, repeated",
    "turn": "`turn`: a turn of the chat has ended",
    "expect": "the result of the last token or prompt, by name: `kept`, `score`, or a state column of `kvdsl explain`",
    "expect_error": "kvdsl refuses the policy with a message that contains this text",
}
"""Rule of the grammar -> meaning of the step of a test."""

PLACES = {
    "evicted": "the positions of the tokens that the last token, or the prompt, evicted",
    "kept": "the positions of the cached tokens",
    "protected": "the positions of the protected tokens, before any eviction",
    "selected": "the positions that the last token selected, for itself or for the layers above",
    "sketch": "the dims of the sketch",
}
"""What a test can expect as positions."""

VALUES = {
    "score": "the scores before the eviction, in the order of the text",
    "attn": "the attention of the last token, in the order of the text",
    "live": "the number of cached tokens",
}
"""What a test can expect as numbers, besides the policy's state."""

VECTORS = ("query", "key", "value")
"""The vectors that a token of a test may have."""

NO_NUMBERS = ("nan", "inf")
"""Names of numbers in tests; `nothing` means no positions."""


@lru_cache(maxsize=1)
def grammar_rules() -> Mapping[str, str]:
    """Return the one-line rules of the grammar, and named alternatives of others, without comments."""
    text = re.sub(r"[ ]+//.*", "", read_resource("grammar", "kv.lark"))
    named = {name: body for body, name in re.findall(r"[:|] (.*) -> (\w+)$", text, re.MULTILINE)}
    return dict(re.findall(r"^\??(\w+): (.*)$", text, re.MULTILINE)) | named


@lru_cache(maxsize=1)
def old_words() -> frozenset[str]:
    """Return the grammar's words for edition 1 only."""
    old, others = set[str](), set[str]()
    for line in read_resource("grammar", "kv.lark").splitlines():
        code, _, comment = line.partition("//")
        (old if comment.startswith(" kv 1") else others).update(re.findall(r'"([a-z_]+)"', code))
    return frozenset(old - others)


def first_word(rule: str) -> str:
    """Return the first word of a rule, or its name if it begins with something else."""
    found = re.match(r'"(\w+)"', grammar_rules()[rule])
    return rule if found is None else found[1]


def form(rule: str) -> str:
    """Print a rule's form, with the words of its options, `cap soft or hard`, and its optional parts, `[in range]`."""
    whole = re.sub(r" \[(\w+(?: \| \w+)*)\]| (\w+)\*", _part, re.sub(r"_open .*", "{ ... }", grammar_rules()[rule]))
    text = re.sub(r'"(\S+?)"', r"\1", whole)
    return _with_words(text, (WORDS[rule],) if rule in WORDS else AXES.get(rule, ()))


def _with_words(text: str, places: Iterable[tuple[str, ...]]) -> str:
    """Replace names in order by what can stand in their place."""
    words = iter(places)
    return re.sub("NAME", lambda name: " or ".join(next(words, (name[0],))), text)


_GONE = ("NAME", "at_most")
"""Optional parts that edition 2 removed: a param's unit, and the bound of a budget."""


@lru_cache(maxsize=1)
def old_rules() -> frozenset[str]:
    """Return the rules of the grammar that are only in edition 1."""
    return frozenset(re.findall(r"^(\w+): .*// kv 1", read_resource("grammar", "kv.lark"), re.MULTILINE))


def _part(optional: re.Match[str]) -> str:
    """Expand an optional rule that begins with a word; other names stay."""
    if optional[2]:
        return f" [{form(optional[2])}]"
    if optional[1] in _GONE:
        return ""
    bodies = [grammar_rules().get(one, "") for one in optional[1].split(" | ") if one not in old_rules()]
    return f" [{' | '.join(bodies)}]" if all(re.match(r'"\w', body) for body in bodies) else optional[0]


_PARAMETERS = (("x",), ("a", "b"), ("c", "a", "b"))


def parameters(name: str, *, extreme: bool = False) -> tuple[str, ...]:
    """Return the parameters of a built-in function.

    Args:
        extreme: for `max` and `min` of several values, which are also reductions of one.
    """
    if name in ops.REDUCTIONS and not extreme:
        return ("x", *ops.REDUCTIONS[name].argument)
    if name in ops.FORMS:
        return tuple(re.findall(r"\w+", ops.FORMS[name].written)[1:])
    return _PARAMETERS[ops.ELEMENTWISE[name] - 1]


def written(name: str, *, extreme: bool = False) -> str:
    """Print a call of a built-in function: `ema(x, d)`."""
    return f"{name}({', '.join(parameters(name, extreme=extreme))})"


def meaning(name: str) -> str | None:
    """Return the one-line meaning of an input or built-in function; None for other names."""
    for table in (ops.FORMS, ops.INPUTS, ops.REDUCTIONS, ops.FUNCTIONS):
        if name in table:
            return table[name].doc
    return None
