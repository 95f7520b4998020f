"""A progress bar on terminals; anywhere else a line after ten seconds, and then one a minute."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

FIRST, EVERY = 10.0, 60.0
"""Seconds after which a command that writes to no terminal says what it is at, and from then on."""


@contextmanager
def _lines(say: Callable[[], str]) -> Iterator[None]:
    """While this lasts, say now and then what is going on."""
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
    """A bar on standard error for `total` steps; the caller is given what to call after each."""
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
    """Show a status line for work of unknown length: the caller passes what is going on, or nothing to remove the line."""
    from rich.console import Console
    from rich.markup import escape

    console = Console(stderr=True)
    if not console.is_terminal:
        at = [text]

        def tell(told: str) -> None:
            at[0] = f"{text}: {told}" if told else text

        with _lines(lambda: at[0]):
            yield tell
        return
    with console.status(text) as line:
        yield lambda told: line.update(f"{text}: {escape(told)}") if told else line.stop()


@contextmanager
def stages(text: str, total: int) -> Iterator[Callable[[str], None]]:
    """A bar for `total` parts that take long: the caller names each before it begins."""
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
