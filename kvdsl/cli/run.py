"""`kvdsl run`: generate text under a policy, next to the full cache."""

from __future__ import annotations

import sys
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvdsl.cli.common import json_option, print_json, warning
from kvdsl.cli.options import BACKENDS, cache_options, dtype_option, model_option, policy_options, refuse_triton, texts
from kvdsl.cli.progress import status
from kvdsl.lab import lab

if TYPE_CHECKING:
    from kvdsl.generation.report import Generated


def prompt_options(command: Any) -> Any:
    """Add `--prompt` and `--prompt-file` for `prompt_ids`: at most one of them, and not empty."""

    @click.option("--prompt", help="The text to continue [default: a page of the book of kvdsl-lab].")
    @click.option(
        "--prompt-file",
        type=click.Path(path_type=Path, exists=True, dir_okay=False, allow_dash=True),
        help="A file with the text; - is standard input.",
    )
    @texts("prompt_file")
    @wraps(command)
    def with_prompt(prompt: str | None, prompt_file: Path | None, **given: Any) -> None:
        if prompt is not None and prompt_file is not None:
            raise click.UsageError("give --prompt or --prompt-file, not both")
        if prompt is not None and not prompt.strip():
            raise click.BadParameter("the text is empty", param_hint="--prompt")
        if prompt is not None and any(
            "\ud800" <= letter <= "\udfff" for letter in prompt
        ):  # bytes that Python could not decode
            raise click.BadParameter("this is not UTF-8 text", param_hint="--prompt")
        if prompt is None and prompt_file is None:
            lab("assets", "the page that is read without --prompt")
        command(prompt=prompt, prompt_file=prompt_file, **given)

    return with_prompt


def prompt_ids(tokenizer: Any, prompt: str | None, prompt_file: Path | None) -> list[int]:
    """Return the tokens of the text, with special tokens added by the tokenizer."""
    from kvdsl.generation.models import prompt_tokens
    from kvdsl.generation.text import page, read_text

    text = prompt if prompt is not None else read_text(prompt_file) if prompt_file is not None else page()
    return prompt_tokens(tokenizer, text)


@click.command()
@policy_options()
@cache_options
@model_option
@prompt_options
@click.option("--max-new-tokens", type=click.IntRange(1), default=128, show_default=True, help="Tokens to generate.")
@click.option("--backend", type=BACKENDS, default="auto", show_default=True, help="The backend of the policy.")
@dtype_option
@click.option("--threads", type=click.IntRange(1), help="CPU threads of the model and the kernels [default: torch's own].")
@click.option("--compare", is_flag=True, help="Also generate with the full cache, and compare the texts.")
@json_option
def command(
    policy: str, settings: dict[str, str], model: str | None, prompt: str | None, prompt_file: Path | None,
    max_new_tokens: int, backend: str, dtype: str | None, threads: int | None, compare: bool, as_json: bool,
) -> None:  # fmt: skip
    """Generate text greedily under a policy.

    POLICY is a shipped policy (by default roco), a .kv file, or `mine.py:calm` for one written in Python, whose file is executed.

    \b
    Examples:
      kvdsl run roco --set budget=128 --compare
      kvdsl run "h2o with when prefill, keep last 64"
      kvdsl run mine.kv --model path/to/model --prompt-file chapter.txt --max-new-tokens 200
    """
    refuse_triton(backend)
    written: list[str] = []
    with status("kvdsl run") as update:
        update("loading torch and the model")
        from kvdsl.busy import use_threads
        from kvdsl.generation.generate import generate, generate_full, warm_up, warm_up_full
        from kvdsl.generation.models import check_length, load_model
        from kvdsl.generation.report import same_prefix
        from kvdsl.loading import load

        if told := use_threads(threads):
            warning(told)
        cache_class: Any = load(policy, **settings)
        lm, tokenizer = load_model(model, dtype)
        ids = prompt_ids(tokenizer, prompt, prompt_file)
        check_length(lm, len(ids) + max_new_tokens)
        full = None
        if compare:
            update(f"reading {len(ids)} tokens and generating {max_new_tokens} with the full cache")
            warm_up_full(lm, tokenizer, ids)
            full = generate_full(lm, tokenizer, ids, max_new_tokens)
        cache = cache_class(lm, backend=backend)
        update("getting the kernels ready")
        warm_up(lm, tokenizer, ids, cache)
        update(f"reading {len(ids)} tokens and generating {max_new_tokens}")

        def write(text: str) -> None:
            update("")  # the text itself shows progress
            written.append(text)
            click.echo(text, nl=False)
            sys.stdout.flush()

        ours = generate(lm, tokenizer, ids, max_new_tokens, cache, (), None if as_json or compare else write)
    result: dict[str, Any] = {"policy": cache_class.spec.stem, **_figures(ours), "full_cache_bytes": ours.full_cache_bytes}
    if full is not None:
        result["full"] = _figures(full)
        result["same_prefix_tokens"] = same_prefix(ours.tokens, full.tokens)
    if as_json:
        print_json(result, dtype=str(lm.dtype).removeprefix("torch."))
    else:
        _show(cache_class.spec.name, ours, full, "".join(written))


def _figures(found: Generated) -> dict[str, Any]:
    return {
        "text": found.text, "prompt_tokens": found.prompt_tokens, "new_tokens": len(found.tokens),
        **found.times(), "cache_bytes": found.cache_bytes, "evicted": found.evicted,
    }  # fmt: skip


def _show(name: str, ours: Generated, full: Generated | None, written: str) -> None:
    """Print the results; a text that was streamed is only completed."""
    from rich.console import Console

    from kvdsl.generation.report import FULL, comparison, summary_line

    if full is None:
        click.echo(ours.text.removeprefix(written))
        click.secho(summary_line(name, ours), dim=True)
    else:
        console = Console(highlight=False)
        for table in comparison({FULL: full, name: ours}):
            console.print(table)
