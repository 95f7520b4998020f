"""Shift and append for whole models: what an in-place update is raced against.

A policy's rule, without its in-place update: what stays is moved together and the new token is appended behind it, in every layer and for
every token. Under compact positions all keys are rotated anew for the places 0 to n - 1, by the model's own function (Xiao et al. 2023,
"Efficient Streaming Language Models with Attention Sinks", section 3.2). Of kvdsl's runtime nothing serves here but the policy's numbers.
There are two of them:

- `shift`, done as well as torch allows. What stays is moved between two buffers that are allocated once, together with the append,
  each row once: slices for all heads at once where the same token leaves everywhere, otherwise one `index_select` of whole rows. Keys
  are turned a piece at a time that a core's cache holds, into one buffer that all layers share. No tensor that is as large as the
  cache is ever allocated for a token.
- `fresh`, as the published code of StreamingLLM and H2O writes it, and EQUIP's baselines do (appendix A.3): concatenation of slices
  or, where every head loses another token, of what a boolean mask picks; the model's own rotation; eager attention; all of it into memory
  that is allocated for it.

Both choose the victim with one `argmin`, since places are in the order of the text. What a window of queries gave is remembered query by
query, as a policy in place does it: published code reads all keys again for it, by every query of the window and for every token.
"""

from __future__ import annotations

import copy
import time
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import AttentionInterface

from kvdsl.errors import KvdslError
from kvdsl.runtime.hf.versions import native_layers, text_config, token_count
from kvdsl.runtime.spec import PolicySpec
from kvdsl.runtime.state.layers import slot_state
from kvdsl_lab.bench import baselines
from kvdsl_lab.bench.rotary import Rotary
from kvdsl_lab.bench.unrotated import bias, is_rotated

PLACE, SUM, WINDOW, OWN = "place", "sum", "window", "own"
"""Who leaves: the oldest behind the sinks; who got least of all queries, or of the last ones; whose key and value make least."""

SERVED = {
    "h2o": SUM, "equip_h2o": SUM, "streaming_llm": PLACE, "equip_streaming": PLACE, "snapkv_tokens": WINDOW, "lagkv_tokens": OWN,
}  # fmt: skip
"""Policies whose rule is written here, by their files' stems."""

_ATTENTION = "shift_and_append"
_LAYER = "_shifted_layer"
_PIECE = 2**21
"""Bytes of keys that are turned at a time: they stay in a core's cache while three operations pass over them."""


# -- a policy's rule ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rule:
    """Who stays: `capacity` tokens per KV head; the first `sinks` of them, the last `recent`, and who comes first by what `ranks`.

    Attributes:
        window: how many queries that is of, under `WINDOW`.
    """

    ranks: str
    capacity: int
    sinks: int
    recent: int
    window: int


def rule(spec: PolicySpec, given: Mapping[str, float | None], prompt_tokens: int) -> Rule:
    """What the policy keeps behind a prompt of that length.

    Raises:
        KvdslError: if it is none of `SERVED`.
    """
    check_served(spec.stem)
    state = slot_state(spec, given, layer=0, layers=1, seed=0)
    numbers = {
        name: int(value)
        for name, value in state.settings.named(state.settings.resolve(torch.tensor([prompt_tokens]))).items()
    }
    window = numbers.get("window", 0)
    return Rule(SERVED[spec.stem], numbers["capacity"], numbers.get("sinks", 0), numbers.get("recent", window), window)


def check_served(policy: str) -> None:
    """Raise KvdslError for a policy that is none of `SERVED`."""
    if policy not in SERVED:
        raise KvdslError(
            f"shift and append is written for {', '.join(SERVED)}, not for `{policy}`; race that against `transformers`"
        )


# -- a model that attends to it ----------------------------------------------------------------------------------------


def twin(model: Any) -> Any:
    """The same model, on the same weights, whose attention is that of these caches and of no others."""
    AttentionInterface.register(_ATTENTION, _attention)
    AttentionMaskInterface.register(_ATTENTION, lambda *args, **kwargs: None)
    shared = {id(tensor): tensor for tensor in chain(model.parameters(), model.buffers())}
    made = copy.deepcopy(model, shared)  # type: ignore[arg-type]
    made.set_attn_implementation(_ATTENTION)
    return made


def _attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    *_: Any,
    scaling: float | None = None,
    alibi_slopes: Tensor | None = None,
    **__: Any,
) -> tuple[Tensor, None]:
    layer: _Layer = getattr(key, _LAYER)
    factor = query.shape[-1] ** -0.5 if scaling is None else scaling
    return layer.attend(query, factor, alibi_slopes).transpose(1, 2).contiguous(), None


class ShiftedCache(Cache):
    """A cache that is shifted for every token; for `twin(model)`. Rows are of equal length, without padding.

    Args:
        spec: the policy whose rule decides.
        given: its params by name.
        fresh: whether as published code does it, see above.

    Raises:
        KvdslError: if the policy is none of `SERVED`, or the model's keys cannot be rotated anew although it wants that.
    """

    def __init__(self, model: Any, spec: PolicySpec, given: Mapping[str, float | None], *, fresh: bool) -> None:
        check_served(spec.stem)
        kind = _Fresh if fresh else _Moved
        rotary = Rotary(model) if spec.compact and is_rotated(model) else None
        room = _Room()
        count = len(native_layers(text_config(model)))
        super().__init__(
            layers=[kind(lambda tokens: rule(spec, given, tokens), rotary, room, spec.compact) for _ in range(count)]
        )

    def bytes(self) -> int:
        """What the cache occupies, the memory that it shifts into included."""
        held = [tensor for layer in self.layers for tensor in layer.tensors()]
        return sum(tensor.nbytes for tensor in (*held, *self.layers[0].room.tensors()))

    def seconds(self) -> Counter[str]:
        """What was spent so far on the cache (`update`) and, under compact positions, on turning its keys (`rotation`)."""
        return sum((layer.seconds for layer in self.layers), Counter[str]())

    def full_bytes(self) -> int:
        """What keys and values of every token that the model has seen would occupy."""
        return sum(layer.seen * 2 * layer.keys[:, :, :1].nbytes for layer in self.layers)


@dataclass
class _Room:
    """Buffers that a cache's layers share: one to move into, one for turned keys."""

    spare: Tensor = field(default_factory=lambda: torch.empty(0))
    turned: Tensor = field(default_factory=lambda: torch.empty(0))

    def tensors(self) -> tuple[Tensor, Tensor]:
        """Both."""
        return self.spare, self.turned

    def of(self, name: str, like: Tensor) -> Tensor:
        """The named buffer, in the shape of another tensor."""
        if getattr(self, name).shape != like.shape:
            setattr(self, name, torch.empty_like(like, memory_format=torch.contiguous_format))
        found: Tensor = getattr(self, name)
        return found


class _Layer(CacheLayerMixin):
    """One layer.

    Attributes:
        keys, values: [batch, kv_heads, n, dim] in the order of the text, the one that is to leave still among them; keys as they were
            before any rotation under compact positions, otherwise as the model rotated them.
        sums: float32 [batch, kv_heads, n], what they rank by: of the probabilities that queries gave, the mean of a group's heads.
        ring: float32 [batch, kv_heads, n, window], the probabilities of the last queries, each in its turn.
        victim: the place of what leaves before the next token comes: of all heads, or [batch, kv_heads]; None if nobody does.
        seen: tokens of the text so far.
        seconds: as in `ShiftedCache.seconds`.
    """

    keys: Tensor
    values: Tensor
    sums: Tensor
    ring: Tensor

    def __init__(self, rule: Callable[[int], Rule], rotary: Rotary | None, room: _Room, compact: bool) -> None:
        super().__init__()
        self.room, self.seen = room, 0
        self._compact = compact
        self.victim: int | Tensor | None = None
        self.seconds: Counter[str] = Counter()
        self._rule, self._rotary = rule, rotary

    def tensors(self) -> tuple[Tensor, ...]:
        """What it holds."""
        return (self.keys, self.values, self.sums, self.ring) if self.is_initialized else ()

    @contextmanager
    def _lap(self, name: str) -> Iterator[None]:
        begun = time.perf_counter()
        yield
        self.seconds.update({name: time.perf_counter() - begun})  # type: ignore[dict-item]

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor | None = None) -> None:
        """Nothing is cached yet."""
        self._kept = self._rule(key_states.shape[2])
        self.keys = key_states[:, :, :0]
        self.values = self.keys if value_states is None else value_states[:, :, :0]
        self.sums = key_states.new_zeros(*key_states.shape[:2], 0, dtype=torch.float32)
        self.ring = key_states.new_zeros(*key_states.shape[:2], 0, self._kept.window, dtype=torch.float32)
        self.is_initialized = True

    # -- a forward -----------------------------------------------------------------------------------------------------

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """The victim leaves and new tokens are appended; `attend` comes next, which the key leads to."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        with self._lap("update"):
            key = key_states if self._rotary is None else self._rotary(key_states, self.length, back=True)
            if self.victim is None:
                self.keys, self.values = torch.cat([self.keys, key], 2), torch.cat([self.values, value_states], 2)
                self.sums, self.ring = _padded(self.sums, self.ring, key.shape[2])
            else:
                self.shift(self.victim, key, value_states)
            if self._kept.ranks == OWN:
                self.sums[..., -key.shape[2] :] = key.float().norm(dim=-1) + value_states.float().std(-1, correction=0)
            self.seen += key.shape[2]
        marked = key_states.view(key_states.shape)
        setattr(marked, _LAYER, self)
        return marked, value_states

    def attend(self, query: Tensor, scaling: float, slopes: Tensor | None = None) -> Tensor:
        """[batch, query_heads, tokens, dim]; then it is known who leaves. `slopes`: [query_heads] of a bias, or None."""
        keys = self.keys
        if self._rotary is not None:
            with self._lap("rotation"):
                keys = self.turned(self._rotary)
        if query.shape[2] > 1:
            return self._attend_prompt(query, keys, scaling, slopes)
        batch, heads, places, _ = keys.shape
        out, weights = self.attention(query, keys, scaling, None if slopes is None else self._bias(slopes))
        with self._lap("update"):
            if self._kept.ranks in (SUM, WINDOW):
                self._observe(weights.float().view(batch, heads, -1, places).mean(2))
            if places > self._kept.capacity:
                self.victim = self._leaves(places)
        return out

    def _observe(self, given: Tensor) -> None:
        """What the newest query gave, [batch, kv_heads, n]."""
        if self._kept.ranks == SUM:
            self.sums += given
        else:
            self.ring[..., (self.seen - 1) % self._kept.window] = given
            torch.sum(self.ring, -1, out=self.sums)

    def _bias(self, slopes: Tensor) -> Tensor:
        """Of the newest token's logits, by distances in the cache: [query_heads, 1, n]."""
        if not self._compact:
            raise KvdslError(
                "a shifted cache does not know where tokens stood in the text: race a policy with `positions compact`"
            )
        return bias(slopes, 1, self.keys.shape[2])

    def _attend_prompt(self, query: Tensor, keys: Tensor, scaling: float, slopes: Tensor | None) -> Tensor:
        """Row by row, so that all probabilities of one fit into memory; then the prompt is cut to what stays of it."""
        tokens, group = query.shape[2], query.shape[1] // keys.shape[1]
        if keys.shape[2] != tokens:
            raise KvdslError("a shifted cache takes a prompt, and then one token at a time")
        hidden = torch.ones(tokens, tokens, dtype=torch.bool, device=keys.device).triu_(1)
        found = []
        window = min(self._kept.window, tokens)
        turns = torch.arange(tokens - window, tokens, device=keys.device) % max(window, self._kept.window)
        for row, (sums, ring) in enumerate(zip(self.sums, self.ring, strict=True)):
            wide = baselines.repeat_kv(keys[row : row + 1], group), baselines.repeat_kv(self.values[row : row + 1], group)
            weights = torch.matmul(query[row : row + 1], wide[0].transpose(2, 3)).mul_(scaling)
            if slopes is not None:
                weights += bias(slopes, tokens, tokens).to(weights.dtype)
            weights = weights.masked_fill_(hidden, -torch.inf).softmax(-1, dtype=torch.float32)
            given = weights.view(len(sums), group, tokens, tokens).mean(1)
            if self._kept.ranks == SUM:
                sums += given.sum(1)
            elif self._kept.ranks == WINDOW:
                ring[..., turns] = given[:, -window:].mT
                sums.copy_(ring.sum(-1))
            found.append(torch.matmul(weights.to(query.dtype), wide[1]))
        self._cut(tokens - self._kept.capacity)
        return torch.cat(found)

    def _cut(self, over: int) -> None:
        """So many tokens of the prompt leave, before the next token comes."""
        if over <= 0:
            return
        order, sinks = self.sums.new_zeros(self.sums.shape), self._kept.sinks
        if self._kept.ranks == PLACE:
            order[..., sinks : sinks + over] = -1.0
        else:
            between = self.sums[..., sinks : self.sums.shape[2] - self._kept.recent]
            lowest = sinks + between.argsort(dim=-1, stable=True)[..., :over]
            order.scatter_(-1, lowest, -1.0)
        stay = order.argsort(dim=-1, stable=True)[..., over:]
        self.sums = self.sums.gather(2, stay)
        self.keys, self.values, self.ring = (
            x.gather(2, stay[..., None].expand(-1, -1, -1, x.shape[-1])) for x in (self.keys, self.values, self.ring)
        )

    def _leaves(self, places: int) -> int | Tensor:
        sinks = self._kept.sinks
        if self._kept.ranks == PLACE:
            return sinks
        return self.sums[..., sinks : places - self._kept.recent].argmin(-1).add_(sinks)

    # -- what the two differ in ----------------------------------------------------------------------------------------

    @abstractmethod
    def shift(self, victim: int | Tensor, key: Tensor, value: Tensor) -> None:
        """The victim's place closes, and the new token [batch, kv_heads, 1, dim] stands behind all others."""

    @abstractmethod
    def turned(self, rotary: Rotary) -> Tensor:
        """All keys, rotated for the places 0 to n - 1."""

    @abstractmethod
    def attention(self, query: Tensor, keys: Tensor, scaling: float, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        """Of one query: the output [batch, query_heads, 1, dim] and the probabilities [batch, query_heads, 1, n].

        Args:
            bias: joins the logits, [query_heads, 1, n]; or None.
        """

    # -- what transformers asks ----------------------------------------------------------------------------------------

    @property
    def length(self) -> int:
        """Tokens that the next one will find."""
        return 0 if not self.is_initialized else self.keys.shape[2] - (self.victim is not None)

    def get_seq_length(self, *args: Any) -> int:
        """The position of the next token: in the cache under compact positions, otherwise in the text."""
        return self.seen if self._rotary is None else self.length

    def get_mask_sizes(self, query_length: int | Tensor, *args: Any) -> tuple[int, int]:
        """Keys that the new tokens will find, and no offset."""
        return self.length + token_count(query_length), 0

    def get_max_length(self) -> int:
        """No limit of the text."""
        return -1

    get_max_cache_shape = get_max_length

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row `repeats` times, next to itself."""
        self.keys, self.values, self.sums, self.ring = (x.repeat_interleave(repeats, 0) for x in self.tensors())
        if isinstance(self.victim, Tensor):
            self.victim = self.victim.repeat_interleave(repeats, 0)


class _Moved(_Layer):
    """Done well."""

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor | None = None) -> None:
        """Nothing is cached yet; raises KvdslError where the model does not rotate whole heads by halves."""
        super().lazy_initialization(key_states, value_states)
        if self._rotary is None:
            return
        some = torch.randn(1, 1, 3, key_states.shape[-1], dtype=key_states.dtype, device=key_states.device)
        cos, sin = self._rotary.tables(some)
        rounding = 8 * torch.finfo(some.dtype).eps * float(some.abs().max())
        if cos.shape[-1] != some.shape[-1] or not torch.allclose(
            _turn(some, cos, sin), self._rotary(some, 0), rtol=0, atol=rounding
        ):
            raise KvdslError(
                "`shift` turns whole heads by halves, as Llama does, and this model does not: race `fresh` instead"
            )

    def shift(self, victim: int | Tensor, key: Tensor, value: Tensor) -> None:
        rows = None if isinstance(victim, int) else self._rows(victim)
        for name, new in (("keys", key), ("values", value)):
            old: Tensor = getattr(self, name)
            moved = self.room.of("spare", old)
            if rows is None:
                torch.cat([old[:, :, :victim], old[:, :, victim + 1 :], new], dim=2, out=moved)
            else:
                torch.index_select(old.view(-1, old.shape[-1]), 0, rows, out=moved.view(-1, old.shape[-1]))
                moved[:, :, -1:] = new
            setattr(self, name, moved)
            self.room.spare = old
        if rows is not None:
            self.sums = self.sums.view(-1)[rows].view(self.sums.shape)
            self.sums[..., -1] = 0.0
        if rows is not None and self._kept.window:
            self.ring = self.ring.view(-1, self._kept.window).index_select(0, rows).view(self.ring.shape)
            self.ring[..., -1, :] = 0.0

    def _rows(self, victim: Tensor) -> Tensor:
        """Where every place's content comes from among all rows; the last, which is new, from anywhere."""
        batch, heads, places, _ = self.keys.shape
        place = torch.arange(places, device=victim.device)
        source = (place + (place >= victim[..., None])).clamp_max_(places - 1)
        head = torch.arange(batch * heads, device=victim.device).view(batch, heads, 1)
        return source.add_(head * places).view(-1)

    def turned(self, rotary: Rotary) -> Tensor:
        made = self.room.of("turned", self.keys)
        cos, sin = rotary.tables(self.keys)
        keys, to = self.keys.flatten(0, 1), made.flatten(0, 1)
        heads = max(1, _PIECE // keys[0].nbytes)
        for source, turned in zip(keys.split(heads), to.split(heads), strict=True):
            _turn(source, cos, sin, turned)
        return made

    def attention(self, query: Tensor, keys: Tensor, scaling: float, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        """See `_Layer.attention`: one product per KV head with the group's queries as rows, no copy of keys."""
        batch, heads, places, dim = keys.shape
        weights = torch.matmul(query.reshape(batch, heads, -1, dim), keys.transpose(2, 3)).mul_(scaling)
        if bias is not None:
            weights += bias.view(heads, -1, places).to(weights.dtype)
        weights = weights.softmax(-1, dtype=torch.float32).to(query.dtype)
        return torch.matmul(weights, self.values).view(query.shape), weights.view(batch, -1, 1, places)


def _padded(sums: Tensor, ring: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
    """With zeros for so many tokens more."""
    return torch.nn.functional.pad(sums, (0, tokens)), torch.nn.functional.pad(ring, (0, 0, 0, tokens))


def _turn(keys: Tensor, cos: Tensor, sin: Tensor, out: Tensor | None = None) -> Tensor:
    """Keys [..., n, dim], whose halves turn by angles of these cosines and sines [n, dim]."""
    half = keys.shape[-1] // 2
    turned = torch.mul(keys, cos, out=out)
    turned[..., :half].addcmul_(keys[..., half:], sin[:, :half], value=-1)
    turned[..., half:].addcmul_(keys[..., :half], sin[:, half:])
    return turned


class _Fresh(_Layer):
    """As published."""

    def shift(self, victim: int | Tensor, key: Tensor, value: Tensor) -> None:
        new = key, value
        if isinstance(victim, int):
            self.keys, self.values = baselines.shift_in_fresh_memory(self.keys, self.values, victim, new)
            return
        stay = torch.ones(self.keys.shape[:3], dtype=torch.bool, device=key.device).scatter_(2, victim[..., None], False)
        self.keys, self.values = baselines.gather_in_fresh_memory(self.keys, self.values, stay, new)
        sums, ring = (x[stay].view(*stay.shape[:2], stay.shape[2] - 1, *x.shape[3:]) for x in (self.sums, self.ring))
        self.sums, self.ring = _padded(sums, ring, 1)

    def turned(self, rotary: Rotary) -> Tensor:
        return rotary(self.keys, 0)

    def attention(self, query: Tensor, keys: Tensor, scaling: float, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        group = query.shape[1] // keys.shape[1]
        wide = baselines.repeat_kv(keys, group), baselines.repeat_kv(self.values, group)
        weights = torch.matmul(query, wide[0].transpose(2, 3)) * scaling
        if bias is not None:
            weights = weights + bias.to(weights.dtype)
        weights = weights.softmax(-1, dtype=torch.float32).to(query.dtype)
        return torch.matmul(weights, wide[1]), weights
