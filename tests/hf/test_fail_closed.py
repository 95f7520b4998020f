"""A forward that is given a cache of ours goes through it, or ends in an error, however the model is called and whatever it does itself."""

from __future__ import annotations

import copy
import io
import pickle
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import DynamicCache
from transformers.masking_utils import create_causal_mask

import kvdsl
from kvdsl.errors import KvdslError
from kvdsl.runtime.hf.mask import SlotMask
from kvdsl.runtime.hf.versions import CACHE, cache_of, with_cache
from tests.hf import policies, zoo
from tests.quick import few

BUDGET = 16


def h2o(model: Any, **options: Any) -> Any:
    return policies.make("h2o", model, **{"budget": BUDGET, **options})


# -- a model that drops its cache --------------------------------------------------------------------------------------

SWITCHING = {"original_max_position_embeddings": 32, "max_position_embeddings": 512}
"""Behind 32 tokens such a model begins to read its text anew, and leaves its cache out of the inputs that it prepares."""

_FACTORS = {"short_factor": [1.0] * 8, "long_factor": [4.0] * 8}
LONGROPE = (
    {"rope_scaling": {"type": "longrope", **_FACTORS}}
    if zoo.EARLY
    else {"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4, **_FACTORS}}
)

MOE = {"num_local_experts": 2, "num_experts_per_tok": 1, "router_jitter_noise": 0.0, "input_jitter_noise": 0.0}


@pytest.mark.parametrize(("stem", "extra"), [("Phi3", {}), *([] if zoo.EARLY else [("Phimoe", MOE)])], ids=str)
@pytest.mark.parametrize("prompt", [60, 28])
def test_a_cache_that_the_model_drops(stem: str, extra: dict[str, Any], prompt: int) -> None:
    """Its frequencies stay what they are, so there is no reason to read the text anew."""
    model, ids = zoo.make(stem, **SWITCHING, **extra), zoo.prompt(1, prompt)
    cache = h2o(model)
    out = model.generate(ids, **with_cache(cache), max_new_tokens=8, do_sample=False, return_dict_in_generate=True)
    assert cache_of(dict(out)) is cache
    assert cache.get_seq_length() == prompt + 7
    assert all((cache.positions(layer) >= 0).sum(-1).eq(BUDGET).all() for layer in range(2))
    # the same text, token by token and without `generate`
    other = h2o(model)
    with torch.no_grad():
        logits = model(ids, **with_cache(other)).logits[:, -1:]
        for token in out.sequences[:, prompt:-1].split(1, dim=1):
            assert logits.argmax(-1).equal(token)
            logits = model(token, **with_cache(other)).logits
    assert all(other.positions(layer).equal(cache.positions(layer)) for layer in range(2))


@pytest.mark.parametrize("prompt", [60, 28])
def test_a_text_that_grows_into_other_frequencies_is_read_anew(prompt: int) -> None:
    """As with transformers' own cache."""
    switching = {**SWITCHING, **copy.deepcopy(LONGROPE)}
    model, other = zoo.make("Phi3", **switching), zoo.make("Phi3", **switching)
    cache, ids = h2o(model, budget=200), zoo.prompt(1, prompt)
    ours = model.generate(ids, **with_cache(cache), max_new_tokens=12, do_sample=False, return_dict_in_generate=True)
    assert cache_of(dict(ours)) is cache
    assert cache.get_seq_length() == prompt + 11
    assert ours.sequences.equal(other.generate(ids, max_new_tokens=12, do_sample=False))


@pytest.mark.nightly
def test_a_text_that_grows_into_other_frequencies_with_guesses() -> None:
    switching = {**SWITCHING, **copy.deepcopy(LONGROPE)}
    model = zoo.make("Phi3", **switching)
    cache = h2o(model, budget=200)
    cache.activate_past_recording()
    with pytest.raises(KvdslError, match=r"other frequencies from here on, so that the 32 cached tokens"):
        model.generate(zoo.prompt(1, 30), **with_cache(cache), max_new_tokens=9, do_sample=False)


class _Forgetful(transformers.LlamaForCausalLM):
    """Gives its layers no cache."""

    forgets = False

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.forgets:
            kwargs[CACHE] = None
        return super().forward(*args, **kwargs)


def forgetful() -> Any:
    made = _Forgetful(zoo.untouched("llama").config).eval()
    made.load_state_dict(zoo.untouched("llama").state_dict())
    return made


def test_a_forward_that_ends_without_its_cache() -> None:
    model = forgetful()
    cache = h2o(model)
    with torch.no_grad():
        model(zoo.prompt(1, 9), **with_cache(cache))
        model.forgets = True
        with pytest.raises(KvdslError, match=r"_Forgetful was given a kvdsl cache and ran without it in layers \[0, 1\]"):
            model(zoo.prompt(1, 1), **with_cache(cache))
        model.forgets = False
        model(zoo.prompt(1, 1), **with_cache(cache))
    assert cache.get_seq_length() == 10


def test_a_layer_that_is_left_out() -> None:
    model = zoo.make("Llama", num_hidden_layers=3)
    cache = h2o(model)
    model.model.layers[1].self_attn.forward = lambda hidden_states, **kwargs: (hidden_states, None)
    with torch.no_grad(), pytest.raises(KvdslError, match=r"interrupted between two layers|without it in layers \[1\]"):
        model(zoo.prompt(1, 9), **with_cache(cache))


# -- a prompt that runs again ------------------------------------------------------------------------------------------


def with_logits(far: bool) -> Any:
    """A model one of whose layers has logits that are too far from 0 to recompute probabilities from, or has none."""
    model = zoo.make("Llama")
    with torch.no_grad():
        model.model.layers[1].self_attn.q_proj.weight.mul_(1e4 if far else 1.0)
    return model


@pytest.mark.parametrize("far", [False, True])
def test_a_prompt_runs_again_where_its_numbers_may_be_wrong(far: bool) -> None:
    """Once, and leaves what it leaves where each layer asks for itself."""
    model, ids, runs = with_logits(far), zoo.prompt(2, 40), []
    mask = torch.arange(40) >= torch.tensor([[0], [9]])
    caches = [h2o(model, backend="torch") for _ in range(2)]
    caches[1]._sync.may_run_again = False
    model.model.layers[0].register_forward_pre_hook(lambda *_: runs.append(1))
    tokens, longer = ids[:, -1:], torch.cat([mask, mask[:, -1:]], 1)
    with torch.no_grad():
        outs = [model(ids, attention_mask=mask, **with_cache(cache)).logits for cache in caches]
        assert len(runs) == 2 + far
        outs += [model(tokens, attention_mask=longer, **with_cache(cache)).logits for cache in caches]
    assert len(runs) == 4 + far and outs[0].equal(outs[1]) and outs[2].equal(outs[3])
    for layer in range(2):
        states = [cache.state(layer) | {"position": cache.positions(layer)} for cache in caches]
        assert all(x.equal(states[1][name]) for name, x in states[0].items())
    assert {cache.get_seq_length() for cache in caches} == {41}


@pytest.mark.parametrize("far", [False, True])
def test_a_prompt_that_ends_before_its_numbers_are_checked(far: bool) -> None:
    """Where they are right, the cache goes on, as it does behind a head that fails."""
    model, ids = with_logits(far), zoo.prompt(1, 40)
    cache = h2o(model, backend="torch")
    failing = model.lm_head.register_forward_pre_hook(lambda *_: 1 / 0)
    with torch.no_grad():
        with pytest.raises(ZeroDivisionError):
            model(ids, **with_cache(cache))
        failing.remove()
        for _ in range(2 if far else 0):
            with pytest.raises(KvdslError, match=r"interrupted before its end: call `cache.reset\(\)`"):
                model(ids[:, :1], **with_cache(cache))
        if far:
            cache.reset()
            model(ids, **with_cache(cache))
        model(ids[:, :1], **with_cache(cache))
    assert cache.get_seq_length() == 41


# -- training ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", few(["llama", "gemma3", "gpt_oss", "mistral-windowed"], "gemma3"))
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_no_query_sees_the_future_in_training(family: str, attention: str) -> None:
    """Checkpointed layers get no cache, with a mask that was made for one."""
    stem, sizes = zoo.FAMILIES[family]
    model = zoo.make(stem, **sizes, attn_implementation="eager" if family == "gpt_oss" else attention)
    cache = h2o(model, budget=64)
    rows = zoo.prompt(2, 20)
    inputs = zoo.left_padded([rows[0], rows[1, :9]])
    labels = inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, -100)
    model.train()
    getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
    with pytest.raises(
        KvdslError, match="gradient checkpointing runs the layers of a model in training mode without the cache"
    ):
        model(**inputs, labels=labels, **with_cache(cache))
    model.eval()
    model(**inputs, **with_cache(cache))


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("padded", [True, False])
def test_a_mask_for_slots_is_causal_by_itself(attention: str, padded: bool) -> None:
    """Whatever attention reads it."""
    model = zoo.make("Llama", attn_implementation=attention)
    cache = h2o(model)
    rows = zoo.prompt(2, 12)
    inputs = zoo.left_padded([rows[0], rows[1, :7]]) if padded else {"input_ids": rows, "attention_mask": None}
    embedded = model.get_input_embeddings()(inputs["input_ids"])
    ours, theirs = (
        create_causal_mask(
            config=model.config, attention_mask=inputs["attention_mask"], position_ids=None, **given,
            **({"inputs_embeds": embedded} if not zoo.EARLY else {"input_embeds": embedded, "cache_position": torch.arange(12)}),
        )
        for given in (with_cache(cache), with_cache(DynamicCache(config=model.config)))
    )  # fmt: skip
    if theirs is None:
        assert ours is None or torch.equal(ours[:, :, :, :], torch.ones(2, 1, 12, 12, dtype=torch.bool).tril())
        return
    assert isinstance(ours, SlotMask)
    assert ours.shape == theirs.shape
    assert ours.dtype == theirs.dtype
    text = torch.ones(2, 12).bool() if inputs["attention_mask"] is None else inputs["attention_mask"].bool()
    assert (
        ours[:, :, :, :].transpose(1, 2)[text].equal(theirs.transpose(1, 2)[text])
    )  # what padding sees is nobody's business
    query = torch.randn(2, 4, 12, 16)
    if attention == "sdpa":
        mine, other = (
            torch.nn.functional.scaled_dot_product_attention(query, query, query, attn_mask=x) for x in (ours, theirs)
        )
    else:
        mine, other = ((query @ query.transpose(2, 3) + x).softmax(-1) @ query for x in (ours, theirs))
    assert (mine - other).transpose(1, 2)[text].abs().max() < 1e-6


# -- threads -----------------------------------------------------------------------------------------------------------


@pytest.mark.nightly
def test_threads_that_make_a_models_first_caches_together() -> None:
    """None of them fails, and a thread that knows nothing of kvdsl goes on as before."""
    model, other = zoo.make("Llama", num_hidden_layers=4), zoo.make("Llama", num_hidden_layers=4)
    other.set_attn_implementation("eager")
    ids = [zoo.prompt(1, 20, seed=seed) for seed in range(6)]
    with torch.no_grad():
        expected = [other(text).logits for text in ids]
    texts = [zoo.greedy(other, zoo.plain(text), 6)[0] for text in ids]
    ready = Barrier(6)

    def generates(index: int) -> bool:
        ready.wait()
        cache = h2o(model, budget=200)
        return bool(torch.equal(zoo.greedy(model, zoo.plain(ids[index]), 6, cache=cache)[0], texts[index]))

    def reads(index: int) -> bool:
        ready.wait()
        with torch.no_grad():
            found = [model(text).logits for _ in range(4) for text in ids]
        return all(bool((a - b).abs().max() < 1e-4) for a, b in zip(found, expected * 4, strict=True))

    with ThreadPoolExecutor(6) as pool:
        jobs = [pool.submit(generates if index % 2 else reads, index) for index in range(6)]
        assert all(job.result() for job in jobs)


def test_making_a_cache_changes_nothing_that_others_see() -> None:
    """Neither attributes nor modes nor names, at any moment of the first look at a model."""
    model = zoo.make("Llama").train()
    before = pickle.dumps(model)
    seen: list[bytes] = []

    def look(*args: Any) -> None:
        names = [(type(module).__name__, module.training) for module in model.modules()]
        seen.append(pickle.dumps((names, model.config._attn_implementation, sorted(vars(model)))))

    expected = (look(), seen.pop())[1]
    handle = torch.nn.modules.module.register_module_forward_pre_hook(look)
    try:
        cache = h2o(model)
    finally:
        handle.remove()
    assert seen
    assert all(one == expected for one in seen)
    assert pickle.dumps(model) == before
    assert cache.get_seq_length() == 0


def test_two_models_that_share_a_config() -> None:
    first = zoo.make("Llama")
    second = type(first)(first.config).eval()
    caches = h2o(first, budget=200), h2o(second, budget=200)
    texts = [
        zoo.greedy(model, zoo.plain(zoo.prompt(1, 12)), 6, cache=c)[0]
        for model, c in zip((first, second), caches, strict=True)
    ]
    plain = [zoo.greedy(copy.deepcopy(model), zoo.plain(zoo.prompt(1, 12)), 6)[0] for model in (first, second)]
    assert all(a.equal(b) for a, b in zip(texts, plain, strict=True))


# -- masks -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["torch", "cpu"])
@pytest.mark.parametrize("family", few(["llama", "qwen3", "phi3", "gemma2"], "gemma2"))
def test_a_ready_made_mask_at_a_step(family: str, backend: str) -> None:
    """One that hides cached tokens is refused; one that hides nothing, or says nothing of them, works."""
    model = zoo.model(family)
    ids = zoo.prompt(2, 12)
    mask = torch.ones(2, 1, 1, 12, dtype=torch.bool)
    logits = []
    for given in (None, mask, torch.ones(2, 1, 1, 1, dtype=torch.bool)):
        if family == "gemma2" and given is mask:
            continue  # its layers with a window have other columns
        cache = h2o(model, budget=64, backend=backend)
        with torch.no_grad():
            model(ids[:, :-1], **with_cache(cache))
            logits.append(model(ids[:, -1:], attention_mask=given, **with_cache(cache)).logits)
    assert all((one - logits[0]).abs().max() < 1e-5 for one in logits)
    hiding = mask.clone()
    hiding[1, ..., 3:6] = False
    cache = h2o(model, budget=64, backend=backend)
    with torch.no_grad():
        model(ids[:, :-1], **with_cache(cache))
        with pytest.raises(
            (KvdslError, RuntimeError), match=r"row 1 of the attention mask leaves out 3 of 11 tokens|must match"
        ):
            model(ids[:, -1:], attention_mask=hiding, **with_cache(cache))


def test_ready_made_masks_of_a_prompt() -> None:
    """A causal one is what kvdsl serves, padding aside; any other is refused."""
    model, ids = zoo.model("llama"), zoo.prompt(2, 8)
    causal = torch.ones(2, 1, 8, 8, dtype=torch.bool).tril()
    causal[1, ..., :3] = False
    padded = torch.ones(2, 8, dtype=torch.long)
    padded[1, :3] = 0
    with torch.no_grad():
        expected = model(ids, attention_mask=padded, **with_cache(h2o(model))).logits
        found = model(ids, attention_mask=causal, **with_cache(h2o(model))).logits
        assert found[0].equal(expected[0])
        for other in (
            causal.float(),
            ~causal,
            torch.ones(2, 1, 1, 8, dtype=torch.bool),
            torch.ones(2, 1, 8, 8, dtype=torch.bool),
        ):
            with pytest.raises(KvdslError, match="ready-made mask"):
                model(ids, attention_mask=other, **with_cache(h2o(model)))


# -- by position, and inner models -------------------------------------------------------------------------------------


def by_position(model: Any, ids: Tensor, mask: Tensor | None, cache: Any) -> Any:
    """A forward whose arguments have no names."""
    return model(ids, mask, None, cache)


@pytest.mark.parametrize("inner", [False, True])
@pytest.mark.parametrize("position", [False, True])
def test_a_mask_that_hides_what_is_cached(inner: bool, position: bool) -> None:
    model, ids = zoo.model("llama"), zoo.prompt(1, 14)
    cache, part = h2o(model), model.model if inner else model
    call = by_position if position else lambda one, ids, mask, cache: one(ids, attention_mask=mask, **with_cache(cache))
    mask = torch.ones(1, 14, dtype=torch.long)
    with torch.no_grad():
        call(part, ids[:, :10], mask[:, :10], cache)
        mask[0, 2:5] = 0
        for end in (11, 14):
            with pytest.raises(KvdslError, match="row 0 of the attention mask leaves out 3 of 10 tokens"):
                call(part, ids[:, 10:end], mask[:, :end], cache)


@pytest.mark.parametrize("inner", [False, True])
@pytest.mark.parametrize("position", [False, True])
def test_an_unrelated_text_is_noticed(inner: bool, position: bool) -> None:
    model = zoo.model("llama")
    cache, part = h2o(model), model.model if inner else model
    with torch.no_grad():
        if position:
            by_position(part, zoo.prompt(1, 10), None, cache)
        else:
            part(zoo.prompt(1, 10), **with_cache(cache))
    with pytest.raises(KvdslError, match="does not continue the cached one"):
        model.generate(zoo.prompt(1, 20, seed=5), **with_cache(cache), max_new_tokens=2)


# -- refused for the wrong reason --------------------------------------------------------------------------------------


def test_float16_where_only_eager_attention_overflows() -> None:
    """The look at a model goes by the attention that it has."""
    model = zoo.make("Llama", attn_implementation="sdpa").half()
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.q_proj.weight.mul_(300)
            layer.self_attn.k_proj.weight.mul_(300)
    eager = copy.deepcopy(model)
    eager.set_attn_implementation("eager")
    with torch.no_grad():
        assert model(zoo.prompt(1, 7)).logits.isfinite().all()
        assert not eager(zoo.prompt(1, 7)).logits.isfinite().all()
    h2o(model)
    with pytest.raises(KvdslError, match="its logits are not finite under its own attention"):
        h2o(eager)


@pytest.mark.nightly
def test_linears_that_are_quantised_dynamically() -> None:
    model = torch.ao.quantization.quantize_dynamic(zoo.make("Llama"), {torch.nn.Linear}, dtype=torch.qint8)
    ids = zoo.prompt(1, 20)
    cache = h2o(model, budget=200)
    with torch.no_grad():
        ours, theirs = (
            torch.cat([model(ids[:, :15], **with_cache(c)).logits, model(ids[:, 15:16], **with_cache(c)).logits], 1)
            for c in (cache, DynamicCache(config=model.config))
        )
    assert (ours - theirs).norm() < 0.01 * theirs.norm()


@pytest.mark.nightly
@pytest.mark.parametrize("how", ["cpu", "disk"])
def test_weights_that_are_brought_for_each_forward(how: str, tmp_path: Any) -> None:
    """Such a model is looked at like any other, and its caches fit the same weights, wherever these lie."""
    accelerate = pytest.importorskip("accelerate")
    model, other = zoo.make("Llama"), zoo.make("Llama")
    if how == "cpu":
        model = accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
    else:
        model = accelerate.disk_offload(model, tmp_path, execution_device=torch.device("cpu"))
    ids = zoo.prompt(1, 20)
    expected = other.generate(ids, max_new_tokens=5, do_sample=False)
    for policy in ("h2o", "streaming_llm"):  # the latter turns keys
        cache = policies.make(policy, model, budget=64)
        assert model.generate(ids, **with_cache(cache), max_new_tokens=5, do_sample=False).equal(expected)
        for attached in (other, model):
            pickle.loads(pickle.dumps(cache)).attach(attached)
    stranger = zoo.make("Llama")
    torch.nn.init.normal_(stranger.lm_head.weight)
    with pytest.raises(KvdslError, match="with other weights"):
        pickle.loads(pickle.dumps(cache)).attach(stranger)
    with torch.no_grad():
        other.lm_head.weight.flatten()[0] += 1
    own = policies.make("h2o", other, budget=64)
    with pytest.raises(KvdslError, match="with other weights"):
        pickle.loads(pickle.dumps(own)).attach(model)


@pytest.mark.nightly
def test_a_model_that_is_saved_while_a_cache_lives() -> None:
    """It arrives where nobody knows kvdsl."""
    model = zoo.make("Llama")
    learned = kvdsl.compile(
        'kv 1\npolicy Learned {\n  "A test."\n  param budget = 6\n  given importance\n  score importance\n}\n'
    )
    caches = h2o(model), learned(model, importance=lambda module, hidden: hidden[:, None, :, 0])
    for cache in caches:
        model(zoo.prompt(1, 9), **with_cache(cache))
    file = io.BytesIO()
    torch.save(model, file)
    assert b"kvdsl" not in file.getvalue()
    program = (
        "import io, sys, torch; model = torch.load(io.BytesIO(sys.stdin.buffer.read()), weights_only=False); "
        "print(model(torch.tensor([[5, 6, 7]])).logits.sum().item()); assert 'kvdsl' not in sys.modules"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], input=file.getvalue(), capture_output=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr.decode()
    assert abs(float(done.stdout) - model(torch.tensor([[5, 6, 7]])).logits.sum().item()) < 1e-3


def test_a_chunk_that_ends_in_a_gap_of_the_mask() -> None:
    model = zoo.model("llama")
    ids, mask = zoo.prompt(2, 24), torch.ones(2, 24, dtype=torch.long)
    mask[0, 6:9] = 0  # the first chunk of eight ends in it
    inputs = {"input_ids": ids, "attention_mask": mask}
    theirs = DynamicCache(config=model.config)
    expected, _ = zoo.greedy(model, inputs, 6, cache=theirs, prefill_chunk_size=8)
    found, _ = zoo.greedy(model, inputs, 6, cache=h2o(model, budget=200), prefill_chunk_size=8)
    assert found.equal(expected)
    mask[1, -2:] = 0
    with pytest.raises(KvdslError, match="row 1 of the prompt is padded on the right"):
        zoo.greedy(model, inputs, 6, cache=h2o(model, budget=200), prefill_chunk_size=8)


def test_the_reason_of_a_refusal_is_the_first_one() -> None:
    """What is wrong with a model hides behind nothing that follows from it."""
    model = forgetful()
    attend = model.model.layers[0].self_attn.forward

    def biased(*args: Any, **kwargs: Any) -> Any:
        return attend(*args, **{**kwargs, "attention_mask": torch.zeros(1, 1, 1, 1)})

    model.model.layers[0].self_attn.forward = biased
    with pytest.raises(KvdslError, match="cannot be served: attention was given a ready-made mask"):
        h2o(model)


def test_padding_behind_text_where_every_layer_has_a_window() -> None:
    """transformers' windows count the columns of a gap, and slots do not hold them."""
    model, ids = zoo.model("mistral-windowed"), zoo.prompt(2, 24)
    gap, left = torch.ones(2, 24, dtype=torch.long), torch.ones(2, 24, dtype=torch.long)
    gap[1, 6:9], left[1, :5] = 0, 0
    with torch.no_grad():
        for cut in (24, 12, 7):
            cache = h2o(model, budget=64)
            with pytest.raises(
                KvdslError, match="row 1 has padding behind text, but every layer of the model attends within 8 tokens"
            ):
                for begin, end in ((0, cut), (cut, 24)):
                    model(ids[:, begin:end], attention_mask=gap[:, :end], **with_cache(cache))
        logits = [
            [model(ids[:, a:b], attention_mask=left[:, :b], **with_cache(cache)).logits for a, b in ((0, 12), (12, 24))]
            for cache in (h2o(model, budget=64), DynamicCache(config=model.config))
        ]
    text = left.bool()
    assert (torch.cat(logits[0], 1)[text] - torch.cat(logits[1], 1)[text]).abs().max() < 1e-3


@pytest.mark.nightly
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_ready_made_masks_in_a_compiled_step(attention: str) -> None:
    """A graph cannot look at a mask's numbers, so one with a column for each cached token is no mask of ours there."""
    model = zoo.make("Llama", attn_implementation=attention)
    compiled, ids = torch.compile(model, backend="eager"), zoo.prompt(2, 12)
    padded = torch.ones(2, 12, dtype=torch.long)
    padded[1, :3] = 0
    logits = []
    for run in (model, compiled):
        cache = h2o(model, budget=16, backend="torch")
        with torch.no_grad():
            out = [run(ids[:, :5], attention_mask=padded[:, :5], **with_cache(cache)).logits]
            out += [run(ids[:, 5:11], attention_mask=padded[:, :11], **with_cache(cache)).logits]
            logits.append([*out, run(ids[:, 11:], attention_mask=padded, **with_cache(cache)).logits])
    text = padded.bool()
    assert (torch.cat(logits[0], 1)[text] - torch.cat(logits[1], 1)[text]).abs().max() < 1e-5
    hiding = torch.ones(2, 1, 1, 13, dtype=torch.bool)
    hiding[0, ..., 4:6] = False
    with torch.no_grad(), pytest.raises((KvdslError, RuntimeError), match=r"ready-made mask|leaves out 2 of 12"):
        compiled(ids[:, :1], attention_mask=hiding, **with_cache(cache))


@pytest.mark.skipif(CACHE == "cache", reason="this release knows both names")
def test_a_name_that_this_release_does_not_know() -> None:
    """It is swallowed with whatever else a forward is given."""
    model = zoo.model("llama")
    with torch.no_grad(), pytest.raises(KvdslError, match="pass it as `past_key_values=cache`, its name in this release"):
        model(zoo.prompt(1, 9), cache=h2o(model))


def test_a_cap_that_the_models_own_attention_drops() -> None:
    """transformers 4.57 lets Gemma 2 have `sdpa`; later releases fail at its first forward."""
    stem, sizes = zoo.FAMILIES["gemma2"]
    model = zoo.make(stem, **sizes)
    model.config._attn_implementation = "sdpa"
    with pytest.raises(KvdslError, match=r"caps its attention's logits, which `sdpa` does not: call `model\.set_attn_impl"):
        h2o(model)
