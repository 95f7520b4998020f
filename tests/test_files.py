"""Text files are written whole, or stay as they were."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from kvdsl.files import write_whole


def test_a_file_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_whole(path, "one\n")
    path.chmod(0o640)
    write_whole(path, "zwölf\n")
    assert path.read_bytes() == "zwölf\n".encode()
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert os.listdir(tmp_path) == ["file"]


def test_a_link_stays_one(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("file")
    write_whole(tmp_path / "link", "one")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "file").read_text() == "one"


def test_devices_are_written_to(tmp_path: Path) -> None:
    write_whole(Path("/dev/null"), "one")
    assert stat.S_ISCHR(Path("/dev/null").stat().st_mode)


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="nowhere/file"):
        write_whole(tmp_path / "nowhere" / "file", "one")


@pytest.mark.skipif(sys.platform == "win32", reason="needs limits of a process")
def test_a_full_disk_leaves_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("before")
    code = (
        "import resource\nfrom pathlib import Path\nfrom kvdsl.files import write_whole\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))\n"
        f"write_whole(Path({str(path)!r}), 'after' * 100)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stderr.splitlines()[-1] == f"OSError: [Errno 27] File too large: '{path}'"
    assert path.read_text() == "before"
    assert os.listdir(tmp_path) == ["file"]


@pytest.mark.skipif(sys.platform == "win32", reason="needs limits of a process")
def test_compile_on_a_full_disk_names_the_file(tmp_path: Path) -> None:
    code = (
        "import resource, sys\nfrom kvdsl.cli import main\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (500, 500))\n"
        "sys.exit(main(['compile', 'roco', '--out', 'made']))\n"
    )
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parent.parent), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1
    assert str(tmp_path / "made" / "roco") in done.stderr and "File too large" in done.stderr
    assert all(file.stat().st_size for file in (tmp_path / "made").rglob("*.*")), "what is there is whole"
