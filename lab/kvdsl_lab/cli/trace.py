"""`kvdsl trace`: write a page that shows which tokens a policy kept at each step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from kvdsl.cli.common import FORMAT_VERSION, json_option, print_json
from kvdsl.cli.options import BACKENDS, cache_options, dtype_option, model_option, policy_options, refuse_triton
from kvdsl.cli.run import prompt_ids, prompt_options


@click.command()
@policy_options()
@cache_options
@model_option
@prompt_options
@click.option(
    "--messages",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="A JSON file with a chat's messages, in place of a text: what the policy reads of roles, turns and thinking is marked.",
)
@click.option("--max-new-tokens", type=click.IntRange(1), default=128, show_default=True, help="Tokens to generate.")
@click.option("--chunk", type=click.IntRange(1), help="Tokens of the prompt fed at a time [default: all].")
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), default=Path("trace.html"), show_default=True,
              help="The page.")  # fmt: skip
@click.option("--backend", type=BACKENDS, default="torch", show_default=True,
              help="Backend of the policy; only torch reports the scores of decoded tokens.")  # fmt: skip
@dtype_option
@json_option
def command(
    policy: str, settings: dict[str, str], model: str | None, prompt: str | None, prompt_file: Path | None,
    messages: Path | None, max_new_tokens: int, chunk: int | None, out: Path, backend: str, dtype: str | None, as_json: bool,
) -> None:  # fmt: skip
    """Write a page that shows which tokens a policy kept while a model read a prompt and continued it: one HTML file that works offline.

    A colour shows for every token how many KV heads keep it, when it was evicted, its score, or a state column. A slider selects the
    step. A strip per layer and KV head shows where in the text its tokens lie, and selects the head. Pointing at a token shows each
    head's values for it at that step, and when each head evicted it. The prompt is one step, unless --chunk divides it.

    \b
    Examples:
      kvdsl trace roco --set budget=128 --out roco.html
      kvdsl trace h2o --set budget=64 --chunk 1 --max-new-tokens 1 --prompt-file chapter.txt
    """
    if not out.parent.is_dir():  # before the text, which takes a while
        raise click.BadParameter(f"there is no folder {out.parent}", param_hint="--out")
    if messages is not None and (prompt is not None or prompt_file is not None or chunk is not None):
        raise click.UsageError("--messages is a whole prompt: leave --prompt, --prompt-file and --chunk out")
    refuse_triton(backend)
    from kvdsl.cli.progress import progress
    from kvdsl.compiler import analyse, find_policy
    from kvdsl.environment import environment
    from kvdsl.files import write_whole
    from kvdsl.generation.models import check_length, load_model
    from kvdsl.ir.printer import print_expression
    from kvdsl.loading import load
    from kvdsl_lab.eval import trace as tracing

    cache_class: Any = load(policy, **settings)
    lm, tokenizer = load_model(model, dtype)
    cache = cache_class(lm, backend=backend)
    ids = prompt_ids(tokenizer, prompt, prompt_file) if messages is None else _told(tokenizer, messages, cache)
    check_length(lm, len(ids) + max_new_tokens)
    with progress("trace", tracing.steps(ids, max_new_tokens, chunk)) as tick:
        made = tracing.trace(lm, ids, max_new_tokens, cache, chunk, tick)
    params = {name: value for name, value in settings.items() if name in cache_class.spec.params}
    score = analyse(find_policy(policy), settings=params).policy.score
    dtype_name = str(lm.dtype).removeprefix("torch.")
    facts = {
        "policy": cache_class.spec.name,
        "expression": "" if score is None else print_expression(score),
        "settings": ", ".join(f"{name}={value}" for name, value in settings.items()) or "its own settings",
        "model": model or "the model that ships with kvdsl-lab",
    }
    head = {"format_version": FORMAT_VERSION, "environment": environment(dtype=dtype_name)}
    write_whole(out, tracing.page({**head, **facts, **tracing.as_data(made, tokenizer)}))
    evicted, all_of_them = int((made.gone >= 0).sum()), made.gone[..., : made.seen[-1]].numel()
    result = {
        **facts, "prompt_tokens": made.prompt_tokens, "new_tokens": max_new_tokens, "steps": len(made.seen), "evicted": evicted,
        "out": str(out),
    }  # fmt: skip
    if as_json:
        print_json(result, dtype=dtype_name)
    else:
        click.echo(f"{out}: {made.seen[-1]} tokens in {made.gone.shape[0] * made.gone.shape[1]} KV heads, "
                   f"{evicted / all_of_them:.0%} of them evicted")  # fmt: skip


def _told(tokenizer: Any, messages: Path, cache: Any) -> list[int]:
    """Return the tokens of a chat up to the next answer, marked in a cache."""
    from kvdsl.errors import KvdslError
    from kvdsl.generation.models import encode
    from kvdsl.generation.spans import mark_all, names_of, rendered, spans_of

    try:
        found = json.loads(messages.read_text(encoding="utf-8"))
    except ValueError as error:
        raise KvdslError(f"{messages} is no JSON: {error}") from None
    if not isinstance(found, list) or not all(isinstance(one, dict) and "role" in one for one in found):
        raise KvdslError(f'{messages} has no messages: write a list, [{{"role": "user", "content": "Hello"}}]')
    mark_all(cache, spans_of(tokenizer, found, names_of(cache.spec)))
    return encode(tokenizer, rendered(tokenizer, found, answer=True))
