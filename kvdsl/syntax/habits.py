"""What people write who come from papers or from other languages, and how the same is said here: help texts by the word."""

from __future__ import annotations

from collections.abc import Iterable


def _same(help: str, words: str) -> Iterable[tuple[str, str]]:
    return ((word, help) for word in words.split())


CHOICE = "a choice is `where(condition, a, b)`"

NAMES = dict([
    *_same("write `attn`: the probability that the query gives the slot", "attention attentions attn_weights weight weights prob probs"),
    *_same("write `logit`: the score before the softmax", "logits scores qk"),
    *_same("write `q`", "query queries Q"),
    *_same("write `k`", "key keys K"),
    *_same("write `v`", "value values V"),
    *_same("write `position`: the token's place in the text", "pos idx index i token_index"),
    *_same("write `age`: how many tokens came after it", "recency distance time"),
    *_same("write `live`, the tokens that are cached, or `prompt`, the length of the prompt", "n len length seq_len seqlen size"),
    *_same("write `layers`", "num_layers n_layers"),
    *_same("`prev` is what a fold came to before, inside of its first argument: `fold(max(0.9 * prev, attn), 0)`", "prev previous"),
    *_same("write `layer`", "layer_idx layer_id"),
    *_same("conditions are comparisons, such as `age > 3`", "true false True False"),
    *_same("there is no infinity: `keep where` protects tokens whatever their score", "inf infinity Infinity"),
])  # fmt: skip
"""Names in expressions."""

FUNCTIONS = dict([
    *_same("write `mean(x)`", "avg average"),
    *_same("write `min(max(x, low), high)`", "clip clamp"),
    *_same("`attn` is the softmax of the logits already; over slots it is `exp(x) / sum(exp(x) over slots)`", "softmax"),
    *_same("write `x / sum(x over slots)`", "normalize normalise"),
    *_same("write `norm1(x)`, `norm2(x)` or `norminf(x)`", "norm l1 l2 linf"),
    *_same("write `x ** n`", "pow power square"),
    *_same("write `max(x, 0)`", "relu"),
    *_same("write `1 / (1 + exp(-x))`", "sigmoid"),
    *_same("write `floor(x + 0.5)`", "round"),
    *_same("write `floor(x)`", "int"),
    *_same("write `random()`, a number in [0, 1) per slot", "rand randn uniform"),
    *_same("write `sum(x)`: it is kept up to date query by query", "accumulate cumsum"),
    *_same("write `fold(x, start)`, in which `prev` is what it came to before", "scan recurrence accumulate_by state"),
    *_same("write `ema(x, decay)`", "ewma moving_average"),
    *_same("write `sum(where(x > 0, -x * log(x), 0))`", "entropy"),
    *_same("write `dot(x, y) / (norm2(x) * norm2(y))`", "cosine cosine_similarity cos cos_sim"),
    *_same("write `rank(x) >= 0.9 * live`: the tenth with the highest x", "quantile percentile"),
    *_same("write `max_pool(x, n)` or `mean_pool(x, n)`", "maxpool avgpool avg_pool pool smooth"),
    *_same("write `keep top n by x`", "topk top_k"),
    *_same("write `rank(x)`, the place in the order of x", "argsort rankdata order"),
    *_same("write `live`, the tokens that are cached, or `prompt`, the length of the prompt", "len length"),
    *_same("write `sum(x > t)`: a condition counts as 0 or 1", "count_if countif"),
    *_same(CHOICE, "if ifelse select choose"),
])  # fmt: skip
"""Functions that are called."""

STATEMENTS = dict([
    *_same("write `score`: the lowest leaves first", "evict drop remove discard delete rank sort prune"),
    *_same("write `keep first`, `keep last`, `keep top` or `keep where`", "retain protect pin preserve"),
    *_same("write `keep last 16`", "recent window local last"),
    *_same("write `keep first 4`", "sink sinks first"),
    *_same("write `keep top 8 by x`", "top"),
    *_same("write `keep where`", "where filter"),
    *_same("tokens stay or leave: none are merged", "merge compress quantize quantise"),
    *_same("write `param budget = 512`", "size capacity cache cache_size limit max_size"),
    *_same(CHOICE, "if else elif"),
    *_same("write `let NAME = ...`", "var const def fn function"),
    *_same("leave out `override`: what stands behind `with` takes the place of what it names", "override"),
])  # fmt: skip
"""Words that begin a line of a policy."""

KEEPS = dict([
    *_same("write `keep last 4`", "recent latest newest window local"),
    *_same("write `keep first 4`", "sink sinks oldest initial start"),
    *_same("write `keep top 4 by x`", "highest largest best heavy"),
    *_same("write `keep where` and a condition", "if when"),
])  # fmt: skip
"""Words after `keep`."""
