"""One layer's slots as a transformers cache layer."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from transformers.cache_utils import CacheLayerMixin

from kvdsl.errors import KvdslError
from kvdsl.runtime.backend import AttentionCall, Backend
from kvdsl.runtime.graph import step
from kvdsl.runtime.hf import checks
from kvdsl.runtime.hf.gradients import Gradients
from kvdsl.runtime.hf.speculation import Undo, prompt_tokens, serve
from kvdsl.runtime.hf.supplying import Supplying
from kvdsl.runtime.hf.sync import LayerSync
from kvdsl.runtime.hf.versions import token_count
from kvdsl.runtime.lifetimes import Linked, plain_tensors
from kvdsl.runtime.rope import Rope
from kvdsl.runtime.spec import PolicySpec
from kvdsl.runtime.state.slots import SlotState
from kvdsl.runtime.state.tensors import stays_where_it_is
from kvdsl.runtime.torch.eviction import end_turn

ChooseBackend = Callable[[PolicySpec, torch.device, torch.dtype], Backend]

MARK = "_kvdsl_layer"
"""Attribute of keys: their layer, for the attention function."""


def mark(key: Tensor, layer: Any) -> Tensor:
    """Return a view of the key with its layer attached."""
    marked = key.view(key.shape)
    setattr(marked, MARK, layer)
    return marked


class SlotLength(int):
    """The logical length of a kvdsl cache. Its type tells the mask function that it serves slots."""

    layer: SlotLayer | None = None
    """The layer of the mask, if there is one."""


UNCOUNTED = SlotLength(-1)
"""The length in a compiled forward, where a number would become a constant."""


class SlotLayer(Linked, CacheLayerMixin):
    """One layer: counts the tokens that the model has seen, and passes attention to a backend.

    `update` stores nothing: it returns the new keys and values with a mark, and the attention function calls `attend`.

    Attributes:
        state: the slots.
        sync: what the layers of the cache share.
        undo: records of the last steps.
        window: the number of tokens that a query sees, or None.
        rope: the model's rotation of queries and keys, if the policy needs it, else None.
        turn_ends: the positions in the next forward's text at which turns end.
        counted: tokens counted in this layer's own forwards, padding included; see `length`.
        backend: set in the first forward.
    """

    LINKS = ("rope", "backend", "head_offset", "_choose", "_module", "_gradients")

    is_sliding = False
    is_croppable = True

    def __init__(
        self,
        state: SlotState,
        choose: ChooseBackend,
        sync: LayerSync,
        *,
        window: int | None = None,
        rope: Rope | None = None,
        supplying: Supplying | None = None,
    ) -> None:
        super().__init__()
        self.state = state
        self.sync = sync
        self.undo = Undo(state)
        self.window = window
        self.rope = rope
        self.counted = 0
        self.turn_ends: list[int] = []
        self.backend: Backend | None = None
        self.batch_size = -1
        self.head_offset: Callable[[int], int] = lambda local_heads: 0
        self.is_initialized = False
        self._has_rate_of_one = False
        self._choose = choose
        self._gradients = Gradients()
        self.supplying = Supplying() if supplying is None else supplying
        self._module: Callable[[], nn.Module | None] = lambda: None
        sync.enter(self)

    def attach(self, fresh: SlotLayer) -> None:
        """Take over a fresh layer's links to the model, after unpickling."""
        self.rope, self.head_offset, self._choose, self._module = fresh.rope, fresh.head_offset, fresh._choose, fresh._module
        self._gradients = fresh._gradients
        if self.state.allocated:
            self.backend = self._choose(self.state.spec, self.state.position.device, self.state.dtype)
            if not self.state.room.grows:
                stays_where_it_is(*self.state.tensors().values())

    @property
    def length(self) -> int:
        """Tokens that the model has seen, padding included (transformers' length of a cache)."""
        if self.sync.ahead:
            self.sync.catch_up()
        return self.counted

    # -- a forward -----------------------------------------------------------------------------------------------------

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor | None = None) -> None:
        """Do nothing: slots are allocated when the prompt's length is known."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Check new tokens and return them marked.

        Args:
            key_states: [batch, kv_heads, tokens, key_dim].
            value_states: [batch, kv_heads, tokens, value_dim].

        Raises:
            KvdslError: if they cannot continue what is cached.
        """
        if not torch.compiler.is_compiling():
            checks.check_continues(self.state, key_states, self.length, self.batch_size)
            checks.check_length(self.length, key_states.shape[2])
        self.sync.begin(self, key_states.shape[2])
        return mark(key_states, self), value_states

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        real: Tensor | None,
        *,
        scaling: float,
        softcap: float | None,
        sinks: Tensor | None,
        slopes: Tensor | None,
        positions: Tensor | None,
        asked_window: int | None = checks.UNTOLD,
    ) -> Tensor:
        """Cache the new tokens and attend: [batch, tokens, query_heads, value_dim].

        Args:
            query, key, value: as in `AttentionCall`, `key` marked by `update`.
            real: bool [batch, tokens], False for padding, or None.
            positions: the model's position ids, [batch or 1, tokens], to detect an unrelated text, or None.
            asked_window: window of the model's mask; `checks.UNTOLD` without a mask.

        Raises:
            KvdslError: if the tokens cannot continue what is cached.
        """
        self.sync.end(self)
        checks.check_window(module, self.state.layer, self.window, asked_window)
        call = AttentionCall(query, key, value, real, scaling, softcap, self.window, sinks, self.rope, slopes=slopes)
        if not torch.compiler.is_compiling():
            out = self.attend_eagerly(module, call, positions)
        elif _fits_a_graph(self, call):
            out = _attend_in_a_graph(self, module, call)
        else:
            out = _outside_of_graphs(self, module, call, positions)
        return self._gradients.refused(out, call) if torch.is_grad_enabled() else out

    def attend_eagerly(self, module: nn.Module, call: AttentionCall, positions: Tensor | None) -> Tensor:
        """Run `attend` outside of graphs, after all checks."""
        if self._module() is not module:
            self.sync.require_owner(module)
            self._module = weakref.ref(module)
        if self.sync.is_first(self):
            checks.check_text(self.state, positions, call.real, call.query.shape[2])
            if self.state.spec.compact:
                checks.check_counting(self.state, self.sync.counting, positions, call)
            if self.window is not None and call.real is not None:
                checks.check_gaps(self.state, call.real, self.window)
        call = call._replace(forward=self.sync.forward)
        if self.state.choices is not None:
            self.state.choices.begin(self.state.layer)
        if self.length == 0:
            self.state.head_offset = self.head_offset(call.key.shape[1])
        if self.state.spec.supplied:
            call = call._replace(supplied=self.supplying.of_forward(self.state, module, call, self.turn_ends))
        if self.turn_ends:
            checks.check_turns(self.state, call, self.turn_ends)
            self.state.settings.turns += len(self.turn_ends)
            self.turn_ends = []
        # Under autocast, queries and keys are float32 after the rotation. The cache keeps its own dtype.
        wanted = call.value.dtype
        call = call.cast(self.state.dtype if self.state.allocated or self.state.format.packed else wanted)
        if self.undo.log is None:
            out = self._serve(call)
        else:
            tokens, guesses = call.query.shape[2], self.sync.take_guesses(self)
            if self.sync.one_by_one and self.length:
                guesses = tokens
            prompt = prompt_tokens(tokens, guesses, self.length, self.undo.prompt_length)
            with plain_tensors():
                out = serve(self.undo.log, self.state, call, prompt, guesses or 0, self._serve)
        return out if out.dtype == wanted else out.to(wanted)

    def _serve(self, call: AttentionCall) -> Tensor:
        """Serve a forward: several tokens are a prompt unless `one_by_one`, and so is the first forward; a single token is decoded."""
        tokens = call.key.shape[2]
        if self.length == 0 or (tokens > 1 and not self.sync.one_by_one):
            out = self._read_prompt(call)
        else:
            assert self.backend is not None
            if self._has_rate_of_one:
                checks.check_rate(self.state, call)
            out = self.backend.decode(self.state, call)
        self.counted += tokens
        self.sync.add(self, tokens)
        return out

    def _read_prompt(self, call: AttentionCall) -> Tensor:
        batch, _, tokens, _ = call.key.shape
        if self.length == 0:
            self.batch_size = batch
            self.is_initialized = True
            self.backend = self._choose(self.state.spec, call.key.device, call.key.dtype)
        assert self.backend is not None
        with plain_tensors():
            out = self.backend.prefill(self.state, call)
        self.undo.prompt_length = self.length + tokens
        self._has_rate_of_one = self.state.settings.keeps_a_share() and bool(checks.texts_of_one(self.state).any())
        return out

    # -- a forward that torch.compile traces ---------------------------------------------------------------------------

    @property
    def is_compileable(self) -> bool:  # type: ignore[override]
        """Whether `torch.compile` can trace decode steps: the slots have their final number."""
        if self._has_rate_of_one or self.turn_ends or not self.supplying.by_functions(self.state.spec):
            return False
        return self.undo.log is None and self.state.stays_fixed()  # transformers 4.57 allows no guesses with graphs

    def check_mask(self, mask: Tensor, *, one_token: bool) -> None:
        """Run `checks.check_mask`, except after a compiled forward that is not counted yet."""
        if not self.sync.ahead:
            checks.check_mask(self.state, self.counted, mask, one_token=one_token)

    # -- transformers' interface ---------------------------------------------------------------------------------------

    def get_seq_length(self, *args: Any) -> int | Tensor:  # type: ignore[override]
        """Return the tokens seen, padding included; as a tensor if an int would become a constant or wait for a GPU."""
        if self.sync.is_tensor() and self.sync.total is not None:
            return self.sync.total
        return self.length

    def get_mask_sizes(self, query_length: int | Tensor, *args: Any) -> tuple[int, int]:
        """Return the logical length after the forward, as `SlotLength`, and offset 0.

        Raises:
            KvdslError: if there are no new tokens.
        """
        if self.sync.is_tensor():
            return UNCOUNTED, 0
        tokens = token_count(query_length)
        if tokens == 0:
            raise KvdslError(
                f"the text is not longer than the {self.length} tokens that are cached, so there is nothing to run: "
                f"call `cache.reset()` before an unrelated prompt"
            )
        length = SlotLength(self.length + tokens)
        length.layer = self
        return length, 0

    def get_max_length(self) -> int:
        """Return -1, no limit: slots bound the memory, not the text."""
        return -1

    get_max_cache_shape = get_max_length

    # -- rows ----------------------------------------------------------------------------------------------------------

    def reset(self) -> None:
        """Drop everything."""
        self.state.reset()
        self.undo, self._gradients = Undo(self.state), Gradients()
        self.counted = 0
        self.turn_ends = []
        self._has_rate_of_one = False
        self.batch_size = -1
        self.is_initialized = False
        self.sync.forget()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Replace row i by row beam_idx[i]."""
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row `repeats` times, next to itself."""
        self.batch_select_indices(torch.arange(self.batch_size).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Replace row i by row indices[i]; with a bool mask, keep the marked rows. The first layer also moves the recorded text."""
        if not self.length:
            return
        rows = indices.nonzero().flatten() if indices.dtype == torch.bool else indices
        with plain_tensors():
            self.state.select_rows(rows)
            if self.sync.is_first(self):
                self.sync.text.select_rows(rows)
                self.sync.counting.select_rows(rows)
                self.supplying.marks.select_rows(rows)
        self.undo.forget()
        self.batch_size = len(rows)

    # -- taking back -----------------------------------------------------------------------------------------------------

    @property
    def record_past(self) -> bool:
        """Whether steps are recorded. transformers sets it to False when assisted decoding ends."""
        return self.undo.log is not None

    @record_past.setter
    def record_past(self, wanted: bool) -> None:
        if not wanted:
            self.undo.log = None

    def crop(self, tokens: int) -> None:
        """Take the last tokens back; see `KVCache.crop`."""
        removed = self.undo.to_remove(self.length, tokens)
        left = self.length - removed
        with plain_tensors():
            self.undo.take_back(self.length, removed)
        self.supplying.marks.mark_cached(self.state)  # returned tokens may have been marked since
        self.counted = left
        self.sync.add(self, -removed)

    # -- spans and turns -----------------------------------------------------------------------------------------------

    def end_turn(self, at: int | None = None) -> None:
        """End a turn, now or at a position of the next forward's text; see `KVCache.end_turn`."""
        if at is not None:
            self.turn_ends.append(at)
            return
        with plain_tensors():
            end_turn(self.state)
        self.undo.forget()

    def offload(self) -> NoReturn:
        """Refuse: the slots are small enough to stay.

        Raises:
            KvdslError: always.
        """
        raise KvdslError(
            "offloading is not supported: a budget bounds the memory instead; lower it, or leave offloading out"
        )

    prefetch = offload

    def bytes(self) -> int:
        """Return the size of the slots and of recorded steps in bytes."""
        return self.state.bytes() + (0 if self.undo.log is None else self.undo.log.bytes())

    def __repr__(self) -> str:
        window = "" if self.window is None else f", window={self.window}"
        return f"SlotLayer(layer={self.state.layer}, slots={self.state.slots}, length={self.length}{window})"


def _fits_a_graph(layer: SlotLayer, call: AttentionCall) -> bool:
    """Whether a compiled forward can serve this call: one token, slots of their final number.

    Evaluated when the forward is traced, so the answer must not change from step to step.
    """
    state = layer.state
    if not state.allocated or not state.stays_fixed() or layer.undo.log is not None or call.key.shape[2] != 1:
        return False
    if layer._has_rate_of_one or layer.turn_ends or not layer.supplying.by_functions(state.spec):
        return False
    return call.key.device == state.position.device and call.key.shape[0] == layer.batch_size


def _attend_in_a_graph(layer: SlotLayer, module: nn.Module, call: AttentionCall) -> Tensor:
    """Attend for one token in tensor operations only. A Python number that changes from step to step would cause recompilation."""
    assert layer.backend is not None
    with torch.no_grad():
        if layer.state.spec.supplied:
            call = call._replace(supplied=layer.supplying.of_forward(layer.state, module, call))
        out = step(layer.backend, layer.state, call.cast(layer.state.dtype)).to(call.value.dtype)
        layer.sync.add(layer, 1)
    layer.sync.ahead = True
    return out


@torch.compiler.disable(  # type: ignore[untyped-decorator]
    reason="prompts, several tokens at once and caches that grow are served outside of kvdsl's graphs"
)
def _outside_of_graphs(layer: SlotLayer, module: nn.Module, call: AttentionCall, positions: Tensor | None) -> Tensor:
    """Attend where a compiled forward cannot be traced: a graph break."""
    checks.check_continues(layer.state, call.key, layer.length, layer.batch_size)
    return layer.attend_eagerly(module, call, positions)
