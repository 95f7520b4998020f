"""Options of the commands that run models and kernels."""

from __future__ import annotations

from typing import Any

import click

POLICY = "roco"
"""What runs where no policy is named."""


def policy_options(command: Any) -> Any:
    """`POLICY` as an argument or as `--policy`, given to the command as `named` and `policy`: what `chosen` takes."""
    for option in (
        click.option("--policy", show_default=POLICY, help="The same as an option."),
        click.argument("named", metavar="[POLICY]", required=False),
    ):
        command = option(command)
    return command


def chosen(named: str | None, policy: str | None) -> str:
    """The policy that was named, in the one way or the other."""
    if named is not None and policy is not None and named != policy:
        raise click.UsageError(f"two policies are named, `{named}` and `--policy {policy}`; give one")
    return named or policy or POLICY


BACKENDS = click.Choice(["auto", "cpu", "torch", "triton"])
"""What `--backend` takes."""

model_option = click.option(
    "--model", metavar="MODEL",
    help="A name of `kvdsl models` (smollm2), a folder, or an id on the Hugging Face hub [default: the reference model].",
)  # fmt: skip
dtype_option = click.option("--dtype", type=click.Choice(["fp32", "bf16", "fp16"]), help="Run the model in this dtype.")


def refuse_triton(backend: str) -> None:
    """Without a GPU, say that there is nothing for the triton backend to serve, before anything is loaded."""
    if backend != "triton":
        return
    import torch

    if not torch.cuda.is_available():
        raise click.BadParameter(
            "triton serves GPUs, and there is none here; use `auto`, `cpu` or `torch`", param_hint="--backend"
        )
