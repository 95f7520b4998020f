"""`kvdsl lsp`: the language server."""

from __future__ import annotations

import os
import sys
from contextlib import redirect_stdout
from typing import TYPE_CHECKING

import click

from kvdsl.cli.common import CLEAN, COULD_NOT_RUN, FINDINGS, error, finish

if TYPE_CHECKING:
    from kvdsl.lsp.server import Server


@click.command()
@click.option(
    "--stdio", is_flag=True, help="Speak on standard input and output: it always does, and some clients ask for it."
)
def command(stdio: bool) -> None:
    """Serve editors: what is wrong while you type, hovers, completion, renaming and the rest.

    An editor starts it and speaks the Language Server Protocol with it on standard input and output. docs/howto/editors.md says how
    to set up Neovim, Helix and Emacs.
    """
    try:
        from kvdsl.lsp.server import make_server
    except ModuleNotFoundError as missing:
        if missing.name is None or missing.name.partition(".")[0] not in ("pygls", "lsprotocol", "cattrs"):
            raise
        error(f"this needs {missing.name}, which is not installed", "pip install 'kvdsl[lsp]'")
        finish(COULD_NOT_RUN)
    finish(CLEAN if _serve(make_server()) else FINDINGS)


def _serve(server: Server) -> bool:
    """Serves until the client says so, or is gone; whether it has taken its leave. Whatever else writes to standard output writes to
    standard error meanwhile: the protocol has it for itself.
    """
    with os.fdopen(os.dup(sys.stdout.fileno()), "wb") as out, redirect_stdout(sys.stderr):
        server.start_io(stdout=out)
    return server.dismissed
