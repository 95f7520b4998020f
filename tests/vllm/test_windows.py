"""Models with sliding windows and sinks do in vLLM what they do in transformers, whichever of their layers the policy serves."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

pytest.importorskip("vllm", reason="`make test-vllm` runs this in an environment that has vLLM")
from transformers import AutoModelForCausalLM
from vllm import LLM
from vllm.v1.kv_cache_interface import ChunkedLocalAttentionSpec, FullAttentionSpec, SlidingWindowSpec

from kvdsl.errors import KvdslError
from kvdsl.integrations.vllm.ledger import Ledger
from kvdsl.integrations.vllm.page import page
from kvdsl.integrations.vllm.refusals import refuse_layer
from kvdsl.integrations.vllm.settings import Settings
from tests.hf import zoo
from tests.vllm.alone import BUDGET, NEAR, alone
from tests.vllm.test_serving import AT_ONCE, LONGEST, check, engine, kept_in_pages, logprobs, sets, wanted
from tests.vllm.texts import prompts

HEADS, DIM = 2, 32
"""Of keys and values in each of these models."""

SLIDING, FULL = "sliding_attention", "full_attention"

_GEMMA = {"head_dim": DIM, "query_pre_attn_scalar": DIM}

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma3": ("Gemma3Text", {**_GEMMA, "sliding_window": 100, "layer_types": [SLIDING, SLIDING, FULL] * 2}),
    "gemma2": ("Gemma2", {**_GEMMA, "sliding_window": 24, "layer_types": [SLIDING, FULL] * 2}),
    "gpt_oss": (
        "GptOss",
        {
            "head_dim": DIM,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": 24,
            "layer_types": [SLIDING, FULL] * 2,
        },
    ),
    "mistral": ("Mistral", {"head_dim": DIM, "sliding_window": 100, "num_hidden_layers": 3}),
}
"""Windows that are longer than the budget, and shorter; one in every layer, which the policy then serves; sinks beside them."""


class Served(NamedTuple):
    """An engine, and what it serves.

    Attributes:
        windowed: the layers that the policy does not serve.
    """

    policy: str
    place: Path
    model: Any
    windowed: list[int]
    llm: LLM


def made(family: str, place: Path) -> Path:
    """A folder with a small model."""
    stem, extra = MODELS[family]
    sizes = {"vocab_size": 4096, "initializer_range": 0.1, "num_hidden_layers": len(extra.get("layer_types", ()))}
    zoo.make(stem, **{**sizes, **extra}).save_pretrained(place)
    return place


def read(place: Path, **changes: Any) -> Any:
    """The model of a folder as transformers serves it: `sdpa` leaves out a cap of logits, so that kvdsl refuses it there."""
    model = AutoModelForCausalLM.from_pretrained(place, **changes).eval()
    if getattr(model.config, "attn_logit_softcapping", None) is not None:
        model.set_attn_implementation("eager")
    return model


CASES = [
    ("gemma3", "h2o", AT_ONCE),
    ("gemma2", "roco", LONGEST),
    ("mistral", "h2o", AT_ONCE),
    ("gpt_oss", "h2o", AT_ONCE),
    ("gpt_oss", "tova", LONGEST),
]


@pytest.fixture(scope="module", params=CASES, ids=lambda case: case[0])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    family, policy, at_once = request.param
    place = made(family, tmp_path_factory.mktemp(family))
    kinds = MODELS[family][1].get("layer_types", ())
    windowed = [index for index, kind in enumerate(kinds) if kind == SLIDING]
    model = read(place)
    llm = engine(policy, at_once, place, skip_tokenizer_init=True)
    yield Served(policy, place, model, windowed, llm)
    del llm
    gc.collect()


def answers(served: Served, texts: list[list[int]]) -> list[tuple[list[int], list[float]]]:
    return logprobs(served.llm.generate([{"prompt_token_ids": text} for text in texts], wanted(), use_tqdm=False))


def test_requests_together_are_what_they_are_alone(served: Served) -> None:
    """A layer that keeps its window holds the last tokens; the others hold what the policy keeps, and only these count as evicted."""
    texts, ledger = prompts(), Ledger.find(0)
    assert ledger is not None
    before = ledger.evicted
    got = answers(served, texts)
    pages = kept_in_pages(served.llm)
    assert ledger.evicted - before == check(served.policy, texts, got, pages, served.model) > 0
    window = served.model.config.sliding_window
    for text, (tokens, _) in zip(texts, got, strict=True):
        read = len(text) + len(tokens) - 1
        for layer in served.windowed:
            assert [list(range(max(0, read - window), read))] * HEADS in [sets(held) for held in pages[layer]]


def test_another_window_says_other_things(served: Served) -> None:
    """The comparison above can fail: a window that is longer by one token is noticed."""
    text = prompts()[-1]
    ((tokens, found),) = answers(served, [text])
    window = served.model.config.sliding_window
    longer = read(served.place, sliding_window=window + 1)
    assert np.abs(np.array(found) - alone(served.policy, text, tokens, longer)[0]).max() > 100 * NEAR


def test_without_its_sinks_a_model_says_other_things(served: Served) -> None:
    """The comparison above can fail: logits that no head of them comes near are as if there were none."""
    if served.model.config.model_type != "gpt_oss":
        pytest.skip("a model without sinks")
    text = prompts()[-1]
    ((tokens, found),) = answers(served, [text])
    bare = read(served.place)
    for layer in bare.model.layers:
        layer.self_attn.sinks.data.fill_(-1e4)
    assert np.abs(np.array(found) - alone(served.policy, text, tokens, bare)[0]).max() > 100 * NEAR


def test_a_request_takes_the_pages_of_all_its_layers(served: Served) -> None:
    answers(served, prompts()[:1])
    ledger = Ledger.find(0)
    assert ledger is not None
    layers, windowed = served.model.config.num_hidden_layers, len(served.windowed)
    policy, window = (
        page(Settings(name, (("budget", budget),)), HEADS, DIM, torch.float32, layers=1, longest=LONGEST).bytes
        for name, budget in ((served.policy, BUDGET), ("window", served.model.config.sliding_window))
    )
    assert ledger.sizes.layers == layers
    assert ledger.sizes.request_bytes == (layers - windowed) * policy + windowed * window


def test_attention_in_chunks_is_refused() -> None:
    chunked = ChunkedLocalAttentionSpec(
        block_size=16, num_kv_heads=1, head_size=8, dtype=torch.float32, attention_chunk_size=64
    )
    with pytest.raises(
        KvdslError, match="ChunkedLocalAttentionSpec: kvdsl serves models in which every layer attends to the whole"
    ):
        refuse_layer(chunked, FullAttentionSpec, SlidingWindowSpec)
