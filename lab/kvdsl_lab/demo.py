"""What kvdsl does, in two minutes: a policy file becomes a cache that finds a fact in a text; another one goes on with a text.

python -m kvdsl_lab.demo                      `make demo`
python -m kvdsl_lab.demo --kv-dtype int8      `make demo DEMO_ARGS='--kv-dtype int8'`: keys and values in 8 bits
"""

from __future__ import annotations

import importlib
import json
import keyword
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvdsl.cli.options import memory_options
from kvdsl.errors import KvdslError

if TYPE_CHECKING:
    from kvdsl.generation.report import Generated
    from kvdsl_lab.leaderboard.questions import Question

RATE = 0.25
"""The budget while finding a fact, as a share of the prompt."""

BOUND = 128
"""The budget while going on with a text, in tokens."""

PENALTY = 1.2
"""Of tokens that were said before, while going on with a text: small models repeat themselves otherwise."""

SHOWN = "chunkkv"
"""The policy that is shown and compiled."""

FINDING = {"ChunkKV": SHOWN, "SnapKV": "snapkv"}
"""Who looks for a fact beside the full cache: policies that listen to the question, by phrases and by tokens."""

COUNTS = Path(__file__).parent / "assets/fact.json"
"""How often policies find such a fact: the `leaderboard.json` of

kvdsl leaderboard --model smollm2 --tasks fact --length 1024 --items 20 --rates 0.25 \\
  --policies chunkkv,rkv,snapkv,adakv,keydiff,roco,h2o,streaming_llm,tova
"""

ITEM = 0
"""Which of its items is shown."""


def importable(context: click.Context, option: click.Parameter, out: Path) -> Path:
    """The folder, if Python can import it by its name."""
    folder = out.resolve()
    loaded = sys.modules.get(folder.name)
    other = loaded is not None and str(folder) not in getattr(loaded, "__path__", ())
    if not folder.name.isidentifier() or keyword.iskeyword(folder.name) or other:
        raise click.BadParameter(
            f"`{folder.name}` cannot be imported as the policy's package; give a folder with another name"
        )
    return folder


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--new-tokens", type=click.IntRange(2), default=128, show_default=True, help="Tokens to go on with.")
@click.option("--model", default="smollm2", show_default=True, metavar="MODEL",
              help="A name of `kvdsl models`, which is fetched if it is not there, or a folder.")  # fmt: skip
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), default=Path("generated"), show_default=True,
              callback=importable, help="Where the compiled policy goes.")  # fmt: skip
@click.option(
    "--threads", type=click.IntRange(1), help="Threads; torch's choice, and fewer on a busy machine, where nothing is given."
)
@memory_options
def main(new_tokens: int, model: str, out: Path, threads: int | None, memory: dict[str, str]) -> None:
    """Compile ChunkKV; find a fact with it, with SnapKV and the full cache; go on with a text under RoCo."""
    import torch
    from rich.console import Console

    from kvdsl.busy import use_threads
    from kvdsl.cli.common import warning

    console = Console(highlight=False)
    _show_policy(console)
    cache_class = _compile(console, out, memory)
    lm, tokenizer, had = _model(console, model)
    torch.manual_seed(0)
    if told := use_threads(threads):
        warning(told)
    if tokenizer.chat_template is not None:
        _find(console, lm, tokenizer, cache_class, memory)
    _go_on(console, lm, tokenizer, new_tokens, memory)
    console.print(
        "\nOther policies, other texts:\n"
        "    kvdsl list\n"
        f"    kvdsl run h2o --set budget=128 {_options(memory)}--compare {had}--prompt-file YOUR_TEXT.txt\n"
        "Which policy for what: docs/choosing.md",
        markup=False,
    )


def _show_policy(console: Any) -> None:
    """The policy without its docstring."""
    from rich.markup import escape

    from kvdsl.files import read_resource

    source = read_resource("policies", "gallery", f"{SHOWN}.kv")
    head, _, rest = source.partition('"""')
    body = head.strip() + "\n" + rest.partition('"""')[2].strip("\n")
    console.print("[bold]A policy[/] says which cached tokens a model keeps. This one is ChunkKV:\n")
    console.print("\n".join(f"    {escape(line)}" for line in body.splitlines() if line.strip()), style="cyan")


def _options(memory: Mapping[str, str]) -> str:
    """What the demo was given of the memory's layout, for another command."""
    return "".join(f"--{name.replace('_', '-')} {value} " for name, value in memory.items())


def _compile(console: Any, out: Path, memory: Mapping[str, str]) -> Any:
    """`kvdsl compile chunkkv`, and the import that follows it."""
    from kvdsl.compiler import compile_file
    from kvdsl.emit import write

    begun = time.perf_counter()
    files = compile_file(SHOWN, {}).files
    write(files, out / SHOWN)
    taken = time.perf_counter() - begun
    given = "".join(f', {name}="{value}"' for name, value in memory.items())
    console.print(f"\n[bold]Compiled[/] in {taken:.2f} s into {os.path.relpath(out / SHOWN)}/: {', '.join(files)}")
    console.print(f"    from {out.name}.{SHOWN} import ChunkKVCache\n    cache = ChunkKVCache(model, budget={RATE}{given})\n"
                  "    model.generate(**inputs, cache=cache)", style="cyan", markup=False)  # fmt: skip
    sys.path.insert(0, str(out.parent))
    return importlib.import_module(f"{out.name}.{SHOWN}").ChunkKVCache


def _model(console: Any, name: str) -> tuple[Any, Any, str]:
    """The model of this name, fetched if need be, or the one that ships with kvdsl-lab; its tokenizer, and the option that names it."""
    from kvdsl.generation.models import load_model
    from kvdsl.models import CATALOGUE, here, named
    from kvdsl.models.fetch import get
    from kvdsl.models.gguf import check_can_convert, convert

    try:
        if name in CATALOGUE and not here(named(name)):
            check_can_convert()
            get(named(name), convert, lambda text: console.print(text, markup=False))
        model, tokenizer = load_model(name)
        option = f"--model {name} "
    except KvdslError as error:
        console.print(
            f"\n{name} cannot be had ({error}); going on with the small model that ships with kvdsl-lab.", markup=False
        )
        model, tokenizer = load_model(None)
        name, option = "the reference model", ""
    millions = sum(parameter.numel() for parameter in model.parameters()) / 1e6
    console.print(f"\n[bold]The model[/] is {name}: {millions:.0f} M parameters.")
    return model, tokenizer, option


# -- finding a fact ----------------------------------------------------------------------------------------------------


def _find(console: Any, model: Any, tokenizer: Any, compiled: Any, memory: Mapping[str, str]) -> None:
    from kvdsl.cli.progress import status
    from kvdsl.generation.generate import generate_full, warm_up_full
    from kvdsl.generation.report import FULL
    from kvdsl.loading import load
    from kvdsl_lab.leaderboard.questions import lay_out

    counted = json.loads(COUNTS.read_text(encoding="utf-8"))
    question = shown_question(model, tokenizer, counted)
    prompt = [token for part in lay_out(tokenizer, question) for token in part]
    _show_question(console, question, len(prompt))
    with status("reading the pages") as tell:
        tell("full cache")
        warm_up_full(model, tokenizer, prompt)
        found = {FULL: generate_full(model, tokenizer, prompt, question.new_tokens)}
        for name, policy in FINDING.items():
            tell(name)
            cache_class: Any = compiled if policy == SHOWN else load(policy)
            found[name] = _timed(model, tokenizer, prompt, question.new_tokens, cache_class(model, budget=RATE, **memory))
    right, items = how_many(counted)
    console.print(_answers(found, question, right, items))
    console.print(
        f"The last column counts {items} such texts, measured before with {counted['model']} in {counted['dtype']} (kvdsl leaderboard "
        "--tasks fact). SnapKV keeps the tokens that the question looks at; ChunkKV keeps the phrases that they stand in, so that a code "
        "stays whole.",
        markup=False,
    )


def shown_question(model: Any, tokenizer: Any, counted: Mapping[str, Any]) -> Question:
    """The item of the counted ones that is shown."""
    from kvdsl_lab.assets import all_books
    from kvdsl_lab.leaderboard.kinds import Lab, Questions
    from kvdsl_lab.leaderboard.tasks import TASKS

    kind = TASKS["fact"].kind
    assert isinstance(kind, Questions)
    return kind.question(Lab(model, tokenizer, all_books(), counted["length"], counted["seed"]), "fact", ITEM)


def _show_question(console: Any, question: Question, tokens: int) -> None:
    from rich.markup import escape

    assert question.fact is not None
    before, _, after = question.text.partition(question.fact)
    console.print(
        f"\n[bold]Finding a fact.[/] Pages of a book, {tokens} tokens with the question. {question.depth:.0%} of the way in, a sentence "
        "stands that is not the author's:"
    )
    around = escape(" ".join(before.split()[-12:])), escape(question.fact), escape(" ".join(after.split()[:12]))
    console.print(f"    ... {around[0]} [bold]{around[1]}[/] {around[2]} ...", style="cyan")
    console.print(f"Behind the pages, in the chat: {question.question} The answers begin: {question.opening}", markup=False)


def how_many(counted: Mapping[str, Any]) -> tuple[dict[str, int], int]:
    """How many of the texts each policy has answered, and how many there were, from a `leaderboard.json`."""
    rows = next(column["rows"] for column in counted["columns"] if column["name"] == "fact: known")
    right = {row["policy"]: round(row["mean"] * row["items"]) for row in rows if row["budget"] in (None, RATE)}
    return right, rows[0]["items"]


def _answers(found: Mapping[str, Generated], question: Question, right: Mapping[str, int], items: int) -> Any:
    from rich import box
    from rich.table import Table

    from kvdsl.generation.report import plain, rate, size

    table = Table(box=box.SIMPLE_HEAD)
    for column in ("", "answer", "", "cache", "first token", "tokens/s", f"right of {items}"):
        table.add_column(column, justify="left" if column in ("", "answer") else "right")
    for name, one in found.items():
        mark = "right" if question.score(one.text) == 1 else "wrong"
        often = str(right[FINDING.get(name, "full")])
        sentence = plain(one.text.partition(".")[0] + ".")
        table.add_row(name, sentence, mark, size(one.cache_bytes), f"{one.ttft_ms / 1e3:.1f} s", rate(one), often)
    return table


# -- going on with a text ----------------------------------------------------------------------------------------------


def _go_on(console: Any, model: Any, tokenizer: Any, new_tokens: int, memory: Mapping[str, str]) -> None:
    from kvdsl.cli.progress import status
    from kvdsl.generation.generate import generate_full, warm_up_full
    from kvdsl.generation.models import prompt_tokens
    from kvdsl.generation.report import FULL, comparison
    from kvdsl.generation.text import page
    from kvdsl.loading import load

    text = page()
    prompt = prompt_tokens(tokenizer, text)
    console.print(f"\n[bold]Going on with a text.[/] A page of a book, {len(prompt)} tokens, that ends:")
    console.print(f"    ... {' '.join(text.split()[-30:])}", style="cyan", markup=False)
    console.print(
        "Nobody asks now, and what is written is kept by the policies above. RoCo evicts at every token by the attention that all others "
        f"paid, so that {BOUND} tokens a head are enough, however long the answer. (The likeliest token each time, with a repetition "
        f"penalty of {PENALTY}.)"
    )
    model.generation_config.repetition_penalty = PENALTY
    cache_class: Any = load("roco")
    cache = cache_class(model, budget=BOUND, **memory)
    with status("going on") as tell:
        tell("full cache")
        warm_up_full(model, tokenizer, prompt)
        found = {FULL: generate_full(model, tokenizer, prompt, new_tokens)}
        tell("RoCo")
        found[f"RoCo, {BOUND} tokens"] = _timed(model, tokenizer, prompt, new_tokens, cache)
    for table in comparison(found):
        console.print(table)
    _explain(console, cache)


def _timed(model: Any, tokenizer: Any, prompt: Sequence[int], new_tokens: int, cache: Any) -> Generated:
    """Text after a prompt, with kernels built and threads awake before."""
    from kvdsl.generation.generate import generate, warm_up

    warm_up(model, tokenizer, prompt, cache)
    return generate(model, tokenizer, prompt, new_tokens, cache)


def _explain(console: Any, cache: Any) -> None:
    kept = cache.positions(0)[0, 0]
    newest = int(kept.max())
    held = sorted(int(position) for position in kept[kept >= 0])
    early = sum(position < newest // 2 for position in held)
    console.print(
        f"The full cache grows with every token. RoCo's has {kept.numel()} slots per head and never grows: the first head of layer 0 "
        f"now holds {len(held)} of {newest + 1} tokens, {early} of them from the first half of the text; the oldest is token {held[0]}."
    )


def run() -> None:
    """The command, with what goes wrong told in a line."""
    from kvdsl.busy import wait_passively
    from kvdsl.cli.common import guarded

    wait_passively()
    sys.exit(guarded(lambda: main(standalone_mode=False)))


if __name__ == "__main__":
    run()
