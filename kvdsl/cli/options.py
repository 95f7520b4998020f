"""Options of the commands that run models and kernels."""

from __future__ import annotations

import click

BACKENDS = click.Choice(["auto", "cpu", "torch", "triton"])
"""What `--backend` takes."""

model_option = click.option(
    "--model", metavar="PATH_OR_ID",
    help="A model's folder, or its id on the Hugging Face hub [default: the model that ships with kvdsl].",
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
