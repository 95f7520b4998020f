#!/usr/bin/env python
"""Writes the pages of docs/ that are made from the sources: the diagnostics, the language's reference, a page per policy, the results.

The pages of the policies are for the site only, and are not committed.

What is hand-written of a policy, such as what its authors' code does, lies in `docs/notes/STEM.md` and is put into its page; what is
of a paper's results, such as why something does not hold, in `docs/notes/results/PAPER.md`.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

import click

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "lab")]  # a checkout needs no installation for this

from kvdsl.cli.list import paragraphs  # noqa: E402
from kvdsl.codes import CODES, Code  # noqa: E402
from kvdsl.compiler import analyse  # noqa: E402
from kvdsl.explain.facts import facts  # noqa: E402
from kvdsl.explain.words import rows  # noqa: E402
from kvdsl.ir import ops  # noqa: E402
from kvdsl.provenance import CHECKS, Provenance, fields, provenance  # noqa: E402
from kvdsl.reference import STATEMENTS, form, written  # noqa: E402
from kvdsl.resources import read_resource  # noqa: E402
from kvdsl.sema.statements import WORDS  # noqa: E402
from kvdsl.shipped import all_policies, gallery_policies, shipped_policies  # noqa: E402
from scripts.prose import wrapped  # noqa: E402

DOCS = ROOT / "docs"
MADE = "<!-- Made by scripts/make_docs.py; do not edit. -->\n\n"

# -- diagnostics -------------------------------------------------------------------------------------------------------

CHAPTERS = {
    "KV01": "Reading and syntax",
    "KV02": "Names, imports, inheritance",
    "KV03": "Expressions and their axes",
    "KV04": "Policies as a whole",
    "KV06": "Tests",
}


def diagnostics_page() -> str:
    """Every code with its explanation and an example that fails with it."""
    parts = [
        MADE + "# Diagnostics\n",
        "Every message of `kvdsl check` has a code, which keeps its meaning for ever. `kvdsl explain CODE` shows the same as this page.",
        "Each example is a whole file that fails with its code.\n",
    ]
    chapter = ""
    for code in sorted(CODES.values(), key=lambda one: one.id):
        if code.id[:4] != chapter:
            chapter = code.id[:4]
            parts.append(f"## {CHAPTERS[chapter]}\n")
        parts.append(_diagnostic(code))
    return wrapped("\n".join(parts))


def _diagnostic(code: Code) -> str:
    kind = "" if code.severity == "error" else f" ({code.severity})"
    text = f"### {code.id}: {code.title}{kind} {{ #{code.id.lower()} }}\n\n{code.explanation}\n"
    if not code.example or len(code.example) > 2_000:
        return text
    options = "".join(f" --set {name}={value}" for name, value in code.settings)
    with_options = f"\nWith `kvdsl check{options}`:\n" if options else ""
    return f"{text}{with_options}\n```text\n{_visible(code.example)}```\n"


def _visible(example: str) -> str:
    """What cannot be printed is shown as an escape."""
    return "".join(char if char.isprintable() or char == "\n" else f"\\x{ord(char):02x}" for char in example)


# -- the language ------------------------------------------------------------------------------------------------------

OPERATORS = {
    "`+` `-` `*` `/` `%` `**`": "arithmetic; `/` is real division, `**` binds to the right",
    "`<` `<=` `>` `>=` `==` `!=` `and` `or` `not`": "conditions; in arithmetic they count as 0 or 1",
}

TENSORS = """`tensor filter [layers, heads, dims] from "filter.safetensors"` names numbers that were found beforehand, of a model's
layers, of the KV heads of a layer and of the dims of a key, or of some of these; the axes stand in the order in which the file has
them. An expression reads what belongs to its layer and KV head: a vector over dims, as `k` is one of a slot (`score -dot(filter, k)`),
or without `dims` a number (`score sum(attn) * weight`). With `dims` and `rank` it is a matrix, `tensor basis [layers, heads, dims, rank]`,
which `project(x, basis)` multiplies a vector by, a key, a query or what is made of these dim by dim. The file says how large `rank` is.
Projected vectors have other dims than keys have, so they are multiplied with each other only: `dot(project(q, basis), project(k, basis))`.
With `heads`, `group` and `dims` each query head has a vector of its own, `tensor centre [layers, heads, group, dims]`, or a matrix. What
reads one is found per query head and then reduced by `group`: in a score to its end (before a pool), as under `over text`; in a selection
and in what is reduced over queries as what reads `q`. Elsewhere a KV head has one number, and cannot read it. C++ and Triton refuse it,
but in a score under `when prefill`.

A number may also say how much each KV head keeps: `budget where(streaming > 0.5, 384, everything)` (DuoAttention). Every head then has
a budget of its own, in prompts and while decoding. `budget` means the head's own wherever it is read, so that `keep last budget / 4`
differs as well, and so do `trigger`, `slack`, `max_drop`, and the counts of `keep` and `select` where they read such a tensor, that
budget, or a param that does. What the heads of a layer have in common may not: pages, sketches, blocks, and the N of `over last N
queries`. Nor may budgets that are shared `across heads`, and those of heads that agree on their victims. Each head's keys and values
take what its own budget needs; positions and state columns, 4 bytes each, are as many as the head with the largest budget has, and so
are keys and values where the policy has compact positions or selects, or its slots lie in blocks.

The file is a safetensors file, which holds numbers and nothing that could run. It has the tensor under the name that the policy
gives it, in float64, float32, float16 or bfloat16; what is read is rounded to float32, and has to be finite. Its path is relative to the
folder of the .kv file in which the line stands, also where another policy imports or extends that, and never leads out of it: there is
no absolute path, no `..`, and no link to elsewhere. So a policy that is given as a text cannot read files. A policy that extends
another may bring a file of its own: `override tensor filter [layers, heads, dims] from "mine.safetensors"`.

`check`, `explain` and `fmt` do not need the file. `compile` and `load` copy the tensors into the package, with their digest: what changes
in the file afterwards changes nothing until the policy is compiled again, and a package whose copy is missing or was changed is
refused. Whether layers, KV heads and dims are those of the model is asked when a cache is made, and again when the first keys come.
Under tensor parallelism every process reads the rows of its own heads. Tests in the language read the file, too, which then has the
layers, KV heads and dims of the test.
"""

GIVEN = """`given importance` names a number of each token and KV head that the caller gives, one of a learned model, say; `given
importance = 0` has a default for forwards in which nothing is given. Expressions read it as they read `position`: `score importance
* mean(attn)`, `keep where importance > 0.9`, `select top 512 by dot(q, k) * importance`. A budget reads it by a reduction over
slots. A policy that extends another may give it a default: `override given importance = 0`.

The caller gives it by a function, `LearnedCache(model, importance=f)`: `f(module, hidden_states)` is asked in each layer that the policy
manages, at each forward, with the attention module and what that is given, [batch, tokens, hidden size], in most models behind the
layer's first norm, and returns a float tensor [batch, KV heads or 1, tokens]; `module.layer_idx` is the layer's number. Or it is given
beforehand, `cache.give(layer, importance=x)`, for that layer's next forward, and then goes before what a function says. Without either
and without a default the forward is refused, before anything is cached.

A value belongs to its token: it is rounded to float32 and kept, 4 bytes a slot, from the moment the token is placed, in a prompt, its
blocks or alone, until it leaves; beams take it along, `crop` takes it back, and `cache.state(layer)["given_importance"]` shows it. What
is given for padding is not looked at. Infinities are allowed, and a NaN ranks lowest, as everywhere. A query head has none of its own:
one value serves a KV head's group. Under tensor parallelism a process may give its own KV heads' values or those of all. A pickled cache
has no functions: `cache.attach(model, importance=f)`. In a compiled step functions are part of the graph, and what is given beforehand is
not. A test brings it with the token: `attend 0.5, 0.5 given importance 0.9`. Commands that run a model by themselves refuse a policy
whose values have no default.
"""

RANKS = """`rank(x)` is a slot's place in the order of `x`: how many of the others have less. The lowest has 0, a NaN is below every
number, −0 equals +0, and of equals the older has the lower rank, so no two ranks are the same: `rank(sum(attn)) >= live - 64` holds for 64
slots. It orders the live slots of its KV head, those that are protected among them; inside a reduction over queries, and in a `select`,
those that the query sees. `rank(x over page)` orders the slots of the slot's page (`pages 64`), as many as are still there; what it orders
by does not vary over queries. What reads `q` is ranked for each query head. Padding is no slot. In a prompt that is settled in blocks,
ranks are those among what is there at the block's end. Nothing is remembered for it, so chats, beams, and steps that are taken back need
nothing of it. A rank tells neighbours apart whose `x` differ in the last bit, so where `x` comes from attention two backends may rank such
a pair the other way round. So one press after another is written: `score where(rank(a) >= live - first, b, -1)`.
"""

FOLDS = """`fold(x, start)` is a recurrence of one's own: `x` says what a query makes of what was there before, which it reads as
`prev`. `fold(max(0.9 * prev, attn), 0)` is a maximum that fades, and `fold(where(attn >= alpha, position + age, prev), position)` the
place of the last query that needed the token. It goes on with every query that sees the slot, in the order of the text, its own
token's first; a query that selects makes 0 of the `attn` of what it skips. `x` is one number per query and slot, found as the body of
any reduction over queries: of what reads `q` the group's is made by `group`, and `prev` is the KV head's. Another fold may stand in
`x`, and is read as it was before the query; what all queries gave may not. `start` is known when the token comes: a number,
`position`, what its key and value say. A fold that comes to NaN begins anew, and reads as its start.

`fold(x over prunes, start)` goes on where tokens leave. It is found in a settle, from the slots before anyone leaves, and may read all
that a score reads, but no pool and no other fold over prunes; if the KV head loses tokens in that settle, it is remembered, and is
`prev` from there on. In a prompt in blocks that is after every block, in a chat after every turn's prompt, under `trigger` where it
prunes. Heads that agree on their victims lose tokens together; of heads and layers that share a budget those go on that lose any.

A fold takes 4 bytes a slot. Beams, padding, blocks, steps that are taken back and compiled steps treat it as they treat a `sum`. Torch
serves folds, query by query also in a prompt; C++ and Triton refuse them, and `explain` says so.
"""

TEXT = """`mean(x over text)` ranges over all queries of the prompt that has come, whether they saw the slot or not: a chat's are those of
the turn, a prompt's in several forwards those of each that settles. `over text after 4` leaves out the queries at the first 4
places. In `x` stand `q`, the query's own place `query_position`, keys, values and numbers, but not `attn`, which no query gives
what comes after it; `dot(q, k) * scaling` is what it would be before the softmax. What is left varies over what `x` does, slots
and dims, without the queries: `dot(mean(q over text), k)`. A score reads it, under `when prefill` and not in blocks; it is
found once all queries are there, for each query head, and `group` reduces the score at the end (before a pool). Padding asks
nothing, and a row to which no tokens come keeps all it has. What is found needs the prompt's queries until it settles, and
nothing after that.

Keys and queries are rotated at their places in the text. `turn(x, n)` rotates one on by n places, so that `turn(k, -position)` is the key
as it was before, and `turn(q, -query_position)` the query. `ahead(k, n)` is the key as the next n queries find it, on average: its
product with an unrotated query is the mean of what that query would give it from the n places behind the newest token; `ahead(k, n, 2)`
takes the places 1, 2, 4, ... behind it, n of them. `pairs(k)` has at every dim the length of the pair of dims that rotates together. Dims
that the model does not rotate stay, and in a model without rotary positions all do. Angles are found in float64. A model whose rotation
is not a turn of pairs by its place is refused, as under compact positions.

`leverage(x, ridge)` is how little of a slot's vector the others span: x times the inverse of (the sum of x xᵀ over the slots + ridge
times the identity) times x, in float64, NaN where there is no inverse. Torch serves all of these, also where C++ or Triton serves what is
decoded, if they stand in a score under `when prefill`; elsewhere those refuse them, and `explain` says so.
"""

COUNTS = """A budget may read what is cached: `budget sum(importance >= tau or age < 128 over slots)` keeps what reaches a
threshold, and the last 128 tokens. It is a single number, made of `live`, `seen` (the row's tokens so far), params and the like,
of reductions over slots, and of `enough(x, p)`: the fewest tokens, the highest `x` first, whose `x` come to the share `p` of the
sum over all; `enough(x, p, y)` takes them in the order of `y`, the highest first. What is reduced over slots may be reduced over
queries before: `budget enough(sum(attn), 0.95)`. Such a budget is found at every settle, from the slots before anyone leaves, for
each KV head by itself, with the group's query heads reduced as everywhere; so in a prompt in blocks after each block, in a chat
after every turn's prompt, and after every decoded token. It is floored, and 1 at least, which is what a NaN counts as. `trigger`,
`slack` and `max_drop` go by what it is then, and outside of `layers` everything stays. Where it comes to less than `keep`
protects, protected tokens leave too, the lowest-scored first. What it counts is what its row and KV head hold: padding is not
counted.

`seen == prompt` holds at a prompt's end, so that either phase may have a budget of its own (SCOPE): `budget where(seen == prompt,
512, 1024)`; and `(seen - prompt) % 512 == 0` every 512 tokens, between which `everything` stays.

`at most` is the bound: `budget 0.5 * seen at most 4096`. It reads what any other budget may, and memory is bounded by it. Without
it a cache grows with what stays: once it is full, it has room for a quarter more than it holds, and it never shrinks. (Of a
budget that does not read the data, `at most` is a `min`.) Nothing else may read `budget` then, because it is not known before:
`keep last budget / 4` is an error, and so are `across heads`, `cap hard` and `victims shared by layers`. Under `victims shared by
heads` what is found of the slots, each reduction and each `enough`, is averaged over the KV heads of the layer before the budget
is made of it, as scores are.

How many tokens `select` takes may read the data likewise, for each query: `select top enough(p, 0.95) by p`. What reads `q` is
found per query head and then reduced by `group`, and floored after that. What `keep first` and `keep last` protect is always
selected, and counts; `keep last 0` removes the default. With pages the count is divided by the tokens of a page. Under beams,
padding and tensor parallelism every row and head counts for itself. Tokens are taken back (`crop`) by what was noted of their
steps, or not at all.

Counts are float64: of reductions and `enough` the values are float32, their sums float64 in any order. Equal values are taken
from the newest on, a NaN comes last, and a sum with a NaN in it is never enough. A threshold that lies within float32's rounding
of what is compared with it may be decided either way, as between two scores. torch serves these policies; C++ and Triton refuse
them, and `explain` says so, but for a budget under `when prefill`, which only prompts need. `enough` and `seen` are for these
counts alone.
"""

SHARED = """Under `when prefill` a budget may belong to several KV heads, which lose tokens to each other once a prompt is there.
`budget budget across heads` is one for the heads of a layer: the layer's lowest scores leave, of whatever head, and of each head at
least `floor` of its own budget stays (Ada-KV).

There a score may read what the other heads have: `rank(x over heads)` is a slot's place among the slots of all KV heads of the layer (of
equals the older is lower, then the lower head's), and `sum(x over heads)` and the like reduce one number of each head, `sum(1 over heads)`
how many there are. So a head knows its share before it says who leaves, `sum(sum(live over heads) - rank(x over heads) <= budget * sum(1
over heads) over slots)`, and goes by another order within it (CriticalAdaKV). Heads may hold different tokens, so that slots are ranked
and not reduced position by position; each row of a batch ranks its own. It is found where prompts settle, in torch operations for every
backend.

`budget budget across layers` is one for all layers and heads that evict: their budgets are added up, the lowest scores of all leave,
and of each head at least `floor` of its own budget stays. Of equal scores the older token's leave first, then the lower layer's and
head's.

`budget budget across layers by entropy * spread` gives each layer a share (CAKE). What stands after `by` is one number for all KV heads
of a layer, found when the prompt is there and before anything leaves. `over heads` reduces what each of them has: `sum(sum(var(attn)
over slots) over heads)`. It may read `layer` and params, but no `budget` other than the stated one. The layers' budgets are added up,
over those that evict; each has what `keep first` and `keep last` protect, or `floor` of its own budget where that is more; the rest is
shared in proportion. A layer that would get more than it holds keeps all, and the others share what that leaves. Shares are floored, so
that together they never exceed the budgets. A weight that is negative, infinite or NaN counts as 0, and if all do, shares are equal.
Every KV head of a layer keeps the layer's share; with `budget budget across heads floor 0.2 across layers by ...` the heads lose tokens
to each other within it (LAVa). With `victims shared by heads` they keep the same ones.

Layers share once all of them have attended, so the peak is the whole prompt in all layers, as `explain` says. What is generated stays:
a layer grows from its share on. In a chat each prompt shares anew, by the whole text's budgets, what the layers hold by then. Each row
of a batch shares by itself; padding is not counted, a row to which no tokens come keeps all, and beams take their rows along. What a
prompt made leave is gone: `crop` takes back generated tokens only, as without sharing. `budget`, wherever else it is read, is the
stated budget. A query head has no share: the KV head's `attn` is its group's. Prompts settle in torch operations outside of compiled
steps, whatever the backend, and decoded tokens as if nothing were shared, so that C++, Triton and graphs serve them. Backends agree on
weights to float32's rounding, so that a share may differ by a token where it lies next to a whole number. A prompt in forwards of
several tokens shares at the end of each; `prefill blocks` is refused, because a block leaves before the next layer has seen it. Refused
are tensor parallelism, whose processes see their own heads only, presses and vLLM's pages, which ask one layer at a time, and budgets
that differ between the heads of a layer. A test in the language is a layer by itself, `at layer 0 of 1`, which shares with nobody.

`over heads` also stands in what `select` ranks by: `select top 2048 by sum(p over heads)`. There it reduces position by position what
the KV heads of a layer find of each token, each for its own query, with the group's query heads reduced before (`group`); so heads
vote, by `sum`, `mean` or `max`, of scores or of ranks, and where nothing else differs between them they choose the same tokens
(TokenSelect). Nothing is averaged behind anybody's back: a part outside of `over heads` stays each head's own. The heads have to hold
the same tokens: a policy that evicts needs `victims shared by heads`, or by layers. Pages, ties and what `keep` forces are as in any
selection; padding, beams, chats and taken-back steps need nothing of their own, since nothing is remembered. torch serves it, in
compiled steps as well; C++ and Triton, whose kernels see one KV head, refuse it, and so does tensor parallelism. In a score `over
heads` is refused: `victims shared by heads` averages scores, and only heads that share a budget compare theirs.
`query_head` is the number of the query head for which something is found,
under tensor parallelism the whole model's; so heads may take turns, under `group max`: `max(rank(dot(q, k)) * 128 - query_head over
heads)` (LessIsMore). C++ and Triton refuse it.

Layers may choose for those above: `select top 256 by dot(q, k) in layers 2, 13 reused above` (TidalDecode, OmniKV). Each of the listed
layers finds, for every decoded token, what `select` says, and attends to everything itself, since it has looked at all keys. Every other
layer attends to exactly what the nearest listed layer below it has chosen for that token, position by position and KV head by KV head,
and computes nothing for it; `over heads` makes the choice of all heads the same. Layers below all listed ones attend to everything. A
layer's number may be made of params and `layers`; it is floored, may come in any order, and one that the model does not have is no layer.
What `keep first` and `keep last` protect belongs to the choice, and counts; `keep last 0` removes the default. Nothing else of the layer
changes: every layer keeps every token, so that a policy with a budget is refused, whose layers would hold different ones. Padding, ragged
batches, windows, pages, sketches, ties and prompts, which attend to everything, are as in any selection; of several tokens in one
forward, guesses among them, each has a choice of its own, and since none outlives its forward, chats, beams, `crop` and saved caches know
nothing of it. Layers have to have equally many KV heads, and a listed layer has to be one that the policy serves: where a model leaves it
to transformers, because of a sliding window, the cache is refused. Under tensor parallelism a process hands over what its own heads
choose. A cache whose policy evicts nothing grows, and is served outside of compiled graphs. C++ and torch serve it, Triton refuses it: its
launches hand no choice on. A test in the language is one layer: `expect selected` at a listed layer is what that chooses, and a layer
that takes over is refused.
"""

EQUAL = """What a token has by itself, a reduction over dims of its key or value such as `norm1(v)` or `dot(filter, k)`, or a `given`
value, is found once, when it is placed, and is the same on every backend to the bit: inputs are doubles, so that the product of two is
exact; every operation is rounded by itself; a sum is folded in half (zeros make the dims a power of two, then the second half is added to
the first, dim by dim, until one number is left), and so are the sums of `mean`, `var` and `std`; the result is rounded once, to float32.
What a score makes of such numbers, of `position`, `age`, `random()`, counts and params by arithmetic, comparisons, `sqrt`, `abs`,
`floor`, `ceil`, `min` and `max` is the same as well, float32 operation by operation: `knorm` keeps the same tokens everywhere, ties
included, if it is given the same keys.

What comes from attention (`attn`, `logit`, `dot(q, k)`) and what is reduced over slots or queries is summed in whatever order is fast:
it is equal to float32's rounding, and where two scores lie within that, either token may stay. `exp`, `log` and `**` (but for squares)
are functions of a library, equal to a few units in the last place. A model's later keys depend on attention themselves: from the second
layer on, two backends are not given quite the same keys. torch on a GPU, and torch operations that `torch.compile` has fused, may
round an operation differently. Triton's kernels were compared in Triton's interpreter; no GPU has run them yet.
"""


def grammar_sections() -> dict[str, str]:
    """The grammar's text by the titles of its sections."""
    _, *parts = re.split(r"^// -- (.*?) -+\n", read_resource("grammar", "kv.lark"), flags=re.MULTILINE)
    return dict(zip(parts[::2], (text.strip("\n") for text in parts[1::2]), strict=True))


def language_reference() -> str:
    """Statements, inputs, functions, the prelude, and the grammar itself."""
    parts = [
        MADE + "# The language, edition 1\n",
        "One KV head of one layer sees a matrix of queries × slots; a slot holds one cached token. Every expression varies over some of "
        "the axes query, slot and dim, and every statement says which it needs. `#` begins a comment; a line ends a statement, except "
        "inside parentheses, and so does `;`. Words are reserved only where the grammar has them.\n",
        "## Statements\n",
        _table(("statement", "meaning", "default"), (_statement(rule) for rule in STATEMENTS)),
        "A policy that `extends` another takes over its statements; `keep` lines accumulate; `override` stands before a statement that "
        'changes one. `import roco` makes a shipped policy known (`kvdsl list` shows them), and `import "mine.kv"` the policies and lets '
        "of a file, by its path from the importing one: no file of yours can be taken for a shipped policy, or the other way round.\n",
        "## Prompts and rates\n",
        "Tokens that come in together are a prompt, and so is the first token, should it come alone; a single token after it is decoded. A "
        "chat has a prompt each turn. A policy settles after every prompt (or after its blocks), and after every decoded token; `when "
        "prefill` evicts after each prompt, and `when decode` after decoded tokens only.\n",
        "At every prompt the policy's numbers are found anew. `prompt` is all of the row's text by then: earlier prompts, what was decoded "
        "after them, and the new tokens. So a chat on one cache has the budget of a cache that is given the whole text at once. Each row "
        "of a batch counts its own tokens, and a row to which none come keeps its numbers. Nothing changes while tokens are decoded. A "
        "policy that remembers `over last N queries` an N that reads `prompt` cannot take another prompt.\n",
        "What a user gives for `budget` is a number of tokens, `512`, or a rate of `prompt`, `0.25`: written with a point, and up to "
        "`1.0`, which is all of it. `1` is one token. A rate is at least one token; a prompt that comes token by token has no rate "
        "and is refused, unless it is said beforehand how long it will be: `cache.expect_prompt(4096)`. In a policy's own lines "
        "a rate is written `0.25 * prompt`.\n",
        "## Tensors of files\n",
        TENSORS,
        "## Values from the caller\n",
        GIVEN,
        "## Counts that read the data\n",
        COUNTS,
        "## Budgets that are shared, and heads that vote\n",
        SHARED,
        "## Inputs\n",
        _table(("name", "axes", "meaning"), (_input(ops.INPUTS[name]) for name in ops.INPUTS if name in ops.NAMED_INPUTS)),
        "## Reductions\n",
        "`mean(x)` reduces over queries, `mean(x over slots)` over the slots that a query sees, or that are cached. `over page` gives "
        "every slot the value of its page, `over next page` that of the page behind it, `over sketch` reads the sketch's dims only. "
        "Pages are cut by places in the text, from its beginning or (`pages 128 after 4`) from behind its first tokens on; of a page "
        "counts what is there. Behind the last one there is none: a sum over it is 0, a maximum minus infinity, a minimum infinity, and "
        "anything else NaN.\n",
        _table(("", "meaning", "ranges over"), map(_reduction, ops.REDUCTIONS.values())),
        "## Functions and operators\n",
        _table(("", "meaning"), _functions()),
        "### Ranks\n",
        RANKS,
        "### Folds\n",
        FOLDS,
        "### The prompt's queries, and rotated vectors\n",
        TEXT,
        "## What is equal on every backend\n",
        EQUAL,
        "## The prelude\n",
        "What every policy knows without an import; a policy may define these names anew.\n",
        f"```kv\n{read_resource('grammar', 'prelude.kv')}```\n",
        "## The grammar\n",
        "The file that the parser is made from, for [Lark](https://lark-parser.readthedocs.io).\n",
    ]
    for title, text in grammar_sections().items():
        parts.append(f"### {title[0].upper()}{title[1:]}\n\n```text\n{text}\n```\n")
    return wrapped("\n".join(parts))


def _input(row: ops.InputRow) -> tuple[str, str, str]:
    return f"`{row.name}`", ", ".join(sorted(axis.value for axis in row.axes)) or "–", row.doc


def _reduction(row: ops.ReductionRow) -> tuple[str, str, str]:
    ranges = {"history": "last N queries", "next": "next page"}
    return f"`{written(row.name)}`", row.doc, ", ".join(ranges.get(over, over) for over in row.over)


def _functions() -> Iterator[tuple[str, str]]:
    """Functions that mean the same stand in one line."""
    lines: dict[str, list[str]] = {}
    for name in (*ops.FORMS, *ops.POOLS, *ops.ELEMENTWISE):
        doc = {**ops.FUNCTIONS, **ops.POOLS, **ops.FORMS}[name].doc
        lines.setdefault(doc, []).append(f"`{written(name, extreme=name in ops.REDUCTIONS)}`")
    yield from ((" ".join(texts), doc) for doc, texts in lines.items())
    yield from OPERATORS.items()


def _statement(rule: str) -> tuple[str, str, str]:
    meaning, default = STATEMENTS[rule]
    return f"`{form(rule)}`", meaning, f"`{WORDS[rule][0]}`" if rule in WORDS else default


def _table(head: tuple[str, ...], lines: Iterator[tuple[str, ...]]) -> str:
    table = [head, ("---",) * len(head), *lines]
    return "".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |\n" for line in table)


# -- policies ----------------------------------------------------------------------------------------------------------


def policy_page(path: Path) -> str:
    """A shipped policy: what its docstring says, its file, what it costs, its tests, and the hand-written notes on it."""
    stem, policy = path.stem, analyse(path).policy
    source = fields(policy.doc)
    parts = [
        f"{MADE}# {policy.name}\n",
        *(f"{paragraph}\n" for paragraph in paragraphs(policy.doc)),
        *([_table(("", ""), ((key, _escaped(value)) for key, value in source.items()))] if source else []),
        f"## {path.relative_to(ROOT)}\n",
        f"```kv\n{path.read_text(encoding='utf-8')}```\n",
        "## What it does\n",
        _table(
            ("", ""),
            ((title, "<br>".join(_escaped(line) for line in lines)) for title, lines in rows(facts(policy)).items()),
        ),
        f"From `kvdsl explain {stem}`.\n",
    ]
    notes = DOCS / "notes" / f"{stem}.md"
    if notes.exists():
        parts.append(notes.read_text(encoding="utf-8"))
    test = path.with_name(f"{stem}_test.kv")
    if test.exists():
        parts += [
            "## Its tests\n",
            f"`kvdsl test {stem}` runs them.\n",
            f"```kv\n{test.read_text(encoding='utf-8')}```\n",
        ]
    return "\n".join(parts)


def _escaped(text: str) -> str:
    """Text in a Markdown table."""
    return re.sub(r"([*_<>])", r"\\\1", text)


def policies_index(paths: Sequence[Path], title: str) -> str:
    """Policies of one folder, each with its year and its first sentence, which says where it is approximate."""
    lines = []
    for path in paths:
        policy = analyse(path).policy
        year = fields(policy.doc).get("year", "–").split(",")[0]
        lines.append((f"[{policy.name}]({path.stem}.md)", f"`{path.stem}`", year, _escaped(paragraphs(policy.doc)[0])))
    return f"{MADE}# {title}\n\n{_table(('policy', 'name', 'year', 'what it does'), iter(lines))}"


# -- reach -------------------------------------------------------------------------------------------------------------

MISSING = DOCS / "notes" / "reach.json"
"""The methods that no policy is of, and what the language would need for them."""


@dataclass(frozen=True)
class Reached:
    """A policy that is a published method, or nearly."""

    path: Path
    found: Provenance
    kernels: str

    @property
    def link(self) -> str:
        folder = "policies/gallery" if self.path.parent.name == "gallery" else "policies"
        return f"[`{self.path.stem}`]({folder}/{self.path.stem}.md)"


def reach_page() -> str:
    """Which published methods the language says exactly, nearly, or not, counted from the policies' own headers."""
    policies = list(_reached())
    exact = _by_method(one for one in policies if one.found.exact)
    near = _by_method(one for one in policies if not one.found.exact)
    data = json.loads(MISSING.read_text(encoding="utf-8"))
    missing = [row for row in data["methods"] if row["method"] not in exact.keys() | near.keys()]
    nearly = near.keys() - exact.keys()
    presses = {press for one in policies for press in one.found.presses}
    exactly = {press for one in policies if one.found.exact for press in one.found.presses}
    known = presses | {row["kvpress"] for row in missing if "kvpress" in row}
    kernels = sum(one.kernels == "C++, Triton" for one in policies)
    ideas = ((f"`{key}`", text) for key, text in data["ideas"].items() if any(key in row["missing"] for row in missing))
    return wrapped("\n".join([
        MADE + "# What the language reaches\n",
        f"Of {len(exact) + len(nearly) + len(missing)} published methods that evict tokens or choose which to attend to, policies that "
        f"come with kvdsl are **{len(exact)} exactly**, **{len(nearly)} approximately**, and {len(missing)} not. Of the {len(known)} "
        f"presses of kvpress that is {len(exactly)}, {len(presses - exactly)} and {len(known - presses)}. Of the {len(policies)} "
        f"policies here, {kernels} have kernels in C++ and in Triton; all of them run on torch.\n",
        "This page is made from what the policies say of themselves (`kvdsl list --all --json`). How one was checked: "
        + "; ".join(f"*{word}* {text}" for word, text in CHECKS.items()) + ".\n",
        "## Exactly\n",
        _table(("method", "year", "policy", "kvpress", "checked", "kernels"), _reach_rows(exact, lambda one: ())),
        "## Approximately\n",
        _table(
            ("method", "year", "policy", "in what it differs", "kvpress", "checked", "kernels"),
            _reach_rows(near, lambda one: (_escaped(one.found.how or ""),)),
        ),
        "## Not\n",
        _table(("idea", "what is missing"), ideas),
        _table(("method", "year", "what it does", "missing"), map(_missing_row, missing)),
    ]))  # fmt: skip


def _reached() -> Iterator[Reached]:
    for path in all_policies():
        policy = analyse(path).policy
        found = provenance(path.stem, policy.doc)
        if found is not None:
            if "method" not in fields(policy.doc):
                found = replace(found, methods=(policy.name,))
            serve = {one["name"]: one["ok"] for one in facts(policy).backends}
            kernels = ", ".join(name for name, backend in (("C++", "cpu"), ("Triton", "triton")) if serve[backend])
            yield Reached(path, found, kernels or "–")


def _by_method(policies: Iterable[Reached]) -> dict[str, list[Reached]]:
    found: dict[str, list[Reached]] = {}
    for one in policies:
        for method in one.found.methods:
            found.setdefault(method, []).append(one)
    return dict(sorted(found.items(), key=lambda item: item[0].lower()))


def _reach_rows(methods: dict[str, list[Reached]], more: Callable[[Reached], tuple[str, ...]]) -> Iterator[tuple[str, ...]]:
    for method, policies in methods.items():
        for one in policies:
            found = one.found
            year = "–" if found.year is None else str(found.year)
            if found.arxiv is not None:
                year = f"[{year}](https://arxiv.org/abs/{found.arxiv})"
            yield method, year, one.link, *more(one), ", ".join(found.presses), ", ".join(found.checks), one.kernels


def _missing_row(row: dict[str, Any]) -> tuple[str, ...]:
    press = f" ({row['kvpress']})" if row.get("kvpress", row["method"]) != row["method"] else ""
    return row["method"] + press, str(row["year"]), _escaped(row["does"]), ", ".join(f"`{idea}`" for idea in row["missing"])


# -- the papers' results -------------------------------------------------------------------------------------------------

REPRODUCED = ROOT / "results"
REAL = "smollm2"
"""The model, and the folder in `results`, of what was measured a second time."""
RESULTS = """# Results

What the five papers claim, held against what was measured. All of it on the *reference model*, which is small, was trained on old books and
ships with kvdsl: it copies and recalls, and has attention sinks. Some of it also on *SmolLM2* (135 million parameters, trained on 2
trillion tokens), a language model that people use: where a table has a column for it, empty cells were not measured. What separates
policies on a model of 7 billion parameters need not separate them on either, and the other way round:
`kvdsl reproduce PAPER --model FOLDER` says it of yours ([how](howto/reproduce.md)).

A claim holds ("yes"), does not ("no"), or is left open by what was measured ("open"): differences below the spread of the repeats
decide nothing. Every claim is taken from the rows of its table by the code that wrote it, `lab/kvdsl_lab/reproduce/`; nobody has
sorted them.
"""
HOLDS = {True: "yes", False: "**no**", None: "open"}


def results_page() -> str:
    """For every paper that was reproduced at full size: its claims, and what was measured, on one model or two."""
    parts = [MADE + RESULTS]
    for path in sorted(REPRODUCED.glob("*.json")):
        again = REPRODUCED / REAL / path.name
        found = [json.loads(one.read_text(encoding="utf-8")) for one in (path, again) if one.exists()]
        told = [one for one in found if any(experiment["findings"] for experiment in one["experiments"])]
        if told:
            parts.append(_results(told))
    return wrapped("\n".join(parts))


def _results(found: list[dict[str, Any]]) -> str:
    """One paper: what its runs found, beside each other."""
    paper, models = found[0]["paper"], ["reference model", "SmolLM2"] if len(found) > 1 else []
    notes = DOCS / "notes" / "results" / f"{paper}.md"
    heads = [title for model in models for title in (model, "measured")] or ["holds", "measured"]
    parts = [
        f"## {found[0]['title']}\n",
        *(_said_by(one) for one in found),
        _table(("where", "claim", *heads), _claims(found)),
        *([notes.read_text(encoding="utf-8")] if notes.exists() else []),
    ]
    return "\n".join(parts)


def _said_by(found: dict[str, Any]) -> str:
    """What a run was made with."""
    where, setup = found["environment"], found["setup"]
    folder, asked = (f"results/{REAL}", f" --model {REAL}") if setup.get("model") == REAL else ("results", "")
    if not found["finished"]:
        asked += f" --only {','.join(one['name'] for one in found['experiments'] if one['findings'])}"
    return (
        f"`kvdsl reproduce {found['paper']}{asked} --threads {where['threads']}`: {found['seconds'] / 60:.0f} minutes on {where['cpu']} "
        f"(torch {where['torch']}, transformers {where['transformers']}, {where['dtype'] or 'float32'}, seed {setup['seed']}), "
        f"{setup.get('model', 'shapes alone')}; the tables and figures are in `{folder}/{found['paper']}.md`.\n"
    )


def _claims(found: list[dict[str, Any]]) -> Iterator[tuple[str, ...]]:
    """A row for each claim: what each run says of it; nothing where it says nothing."""
    told: dict[tuple[str, str], dict[int, tuple[str, str]]] = {}
    for run, one in enumerate(found):
        for experiment in one["experiments"]:
            for finding in experiment["findings"]:
                claim = (experiment["source"], _escaped(finding["claim"]))
                told.setdefault(claim, {})[run] = HOLDS[finding["holds"]], _escaped(finding["measured"])
    for claim, by_run in told.items():
        yield (*claim, *(text for run in range(len(found)) for text in by_run.get(run, ("", ""))))


# -- all pages ---------------------------------------------------------------------------------------------------------


COMMITTED: dict[str, Callable[[], str]] = {
    "diagnostics.md": diagnostics_page,
    "language.md": language_reference,
    "reach.md": reach_page,
    "results.md": results_page,
}
"""Path below docs/ -> what makes the text, of the pages that are committed."""


def policy_pages() -> dict[str, str]:
    """Path below docs/ -> text, of the pages that are made for the site."""
    return {
        "policies/index.md": policies_index(shipped_policies(), "Policies"),
        "policies/gallery/index.md": policies_index(gallery_policies(), "The gallery"),
        **{str(path.relative_to(ROOT).with_suffix(".md")): policy_page(path) for path in all_policies()},
    }


def bring_up_to_date(files: dict[Path, str], check: bool) -> NoReturn:
    """Writes what has changed, or only says it; the process ends with 1 if that is not yet written."""
    stale = [path for path, text in files.items() if not path.exists() or path.read_text(encoding="utf-8") != text]
    for path in stale:
        if not check:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(files[path], encoding="utf-8")
        click.echo(f"{'not up to date' if check else 'written'}: {path.relative_to(ROOT)}")
    sys.exit(1 if check and stale else 0)


@click.command(help=__doc__, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--check", is_flag=True, help="Write nothing; exit with 1 if a committed page is not up to date.")
def main(check: bool) -> None:
    pages = {name: make() for name, make in COMMITTED.items()} | ({} if check else policy_pages())
    bring_up_to_date({DOCS / name: text for name, text in pages.items()}, check)


if __name__ == "__main__":
    main()
