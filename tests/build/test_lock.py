"""One process builds, the others wait: also when the builder is killed, and where files cannot be locked."""

from __future__ import annotations

import errno
import multiprocessing.pool
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import filelock
import pytest

from kvdsl.build import lock
from kvdsl.build.lock import MAKING, making, sweep
from kvdsl.build.store import entry
from kvdsl.errors import KvdslError
from tests.build.left import left

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="kills processes")


def _make(folder: Path) -> None:
    with open(folder.parents[1] / "builders", "a") as log:
        log.write(f"{os.getpid()}\n")
    time.sleep(0.2)
    (folder / "file").write_bytes(b"made")


def _build(thing: str) -> str:
    return str(entry(Path(thing), "thing", _make))


def test_one_builds_and_the_others_wait(tmp_path: Path) -> None:
    with multiprocessing.get_context("spawn").Pool(4) as pool:
        pool.map(_build, [str(tmp_path / "thing")] * 4, chunksize=1)
    assert len((tmp_path / "builders").read_text().splitlines()) == 1
    assert left(tmp_path) == ["builders", "thing"]


def test_threads_wait_for_each_other(tmp_path: Path) -> None:
    with multiprocessing.pool.ThreadPool(4) as pool:
        pool.map(_build, [str(tmp_path / "thing")] * 4, chunksize=1)
    assert len((tmp_path / "builders").read_text().splitlines()) == 1


HOLD = (
    "import sys, time\nfrom pathlib import Path\nfrom kvdsl.build.lock import making\n"
    "with making(Path(sys.argv[1]), 'thing') as folder:\n"
    "    (folder / 'half').write_bytes(b'half')\n"
    "    print('held', flush=True)\n    time.sleep(600)\n"
)


@contextmanager
def _holder(thing: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that makes the thing for ever."""
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(thing)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "held\n"
        yield process
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("zombie", [True, False])
def test_a_killed_builder_is_not_waited_for(tmp_path: Path, zombie: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "LIMIT", 10.0)
    with _holder(tmp_path / "thing") as process:
        process.send_signal(signal.SIGKILL)
        os.waitid(os.P_PID, process.pid, os.WEXITED | (os.WNOWAIT if zombie else 0))
        assert [name.partition(MAKING)[0] for name in left(tmp_path)] == ["thing"]
        assert entry(tmp_path / "thing", "thing", _make) == tmp_path / "thing"
        assert left(tmp_path) == ["builders", "thing"]


def test_what_the_killed_leave_is_swept_by_the_next_builder_of_anything(tmp_path: Path) -> None:
    with _holder(tmp_path / "thing"):
        pass
    entry(tmp_path / "other", "other", _make)
    assert left(tmp_path) == ["builders", "other"]


def test_sweeping_leaves_the_living_alone(tmp_path: Path) -> None:
    with _holder(tmp_path / "thing"), making(tmp_path / "other", "other") as own:
        sweep(tmp_path)
        assert [name.partition(MAKING)[0] for name in left(tmp_path)] == ["other", "thing"]
        assert own.is_dir()


def test_a_builder_that_lives_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(lock, "LIMIT", 0.2)
    monkeypatch.setattr(lock, "SILENT", 0.1)
    reason = r"waited 0.2 s for another process, which builds `thing` and holds .*thing\.lock; if it hangs, end it"
    with _holder(tmp_path / "thing"), pytest.raises(KvdslError, match=reason):
        entry(tmp_path / "thing", "thing", _make)
    assert capfd.readouterr().err == "kvdsl: waiting for another process, which builds `thing`\n"


@pytest.mark.parametrize("error", [NotImplementedError("no flock"), OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))])
def test_where_files_cannot_be_locked_several_build_and_one_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def no_lock(self: filelock.FileLock, timeout: float) -> None:
        raise error

    monkeypatch.setattr(filelock.FileLock, "acquire", no_lock)
    (tmp_path / f"thing{MAKING}0123").mkdir()  # another one's, which may live
    with multiprocessing.pool.ThreadPool(4) as pool:
        assert pool.map(_build, [str(tmp_path / "thing")] * 4, chunksize=1) == [str(tmp_path / "thing")] * 4
    assert left(tmp_path) == ["builders", "thing", f"thing{MAKING}0123"]


def test_in_a_browser_nothing_is_locked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock.sys, "platform", "emscripten")
    monkeypatch.setitem(sys.modules, "filelock", None)
    entry(tmp_path / "thing", "thing", _make)
    assert sorted(os.listdir(tmp_path)) == ["builders", "thing"]


def test_a_damaged_entry_in_an_image_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In an image below a container folders cannot be renamed, but those that are made now."""
    rename = os.rename

    def within(source: Path, target: Path) -> None:
        if (Path(source) / "in the image").exists():
            raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))
        rename(source, target)

    monkeypatch.setattr(os, "rename", within)
    (tmp_path / "thing" / "in the image").mkdir(parents=True)
    entry(tmp_path / "thing", "thing", _make)
    assert sorted(os.listdir(tmp_path / "thing")) == ["file", "seal.json"]
