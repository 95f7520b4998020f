"""A prompt's attention and statistics against a matrix of all probabilities in float64."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import kvdsl
from kvdsl.compiler import analyse
from kvdsl.runtime.backend import AttentionCall
from kvdsl.runtime.backends import choose
from kvdsl.runtime.cpu.backend import CpuBackend
from kvdsl.runtime.spec import PolicySpec
from kvdsl.runtime.state.slots import SlotState
from kvdsl.runtime.torch import columns, dense
from kvdsl.runtime.torch.columns import Columns
from kvdsl.runtime.torch.prefill import attend_and_observe, prefill
from kvdsl.runtime.torch.prompt import Prompt
from kvdsl.shipped import all_policies
from tests.quick import few
from tests.texts import spec_of

TOLERANCE = 1e-5
"""Of columns, whatever the dtype: relative to what was added up, or absolute below 1."""

ROUNDING = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
"""Of outputs."""

RING = 5

SCORE = (
    "sum(attn) + std(attn) + max(attn) + min(attn) + sum(attn > mean(attn over slots)) + last(attn) + ema(attn, 0.9) + "
    f"sum(attn over last {RING} queries) + sum(norm1(v) * attn)"
)
WATCH = f"param budget = 10000\nscore {SCORE}"
LOGITS = WATCH.replace(SCORE, "mean(logit) + max(dot(q, k)) + sum(attn)")
LAST = WATCH.replace(SCORE, f"sum(attn over last {RING} queries)")
NOTHING = WATCH.replace(SCORE, "norm1(v)")


@dataclass(frozen=True)
class Case:
    """A prompt of `tokens` tokens that comes in `cuts` forwards; `real` is a row of padding marks, per row of the batch."""

    tokens: int = 150
    group: int = 4
    heads: int = 2
    dim: int = 16
    value_dim: int = 16
    dtype: torch.dtype = torch.float32
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    padding: str = "none"
    cuts: int = 1
    scale: float = 1.0
    rising: bool = False  # keys become longer, so that the highest score comes late

    def real(self) -> Tensor | None:
        """Bool [batch, tokens], or None."""
        if self.padding == "none":
            return None
        real = torch.ones(3, self.tokens, dtype=torch.bool)
        if self.padding in ("left", "right"):
            real[1, :40], real[2, :-1] = False, False
            return real if self.padding == "left" else real.flip(1)
        if self.padding == "gap":
            real[1, 30:90], real[2, 64:128] = False, False
            return real
        assert self.padding == "scattered"
        return torch.rand(3, self.tokens, generator=torch.Generator().manual_seed(5)) < 0.7

    def call(self) -> AttentionCall:
        """All of it; queries and keys lie in memory as a model's do."""
        make = torch.Generator().manual_seed(self.tokens + self.group)
        real = self.real()
        batch = 1 if real is None else len(real)
        sizes = ((self.heads * self.group, self.dim), (self.heads, self.dim), (self.heads, self.value_dim))
        query, key, value = (
            torch.randn(batch, self.tokens, heads, dim, generator=make).to(self.dtype).transpose(1, 2)
            for heads, dim in sizes
        )
        if self.rising:
            key = key * torch.linspace(0.1, 4, self.tokens)[:, None]
        sinks = torch.randn(self.heads * self.group, generator=make) if self.sinks else None
        return AttentionCall(query * self.scale, key, value, real, self.dim**-0.5, self.softcap, self.window, sinks)

    def parts(self) -> Iterator[AttentionCall]:
        """The same, forward by forward."""
        whole = self.call()
        for part in torch.arange(self.tokens).tensor_split(self.cuts):
            query, key, value = (x[:, :, part] for x in (whole.query, whole.key, whole.value))
            real = None if whole.real is None else whole.real[:, part]
            yield AttentionCall(query, key, value, real, whole.scaling, whole.softcap, whole.window, whole.sinks)


CASES = {
    "causal": Case(),
    "one head": Case(group=1),
    "groups of three": Case(group=3),
    "groups of five": Case(group=5),
    "groups of seven": Case(group=7),
    "one token": Case(tokens=1),
    "seventeen tokens": Case(tokens=17, group=2),
    "window": Case(window=23),
    "window of one": Case(window=1, tokens=40),
    "softcap": Case(softcap=2.0, scale=3.0),
    "sinks": Case(sinks=True, group=2),
    "sizes differ": Case(value_dim=24, dim=20),
    "values are smaller": Case(value_dim=8),
    "left padding": Case(padding="left"),
    "right padding": Case(padding="right", group=2),
    "padding anywhere": Case(padding="scattered", group=2),
    "padded window": Case(padding="left", window=17),
    "window over a gap": Case(padding="gap", window=17, group=2),
    "padded window with sinks": Case(padding="scattered", window=17, sinks=True),
    "padded softcap": Case(padding="left", softcap=1.5),
    "three forwards": Case(cuts=3),
    "three forwards of a window": Case(cuts=3, window=23),
    "three padded forwards": Case(cuts=3, padding="left", group=2),
    "three capped forwards": Case(cuts=3, softcap=2.0, padding="scattered", window=31),
    "sharp": Case(scale=12.0),
    "rising": Case(rising=True),
    "rising with sinks": Case(rising=True, sinks=True, padding="left", group=3),
    "bfloat16": Case(dtype=torch.bfloat16, group=2),
    "bfloat16 in odd numbers": Case(tokens=77, group=5, dim=18, value_dim=21, dtype=torch.bfloat16, padding="left"),
    "bfloat16 in three forwards": Case(group=3, dtype=torch.bfloat16, cuts=3, padding="scattered", window=31),
    "bfloat16 for a matrix unit": Case(tokens=200, group=3, dim=64, value_dim=64, dtype=torch.bfloat16),
    "bfloat16 for a matrix unit, with rests": Case(
        tokens=209, dim=32, value_dim=88, dtype=torch.bfloat16, cuts=2, padding="scattered", window=150, sinks=True
    ),
    "half": Case(dtype=torch.float16, dim=24, value_dim=24),
    "half of small heads": Case(dtype=torch.float16, group=3),
}


class Matrix:
    """One row and KV head with all its logits, [group, n, n], in float64."""

    def __init__(self, call: AttentionCall, row: int, head: int) -> None:
        group = call.query.shape[1] // call.key.shape[1]
        real = slice(None) if call.real is None else call.real[row]
        heads = slice(head * group, (head + 1) * group)
        self.query, self.key, self.value = (
            call.query[row, heads][:, real].double(), call.key[row, head][real].double(), call.value[row, head][real].double()
        )  # fmt: skip
        self.logit = torch.einsum("gqd,sd->gqs", self.query, self.key) * call.scaling
        if call.softcap is not None:
            self.logit = call.softcap * (self.logit / call.softcap).tanh()
        age = torch.arange(len(self.key))[:, None] - torch.arange(len(self.key))
        self.seen = (age >= 0) & (age < (call.window or len(self.key)))
        hidden = self.logit.masked_fill(~self.seen, -torch.inf)
        if call.sinks is not None:
            sinks = call.sinks[heads].double().view(-1, 1, 1).expand(-1, len(self.key), 1)
            hidden = torch.cat([hidden, sinks], -1)
        prob = hidden.softmax(-1)[..., : len(self.key)]
        self.out = prob @ self.value
        self.attn = prob.mean(0)
        self._known: dict[str, Tensor] = {}

    def column(self, name: str) -> Tensor:
        """What the column should hold, [n]."""
        if name not in self._known:
            self._known[name] = self._column(name)
        return self._known[name]

    def _column(self, name: str) -> Tensor:
        attn, seen = self.attn, self.seen
        if name in ("max_attn", "min_attn", "max_sum_q_times_k"):
            x = torch.einsum("gqd,sd->qs", self.query, self.key) / len(self.query) if "q_times" in name else attn
            x = -x if name == "min_attn" else x
            top = x.masked_fill(~seen, -torch.inf).amax(0)
            return -top if name == "min_attn" else top
        if name in ("last_attn", "ema_attn"):
            return self._in_turn(name)
        if name == "sum_logit_gt_max_logit_minus_std_logit":
            return self._near_the_best()
        mean = attn.sum(1, keepdim=True) / seen.sum(1, keepdim=True)
        given = {
            "norm1_v": self.value.abs().sum(1).expand_as(attn) * torch.eye(len(attn)),
            "sum_attn": attn,
            "sum_attn_squared": attn.square(),
            "sum_attn_gt_mean_attn": (attn > mean).double(),
            "sum_logit": self.logit.mean(0),
            "sum_norm1_v_times_attn": self.value.abs().sum(1) * attn,
        }
        return torch.where(seen, given[name], 0.0).sum(0)

    def _near_the_best(self) -> Tensor:
        logit = self.logit.mean(0)
        n, hidden = self.seen.sum(1, keepdim=True), torch.where(self.seen, logit, 0.0)
        spread = torch.where(self.seen, (logit - hidden.sum(1, keepdim=True) / n) ** 2, 0.0).sum(1, keepdim=True) / n
        best = logit.masked_fill(~self.seen, -torch.inf).amax(1, keepdim=True)
        return (self.seen & (logit > best - spread.sqrt())).double().sum(0)

    def _in_turn(self, name: str) -> Tensor:
        value = self.attn.diagonal()
        for query, (given, seen) in enumerate(zip(self.attn, self.seen, strict=True)):
            later = seen & (torch.arange(len(given)) < query)
            value = torch.where(later, given if name == "last_attn" else 0.9 * value + 0.1 * given, value)
        return value

    def ring(self, place: int) -> tuple[Tensor, Tensor]:
        """What the newest query that writes the place gave, [n], and where it could see."""
        query = max((j for j in range(len(self.attn)) if j % RING == place), default=None)
        if query is None:
            return self.attn.new_zeros(len(self.attn)), torch.zeros(len(self.attn), dtype=torch.bool)
        return self.attn[query], self.seen[query]


def assert_close(got: Tensor, expected: Tensor, tolerance: float, what: str, size: Tensor | None = None) -> None:
    wrong = (got.double() - expected).abs() - tolerance * (expected.abs() if size is None else size).clamp(min=1)
    assert not (wrong > 0).any(), f"{what}: off by {float((got.double() - expected).abs().max()):.2g}"


@lru_cache(maxsize=16)
def matrix_of(case: Case, row: int, head: int) -> Matrix:
    return Matrix(case.call(), row, head)


def check_columns(state: SlotState, matrix: Matrix, row: int, head: int) -> None:
    place = {p: slot for slot, p in enumerate(state.position[row, head].tolist()) if p >= 0}
    order = [place[p] for p in range(len(matrix.attn))]  # nothing was evicted
    for name, column in state.column_index.single(state.columns).items():
        if len(order):
            size = matrix.logit.abs().sum(1).mean(0) if name == "sum_logit" else None
            assert_close(column[row, head, order], matrix.column(name), TOLERANCE, f"{name} of row {row}, head {head}", size)
    for ring in state.column_index.rings(state.columns).values():
        for index in range(len(ring)):
            given, seen = matrix.ring(index)
            assert_close(ring[index, row, head, order][seen], given[seen], TOLERANCE, f"place {index} of the ring")


ATTENTIONS = [("torch", "fused"), ("torch", "exact"), ("cpu", "one pass"), ("cpu", "fused"), ("cpu", "exact")]
"""Backends, and how queries attend: in C++ while they are observed, or in torch, by its kernel or exactly, and then they are observed."""


def attend_by(monkeypatch: pytest.MonkeyPatch, attention: str) -> None:
    if attention == "one pass":
        monkeypatch.setattr(dense, "attend", lambda prompt: pytest.fail("torch attends"))
        return
    monkeypatch.setattr(CpuBackend, "_attend", lambda self, prompt: attend_and_observe(prompt, self._observe))
    if attention == "exact":
        monkeypatch.setattr(dense, "_fused", lambda prompt: None)


TEXTS = {"attn": WATCH, "logit": LOGITS, "last": LAST, "nothing": NOTHING}
IN_ONE_PASS = (("torch", "fused"), ("cpu", "one pass"))
WAYS = [(asked, *way) for asked in TEXTS for way in (ATTENTIONS if asked == "attn" else IN_ONE_PASS)]


@pytest.mark.parametrize(
    ("asked", "backend", "attention"), few(WAYS, *((asked, *way) for asked in TEXTS for way in IN_ONE_PASS))
)  # varies first: a case's matrices serve all of its tests
@pytest.mark.parametrize("name", few(CASES, "padded window", "three padded forwards"))
def test_columns_and_outputs(monkeypatch: pytest.MonkeyPatch, asked: str, name: str, attention: str, backend: str) -> None:
    text = TEXTS[asked]
    case, spec = CASES[name], spec_of(text)
    attend_by(monkeypatch, attention)
    check_prompt(served_by(spec, backend, case.dtype), spec, case)


def check_prompt(server: Any, spec: PolicySpec, case: Case) -> None:
    """Outputs and columns after the case's forwards."""
    state = SlotState(spec, {})
    out = torch.cat([server.prefill(state, part) for part in case.parts()], 1)
    call = case.call()
    for row in range(len(call.key)):
        real = torch.ones(case.tokens, dtype=torch.bool) if call.real is None else call.real[row]
        assert (out[row, ~real] == 0).all()
        for head in range(case.heads):
            matrix = matrix_of(case, row, head)
            heads = slice(head * case.group, (head + 1) * case.group)
            assert_close(out[row, real, heads].transpose(0, 1), matrix.out, ROUNDING[case.dtype], "the output")
            check_columns(state, matrix, row, head)


def served_by(spec: PolicySpec, backend: str, dtype: torch.dtype) -> Any:
    return choose(spec, backend, torch.device("cpu"), dtype)


def test_what_is_not_capped_and_finite_is_fused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing above compares the exact pass with itself."""
    monkeypatch.setattr(dense, "_exact", lambda prompt: pytest.fail("not fused"))
    for case in CASES.values():
        if case.softcap is None:
            for part in case.parts():
                prefill(SlotState(kvdsl.load("full").spec, {}), part)


def test_cudnn_attends_where_torch_would_choose_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its log-sum-exps have a dim more than those of torch's other kernels. An H200 has run it; here it is played."""
    query, key, value = (torch.randn(2, 3, 9, 16) for _ in range(3))
    hidden = torch.ones(9, 9, dtype=torch.bool).triu(1)
    logit = (query @ key.transpose(-1, -2) * 0.25).masked_fill(hidden, -torch.inf)

    def played(*given: Any, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
        bias, tells_lse, dropout, causal, debugs = given[3:]
        assert (bias, tells_lse, dropout, causal, debugs, scale) == (None, True, 0.0, True, False, 0.25)
        return logit.softmax(-1) @ value, logit.logsumexp(-1, keepdim=True)

    monkeypatch.setattr(torch, "_fused_sdp_choice", lambda *_, **__: SDPBackend.CUDNN_ATTENTION.value)
    monkeypatch.setattr(torch.ops.aten, "_scaled_dot_product_cudnn_attention", played)
    found = dense._cuda_kernel(query, key, value, None, 0.25)
    assert found is not None
    assert torch.equal(found[0], logit.softmax(-1) @ value)
    assert torch.equal(found[1], logit.logsumexp(-1))


def test_finite_numbers_whose_sum_is_not_are_fused_in_float16() -> None:
    """Keys have means: 100,000 of them may well add up to more than 65,504."""
    spec, call = spec_of(WATCH), Case(tokens=20, dtype=torch.float16).call()
    keys = call.key + 60_000
    assert not keys.sum().isfinite()
    for worst in (0.0, torch.inf, -torch.inf, torch.nan):
        keys[0, 0, 7, 0] += worst
        asked: list[bool] = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(dense, "_exact", lambda prompt, own=dense._exact, asked=asked: asked.append(True) or own(prompt))
            prefill(SlotState(spec, {}), call._replace(query=call.query * 1e-6, key=keys))
        assert bool(asked) == (worst != 0)


@pytest.mark.parametrize("where", ["query", "value"])
def test_numbers_that_could_overflow_are_left_to_torch(where: str) -> None:
    """Finite ones: a sum of products that is beyond float32 must not reach the columns, which nothing could mend."""
    case, spec = Case(tokens=40), spec_of(WATCH)
    call = case.call()
    getattr(call, where)[0, 0, 25] = 3e38
    states = [SlotState(spec, {}), SlotState(spec, {})]
    ours, torchs = (
        served_by(spec, name, torch.float32).prefill(state, call)
        for name, state in zip(("cpu", "torch"), states, strict=True)
    )
    assert torch.allclose(ours, torchs, rtol=1e-5, equal_nan=True)
    assert torch.allclose(states[0].columns, states[1].columns, atol=1e-5, equal_nan=True)


# -- what is not finite --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["torch", "cpu"])
@pytest.mark.parametrize("worst", few([torch.inf, -torch.inf, torch.nan], -torch.inf))
@pytest.mark.parametrize("where", ["query", "key", "value"])
@pytest.mark.parametrize("at", [25, 0])
def test_what_is_not_finite_touches_only_who_sees_it(backend: str, where: str, worst: float, at: int) -> None:
    """The first query sees itself alone: no score of its may be finite."""
    case, spec = Case(tokens=40, group=2), spec_of(WATCH)
    clean, call = case.call(), case.call()
    getattr(call, where)[0, 0, at, 3] = worst
    states = [SlotState(spec, {}), SlotState(spec, {})]
    server = served_by(spec, backend, torch.float32)
    expected, out = (server.prefill(state, one) for state, one in zip(states, (clean, call), strict=True))
    heads = 1 if where == "query" else case.group
    others = slice(heads, None) if where == "query" else slice(case.group, None)
    assert torch.allclose(out[:, :at], expected[:, :at], atol=1e-5)
    assert torch.allclose(out[:, :, others], expected[:, :, others], atol=1e-5)
    assert not out[:, at, :heads].isfinite().all()
    if where == "query":
        assert out[:, at + 1 :].isfinite().all()
    total = states[0].spec.columns.index("sum_attn")
    sums, clean_sums = (state.columns[total, 0] for state in reversed(states))
    assert torch.allclose(sums[1], clean_sums[1], atol=1e-5)
    if where == "value":
        assert torch.allclose(sums, clean_sums, atol=1e-5)
    elif not (where == "key" and worst != worst):
        assert sums[0, :40].isnan().any()


@pytest.mark.parametrize("bits", [0x7FFFFFFF, -1, 0x7FC00001])
def test_a_nan_is_a_nan_whatever_its_bits(bits: int) -> None:
    """GPUs make others than torch does."""
    case, spec = Case(tokens=40, group=2), spec_of(WATCH)
    found = []
    for nan in (torch.tensor(torch.nan), torch.tensor(bits, dtype=torch.int32).view(torch.float32)):
        call, state = case.call(), SlotState(spec, {})
        call.key[0, 0, 25, 3] = nan
        served_by(spec, "cpu", torch.float32).prefill(state, call)
        found.append(state.columns)
    assert found[0].isnan().any() and torch.equal(*(one.nan_to_num(nan=-7.0) for one in found))


# -- only what matters, in bounded memory --------------------------------------------------------------------------------


def queries_observed(monkeypatch: pytest.MonkeyPatch, spec: PolicySpec, call: AttentionCall, **given: float) -> int:
    seen: list[int] = []

    class Counting(Columns):
        def __init__(self, view: Any) -> None:
            seen.append(view.visible.mask.shape[2])
            super().__init__(view)

    monkeypatch.setattr(columns, "Columns", Counting)
    prefill(SlotState(spec, given), call)
    return sum(seen)


@pytest.mark.parametrize(
    ("policy", "given", "queries"),
    [
        ("h2o", {"budget": 64}, 150),
        ("tova", {"budget": 64}, 1),
        ("snapkv", {"budget": 64}, 32),
        ("scissorhands_window", {"budget": 64, "history": 17}, 17),
        ("scissorhands_window", {"budget": 64, "history": 400}, 150),
        ("window", {"budget": 64}, 0),
        ("knorm", {"budget": 64}, 0),
    ],
)
def test_only_the_queries_that_matter(
    monkeypatch: pytest.MonkeyPatch, policy: str, given: dict[str, float], queries: int
) -> None:
    assert queries_observed(monkeypatch, kvdsl.load(policy).spec, Case(heads=1).call(), **given) == queries


def test_every_row_has_its_own_last_queries(monkeypatch: pytest.MonkeyPatch) -> None:
    call = Case(heads=1, padding="right").call()  # the rows end at tokens 149, 109 and 0
    assert queries_observed(monkeypatch, kvdsl.load("tova").spec, call, budget=64) == 150
    call = Case(heads=1, padding="left").call()
    assert queries_observed(monkeypatch, kvdsl.load("tova").spec, call, budget=64) == 1


def test_a_window_hides_the_last_query_from_some(monkeypatch: pytest.MonkeyPatch) -> None:
    call = Case(heads=1, window=20).call()
    assert queries_observed(monkeypatch, kvdsl.load("tova").spec, call, budget=64) == 150


class Largest(TorchDispatchMode):
    """The largest allocation that torch makes."""

    bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, Tensor):
                self.bytes = max(self.bytes, x.untyped_storage().nbytes())
        return out


@pytest.mark.parametrize(("backend", "attention"), few(ATTENTIONS, ("torch", "fused"), ("cpu", "one pass")))
@pytest.mark.parametrize("window", [None, 500])
def test_nothing_is_of_the_size_of_queries_times_slots(
    monkeypatch: pytest.MonkeyPatch, backend: str, window: int | None, attention: str
) -> None:
    attend_by(monkeypatch, attention)
    case = Case(tokens=4096, heads=1, group=2, dim=8, value_dim=8, window=window)
    spec = kvdsl.load("roco").spec
    server = served_by(spec, backend, torch.float32)
    with Largest() as largest:
        server.prefill(SlotState(spec, {}), case.call())
    assert largest.bytes <= dense._BLOCK_BYTES
    assert largest.bytes <= 4096**2 * case.group  # bytes: a quarter of the matrix


def test_blocks_of_one_are_the_same_as_decoding() -> None:
    """Every token attends to the survivors and itself, and is observed; then one leaves."""
    spec = spec_of("param budget = 12\nparam n = 1\nscore mean(attn)\nkeep top 4 by std(attn)\nprefill blocks of n")
    call = Case(tokens=60, group=2).call()
    prompted, decoded = SlotState(spec, {}), SlotState(spec, {})
    server = served_by(spec, "torch", torch.float32)
    whole = server.prefill(prompted, call)
    first, rest = (
        AttentionCall(call.query[:, :, part], call.key[:, :, part], call.value[:, :, part], None, call.scaling)
        for part in (slice(0, 1), slice(1, None))
    )
    parts = [server.prefill(decoded, first), server.decode(decoded, rest)]
    assert torch.allclose(whole, torch.cat(parts, 1), atol=1e-5)
    for head in range(2):
        held = [sorted(state.position[0, head].tolist())[-12:] for state in (prompted, decoded)]
        assert held[0] == held[1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("policy", ["h2o", "streaming_llm"])  # observed tile by tile, and not at all
def test_padding_changes_no_bit(policy: str, dtype: torch.dtype) -> None:
    spec, case = kvdsl.load(policy).spec, Case(tokens=150, group=3, dim=64, value_dim=64, dtype=dtype)
    server, call, outs = served_by(spec, "cpu", dtype), case.call(), []
    for padding in (0, 37, 70):
        query, key, value = (torch.nn.functional.pad(x, (0, 0, padding, 0)) for x in (call.query, call.key, call.value))
        real = None if padding == 0 else (torch.arange(padding + case.tokens) >= padding)[None]
        padded = AttentionCall(query, key, value, real, call.scaling)
        outs.append(server.prefill(SlotState(spec, {"budget": 1000}), padded)[:, padding:])
    assert torch.equal(outs[0], outs[1]) and torch.equal(outs[0], outs[2])


BY_HEAD = ("duo_attention", "headkv", "lu_kv", "moa")
"""Whose files have a number for each of two heads."""

ALONE = [
    path.stem
    for path in all_policies()
    if path.stem in BY_HEAD or not ((policy := analyse(path).policy).tensors or policy.across_layers or policy.given)
]
"""Policies whose layers do not wait for one another, and that need no file made for the model and nothing from the caller."""


@pytest.mark.parametrize("policy", few(ALONE, "h2o", "snapkv"))
def test_the_host_knows_how_many_stay(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a text without padding, before the device has said who leaves; or it says that it does not know."""
    told: list[bool] = []
    store = SlotState.store

    def checked(self: SlotState, kept: dict[str, Tensor], seen: Tensor, numbers: Tensor, staying: Any = None) -> None:
        if staying is not None:
            held = (kept["position"] >= 0).sum(-1)
            assert staying == (int(held.min()), int(held.max()))
        told.append(staying is not None)
        store(self, kept, seen, numbers, staying)

    monkeypatch.setattr(SlotState, "store", checked)
    spec = kvdsl.load(policy).spec
    given = {name: size for name, size in {"budget": 100.0, "recent": 20.0}.items() if name in spec.params}
    prefill(SlotState(spec, given), Case(tokens=150, dim=32).call())
    assert told == [True] or spec.measures or spec.across or "prefill_block" in spec.numbers


@pytest.mark.parametrize("policy", ["h2o", "snapkv", "sparcas", "streaming_llm"])
def test_a_prompt_that_is_read_again_leaves_what_it_leaves_at_once(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention's sums are asked about late; where they were wrong, nothing of the first reading may remain."""
    spec, call = kvdsl.load(policy).spec, Case(tokens=150).call()
    given = {"budget": 60.0} if "budget" in spec.params else {}
    states = [SlotState(spec, given) for _ in range(2)]
    outs = [prefill(states[0], call)]
    readings: list[bool] = []

    def doubtful(prompt: Prompt) -> Tensor:
        readings.append(prompt.later is not None)
        if prompt.later is not None:
            prompt.later.doubts.append((torch.tensor(torch.nan), 1.0))
            prompt.kept["columns"].fill_(torch.nan)
        return attend_and_observe(prompt)

    outs.append(prefill(states[1], call, doubtful))
    assert readings == [True, False]
    assert torch.equal(*outs)
    for name, tensor in states[0].tensors().items():
        assert torch.equal(tensor, states[1].tensors()[name]), name


def test_a_query_sees_nothing_behind_its_own_slot() -> None:
    """What `Prompt.reach` promises, with survivors in front."""
    spec = kvdsl.load("h2o").spec
    state = SlotState(spec, {"budget": 30})
    case = Case(cuts=3, padding="scattered", window=31)
    prompts: list[Prompt] = []
    for part in case.parts():
        prefill(state, part, lambda prompt: (prompts.append(prompt), attend_and_observe(prompt))[1])
    for prompt in prompts:
        everything = slice(0, prompt.slots)
        for row, head, tokens in prompt.tiles(0, 64 * prompt.slots):
            inside = prompt.reach(row, head, tokens)
            real = (prompt.position[row, None, tokens, None] >= 0) & prompt.visible(row, head, tokens, everything)
            real[..., inside] = False
            assert not real.any()
