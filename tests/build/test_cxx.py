"""Building C++: once, in parallel, and what is said when it cannot be."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from kvdsl.build import cache_folder, cache_folder_at, cxx
from kvdsl.errors import KvdslError
from tests.build.left import left

SOURCE = 'extern "C" int answer() { return 42; }\n'


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KVDSL_CACHE_DIR", str(tmp_path / "cache"))
    path = tmp_path / "kernels_cpu.cpp"
    path.write_text(SOURCE)
    return path


def test_builds_once_and_says_so(source: Path, capfd: pytest.CaptureFixture[str]) -> None:
    library = cxx.shared_library(source, "thing")
    assert library.exists()
    begun, done = capfd.readouterr().err.splitlines()
    assert "building" in begun and "`thing`" in begun
    assert "built" in done and "`thing`" in done
    assert cxx.shared_library(source, "thing") == library
    assert capfd.readouterr().err == ""


def test_what_nobody_will_want_again_is_built_in_silence(
    source: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with cache_folder_at(tmp_path / "passing"):
        assert cxx.shared_library(source, "thing").is_relative_to(tmp_path / "passing")
    assert capfd.readouterr().err == ""
    assert cxx.shared_library(source, "thing").is_relative_to(tmp_path / "cache")
    assert "`thing`" in capfd.readouterr().err


def test_another_source_is_another_library(source: Path) -> None:
    first = cxx.shared_library(source, "thing")
    source.write_text(SOURCE.replace("42", "43"))
    assert cxx.shared_library(source, "thing") != first


def _build(path: str) -> str:
    return str(cxx.shared_library(Path(path), "thing"))


def test_parallel_builds_do_not_meet(source: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with multiprocessing.get_context("spawn").Pool(4) as pool:
        made = pool.map(_build, [str(source)] * 4, chunksize=1)
    assert len(set(made)) == 1
    assert capfd.readouterr().err.count("built") == 1, "one builds, the others wait"
    assert left(cache_folder() / "cpu") == [Path(made[0]).parent.name], "nothing of a build may be left lying about"


# A compiler that takes no time.
FAKE = """#!/bin/sh
[ "$1" = --version ] && { echo "fake 1.0"; exit; }
while [ $# -gt 1 ]; do case "$1" in -o) out=$2 ;; esac; shift; done
"""


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Takes the end of a script that stands for the compiler; `$out` is what it is asked for."""

    def install(script: str) -> None:
        path = tmp_path / "fake-g++"
        path.write_text(FAKE + script)
        path.chmod(0o755)
        monkeypatch.setenv("CXX", str(path))

    return install


def test_a_compiler_that_makes_nothing(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "true")
    with pytest.raises(KvdslError, match=r"true reports success, but wrote no file; set CXX to another one"):
        cxx.shared_library(source, "thing")


@pytest.mark.parametrize(
    ("command", "says"),
    [
        ("false", "ended with 1 without output"),
        ("'", "CXX cannot be read .*; set CXX to another one"),
        ("{}", "cannot be run"),
        ("sh -c", "the C\\+\\+ compiler"),
    ],
)
def test_commands_that_are_no_compilers(source: Path, monkeypatch: pytest.MonkeyPatch, command: str, says: str) -> None:
    program = source.with_name("program")
    program.write_bytes(b"\x7fELF nothing of the kind")
    program.chmod(0o755)
    monkeypatch.setenv("CXX", command.format(program))
    for build in (lambda: cxx.shared_library(source, "thing"), cxx.driver_objects):
        with pytest.raises(KvdslError, match=says):
            build()


@pytest.mark.parametrize("build", [lambda source: cxx.shared_library(source, "thing"), lambda _: cxx.driver_objects()])
def test_a_full_disk(source: Path, fake: Callable[[str], None], build: Callable[[Path], object]) -> None:
    fake("echo 'ld: final link failed: No space left on device' >&2; exit 1")
    with pytest.raises(
        KvdslError, match=r"No space left on device; free some space at .*cache, or set KVDSL_CACHE_DIR to a folder"
    ):
        build(source)
    assert left(cache_folder() / "cpu") == []


def test_no_room_for_the_log(source: Path, fake: Callable[[str], None]) -> None:
    fake("echo 'an error' >&2; exit 1")
    (cache_folder() / "cpu" / "thing.log").mkdir(parents=True)
    with pytest.raises(KvdslError, match=r"failed: an error; .*fake-g\+\+ .* shows the full output"):
        cxx.shared_library(source, "thing")


@pytest.mark.parametrize("kept", [0.0, 0.5, 0.99])
def test_a_truncated_library_is_built_again(source: Path, kept: float) -> None:
    """Opened as it is, it would end the process with SIGBUS."""
    library = cxx.shared_library(source, "thing")
    os.truncate(library, int(kept * library.stat().st_size))
    assert ctypes.CDLL(str(cxx.shared_library(source, "thing"))).answer() == 42


def _build_kernels(path: str) -> None:
    cxx.kernel_library(Path(path), Path(path).stem)


def test_policies_that_are_built_at_once_share_one_driver(source: Path, fake: Callable[[str], None], tmp_path: Path) -> None:
    fake(f'basename "$out" >> {tmp_path}/log; sleep 0.1; echo made > "$out"')
    sources = [tmp_path / f"policy{number}.cpp" for number in range(3)]
    for path in sources:
        path.write_text(path.stem)
    with multiprocessing.get_context("spawn").Pool(3) as pool:
        pool.map(_build_kernels, map(str, sources), chunksize=1)
    driver = [f"{path.stem}.o" for path in cxx.DRIVER.glob("*.cpp")]
    assert sorted((tmp_path / "log").read_text().split()) == sorted([*driver, *(f"{path.stem}.so" for path in sources)])


@pytest.mark.skipif(sys.platform != "linux", reason="reads ELF files")
def test_a_compiler_that_makes_half_a_library(source: Path, fake: Callable[[str], None]) -> None:
    """Opened, it would end the process with SIGBUS: the seal vouches for what the compiler made."""
    whole = cxx.shared_library(source, "thing")
    fake(f'head -c {whole.stat().st_size // 2} {whole} > "$out"')
    with pytest.raises(
        KvdslError, match=r"fake-g\+\+ reports success, but wrote an incomplete file; is the disk full\? else set CXX"
    ):
        cxx.shared_library(source, "thing")
    fake(f'cat {whole} > "$out"')
    assert ctypes.CDLL(str(cxx.shared_library(source, "thing"))).answer() == 42


def test_the_driver_heals_and_its_temporaries_lie_in_the_cache(source: Path, fake: Callable[[str], None]) -> None:
    fake('case "$TMPDIR" in */cpu/driver-*.making-*) echo object > "$out" ;; *) exit 1 ;; esac')
    first = cxx.driver_objects()
    first[0].write_bytes(b"")
    assert cxx.driver_objects() == first
    assert [path.read_text() for path in first] == ["object\n"] * len(first)


def test_no_compiler(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(KvdslError, match=r"no C\+\+ compiler found \(tried no-such-compiler\); install"):
        cxx.shared_library(source, "thing")


def test_refused_source(source: Path) -> None:
    source.write_text("this is no C++\n")
    with pytest.raises(KvdslError, match=r"the C\+\+ compiler failed: .*error.*log"):
        cxx.shared_library(source, "thing")
    assert "this is no C++" in (cache_folder() / "cpu" / "thing.log").read_text()


def test_folder_that_cannot_be_made(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVDSL_CACHE_DIR", str(source / "below-a-file"))
    with pytest.raises(KvdslError, match=r"cannot make the folder .*KVDSL_CACHE_DIR"):
        cxx.shared_library(source, "thing")


@pytest.mark.skipif(sys.platform == "win32", reason="folders have other modes there")
def test_read_only_folder_with_the_library_in_it_serves(source: Path) -> None:
    library = cxx.shared_library(source, "thing")
    folders = (library.parent, library.parent.parent)
    for folder in folders:
        folder.chmod(0o500)
    try:
        assert cxx.shared_library(source, "thing") == library
    finally:
        for folder in folders:
            folder.chmod(0o700)


@pytest.mark.parametrize("source", sorted(cxx.DRIVER.glob("*.cpp")), ids=lambda path: path.stem)
def test_the_driver_gives_no_warning(source: Path, tmp_path: Path) -> None:
    flags = ["-O1" if flag.startswith("-O") else flag for flag in cxx.FLAGS]
    command = [*cxx.compiler(), *flags, "-Werror", "-c", f"-I{cxx.INCLUDE}", str(source), "-o", str(tmp_path / "driver.o")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
