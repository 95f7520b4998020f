"""The server under Neovim, headless, set up as docs/howto/editors.md says: open, mistype, see it, mend it, hover, rename, format."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.pages import blocks, read

ROOT = Path(__file__).resolve().parents[2]
NVIM = shutil.which("nvim")

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(NVIM is None, reason="there is no nvim (Debian: apt-get install neovim)"),
]

POLICY = 'kv 1\n\npolicy Mine {\n  "Mine."\n  param   weight=2\n  param budget = 64\n  score weight * mean(atn)\n}\n'
MENDED = 'kv 1\n\npolicy Mine {\n  "Mine."\n  param share  = 2\n  param budget = 64\n  score share * mean(attn)\n}\n'

SCRIPT = """
local said = {}
local function wait(what, condition)
  if not vim.wait(100000, condition, 50) then said.failed = what; error(what) end
end
local function ask(method, params)
  params.textDocument = vim.lsp.util.make_text_document_params()
  local answers = vim.lsp.buf_request_sync(0, method, params, 100000)
  for _, answer in pairs(answers or {}) do
    if answer.error then error(answer.error.message) end
    return answer.result
  end
end
local ok, why = pcall(function()
  vim.cmd("edit mine.kv")
  said.filetype = vim.bo.filetype
  wait("diagnostics", function() return #vim.diagnostic.get(0) == 1 end)
  said.wrong = vim.diagnostic.get(0)[1].message
  local place = { start = { line = 6, character = 22 }, ["end"] = { line = 6, character = 22 } }
  local action = ask("textDocument/codeAction", { range = place, context = { diagnostics = {} } })[1]
  said.action = action.title
  vim.lsp.util.apply_workspace_edit(action.edit, "utf-16")
  wait("no diagnostics", function() return #vim.diagnostic.get(0) == 0 end)
  said.hover = ask("textDocument/hover", { position = { line = 6, character = 18 } }).contents.value
  local renamed = ask("textDocument/rename", { position = { line = 6, character = 9 }, newName = "share" })
  vim.lsp.util.apply_workspace_edit(renamed, "utf-16")
  local edits = ask("textDocument/formatting", { options = { tabSize = 2, insertSpaces = true } })
  vim.lsp.util.apply_text_edits(edits, 0, "utf-16")
  vim.cmd("write")
  vim.treesitter.highlighter.active[vim.api.nvim_get_current_buf()].tree:for_each_tree(function(tree)
    said.tree = tree:root():sexpr()
  end)
  local query, root = vim.treesitter.get_query("kv", "highlights"), vim.treesitter.get_parser(0, "kv"):parse()[1]:root()
  said.colours = {}
  for id, node in query:iter_captures(root, 0, 0, -1) do
    said.colours[vim.treesitter.get_node_text(node, 0)] = query.captures[id]
  end
end)
if not ok then said.error = tostring(why) end
local out = io.open("said.json", "w")
out:write(vim.json.encode(said))
out:close()
vim.cmd("qall!")
"""


def parser(home: Path) -> None:
    """Puts the grammar for tree-sitter where the page says."""
    page = next(block.text for block in blocks(read("docs/howto/editors.md")) if "src/parser.c" in block.text)
    subprocess.run(["sh", "-ec", page], cwd=ROOT, env=os.environ | {"HOME": str(home)}, check=True)


def test_a_session(tmp_path: Path) -> None:
    (tmp_path / "mine.kv").write_text(POLICY)
    (tmp_path / "init.lua").write_text(
        next(block.text for block in blocks(read("docs/howto/editors.md")) if block.title == "init.lua")
    )
    (tmp_path / "session.lua").write_text(SCRIPT)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "kvdsl").write_text(f'#!/bin/sh\nexec {sys.executable} -m kvdsl "$@"\n')
    (tmp_path / "bin" / "kvdsl").chmod(0o755)
    environment = os.environ | {
        "PATH": f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "HOME": str(tmp_path),
        "XDG_CONFIG_HOME": str(tmp_path / ".config"),
        "XDG_STATE_HOME": str(tmp_path),
    }
    parser(tmp_path)
    assert NVIM is not None
    command = [NVIM, "--headless", "-n", "-i", "NONE", "-u", "init.lua", "-c", "luafile session.lua"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert (tmp_path / "said.json").exists(), done.stdout + done.stderr
    said = json.loads((tmp_path / "said.json").read_text())
    assert "error" not in said, said
    assert said["filetype"] == "kv"
    assert said["wrong"] == "unknown name `atn`\nhelp: did you mean `attn`?"
    assert said["action"] == "write `attn`"
    assert "`mean(attn)` · slot" in said["hover"]
    assert (tmp_path / "mine.kv").read_text() == MENDED
    assert said["tree"].startswith("(start (edition (number)) (policy name: (identifier) (body (docstring (string)) (param ")
    colours = {
        "policy": "keyword",
        "Mine": "type",
        "share": "variable",
        "mean": "function.builtin",
        "attn": "variable.builtin",
    }
    assert said["colours"].items() >= colours.items()
