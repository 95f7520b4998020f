"""Whole models with random weights: a tiny one whose text must be the same on every backend."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from scripts.gpu.setting import Setting, cache_class

BUDGET, PROMPT = 24, 40


def model_of(setting: Setting, dtype: torch.dtype, **sizes: int) -> Any:
    """A Llama with random weights, on the device."""
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(bos_token_id=1, eos_token_id=None, pad_token_id=0, **sizes)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(setting.device):
            model = transformers.LlamaForCausalLM(config)
    finally:
        torch.set_default_dtype(before)
    return model.eval()


def tiny(setting: Setting) -> Any:
    """Two layers, a group of two."""
    return model_of(
        setting, torch.float32, vocab_size=128, hidden_size=128, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=4096,
    )  # fmt: skip


def generated_alike(name: str, setting: Setting) -> Iterator[str]:
    """Greedy text of a tiny model under Triton, eager and as `generate` compiles it, and under torch, of a padded batch."""
    from kvdsl.runtime.hf.versions import with_cache

    model, cls = tiny(setting), cache_class(name)
    ids = torch.randint(1, 128, (2, PROMPT), device=setting.device)
    mask = torch.ones_like(ids)
    mask[1, :7] = 0
    given = {"budget": BUDGET} if "budget" in cls.spec.params else {"tokens": BUDGET / 2}
    texts = {}
    for how, backend, compiled in (("torch", "torch", False), ("eager", "triton", False), ("compiled", "triton", True)):
        if compiled and not setting.real:
            continue
        cache: Any = cls(model, backend=backend, **given)
        out = model.generate(
            ids, attention_mask=mask, **with_cache(cache), max_new_tokens=setting.sizes.generated, do_sample=False,
            disable_compile=not compiled,
        )  # fmt: skip
        texts[how] = out[:, PROMPT:].tolist()
    yield from (f"{how} writes another text than torch" for how, text in texts.items() if text != texts["torch"])
