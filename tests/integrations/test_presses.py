"""Kept sets of kvpress's presses and of kvdsl's policies: layer by layer, head by head, in kvpress's own environment (`make peers`).

Once with random weights, and once with SmolLM2 where that is on the machine (`kvdsl models get smollm2`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

kvpress = pytest.importorskip(
    "kvpress", reason="kvpress is not installed; `make peers` tests this in an environment where it is"
)

from transformers import DynamicCache  # noqa: E402

import kvdsl  # noqa: E402
from kvdsl.assets import book_text  # noqa: E402
from kvdsl.compiler import analyse, find_policy  # noqa: E402
from kvdsl.errors import KvdslError  # noqa: E402
from kvdsl.integrations.kvpress import PolicyPress  # noqa: E402
from kvdsl.runtime.hf.versions import with_cache  # noqa: E402
from kvdsl.tensorfile import Stored, written  # noqa: E402
from tests.integrations.presses import COUNTERPARTS  # noqa: E402
from tests.integrations.test_kvpress import IDS, TOKENS, llama, pressed  # noqa: E402

pytestmark = pytest.mark.nightly

Kept = list[list[list[int]]]
"""By layer and head."""


@dataclass(frozen=True)
class Read:
    """A model, a prompt of which no token comes twice (equal keys would tie), and its values, by which tokens are told.

    Attributes:
        values: [1, heads, tokens, dim] of each layer.
    """

    model: Any
    ids: torch.Tensor
    values: tuple[torch.Tensor, ...]

    def kept(self, press: Any) -> Kept:
        """The places in the text of what stays; without what kvpress masks in its attention."""
        cache, found = pressed(self.model, press, self.ids), []
        for layer, whole, block in zip(cache.layers, self.values, self.model.model.layers, strict=True):
            stays = torch.ones(layer.values.shape[:3], dtype=torch.bool)
            masked = getattr(block.self_attn, "masked_key_indices", None)
            if masked is not None:
                stays[tuple(masked)] = False
            found.append(
                [
                    torch.cdist(held[stays[0, head]], whole[0, head]).argmin(1).sort().values.tolist()
                    for head, held in enumerate(layer.values[0])
                ]
            )
        return found


def reading(model: Any, ids: torch.Tensor) -> Read:
    cache = DynamicCache()
    with torch.no_grad():
        model(ids, **with_cache(cache))
    return Read(model, ids, tuple(layer.values for layer in cache.layers))


@lru_cache
def smollm2() -> Read | None:
    """SmolLM2 with a book's first 80 different tokens; None where it is not on this machine."""
    try:
        model, tokenizer = kvdsl.load_model("smollm2", "fp32")
    except KvdslError:
        return None
    ids = list(dict.fromkeys(tokenizer(book_text()[:4000])["input_ids"]))[:TOKENS]
    return reading(model, torch.tensor([ids]))


@pytest.fixture(params=["random", "smollm2"])
def read(request: pytest.FixtureRequest) -> Iterator[Read]:
    found = reading(llama(), IDS) if request.param == "random" else smollm2()
    if found is None:
        pytest.skip("SmolLM2 is not on this machine")
    yield found
    found.model.set_attn_implementation("sdpa")


@pytest.mark.parametrize("ratio", [0.25, 0.5, 0.75])
@pytest.mark.parametrize("policy", COUNTERPARTS)
def test_the_same_tokens_stay(read: Read, policy: str, ratio: float) -> None:
    counterpart, budget = COUNTERPARTS[policy], int(TOKENS * (1 - ratio))
    read.model.set_attn_implementation(counterpart.attention)
    press = counterpart.press(kvpress, ratio)
    theirs = read.kept(press)
    settings = {"budget": budget, **counterpart.settings(budget)}
    ours = read.kept(PolicyPress(policy, settings=settings, supplied=counterpart.supplied(press)))
    assert ours == theirs
    assert sum(len(head) for layer in ours for head in layer) == budget * sum(map(len, ours))


def test_a_ratio_for_each_layer(read: Read) -> None:
    half = len(read.values) // 2 + len(read.values) % 2
    ratios = [0.25] * half + [0.75] * (len(read.values) - half)
    theirs = read.kept(kvpress.PerLayerCompressionPress(kvpress.KnormPress(), ratios))
    assert read.kept(PolicyPress("per_layer", settings={"lower": 0.75, "upper": 0.25})) == theirs
    assert [len(layer[0]) for layer in theirs] == [60 if ratio == 0.25 else 20 for ratio in ratios]


@pytest.mark.parametrize("chunk", [20, 30])
@pytest.mark.parametrize("ratio", [0.25, 0.5, 0.75])
def test_chunk_by_chunk(read: Read, ratio: float, chunk: int) -> None:
    """Also where a shorter chunk is left over."""
    theirs = read.kept(kvpress.ChunkPress(kvpress.KnormPress(ratio), chunk_length=chunk))
    assert read.kept(PolicyPress("knorm_chunks", settings={"kept": 1 - ratio, "chunk": chunk})) == theirs


@pytest.mark.parametrize(("first", "second"), [(0.25, 0.5), (0.5, 0.25), (0.75, 0.75)])
def test_one_press_after_another(read: Read, first: float, second: float) -> None:
    theirs = read.kept(kvpress.ComposedPress([kvpress.KnormPress(first), kvpress.KeyDiffPress(second)]))
    settings = {"first": 1 - first, "second": 1 - second}
    assert read.kept(PolicyPress("knorm_then_keydiff", settings=settings)) == theirs


# -- one pool of all layers ----------------------------------------------------------------------------------------------


class Gates(torch.nn.Module):
    """In the place of a layer's trained gates: what these say of the prompt's tokens, [1, heads, tokens]."""

    def __init__(self, says: torch.Tensor) -> None:
        super().__init__()
        self.says = says

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.says.clone()


def by_gates(model: Any, press: Any, says: torch.Tensor) -> None:
    """Scores of Fast KVzip's press: what gates say, but for the sinks and the window."""
    press.gates, press.score_val = [Gates(one) for one in says], [None] * len(says)
    for layer in model.model.layers:
        press._score_fast(layer.self_attn, torch.zeros(1, TOKENS, 1))


def by_repetition(model: Any, press: Any, says: torch.Tensor) -> None:
    """Scores of KVzip's press, as if the prompt had been repeated."""
    press.score_val = says.clone()
    press.score_val[..., : press.n_sink] = 1.0


@pytest.mark.parametrize("ratio", [0.25, 0.5, 0.75])
@pytest.mark.parametrize(
    ("policy", "press", "score"), [("kvzip", "KVzipPress", by_repetition), ("fast_kvzip", "FastKVzipPress", by_gates)]
)
def test_all_layers_share(read: Read, policy: str, press: str, score: Callable[..., None], ratio: float) -> None:
    """The same scores, no two of them alike and larger in later layers: who stays is chosen by kvpress."""
    layers, heads = heads_of(read)
    order = torch.randperm(layers * heads * TOKENS, generator=torch.Generator().manual_seed(1))
    says = order.view(layers, 1, heads, TOKENS) / order.numel() * torch.linspace(0.5, 0.999, layers).view(-1, 1, 1, 1)
    theirs = getattr(kvpress, press)(compression_ratio=ratio)
    score(read.model, theirs, says)
    theirs.compress_post(read.model)
    expected = []
    for layer in read.model.model.layers:
        stays = torch.ones(heads, TOKENS, dtype=torch.bool)
        stays[tuple(layer.self_attn.masked_key_indices[1:])] = False
        expected.append([head.nonzero()[:, 0].tolist() for head in stays])
        layer.self_attn.masked_key_indices = None
    made = kvdsl.load(policy)
    cache = made(read.model, budget=int(TOKENS * (1 - ratio)))
    for layer in range(layers):
        cache.give(layer, importance=says[layer])
    with torch.no_grad():
        read.model(read.ids, **with_cache(cache))
    ours = [[sorted(head[head >= 0].tolist()) for head in cache.positions(layer)[0]] for layer in range(layers)]
    made.release(read.model)
    assert ours == expected
    assert len({len(head) for layer in ours for head in layer}) > 1


# -- with tensors of files ---------------------------------------------------------------------------------------------


def with_tensor(folder: Path, policy: str, name: str, values: np.ndarray, *statements: str) -> Path:
    """A policy that extends one of the gallery by a tensor for the model, [layers, heads(, dims(, rank))], as a file."""
    axes = ("layers", "heads", "dims", "rank")[: values.ndim]
    return with_tensors(folder, policy, {name: (axes, values)}, *statements)


def with_tensors(
    folder: Path, policy: str, tensors: dict[str, tuple[tuple[str, ...], np.ndarray]], *statements: str
) -> Path:
    """A policy that extends one of the gallery by tensors with these axes, as a file."""
    stored = {name: Stored("F32", x.shape, np.ascontiguousarray(x, "<f4").tobytes()) for name, (_, x) in tensors.items()}
    (folder / "mine.safetensors").write_bytes(written(stored))
    parent = analyse(find_policy(policy)).policy.name
    overrides = [
        f'override tensor {name} [{", ".join(axes)}] from "mine.safetensors"' for name, (axes, _) in tensors.items()
    ]
    lines = (*overrides, *statements)
    body = "".join(f"  {line}\n" for line in lines)
    file = folder / "mine.kv"
    file.write_text(f'kv 1\nimport {policy}\n\npolicy Mine extends {parent} {{\n  "With the model\'s numbers."\n{body}}}\n')
    return file


def heads_of(read: Read) -> tuple[int, int]:
    return len(read.values), read.values[0].shape[1]


def test_a_rate_for_each_head(read: Read, tmp_path: Path) -> None:
    """Rates of eighths, so that nothing has to be rounded."""
    kept = np.random.default_rng(0).integers(1, 8, heads_of(read)) / 8
    press = kvpress.LUKVPress(kvpress.KnormPress(), compression_ratio=0.5)
    press._budget_curves = np.tile(1 - kept, (99, 1, 1))
    theirs = read.kept(press)
    assert read.kept(PolicyPress(with_tensor(tmp_path, "lu_kv", "kept", kept))) == theirs
    assert [[len(head) for head in layer] for layer in theirs] == (kept * TOKENS).astype(int).tolist()


@pytest.mark.parametrize("streaming", [0.25, 0.5, 0.75])
def test_heads_that_stream(read: Read, tmp_path: Path, streaming: float) -> None:
    layers, heads = heads_of(read)
    ranks = np.random.default_rng(1).permutation(layers * heads).reshape(layers, heads)

    class Press(kvpress.DuoAttentionPress):  # type: ignore[misc]
        @staticmethod
        def load_attention_pattern(model: Any) -> tuple[int, int, np.ndarray]:
            return 4, 16, ranks / ranks.size

    theirs = read.kept(Press(head_compression_ratio=streaming))
    file = with_tensor(tmp_path, "duo_attention", "retrieval", (ranks + 0.5) / ranks.size)
    settings = {"share": 1 - round(streaming * ranks.size) / ranks.size, "sinks": 4, "recent": 16}
    assert read.kept(PolicyPress(file, settings=settings)) == theirs
    assert {len(head) for layer in theirs for head in layer} == {20, TOKENS}


@pytest.mark.parametrize("ratio", [0.25, 0.5, 0.75])
def test_a_filter_for_each_head(read: Read, tmp_path: Path, ratio: float) -> None:
    """The published filters point the other way."""
    filters = np.random.default_rng(2).normal(size=(*heads_of(read), read.values[0].shape[-1]))

    class Press(kvpress.QFilterPress):  # type: ignore[misc]
        @staticmethod
        def load_q_filters(name: str) -> torch.Tensor:
            return torch.tensor(-filters, dtype=torch.float32)

    theirs = read.kept(Press(ratio))
    file = with_tensor(tmp_path, "q_filters", "filter", filters, "keep last 0", "when prefill")
    assert read.kept(PolicyPress(file, compression_ratio=ratio)) == theirs


@pytest.mark.parametrize("ratio", [0.25, 0.5, 0.75])
def test_leverage(read: Read, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ratio: float) -> None:
    """With the same random numbers, which kvpress draws layer by layer."""
    layers, heads = heads_of(read)
    drawn = np.random.default_rng(3).normal(size=(layers, heads, read.values[0].shape[3], 12))
    left = [torch.tensor(one[None], dtype=torch.float32) for one in drawn]
    with monkeypatch.context() as patched:
        patched.setattr(torch, "randn", lambda *shape, **how: left.pop(0))
        theirs = read.kept(kvpress.LeverageScorePress(ratio, sketch_dimension=12))
    assert not left
    file = with_tensor(tmp_path, "leverage_score", "sketch", drawn / np.sqrt(12))
    assert read.kept(PolicyPress(file, compression_ratio=ratio)) == theirs


@pytest.mark.parametrize("ratio", [0.25, 0.5, 0.75])
def test_leverage_beside_attention(read: Read, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ratio: float) -> None:
    """Four whole chunks between the first tokens and the last, each head with a sketch of its own."""
    layers, heads = heads_of(read)
    drawn = np.random.default_rng(5).normal(size=(layers, heads, read.values[0].shape[3], 12))
    left = [torch.tensor(one[None], dtype=torch.float32) for one in drawn]
    with monkeypatch.context() as patched:
        patched.setattr(torch, "randn", lambda *shape, **how: left.pop(0))
        theirs = read.kept(kvpress.CompactorPress(ratio, sketch_dimension=12, chunk_size=17))
    assert not left
    file = with_tensor(tmp_path, "compactor", "sketch", drawn / np.sqrt(12))
    settings = {"budget": int(TOKENS * (1 - ratio)), "chunk": 17, "blending": ratio}
    assert read.kept(PolicyPress(file, settings=settings)) == theirs


@pytest.mark.parametrize("ratio", [0.25, 0.5, 0.75])
def test_stored_moments(read: Read, tmp_path: Path, ratio: float) -> None:
    """Means and covariances as they might have been found on a text."""
    layers, heads, dims = *heads_of(read), read.values[0].shape[3]
    group = read.model.config.num_attention_heads // heads
    random = np.random.default_rng(4)
    centre, root = random.normal(size=(layers, heads, group, dims)), random.normal(size=(layers, heads, group, dims, 5))
    press = kvpress.ExpectedAttentionStatsPress(ratio)
    press.mu = torch.tensor(centre.reshape(layers, -1, dims), dtype=torch.float32)
    press.cov = torch.tensor((root @ root.swapaxes(-1, -2)).reshape(layers, -1, dims, dims), dtype=torch.float32)
    axes = ("layers", "heads", "group", "dims", "rank")
    tensors = {"centre": (axes[:4], centre), "root": (axes, root)}
    file = with_tensors(tmp_path, "expected_attention_stats", tensors)
    assert read.kept(PolicyPress(file, compression_ratio=ratio)) == read.kept(press)


# -- as many as the data say ---------------------------------------------------------------------------------------------


def shortness(module: Any, hidden: torch.Tensor) -> torch.Tensor:
    """What kvpress's KnormPress says of each token: a rotation changes no norm."""
    keys = module.k_proj(hidden).unflatten(-1, (-1, module.head_dim))
    return -keys.norm(dim=-1).transpose(1, 2)


@pytest.mark.parametrize("policy", ["dms", "kvzap_threshold"])
@pytest.mark.parametrize("share", [0.25, 0.5, 0.75])
def test_a_threshold(read: Read, policy: str, share: float) -> None:
    cache = DynamicCache()
    with torch.no_grad():
        read.model(read.ids, **with_cache(cache))
    threshold = float(torch.cat([layer.keys.norm(dim=-1).flatten() for layer in cache.layers]).neg().quantile(share))
    press = kvpress.DMSPress(kvpress.KnormPress(), threshold=threshold, sliding_window_size=12)
    theirs = read.kept(press)
    settings = {"threshold": threshold, "window": 12}
    assert read.kept(PolicyPress(policy, settings=settings, supplied={"importance": shortness})) == theirs
    assert len({len(head) for layer in theirs for head in layer}) > 1


@pytest.mark.parametrize("quantile", [0.0, 0.5, 1.0])
def test_lazy_layers(read: Read, quantile: float) -> None:
    """All layers, some, and none."""
    near: list[float] = []

    class Press(kvpress.SimLayerKVPress):  # type: ignore[misc]
        def is_lazy(self, module: Any, *more: Any) -> bool:
            weights = kvpress.SnapKVPress.compute_window_attention(module, *more[:2], self.n_last, more[2]).mean((0, 1, 2))
            near.append(float(weights[: self.n_initial].sum() + weights[-self.n_recent :].sum()))
            return bool(super().is_lazy(module, *more))

    shape = {"n_last": 2, "n_recent": 16, "n_initial": 4}
    read.kept(Press(lazy_threshold=0.0, **shape))
    own = sorted(near)
    threshold = {0.0: own[0] - 1e-3, 0.5: sum(own[len(own) // 2 - 1 : len(own) // 2 + 1]) / 2, 1.0: own[-1] + 1e-3}[quantile]
    press = Press(lazy_threshold=threshold, **shape)
    near.clear()
    theirs = read.kept(press)
    settings = {"threshold": threshold, "asked": 2, "recent": 16, "sinks": 4}
    assert read.kept(PolicyPress("simlayerkv", settings=settings)) == theirs
    assert [len(layer[0]) for layer in theirs] == [18 if one > threshold else TOKENS for one in near]


@pytest.mark.parametrize("ratio", [0.25, 0.5, 0.7])
def test_a_share_of_the_text_while_decoding(read: Read, ratio: float) -> None:
    prompt, tokens = read.ids[:, :40], read.ids[0, 40:]
    theirs, ours = DynamicCache(), kvdsl.load("compression_ratio_decoding")(read.model, ratio=ratio, interval=8)
    press = kvpress.CompressionRatioDecodingPress(
        kvpress.KnormPress(), target_compression_ratio=ratio, compression_interval=8
    )
    with torch.no_grad(), press(read.model):
        read.model(prompt, **with_cache(theirs))
        for at, token in enumerate(tokens, 40):
            read.model(token[None, None], **with_cache(theirs), position_ids=torch.tensor([[at]]))
    with torch.no_grad():
        read.model(prompt, **with_cache(ours))
        for token in tokens:
            read.model(token[None, None], **with_cache(ours))
    kvdsl.load("compression_ratio_decoding").release(read.model)
    for index, other in enumerate(theirs.layers):
        assert other.values.shape[2] == int(TOKENS * (1 - ratio))
        assert holds(ours, index, other.values)


# -- while decoding ----------------------------------------------------------------------------------------------------


INTERVALS: dict[str, tuple[Callable[[], Any], int, dict[str, float]]] = {
    "knorm_decoding": (
        lambda: kvpress.DecodingPress(kvpress.KnormPress(), compression_interval=8, target_size=20),
        20,
        {"budget": 20, "interval": 8},
    ),
    "prefill_decoding, of a whole prompt": (
        lambda: kvpress.DecodingPress(kvpress.KnormPress(), compression_interval=8, target_size=20),
        27,
        {"budget": 1.0, "target": 20, "interval": 8},
    ),
    "prefill_decoding": (
        lambda: kvpress.PrefillDecodingPress(
            kvpress.SnapKVPress(0.5, window_size=8, kernel_size=1),
            kvpress.DecodingPress(kvpress.KnormPress(), compression_interval=4, target_size=12),
        ),
        40,
        {"budget": 20, "target": 12, "interval": 4, "window": 8},
    ),
}
"""By the stem, and more words: the press, how long the prompt is, and the policy's params. The other tokens are read one by one."""


@pytest.mark.parametrize("name", INTERVALS)
def test_an_interval_of_decoding(read: Read, name: str) -> None:
    (made, length, settings), policy = INTERVALS[name], name.partition(",")[0]
    prompt, tokens = read.ids[:, :length], read.ids[0, length:]
    theirs, ours = DynamicCache(), kvdsl.load(policy)(read.model, **settings)  # type: ignore[arg-type]
    with torch.no_grad(), made()(read.model):
        read.model(prompt, **with_cache(theirs))
        for at, token in enumerate(tokens, length):
            read.model(token[None, None], **with_cache(theirs), position_ids=torch.tensor([[at]]))
    sizes = []
    with torch.no_grad():
        read.model(prompt, **with_cache(ours))
        held = int((ours.positions(0)[0, 0] >= 0).sum())
        for token in tokens:
            read.model(token[None, None], **with_cache(ours))
            sizes.append(int((ours.positions(0)[0, 0] >= 0).sum()))
    kvdsl.load(policy).release(read.model)
    interval = settings["interval"]
    assert max(sizes) == held - 1 + interval and sizes.count(settings.get("target", 20)) == len(tokens) // interval
    assert all(holds(ours, index, other.values) for index, other in enumerate(theirs.layers))


def holds(cache: Any, layer: int, values: torch.Tensor) -> bool:
    """Whether a layer of a cache holds these values, [1, heads, tokens, dim], in any order."""
    state = cache.layers[layer].state
    found = [state.values[0, head][live] for head, live in enumerate(state.position[0] >= 0)]
    return all(
        mine.shape == other.shape
        and float(torch.cdist(mine, other, compute_mode="donot_use_mm_for_euclid_dist").min(1).values.max()) < 1e-3
        for mine, other in zip(found, values[0], strict=True)
    )
