"""A decoded token in a graph of `torch.compile`: traced whole and once, with the tokens and the slots of an eager one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters
from transformers import CompileConfig

import kvdsl
from kvdsl.errors import KvdslError
from kvdsl.runtime import graph
from kvdsl.runtime.hf.versions import with_cache
from tests.hf import policies, zoo

pytestmark = pytest.mark.nightly

BUDGET, PROMPT = 16, 20


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


@pytest.fixture(scope="module")
def model() -> Any:
    return zoo.make("Llama", num_hidden_layers=2)


def whole(model: Any, backend: str = "eager") -> Callable[..., Any]:
    """The model's forward, which must be one graph."""
    compiled: Callable[..., Any] = torch.compile(model.forward, fullgraph=True, dynamic=False, backend=backend)
    return compiled


@torch.no_grad()
def decode(model: Any, forward: Callable[..., Any], cache: Any, steps: int) -> Tensor:
    """A prompt through the model, and then so many greedy tokens through `forward`: [2, steps]."""
    ids = zoo.prompt(2, PROMPT)
    logits, tokens = model(ids, **with_cache(cache)).logits, []
    for step in range(steps):
        tokens.append(logits[:, -1].argmax(-1, keepdim=True))
        logits = forward(tokens[-1], **with_cache(cache), **zoo.place(model, PROMPT + step)).logits
    return torch.cat(tokens, 1)


def assert_same_slots(ours: Any, theirs: Any) -> None:
    """Two caches hold the same tokens, with the same statistics up to rounding."""
    for layer in ours.managed:
        assert torch.equal(ours.positions(layer), theirs.positions(layer))
        for name, column in theirs.state(layer).items():
            torch.testing.assert_close(ours.state(layer)[name], column, equal_nan=True)


# -- equality ----------------------------------------------------------------------------------------------------------


MORE = {"gkv": {"window": 3, "buffer": 2}}


def test_heads_vote_in_a_graph(model: Any) -> None:
    """What the KV heads of a layer choose together, in a compiled step as in an eager one."""
    body = f"param budget = {BUDGET}\nscore sum(attn)\nvictims shared by heads\nselect top 6 by sum(dot(q, k) over heads)"
    made = kvdsl.compile(f'kv 1\npolicy Voting {{\n"a test"\n{body}\n}}\n')
    ours, theirs = made(model), made(model)
    tokens = decode(model, whole(model), ours, 12)
    assert torch.equal(tokens, decode(model, model.forward, theirs, 12))
    assert_same_slots(ours, theirs)


@pytest.mark.parametrize(("policy", "backend"), [
    ("roco", "cpu"), ("streaming_llm", "cpu"), ("tova", "torch"), ("gkv", "torch"),
    ("knorm", "torch"), ("roco", "torch"), ("streaming_llm", "torch"), ("tova", "cpu"),
    ("vatp_h2o", "torch"), ("keydiff", "torch"),
])  # fmt: skip
def test_a_compiled_step_is_an_eager_one(policy: str, backend: str, model: Any) -> None:
    """One graph without breaks, and what it does to tokens, slots, columns and length is what an eager step does."""
    ours, theirs = (policies.make(policy, model, budget=BUDGET, backend=backend, **MORE.get(policy, {})) for _ in range(2))
    assert ours.is_compileable
    tokens = decode(model, whole(model), ours, 12)
    assert torch.equal(tokens, decode(model, model, theirs, 12))
    assert counters["stats"]["unique_graphs"] == 1
    assert_same_slots(ours, theirs)
    assert [layer.length for layer in ours.layers] == [PROMPT + 12] * 2


@pytest.mark.parametrize(
    ("layout", "backend"),
    [("roco_stored_in_blocks", "cpu"), ("halves", "cpu"), ("paged", "cpu"), ("paged", "torch")],
)
def test_a_compiled_step_in_every_layout(layout: str, backend: str, model: Any) -> None:
    """Slots in blocks, whose pool and table stay where they are; keys' halves kept beside them; both."""
    ours, theirs = (policies.make(layout, model, budget=BUDGET, backend=backend) for _ in range(2))
    assert ours.is_compileable
    forward = whole(model)
    with torch._dynamo.config.patch(error_on_recompile=True):
        tokens = decode(model, forward, ours, 12)
    assert torch.equal(tokens, decode(model, model, theirs, 12))
    assert counters["stats"]["unique_graphs"] == 1
    assert_same_slots(ours, theirs)
    if layout == "paged":
        assert torch.equal(ours.layers[0].state.half_keys, theirs.layers[0].state.half_keys)


def test_a_budget_that_the_prompt_does_not_fill(model: Any) -> None:
    """It is compiled once all of it is allocated."""
    ours, theirs = (policies.make("h2o", model, budget=2000, backend="cpu") for _ in range(2))
    with pytest.raises(torch._dynamo.exc.Unsupported, match="caches that grow"):
        decode(model, whole(model), ours, 2)
    ours.reset()
    ours.reserve()
    assert torch.equal(decode(model, whole(model), ours, 4), decode(model, model, theirs, 4))
    assert counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize("backend", ["cpu", "torch"])
def test_inductor(backend: str, model: Any) -> None:
    """The compiler that users have."""
    ours, theirs = (policies.make("roco", model, budget=BUDGET, backend=backend) for _ in range(2))
    assert torch.equal(decode(model, whole(model, "inductor"), ours, 24), decode(model, model, theirs, 24))
    assert_same_slots(ours, theirs)


# -- recompilation -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["cpu", "torch"])
@pytest.mark.parametrize(
    "policy", ["roco", "streaming_llm", "roco_stored_in_blocks", "streaming_blocks", "halves", "equip_h2o", "paged"]
)
def test_steps_are_compiled_once(policy: str, backend: str) -> None:
    """In every layout."""
    model, steps = zoo.make("Llama", num_hidden_layers=1), 1000 if (policy, backend) == ("roco", "cpu") else 200
    ours = policies.make(policy, model, budget=BUDGET, backend=backend)
    forward = whole(model)
    with torch._dynamo.config.patch(error_on_recompile=True):
        decode(model, forward, ours, steps)
        decode(model, forward, policies.make(policy, model, budget=BUDGET, backend=backend), 2)  # and none for another cache
    assert ours.get_seq_length() == PROMPT + steps
    assert counters["stats"]["unique_graphs"] == 1


def test_what_is_kept_beside_the_keys_stays_from_one_compiled_step_to_the_next() -> None:
    """A step in a graph works on a state of its own: what it allocated there was gone, and made again from all keys in every step."""
    model = zoo.make("Llama", num_hidden_layers=3)
    ours, theirs = (policies.make("roco_sparcas", model, budget=BUDGET, tokens=8, dims=4, backend="cpu") for _ in range(2))
    tokens = decode(model, whole(model), ours, 5)
    state = ours.layers[2].state
    assert state.selects and state.sketch_keys.numel() and state.copied.tolist() == [1, 1]
    assert torch.equal(tokens, decode(model, model, theirs, 5))
    assert_same_slots(ours, theirs)


# -- between graphs ----------------------------------------------------------------------------------------------------


def test_eager_and_compiled_steps_may_alternate(model: Any) -> None:
    """A cache knows how long it is, and checks what comes, after compiled steps as after eager ones."""
    ours, theirs = (policies.make("roco", model, budget=BUDGET, backend="cpu") for _ in range(2))
    compiled, calls = whole(model), iter(range(100))

    def alternating(*args: Any, **kwargs: Any) -> Any:
        return (compiled if next(calls) % 3 else model)(*args, **kwargs)

    assert torch.equal(decode(model, alternating, ours, 9), decode(model, model, theirs, 9))
    assert_same_slots(ours, theirs)
    with pytest.raises(KvdslError, match=f"{PROMPT + 9} tokens that are cached|comes after {PROMPT + 9} cached"):
        model(zoo.prompt(2, 3), **with_cache(ours), position_ids=torch.arange(3)[None])
    ours.reset()
    assert ours.get_seq_length() == 0
    assert torch.equal(
        decode(model, compiled, ours, 9), decode(model, model, policies.make("roco", model, budget=BUDGET), 9)
    )


@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
def test_gradients_are_refused_in_graphs_as_well(compiler: str, model: Any) -> None:
    """One graph, with the error where a backward runs, not where it is traced; none of the slots has a gradient."""
    cache = policies.make("roco", model, budget=BUDGET, backend="cpu")
    decode(model, model, cache, 2)
    logits = whole(model, compiler)(zoo.prompt(2, 1), **with_cache(cache), **zoo.place(model, PROMPT + 2)).logits
    assert not any(tensor.requires_grad for tensor in cache.layers[0].state.tensors().values())
    with pytest.raises(KvdslError, match=r"gradients do not pass through"):
        logits.sum().backward()


@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
def test_gradients_of_what_was_cached_before_are_refused_in_graphs_as_well(compiler: str) -> None:
    """A frozen model's decoded token, behind compiled ones that gradients could be wanted of, which are one graph."""
    model = zoo.make("Llama")
    cache = policies.make("roco", model, budget=BUDGET, backend="cpu")
    decode(model, model, cache, 2)
    compiled = whole(model, compiler)
    for step in range(3):
        compiled(zoo.prompt(2, 1), **with_cache(cache), **zoo.place(model, PROMPT + 2 + step))
    assert counters["stats"]["unique_graphs"] == 1
    model.requires_grad_(False)
    model.lm_head.weight.requires_grad_(True)
    logits = compiled(zoo.prompt(2, 1), **with_cache(cache), **zoo.place(model, PROMPT + 5)).logits
    with pytest.raises(KvdslError, match=r"gradients do not pass through"):
        logits.sum().backward()


def test_a_cache_that_grows_cannot_be_compiled_whole(model: Any) -> None:
    """It says so beforehand, and the compiler's error names the reason."""
    cache = policies.make("full", model)
    assert not cache.is_compileable
    with pytest.raises(Exception, match="caches that grow are served outside of kvdsl's graphs"):
        decode(model, whole(model), cache, 1)


def test_where_the_graph_may_break_a_cache_that_grows_is_served() -> None:
    """Correctly, with every layer outside of the graph."""
    model = zoo.make("Llama", num_hidden_layers=1)
    ours, theirs = policies.make("full", model), policies.make("full", model)
    broken = torch.compile(model.forward, backend="eager")
    assert torch.equal(decode(model, broken, ours, 2), decode(model, model, theirs, 2))
    assert counters["graph_break"]


# -- generate ----------------------------------------------------------------------------------------------------------


def everywhere() -> CompileConfig:
    """transformers compiles on accelerators only, unless told otherwise."""
    config = CompileConfig(backend="eager", mode=None, fullgraph=True, dynamic=False)
    config._compile_all_devices = True
    return config


def test_generate_compiles_by_itself(model: Any) -> None:
    """transformers' auto-compilation: padded rows, one graph for all steps and for the next cache."""
    rows = [zoo.prompt(1, PROMPT)[0], zoo.prompt(1, 14, seed=3)[0]]
    run = lambda **options: zoo.greedy(  # noqa: E731
        model,
        zoo.left_padded(rows),
        8,
        cache=policies.make("roco", model, budget=BUDGET, backend="cpu"),
        **options,
    )
    expected = run()
    with torch._dynamo.config.patch(error_on_recompile=True):
        found = [run(compile_config=everywhere()) for _ in range(2)]
    assert counters["stats"]["unique_graphs"] == 1
    for tokens, logits in found:
        assert torch.equal(tokens, expected[0])
        torch.testing.assert_close(logits, expected[1])


def test_generate_does_not_compile_what_grows(model: Any) -> None:
    zoo.greedy(model, zoo.plain(zoo.prompt(1, 4)), 3, cache=policies.make("full", model), compile_config=everywhere())
    assert not counters["stats"]


# -- the operator ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["roco", "streaming_llm", "roco_sparcas", "paged"])
def test_the_operator_says_what_it_does(policy: str, model: Any) -> None:
    """Its schema, its shapes and its functional form, as torch checks them."""
    cache = policies.make(policy, model, budget=BUDGET, backend="cpu")
    decode(model, model, cache, 2)
    layer = cache.layers[0]
    heads = model.config.num_attention_heads, model.config.num_key_value_heads
    query, key, value = (torch.randn(2, n, 1, layer.state.keys.shape[-1]) for n in (heads[0], heads[1], heads[1]))
    call = graph.AttentionCall(query, key, value, torch.tensor([[True], [False]]), 0.25, rope=layer.rope)
    arguments, constants = graph.arguments(layer.backend, layer.state, call), graph.constants(layer.state, call)
    torch.library.opcheck(torch.ops.kvdsl.decode.default, arguments, constants, test_utils=CHECKS)


CHECKS = ("test_schema", "test_faketensor", "test_aot_dispatch_static")
"""The others are about gradients, which the operator never has, and sizes that a graph does not know."""
