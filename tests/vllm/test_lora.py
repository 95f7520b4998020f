"""Requests with an adapter (LoRA) and without, together: each gets what kvdsl gives in transformers with the adapter merged, or without."""

from __future__ import annotations

import gc
import json
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

pytest.importorskip("vllm", reason="`make test-vllm` runs this in an environment that has vLLM")
from safetensors.torch import save_file
from vllm import LLM
from vllm.lora.request import LoRARequest

from tests.vllm.alone import NEAR, alone, reference
from tests.vllm.test_serving import check, engine, kept_in_pages, logprobs, wanted
from tests.vllm.texts import prompts

RANK, ALPHA = 8, 16
PARTS = ("q_proj", "k_proj", "v_proj", "o_proj")


class Adapted(NamedTuple):
    """An engine that knows an adapter, and the model with that merged into it."""

    llm: LLM
    adapter: LoRARequest
    merged: Any


@pytest.fixture(scope="module")
def adapted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Adapted]:
    place = tmp_path_factory.mktemp("adapter")
    merged = adapt(place)
    # Room for one more than there are: vLLM 0.32 for CPUs takes the last one for requests that ask for none beside others that do.
    llm = engine("h2o", enable_lora=True, max_lora_rank=RANK, max_loras=2)
    yield Adapted(llm, LoRARequest("adapter", 1, str(place)), merged)
    del llm
    gc.collect()


def adapt(place: Path) -> Any:
    """The reference model with an adapter of random numbers, which is written to a folder as PEFT does."""
    merged, generator, tensors = deepcopy(reference()[0]), torch.Generator().manual_seed(3), {}
    for name, part in merged.named_modules():
        if name.endswith(PARTS):
            rows, columns = part.weight.shape
            down, up = (torch.randn(shape, generator=generator) / 16 for shape in ((RANK, columns), (rows, RANK)))
            tensors |= {f"base_model.model.{name}.lora_{which}.weight": x for which, x in (("A", down), ("B", up))}
            part.weight.data += ALPHA / RANK * up @ down
    save_file(tensors, place / "adapter_model.safetensors")
    told = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "target_modules": PARTS, "bias": "none"}
    (place / "adapter_config.json").write_text(json.dumps(told))
    return merged


def test_each_request_has_the_adapter_that_it_asks_for(adapted: Adapted) -> None:
    """The same texts with the adapter and without, in the same steps."""
    llm, adapter, merged = adapted
    asked = [(text, lora) for text in prompts()[::2] for lora in (adapter, None)]
    out = llm.generate(
        [{"prompt_token_ids": text} for text, _ in asked], wanted(), lora_request=[lora for _, lora in asked], use_tqdm=False
    )
    answers, pages = logprobs(out), kept_in_pages(llm)
    for answer, (text, lora) in zip(answers, asked, strict=True):
        own, other = (merged, reference()[0]) if lora else (reference()[0], merged)
        check("h2o", [text], [answer], pages, own)
        tokens, found = answer
        assert np.abs(np.array(found) - alone("h2o", text, tokens, other)[0]).max() > 100 * NEAR
