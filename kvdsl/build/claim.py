"""One process makes something, the others wait.

A claim is a folder that names its owner. It appears with the name in it, by one rename, and a rename onto a folder that holds
something fails on every file system: nothing else is asked of them, no lock that a network share may lack. The owner touches the
claim as long as it lives. Whoever waits breaks it when the owner is dead, as far as one can know that here, or has not touched it
for a while. Nothing has to be right because of a claim (`kvdsl.build.store` publishes whole entries, and checks them): it saves work.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import socket
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from kvdsl.errors import KvdslError

SUFFIX = ".claim"

BEAT = 5.0
"""Seconds between two touches of the owner."""

STALE = 60.0
"""Seconds without a touch, by the clock of the one who waits, after which an owner counts as dead."""

LIMIT = 900.0
"""Seconds that one waits in all; building takes less than a minute."""

SILENT = 1.0
"""Seconds after which one says that one waits."""

_FORGOTTEN = 86400.0
"""Seconds after which a claim is swept, whoever has it."""

_NAMELESS = 3600.0
"""The same for one without an owner's name, of a process that was killed just before or after it stood there."""

_OWNER = "owner.json"


@dataclass(frozen=True)
class Owner:
    """Who holds a claim.

    Attributes:
        token: of this claim alone.
        host: for people. machine: the same only where processes see each other: host, boot and process namespace.
        pid, started: the process; `started` tells it from a later one of the same number.
    """

    token: str
    host: str
    machine: str
    pid: int
    started: str

    def dead(self) -> bool:
        """Whether the process is known to have ended; False for one of another machine."""
        return self.machine == _machine() and _started(self.pid) != self.started


class Claim:
    """A held claim. `folder` is empty, its holder's own, and goes with the claim."""

    def __init__(self, place: Path, owner: Owner) -> None:
        self.place, self.owner = place, owner
        self.folder = place / owner.token

    def held(self) -> bool:
        """Whether it is still ours: a process that slept for long loses it."""
        return _owner(self.place) == self.owner


@contextmanager
def claimed(thing: Path, what: str, patience: float | None = None) -> Iterator[Claim]:
    """Hold the claim on a path in the cache folder; wait, and say so, while another process has it.

    Args:
        thing: what will be made. The claim lies beside it.
        what: its name in messages.
        patience: seconds to wait, `LIMIT` if not said.

    Raises:
        KvdslError: if that was not enough.
        OSError: if nothing can be written there.
    """
    place = thing.with_name(thing.name + SUFFIX)
    owner = Owner(uuid.uuid4().hex, socket.gethostname(), _machine(), os.getpid(), _started(os.getpid()))
    _wait(place, owner, what, LIMIT if patience is None else patience)
    claim, ended = Claim(place, owner), threading.Event()
    touching = threading.Thread(target=_touch, args=(place / _OWNER, ended), daemon=True)
    with contextlib.suppress(RuntimeError):  # WebAssembly has no threads, and no other process that would wait
        touching.start()
    try:
        sweep(place.parent)
        yield claim
    finally:
        ended.set()
        if touching.ident is not None:
            touching.join()
        if claim.held():
            _remove(place)


def sweep(folder: Path) -> None:
    """Remove the claims of the dead, with what they left half made."""
    for left in folder.glob(f"*{SUFFIX}*"):
        owner = _owner(left)
        with contextlib.suppress(OSError):
            age = time.time() - left.stat().st_mtime
            if owner.dead() or age > _FORGOTTEN if owner else age > _NAMELESS:
                _remove(left)


def _wait(place: Path, owner: Owner, what: str, limit: float) -> None:
    begun, said = time.monotonic(), False
    seen: tuple[object, float] = (None, begun)
    while not _take(place, owner):
        now, other = time.monotonic(), _owner(place)
        state = (other, _touched(place))
        if state != seen[0]:
            seen = (state, now)
        if (other and other.dead()) or now - seen[1] > STALE:
            _break(place, other)
            continue
        if now - begun > limit:
            raise KvdslError(
                f"waited {limit:g} s for {_name(other)}, which builds `{what}`; if it does nothing, end it and delete {place}"
            )
        if now - begun > SILENT and not said:
            said = True
            print(f"kvdsl: waiting for {_name(other)}, which builds `{what}`", file=sys.stderr)
        time.sleep(min(0.05 + (now - begun) / 20, 0.5))


def _take(place: Path, owner: Owner) -> bool:
    """Make the claim ours if it is nobody's."""
    if place.exists():
        return False
    private = place.with_name(f"{place.name}-{owner.token}")
    try:
        (private / owner.token).mkdir(parents=True)
        (private / _OWNER).write_text(json.dumps(asdict(owner)), encoding="utf-8")
        os.rename(private, place)
    except OSError as error:
        if _owner(place) == owner:  # a network share may fail to say that it did it
            return True
        shutil.rmtree(private, ignore_errors=True)
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
            return False
        raise
    return True


def _break(place: Path, owner: Owner | None) -> None:
    """Take an abandoned claim away. Of several who try, one has the rename; one who comes late gives back what it took."""
    with contextlib.suppress(OSError):
        aside = _aside(place)
        if aside is None or _owner(aside) == owner:
            _delete(aside or place)
        else:
            os.rename(aside, place)


def _remove(place: Path) -> None:
    """By a rename first: others see all of it or nothing."""
    with contextlib.suppress(OSError):
        _delete(_aside(place) or place)


def _aside(place: Path) -> Path | None:
    """Where a claim now lies, out of everybody's way; None if it cannot be renamed, as that of an image below a container."""
    aside = place.with_name(f"{place.name.partition(SUFFIX)[0]}{SUFFIX}-{uuid.uuid4().hex}")
    try:
        os.rename(place, aside)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        return None
    return aside


def _delete(aside: Path) -> None:
    """The owner's name goes last: if a compiler that outlived its owner still writes there, the next one sweeps the rest."""
    for inside in aside.iterdir():
        if inside.name != _OWNER:
            shutil.rmtree(inside)
    shutil.rmtree(aside)


def _touch(file: Path, ended: threading.Event) -> None:
    while not ended.wait(BEAT):
        with contextlib.suppress(OSError):
            os.utime(file)


def _owner(place: Path) -> Owner | None:
    """Who holds it; None if it is not there or says nothing that one can read."""
    try:
        return Owner(**json.loads((place / _OWNER).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def _touched(place: Path) -> int | None:
    try:
        return (place / _OWNER).stat().st_mtime_ns
    except OSError:
        return None


def _name(owner: Owner | None) -> str:
    if owner is None:
        return "another process"
    return f"process {owner.pid}" + ("" if owner.host == socket.gethostname() else f" on {owner.host}")


def _machine() -> str:
    boot, namespace = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/pid")
    try:
        return f"{socket.gethostname()} {boot.read_text(encoding='ascii').strip()} {os.readlink(namespace)}"
    except OSError:
        return socket.gethostname()


def _started(pid: int) -> str:
    """When a process began, in the system's own count, or "" if it has ended (a zombie has)."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        return "" if fields[0] in "ZX" else fields[19]
    except OSError:
        return "" if Path("/proc/self/stat").exists() or not _exists(pid) else "unknown"


def _exists(pid: int) -> bool:
    """Whether there is such a process, where no /proc tells more."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        pass
    return True
