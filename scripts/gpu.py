"""What needs a GPU: are the kernels right, can steps be captured, and how fast are they? `make gpu`; under ten minutes.

Generated packages (`make generate` writes those that are not committed), the runtime, torch and Triton are all it takes. Writes
decode.json and prefill.json to benchmarks/results/<gpu>/ and prints tables.
`--toy` goes through the same at sizes for Triton's interpreter (TRITON_INTERPRET=1), where times mean nothing.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "lab")]
if importlib.util.find_spec("transformers") is None:  # the kernels do without; generated packages import their base class
    stand_in = ModuleType("kvdsl.runtime.hf")
    stand_in.KVCache = object  # type: ignore[attr-defined]
    sys.modules[stand_in.__name__] = stand_in

from kvdsl.runtime.backend import Backend  # noqa: E402
from kvdsl.runtime.backends import choose  # noqa: E402
from kvdsl.runtime.call import AttentionCall  # noqa: E402
from kvdsl.runtime.spec import PolicySpec  # noqa: E402
from kvdsl.runtime.state.layouts import slot_state  # noqa: E402
from kvdsl.runtime.state.slots import SlotState  # noqa: E402
from kvdsl.runtime.torch.backend import TorchBackend  # noqa: E402
from kvdsl_lab.bench import baselines, prefill  # noqa: E402
from kvdsl_lab.bench.baselines import Cache, Token  # noqa: E402
from kvdsl_lab.bench.decode import SETTLING, Shape, decode_step, live_bytes, new_tokens, rotation, steady_state  # noqa: E402
from kvdsl_lab.bench.selecting import period  # noqa: E402

POLICIES = ("roco", "h2o", "tova", "streaming_llm", "equip_blocks", "sparcas")
SELECTED = {"tokens": 512.0, "dims": 16.0}
"""What a policy that selects is timed with: the T and D of the CPU's figures."""
COLUMN_TOLERANCE = {"fp32": 1e-5, "fp16": 1e-4, "bf16": 1e-4}
"""Of what a prompt leaves in the columns: on 16 bits attention's log-sum-exps may be off by that much."""

TOLERANCE = {"fp32": 2e-5, "fp16": 2e-3, "bf16": 1.6e-2}
COPY_BYTES = 1 << 30


@dataclass(frozen=True)
class Plan:
    """Sizes of everything that is run."""

    device: str
    checked: tuple[Shape, ...]
    timed: tuple[Shape, ...]
    selecting: tuple[Shape, ...]
    checked_prompts: tuple[prefill.Shape, ...]
    timed_prompts: tuple[prefill.Shape, ...]
    repeats: int
    copied: int


REAL = Plan(
    "cuda",
    checked=tuple(
        Shape(batch, 4, group, dim, live, dtype)
        for dtype in ("fp32", "fp16", "bf16")
        for batch, group, dim, live in ((1, 4, 128, 1000), (3, 1, 64, 257), (2, 7, 80, 4097), (1, 8, 256, 600))
    ),
    timed=tuple(
        Shape(batch, 8, 4, 128, live, dtype)
        for dtype, batch, live in product(("bf16", "fp32"), (1, 8, 32), (1024, 4096, 16384))
    ),
    selecting=tuple(
        Shape(batch, 8, 4, 128, live, "bf16")
        for batch, live in ((1, 4096), (1, 8192), (1, 16384), (1, 32768), (8, 32768), (1, 65536), (1, 131072))
    ),
    checked_prompts=(  # every one of them is compiled for every policy
        prefill.Shape(1, 2, 4, 128, 2000, "bf16"),
        prefill.Shape(1, 2, 7, 80, 1025, "bf16"),
        prefill.Shape(1, 2, 8, 256, 600, "bf16"),
        prefill.Shape(2, 2, 1, 64, 777, "fp16"),
        prefill.Shape(1, 2, 4, 128, 1000, "fp32"),
        prefill.Shape(1, 2, 2, 64, 500, "fp32"),
    ),
    timed_prompts=tuple(prefill.Shape(1, 8, 4, 128, length, "bf16") for length in (4096, 8192, 32768)),
    repeats=25,
    copied=COPY_BYTES,
)
TOY = Plan(
    "cpu",
    checked=(Shape(2, 1, 2, 32, 20, "fp16"),),
    timed=(Shape(1, 1, 2, 32, 20, "fp32"),),
    selecting=(Shape(1, 1, 2, 32, 40, "fp32"),),
    checked_prompts=(prefill.Shape(1, 1, 2, 32, 40, "fp16"),),
    timed_prompts=(prefill.Shape(1, 1, 1, 32, 20, "fp32"),),
    repeats=3,
    copied=1 << 20,
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--toy", action="store_true", help="tiny sizes, in Triton's interpreter")
    parser.add_argument("--only", choices=("numerics",), help="the check that compute-sanitizer watches")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results", help="folder of the results")
    options = parser.parse_args()
    plan = TOY if options.toy else REAL
    if plan.device == "cuda" and not torch.cuda.is_available():
        print("There is no GPU here that torch can use. Nothing to run.", file=sys.stderr)
        return 2
    specs = [spec_of(name) for name in there()]
    wrong = [line for spec in specs for line in numerics(spec, plan)]
    wrong += [line for spec in specs for line in prompted(spec, plan)]
    report("numerics against float64", wrong)
    if options.only:
        return 1 if wrong else 0
    if plan.device == "cuda":
        wrong += report("compute-sanitizer", sanitizer())
        wrong += report("CUDA graphs", [line for spec in specs for line in captured(spec, plan)])
    evicting, selecting = ([spec for spec in specs if spec.selects == selects] for selects in (False, True))
    rows = [row for shape in plan.timed for row in timed(evicting, shape, plan)]
    chosen = [row for shape in plan.selecting for row in timed_selecting(selecting, shape, plan)]
    prompts = [row for shape in plan.timed_prompts for row in timed_prompts(evicting, shape, plan)]
    folder = options.out / gpu_name(plan).lower().replace(" ", "_")
    folder.mkdir(parents=True, exist_ok=True)
    for name, found in (("decode", {"rows": rows, "selecting": chosen}), ("prefill", {"rows": prompts})):
        (folder / f"{name}.json").write_text(json.dumps({"environment": environment(plan), **found}, indent=1) + "\n")
    show(rows)
    show_selecting(chosen)
    show_prompts(prompts)
    return 1 if wrong else 0


def report(what: str, wrong: list[str]) -> list[str]:
    """Say how a check went; gives what is wrong."""
    print(f"{what}: {'right' if not wrong else 'WRONG'}", *wrong, sep="\n  ", flush=True)
    return wrong


def there() -> list[str]:
    """The policies that have a package in generated/; the compiler, which makes the others, may be missing here."""
    found = [name for name in POLICIES if (ROOT / "generated" / name / "cache.py").exists()]
    if missing := sorted(set(POLICIES) - set(found)):
        print(
            f"without {', '.join(missing)}: `make generate`, where kvdsl is installed, writes generated/{missing[0]}",
            flush=True,
        )
    return found


def spec_of(name: str) -> PolicySpec:
    module = importlib.import_module(f"generated.{name}.cache")
    return next(value.spec for key, value in vars(module).items() if key.endswith("Cache") and hasattr(value, "spec"))


def gpu_name(plan: Plan) -> str:
    return torch.cuda.get_device_name() if plan.device == "cuda" else "interpreter"


def environment(plan: Plan) -> dict[str, Any]:
    import triton

    return {"gpu": gpu_name(plan), "torch": torch.__version__, "triton": triton.__version__, "cuda": torch.version.cuda}


def prepared(spec: PolicySpec, shape: Shape, plan: Plan, **params: float) -> tuple[Backend, SlotState, list[Token]]:
    """A backend and a full cache whose columns hold what attention gave them."""
    backend = choose(
        spec, "triton" if spec.triton_source.exists() else "torch", torch.device(plan.device), shape.torch_dtype
    )
    state = steady_state(spec, shape, device=plan.device, **params)
    tokens = new_tokens(shape, device=plan.device)
    step = decode_step(backend, state)
    for n in range(SETTLING if plan is REAL else 1):
        step(tokens[n % len(tokens)])
    return backend, state, tokens


# -- are they right? ---------------------------------------------------------------------------------------------------


def numerics(spec: PolicySpec, plan: Plan) -> Iterator[str]:
    """Steps next to attention in float64 and next to the torch backend, which goes on from the same slots.

    Where two tokens rank the same but for rounding, a policy that selects may attend to the other one.
    """
    for shape in plan.checked:
        backend, state, tokens = prepared(spec, shape, plan, **half(spec, shape))
        heads, differing = 0, 0
        for token in tokens:
            call = as_call(state, token)
            twin = clone_of(state)
            exact = attention(state, token) if not (spec.compact or spec.selects) else None
            out, expected = backend.decode(state, call), TorchBackend().decode(twin, call)
            errors = (out.double() - (expected.double() if exact is None else exact)).abs().amax(-1)
            if spec.selects:
                heads, differing = heads + errors.numel(), differing + int((~(errors <= 2 * TOLERANCE[shape.dtype])).sum())
            elif not float(errors.max()) <= TOLERANCE[shape.dtype]:
                yield f"{spec.stem} {shape}: outputs differ by {float(errors.max()):.2g}"
            if spec.sketches and not torch.equal(state.sketch, twin.sketch):
                yield f"{spec.stem} {shape}: sketches differ"
            same = (state.position.sort(-1).values == twin.position.sort(-1).values).all(-1)
            heads, differing = heads + same.numel(), differing + int((~same).sum())
            alike = same[None, :, :, None] & (state.position == twin.position)[None] & (state.position >= 0)[None]
            off = float((state.columns - twin.columns).masked_fill(~alike, 0).abs().max()) if spec.columns else 0.0
            if not off <= 1e-4:
                yield f"{spec.stem} {shape}: columns differ by {off:.2g}"
        if differing > max(1, 0.02 * heads):  # scores that are equal but for rounding
            yield f"{spec.stem} {shape}: {differing} of {heads} head-steps keep or attend to other tokens"


def half(spec: PolicySpec, shape: Shape) -> dict[str, float]:
    """A policy that selects attends to half of what is live."""
    return {"tokens": float(shape.live // 2)} if spec.selects else {}


def clone_of(state: SlotState) -> SlotState:
    """The same cache with tensors of its own."""
    twin = deepcopy(state)
    twin.workspace = None
    return twin


def as_call(state: SlotState, token: Token) -> AttentionCall:
    query, key, value = token
    rope = rotation(key.shape[-1]) if state.spec.compact else None
    return AttentionCall(query, key, value, None, key.shape[-1] ** -0.5, rope=rope)


def attention(state: SlotState, token: Token) -> Tensor:
    """What the token attends to, in float64: [batch, 1, query_heads, dim]."""
    query, key, value = (x.double() for x in token)
    keys = torch.cat([state.keys.double(), key], 2)
    values = torch.cat([state.values.double(), value], 2)
    there = torch.cat([state.position >= 0, torch.ones_like(state.position[..., :1], dtype=torch.bool)], -1)
    grouped = query.unflatten(1, (keys.shape[1], -1)).squeeze(3)
    logits = grouped @ keys.transpose(-1, -2) * keys.shape[-1] ** -0.5
    return (logits.masked_fill(~there[:, :, None], -torch.inf).softmax(-1) @ values).flatten(1, 2)[:, None]


def prompted(spec: PolicySpec, plan: Plan) -> Iterator[str]:
    """What prompts leave in the columns next to a matrix of all probabilities in float64."""
    if not spec.reads_attention:
        return
    for shape in plan.checked_prompts:
        state, tensors = slot_state(spec, {"budget": shape.length}), on_device(shape, plan)
        backend = choose(spec, "triton", torch.device(plan.device), tensors[0].dtype)
        backend.prefill(state, AttentionCall(*tensors, real=None, scaling=shape.head_dim**-0.5))
        expected = statistics_of(*tensors[:2])
        order = state.position.argsort(-1)[..., -shape.length :]  # nothing was evicted; free slots come first
        for name, column in state.single_columns(state.columns).items():
            off = (column.gather(-1, order).double() - expected[name]).abs() / expected[name].clamp(min=1)
            if not float(off.max()) <= COLUMN_TOLERANCE[shape.dtype]:
                yield f"{spec.stem} {shape}: `{name}` is off by {float(off.max()):.2g}"


def on_device(shape: prefill.Shape, plan: Plan) -> Token:
    query, key, value = (x.to(plan.device) for x in prefill.prompt(shape, seed=0))
    return query, key, value


def statistics_of(query: Tensor, key: Tensor) -> dict[str, Tensor]:
    """What the policies' columns should hold, [batch, kv_heads, tokens] each."""
    grouped = query.double().unflatten(1, (key.shape[1], -1))
    logits = torch.einsum("bhgqd,bhsd->bhgqs", grouped, key.double()) * key.shape[-1] ** -0.5
    hidden = torch.ones_like(logits, dtype=torch.bool).triu(1)
    attn = logits.masked_fill(hidden, -torch.inf).softmax(-1).mean(2)
    return {"sum_attn": attn.sum(2), "sum_attn_squared": attn.square().sum(2), "last_attn": attn[:, :, -1]}


def sanitizer() -> list[str]:
    """The same under compute-sanitizer, where it is installed."""
    tool = shutil.which("compute-sanitizer")
    if tool is None:
        print("compute-sanitizer is not installed")
        return []
    command = [tool, "--error-exitcode", "9", sys.executable, __file__, "--only", "numerics"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    return [] if done.returncode == 0 else (done.stdout + done.stderr).splitlines()[-20:]


def captured(spec: PolicySpec, plan: Plan) -> Iterator[str]:
    """A step in one CUDA graph gives what the same step gives outside of it, bit for bit."""
    if not spec.triton_source.exists():
        return
    backend, state, tokens = prepared(spec, plan.checked[0], plan, **half(spec, plan.checked[0]))
    twin = clone_of(state)
    graph, static, out = capture(lambda token: backend.decode(state, as_call(state, token)), tokens[0])
    for tensor, before in zip(state.tensors().values(), twin.tensors().values(), strict=True):
        tensor.copy_(before)  # capturing may have run steps
    for token in tokens:
        for to, x in zip(static, token, strict=True):
            to.copy_(x)
        graph.replay()
        if not torch.equal(out, backend.decode(twin, as_call(twin, token))):
            yield f"{spec.stem}: outputs differ"
    if not torch.equal(state.position, twin.position) or not torch.equal(state.seen, twin.seen):
        yield f"{spec.stem}: what is kept differs"


def capture(step: Callable[[Token], Tensor], token: Token, before: int = 3) -> tuple[torch.cuda.CUDAGraph, Token, Tensor]:
    """A step as a graph, after so many of them; the tensors from which it takes its token, and its output."""
    static: Token = tuple(x.clone() for x in token)  # type: ignore[assignment]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(before):
            step(static)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step(static)
    return graph, static, out


# -- how fast are they? ------------------------------------------------------------------------------------------------


def timed(specs: list[PolicySpec], shape: Shape, plan: Plan) -> Iterator[dict[str, Any]]:
    """Every policy, a device copy, flash decoding and eager torch, in the same run."""
    copy = {"copy_gbps": copy_rate(plan)}
    for spec in specs:
        backend, state, tokens = prepared(spec, shape, plan)
        size = live_bytes(state)
        cache = Cache(state.keys[:, :, : shape.live].clone(), state.values[:, :, : shape.live].clone(), shape.group)
        step = baselines.repeated(decode_step(backend, state), tokens)
        runs: dict[str, Callable[[], object]] = {"launched_ms": step}
        runs["sdpa_ms"] = baselines.repeated(baselines.sdpa_grouped(cache), tokens)
        for name, attend in (("grouped_ms", baselines.attend_grouped), ("eager_ms", baselines.attend_eager)):
            runs[name] = baselines.repeated(
                baselines.Evicting(cache, attend(cache), by_std=len(spec.columns) > 1).step, tokens
            )
        times = {name: median_ms(run, plan) for name, run in runs.items()}
        times["ms"] = times["launched_ms"]
        if plan.device == "cuda" and backend.name == "triton":
            times["ms"] = median_ms(capture(decode_step(backend, state), tokens[0])[0].replay, plan)
        gbps = size / times["ms"] / 1e6
        facts = {"policy": spec.stem, "backend": backend.name, **asdict(shape), "bytes": size, "gbps": gbps}
        yield facts | times | copy | {"of_copy": gbps / copy["copy_gbps"], "vs_sdpa": times["sdpa_ms"] / times["ms"]}


def timed_selecting(specs: list[PolicySpec], shape: Shape, plan: Plan) -> Iterator[dict[str, Any]]:
    """Policies that attend to a selection, our own dense step and flash decoding, in the same run. A graph's step does or does not
    find the sketch anew (`renewing_ms`), which is one of so many: `ms` has its share.
    """
    for spec in specs:
        backend, state, tokens = prepared(spec, shape, plan, **SELECTED)
        dense = clone_of(state)
        dense.selects = False
        cache = Cache(state.keys[:, :, : shape.live].clone(), state.values[:, :, : shape.live].clone(), shape.group)
        times = {"sdpa_ms": median_ms(baselines.repeated(baselines.sdpa_grouped(cache), tokens), plan)}
        for name, one in (("ms", state), ("dense_ms", dense)):
            times[name] = median_ms(baselines.repeated(decode_step(backend, one), tokens), plan)
        if plan.device == "cuda" and backend.name == "triton":
            every = period(state)
            for name, one, before in (("ms", state, 3), ("renewing_ms", state, every - 1), ("dense_ms", dense, 3)):
                times[name] = median_ms(capture(decode_step(backend, one), tokens[0], before)[0].replay, plan)
            times["ms"] += (times["renewing_ms"] - times["ms"]) / every
        best = min(times["sdpa_ms"], times["dense_ms"])
        facts = {"policy": spec.stem, "backend": backend.name, **asdict(shape), **SELECTED}
        yield facts | times | {"vs_best_dense": best / times["ms"]}


def timed_prompts(specs: list[PolicySpec], shape: prefill.Shape, plan: Plan) -> Iterator[dict[str, Any]]:
    """A layer's prompt under every policy that observes, beside torch's fused attention of the same."""
    tensors = on_device(shape, plan)
    sdpa_ms, sdpa_bytes = measured(lambda: baselines.sdpa_prompt(*tensors), plan)
    for spec in specs:
        if not spec.reads_attention:
            continue
        backend = choose(spec, "triton", torch.device(plan.device), tensors[0].dtype)
        ms, size = measured(prefill.prefill(backend, spec, tensors, seed=0), plan)
        facts = {"policy": spec.stem, "backend": backend.name, **asdict(shape), "ms": ms, "sdpa_ms": sdpa_ms}
        yield facts | {"ratio": ms / sdpa_ms, "peak_bytes": size, "sdpa_peak_bytes": sdpa_bytes}


def measured(run: Callable[[], object], plan: Plan) -> tuple[float, int | None]:
    """Milliseconds, and what the run allocates beyond its inputs; None where the allocator is not the GPU's."""
    ms = median_ms(run, plan)
    if plan.device != "cuda":
        return ms, None
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    torch.cuda.synchronize()
    return ms, torch.cuda.max_memory_allocated() - before


def copy_rate(plan: Plan) -> float:
    """Bytes read and written a second by a large copy on the device, in GB/s."""
    one, other = (torch.zeros(plan.copied, dtype=torch.int8, device=plan.device) for _ in range(2))
    return 2 * plan.copied / median_ms(lambda: other.copy_(one), plan) / 1e6


def median_ms(run: Callable[[], object], plan: Plan) -> float:
    """Of single calls, on a GPU after three that are not timed."""
    if plan.device != "cuda":
        return statistics.median(_seconds(run) for _ in range(plan.repeats)) * 1e3
    for _ in range(3):
        run()
    marks = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(plan.repeats)]
    for begin, end in marks:
        begin.record()
        run()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(begin.elapsed_time(end) for begin, end in marks)


def _seconds(run: Callable[[], object]) -> float:
    begun = time.perf_counter()
    run()
    return time.perf_counter() - begun


def show(rows: list[dict[str, Any]]) -> None:
    """A table for docs/performance.md."""
    print("\n| policy | batch | live | dtype | MB | ms | of a copy | vs. SDPA | vs. eager |")
    print("|---|---:|---:|---|---:|---:|---:|---:|---:|")
    for row in rows:
        cells = (row["policy"], row["batch"], row["live"], row["dtype"], f"{row['bytes'] / 1e6:.0f}", f"{row['ms']:.3f}")
        ratios = (f"{row['of_copy']:.2f}", f"{row['vs_sdpa']:.2f}x", f"{row['eager_ms'] / row['ms']:.1f}x")
        print("|", " | ".join(map(str, (*cells, *ratios))), "|")


def show_selecting(rows: list[dict[str, Any]]) -> None:
    """The same of policies that attend to a selection."""
    print("\n| policy | batch | live | dtype | ms | dense, ms | SDPA, ms | vs. the faster |")
    print("|---|---:|---:|---|---:|---:|---:|---:|")
    for row in rows:
        times = (f"{row[name]:.3f}" for name in ("ms", "dense_ms", "sdpa_ms"))
        cells = (row["policy"], row["batch"], row["live"], row["dtype"], *times, f"{row['vs_best_dense']:.2f}x")
        print("|", " | ".join(map(str, cells)), "|")


def show_prompts(rows: list[dict[str, Any]]) -> None:
    """The same of prompts."""
    print("\n| policy | prompt | ms | over SDPA | MB | SDPA's MB |")
    print("|---|---:|---:|---:|---:|---:|")
    for row in rows:
        sizes = ("" if row[name] is None else f"{row[name] / 1e6:.0f}" for name in ("peak_bytes", "sdpa_peak_bytes"))
        print(
            "|", " | ".join([row["policy"], f"{row['length']:,}", f"{row['ms']:.3f}", f"{row['ratio']:.2f}x", *sizes]), "|"
        )


if __name__ == "__main__":
    sys.exit(main())
