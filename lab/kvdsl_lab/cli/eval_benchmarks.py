"""`kvdsl eval longbench` and `kvdsl eval ruler`: published benchmarks from local files."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvdsl.cli.common import FORMAT_VERSION, json_option
from kvdsl.cli.options import BACKENDS, cache_options, dtype_option, model_option, policies_option
from kvdsl_lab.cli.measuring import Setting, names, show

if TYPE_CHECKING:
    from kvdsl_lab.eval.benchmarks.tasks import Task


def _shared(out: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Options of both benchmarks."""
    options = (
        click.option("--data", type=click.Path(path_type=Path, exists=True, file_okay=False), required=True,
                     help="Folder with the benchmark's JSONL files."),
        click.option("--tasks", metavar="A,B", help="Tasks [default: all in the folder]."),
        click.option("--limit", type=click.IntRange(1), metavar="N", help="Use the first N examples of each task."),
        policies_option("full,roco", "--policy"),
        click.option("--budgets", default="0.25", show_default=True, metavar="N,M",
                     help="Budgets of each policy: tokens, or ratios of the prompt."),
        cache_options, model_option,
        click.option("--out", type=click.Path(path_type=Path, file_okay=False), default=Path(out), show_default=True,
                     help="Folder for predictions and the result."),
        click.option("--fresh", is_flag=True, help="Discard the predictions of an earlier run in that folder."),
        click.option("--backend", type=BACKENDS, default="auto", show_default=True, help="Backend of the policies."),
        click.option("--threads", type=click.IntRange(1), help="CPU threads [default: torch's]."),
        dtype_option, json_option,
    )  # fmt: skip

    def add(command: Callable[..., None]) -> Callable[..., None]:
        for option in reversed(options):
            command = option(command)
        return command

    return add


@click.command()
@_shared("results/longbench")
@click.option("--prompts", type=click.Path(path_type=Path, exists=True, dir_okay=False),
              help="LongBench's dataset2prompt.json [default: in the data folder, or a folder `config` in it or beside it].")  # fmt: skip
@click.option("--max-length", type=click.IntRange(2), metavar="N",
              help="Cut the middle out of prompts of more than N tokens [default: the model's context].")  # fmt: skip
@click.option(
    "--chat/--no-chat", default=None, help="Use the model's chat template where LongBench does [default: if it has one]."
)
def longbench(prompts: Path | None, max_length: int | None, chat: bool | None, **given: Any) -> None:
    """LongBench and LongBench-E under policies, with the benchmark's own metrics.

    The folder holds the files of LongBench's data (hotpotqa.jsonl, trec_e.jsonl, ...) and, from its repository,
    config/dataset2prompt.json. Prompts, cuts and metrics are those of LongBench's scripts. Every prediction is saved at once: the same
    command continues a stopped run.

    \b
    Examples:
      kvdsl eval longbench --data LongBench/data --policies full,h2o,roco --budgets 1024 --model path/to/model
      kvdsl eval longbench --data LongBench --tasks hotpotqa,trec --limit 20 --budgets 0.25 --max-length 7500
    """
    from kvdsl_lab.eval.benchmarks import longbench as published

    tasks = published.load(given["data"], _names(given["tasks"]), given["limit"], prompts)
    _measure("longbench", tasks, max_length=max_length, chat=chat, **given)


@click.command()
@_shared("results/ruler")
@click.option("--split", default="validation", show_default=True, help="Name of the files in the tasks' folders.")
def ruler(split: str, **given: Any) -> None:
    """RULER under policies: needles, variables, frequent words and questions, with the benchmark's own metrics.

    The folder holds what RULER's prepare.py wrote: a folder per task (niah_single_1/validation.jsonl, ...), or a file TASK.jsonl per
    task. Prompts are used unchanged, since RULER builds them for a tokenizer, a length and a chat template. Every prediction is saved
    at once: the same command continues a stopped run.

    \b
    Examples:
      kvdsl eval ruler --data ruler/4096 --policies full,snapkv,roco --budgets 0.25,0.5 --model path/to/model
      kvdsl eval ruler --data ruler/4096 --tasks niah_single_1,vt --limit 50 --budgets 512
    """
    from kvdsl_lab.eval.benchmarks import ruler as published

    tasks = published.load(given["data"], _names(given["tasks"]), given["limit"], split)
    _measure("ruler", tasks, max_length=None, chat=False, **given)


def _names(tasks: str | None) -> list[str] | None:
    return None if tasks is None else names(tasks)


def _check_chat(tokenizer: Any, wanted: bool | None) -> bool:
    """Return whether to use chat templates: as requested, or if the tokenizer has one."""
    if wanted and tokenizer.chat_template is None:
        raise click.BadParameter("the model's tokenizer has no chat template", param_hint="--chat")
    return tokenizer.chat_template is not None if wanted is None else wanted


_CHANGES_PREDICTIONS = ("kvdsl", "torch", "transformers", "gpu", "dtype")
"""Parts of the environment that a run must share with the run that it continues."""


def _measure(
    benchmark: str, loaded: Sequence[Task], *, max_length: int | None, chat: bool | None, policies: str, budgets: str,
    settings: Mapping[str, str], out: Path, fresh: bool, as_json: bool, **given: Any,
) -> None:  # fmt: skip
    """Run the tasks under every policy and budget, and tell and save what they scored."""
    begun = Setting(
        policies, budgets, settings, text=None, **{key: given[key] for key in ("model", "backend", "threads", "dtype")}
    )
    from kvdsl.cli.progress import progress
    from kvdsl.environment import environment
    from kvdsl.files import write_whole
    from kvdsl_lab.assets import weights_of
    from kvdsl_lab.eval.benchmarks import run

    chat = _check_chat(begun.tokenizer, chat)
    about = environment(dtype=str(begun.model.dtype).removeprefix("torch."))
    asked = {
        "benchmark": benchmark, "model": given["model"] or "the model that ships with kvdsl-lab", "max_length": max_length, "chat": chat,
    }  # fmt: skip
    facts = {
        **asked,
        "weights": weights_of(given["model"], getattr(begun.model.config, "_commit_hash", None)),
        "backend": given["backend"],
    }
    facts |= {key: about[key] for key in _CHANGES_PREDICTIONS}
    asking = run.Asking(begun.model, begun.tokenizer, max_length, chat, cuts=benchmark != "ruler")
    with progress(benchmark, begun.pairs * sum(len(task.examples) for task in loaded)) as tick:
        rows = run.evaluate(asking, loaded, begun.policies, begun.budgets, out, facts, fresh=fresh, tick=tick)
    means = run.averages(rows)
    result = {"format_version": FORMAT_VERSION, "environment": about, **asked, "rows": rows, "averages": means}
    text = json.dumps(result, indent=2, ensure_ascii=False, allow_nan=False)
    write_whole(out / f"{benchmark}.json", text + "\n")
    if as_json:
        click.echo(text)
    else:
        show(rows)
        if len(loaded) > 1:
            show(means)
