"""One process builds, the others wait: also when the builder is killed, sleeps, or lives on another machine."""

from __future__ import annotations

import errno
import json
import multiprocessing.pool
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import asdict
from pathlib import Path

import pytest

from kvdsl.build import claim
from kvdsl.build.claim import Owner, claimed, sweep
from kvdsl.build.store import entry
from kvdsl.errors import KvdslError

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="processes are told apart by /proc")


def _make(folder: Path) -> None:
    with open(folder.parents[2] / "builders", "a") as log:  # beside the claim
        log.write(f"{os.getpid()}\n")
    time.sleep(0.2)
    (folder / "file").write_bytes(b"made")


def _build(thing: str) -> str:
    return str(entry(Path(thing), "thing", _make))


def test_one_builds_and_the_others_wait(tmp_path: Path) -> None:
    with multiprocessing.get_context("spawn").Pool(4) as pool:
        pool.map(_build, [str(tmp_path / "thing")] * 4, chunksize=1)
    assert len((tmp_path / "builders").read_text().splitlines()) == 1
    assert sorted(os.listdir(tmp_path)) == ["builders", "thing"]


def test_threads_wait_for_each_other(tmp_path: Path) -> None:
    with multiprocessing.pool.ThreadPool(4) as pool:
        pool.map(_build, [str(tmp_path / "thing")] * 4, chunksize=1)
    assert len((tmp_path / "builders").read_text().splitlines()) == 1


HOLD = (
    "import sys, time\nfrom pathlib import Path\nfrom kvdsl.build.claim import claimed\n"
    "with claimed(Path(sys.argv[1]), 'thing') as mine:\n"
    "    (mine.folder / 'half').write_bytes(b'half')\n"
    "    print('held', flush=True)\n    time.sleep(600)\n"
)


def _killed_holder(thing: Path) -> subprocess.Popen[str]:
    """A process that was killed while it held the claim. Nobody has waited for it yet."""
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(thing)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    process.send_signal(signal.SIGKILL)
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # a zombie
    return process


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that nothing is ever broken for being old, and waiting is an error."""
    monkeypatch.setattr(claim, "STALE", 1e9)
    monkeypatch.setattr(claim, "LIMIT", 60.0)


@pytest.mark.usefixtures("patient")
def test_where_there_are_no_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a browser: nobody keeps the claim fresh, and it is given back all the same."""

    def none(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", none)
    with claimed(tmp_path / "thing", "thing") as claim:
        assert claim.held()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("zombie", [True, False])
def test_a_killed_builder_is_not_waited_for(tmp_path: Path, zombie: bool) -> None:
    process = _killed_holder(tmp_path / "thing")
    if not zombie:
        process.wait()
    assert os.listdir(tmp_path) == ["thing.claim"]
    assert entry(tmp_path / "thing", "thing", _make) == tmp_path / "thing"
    assert sorted(os.listdir(tmp_path)) == ["builders", "thing"]
    process.wait()


@pytest.mark.usefixtures("patient")
def test_what_the_dead_leave_is_swept_by_the_next_builder_of_anything(tmp_path: Path) -> None:
    _killed_holder(tmp_path / "thing").wait()
    (tmp_path / "thing.claim").rename(tmp_path / "thing.claim-0123")  # killed between two renames
    entry(tmp_path / "other", "other", _make)
    assert sorted(os.listdir(tmp_path)) == ["builders", "other"]


def _foreign(place: Path, **changes: object) -> Owner:
    """A claim of a process on another machine."""
    owner = Owner("token", "elsewhere", "another machine", 4711, "1")
    (place / owner.token).mkdir(parents=True)
    (place / "owner.json").write_text(json.dumps({**asdict(owner), **changes}))
    return owner


def test_an_owner_elsewhere_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(claim, "LIMIT", 0.1)
    monkeypatch.setattr(claim, "SILENT", 0.0)
    _foreign(tmp_path / "thing.claim")
    with pytest.raises(
        KvdslError, match=r"waited 0.1 s for process 4711 on elsewhere, which builds `thing`.*delete .*thing.claim"
    ):
        entry(tmp_path / "thing", "thing", _make)
    assert capfd.readouterr().err == "kvdsl: waiting for process 4711 on elsewhere, which builds `thing`\n"
    assert os.listdir(tmp_path) == ["thing.claim"]


@pytest.mark.parametrize("content", ["", "{", "[]", '{"token": "x"}', None])
def test_an_owner_that_is_silent_for_long_counts_as_dead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str | None
) -> None:
    monkeypatch.setattr(claim, "STALE", 0.1)
    _foreign(tmp_path / "thing.claim")
    if content is not None:
        (tmp_path / "thing.claim" / "owner.json").write_text(content)
    entry(tmp_path / "thing", "thing", _make)
    assert sorted(os.listdir(tmp_path)) == ["builders", "thing"]


def test_another_process_of_the_same_number_is_not_the_owner(tmp_path: Path) -> None:
    machine = claim._machine()
    assert Owner("", "", machine, os.getpid(), "before our time").dead()
    assert not Owner("", "", machine, os.getpid(), claim._started(os.getpid())).dead()
    assert not Owner("", "", "another machine", os.getpid(), "before our time").dead()


def test_touching(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claim, "BEAT", 0.01)
    with claimed(tmp_path / "thing", "thing"):
        file = tmp_path / "thing.claim" / "owner.json"
        os.utime(file, (0, 0))
        for _ in range(6000):  # a minute of beats, where one is enough
            if file.stat().st_mtime:
                return
            time.sleep(0.01)
    pytest.fail("nobody has touched the file")


def test_who_lost_the_claim_waits_for_the_one_who_took_it(tmp_path: Path) -> None:
    """As it is for a process that slept, and finds its folder gone."""
    calls = []

    def make(folder: Path) -> None:
        calls.append(folder)
        if len(calls) == 1:
            claim._break(tmp_path / "thing.claim", claim._owner(tmp_path / "thing.claim"))
        (folder / "file").write_bytes(b"made")

    entry(tmp_path / "thing", "thing", make)
    assert len(calls) == 2
    assert os.listdir(tmp_path) == ["thing"]


def test_who_breaks_too_late_gives_back(tmp_path: Path) -> None:
    dead = Owner("", "", claim._machine(), 1, "0")
    with claimed(tmp_path / "thing", "thing") as mine:
        claim._break(tmp_path / "thing.claim", dead)  # somebody saw the dead owner, and came after us
        assert mine.held()
    assert os.listdir(tmp_path) == []


def test_sweeping_leaves_the_living_alone(tmp_path: Path) -> None:
    _foreign(tmp_path / "elsewhere.claim")
    _foreign(tmp_path / "old.claim")
    os.utime(tmp_path / "old.claim", (0, 0))
    with claimed(tmp_path / "thing", "thing"):
        sweep(tmp_path)
        assert sorted(os.listdir(tmp_path)) == ["elsewhere.claim", "thing.claim"]


@pytest.fixture
def image(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder whose folders cannot be renamed, but those that are made now: an image below a container."""
    rename, folder = os.rename, tmp_path / "image"
    folder.mkdir()

    def within(source: Path, target: Path) -> None:
        if (Path(source) / "in the image").exists():
            raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))
        rename(source, target)

    monkeypatch.setattr(os, "rename", within)
    return folder


def test_a_claim_in_an_image_is_broken(image: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claim, "STALE", 0.1)
    monkeypatch.setattr(claim, "LIMIT", 60.0)
    _foreign(image / "thing.claim")
    (image / "thing.claim" / "in the image").mkdir()
    entry(image / "thing", "thing", lambda folder: None)
    assert os.listdir(image) == ["thing"]


def test_a_damaged_entry_in_an_image_is_made_again(image: Path) -> None:
    (image / "thing" / "in the image").mkdir(parents=True)
    entry(image / "thing", "thing", lambda folder: (folder / "file").write_text("made") and None)
    assert sorted(os.listdir(image / "thing")) == ["file", "seal.json"]


def test_a_claim_without_a_name_is_swept_after_an_hour(tmp_path: Path) -> None:
    """Its process was killed before it had written it, or after it had removed it."""
    (tmp_path / "thing.claim-0123").mkdir()
    sweep(tmp_path)
    assert os.listdir(tmp_path) == ["thing.claim-0123"], "it may be about to get one"
    os.utime(tmp_path / "thing.claim-0123", (time.time() - 4000,) * 2)
    sweep(tmp_path)
    assert os.listdir(tmp_path) == []
