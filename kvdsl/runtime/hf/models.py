"""What kvdsl has to know of a transformers model, and which ones it cannot serve."""

from __future__ import annotations

import copy
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers import PreTrainedModel

from kvdsl.errors import KvdslError
from kvdsl.runtime.hf.versions import is_full, layer_types, native_layers, sliding_window, text_config
from kvdsl.runtime.spec import PolicySpec


def unwrap(model: Any) -> PreTrainedModel:
    """The transformers model inside a compiled, PEFT or data-parallel wrapper.

    Raises:
        KvdslError: if there is none.
    """
    found = model
    for _ in range(4):
        if isinstance(found, PreTrainedModel):
            return found
        if hasattr(found, "_orig_mod"):
            found = found._orig_mod
        elif hasattr(found, "get_base_model"):
            found = found.get_base_model()
        elif isinstance(found, nn.Module) and hasattr(found, "module"):
            found = found.module
    raise KvdslError(f"the model must be a transformers model, not {_described(model)}")


def _described(thing: Any) -> str:
    if isinstance(thing, type):
        return f"the class {thing.__name__} (construct or load it first)"
    return f"{type(thing).__name__} {thing!r}" if isinstance(thing, (str, int, float)) else type(thing).__name__


def text_model(model: PreTrainedModel) -> PreTrainedModel:
    """The outermost part of the model that has the text config: the model itself, or a multimodal model's decoder."""
    config = text_config(model)
    for part in model.modules():
        if isinstance(part, PreTrainedModel) and part.config is config:
            return part
    return model


def sizes(config: Any, layers: int) -> dict[str, int]:
    """What a config says of a model's sizes, by the axes of tensors; the first keys tell the rest."""
    found = {
        "layers": layers,
        "heads": getattr(config, "num_key_value_heads", None),
        "dims": getattr(config, "head_dim", None),
    }
    if isinstance(found["heads"], int) and isinstance(getattr(config, "num_attention_heads", None), int):
        found["group"] = config.num_attention_heads // found["heads"]
    return {axis: size for axis, size in found.items() if isinstance(size, int)}


def managed_windows(model: PreTrainedModel) -> dict[int, int | None]:
    """The layers that a policy manages and the window in which each attends, None for the whole text.

    Raises:
        KvdslError: if there is none.
    """
    try:
        native = native_layers(text_config(model))
    except Exception as error:
        raise KvdslError(
            f"{type(model).__name__} cannot be served: transformers makes no cache from its config ({type(error).__name__}: {error})"
        ) from error
    full: dict[int, int | None] = {index: None for index, layer in enumerate(native) if is_full(layer)}
    if full:
        return full
    windows = {index: sliding_window(layer) for index, layer in enumerate(native)}
    if native and all(window is not None for window in windows.values()):
        return windows
    kinds = sorted({type(layer).__name__ for layer in native})
    raise KvdslError(f"{type(model).__name__} has no layer with an ordinary cache to manage, only {', '.join(kinds)}")


# -- rotation ----------------------------------------------------------------------------------------------------------


def rope_types(config: Any) -> set[str]:
    """The config's words for how frequencies are scaled, of all kinds of layers."""
    return {str(found[key]) for found in rotary_scalings(config) for key in ("rope_type", "type") if key in found}


def rotary_scalings(config: Any) -> list[dict[str, Any]]:
    """What the config says of scaling by position, of all kinds of layers."""
    scaling = [getattr(config, name, None) for name in ("rope_scaling", "rope_parameters")]
    scalings = [found for found in scaling if isinstance(found, dict)]
    return scalings + [inner for outer in scalings for inner in outer.values() if isinstance(inner, dict)]


def changes_frequencies(model: PreTrainedModel) -> bool:
    """Whether the model rotates keys by other frequencies where its text grows past some length."""
    return bool(rope_types(text_config(model)) & {"longrope", "su"})


# -- running a model to look at it -------------------------------------------------------------------------------------


def execution_device(model: PreTrainedModel) -> torch.device:
    """Where the model's forward runs: elsewhere than its weights lie, if accelerate brings them for each forward."""
    for module in (model, model.get_input_embeddings()):
        device = getattr(getattr(module, "_hf_hook", None), "execution_device", None)
        if device is not None:
            return torch.device(device)
    return torch.device(model.device)


def at_rest(model: PreTrainedModel) -> PreTrainedModel:
    """The model in evaluation mode: itself, or, so that nobody sees its mode change, a copy that shares its weights.

    Raises:
        KvdslError: if the model is in training mode and cannot be copied.
    """
    if not any(module.training for module in model.modules()):
        return model
    try:
        return copy.deepcopy(model, {id(shared): shared for shared in (*model.parameters(), *model.buffers())}).eval()
    except Exception as error:
        raise KvdslError(
            f"{type(model).__name__} is in training mode, and cannot be copied to be looked at ({error}): call `model.eval()` first"
        ) from error


# -- refusals ----------------------------------------------------------------------------------------------------------


def refuse_unsupported(model: PreTrainedModel) -> None:
    """Raise KvdslError for a model that would be served wrongly or not at all, as far as its class and config tell."""
    config = text_config(model)
    name = type(model).__name__
    if getattr(model.config, "is_encoder_decoder", False):
        raise KvdslError(f"{name} is an encoder-decoder model; kvdsl caches serve decoder-only models")
    if not getattr(type(text_model(model)), "_can_set_attn_implementation", lambda: True)():
        raise KvdslError(unreachable(model))
    if "chunked_attention" in (layer_types(config) or ()) or getattr(config, "attention_chunk_size", None):
        raise KvdslError(
            f"{name} attends in chunks of {getattr(config, 'attention_chunk_size', '?')} tokens, which a policy over the whole "
            f"text would change: kvdsl does not serve chunked attention"
        )
    if getattr(config, "attn_logit_softcapping", None) is not None and config._attn_implementation == "sdpa":
        raise KvdslError(
            f'{name} caps its attention\'s logits, which `sdpa` does not: call `model.set_attn_implementation("eager")` first, with a '
            f"cache of kvdsl's and without"
        )
    if getattr(config, "output_attentions", False):
        raise KvdslError(
            f"{name}'s config asks for `output_attentions`, which fused attention never builds: set it to False first"
        )
    managed_windows(model)


def unreachable(model: PreTrainedModel) -> str:
    """What to say of a model whose attention cannot be replaced."""
    return (
        f"the attention of {type(model).__name__} cannot be reached: the model does not call it through transformers' "
        f"AttentionInterface, so no cache can observe or replace it; use a model that does (Llama, Qwen, Mistral, Gemma, "
        f"Phi-3, GPT-NeoX and most others)"
    )


def refuse_agreement(model: PreTrainedModel, spec: PolicySpec) -> None:
    """A process sees its own heads only.

    Raises:
        KvdslError: if the policy makes the heads of a layer agree, and these are spread over processes.
    """
    if (getattr(model, "_tp_size", None) or 1) > 1 and spec.agreement is not None:
        raise KvdslError(
            f"the KV heads of {spec.name} {spec.agreement}, but tensor parallelism spreads them over {model._tp_size} processes: load "
            f"the model without `tp_plan`, or choose a policy whose heads decide by themselves"
        )


def processes_of(model: PreTrainedModel) -> int:
    """Over how many processes the model's heads are spread."""
    return getattr(model, "_tp_size", None) or 1


def head_offset(model: PreTrainedModel, config: Any) -> Callable[[int], int]:
    """A function from the number of local KV heads to the first one's number in the whole layer.

    `random()` asks, since every head must draw the same numbers wherever it lives, and so do tensors of files.
    """
    processes = processes_of(model)

    def offset(local_heads: int) -> int:
        if processes == 1 or not dist.is_available() or not dist.is_initialized():
            return 0
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        if local_heads * processes != heads:
            raise KvdslError(
                f"{heads} KV heads do not divide evenly over {processes} processes ({local_heads} here): choose a tp_size that "
                f"divides {heads}"
            )
        return _rank(model) * local_heads

    return offset


def _rank(model: PreTrainedModel) -> int:
    """This process's place in the tensor-parallel group."""
    mesh = getattr(model, "_device_mesh", None)
    if mesh is None:
        return dist.get_rank() % int(model._tp_size)  # type: ignore[arg-type]
    return int(mesh.get_local_rank("tp") if mesh.ndim > 1 else mesh.get_local_rank())


# -- releasing -------------------------------------------------------------------------------------------------------------

_lock = threading.Lock()
_releases: weakref.WeakKeyDictionary[PreTrainedModel, int] = weakref.WeakKeyDictionary()


def release(model: Any) -> None:
    """Refuse every cache that was made for the model from now on. The model itself is as it was all the time."""
    model = unwrap(model)
    with _lock:
        _releases[model] = releases(model) + 1


def releases(model: PreTrainedModel | None) -> int:
    """How often `release` was called for the model."""
    return _releases.get(model, 0) if model is not None else 0
