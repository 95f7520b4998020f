"""`kvdsl serve`: vLLM under a policy."""

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

_STEP = 2048
"""Tokens of a step of vLLM's own server, at least. A shorter one would have room for fewer prompts, where texts are short. Where prompts
are shared vLLM's own choice stands: they come in parts then, and are in its blocks either way."""


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
@click.option("--max-model-len", type=click.IntRange(1), help="The longest text [default: what the model was made for].")
@click.option(
    "--kvdsl-trace",
    "trace",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Write the page of `kvdsl trace` of the next request into this file; of a later one when it is removed.",
)
@click.option("--dry-run", is_flag=True, help="Check everything, and print the command in place of running it.")
@json_option
@click.argument("more", nargs=-1, type=click.UNPROCESSED, metavar="[VLLM'S OPTIONS]...")
def command(
    model: str, policy: str, settings: dict[str, str], thinks: tuple[str, str] | None, max_model_len: int | None,
    trace: Path | None, dry_run: bool, as_json: bool, more: tuple[str, ...],
) -> None:  # fmt: skip
    """Serve a model by vLLM's OpenAI-compatible server, with the cache of a policy.

    MODEL is a name of `kvdsl models`, a folder, or an id on the Hugging Face hub. Whatever can be refused is refused before the server
    starts, and kernels are built. Options that are not named here are vLLM's.

    \b
    Examples:
      kvdsl serve smollm2 --policy h2o --set budget=1024
      kvdsl serve MODEL --policy mine.kv --port 8001 --dtype bfloat16
    """
    if any(_option(word).startswith("--additional-config") for word in more):
        raise click.UsageError(
            "--policy and --set say what --additional-config would; give it to `vllm serve` itself for more"
        )
    if is_standard_input(policy):
        raise click.UsageError("vLLM's processes read the policy, and standard input once: give a file")
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
    """The command that serves, once all is there that it needs.

    Args:
        trace: the file for the page of a request.
        thinks: what the model writes around its thinking.

    Raises:
        KvdslError: for what cannot be served, or is not installed.
    """
    from kvdsl.integrations.vllm.launch import installed
    from kvdsl.integrations.vllm.refusals import refuse_layers, refuse_trace_file
    from kvdsl.integrations.vllm.releases import INSTALL, refuse_release
    from kvdsl.integrations.vllm.settings import Settings
    from kvdsl.models import place_of

    if settings.pop("kv_dtype", "model") != "model":
        raise KvdslError("vLLM's pages hold keys and values in the model's dtype: leave --kv-dtype out")
    policy = str(Path(policy).resolve()) if policy.endswith(".kv") else policy
    memory: dict[str, Any] = {name: settings[name] for name in ("storage", "rope") if name in settings}
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
    """An option's name, as vLLM takes it: with dashes or underscores, and before its value."""
    return word.partition("=")[0].replace("_", "-")


def _number(name: str, text: str) -> float:
    try:
        return int(text)
    except ValueError:
        pass
    try:
        return float(text)
    except ValueError as error:
        raise KvdslError(f"`{name}` is set to `{text}`, which is no number") from error


def _config(place: str) -> Any:
    """What the model says of itself."""
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(place).get_text_config()
    except (OSError, ValueError) as error:
        raise KvdslError(f"there is no model `{place}`: {str(error).splitlines()[0]}") from error


def _longest(place: str, config: Any) -> int:
    """How many positions the model was made for."""
    found = getattr(config, "max_position_embeddings", None)
    if found is None:
        raise KvdslError(f"the config of {place} does not say how long a text may be: give --max-model-len")
    return int(found)


def _build(asked: Any) -> None:
    """Have the kernels built before many processes want them; a GPU's are built when they are first run.

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
