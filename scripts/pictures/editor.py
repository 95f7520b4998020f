"""Neovim, set up as docs/howto/editors.md says, with a policy open in which a word is wrong and another one is asked about."""

from __future__ import annotations

import os
import subprocess
import tempfile
from pathlib import Path

from scripts.pictures.home import ROOT, kvdsl_on_path
from scripts.pictures.terminal import Terminal

POLICY = """\
kv 1

policy Lingering {
  "Evicts what attention has turned away from lately, weighed by what it would bring."
  param budget = 256
  param memory = 0.95 in 0..1
  param sinks  = 4
  let lately = ema(attn, memory)
  let weight = norm1(v)
  keep  first sink
  score lately * weight
}
"""

LOOKS = r"set background=light termguicolors number laststatus=0 noruler noshowcmd shortmess+=F fillchars=eob:\ "
PAPER = "highlight Normal guibg=NONE | highlight SignColumn guibg=NONE | highlight NormalFloat guibg=#eef1f8"
KEYS = ":lua vim.lsp.codelens.refresh()\r", "/weight$\r:nohlsearch\r", ":lua vim.lsp.buf.hover()\r"
"""What is typed: show what can be run, go to a word, ask what it is."""


def editor(out: Path) -> None:
    """Write the picture."""
    with tempfile.TemporaryDirectory() as name:
        home = Path(name)
        (home / "lingering.kv").write_text(POLICY)
        command = ["nvim", "-n", "-i", "NONE", "-u", "init.lua", "--cmd", LOOKS, "-c", PAPER, "lingering.kv"]
        with Terminal(command, home, set_up(home), 112, 30) as screen:
            screen.until("unknown name")
            for keys in KEYS:
                screen.type(keys)
            screen.until("explain | test | compile", "4 bytes a slot")
            screen.type(":echo\r")
            screen.until()
            out.write_text(
                screen.svg("A policy in Neovim, with an error, the axes of its lets, and what a word means"),
                encoding="utf-8",
            )


def set_up(home: Path) -> dict[str, str]:
    """Write what the page says into a home folder; the environment in which Neovim and kvdsl find it all."""
    page = (ROOT / "docs" / "howto" / "editors.md").read_text(encoding="utf-8")
    (home / "init.lua").write_text(_block(page, '```lua title="init.lua"'), encoding="utf-8")
    environment = kvdsl_on_path(home)
    grammar = next(text for text in page.split("```") if "src/parser.c" in text).removeprefix("shell\n")
    subprocess.run(["sh", "-ec", grammar], cwd=ROOT, env=os.environ | environment, check=True)
    return environment


def _block(page: str, head: str) -> str:
    return page.partition(head + "\n")[2].partition("```")[0]
