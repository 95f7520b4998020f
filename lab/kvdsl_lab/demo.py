"""What kvdsl does, in a minute: a policy file becomes a cache, and the cache bounds the memory of a model that generates text.

python -m kvdsl_lab.demo      `make demo`
"""

from __future__ import annotations

import importlib
import sys
import time
from pathlib import Path
from typing import Any

import click

RATE = 0.25
"""The budget, as a share of the prompt."""


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--new-tokens", type=click.IntRange(2), default=96, show_default=True, help="Tokens to generate.")
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), default=Path("generated"), show_default=True,
              help="Where the compiled policy goes.")  # fmt: skip
def main(new_tokens: int, out: Path) -> None:
    """Compile RoCo, then generate with it and with the full cache, side by side."""
    from rich.console import Console

    console = Console(highlight=False)
    _show_policy(console)
    cache_class = _compile(console, out)
    _generate(console, cache_class, new_tokens)


def _show_policy(console: Any) -> None:
    """The policy without its docstring."""
    from rich.markup import escape

    from kvdsl.resources import read_resource

    source = read_resource("policies", "roco.kv")
    head, _, rest = source.partition('"""')
    body = head.strip() + "\n" + rest.partition('"""')[2].strip("\n")
    console.print("[bold]A policy[/] says which cached tokens a model keeps. This one is RoCo:\n")
    console.print("\n".join(f"    {escape(line)}" for line in body.splitlines() if line.strip()), style="cyan")


def _compile(console: Any, out: Path) -> Any:
    """`kvdsl compile policies/roco.kv`, and the import that follows it."""
    from kvdsl.compiler import compile_file
    from kvdsl.emit.render import write

    begun = time.perf_counter()
    files = compile_file("roco", {}).files
    write(files, out / "roco")
    taken = time.perf_counter() - begun
    console.print(f"\n[bold]Compiled[/] in {taken:.2f} s into {out / 'roco'}/: {', '.join(files)}")
    console.print(f"    from {out.name}.roco import RoCoCache\n    cache = RoCoCache(model, budget={RATE})\n"
                  "    model.generate(**inputs, past_key_values=cache)", style="cyan", markup=False)  # fmt: skip
    sys.path.insert(0, str(out.resolve().parent))
    return importlib.import_module(f"{out.name}.roco").RoCoCache


def _generate(console: Any, cache_class: Any, new_tokens: int) -> None:
    import torch
    from transformers import DynamicCache

    from kvdsl.generation.generate import generate, generate_full, warm_up
    from kvdsl.generation.models import encode, first_token, load_model, page
    from kvdsl.generation.report import comparison

    torch.manual_seed(0)
    model, tokenizer = load_model(None)
    text = page()
    prompt = first_token(tokenizer) + encode(tokenizer, text)
    console.print(f"\n[bold]Generating[/] with the model that ships with kvdsl ({_size(model)}), on from a page of a book "
                  f"({len(prompt)} tokens) that ends:")  # fmt: skip
    console.print(f"    ... {' '.join(text.split()[-30:])}", style="cyan", markup=False)
    generate(model, tokenizer, prompt[:64], 3, DynamicCache(config=model.config))
    full = generate_full(model, tokenizer, prompt, new_tokens)
    cache = cache_class(model, budget=RATE)
    warm_up(model, tokenizer, prompt, cache)
    ours = generate(model, tokenizer, prompt, new_tokens, cache)
    name = f"RoCo, {RATE:.0%} of the prompt"
    for table in comparison(name, ours, full):
        console.print(table)
    _explain(console, cache)


def _size(model: Any) -> str:
    return f"{sum(parameter.numel() for parameter in model.parameters()) / 1e6:.1f} M parameters"


def _explain(console: Any, cache: Any) -> None:
    kept = cache.positions(0)[0, 0]
    newest = int(kept.max())
    held = sorted(int(position) for position in kept[kept >= 0])
    early = sum(position < newest // 2 for position in held)
    console.print(
        f"The full cache grows with every token. RoCo's has {kept.numel()} slots per head and never grows: the first head of layer 0 "
        f"now holds {len(held)} of {newest + 1} tokens, {early} of them from the first half of the text; the oldest is token {held[0]}. "
        "Where it forgot something that mattered, the texts part.\n"
    )
    console.print(
        "The model is tiny and the text is short, so most of a step is not the cache. What one step costs where the cache is large:\n"
        "    kvdsl bench decode --policy roco --live 4096\n"
        "Other policies, other models:\n"
        "    kvdsl list\n    kvdsl run --policy h2o --set budget=128 --compare --model PATH_OR_ID",
        markup=False,
    )


if __name__ == "__main__":
    main()
