"""Properties of transformers models that kvdsl needs, and models that it refuses."""

from __future__ import annotations

import copy
import threading
import weakref
from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedModel

from kvdsl.errors import KvdslError
from kvdsl.runtime.biases import bias_norm, bound
from kvdsl.runtime.hf.versions import is_full, layer_types, native_layers, sliding_window, text_config
from kvdsl.runtime.spec import PolicySpec


def unwrap(model: Any) -> PreTrainedModel:
    """Return the transformers model inside a compiled, PEFT or data-parallel wrapper.

    Raises:
        KvdslError: if there is none.
    """
    found = model
    for _ in range(4):
        match found:
            case PreTrainedModel():
                return found
            case object(_orig_mod=inner):
                found = inner
            case object(get_base_model=inner):
                found = inner()
            case nn.Module(module=inner):
                found = inner
    raise KvdslError(f"the model must be a transformers model, not {_described(model)}")


def _described(thing: Any) -> str:
    match thing:
        case type():
            return f"the class {thing.__name__} (construct or load it first)"
        case str() | int() | float():
            return f"{type(thing).__name__} {thing!r}"
    return type(thing).__name__


def text_model(model: PreTrainedModel) -> PreTrainedModel:
    """Return the outermost part with the text config: the model itself, or a multimodal model's decoder."""
    config = text_config(model)
    for part in model.modules():
        if isinstance(part, PreTrainedModel) and part.config is config:
            return part
    return model


def sizes(config: Any, layers: int) -> dict[str, int]:
    """Return a model's sizes from its config, by the axes of tensors. The first keys give the rest."""
    found = {
        "layers": layers,
        "heads": getattr(config, "num_key_value_heads", None),
        "dims": getattr(config, "head_dim", None),
    }
    if isinstance(found["heads"], int) and isinstance(getattr(config, "num_attention_heads", None), int):
        found["group"] = config.num_attention_heads // found["heads"]
    return {axis: size for axis, size in found.items() if isinstance(size, int)}


def managed_windows(model: PreTrainedModel) -> dict[int, int | None]:
    """Return the layers that a policy manages, with each one's window, None for the whole text.

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
    """Return the types of RoPE scaling in the config."""
    return {str(found[key]) for found in rotary_scalings(config) for key in ("rope_type", "type") if key in found}


def rotary_scalings(config: Any) -> list[dict[str, Any]]:
    """Return the RoPE scaling settings in the config, for all kinds of layers."""
    whole = _dicts(getattr(config, name, None) for name in ("rope_scaling", "rope_parameters"))
    return whole + _dicts(part for scaling in whole for part in scaling.values())


def _dicts(values: Iterable[Any]) -> list[dict[str, Any]]:
    return [value for value in values if isinstance(value, dict)]


def changes_frequencies(model: PreTrainedModel) -> bool:
    """Whether the model's rotary frequencies change at some text length."""
    return bool(rope_types(text_config(model)) & {"longrope", "su"})


# -- weights -----------------------------------------------------------------------------------------------------------


def weight(module: nn.Module, name: str) -> Tensor | None:
    """Return a module's parameter, or what accelerate loads in its place for each forward."""
    hook = getattr(module, "_hf_hook", None)
    for one in getattr(hook, "hooks", (hook,)):
        weights = getattr(one, "weights_map", None)
        if weights is not None and name in weights:
            return cast("Tensor", weights[name])
    return cast("Tensor | None", getattr(module, name))


def large_biases(model: PreTrainedModel, layers: Iterable[int]) -> dict[int, float]:
    """Return the layers whose keys have a large bias, with its norm in the KV head where it is largest; see `biases`.

    Under tensor parallelism a process reads the biases of its own heads.

    Raises:
        KvdslError: if a layer's projection of keys is not found, or its bias cannot be read.
    """
    config = text_config(model)
    norms: dict[int, float] = {}
    bounds: dict[int, float] = {}
    for module in text_model(model).modules():
        layer = getattr(module, "layer_idx", None)
        if layer is not None and "attention" in type(module).__name__.lower():
            head_dim = getattr(module, "head_dim", None) or getattr(config, "head_dim", None)
            head_dim = head_dim or config.hidden_size // config.num_attention_heads
            norm = bias_norm(module, head_dim, weight)
            if norm is not None and norm > norms.get(layer, -1.0):
                norms[layer], bounds[layer] = norm, bound(head_dim)
    for layer in layers:
        if layer not in norms:
            raise KvdslError(
                f"{type(model).__name__} computes the keys of layer {layer} in a way that kvdsl does not know, and `kv_dtype` rounds "
                f"no layer whose keys have a large bias: leave `kv_dtype` out"
            )
    return {layer: norms[layer] for layer in layers if norms[layer] > bounds[layer]}


# -- running a model for a test ----------------------------------------------------------------------------------------


def execution_device(model: PreTrainedModel) -> torch.device:
    """Return the device of the model's forward. With accelerate's offloading, weights lie elsewhere."""
    for module in (model, model.get_input_embeddings()):
        device = getattr(getattr(module, "_hf_hook", None), "execution_device", None)
        if device is not None:
            return torch.device(device)
    return torch.device(model.device)


def at_rest(model: PreTrainedModel) -> PreTrainedModel:
    """Return the model in evaluation mode: itself, or a copy with shared weights, so that its own mode does not change.

    Raises:
        KvdslError: if the model is in training mode and cannot be copied.
    """
    if not any(module.training for module in model.modules()):
        return model
    try:
        return copy.deepcopy(model, {id(shared): shared for shared in (*model.parameters(), *model.buffers())}).eval()
    except Exception as error:
        raise KvdslError(
            f"{type(model).__name__} is in training mode, and cannot be copied for the self-test ({error}): call `model.eval()` first"
        ) from error


# -- refusals ----------------------------------------------------------------------------------------------------------


def refuse_unsupported(model: PreTrainedModel) -> None:
    """Raise KvdslError for a model whose class or config shows that it cannot be served."""
    config = text_config(model)
    name = type(model).__name__
    if getattr(model.config, "is_encoder_decoder", False):
        raise KvdslError(f"{name} is an encoder-decoder model; kvdsl caches serve decoder-only models")
    if not getattr(type(text_model(model)), "_can_set_attn_implementation", lambda: True)():
        raise KvdslError(unreachable(model))
    if "chunked_attention" in (layer_types(config) or ()) or getattr(config, "attention_chunk_size", None):
        raise KvdslError(
            f"{name} attends in chunks of {getattr(config, 'attention_chunk_size', '?')} tokens, unlike a policy, which covers "
            f"the whole text: kvdsl does not serve chunked attention"
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
    """Return the message for a model whose attention cannot be replaced."""
    return (
        f"the attention of {type(model).__name__} cannot be reached: the model does not call it through transformers' "
        f"AttentionInterface, so no cache can observe or replace it; use a model that does (Llama, Qwen, Mistral, Gemma, "
        f"Phi-3, GPT-NeoX and most others)"
    )


def refuse_agreement(model: PreTrainedModel, spec: PolicySpec) -> None:
    """Check that no decision needs KV heads of other processes.

    Raises:
        KvdslError: if a layer's heads decide together but are spread over processes.
    """
    if (getattr(model, "_tp_size", None) or 1) > 1 and spec.agreement is not None:
        raise KvdslError(
            f"the KV heads of {spec.name} {spec.agreement}, but tensor parallelism spreads them over {model._tp_size} processes: load "
            f"the model without `tp_plan`, or choose a policy whose heads decide by themselves"
        )


def processes_of(model: PreTrainedModel) -> int:
    """Return the number of processes that share the model's heads."""
    return getattr(model, "_tp_size", None) or 1


def head_offset(model: PreTrainedModel, config: Any) -> Callable[[int], int]:
    """Return a function from the number of local KV heads to the index of the first one in the whole layer.

    `random()` and tensors from files depend on a head's index in the layer.
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
    """Return this process's rank in the tensor-parallel group."""
    mesh = getattr(model, "_device_mesh", None)
    if mesh is None:
        return dist.get_rank() % int(model._tp_size)  # type: ignore[arg-type]
    return int(mesh.get_local_rank("tp") if mesh.ndim > 1 else mesh.get_local_rank())


# -- releasing -------------------------------------------------------------------------------------------------------------

_lock = threading.Lock()
_releases: weakref.WeakKeyDictionary[PreTrainedModel, int] = weakref.WeakKeyDictionary()


def release(model: Any) -> None:
    """Invalidate every cache made for the model. The model itself is unchanged."""
    model = unwrap(model)
    with _lock:
        _releases[model] = releases(model) + 1


def releases(model: PreTrainedModel | None) -> int:
    """Return how often `release` was called for the model."""
    return _releases.get(model, 0) if model is not None else 0
