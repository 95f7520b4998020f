"""Building C++: once, in parallel, and what is said when it cannot be."""

from __future__ import annotations

import multiprocessing
import subprocess
import sys
from pathlib import Path

import pytest

from kvdsl.build import cxx
from kvdsl.build.cache import cache_folder
from kvdsl.errors import KvdslError

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
    said = capfd.readouterr().err
    assert said.count("\n") == 1
    assert "`thing`" in said
    assert cxx.shared_library(source, "thing") == library
    assert capfd.readouterr().err == ""


def test_another_source_is_another_library(source: Path) -> None:
    first = cxx.shared_library(source, "thing")
    source.write_text(SOURCE.replace("42", "43"))
    assert cxx.shared_library(source, "thing") != first


def _build(path: str) -> str:
    return str(cxx.shared_library(Path(path), "thing"))


def test_parallel_builds_do_not_meet(source: Path) -> None:
    with multiprocessing.get_context("spawn").Pool(4) as pool:
        made = pool.map(_build, [str(source)] * 4)
    assert len(set(made)) == 1
    left = [path.name for path in Path(made[0]).parent.iterdir()]
    assert left == [Path(made[0]).name], "nothing of a build may be left lying about"


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
    with pytest.raises(KvdslError, match=r"cannot make the cache folder .*KVDSL_CACHE_DIR"):
        cxx.shared_library(source, "thing")


@pytest.mark.skipif(sys.platform == "win32", reason="folders have other modes there")
def test_read_only_folder_with_the_library_in_it_serves(source: Path) -> None:
    library = cxx.shared_library(source, "thing")
    library.parent.chmod(0o500)
    try:
        assert cxx.shared_library(source, "thing") == library
    finally:
        library.parent.chmod(0o700)


@pytest.mark.parametrize("source", sorted(cxx.DRIVER.glob("*.cpp")), ids=lambda path: path.stem)
def test_the_driver_gives_no_warning(source: Path, tmp_path: Path) -> None:
    flags = ["-O1" if flag.startswith("-O") else flag for flag in cxx.FLAGS]
    command = [*cxx.compiler(), *flags, "-Werror", "-c", f"-I{cxx.INCLUDE}", str(source), "-o", str(tmp_path / "driver.o")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
