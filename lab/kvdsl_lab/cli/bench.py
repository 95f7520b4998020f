"""`kvdsl bench`: the speed of a policy and of what it would replace."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import TYPE_CHECKING, Any

import click

from kvdsl.cli.common import json_option, print_json
from kvdsl.cli.options import BACKENDS, cache_options, policies_option, policy_options, refuse_missing, refuse_triton
from kvdsl.precheck import settings_by_policy
from kvdsl_lab.bench.names import policies_among
from kvdsl_lab.cli.generate import generate
from kvdsl_lab.eval.names import ASKER, parse_budgets, parse_policies

if TYPE_CHECKING:
    from kvdsl.runtime.spec import PolicySpec


@click.group()
def command() -> None:
    """Measure how fast a policy runs.

    What is compared runs in alternation, in one process, on the same threads and the same data. Times are medians in milliseconds,
    with the first and third quartile in brackets. Ratios are medians of the ratios within each round.
    """


command.add_command(generate)


def on_one_layer(
    *,
    repeats: int = 15,
    warmup: int = 3,
    least: int = 3,
    random: str = "queries, keys and values",
    given_budget: bool = False,
    packs: bool = False,
) -> Callable[[Any], Any]:
    """Options of measurements of one layer. The command receives the policy as `spec`.

    Args:
        repeats, warmup: the defaults; `least`: the smallest number of repeats.
        random: what the seed generates, for the help.
        given_budget: whether `--set budget=...` is allowed; otherwise `--live` gives the budget.
        packs: whether `--kv-dtype` may differ from the model's dtype.
    """

    def decorate(measure: Any) -> Any:
        @click.option(
            "--dtype",
            type=click.Choice(["fp32", "bf16", "fp16"]),
            default="fp32",
            show_default=True,
            help="Type of keys and values.",
        )
        @click.option("--backend", type=BACKENDS, default="auto", show_default=True, help="Backend of the policy.")
        @click.option("--threads", type=click.IntRange(1), help="CPU threads for every measurement [default: torch's].")
        @click.option("--repeats", type=click.IntRange(least), default=repeats, show_default=True, help="Measured rounds.")
        @click.option(
            "--warmup", type=click.IntRange(0), default=warmup, show_default=True, help="Rounds before the measurement."
        )
        @click.option("--seed", type=int, default=0, show_default=True, help=f"Seed of the random {random}.")
        @cache_options
        @json_option
        @wraps(measure)
        def with_spec(policy: str, backend: str, threads: int | None, settings: dict[str, str], **given: Any) -> None:
            if "budget" in settings and not given_budget:
                raise click.BadParameter("`--live` decides the budget here", param_hint="--set")
            if settings.get("kv_dtype", "model") != "model" and not packs:
                raise click.BadParameter("`bench decode` and `bench generate` measure it", param_hint="--kv-dtype")
            refuse_missing("torch")
            refuse_triton(backend)
            import torch

            from kvdsl.loading import load

            if threads:
                torch.set_num_threads(threads)
            measure(spec=load(policy, **settings).spec, backend=backend, **given)

        return with_spec

    return decorate


@command.command()
@policy_options()
@click.option("--batch", type=click.IntRange(1), default=8, show_default=True, help="Rows.")
@click.option("--kv-heads", type=click.IntRange(1), default=8, show_default=True, help="KV heads of a row.")
@click.option("--group", type=click.IntRange(1), default=4, show_default=True, help="Query heads that share a KV head.")
@click.option("--head-dim", type=click.IntRange(8), default=128, show_default=True, help="Size of a head.")
@click.option("--live", type=click.IntRange(8), default=4096, show_default=True, help="Slots that a step attends to.")
@on_one_layer(packs=True)
def decode(
    spec: PolicySpec, batch: int, kv_heads: int, group: int, head_dim: int, live: int, dtype: str, backend: str,
    repeats: int, warmup: int, seed: int, as_json: bool,
) -> None:  # fmt: skip
    """One decode step with a full cache: place, attend, observe, settle.

    The baselines are a streaming read of the same bytes (the roofline), torch's fused attention, which has no statistics and no
    eviction, and eager torch with the same statistics and eviction, with repeat_kv (as in H2O's and EasyKV's code) and without.

    \b
    Examples:
      kvdsl bench decode roco --live 4096
      kvdsl bench decode h2o --live 8192 --dtype bf16 --json
    """
    from kvdsl.cli.progress import progress
    from kvdsl_lab.bench.decode import Shape, bench_decode

    shape = Shape(batch, kv_heads, group, head_dim, live, dtype)
    with progress(f"{spec.name}, {live} live slots", repeats + warmup) as tick:
        result = bench_decode(spec, shape, backend=backend, repeats=repeats, warmup=warmup, seed=seed, tick=tick)
    if as_json:
        print_json(result, dtype=dtype, seed=seed)
    else:
        _show(result)


@command.command()
@policy_options("h2o")
@click.option("--batch", type=click.IntRange(1), default=1, show_default=True, help="Rows.")
@click.option("--heads", type=click.IntRange(1), default=64, show_default=True, help="KV heads of a row.")
@click.option("--head-dim", type=click.IntRange(8), default=64, show_default=True, help="Size of a head.")
@click.option("--live", type=click.IntRange(2), default=1024, show_default=True, help="Cached tokens.")
@click.option("--evict", type=click.IntRange(1), default=64, show_default=True, help="Tokens to evict and to add at a time.")
@click.option("--equip", is_flag=True, help="All shapes of EQUIP's Table 5, instead of --batch, --heads and --head-dim.")
@on_one_layer(random="keys, values and victims")
def update(
    spec: PolicySpec, batch: int, heads: int, head_dim: int, live: int, evict: int, equip: bool, dtype: str, backend: str,
    repeats: int, warmup: int, seed: int, as_json: bool,
) -> None:  # fmt: skip
    """Evict tokens from a cache and add as many, without attention (EQUIP, appendix D.5).

    In place, new tokens overwrite the victims. Shift and append instead moves the remaining tokens together, between two buffers that
    are allocated once, or into fresh memory as in models' code. The shift's lower bound is a plain copy of the same bytes.

    \b
    Examples:
      kvdsl bench update h2o --batch 8 --heads 64 --head-dim 64 --live 1024 --evict 64
      kvdsl bench update streaming_llm --equip
    """
    if evict >= live:
        raise click.BadParameter(f"evict fewer than the {live} cached tokens", param_hint="--evict")
    from kvdsl.cli.progress import progress
    from kvdsl_lab.bench.update import EQUIP_SHAPES, Shape, bench_update

    shapes = [Shape(*sizes, live, evict, dtype) for sizes in (EQUIP_SHAPES if equip else ((batch, heads, head_dim),))]
    with progress(f"{spec.name}, {evict} of {live}", len(shapes) * (repeats + warmup)) as tick:
        rows = [
            bench_update(spec, shape, backend=backend, repeats=repeats, warmup=warmup, seed=seed, tick=tick)
            for shape in shapes
        ]
    if as_json:
        print_json({"rows": rows} if equip else rows[0], dtype=dtype, seed=seed)
    else:
        _show_updates(rows)


def _show_updates(rows: Sequence[Mapping[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    console, first = Console(), rows[0]
    title = (
        f"{first['policy']} ({first['backend']}): {first['evict']} of {first['live']} tokens, {first['dtype']}, "
        f"{first['threads']} threads, {first['repeats']} rounds"
    )
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    sizes, times = ("batch", "heads", "head size", "MB"), ("in place, ms", "shift, ms", "slower by", "of a copy")
    for header in (*sizes, *times, "fresh, ms", "slower by"):
        table.add_column(header, justify="right")
    for row in rows:
        table.add_row(
            *(str(row[name]) for name in ("batch", "heads", "head_dim")), f"{row['bytes'] / 1e6:.0f}",
            f"{row['ms']:.3f}", f"{row['shift_ms']:.2f}", f"{row['speedup']:.1f}x", f"{100 * row['shift_of_copy']:.0f} %",
            f"{row['fresh_ms']:.2f}", f"{row['speedup_over_fresh']:.1f}x",
        )  # fmt: skip
    console.print(table, markup=False)


@command.command()
@policies_option(
    "transformers,full,h2o,roco,streaming_llm",
    help="Shipped policies, .kv files, or `transformers` for its DynamicCache.",
)
@click.option("--budgets", default="128", show_default=True, metavar="N,M", help="Budgets of each policy.")
@cache_options
@click.option(
    "--shape",
    default="smollm2-135m",
    show_default=True,
    metavar="NAME[:LAYERS]",
    help="Shape that gives the layers and heads.",
)
@click.option("--prompt-tokens", type=click.IntRange(1), default=128, show_default=True, help="Length of the prompt.")
@click.option("--new-tokens", type=click.IntRange(3), default=100, show_default=True, help="Tokens to generate and measure.")
@click.option(
    "--dtype", type=click.Choice(["fp32", "bf16", "fp16"]), default="fp32", show_default=True, help="Type of the model."
)
@click.option("--backend", type=BACKENDS, default="auto", show_default=True, help="Backend of the policies.")
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of the random weights and prompts.")
@json_option
def host(
    policies: str, budgets: str, settings: dict[str, str], shape: str, prompt_tokens: int, new_tokens: int, dtype: str,
    backend: str, seed: int, as_json: bool,
) -> None:  # fmt: skip
    """Time that Python and torch spend beside the arithmetic, per layer and token, in µs of CPU time on one thread.

    The model has the layers and heads of `--shape`, is so narrow that its matrix products take no time, and reads a short prompt.
    `beyond` is the additional time per layer and token relative to the first policy.

    \b
    Examples:
      kvdsl bench host
      kvdsl bench host --policies transformers,tova,snapkv --budgets 64 --dtype bf16 --json
    """
    sizes, names = parse_budgets(settings.pop("budget", budgets)), parse_policies(policies)
    settings_by_policy(policies_among(names), settings, ASKER)
    refuse_missing("torch")
    refuse_triton(backend)
    from kvdsl.cli.progress import progress
    from kvdsl_lab.bench.contenders import contenders
    from kvdsl_lab.bench.host import WARMUP, bench_host, narrow_model

    model = narrow_model(shape, dtype, seed)
    wanted = contenders(names, settings, sizes, model, backend)
    with progress("host", WARMUP + new_tokens) as tick:
        rows = bench_host(model, wanted, prompt_tokens=prompt_tokens, new_tokens=new_tokens, seed=seed, tick=tick)
    if as_json:
        facts = {"shape": shape, "prompt_tokens": prompt_tokens, "new_tokens": new_tokens, "threads": 1}
        print_json({**facts, "rows": rows}, dtype=dtype, seed=seed)
    else:
        _show_host(
            rows, f"{shape} without width in {dtype}: {prompt_tokens} prompt tokens, {new_tokens} new ones, one thread"
        )


def _show_host(rows: Sequence[Mapping[str, Any]], title: str) -> None:
    from rich.console import Console
    from rich.table import Table

    from kvdsl.budget import spelled

    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for header in ("policy", "budget", "µs a layer\nand token", "", "beyond\nthe first", ""):
        table.add_column(header, justify="left" if header in ("policy", "") else "right")
    for row in rows:
        spreads = {name: f"[{row[f'{name}_q1']:.0f} .. {row[f'{name}_q3']:.0f}]" for name in ("us", "beyond_us")}
        table.add_row(
            row["policy"], "" if row["budget"] is None else spelled(row["budget"]),
            f"{row['us']:.1f}", spreads["us"], f"{row['beyond_us']:.1f}", spreads["beyond_us"],
        )  # fmt: skip
    Console().print(table, markup=False)


@command.command()
@policy_options("h2o")
@click.option("--length", type=click.IntRange(1), default=8192, show_default=True, help="Length of the prompt.")
@click.option("--batch", type=click.IntRange(1), default=1, show_default=True, help="Rows.")
@click.option("--kv-heads", type=click.IntRange(1), default=8, show_default=True, help="KV heads of a row.")
@click.option("--group", type=click.IntRange(1), default=4, show_default=True, help="Query heads that share a KV head.")
@click.option("--head-dim", type=click.IntRange(8), default=128, show_default=True, help="Size of a head.")
@on_one_layer(repeats=5, warmup=1, least=1, given_budget=True)
def prefill(
    spec: PolicySpec, length: int, batch: int, kv_heads: int, group: int, head_dim: int, dtype: str, backend: str,
    repeats: int, warmup: int, seed: int, as_json: bool,
) -> None:  # fmt: skip
    """One layer's prefill: attend, observe, evict.

    The baselines are torch's fused attention, which has no statistics and no eviction, and, if it fits into half of the free memory,
    the path of H2O's code, which computes all probabilities at once. The table also shows the peak growth of the process's memory.

    \b
    Examples:
      kvdsl bench prefill h2o --length 8192
      kvdsl bench prefill snapkv --length 65536 --repeats 1 --warmup 0
    """
    from kvdsl.cli.progress import progress
    from kvdsl_lab.bench.prefill import Shape, bench_prefill

    shape = Shape(batch, kv_heads, group, head_dim, length, dtype)
    with progress(f"{spec.name}, {length} tokens", repeats + warmup) as tick:
        result = bench_prefill(spec, shape, backend=backend, repeats=repeats, warmup=warmup, seed=seed, tick=tick)
    if as_json:
        print_json(result, dtype=dtype, seed=seed)
    else:
        _show_prompt(result)


_PROMPT_ROWS = (("{policy} ({backend})", ""), ("SDPA (no statistics)", "sdpa_"), ("eager torch with repeat_kv", "eager_"))


def _show_prompt(result: Mapping[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    title = (
        f"batch {result['batch']}, {result['kv_heads']} KV heads x {result['group']}, head size {result['head_dim']}, "
        f"{result['length']} tokens, {result['dtype']}, {result['threads']} threads, {result['repeats']} rounds"
    )
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for header in ("", "ms a layer", "", "peak, MB"):
        table.add_column(header, justify="left" if header == "" else "right")
    for label, name in _PROMPT_ROWS:
        time, peak = result[f"{name}ms"], result[f"{name}peak_bytes"]
        spread = "does not fit" if time is None else f"[{result[f'{name}ms_q1']:.0f} .. {result[f'{name}ms_q3']:.0f}]"
        size = "" if peak is None else f"{peak / 1e6:.0f}"
        table.add_row(label.format(**result), "" if time is None else f"{time:.0f}", spread, size)
    console.print(table, markup=False)
    console.print(f"{result['ratio']:.2f}x the time of SDPA", highlight=False)
    if result["note"]:
        console.print(f"{result['policy']}: {result['note']}", highlight=False)


_ROWS = (
    ("{name} ({backend})", "ms", None),
    ("our dense step (`full`)", "dense_ms", "vs_dense"),
    ("SDPA ({sdpa_call}; no statistics)", "sdpa_ms", "vs_sdpa"),
    ("SDPA, group folded into rows", "sdpa_folded_ms", "vs_sdpa_folded"),
    ("grouped eager torch", "grouped_ms", "vs_grouped"),
    ("eager torch with repeat_kv", "eager_ms", "vs_eager"),
    ("the same, buffers allocated once", "eager_preallocated_ms", "vs_eager_preallocated"),
)


def _show(result: Mapping[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    table = Table(title=_title(result), title_justify="left", box=None, pad_edge=False)
    for header in ("", "ms a step", "", "slower by"):
        table.add_column(header, justify="left" if header == "" else "right")
    for label, time, ratio in _ROWS:
        if result.get(time) is None:
            continue
        spread = f"[{result[time + '_q1']:.2f} .. {result[time + '_q3']:.2f}]"
        slower = "" if ratio is None else f"{result[ratio]:.2f}x"
        table.add_row(label.format(name=result["policy"], **result), f"{result[time]:.2f}", spread, slower)
    console.print(table, markup=False)
    for stage, ms in result.get("breakdown", {}).items():
        console.print(f"  {stage.removesuffix('_ms').replace('_', ' '):<16}{ms:8.3f} ms", highlight=False)
    console.print(
        f"{result['gbps']:.1f} GB/s of keys and values; a streaming read of the same bytes moves {result['read_gbps']:.1f} GB/s: "
        f"{100 * result['roofline']:.0f} % of the roofline",
        highlight=False,
    )


def _title(result: Mapping[str, Any]) -> str:
    return (
        f"batch {result['batch']}, {result['kv_heads']} KV heads x {result['group']}, head size {result['head_dim']}, "
        f"{result['live']} live slots, {result['dtype']}, {result['bytes'] / 1e6:.0f} MB, {result['threads']} threads, "
        f"{result['repeats']} rounds"
    )
