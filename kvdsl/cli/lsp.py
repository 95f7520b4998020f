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
    "--stdio", is_flag=True, help="Use standard input and output. This is always so; some clients pass the option."
)
def command(stdio: bool) -> None:
    """Serve editors: errors while you type, hovers, completion, renaming.

    The editor starts this command and speaks the Language Server Protocol on standard input and output. docs/howto/editors.md describes
    the setup of Neovim, Helix and Emacs.
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
    """Serve until the client exits or disappears; return whether it exited. All other output goes to standard error, because the protocol
    owns standard output.
    """
    with os.fdopen(os.dup(sys.stdout.fileno()), "wb") as out, redirect_stdout(sys.stderr):
        server.start_io(stdout=out)
    return server.dismissed
