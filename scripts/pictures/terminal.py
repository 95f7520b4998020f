"""A terminal in which a program runs, and its screen as SVG: text, so that it is small, sharp and can be searched."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import struct
import subprocess
import termios
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from types import TracebackType

import pyte
from pyte.screens import Char

from scripts.pictures.svg import ADVANCE, INK, LINE, SIZE, drawing, letters

PADDING = 18
PATIENCE, QUIET = 120.0, 0.3
"""Seconds: how long words on the screen are waited for, and how long nothing may come before a screen counts as done."""

COLOURS = {
    "black": "#24292f", "red": "#cf222e", "green": "#116329", "brown": "#7d4e00", "blue": "#0969da", "magenta": "#8250df",
    "cyan": "#1b7c83", "white": "#6e7781",
}  # fmt: skip
"""What programs call by these names, on white; any other colour comes as six digits."""


class Terminal:
    """A program in a terminal of its own; leaving the `with` ends it."""

    def __init__(
        self, command: Sequence[str], folder: Path, environment: Mapping[str, str], columns: int = 100, rows: int = 40
    ) -> None:
        self.screen = pyte.Screen(columns, rows)
        self.stream = pyte.ByteStream(self.screen)
        self.keyboard, program = pty.openpty()
        fcntl.ioctl(program, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        # Of xterm's sequences pyte takes one, by which keys are told apart, for a colour; screen's programs do not send it.
        environment = {**os.environ, **environment, "TERM": "screen-256color", "COLUMNS": str(columns), "LINES": str(rows)}
        self.process = subprocess.Popen(
            command, cwd=folder, env=environment, stdin=program, stdout=program, stderr=program, start_new_session=True
        )
        os.close(program)

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.keyboard)

    def type(self, keys: str) -> None:
        """Press keys."""
        os.write(self.keyboard, keys.encode())

    def until(self, *words: str) -> None:
        """Wait until the screen shows all of these words and nothing more comes, or the program has ended."""
        end = time.monotonic() + PATIENCE
        while (came := self._read()) is not None and time.monotonic() < end:
            if not came and all(word in self.text for word in words):
                return
        if missing := [word for word in words if word not in self.text]:
            raise RuntimeError(f"{missing} did not appear; the screen shows:\n{self.text}")

    def _read(self) -> bool | None:
        """Whether something came; None where the program has ended."""
        if not select.select([self.keyboard], [], [], QUIET)[0]:
            return False
        try:
            self.stream.feed(os.read(self.keyboard, 65536))
        except OSError:  # the other end is closed
            return None
        return True

    @property
    def text(self) -> str:
        """What the screen shows, as lines."""
        return "\n".join(line.rstrip() for line in self.screen.display)

    def svg(self, title: str) -> str:
        """The screen, without its empty lines at the end."""
        rows = len(self.text.rstrip().splitlines())
        width, height = self.screen.columns * ADVANCE + 2 * PADDING, rows * LINE + 2 * PADDING
        parts = [
            f'<rect width="{width:.0f}" height="{height:.0f}" rx="8" fill="#ffffff" stroke="#d0d7de"/>',
            f'<g transform="translate({PADDING} {PADDING + SIZE + 1})">',
            *(part for row in range(rows) for part in self._row(row)),
            "</g>",
        ]
        return drawing(width, height, title, parts)

    def _row(self, row: int) -> Iterator[str]:
        """Backgrounds first, so that no letter is hidden by its neighbour's."""
        cells = [self.screen.buffer[row][column] for column in range(self.screen.columns)]
        for column, many, cell in _runs(cells, lambda cell: _colours(cell)[1]):
            if fill := _colours(cell)[1]:
                box = f'x="{column * ADVANCE:.1f}" y="{row * LINE - LINE + 5:.1f}" width="{many * ADVANCE:.1f}" height="{LINE}"'
                yield f'<rect {box} fill="{fill}"/>'
        for column, many, cell in _runs(
            cells, lambda cell: cell._replace(data="", bg="", reverse=False, fg=_colours(cell)[0])
        ):
            shown = "".join(cell.data for cell in cells[column : column + many])
            marks = ' font-weight="bold"' * cell.bold + ' font-style="italic"' * cell.italics
            yield letters(shown, column, row, _colours(cell)[0], marks + ' text-decoration="underline"' * cell.underscore)


def _runs(cells: list[Char], key: object) -> Iterator[tuple[int, int, Char]]:
    """Neighbours that look the same: the first's column, how many, and the first."""
    column = 0
    for _, group in groupby(cells, key):  # type: ignore[call-overload]
        run = list(group)
        yield column, len(run), run[0]
        column += len(run)


def _colours(cell: Char) -> tuple[str, str]:
    """Of letters and of what is behind them; no colour where that is the paper's."""
    ink, paper = (_hex(name) for name in (cell.fg, cell.bg))
    return (paper or "#ffffff", ink or INK) if cell.reverse else (ink or INK, paper)


def _hex(name: str) -> str:
    if name == "default":
        return ""
    return COLOURS.get(name.removeprefix("bright"), f"#{name}")
