"""One layer's slots, seen as a transformers cache layer."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor, nn
from transformers.cache_utils import CacheLayerMixin

from kvdsl.budget import spelled
from kvdsl.errors import KvdslError
from kvdsl.runtime.backend import AttentionCall
from kvdsl.runtime.graph import step
from kvdsl.runtime.hf import speculation
from kvdsl.runtime.hf.attention import mark
from kvdsl.runtime.hf.gradients import asking, refusing
from kvdsl.runtime.hf.mask import UNCOUNTED, UNTOLD, SlotLength
from kvdsl.runtime.hf.supplying import Supplying
from kvdsl.runtime.hf.sync import LayerSync
from kvdsl.runtime.hf.versions import token_count
from kvdsl.runtime.lifetimes import Linked, plain_tensors
from kvdsl.runtime.rope import Rope
from kvdsl.runtime.state.slots import SlotState
from kvdsl.runtime.state.tensors import stays_where_it_is
from kvdsl.runtime.state.undo import UndoLog, can_truncate, truncate

if TYPE_CHECKING:
    from kvdsl.runtime.backend import Backend

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""What keys and values may be stored in."""

MOST_TOKENS = 2**31 - 1
"""Of one text: positions are 32 bits wide."""

ChooseBackend = Callable[[torch.device, torch.dtype], "Backend"]


class SlotLayer(Linked, CacheLayerMixin):
    """One layer: counts what the model has seen, and passes attention on to a backend.

    `update` stores nothing: it hands the new keys and values back, marked, and the attention function calls `attend`.

    Attributes:
        state: the slots.
        window: how far back queries see, themselves included, or None.
        rope: how the module rotates queries and keys, where the policy must know; else None.
        prompt_length: tokens up to the end of the last prompt, of which none can be taken back.
        log: what the last steps overwrote, while somebody records; else None.
        backend: what serves the layer, from its first forward on.
    """

    LINKS = ("rope", "backend", "head_offset", "_choose", "_module", "_asked")

    is_sliding = False
    is_croppable = True
    _asked: bool | None = False  # whether a gradient could be wanted of what is cached

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
        self.window = window
        self.rope = rope
        self.prompt_length = 0
        self.log: UndoLog | None = None
        self.backend: Backend | None = None
        self.batch_size = -1
        self.head_offset: Callable[[int], int] = lambda local_heads: 0
        self.is_initialized = False
        self._counted = 0
        self._has_rate_of_one = False
        self._choose = choose
        self._sync = sync
        self._supplying = Supplying() if supplying is None else supplying
        self._module: Callable[[], nn.Module | None] = lambda: None
        sync.enter(self)

    def attach(self, fresh: SlotLayer) -> None:
        """Have what a fresh layer of the model has."""
        self.rope, self.head_offset, self._choose, self._module = fresh.rope, fresh.head_offset, fresh._choose, fresh._module
        if self.state.allocated:
            self.backend = self._choose(self.state.position.device, self.state.layout.dtype)
            if not self.state.room.grows:
                stays_where_it_is(*self.state.tensors().values())

    @property
    def index(self) -> int:
        """The layer's number in the model."""
        return self.state.layer

    @property
    def length(self) -> int:
        """Tokens that the model has seen, padding included (transformers' idea of the cache's length)."""
        if self._sync.ahead:
            self._sync.catch_up()
        return self._counted

    @property
    def is_alone(self) -> bool:
        """Whether every layer of the cache is of this kind, so that no other attention reads its masks."""
        return self._sync.is_alone

    def set_length(self, tokens: int) -> None:
        """Mend the length."""
        self._counted = tokens

    # -- a forward -----------------------------------------------------------------------------------------------------

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor | None = None) -> None:
        """Nothing to do: the slots are allocated when the prompt's length is known."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Take note of new tokens and hand them back marked.

        Args:
            key_states: [batch, kv_heads, tokens, key_dim].
            value_states: [batch, kv_heads, tokens, value_dim].

        Raises:
            KvdslError: if they cannot continue what is cached.
        """
        if not torch.compiler.is_compiling():
            self.check_continues(key_states)
            self._check_length(key_states.shape[2])
        self._sync.begin(self, key_states.shape[2])
        return mark(key_states, self), value_states

    def check_continues(self, key: Tensor) -> None:
        """Raise KvdslError if the rows of these keys, or their device, are not those of the cache, or no backend stores them."""
        if self.length == 0:
            check_dtype(key.dtype)
            return
        if key.shape[0] != self.batch_size:
            raise KvdslError(
                f"the cache holds {self.batch_size} rows, but {key.shape[0]} came in: call `cache.reset()` before another batch"
            )
        if self.state.allocated and (key.device != self.state.position.device):
            raise KvdslError(
                f"the cache lies on {self.state.position.device}, but the model now runs on {key.device}: call `cache.reset()`"
            )

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
        asked_window: int | None = UNTOLD,
    ) -> Tensor:
        """Cache the new tokens and attend: [batch, tokens, query_heads, value_dim].

        Args:
            query, key, value: as in `AttentionCall`, `key` marked by `update`.
            real: bool [batch, tokens], False for padding, or None.
            positions: the model's position ids, [batch or 1, tokens], to notice an unrelated text; None where it has none.
            asked_window: of the model's mask, `UNTOLD` where that says nothing.

        Raises:
            KvdslError: if the tokens cannot continue what is cached.
        """
        self._sync.end(self)
        self._check_window(module, asked_window)
        call = AttentionCall(query, key, value, real, scaling, softcap, self.window, sinks, self.rope, slopes=slopes)
        if not torch.compiler.is_compiling():
            out = self.attend_eagerly(module, call, positions)
        elif self._fits_a_graph(call):
            out = self._attend_in_a_graph(module, call)
        else:
            out = _outside_of_graphs(self, module, call, positions)
        return self._refusing_gradients(out, call) if torch.is_grad_enabled() else out

    def _refusing_gradients(self, out: Tensor, call: AttentionCall) -> Tensor:
        """What attention returns, whose gradient is an error if it could be wanted, of this forward or of what is cached."""
        asked = asking(call)
        if asked:
            self._asked = True  # written and not read, so that no graph is compiled anew for it
        elif not self._asked:
            return out
        return refusing(out, asked)

    def attend_eagerly(self, module: nn.Module, call: AttentionCall, positions: Tensor | None) -> Tensor:
        """`attend`, once everything that may be wrong has been looked at."""
        self._check_module(module)
        self._check_text(positions, call.real, call.query.shape[2])
        self._check_counting(positions, call)
        if self.window is not None and call.real is not None:
            self._check_gaps(call.real)
        if self.state.choices is not None:
            self.state.choices.begin(self.index)
        if self.length == 0:
            self.state.head_offset = self.head_offset(call.key.shape[1])
        if self.state.spec.supplied:
            call = call._replace(supplied=self._supplying.of_forward(self.state, module, call.key))
        # Under autocast the rotation leaves queries and keys in float32; and what is cached keeps its dtype.
        wanted = call.value.dtype
        call = call.cast(self.state.layout.dtype if self.state.allocated else wanted)
        out = self._serve(call) if self.log is None else self._serve_and_note(self.log, call)
        return out if out.dtype == wanted else out.to(wanted)

    def _serve(self, call: AttentionCall) -> Tensor:
        """A forward of several tokens is a prompt, unless `one_by_one`, and so is the very first; a token after it is decoded."""
        tokens = call.key.shape[2]
        if self.length == 0 or (tokens > 1 and not self._sync.one_by_one):
            out = self._read_prompt(call)
        else:
            assert self.backend is not None
            self._check_rate(call)
            out = self.backend.decode(self.state, call)
        self._counted += tokens
        self._sync.add(self, tokens)
        return out

    def _read_prompt(self, call: AttentionCall) -> Tensor:
        batch, _, tokens, _ = call.key.shape
        if self.length == 0:
            self.batch_size = batch
            self.is_initialized = True
            self.backend = self._choose(call.key.device, call.key.dtype)
        assert self.backend is not None
        with plain_tensors():
            out = self.backend.prefill(self.state, call)
        self.prompt_length = self.length + tokens
        self._has_rate_of_one = self.state.settings.keeps_a_share() and bool(self._texts_of_one().any())
        return out

    def _texts_of_one(self) -> Tensor:
        """The rows of which a single token has come, and of which no more is expected, bool [batch]."""
        return self.state.seen.clamp(min=self.state.expected) == 1

    def _serve_and_note(self, log: UndoLog, call: AttentionCall) -> Tensor:
        """`_serve`, which notes before every token that is no prompt what it will overwrite."""
        tokens, guesses = call.query.shape[2], self._sync.take_guesses(self)
        if self._sync.one_by_one and self.length:
            guesses = tokens
        prompt = speculation.prompt_tokens(tokens, guesses, self.length, self.prompt_length)
        with plain_tensors():
            return speculation.serve(log, self.state, call, prompt, guesses or 0, self._serve)

    # -- a forward that torch.compile traces ---------------------------------------------------------------------------

    @property
    def is_compileable(self) -> bool:  # type: ignore[override]
        """Whether `torch.compile` can trace a decoded token: once the prompt is there, the slots are as many as they ever will be."""
        if self._has_rate_of_one or not self._supplying.by_functions(self.state.spec):
            return False
        return self.log is None and self.state.stays_fixed()  # transformers 4.57 refuses to guess ahead with graphs

    def _fits_a_graph(self, call: AttentionCall) -> bool:
        """Whether a compiled forward can serve this: one more token, for slots that are there and do not grow.

        Asked when the forward is traced; nothing here may differ from one step to the next.
        """
        state = self.state
        if not state.allocated or not state.stays_fixed() or self.log is not None or call.key.shape[2] != 1:
            return False
        if self._has_rate_of_one or not self._supplying.by_functions(state.spec):
            return False
        return call.key.device == state.position.device and call.key.shape[0] == self.batch_size

    def _attend_in_a_graph(self, module: nn.Module, call: AttentionCall) -> Tensor:
        """`attend` for one token, by operations on tensors alone: nothing that differs from step to step is a number of Python."""
        assert self.backend is not None
        with torch.no_grad():
            if self.state.spec.supplied:
                call = call._replace(supplied=self._supplying.of_forward(self.state, module, call.key))
            out = step(self.backend, self.state, call.cast(self.state.layout.dtype)).to(call.value.dtype)
            self._sync.add(self, 1)
        self._sync.ahead = True
        return out

    # -- what must not happen ------------------------------------------------------------------------------------------

    def _check_rate(self, call: AttentionCall) -> None:
        """Raise KvdslError where a rate would bound the whole text by its first token: a prompt that comes token by token, say."""
        if not self._has_rate_of_one:
            return
        concerned = self._texts_of_one()
        if call.real is not None:
            concerned = concerned & call.real.any(1)
        if bool(concerned.any()):
            given = self.state.settings.given.get("budget")
            told = "by default" if given is None else f"{spelled(given)},"
            where = "" if len(concerned) == 1 else f" of row {int(concerned.int().argmax())}"
            raise KvdslError(
                f"`budget` of {self.state.spec.name} is {told} a rate of the prompt, and one token has come as the prompt{where}: pass "
                f"the prompt in forwards of several tokens (`prefill_chunk_size` of 2 or more), say how long it will be "
                f"(`cache.expect_prompt(4096)`), or give a number of tokens (512)"
            )

    def _check_length(self, tokens: int) -> None:
        """Raise KvdslError before positions, which are 32 bits wide, run over."""
        if self.length + tokens > MOST_TOKENS:
            raise KvdslError(
                f"a cache counts {MOST_TOKENS:,} tokens, and {self.length:,} have been seen: call `cache.reset()` and begin anew with the "
                f"end of the text"
            )

    def _check_module(self, module: nn.Module) -> None:
        if self._module() is module:
            return
        if not self._sync.owns(module):
            raise KvdslError(
                "this cache was made for another model: construct a cache for the model that you run (each model has its own)"
            )
        self._module = weakref.ref(module)

    def _check_window(self, module: nn.Module, asked: int | None) -> None:
        """Raise KvdslError if the model's mask has another window than its cache. The test of a new model pads, so that its masks tell."""
        if asked in (UNTOLD, self.window):
            return
        masked, cached = ("the whole text" if window is None else f"{window} tokens" for window in (asked, self.window))
        raise KvdslError(
            f"{type(module).__name__} is masked to see {masked}, but transformers' own cache would give it {cached} in layer {self.index}: "
            f"a prompt and what follows it see different things, which no policy can follow"
        )

    def _check_text(self, positions: Tensor | None, real: Tensor | None, tokens: int) -> None:
        """Notice positions that go back: an unrelated prompt. Looks at the first layer, and never waits for a GPU's decode step."""
        if positions is None or positions.ndim != 2 or not self.state.allocated or not self._sync.is_first(self):
            return
        if tokens == 1 and positions.device.type != "cpu":
            return
        new = torch.full_like(self.state.seen, tokens) if real is None else real.sum(1)
        behind = positions.amax(1) + 1 < self.state.seen + new
        if bool((behind & (new > 0)).any()):
            raise KvdslError(
                f"position {int(positions.max())} comes after {int(self.state.seen.max())} cached tokens: this text does not "
                f"continue the cached one; call `cache.reset()` before an unrelated prompt"
            )

    def _check_gaps(self, real: Tensor) -> None:
        """Raise KvdslError for padding behind text in a layer with a window: transformers' windows count it, and slots do not hold it.

        Where and when `_check_text` looks.
        """
        if not self._sync.is_first(self) or (real.shape[1] == 1 and real.device.type != "cpu"):
            return
        seen = real.new_zeros(len(real), dtype=torch.int32) if not self.state.allocated else self.state.seen
        behind_text = ~real & ((seen > 0)[:, None] | (real.cumsum(1) > 0))
        if bool((behind_text & real.any(1)[:, None]).any()):
            row = int((behind_text & real.any(1)[:, None]).any(1).int().argmax())
            raise KvdslError(
                f"row {row} has padding behind text, but every layer of the model attends within {self.window} tokens, among which "
                f"transformers counts padding: pad on the left only, or go on with each row by itself"
            )

    def _check_counting(self, positions: Tensor | None, call: AttentionCall) -> None:
        """Notice positions that do not count tokens, under compact ones. Where and when `_check_text` looks."""
        if not self.state.spec.compact or not self._sync.is_first(self):
            return
        positions, (rows, _, tokens, _) = self._sync.counting.take(positions), call.query.shape
        if positions is None or positions.ndim not in (2, 3) or positions.shape[-1] != tokens:
            return
        if tokens == 1 and call.query.device.type != "cpu":
            return
        seen = self.state.seen if self.state.allocated else torch.zeros(rows, dtype=torch.int32, device=call.query.device)
        with plain_tensors():
            self._sync.counting.check(positions, call.real, seen, self.state.spec.name)

    def check_mask(self, mask: Tensor, *, one_token: bool) -> None:
        """Raise KvdslError for a mask of the whole text, [batch, columns], that leaves out tokens which are cached.

        They would be attended to all the same. Never waits for a GPU's decode step.
        """
        if not self.state.allocated or self._sync.ahead or (one_token and mask.device.type != "cpu"):
            return
        seen, columns = self.state.seen, self._counted
        if mask.shape[1] < columns or len(mask) != len(seen):
            return  # which is looked at where the mask is read
        left_out = seen - (mask[:, :columns] != 0).sum(1).to(seen)
        if bool((left_out > 0).any()):
            row = int(left_out.argmax())
            raise KvdslError(
                f"row {row} of the attention mask leaves out {int(left_out[row])} of {int(seen[row])} tokens that were cached as text: a "
                f"cache of slots cannot hide them again; mask padding when it comes, or call `cache.reset()` and pass the text anew"
            )

    # -- what transformers asks ----------------------------------------------------------------------------------------

    def get_seq_length(self, *args: Any) -> int | Tensor:  # type: ignore[override]
        """Tokens seen, padding included; a tensor where reading it would be compiled into a constant, or wait for a GPU."""
        if self._sync.is_tensor() and self._sync.total is not None:
            return self._sync.total
        return self.length

    def get_mask_sizes(self, query_length: int | Tensor, *args: Any) -> tuple[int, int]:
        """The logical length after the forward, marked as ours, and no offset.

        Raises:
            KvdslError: if nothing is new.
        """
        if self._sync.is_tensor():
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
        """No limit: the slots bound the memory, not the text."""
        return -1

    get_max_cache_shape = get_max_length

    # -- rows ----------------------------------------------------------------------------------------------------------

    def reset(self) -> None:
        """Forget everything."""
        self.state.reset()
        self.log = None
        self._counted = self.prompt_length = 0
        self._has_rate_of_one = self._asked = False
        self.batch_size = -1
        self.is_initialized = False
        self._sync.forget()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row i becomes what row beam_idx[i] was."""
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row `repeats` times, next to itself."""
        self.batch_select_indices(torch.arange(self.batch_size).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Row i becomes what row indices[i] was, once a cache that of the text, too; or keep these rows only, if they are marked."""
        if not self.length:
            return
        rows = indices.nonzero().flatten() if indices.dtype == torch.bool else indices
        with plain_tensors():
            self.state.select_rows(rows)
            if self._sync.is_first(self):
                self._sync.text.select_rows(rows)
                self._sync.counting.select_rows(rows)
        self.forget_steps()
        self.batch_size = len(rows)

    # -- taking back -----------------------------------------------------------------------------------------------------

    def record(self, steps: int) -> None:
        """From now on, note what a step overwrites, so that the last `steps` can be taken back."""
        if self.log is None:
            self.log = UndoLog(steps)
        self.log.steps = max(self.log.steps, steps)

    @property
    def record_past(self) -> bool:
        """Whether steps are noted; transformers sets it to False when it is done with taking them back."""
        return self.log is not None

    @record_past.setter
    def record_past(self, wanted: bool) -> None:
        if not wanted:
            self.log = None

    def to_remove(self, tokens: int, *, noted_only: bool = False) -> int:
        """How many tokens `crop(tokens)` removes: `-tokens`, or what exceeds the length that a positive number is.

        Args:
            noted_only: whether other layers can go back no further than what was noted.

        Raises:
            KvdslError: if so many cannot be taken back, or if `tokens` is no whole number.
        """
        removed = speculation.asked_to_remove(tokens, self.length)
        left = self.length - removed
        if not self._is_noted(removed) and (
            noted_only or not can_truncate(self.state, self.length, left, self.prompt_length)
        ):
            speculation.refuse_too_far(self.log, removed, self.length - self.prompt_length)
        return removed

    def _is_noted(self, steps: int) -> bool:
        """Whether the log has so many steps."""
        return self.log is not None and steps <= min(len(self.log), self.length - self.prompt_length)

    def crop(self, tokens: int) -> None:
        """Take the last tokens back; see `KVCache.crop`."""
        removed = self.to_remove(tokens)
        left = self.length - removed
        with plain_tensors():
            if self.log is not None and self._is_noted(removed):
                self.log.take_back(self.state, removed)
            elif removed:
                truncate(self.state, left)
                self.forget_steps()
        self.prompt_length = min(self.prompt_length, left)
        self.set_length(left)
        self._sync.add(self, -removed)

    def forget_steps(self) -> None:
        """No step before now can be taken back."""
        if self.log is not None:
            self.log.forget()

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
        """What the slots occupy, and what was noted of the last steps."""
        return self.state.bytes() + (0 if self.log is None else self.log.bytes())

    def __repr__(self) -> str:
        window = "" if self.window is None else f", window={self.window}"
        return f"SlotLayer(layer={self.index}, slots={self.state.slots}, length={self.length}{window})"


def check_dtype(dtype: torch.dtype) -> None:
    """Raise KvdslError for a dtype that no backend stores."""
    if dtype not in DTYPES:
        names = ", ".join(str(known).removeprefix("torch.") for known in DTYPES)
        raise KvdslError(f"keys and values are {str(dtype).removeprefix('torch.')}; kvdsl stores {names}: convert the model")


@torch.compiler.disable(  # type: ignore[untyped-decorator]
    reason="prompts, several tokens at once and caches that grow are served outside of kvdsl's graphs"
)
def _outside_of_graphs(layer: SlotLayer, module: nn.Module, call: AttentionCall, positions: Tensor | None) -> Tensor:
    """`attend` where a compiled forward meets something that it cannot trace: a graph break."""
    layer.check_continues(call.key)
    return layer.attend_eagerly(module, call, positions)
