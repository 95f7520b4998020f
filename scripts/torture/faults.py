"""Disks that are full or cannot be written, compilers that are none, and files that are not what was written."""

from __future__ import annotations

import os
import random
import resource
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from scripts.torture._builds import (
    Process,
    check_clean,
    check_right,
    decode,
    expected,
    fast_compiler,
    trial_folder,
)
from scripts.torture.registry import Counts, NotHere, Progress, attack


@attack("full disks", "a file system with room for a part of a build; then with room for all of it", count=60, quick=2)
def full_disks(seed: int, count: int, progress: Progress) -> Counts:
    dice, counts, refused = random.Random(seed), Counts(), 0
    environment = {"CXX": fast_compiler()}
    for number in range(count):
        pages = dice.randint(2, 300)  # of 4 KiB; a build and its temporaries take about 250
        with (
            counts.trial(f"trial {number}: {pages} pages"),
            trial_folder() as place,
            _mounted(place / "cache", f"size={4 * pages}k"),
        ):
            first = Process(decode, place, **environment).wait()
            assert first.code == 0 or first.refused, f"ended with {first.code}: {first.said}"
            refused += first.refused
            _mount("-o", "remount,size=64m", str(place / "cache"))
            check_right(Process(decode, place, **environment).wait())
            check_clean(place)
        progress()
    counts.note(f"{refused} were refused, in one line each; the others had room enough")
    return counts


@attack(
    "files that may not grow", "a limit to the size of files (RLIMIT_FSIZE) during a build; then none", count=40, quick=2
)
def limited_files(seed: int, count: int, progress: Progress) -> Counts:
    dice, counts, refused = random.Random(seed), Counts(), 0
    environment = {"CXX": fast_compiler()}
    for number in range(count):
        limit = int(10 ** dice.uniform(1, 5.7))
        with counts.trial(f"trial {number}: {limit} bytes"), trial_folder() as place:
            first = Process(lambda limit=limit: _limited(limit), place, **environment).wait()  # type: ignore[misc]
            assert first.code == 0 or first.refused, f"ended with {first.code}: {first.said}"
            refused += first.refused
            check_right(Process(decode, place, **environment).wait())
            check_clean(place)
        progress()
    counts.note(f"{refused} were refused, in one line each; the others had room enough")
    return counts


def _limited(limit: int) -> list[float]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        return decode()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)  # the result is written to a file


@attack(
    "folders that cannot be written",
    "a file system that turns read-only: empty, half built, built, damaged",
    count=8,
    quick=4,
)
def read_only(seed: int, count: int, progress: Progress) -> Counts:
    counts, environment = Counts(), {"CXX": fast_compiler()}
    for number in range(count):
        case = ("empty", "without the library", "built", "damaged")[number % 4]
        with counts.trial(f"trial {number}: {case}"), trial_folder() as place, _mounted(place / "cache", "size=64m"):
            if case != "empty":
                check_right(Process(decode, place, **environment).wait())
            (libraries,) = (place / "cache" / "cpu").glob("roco-*") if case != "empty" else (None,)
            if case == "without the library":
                shutil.rmtree(libraries)
            if case == "damaged":
                os.truncate(libraries / "roco.so", 1000)
            _mount("-o", "remount,ro", str(place / "cache"))
            outcome = Process(decode, place, **environment).wait()
            if case == "built":
                check_right(outcome)
            else:
                assert outcome.refused, f"ended with {outcome.code}: {outcome.said}"
            _mount("-o", "remount,rw", str(place / "cache"))
            check_right(Process(decode, place, **environment).wait())
        progress()
    return counts


@contextmanager
def _mounted(folder: Path, options: str) -> Iterator[None]:
    """A file system in memory."""
    folder.mkdir()
    _mount("-t", "tmpfs", "-o", options, "tmpfs", str(folder))
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def _mount(*arguments: str) -> None:
    done = subprocess.run(["mount", *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise NotHere(f"needs the right to mount a file system in memory ({done.stderr.strip()})")


# -- compilers ---------------------------------------------------------------------------------------------------------

SCRIPTS = {
    "makes an empty file": ': > "$out"',
    "makes rubbish": 'echo rubbish > "$out"',
    "makes half a library": 'head -c 5000 "$from" > "$out"',
    "makes a folder": 'mkdir "$out"',
    "makes nothing": "exit 0",
    "fails without a word": "exit 3",
    "fails in bytes that are no text": "printf '\\377\\376 error \\200' >&2; exit 1",
    "fails in 10 MB": "head -c 10000000 /dev/zero | tr '\\0' e >&2; exit 1",
    "is killed": "kill -9 $$",
    "crashes": "kill -SEGV $$",
    "removes its folder": 'rm -rf "$(dirname "$out")"; exit 1',
    "removes its folder and is content": 'rm -rf "$(dirname "$out")"',
}
"""What a compiler does in place of its work; $out is what it is to make, $from what the real one made."""

COMMANDS = ("true", "false", "no-such-compiler", "/", "/etc/passwd", "'", "g++ -fno-such-option", "{}/elf", "{}/text")


@attack(
    "compilers that are none",
    "CXX names something that fails, lies, dies or makes rubbish; then a compiler",
    count=21,
    quick=3,
)
def bad_compilers(seed: int, count: int, progress: Progress) -> Counts:
    dice, counts = random.Random(seed), Counts()
    ways = [*COMMANDS, *SCRIPTS]
    dice.shuffle(ways)
    good = fast_compiler()
    for number in range(count):
        way = ways[number % len(ways)]
        with counts.trial(f"trial {number}: {way}"), trial_folder() as place:
            bad = _bad_compiler(way, place, Path(good).parent)
            outcome = Process(decode, place, CXX=bad).wait()
            assert outcome.refused, f"ended with {outcome.code}: {outcome.said}"
            check_right(Process(lambda: decode("auto"), place, CXX=bad).wait())  # the torch backend serves
            check_right(Process(decode, place, CXX=good).wait())
        progress()
    return counts


def _bad_compiler(way: str, place: Path, store: Path) -> str:
    if way in COMMANDS:
        for name, content in (("elf", b"\x7fELF nothing of the kind"), ("text", b"no program")):
            (place / name).write_bytes(content)
            (place / name).chmod(0o755)
        return way.format(place)
    path = place / "bad-g++"
    path.write_text(
        '#!/bin/sh\n[ "$1" = --version ] && { echo "a bad one"; exit; }\n'
        f'while [ $# -gt 0 ]; do [ "$1" = -o ] && out=$2; shift; done\nfrom={store}/$(basename "$out")\n{SCRIPTS[way]}\n'
    )
    path.chmod(0o755)
    return str(path)


# -- damages -----------------------------------------------------------------------------------------------------------


def _truncate(path: Path, dice: random.Random) -> None:
    os.truncate(path, dice.randrange(path.stat().st_size or 1))


def _zero(path: Path, dice: random.Random) -> None:
    path.write_bytes(bytes(path.stat().st_size))


def _zero_page(path: Path, dice: random.Random) -> None:
    """As a power cut leaves files."""
    content = bytearray(path.read_bytes())
    start = dice.randrange(max(len(content), 1)) // 4096 * 4096
    content[start : start + 4096] = bytes(len(content[start : start + 4096]))
    path.write_bytes(content)


def _scramble(path: Path, dice: random.Random) -> None:
    path.write_bytes(dice.randbytes(path.stat().st_size))


def _flip_bit(path: Path, dice: random.Random) -> None:
    content = bytearray(path.read_bytes())
    content[dice.randrange(len(content))] ^= 1 << dice.randrange(8)
    path.write_bytes(content)


def _append(path: Path, dice: random.Random) -> None:
    path.write_bytes(path.read_bytes() + dice.randbytes(dice.randrange(1, 5000)))


def _delete(path: Path, dice: random.Random) -> None:
    path.unlink()


def _turn_into_a_folder(path: Path, dice: random.Random) -> None:
    path.unlink()
    path.mkdir()


def _turn_into_a_dangling_link(path: Path, dice: random.Random) -> None:
    path.unlink()
    path.symlink_to("nowhere")


def _empty_its_folder(path: Path, dice: random.Random) -> None:
    for file in path.parent.iterdir():
        file.unlink()


def _remove_its_folder(path: Path, dice: random.Random) -> None:
    shutil.rmtree(path.parent)


def _turn_its_folder_into_a_file(path: Path, dice: random.Random) -> None:
    shutil.rmtree(path.parent)
    path.parent.write_text("a file")


DAMAGES: tuple[Callable[[Path, random.Random], Any], ...] = (
    _truncate, _zero, _zero_page, _scramble, _flip_bit, _append, _delete, _turn_into_a_folder, _turn_into_a_dangling_link,
    _empty_its_folder, _remove_its_folder, _turn_its_folder_into_a_file,
)  # fmt: skip


@attack(
    "damaged files",
    "one to three files of any kind in the cache folder are damaged in any way; then they are used",
    count=300,
    quick=4,
)
def damaged_files(seed: int, count: int, progress: Progress) -> Counts:
    dice, counts, kinds = random.Random(seed), Counts(), set()
    environment = {"CXX": fast_compiler()}
    expected()
    with trial_folder() as place:
        check_right(Process(decode, place, **environment).wait())
        for number in range(count):
            files = sorted(path for path in (place / "cache").rglob("*") if path.is_file())
            done = []
            for path in dice.sample(files, dice.randint(1, 3)):
                damage = dice.choice(DAMAGES)
                if path.exists() and path.stat().st_size:
                    damage(path, dice)
                    done.append(f"{damage.__name__.strip('_')} {path.parent.parent.name}/{path.name}")
                    kinds.add(done[-1])
            anew = dice.random() < 0.5  # what only a build opens, the driver's objects, is healed by one
            with counts.trial(f"trial {number}: {', '.join(done)}{', built anew' if anew else ''}"):
                if anew:
                    for library in (place / "cache" / "cpu").glob("roco-*"):
                        shutil.rmtree(library, ignore_errors=True)
                check_right(Process(decode, place, **environment).wait())
                if anew:
                    check_clean(place)
            progress()
    counts.note(f"{len(kinds)} different damages")
    return counts
