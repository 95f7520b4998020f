"""Options of commands that run models and kernels. Wrong options are reported before torch loads, which takes seconds."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from importlib import util
from typing import Any

import click

from kvdsl.cli import completion
from kvdsl.cli.common import set_option
from kvdsl.cli.completion import POLICY
from kvdsl.errors import KvdslError
from kvdsl.generation.text import read_text
from kvdsl.lab import lab
from kvdsl.memory import OPTIONS, ROPES, dtypes_of, slots_of_a_block
from kvdsl.models import place_of
from kvdsl.precheck import checked_policy


def policy_options(default: str = POLICY) -> Callable[[Any], Any]:
    """Add `POLICY` as an argument and as `--policy`, passed to the command as `policy: str` after a check with its settings."""

    def decorate(command: Any) -> Any:
        @click.argument("named", metavar="[POLICY]", required=False, shell_complete=completion.policies)
        @click.option("--policy", show_default=default, shell_complete=completion.policies, help="The same as an option.")
        @wraps(command)
        def with_policy(named: str | None, policy: str | None, **given: Any) -> Any:
            if named is not None and policy is not None and named != policy:
                raise click.UsageError(f"two policies are named, `{named}` and `--policy {policy}`; give one")
            chosen = named or policy or default
            memory = {name: given[name] for name in OPTIONS if given.get(name) is not None}
            checked_policy(chosen, given.get("settings", {}) | memory, f"`{click.get_current_context().command_path}`")
            return command(policy=chosen, **given)

        return with_policy

    return decorate


def policies_option(default: str, *names: str, help: str = "Shipped policies, or .kv files.") -> Callable[[Any], Any]:
    """Add `--policies A,B`, passed to the command as `policies: str`."""
    return click.option(
        "--policies",
        *names,
        default=default,
        show_default=True,
        metavar="A,B",
        shell_complete=completion.policies,
        help=help,
    )


def _checked(check: Callable[[str], object]) -> Callable[[click.Context, click.Parameter, str | None], str | None]:
    """Return a callback that reports what `check` raises about an option's value."""

    def callback(ctx: click.Context, param: click.Parameter, value: str | None) -> str | None:
        if value is not None:
            try:
                check(value)
            except KvdslError as error:
                raise click.BadParameter(str(error)) from None
        return value

    return callback


def memory_options(command: Any) -> Any:
    """Add the options of `kvdsl.memory`, passed to the command as `memory: dict[str, str]`, as `kvdsl.load` takes them."""

    @click.option("--storage", metavar="LAYOUT", callback=_checked(slots_of_a_block),
                  help="Memory layout of slots: in_place, blocks (of 16 slots), or blocks:N [default: in_place].")  # fmt: skip
    @click.option("--rope", type=click.Choice(ROPES),
                  help="Compact positions: rotate keys when they are read, or cache their rotated halves [default: fused].")  # fmt: skip
    @click.option("--kv-dtype", metavar="TYPE", callback=_checked(dtypes_of),
                  help="Storage type of keys and values: model, int8, int4, fp8, or one for keys and one for values, such as int8/int4 "
                       "[default: model].")  # fmt: skip
    @wraps(command)
    def with_memory(**given: Any) -> Any:
        memory = {name: value for name in OPTIONS if (value := given.pop(name)) is not None}
        return command(memory=memory, **given)

    return with_memory


def cache_options(command: Any) -> Any:
    """Add `--set` and the options of `kvdsl.memory`, passed together as `settings: dict[str, str]`."""

    @set_option
    @memory_options
    @wraps(command)
    def with_settings(settings: dict[str, str], memory: dict[str, str], **given: Any) -> Any:
        return command(settings=settings | memory, **given)

    return with_settings


BACKENDS = click.Choice(["auto", "cpu", "torch", "triton"])
"""The values of `--backend`."""


def model_option(command: Any) -> Any:
    """Add `--model`, passed to the command as `model: str | None` after a check that it can be loaded."""

    @click.option(
        "--model", metavar="MODEL",
        help="A name of `kvdsl models` (smollm2), a folder, or an id on the Hugging Face hub [default: the reference model].",
    )  # fmt: skip
    @wraps(command)
    def with_model(model: str | None, **given: Any) -> Any:
        refuse_missing("torch")
        if model is None:
            lab("assets", "the model that is taken without --model")
        else:
            place_of(model)
        return command(model=model, **given)

    return with_model


def refuse_missing(package: str) -> None:
    """Raise ModuleNotFoundError if a package that the command will import is not installed."""
    if util.find_spec(package) is None:
        raise ModuleNotFoundError(f"No module named {package!r}", name=package)


def texts(*names: str) -> Callable[[Any], Any]:
    """Return a decorator that checks options with text files before the command runs."""

    def decorate(command: Any) -> Any:
        @wraps(command)
        def with_texts(**given: Any) -> Any:
            for name in names:
                if given[name] is not None:
                    read_text(given[name])
            return command(**given)

        return with_texts

    return decorate


dtype_option = click.option("--dtype", type=click.Choice(["fp32", "bf16", "fp16"]), help="Run the model in this dtype.")


def refuse_triton(backend: str) -> None:
    """Refuse the triton backend without a GPU, before anything is loaded."""
    if backend != "triton":
        return
    import torch

    if not torch.cuda.is_available():
        raise click.BadParameter(
            "triton needs a GPU, and there is none here; use `auto`, `cpu` or `torch`", param_hint="--backend"
        )
