"""Entries of the cache folder: made once, found again, made again where they are damaged, and never seen half."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from kvdsl.build import store
from kvdsl.build.store import SEAL, entry, flaw
from kvdsl.errors import KvdslError
from tests.build.left import left


class Maker:
    """Makes an entry of two files, and counts."""

    made = 0

    def __call__(self, folder: Path) -> None:
        self.made += 1
        (folder / "one").write_bytes(bytes(range(256)) * 8)
        (folder / "two").write_bytes(b"two")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "kind" / "thing-0123"


def test_an_entry_is_made_once(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    make = Maker()
    assert entry(folder, "thing", make) == entry(folder, "thing", make) == folder
    assert make.made == 1
    assert sorted(path.name for path in folder.iterdir()) == ["one", SEAL, "two"]
    assert left(folder.parent) == [folder.name], "nothing may be left beside it"
    assert capfd.readouterr().err == ""


def _cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def _zero(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def _grow(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"more")


def _empty(path: Path) -> None:
    path.write_bytes(b"")


def _as_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def _write(content: bytes) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        path.write_bytes(content)

    return damage


DAMAGES: dict[str, tuple[str, Callable[[Path], None]]] = {
    **{f"{how.__name__[1:]} {name}": (name, how) for name in ("one", SEAL)
       for how in (_cut, _zero, _flip, _grow, _empty, Path.unlink, _as_folder)},
    **{f"seal {content!r}": (SEAL, _write(content)) for content in
       (b"{}", b"[]", b"null", b'{"files": []}', b'{"files": {"one": 3}}', b'{"files": {"one": {"bytes": 2048}}}', b"\xff\xfe")},
}  # fmt: skip


@pytest.mark.parametrize("name", [name for name in DAMAGES if name != f"grow {SEAL}"])
def test_what_is_damaged_is_made_again(folder: Path, capfd: pytest.CaptureFixture[str], name: str) -> None:
    file, damage = DAMAGES[name]
    make = Maker()
    entry(folder, "thing", make)
    damage(folder / file)
    assert flaw(folder) is not None
    assert entry(folder, "thing", make) == folder
    assert (make.made, flaw(folder)) == (2, None)
    said = capfd.readouterr().err
    assert str(folder) in said and "damaged" in said and said.count("\n") == 1
    assert left(folder.parent) == [folder.name], "nothing may be left beside it"
    entry(folder, "thing", make)
    assert make.made == 2


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The files that are read whole from now on."""
    names: list[str] = []
    whole = store.digest_of
    monkeypatch.setattr(store, "digest_of", lambda file: names.append(file.name) or whole(file))
    monkeypatch.setattr(store, "STILL", -1.0)
    return names


def test_what_nobody_has_touched_is_read_whole_once(folder: Path, read: list[str]) -> None:
    entry(folder, "thing", Maker())
    read.clear()
    assert flaw(folder, known=True) is None and sorted(read) == ["one", "two"]
    assert flaw(folder, known=True) is None and len(read) == 2
    assert flaw(folder) is None and len(read) == 4, "without `known` everything is read"
    os.utime(folder / "two")
    assert flaw(folder, known=True) is None and read[4:] == ["two"]
    (folder / store.NOTE).write_text("[")
    assert flaw(folder, known=True) is None and len(read) == 7
    assert sorted(os.listdir(folder)) == [store.NOTE, "one", SEAL, "two"]


@pytest.mark.parametrize("how", [_cut, _zero, _flip, _grow, _empty, Path.unlink])
def test_what_was_touched_is_found_whatever_its_times_say(
    folder: Path, read: list[str], how: Callable[[Path], None]
) -> None:
    entry(folder, "thing", Maker())
    assert flaw(folder, known=True) is None
    before = (folder / "one").stat()
    time.sleep(0.02)  # more than a tick of the file system
    how(folder / "one")
    if (folder / "one").exists():
        os.utime(folder / "one", ns=(before.st_atime_ns, before.st_mtime_ns))
    assert flaw(folder, known=True) is not None


def test_a_file_that_has_just_changed_is_not_noted(folder: Path) -> None:
    entry(folder, "thing", Maker())
    assert flaw(folder, known=True) is None and not (folder / store.NOTE).exists()


def test_a_folder_that_cannot_be_noted_in(folder: Path, read: list[str]) -> None:
    entry(folder, "thing", Maker())
    (folder / store.NOTE).mkdir()
    assert flaw(folder, known=True) is None and flaw(folder, known=True) is None
    assert not list(folder.glob(".*")), "nothing may be left of trying"


def test_an_emptied_entry_is_made_again(folder: Path) -> None:
    entry(folder, "thing", Maker())
    for file in folder.iterdir():
        file.unlink()
    entry(folder, "thing", Maker())
    assert flaw(folder) is None


def test_a_disk_that_loses_what_is_written(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rename = os.rename

    def lossy(source: Path, target: Path) -> None:
        rename(source, target)
        if target == folder:
            _zero(folder / "one")

    monkeypatch.setattr(store.os, "rename", lossy)
    make = Maker()
    with pytest.raises(
        KvdslError, match=r"damaged right after writing \(one is not what was written\): .*set KVDSL_CACHE_DIR"
    ):
        entry(folder, "thing", make)
    assert make.made == 1, "an error, and no loop"


def test_what_fails_leaves_nothing(folder: Path) -> None:
    def fail(made: Path) -> None:
        (made / "half").write_bytes(b"half")
        raise KvdslError("no")

    with pytest.raises(KvdslError, match="no"):
        entry(folder, "thing", fail)
    assert left(folder.parent) == []
    entry(folder, "thing", Maker())


def test_a_full_disk_is_an_error_that_names_the_place(folder: Path) -> None:
    def full(made: Path) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))  # as `write` has it: without a path

    with pytest.raises(
        KvdslError, match=r"cannot write .*thing-0123 \(No space left on device\); free some space there, or set KVD"
    ):
        entry(folder, "thing", full)
    assert left(folder.parent) == []


@pytest.mark.skipif(sys.platform == "win32", reason="needs limits of a process")
@pytest.mark.parametrize("limit", [0, 100, 1000])
def test_files_that_may_not_grow(folder: Path, limit: int) -> None:
    """At a limit of 0 nothing can be written, at 1000 some of the entry."""
    code = (
        "import resource, sys\nfrom pathlib import Path\nfrom kvdsl.build.store import entry\n"
        "from kvdsl.errors import KvdslError\n"
        f"resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit}))\n"
        "def make(folder): (folder / 'one').write_bytes(bytes(2000))\n"
        f"try: entry(Path({str(folder)!r}), 'thing', make)\n"
        "except KvdslError as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "thing-0123 (File too large); free some space" in done.stdout, done.stderr
    assert left(folder.parent) == []


SLOW = (
    "import sys, time\nfrom pathlib import Path\nfrom kvdsl.build.store import entry\n"
    "def make(folder):\n"
    "    for name in 'abcdefgh':\n"
    "        (folder / name).write_bytes(b'half')\n        print(name, flush=True)\n        time.sleep(0.003)\n"
    "        (folder / name).write_bytes(b'the whole')\n"
    "entry(Path(sys.argv[1]), 'thing', make)\nprint('there', flush=True)\n"
)


@pytest.mark.skipif(sys.platform == "win32", reason="the death of a process is told by /proc")
@pytest.mark.parametrize("moment", ["a", "b", "e", "h", "there"])
def test_a_build_that_is_killed(folder: Path, moment: str) -> None:
    """Soon after it has said so much; `make torture` kills real ones, and more of them."""
    builder = subprocess.Popen([sys.executable, "-c", SLOW, str(folder)], stdout=subprocess.PIPE)
    assert builder.stdout is not None
    assert f"{moment}\n".encode() in builder.stdout
    builder.kill()
    builder.wait()
    builder.stdout.close()
    if folder.exists():
        assert flaw(folder) is None, "whatever is seen is whole"
    entry(folder, "thing", Maker())
    assert flaw(folder) is None
    assert left(folder.parent) == [folder.name]


def test_a_folder_that_cannot_be_written_serves_what_it_has(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entry(folder, "thing", Maker())

    def refuse(*arguments: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    for name in ("mkdir", "rename", "unlink", "rmdir"):
        monkeypatch.setattr(os, name, refuse)
    entry(folder, "thing", Maker())
    with pytest.raises(KvdslError, match=r"cannot write .*other \(Read-only file system\); set KVDSL_CACHE_DIR"):
        entry(folder.with_name("other"), "thing", Maker())
