"""`kvdsl bench generate`: whole models, from the prompt to the last token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvdsl.budget import spelled
from kvdsl.cli.common import json_option, print_json
from kvdsl.cli.options import BACKENDS, cache_options, dtype_option, model_option, policies_option, refuse_triton
from kvdsl.precheck import settings_by_policy
from kvdsl_lab.bench.names import policies_among
from kvdsl_lab.cli.measuring import text_option
from kvdsl_lab.eval.names import ASKER, parse_budgets, parse_policies

if TYPE_CHECKING:
    from rich.table import Table
    from torch import Tensor


@click.command()
@policies_option(
    "transformers,full,h2o,roco",
    help="Shipped policies, .kv files, `transformers` for its own growing cache, `static` for its other one, with room for the whole text, "
    "`recompute` for a window without one, `shift:h2o` for the rule of h2o with a cache that is shifted for every token, `fresh:h2o` "
    "for the same as published code has it, `kvpress:SnapKVPress` for a press, where kvpress is installed.",
)  # fmt: skip
@click.option("--budgets", default="256", show_default=True, metavar="N,M", help="Budgets of each policy.")
@cache_options
@model_option
@click.option("--shape", metavar="NAME[:LAYERS]",
              help="Use random weights instead of a model: `llama-2-7b:2` has two layers of that shape.")  # fmt: skip
@text_option
@click.option("--prompt-tokens", type=click.IntRange(1), default=512, show_default=True, help="Length of a prompt.")
@click.option("--new-tokens", type=click.IntRange(2), default=64, show_default=True, help="Tokens to generate after it.")
@click.option("--batch", type=click.IntRange(1), default=1, show_default=True, help="Rows.")
@click.option("--share-prompt", is_flag=True,
              help="All rows share one prompt, which is read once; each continues with another of its likeliest tokens.")  # fmt: skip
@click.option("--backend", type=BACKENDS, default="auto", show_default=True, help="Backend of the policies.")
@click.option("--threads", type=click.IntRange(1), help="CPU threads for every measurement [default: torch's].")
@click.option(
    "--repeats", type=click.IntRange(1), default=3, show_default=True, help="Rounds: a prompt and its tokens each."
)
@click.option("--warmup", type=click.IntRange(0), default=0, show_default=True, help="Rounds before the measurement.")
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of the random weights and prompts.")
@dtype_option
@json_option
def generate(
    policies: str, budgets: str, settings: dict[str, str], model: str | None, shape: str | None, text: Path | None,
    prompt_tokens: int, new_tokens: int, batch: int, share_prompt: bool, backend: str, threads: int | None, repeats: int,
    warmup: int, seed: int, dtype: str | None, as_json: bool,
) -> None:  # fmt: skip
    """Time and memory of a whole model: the prompt, then token by token.

    All policies generate from the same prompts with the same weights, alternating token by token. Before that, each generates once
    alone: this warms it up and measures its peak memory and the shares of a token's time that attention and the cache's update take
    (appending, moving, evicting, statistics). Tokens per second count all rows, after the first token. `as fast` is relative to the
    first policy.

    Shift and append, which in-place updates replace, exists for h2o, equip_h2o, streaming_llm and equip_streaming. If the prompt
    fills the budget, every token evicts one.

    \b
    Examples:
      kvdsl bench generate --policies transformers,full,h2o,roco --budgets 128,256 --prompt-tokens 1024
      kvdsl bench generate --policies full,sparcas --set tokens=128 --model path/to/model --prompt-tokens 8192
      kvdsl bench generate --policies full,streaming_llm --shape llama-2-7b:2 --batch 8 --dtype bf16
      kvdsl bench generate --policies transformers,kvpress:SnapKVPress,snapkv --budgets 512 --prompt-tokens 2048
      kvdsl bench generate --policies shift:equip_h2o,equip_h2o --shape llama-2-7b:2 --batch 8 --share-prompt --prompt-tokens 256
    """
    if model is not None and shape is not None:
        raise click.UsageError("give --model or --shape, not both")
    if shape is not None and text is not None:
        raise click.UsageError("--shape has random weights and reads random tokens: give --text with --model only")
    if share_prompt and "static" in policies.split(","):
        raise click.UsageError("transformers cannot share a static cache's prompt: leave out `static` or --share-prompt")
    sizes, names = parse_budgets(settings.pop("budget", budgets)), parse_policies(policies)
    settings_by_policy(policies_among(names), settings, ASKER)
    refuse_triton(backend)
    import torch

    from kvdsl.cli.progress import progress
    from kvdsl.generation.models import check_length
    from kvdsl_lab.bench.contenders import contenders
    from kvdsl_lab.bench.generate import bench_generate, steps

    if threads:
        torch.set_num_threads(threads)
    prompts = 1 if share_prompt else batch
    loaded, ids = (
        _random(shape, dtype, prompts, prompt_tokens, seed) if shape else _read(model, text, dtype, prompts, prompt_tokens)
    )
    check_length(loaded, prompt_tokens + new_tokens)
    wanted = contenders(names, settings, sizes, loaded, backend, prompt_tokens + new_tokens)
    with progress("generate", steps(wanted, repeats, warmup)) as tick:
        rows = bench_generate(
            loaded, ids, new_tokens, wanted, rows=batch if share_prompt else None, repeats=repeats, warmup=warmup, tick=tick
        )
    facts = {
        "model": shape or model or "the reference model", "share_prompt": share_prompt, "repeats": repeats, "warmup": warmup,
        "threads": torch.get_num_threads(),
    }  # fmt: skip
    kind = str(loaded.dtype).removeprefix("torch.")
    if as_json:
        print_json({**facts, "rows": rows}, dtype=kind, seed=seed)
    else:
        _show(rows, {**facts, "dtype": kind})


def _random(shape: str, dtype: str | None, batch: int, length: int, seed: int) -> tuple[Any, Tensor]:
    """Return a model with random weights, and random prompts."""
    import torch

    from kvdsl_lab.bench.shapes import shaped_model

    model = shaped_model(shape, dtype, seed)
    generator = torch.Generator().manual_seed(seed)
    return model, torch.randint(model.config.vocab_size, (batch, length), generator=generator)


def _read(model: str | None, text: Path | None, dtype: str | None, batch: int, length: int) -> tuple[Any, Tensor]:
    """Return a model, and prompts spread evenly over the text."""
    from kvdsl.generation.models import load_model, windows
    from kvdsl.generation.text import read_text

    loaded, tokenizer = load_model(model, dtype)
    return loaded, windows(tokenizer, read_text(text), length, batch)


def _show(rows: Sequence[Mapping[str, Any]], facts: Mapping[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    from kvdsl.generation.report import size

    console, first = Console(), rows[0]
    title = (
        f"{facts['model']} in {facts['dtype']}: batch {first['batch']}, {first['prompt_tokens']} prompt tokens, "
        f"{first['new_tokens']} new ones, {facts['threads']} threads, {facts['repeats']} rounds"
    )
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, collapse_padding=True)
    noted = [""] if any(row["note"] for row in rows) else []
    for header in ("policy", "budget", "first\nms", "a token\nms", "", "as fast", "memory", "cache", *noted):
        table.add_column(header, justify="left" if header in ("policy", "") else "right", no_wrap=True)
    for row in rows:
        table.add_row(
            row["policy"], "" if row["budget"] is None else spelled(row["budget"]), f"{row['ttft_ms']:.0f}", f"{row['tpot_ms']:.2f}",
            f"[{row['tpot_ms_q1']:.3g} .. {row['tpot_ms_q3']:.3g}]", f"{row['vs_first']:.2f}x",
            "" if row["peak_bytes"] is None else size(row["peak_bytes"]), size(row["cache_bytes"]),
            *([row["note"] or ""] if noted else []),
        )  # fmt: skip
    console.print(table, markup=False)
    if any(share is not None for row in rows for share in row["shares"].values()):
        console.print(_shares(rows), markup=False)


_SHARES = {"attention": "attention", "rotation": "turning keys", "update": "cache's update", "head": "model's head"}


def _shares(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Return the table of the shares of a token's time; empty where they were not measured."""
    from rich.table import Table

    table = Table(title="\nof a token's time, %", title_justify="left", box=None, pad_edge=False)
    for header in ("policy", "budget", *_SHARES.values()):
        table.add_column(header, justify="left" if header == "policy" else "right", no_wrap=True)
    for row in rows:
        shares = [row["shares"][name] for name in _SHARES]
        cells = ["" if share is None else f"{100 * share:.1f}" for share in shares]
        table.add_row(row["policy"], "" if row["budget"] is None else spelled(row["budget"]), *cells)
    return table
