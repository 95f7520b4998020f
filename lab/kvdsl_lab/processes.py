"""Processes that work for another one."""

from __future__ import annotations

import multiprocessing
import os
import threading


def end_with_parent() -> None:
    """Have this process end when the one that started it has ended, killed or not: its work would go on, and nobody would take it."""
    parent = multiprocessing.parent_process()
    assert parent is not None, "a worker calls this"

    def wait() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()
