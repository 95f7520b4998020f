"""The server under Emacs, without a screen, set up as docs/howto/editors.md says: open, mistype, see it, mend it, hover, rename, format."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.pages import blocks, read

from .test_neovim import MENDED, POLICY

ROOT = Path(__file__).resolve().parents[2]
EMACS = shutil.which("emacs")
EGLOT = ["--eval", "(progn (require 'package) (package-initialize))"]
"""Emacs 29 brings Eglot; before that it is a package of its own."""


def _has_eglot() -> bool:
    command = [str(EMACS), "--batch", *EGLOT, "--eval", '(kill-emacs (if (locate-library "eglot") 0 1))']
    return EMACS is not None and subprocess.run(command, capture_output=True, check=False).returncode == 0


pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(
        not _has_eglot(), reason="there is no emacs with Eglot (Debian 12: apt-get install emacs-nox elpa-eglot)"
    ),
]

SCRIPT = """
(require 'eglot)
(defun wait-for (what)
  (let ((rounds 1000))
    (while (not (funcall what))
      (when (= (setq rounds (1- rounds)) 0) (error "waited in vain for %S" what))
      (flymake-start)
      (accept-process-output nil 0.1))))
(defun go-to (text) (goto-char (point-min)) (search-forward text) (goto-char (match-beginning 0)))
(setq eglot-sync-connect 100)
(find-file "mine.kv")
(princ (format "%s\\n" major-mode))
(call-interactively 'eglot)
(flymake-mode 1)
(wait-for (lambda () (flymake-diagnostics)))
(princ (format "%s\\n" (flymake-diagnostic-text (car (flymake-diagnostics)))))
(go-to "atn")
(delete-char 3)
(insert "attn")
(eglot--signal-textDocument/didChange) ; without a screen Emacs is never idle, which is when it says what was typed
(wait-for (lambda () (not (flymake-diagnostics))))
(go-to "mean")
(let ((found (jsonrpc-request (eglot-current-server) :textDocument/hover (eglot--TextDocumentPositionParams))))
  (princ (format "%s\\n" (plist-get (plist-get found :contents) :value))))
(go-to "weight")
(eglot-rename "share")
(eglot-format-buffer)
(save-buffer)
"""


def test_a_session(tmp_path: Path) -> None:
    (tmp_path / "mine.kv").write_text(POLICY)
    (tmp_path / "init.el").write_text(
        next(block.text for block in blocks(read("docs/howto/editors.md")) if "kv-mode" in block.text)
    )
    (tmp_path / "session.el").write_text(SCRIPT)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "kvdsl").write_text(f'#!/bin/sh\nexec {sys.executable} -m kvdsl "$@"\n')
    (tmp_path / "bin" / "kvdsl").chmod(0o755)
    path = f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}"
    environment = os.environ | {"PATH": path, "PYTHONPATH": str(ROOT), "HOME": str(tmp_path)}
    command = [str(EMACS), "--batch", *EGLOT, "-l", "init.el", "-l", "session.el"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("kv-mode\n")
    assert "unknown name `atn`\nhelp: did you mean `attn`?" in done.stdout
    assert "`mean(attn)` · slot" in done.stdout
    assert (tmp_path / "mine.kv").read_text() == MENDED
