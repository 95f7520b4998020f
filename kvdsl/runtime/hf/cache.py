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

from kvdsl.budget import spelled, with_ratio
from kvdsl.errors import KvdslError
from kvdsl.runtime.backend import Backend
from kvdsl.runtime.backends import choose
from kvdsl.runtime.given import param, random_seed
from kvdsl.runtime.hf import admission, models, saving, speculation
from kvdsl.runtime.hf.admission import KEEP_EVERYTHING
from kvdsl.runtime.hf.checks import check_dtype
from kvdsl.runtime.hf.html import cache_html
from kvdsl.runtime.hf.layer import ChooseBackend, SlotLayer
from kvdsl.runtime.hf.models import (
    execution_device,
    head_offset,
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
from kvdsl.runtime.state.slots import SlotState
from kvdsl.runtime.torch.backend import TorchBackend

NO_SUPPLIERS: Mapping[str, Supplier | None] = MappingProxyType({})


class KVCache(Linked, Cache):
    """A cache whose policy decides what stays, for `model.generate(..., cache=cache)`.

    Full-attention layers are managed; sliding-window and linear layers of hybrid models keep transformers' own bounded
    layers. In a model whose every layer has a sliding window, all are managed.

    Args:
        model: the model that will use the cache; without the cache it works as before.
        params: the policy's params by name, None for a default.
        supplied: functions that give what the policy asks its caller for, by name, None where a default or `give` does.
        storage: how slots lie in memory, `in_place`, `blocks` or `blocks:16`; None: as `spec` says.
        rope: whether compact positions turn keys whenever they are read, `fused`, or keep every key's rotated half, `cached`; None: as
            `spec` says.
        kv_dtype: what keys and values are stored in, one of `kvdsl.memory.KV_DTYPES`; None: as `spec` says.
        backend: `auto`, or one of `kvdsl.runtime.backends.NAMES`.
        seed: of the policy's `random()`, in 0..4294967295.

    Raises:
        KvdslError: if the model cannot be served, or a param is no number that it can be.
    """

    spec: ClassVar[PolicySpec]
    origin: ClassVar[saving.Origin | None] = None
    """Where the class comes from, if it was compiled when it was asked for."""

    _left: Mapping[str, Any]

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
        backends = self._prepare(model, spec, backend)
        self._begin(model, spec, params, backends, seed)
        self._supplying.use(model, spec, supplied)

    @staticmethod
    def _prepare(model: PreTrainedModel, spec: PolicySpec, backend: str) -> _Backends:
        """Prepare the model and what serves it."""
        check_dtype(model.dtype)
        refuse_agreement(model, spec)
        backends = _Backends(spec, backend)
        backends.prepare(model)
        admission.admit(
            model, lambda tried: KVCache.assemble(tried, KEEP_EVERYTHING, {}, lambda device, dtype: TorchBackend())
        )
        return backends

    @classmethod
    def assemble(
        cls, model: PreTrainedModel, spec: PolicySpec, params: Mapping[str, float | None], choose: ChooseBackend
    ) -> KVCache:
        """A cache from its parts, for a model that is admitted already."""
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
        rope = ropes(model, moves_queries=spec.compact) if spec.compact or spec.rotates else {}
        for index, window in managed_windows(model).items():
            state = slot_state(spec, params, layer=index, layers=len(layers), seed=seed)
            state.processes = processes_of(model)
            state.room.reserves = execution_device(model).type not in (
                "cpu",
                "meta",
            )  # transformers asks before the prompt is there
            layer = SlotLayer(state, choose, self._sync, window=window, rope=rope.get(index), supplying=self._supplying)
            layer.head_offset = head_offset(model, self._config)
            layers[index] = layer
        own = [layer for layer in layers if isinstance(layer, SlotLayer)]
        self._sync.is_alone = len(own) == len(layers)
        self._watch = Watch(self._sync, own)
        introduce(layer.state for layer in own)
        super().__init__(layers=layers)

    # -- what the policy holds -----------------------------------------------------------------------------------------

    def positions(self, layer: int) -> Tensor:
        """The text position of every slot's token, int32 [batch, kv_heads, slots]; -1 is a free slot. A copy.

        Raises:
            KvdslError: if the layer is not managed, or nothing is cached.
        """
        return self._state(layer).position.clone()

    def state(self, layer: int) -> dict[str, Tensor]:
        """The policy's state columns by name, float32 [batch, kv_heads, slots] each. Copies.

        A column of a reduction `over last N queries` is [batch, kv_heads, slots, N]: what each of the newest queries gave; that
        of the query at text position p in place p modulo N.

        Raises:
            KvdslError: if the layer is not managed, or nothing is cached.
        """
        state = self._state(layer)
        columns = state.columns.clone()
        rings = {name: ring.movedim(0, -1) for name, ring in state.column_index.rings(columns).items()}
        return state.column_index.single(columns) | rings

    def _state(self, layer: int) -> SlotState:
        found = self._managed_layer(layer)
        if not found.state.allocated:
            raise KvdslError("nothing is cached yet: generate, or run the model once with this cache")
        return found.state

    def _managed_layer(self, layer: int) -> SlotLayer:
        if not -len(self.layers) <= layer < len(self.layers):
            raise KvdslError(f"there is no layer {layer}: the model has {len(self.layers)} (0 to {len(self.layers) - 1})")
        found = self.layers[layer]
        if not isinstance(found, SlotLayer):
            raise KvdslError(f"layer {layer} is transformers' own {type(found).__name__}; the policy manages {self.managed}")
        return found

    @property
    def managed(self) -> list[int]:
        """The layers that the policy manages."""
        return [index for index, layer in enumerate(self.layers) if isinstance(layer, SlotLayer)]

    def bytes(self) -> int:
        """What the cache occupies: the slots, and the layers that stay transformers' own."""
        return sum(layer.bytes() if isinstance(layer, SlotLayer) else native_bytes(layer) for layer in self.layers)

    def __repr__(self) -> str:
        params = [f"{name}={spelled(value)}" for name, value in self._params.items() if value is not None]
        first = self.layers[self.managed[0]]
        managed = "" if len(self.managed) == len(self.layers) else f"{len(self.managed)} of "
        facts = [f"{managed}{len(self.layers)} layers", f"{first.length} tokens seen"]
        if first.state.allocated:
            facts += [f"{first.state.slots} slots per KV head", f"{self.bytes() / 1024:,.0f} KiB"]
        return f"<{type(self).__name__}({', '.join(params)}): {', '.join(facts)}>"

    def _repr_html_(self) -> str:
        return cache_html(repr(self).strip("<>"), [layer for layer in self.layers if isinstance(layer, SlotLayer)])

    def __deepcopy__(self, memo: dict[int, Any]) -> KVCache:
        """An independent cache with the same content, for instance to continue one prompt several times."""
        backends = (self.layers[index].backend for index in self.managed)
        for shared in (self._spec, *(getattr(self, name, None) for name in ("_choose", "_config")), *backends):
            memo[id(shared)] = shared
        return super().__deepcopy__(memo)

    # -- other policies ------------------------------------------------------------------------------------------------

    @classmethod
    def with_(cls, clauses: str, /, **settings: Any) -> type[KVCache]:
        """The class of this policy with clauses, `with_("when prefill, keep last 64")`, as `policy A = B with ...` means them.

        Args:
            settings: defaults of params to change, as in `kvdsl.load`; those with which this class was loaded hold, too.

        Raises:
            DiagnosticError: if the clauses have errors; the text lists them.
            KvdslError: if this class comes from a package, and not from `kvdsl.load` or `kvdsl.compile`.
        """
        origin: saving.Origin | None = vars(cls).get(
            "origin"
        )  # its own: a class that was derived by hand has other rules, perhaps
        if origin is None:
            raise KvdslError(
                f"`{cls.__name__}` was not loaded from a policy's text, so that clauses cannot be added: "
                f"load the policy with `kvdsl.load`, or write `policy NAME = {cls.__name__.removesuffix('Cache')} with ...` in a file"
            )
        return origin.with_clauses(cls, clauses, settings)

    # -- files and other processes -------------------------------------------------------------------------------------

    def __reduce__(self) -> tuple[Any, ...]:
        """For `pickle` and `torch.save`: all but the model and what serves it."""
        own = getattr(type(self), "spec", None)
        if own is None or self._spec.with_memory(own.memory) != own:
            raise KvdslError(f"{type(self).__name__} was put together from parts, so that it cannot be saved")
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
        for index in self.managed:
            self.layers[index].state.follow(self._spec)

    def attach(self, model: PreTrainedModel, **supplied: Supplier | None) -> None:
        """Give a cache that was loaded its model, so that it can go on.

        Args:
            model: the one that it was made for, or the same loaded again; in another dtype it serves as under autocast.
            supplied: the functions that the constructor was given: they are not saved.

        Raises:
            KvdslError: if the cache has a model already, or if this one is another.
        """
        if self._sync.is_attached:
            raise KvdslError("the cache belongs to a model already: construct one for every model, or load it again")
        model = unwrap(model)
        left = dict(self._left)
        backend = left.pop("backend")
        saving.refuse_another(model, left)
        self._choose = self._prepare(model, self._spec, backend)
        fresh = type(self).assemble(model, self._spec, self._params, self._choose)
        self._config = fresh._config
        self._sync.attach(model)
        for index in self.managed:
            self.layers[index].attach(fresh.layers[index])
        self._supplying.use(model, self._spec, supplied)

    # -- what transformers asks ----------------------------------------------------------------------------------------

    @staticmethod
    def release(model: Any) -> None:
        """Refuse every cache that was made for the model from now on. The model itself is as it was all the time."""
        models.release(model)

    def reset(self) -> None:
        """Forget everything, before an unrelated prompt.

        Raises:
            KvdslError: if the cache was loaded and belongs to no model yet.
        """
        self._sync.require_model()
        fresh = native_layers(self._config)
        self._supplying.forget()
        for index, layer in enumerate(self.layers):
            if isinstance(layer, SlotLayer):
                layer.reset()
            else:  # transformers 4.57 only zeroes such a layer
                self.layers[index] = fresh[index]

    def reserve(self) -> None:
        """Allocate the whole budget now, and at the end of every prompt to come, however short that is.

        By itself a cache on a CPU begins with what the prompt needs, 1,024 slots per KV head at least, and grows until it holds its
        budget. Reserve before `torch.compile` where a budget is larger than that, and wherever a lack of memory is to show at
        once. On accelerators it is done always; layers that never evict grow all the same.
        """
        for index in self.managed:
            self.layers[index].state.reserve()

    def expect_prompt(self, tokens: int) -> None:
        """Say how long the prompt is that will come in several forwards: rates are of it from the first on, until `reset()`.

        Raises:
            KvdslError: if something is cached already, or if it is no number of tokens.
        """
        if isinstance(tokens, bool) or not isinstance(tokens, int) or tokens < 1:
            raise KvdslError(f"`tokens` is {tokens!r}; give how many tokens the prompt will have, 1 or more")
        for index in self.managed:
            if self.layers[index].length:
                raise KvdslError(
                    "a prompt has come already: call `cache.reset()` first, and then say how long the next one will be"
                )
            self.layers[index].state.expected = tokens

    def give(self, layer: int, /, **values: Tensor) -> None:
        """Say what the policy's `given` values are of the tokens that come into a layer next: for one forward, before what functions say.

        Args:
            values: by name, float tensors [batch, KV heads or 1, tokens of that forward], padding included. They are rounded to float32;
                infinities are allowed, and a NaN makes a score NaN, which ranks lowest.

        Raises:
            KvdslError: if the policy does not manage the layer or asks for no such value, or if it is no tensor of floats. Its sizes are
                looked at when the forward comes.
        """
        self._supplying.give(self._managed_layer(layer).state, values)

    def mark(self, span: str, /, start: int, end: int | None = None, *, row: int | None = None) -> None:
        """Say that a stretch of the text lies in one of the policy's spans: tokens that are cached, and tokens to come.

        What has left does not return. Marked twice is marked once, and stretches may overlap, those of several spans, too. `reset()`
        forgets all marks.

        Args:
            span: its name in the policy, `input tool from spans`.
            start: the place of its first token in the text of a row, padding not counted.
            end: the place behind its last one; None: it goes on until the same `start` is marked with an `end`.
            row: of a batch; None: in every row.

        Raises:
            KvdslError: if the policy reads no such span, or if it is no stretch of a row's text.
        """
        first = self.layers[self.managed[0]]
        self._supplying.marks.add(self._spec, span, start, end, row, first.batch_size)
        for index in self.managed:
            self.layers[index].mark_cached()

    def end_turn(self, at: int | None = None) -> None:
        """Count a turn of a chat that has ended: what comes now is of the next one, and tokens may leave.

        Only policies that read `turn` or `turns` notice. After this `crop` can take back what comes later only.

        Args:
            at: where in the text to come the turn ends, for a conversation that comes as one prompt: of its forward, the tokens from this
                place on are of the next turn. None: the turn ends now.

        Raises:
            KvdslError: if nothing is cached yet, or if the place is none of the text to come. A place that the next forward does not reach
                shows in that forward.
        """
        length = self.layers[self.managed[0]].length
        if at is None and not length:
            raise KvdslError("nothing is cached yet, so that no turn has ended")
        if at is not None and (isinstance(at, bool) or not isinstance(at, int) or at < 1):
            raise KvdslError(f"`at` is {at!r}; give a place in the text of one row, 1 or more")
        for index in self.managed:
            self.layers[index].end_turn(at)

    @contextmanager
    def one_by_one(self) -> Iterator[None]:
        """In this block, several tokens that come in one forward act as if each came alone, once there is a prompt.

        So a given text is scored as if it were being generated, and in fewer forwards: the policy settles after every token.
        """
        before, self._sync.one_by_one = self._sync.one_by_one, True
        try:
            yield
        finally:
            self._sync.one_by_one = before

    def crop(self, tokens_to_remove: int) -> None:
        """Take the last tokens back: what they made leave returns, and the cache is to the bit what it was before them.

        A layer that holds all that it has seen, under a policy that learns nothing from later queries (`full`, for example), needs no
        notes for that, and goes back as far as anybody likes.

        Args:
            tokens_to_remove: minus the number of tokens; or, positive, the length that is to be left.

        Raises:
            KvdslError: if they are more than the cache has, belong to the prompt, or were not noted (see `activate_past_recording`);
                or if it is no whole number. Nothing is changed then.
        """
        native = [layer for layer in self.layers if not isinstance(layer, SlotLayer)]
        removed = 0
        for index in self.managed:  # all of them are asked before anything is changed
            removed = self.layers[index].undo.to_remove(self.layers[index].length, tokens_to_remove, noted_only=bool(native))
        for layer in native:
            roll_back(layer, removed)
        for index in self.managed:
            self.layers[index].crop(-removed)
            if any(sliding_window(layer) is not None for layer in native):  # these can go back no further now
                self.layers[index].undo.forget()

    def activate_past_recording(self, steps: int = speculation.STEPS) -> None:
        """From now on, note what every step overwrites, so that `crop` can take back the last ones; until `reset()`.

        Generation of transformers 5.16 and later calls this for assisted decoding and prompt lookup; with earlier releases, call
        it first. `kvdsl.runtime.state.undo` says what a step costs.

        Args:
            steps: how many tokens may be taken back; of a forward with more guesses, all of them.

        Raises:
            KvdslError: if the cache could not take them back.
        """
        speculation.refuse_unrecordable(self._spec, self.layers)
        noted = speculation.check_steps(steps)
        for layer in self.layers:
            if isinstance(layer, SlotLayer):
                layer.undo.record(noted)
            elif hasattr(layer, "activate_past_recording"):
                layer.activate_past_recording()


class _Backends:
    """The backend for a device and dtype, made once."""

    def __init__(self, spec: PolicySpec, name: str) -> None:
        self._spec = spec
        self.name = name
        self._made: dict[tuple[torch.device, torch.dtype], Backend] = {}

    def __call__(self, device: torch.device, dtype: torch.dtype) -> Backend:
        found = self._made.get((device, dtype))
        if found is None:
            found = self._made[device, dtype] = choose(self._spec, self.name, device, dtype)
        return found

    def prepare(self, model: PreTrainedModel) -> None:
        """Make the likely backend now, so that a wrong name or a missing compiler shows in the constructor."""
        device = execution_device(model)
        if device.type != "meta":
            self(device, model.dtype)


def native_bytes(layer: Any) -> int:
    """What a layer of transformers' own occupies."""
    tensors: list[Any] = []
    for value in vars(layer).values():
        tensors += value.values() if isinstance(value, dict) else [value]
    return sum(tensor.nbytes for tensor in tensors if isinstance(tensor, Tensor))
