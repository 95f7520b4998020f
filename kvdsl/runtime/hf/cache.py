"""KVCache: the base of every generated cache class."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from kvdsl.budget import is_whole, spelled, with_ratio
from kvdsl.errors import KvdslError, warn
from kvdsl.runtime.backend import Backend
from kvdsl.runtime.backends import choose
from kvdsl.runtime.biases import told
from kvdsl.runtime.given import param, random_seed
from kvdsl.runtime.hf import admission, models, saving, speculation
from kvdsl.runtime.hf.admission import KEEP_EVERYTHING
from kvdsl.runtime.hf.checks import check_dtype
from kvdsl.runtime.hf.html import cache_html
from kvdsl.runtime.hf.layer import ChooseBackend, SlotLayer
from kvdsl.runtime.hf.layers import Layers
from kvdsl.runtime.hf.models import (
    execution_device,
    head_offset,
    large_biases,
    managed_windows,
    processes_of,
    refuse_agreement,
    sizes,
    unwrap,
)
from kvdsl.runtime.hf.rope import ropes
from kvdsl.runtime.hf.supplying import Supplier, Supplying
from kvdsl.runtime.hf.sync import LayerSync
from kvdsl.runtime.hf.versions import native_layers, roll_back, sliding_window, text_config
from kvdsl.runtime.hf.watch import Watch
from kvdsl.runtime.lifetimes import Linked
from kvdsl.runtime.spec import PolicySpec
from kvdsl.runtime.state.layers import introduce, slot_state
from kvdsl.runtime.state.settings import Settings
from kvdsl.runtime.torch.backend import TorchBackend

NO_SUPPLIERS: Mapping[str, Supplier | None] = MappingProxyType({})


class KVCache(Linked, Cache):
    """A cache whose policy decides which tokens stay, for `model.generate(..., cache=cache)`.

    The policy manages full-attention layers. Sliding-window and linear layers of hybrid models keep transformers' own bounded layers.
    If every layer has a sliding window, the policy manages all of them.

    Args:
        model: the model that will use the cache. It works as before without the cache.
        params: the policy's params by name, None for a default.
        supplied: functions that compute the policy's `input` values, by name; None to use the default or `give`.
        storage: memory layout of slots, `in_place`, `blocks` or `blocks:16`; None for the policy's.
        rope: under compact positions, rotate keys whenever they are read (`fused`), or cache each key's rotated half (`cached`); None for
            the policy's.
        kv_dtype: storage dtype of keys and values, one of `kvdsl.memory.KV_DTYPES`; None for the policy's.
        backend: one of `kvdsl.runtime.backends.NAMES`.
        seed: for the policy's `random()`, in 0..4294967295.

    Raises:
        KvdslError: if the model cannot be served, or a param is invalid.
    """

    spec: ClassVar[PolicySpec]
    origin: ClassVar[saving.Origin | None] = None
    """How to compile the class again; None for a class from a generated package."""

    _left: Mapping[str, Any]
    _unrounded: dict[int, float]
    """The layers that keep the model's dtype whatever `kv_dtype` says; see `large_biases`."""

    def __init__(
        self,
        model: PreTrainedModel,
        params: Mapping[str, float | None],
        *,
        supplied: Mapping[str, Supplier | None] = NO_SUPPLIERS,
        storage: str | None = None,
        rope: str | None = None,
        kv_dtype: str | None = None,
        backend: str = "auto",
        seed: int = 0,
    ) -> None:
        spec = self.spec.laid_out(storage, rope, kv_dtype)
        named = with_ratio(params, spec.params, spec.name)
        params = {name: param(spec.name, name, value) for name, value in named.items()}
        Settings(spec, params).refuse_hopeless()
        seed = random_seed(seed)
        model = unwrap(model)
        backends = _prepared(model, spec, backend)
        self._begin(model, spec, params, backends, seed)
        if self._unrounded:
            warn(
                f"these layers keep the model's dtype instead of `{spec.kv_dtype}`: {told(self._unrounded)}. There the model adds a bias "
                f"to keys whose norm, in brackets, is above 4 × √head_dim, and rounding would lose what tells keys apart"
            )
        self._supplying.use(model, spec, supplied)

    @classmethod
    def assemble(
        cls, model: PreTrainedModel, spec: PolicySpec, params: Mapping[str, float | None], choose: ChooseBackend
    ) -> KVCache:
        """Create a cache from its parts, for a model that is already admitted."""
        cache = cls.__new__(cls)
        cache._begin(model, spec, params, choose, 0)
        return cache

    def _begin(
        self, model: PreTrainedModel, spec: PolicySpec, params: Mapping[str, float | None], choose: ChooseBackend, seed: int
    ) -> None:
        self._spec = spec
        self._params = dict(params)
        self._config = text_config(model)
        self._sync = LayerSync(model)
        self._supplying = Supplying()
        self._choose = choose
        layers = native_layers(self._config)
        if spec.tensors is not None:
            spec.tensors.check(sizes(self._config, len(layers)))
        windows = managed_windows(model)
        self._unrounded = large_biases(model, windows) if spec.kv_dtype != "model" else {}
        rope = ropes(model, moves_queries=spec.compact) if spec.compact or spec.rotates else {}
        for index, window in windows.items():
            state = slot_state(self._spec_of(index), params, layer=index, layers=len(layers), seed=seed)
            state.processes = processes_of(model)
            # Set before the prompt, because transformers asks early whether the cache compiles.
            state.room.reserves = execution_device(model).type not in ("cpu", "meta")
            layer = SlotLayer(state, choose, self._sync, window=window, rope=rope.get(index), supplying=self._supplying)
            layer.head_offset = head_offset(model, self._config)
            layers[index] = layer
        super().__init__(layers=layers)
        self._layers = Layers(self.layers)
        self._sync.is_alone = not self._layers.native
        self._watch = Watch(self._sync, self._layers.managed)
        introduce(layer.state for layer in self._layers.managed)

    def _spec_of(self, layer: int) -> PolicySpec:
        """Return the policy in the memory of one layer."""
        return self._spec.unrounded if layer in self._unrounded else self._spec

    # -- inspection ----------------------------------------------------------------------------------------------------

    def positions(self, layer: int) -> Tensor:
        """Return the text position of every slot's token, int32 [batch, kv_heads, slots]; -1 for a free slot. A copy.

        Raises:
            KvdslError: if the layer is not managed, or nothing is cached.
        """
        return self._layers.state(layer).position.clone()

    def state(self, layer: int) -> dict[str, Tensor]:
        """Return the policy's state columns by name, float32 [batch, kv_heads, slots] each. Copies.

        A column of a reduction `over last N queries` is [batch, kv_heads, slots, N]: the value of the query at text position p is at index
        p modulo N.

        Raises:
            KvdslError: if the layer is not managed, or nothing is cached.
        """
        state = self._layers.state(layer)
        columns = state.columns.clone()
        rings = {name: ring.movedim(0, -1) for name, ring in state.column_index.rings(columns).items()}
        return state.column_index.single(columns) | rings

    @property
    def managed(self) -> list[int]:
        """The layers that the policy manages."""
        return self._layers.indices

    def bytes(self) -> int:
        """Return the size of the cache in bytes, transformers' own layers included."""
        return self._layers.bytes()

    def __repr__(self) -> str:
        params = [f"{name}={spelled(value)}" for name, value in self._params.items() if value is not None]
        first = self._layers.managed[0]
        managed = "" if len(self.managed) == len(self.layers) else f"{len(self.managed)} of "
        facts = [f"{managed}{len(self.layers)} layers", f"{first.length} tokens seen"]
        if self._unrounded:
            facts.insert(1, f"{len(self._unrounded)} of them not in {self._spec.kv_dtype}")
        if first.state.allocated:
            facts += [f"{first.state.slots} slots per KV head", f"{self.bytes() / 1024:,.0f} KiB"]
        return f"<{type(self).__name__}({', '.join(params)}): {', '.join(facts)}>"

    def _repr_html_(self) -> str:
        return cache_html(repr(self).strip("<>"), self._layers.managed)

    def __deepcopy__(self, memo: dict[int, Any]) -> KVCache:
        """Copy the cache, for instance to continue one prompt several times."""
        backends = (layer.backend for layer in self._layers.managed)
        for shared in (self._spec, *(getattr(self, name, None) for name in ("_choose", "_config")), *backends):
            memo[id(shared)] = shared
        return super().__deepcopy__(memo)

    # -- other policies ------------------------------------------------------------------------------------------------

    @classmethod
    def with_(cls, clauses: str, /, **settings: Any) -> type[KVCache]:
        """Return the class of this policy with clauses, like `policy A = B with ...`: `with_("when prefill, keep last 64")`.

        Args:
            settings: new defaults of params, as in `kvdsl.load`; this class's settings also apply.

        Raises:
            DiagnosticError: if the clauses have errors; the text lists them.
            KvdslError: if this class was not created by `kvdsl.load` or `kvdsl.compile`.
        """
        origin: saving.Origin | None = vars(cls).get("origin")  # not inherited: a subclass may have other rules
        if origin is None:
            raise KvdslError(
                f"`{cls.__name__}` was not loaded from a policy's text, so that clauses cannot be added: "
                f"load the policy with `kvdsl.load`, or write `policy NAME = {cls.__name__.removesuffix('Cache')} with ...` in a file"
            )
        return origin.with_clauses(cls, clauses, settings)

    # -- files and other processes -------------------------------------------------------------------------------------

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle everything except the model and its backends."""
        own = getattr(type(self), "spec", None)
        if own is None or self._spec.with_memory(own.memory) != own:
            raise KvdslError(f"{type(self).__name__} was assembled from parts and cannot be saved")
        model = self._sync.model
        kept = {name: value for name, value in self.__dict__.items() if name not in ("_spec", "_choose", "_config")}
        kept["_memory"] = self._spec.memory
        if model is not None:
            kept["_left"] = saving.likeness(model) | {"backend": self._choose.name}
        return *saving.identity(type(self)), kept

    def __setstate__(self, kept: dict[str, Any]) -> None:
        memory = kept.pop("_memory")
        self.__dict__.update(kept)
        self._spec = self.spec.with_memory(memory)
        for layer in self._layers.managed:
            layer.state.follow(self._spec_of(layer.state.layer))

    def attach(self, model: PreTrainedModel, **supplied: Supplier | None) -> None:
        """Connect a loaded cache to its model.

        Args:
            model: the one that the cache was made for, or the same loaded again. In another dtype it runs as under autocast.
            supplied: the constructor's functions, which are not saved.

        Raises:
            KvdslError: if the cache has a model already, or if this is a different model.
        """
        if self._sync.is_attached:
            raise KvdslError("the cache belongs to a model already: construct one for every model, or load it again")
        model = unwrap(model)
        left = dict(self._left)
        backend = left.pop("backend")
        saving.refuse_another(model, left)
        self._choose = _prepared(model, self._spec, backend)
        fresh = type(self).assemble(model, self._spec, self._params, self._choose)
        self._config = fresh._config
        self._sync.attach(model)
        for index in self.managed:
            self.layers[index].attach(fresh.layers[index])
        self._supplying.use(model, self._spec, supplied)

    # -- control -------------------------------------------------------------------------------------------------------

    @staticmethod
    def release(model: Any) -> None:
        """Invalidate every cache made for the model. The model itself is unchanged."""
        models.release(model)

    def reset(self) -> None:
        """Drop everything, before an unrelated prompt.

        Raises:
            KvdslError: if the cache was loaded and is not attached to a model.
        """
        self._sync.require_model()
        self._supplying.forget()
        for layer in self._layers.managed:
            layer.reset()
        for index, native in enumerate(native_layers(self._config)):  # transformers 4.57 only zeroes such a layer
            if index not in self.managed:
                self.layers[index] = native

    def reserve(self) -> None:
        """Allocate the whole budget now, and at the end of every later prompt.

        On CPUs a cache starts with the slots that the prompt needs, at least 1,024 per KV head, and grows up to its budget. Reserve before
        `torch.compile` if the budget is larger, or to see a lack of memory at once. On accelerators a cache always reserves. Layers that
        never evict grow in any case.
        """
        for layer in self._layers.managed:
            layer.state.reserve()

    def expect_prompt(self, tokens: int) -> None:
        """Set the length of a prompt that will come in several forwards, for budgets that are ratios of the prompt. Holds until `reset()`.

        Raises:
            KvdslError: if something is cached, or `tokens` is not a positive int.
        """
        if not is_whole(tokens, 1):
            raise KvdslError(f"`tokens` is {tokens!r}; give how many tokens the prompt will have, 1 or more")
        for layer in self._layers.managed:
            if layer.length:
                raise KvdslError(
                    "a prompt has come already: call `cache.reset()` first, and then say how long the next one will be"
                )
            layer.state.expected = tokens

    def give(self, layer: int, /, **values: Tensor) -> None:
        """Set the policy's `input` values for a layer's next forward. They take precedence over functions.

        Args:
            values: by name, float tensors [batch, KV heads or 1, tokens of that forward], padding included, rounded to float32.
                Infinities are allowed. A NaN makes a score NaN, which ranks lowest.

        Raises:
            KvdslError: if the policy does not manage the layer or read the value, or if it is not a float tensor. Sizes are checked in the
                forward.
        """
        self._supplying.give(self._layers.managed_layer(layer).state, values)

    def mark(self, span: str, /, start: int, end: int | None = None, *, row: int | None = None) -> None:
        """Mark a range of the text as one of the policy's spans. Tokens in it may be cached already or come later.

        Evicted tokens do not return. Ranges may overlap, also those of different spans. `reset()` removes all marks.

        Args:
            span: its name in the policy, `input tool from spans`.
            start: position of its first token in the row's text, padding not counted.
            end: position behind its last token; None: open until the same `start` is marked with an `end`.
            row: of the batch; None for every row.

        Raises:
            KvdslError: if the policy reads no such span, or the range is invalid.
        """
        first = self._layers.managed[0]
        self._supplying.marks.add(self._spec, span, start, end, row, first.batch_size)
        for layer in self._layers.managed:
            layer.supplying.marks.mark_cached(layer.state)

    def end_turn(self, at: int | None = None) -> None:
        """Mark the end of a chat turn. The policy may evict now.

        Only policies that read `turn` or `turns` react. Tokens before the turn's end cannot be taken back by `crop`.

        Args:
            at: the first position of the next turn, for a conversation that comes as one prompt; None if the turn ends now.

        Raises:
            KvdslError: if nothing is cached, or the position is not one of the text to come. A position that the next forward does not
                reach raises an error in that forward.
        """
        length = self._layers.managed[0].length
        if at is None and not length:
            raise KvdslError("nothing is cached yet, so that no turn has ended")
        if at is not None and not is_whole(at, 1):
            raise KvdslError(f"`at` is {at!r}; give a place in the text of one row, 1 or more")
        for layer in self._layers.managed:
            layer.end_turn(at)

    @contextmanager
    def one_by_one(self) -> Iterator[None]:
        """In this block, serve the tokens of one forward as if each came alone, once there is a prompt.

        The policy settles after every token. A given text is thus scored as if it were generated, with fewer forwards.
        """
        before, self._sync.one_by_one = self._sync.one_by_one, True
        try:
            yield
        finally:
            self._sync.one_by_one = before

    def crop(self, tokens_to_remove: int) -> None:
        """Take the last tokens back, exactly: tokens that they evicted return.

        A layer that still holds all tokens, under a policy without statistics of queries (`full`), can go back any number of tokens. Others
        need `activate_past_recording`.

        Args:
            tokens_to_remove: the negative number of tokens to remove; or, if positive, the length to keep.

        Raises:
            KvdslError: if the cache has fewer tokens, some belong to the prompt or were not recorded, or if it is not an int. Nothing is
                changed then.
        """
        native, removed = self._layers.native, 0
        for own in self._layers.managed:  # check all layers before changing any
            removed = own.undo.to_remove(own.length, tokens_to_remove, noted_only=bool(native))
        for layer in native:
            roll_back(layer, removed)
        for own in self._layers.managed:
            own.crop(-removed)
            if any(sliding_window(layer) is not None for layer in native):  # sliding windows can go back no further
                own.undo.forget()

    def activate_past_recording(self, steps: int = speculation.STEPS) -> None:
        """Record what every step overwrites, so that `crop` can undo the last steps; until `reset()`.

        `generate` of transformers 5.16 and later calls this for assisted decoding and prompt lookup; with earlier releases, call it first.
        `kvdsl.runtime.state.undo` states the cost per step.

        Args:
            steps: how many tokens can be taken back. A forward with more guesses is recorded whole.

        Raises:
            KvdslError: if the policy or a layer does not support it.
        """
        speculation.refuse_unrecordable(self._spec, self.layers)
        noted = speculation.check_steps(steps)
        for own in self._layers.managed:
            own.undo.record(noted)
        for layer in self._layers.native:
            if hasattr(layer, "activate_past_recording"):
                layer.activate_past_recording()


class _Backends:
    """Creates one backend per device, dtype and `kv_dtype`, in which layers may differ."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._made: dict[tuple[str, torch.device, torch.dtype], Backend] = {}

    def __call__(self, spec: PolicySpec, device: torch.device, dtype: torch.dtype) -> Backend:
        found = self._made.get((spec.kv_dtype, device, dtype))
        if found is None:
            found = self._made[spec.kv_dtype, device, dtype] = choose(spec, self.name, device, dtype)
        return found

    def prepare(self, model: PreTrainedModel, spec: PolicySpec) -> None:
        """Create the likely backend now, so that a wrong name or a missing compiler is reported by the constructor."""
        device = execution_device(model)
        if device.type != "meta":
            self(spec, device, model.dtype)


def _prepared(model: PreTrainedModel, spec: PolicySpec, backend: str) -> _Backends:
    """Prepare a model and its backends."""
    check_dtype(model.dtype)
    refuse_agreement(model, spec)
    backends = _Backends(backend)
    backends.prepare(model, spec)
    admission.admit(model, lambda tried: KVCache.assemble(tried, KEEP_EVERYTHING, {}, lambda *_: TorchBackend()))
    return backends
