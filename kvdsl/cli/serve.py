"""`kvdsl serve`: serve with vLLM under a policy."""

from __future__ import annotations

import json
import os
import shlex
import sys
from pathlib import Path
from typing import Any

import click

from kvdsl.cli import completion
from kvdsl.cli.common import json_option, print_json
from kvdsl.cli.options import cache_options
from kvdsl.errors import KvdslError
from kvdsl.files import is_standard_input
from kvdsl.memory import OPTIONS

_STEP = 2048
"""The least tokens per step of vLLM's server. Fewer would fit fewer prompts if texts are short. With shared prompts vLLM's own default
applies: those arrive in parts."""


@click.command(context_settings={"ignore_unknown_options": True})
@click.argument("model")
@click.option("--policy", required=True, shell_complete=completion.policies, help="A shipped policy, or a .kv file.")
@cache_options
@click.option(
    "--thinks",
    nargs=2,
    metavar="BEFORE BEHIND",
    help="What the model writes around its thinking [default: <think> </think>].",
)
@click.option("--max-model-len", type=click.IntRange(1), help="The longest text [default: the model's limit].")
@click.option(
    "--kvdsl-trace",
    "trace",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Write a page like that of `kvdsl trace` for the next request to this file; remove it to trace another request.",
)
@click.option("--dry-run", is_flag=True, help="Check everything, and print the command instead of running it.")
@json_option
@click.argument("more", nargs=-1, type=click.UNPROCESSED, metavar="[VLLM'S OPTIONS]...")
def command(
    model: str, policy: str, settings: dict[str, str], thinks: tuple[str, str] | None, max_model_len: int | None,
    trace: Path | None, dry_run: bool, as_json: bool, more: tuple[str, ...],
) -> None:  # fmt: skip
    """Serve a model with vLLM's OpenAI-compatible server under a policy.

    MODEL is a name of `kvdsl models`, a folder, or an id on the Hugging Face hub. Unsupported combinations are refused, and kernels
    built, before the server starts. All other options are passed to vLLM.

    \b
    Examples:
      kvdsl serve smollm2 --policy h2o --set budget=1024
      kvdsl serve smollm2 --policy h2o --set budget=1024 --kv-dtype int8
      kvdsl serve MODEL --policy mine.kv --port 8001 --dtype bfloat16
    """
    if any(_option(word).startswith("--additional-config") for word in more):
        raise click.UsageError(
            "--policy and --set replace --additional-config; use `vllm serve` directly for other settings"
        )
    if is_standard_input(policy):
        raise click.UsageError("several processes of vLLM read the policy: use a file instead of standard input")
    words = served(model, policy, settings, max_model_len, more, trace, thinks)
    if dry_run:
        if as_json:
            print_json({"command": words})
        else:
            click.echo(shlex.join(words))
        return
    sys.stdout.flush()
    os.execv(words[0], words)


def served(
    model: str,
    policy: str,
    settings: dict[str, str],
    max_model_len: int | None,
    more: tuple[str, ...],
    trace: Path | None = None,
    thinks: tuple[str, str] | None = None,
) -> list[str]:
    """Return the command that serves, after all checks.

    Args:
        trace: the file for the page of a request.
        thinks: what the model writes around its thinking.

    Raises:
        KvdslError: for unsupported combinations, and missing packages.
    """
    from kvdsl.integrations.vllm.launch import installed
    from kvdsl.integrations.vllm.refusals import refuse_layers, refuse_trace_file
    from kvdsl.integrations.vllm.releases import INSTALL, refuse_release
    from kvdsl.integrations.vllm.settings import Settings
    from kvdsl.models import place_of

    policy = str(Path(policy).resolve()) if policy.endswith(".kv") else policy
    memory: dict[str, Any] = {name: settings[name] for name in OPTIONS if name in settings}
    params = {name: _number(name, settings[name]) for name in sorted(settings.keys() - memory)}
    asked = Settings(policy, tuple(params.items()), **memory)
    version = installed()
    if version is None:
        raise KvdslError(f"vLLM is not installed here: {INSTALL}; docs/howto/serving.md")
    refuse_release(version)
    place = place_of(model)
    config = _config(place)
    layers = int(getattr(config, "num_hidden_layers", 1))
    refuse_layers([asked.state(layer, layers) for layer in range(layers)])
    longest = max_model_len or _longest(place, config)
    _build(asked)
    told: dict[str, Any] = {"kvdsl": {"policy": policy, **params, **memory, **({"thinks": thinks} if thinks else {})}}
    ours = {"--additional-config": json.dumps(told), "--max-model-len": longest}
    if not asked.answers:
        ours["--max-num-batched-tokens"] = max(longest, _STEP)
    ours["--served-model-name"] = model
    if asked.spec.reads_chats:
        ours["--middleware"] = "kvdsl.integrations.vllm.roles.Roles"
    if trace is not None:
        if asked.answers:
            raise KvdslError("a request that shares its prompt cannot be traced: leave out --kvdsl-trace")
        refuse_trace_file(trace)
        told["kvdsl_trace"] = str(trace.resolve())
        ours["--additional-config"] = json.dumps(told)
    given = {_option(word) for word in more} - {"--middleware"}  # which vLLM takes several times
    options = [str(word) for name, value in ours.items() if name not in given for word in (name, value)]
    return [sys.executable, "-m", "kvdsl.integrations.vllm.launch", "serve", place, *options, *more]


def _option(word: str) -> str:
    """Return an option's name in vLLM's form, which allows underscores and `NAME=VALUE`."""
    return word.partition("=")[0].replace("_", "-")


def _number(name: str, text: str) -> float:
    try:
        return int(text)
    except ValueError:
        pass
    try:
        return float(text)
    except ValueError as error:
        raise KvdslError(f"`{name}` is set to `{text}`, which is not a number") from error


def _config(place: str) -> Any:
    """Return the model's config."""
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(place).get_text_config()
    except (OSError, ValueError) as error:
        raise KvdslError(f"there is no model `{place}`: {str(error).splitlines()[0]}") from error


def _longest(place: str, config: Any) -> int:
    """Return the model's largest number of positions."""
    found = getattr(config, "max_position_embeddings", None)
    if found is None:
        raise KvdslError(f"the config of {place} does not state the longest text: set --max-model-len")
    return int(found)


def _build(asked: Any) -> None:
    """Build the kernels before several processes need them; kernels for GPUs are built at their first run.

    Raises:
        KvdslError: on GPUs for a policy without kernels.
    """
    import torch

    from kvdsl.integrations.vllm.evictions import library
    from kvdsl.runtime.backends import choose
    from kvdsl.runtime.cpu import answers
    from kvdsl.runtime.cpu.backend import CpuBackend
    from kvdsl.runtime.cpu.rows import Rows

    if torch.cuda.is_available():
        choose(asked.spec, "triton", torch.device("cuda"), torch.bfloat16)
        return
    backend = choose(asked.spec, "auto", torch.device("cpu"), torch.float32)
    if isinstance(backend, CpuBackend):
        Rows(backend)
    library()
    if asked.answers:
        answers.library()
