"""Takes pictures for the documents: all of them, or those that are named. See the package."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import click

ROOT = Path(__file__).resolve().parents[2]

PICTURES = {
    "overview.svg": "overview", "overview_narrow.svg": "overview", "speed.svg": "speed", "check.svg": "commands", "diff.svg": "commands",
    "editor.svg": "editor", "explain.png": "pages", "choosing.svg": "choosing", "search.svg": "search", "notebook.png": "pages",
    "playground.png": "pages", "trace.png": "pages",
}  # fmt: skip
"""Each file, and the module whose function of that name makes it; one is imported only if it is asked for."""

NAMES = {file.partition(".")[0]: file for file in PICTURES}


@click.command(help=__doc__, context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("names", nargs=-1, metavar=f"[{'|'.join(NAMES)}]...", type=click.Choice(list(NAMES)))
@click.option("--out", type=click.Path(path_type=Path), default=ROOT / "docs" / "assets", show_default="docs/assets")
def main(names: tuple[str, ...], out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    for name in names or NAMES:
        file = NAMES[name]
        take: Callable[[Path], None] = getattr(import_module(f"scripts.pictures.{PICTURES[file]}"), name)
        take(out / file)
        click.echo(f"written: {out / file} ({(out / file).stat().st_size / 1000:.0f} kB)")


if __name__ == "__main__":
    main()
