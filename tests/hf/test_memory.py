"""Memory is allocated once: 2,000 tokens later every buffer lies where it lay, and nothing has grown."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from itertools import product
from typing import Any

import psutil
import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import kvdsl
from kvdsl.compiler import analyse, find_policy
from kvdsl.explain.facts import facts
from kvdsl.runtime.hf.layer import SlotLayer
from kvdsl.runtime.hf.versions import with_cache
from kvdsl.runtime.state.room import AT_ONCE
from tests.hf import policies, zoo
from tests.quick import few

pytestmark = pytest.mark.nightly

TOKENS, BUDGET = 2000, 256


def addresses(cache: Any) -> list[tuple[int, ...]]:
    """Where every tensor of every managed layer lies."""
    states = [cache.layers[layer].state for layer in cache.managed]
    return [tuple(tensor.data_ptr() for tensor in state.tensors().values()) for state in states]


class NewStorage(TorchDispatchMode):
    """Notes every operation that allocates at least so many bytes."""

    def __init__(self, bound: int) -> None:
        super().__init__()
        self.bound = bound
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        known = {x.untyped_storage().data_ptr() for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        for x in tree_leaves(out):
            if isinstance(x, torch.Tensor) and x.untyped_storage().data_ptr() not in known:
                size = x.untyped_storage().nbytes()
                if size >= self.bound:
                    self.found.append(f"{func} {list(x.shape)} {size} bytes")
        return out


def decode(model: Any, cache: Any, ids: torch.Tensor) -> None:
    """Feed tokens one by one."""
    for at in range(ids.shape[1]):
        model(ids[:, at : at + 1], **with_cache(cache))


@pytest.mark.parametrize(("policy", "backend"), [("roco", "cpu"), ("streaming_llm", "cpu"), ("h2o", "torch")])
def test_two_thousand_tokens(policy: str, backend: str) -> None:
    model = zoo.model("llama")
    cache = policies.make(policy, model, budget=BUDGET, backend=backend)
    ids = zoo.prompt(1, TOKENS + 300)
    process = psutil.Process()
    with torch.no_grad():
        model(ids[:, :300], **with_cache(cache))
        decode(model, cache, ids[:, 300:500])
        began, resident, size = addresses(cache), process.memory_info().rss, cache.bytes()
        decode(model, cache, ids[:, 500:-100])
        grown = process.memory_info().rss - resident
        column = cache.positions(0).numel() * 4
        with NewStorage(column) as seen:
            decode(model, cache, ids[:, -100:])
    assert addresses(cache) == began
    assert cache.bytes() == size
    assert grown < 4 << 20, f"the process grew by {grown} bytes over {TOKENS - 300} tokens"
    if backend == "cpu":
        assert seen.found == []
    assert (cache.positions(0) >= 0).sum(-1).unique().tolist() == [BUDGET]
    assert cache.get_seq_length() == TOKENS + 300


def _own_makes(name: str, model: Any) -> Any:
    """A cache of a policy as it comes, with a budget if it has one."""
    cls = kvdsl.load(name)
    return cls(model, **({"budget": 100} if "budget" in cls.spec.params else {}))


WAYS = ("as made", "copied", "pickled", "guessed")
KINDS = ("full", "h2o", "streaming_llm", "keydiff_blocks", "sparcas", "snapkv", "cake", "omnikv", "adakv")


@pytest.mark.parametrize(
    ("how", "name"), few(product(WAYS, KINDS), *(("as made", name) for name in KINDS), *((how, "h2o") for how in WAYS))
)
def test_a_cache_goes_when_nobody_has_it(how: str, name: str) -> None:
    """At once, with all its tensors: Python looks for cycles when it likes, and counts objects, not what they hold."""
    model, ids = zoo.model("llama"), zoo.prompt(1, 140)
    cache = _own_makes(name, model)
    # The end of the text is a token that never comes, without which transformers 4.57 looks nothing up.
    options = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": zoo.VOCAB + 1}
    if how == "guessed" and name not in ("cake", "omnikv"):
        cache.activate_past_recording()  # as transformers 5 does by itself
        options["prompt_lookup_num_tokens"] = 3
    model.generate(**zoo.plain(ids), **options, **with_cache(cache))
    if how == "copied":
        cache = copy.deepcopy(cache)
    elif how == "pickled":
        cache = pickle.loads(pickle.dumps(cache))
        cache.attach(model)
    if how in ("copied", "pickled"):
        with torch.no_grad():
            model(ids[:, :1], **with_cache(cache))
    gone: list[str] = []
    gc.collect()
    gc.disable()
    try:
        for layer in cache.managed:
            state = cache.layers[layer].state
            weakref.finalize(state, gone.append, f"state {layer}")
            weakref.finalize(state.position.untyped_storage(), gone.append, f"tensor {layer}")
        count = 2 * len(cache.managed)
        del state, cache
        assert len(gone) == count, gone
    finally:
        gc.enable()


@pytest.mark.parametrize("rows", [torch.tensor([1]), torch.tensor([False, True, False])], ids=["index", "mask"])
def test_batch_operations(rows: torch.Tensor) -> None:
    model, ids = zoo.model("llama"), zoo.prompt(3, 20)
    cache, single = (policies.make(policies.OBSERVING, model, budget=12) for _ in range(2))
    with torch.no_grad():
        model(ids, **with_cache(cache))
        cache.batch_select_indices(rows)
        cache.batch_repeat_interleave(2)
        ours = model(ids[:2, :1], **with_cache(cache)).logits
        model(ids[1:2], **with_cache(single))
        theirs = model(ids[:1, :1], **with_cache(single)).logits
    assert ours.shape[0] == 2
    assert (ours[0] - theirs[0]).abs().max() < 1e-5
    assert torch.equal(cache.positions(1)[0], single.positions(1)[0])


def test_another_seed_keeps_other_tokens() -> None:
    model, ids = zoo.model("llama"), zoo.prompt(1, 60)
    caches = [policies.make("random", model, budget=12, seed=seed) for seed in (0, 0, 1)]
    for cache in caches:
        zoo.greedy(model, zoo.plain(ids), 3, cache=cache)
    first, again, other = ([cache.positions(layer).sort(-1).values for layer in cache.managed] for cache in caches)
    assert all(map(torch.equal, first, again))
    assert not any(map(torch.equal, first, other))


@pytest.mark.parametrize("policy", ["h2o", "streaming_llm", "roco", "equip_h2o"])
def test_size_is_known_in_advance(policy: str) -> None:
    """The budget and one more slot, each with what `kvdsl explain` says that a token costs."""
    model, cache = zoo.model("llama"), policies.make(policy, zoo.model("llama"), budget=64)
    zoo.greedy(model, zoo.plain(zoo.prompt(2, 100)), 3, cache=cache)
    told = facts(analyse(find_policy(policy)).policy, 16, "float32")
    slots = 2 * 2 * 2 * 65  # layers, batch, KV heads, slots
    assert 0 <= cache.bytes() - slots * (told.bytes_per_token + told.rotated_half) < 200


def test_a_budget_takes_memory_as_it_is_filled() -> None:
    """A short prompt with a huge budget: what is allocated goes by the prompt, and by the budget where that is asked for."""
    model, ids = zoo.model("llama"), zoo.prompt(1, 18)
    cache = policies.make(policies.OBSERVING, model, budget=100_000)
    assert not cache.is_compileable
    zoo.greedy(model, zoo.plain(ids), 3, cache=cache)
    assert cache.layers[0].state.slots == AT_ONCE
    small = cache.bytes()
    cache.reserve()
    assert cache.is_compileable
    assert cache.layers[0].state.slots == 100_001
    assert cache.bytes() > 90 * small


@pytest.mark.parametrize("policy", ["h2o", "streaming_llm", "roco_stored_in_blocks"])
def test_kernels_follow_slots_that_grow(policy: str) -> None:
    """The tokens that a cache keeps, and the logits, are those of one whose slots were all there from the beginning."""
    model, ids = zoo.model("llama"), zoo.prompt(1, 1090)
    ours, theirs = (policies.make(policy, model, budget=1050) for _ in range(2))
    theirs.reserve()
    logits = []
    with torch.no_grad():
        for cache in (ours, theirs):
            model(ids[:, :1000], **with_cache(cache))
            steps = [model(ids[:, at : at + 1], **with_cache(cache)).logits for at in range(1000, 1090)]
            logits.append(torch.cat(steps, 1))
    assert (ours.layers[0].state.slots, ours.is_compileable) == (1051, True)
    torch.testing.assert_close(*logits)
    assert all(torch.equal(ours.positions(layer), theirs.positions(layer)) for layer in ours.managed)


def test_a_whole_prompt_is_held_in_one_layer_at_a_time() -> None:
    """Every layer's keys and values are gone when the next layer attends: only its survivors are left."""
    model = zoo.model("llama")
    cache = policies.make("h2o", model, budget=BUDGET, backend="torch")
    held: list[StorageWeakRef] = []
    alive: list[int] = []

    def noted(layer: Any, call: Any) -> Any:
        alive.append(sum(not storage.expired() for storage in held))
        held.extend(StorageWeakRef(x.untyped_storage()) for x in (call.key, call.value))
        return serve(layer, call)

    serve = SlotLayer._serve
    with pytest.MonkeyPatch.context() as patched, torch.no_grad():
        patched.setattr(SlotLayer, "_serve", noted)
        model(zoo.prompt(1, 2000), **with_cache(cache))
    assert len(alive) == len(cache.managed) > 1
    assert alive == [0] * len(alive)
