"""A progress bar on terminals; elsewhere a line after ten seconds, and then one a minute."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

FIRST, EVERY = 10.0, 60.0
"""Seconds after which a command without a terminal reports progress."""


@contextmanager
def _lines(say: Callable[[], str]) -> Iterator[None]:
    """Report progress from time to time during the block."""
    ended, began = threading.Event(), time.monotonic()

    def run() -> None:
        wait = FIRST
        while not ended.wait(wait):
            print(f"kvdsl: {say()}, {time.monotonic() - began:.0f} s so far", file=sys.stderr, flush=True)
            wait = EVERY

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


@contextmanager
def progress(text: str, total: int) -> Iterator[Callable[[], None]]:
    """Show a bar on standard error for `total` steps; yield a function to call after each."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    if not console.is_terminal:
        done = 0

        def count() -> None:
            nonlocal done
            done += 1

        with _lines(lambda: f"{text}: {done} of {total}"):
            yield count
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed}/{task.total}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(text, total=total)
        yield lambda: bar.advance(task)


@contextmanager
def status(text: str) -> Iterator[Callable[[str], None]]:
    """Show a status line for work of unknown length; yield a function that sets its text, or removes it for an empty one."""
    from rich.console import Console
    from rich.markup import escape

    console = Console(stderr=True)
    if not console.is_terminal:
        at = [text]

        def update(text_now: str) -> None:
            at[0] = f"{text}: {text_now}" if text_now else text

        with _lines(lambda: at[0]):
            yield update
        return
    with console.status(text) as line:
        yield lambda text_now: line.update(f"{text}: {escape(text_now)}") if text_now else line.stop()


@contextmanager
def stages(text: str, total: int) -> Iterator[Callable[[str], None]]:
    """Show a bar for `total` long parts; yield a function to call with each part's name before it starts."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    if not console.is_terminal:
        named: list[str] = []
        with _lines(lambda: f"{text}: {len(named)} of {total}{f', {named[-1]}' if named else ''}"):
            yield named.append
        return
    columns = (
        BarColumn(),
        TextColumn("{task.completed}/{task.total}"),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
    )
    with Progress(*columns, console=console, transient=True) as bar:
        task, begun = bar.add_task(text, total=total), 0

        def begin(name: str) -> None:
            nonlocal begun
            bar.update(task, description=name, completed=begun)
            begun += 1

        yield begin
