"""The language half works where torch and transformers are absent: an editor, a pre-commit hook. What needs them says so in a line."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import zipfile
from importlib import metadata
from pathlib import Path

import pytest

from tests.packaging.test_installed import ROOT, build, outside

pytestmark = pytest.mark.nightly

BESIDE = ("click", "filelock", "jinja2", "lark", "numpy", "platformdirs", "pydantic", "rich")
"""What the language half stands on; of kvdsl's other dependencies, torch and transformers, there is nothing."""
ABSENT = ("torch", "transformers", "triton", "kvdsl_lab")


def needed(names: tuple[str, ...]) -> dict[str, metadata.Distribution]:
    """Installed distributions by name: these, and whatever they require."""
    found: dict[str, metadata.Distribution] = {}
    waiting = list(names)
    while waiting:
        name = re.sub(r"[-_.]+", "-", waiting.pop()).lower()
        if name in found:
            continue
        try:
            found[name] = metadata.distribution(name)
        except metadata.PackageNotFoundError:  # required elsewhere: for another Python, on another system
            assert name not in names
            continue
        required = (one for one in found[name].requires or () if "extra ==" not in one)
        waiting += [match[0] for one in required if (match := re.match(r"[\w.-]+", one))]
    return found


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of an environment that has kvdsl's wheel and what the language half stands on, and nothing else."""
    folder = tmp_path_factory.mktemp("language")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder / "venv")], check=True)
    (site,) = (folder / "venv").glob("lib/python*/site-packages")
    with zipfile.ZipFile(build("wheel", ROOT, folder / "dist")) as archive:
        archive.extractall(site)
    for distribution in needed(BESIDE).values():
        for top in {file.parts[0] for file in distribution.files or () if ".." not in file.parts}:
            if top != "__pycache__" and not (site / top).exists():
                (site / top).symlink_to(Path(str(distribution.locate_file(top))))
    return folder / "venv" / "bin" / "python"


def run(python: Path, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    variables = outside() | {"KVDSL_CACHE_DIR": str(python.parents[2] / "cache")}
    return subprocess.run([python, *arguments], cwd=folder, env=variables, capture_output=True, text=True, check=False)


def kvdsl(python: Path, folder: Path, line: str) -> subprocess.CompletedProcess[str]:
    return run(python, folder, "-m", "kvdsl", *line.split())


def test_they_are_absent(python: Path, tmp_path: Path) -> None:
    code = f"from importlib.util import find_spec; print(*[name for name in {ABSENT!r} if find_spec(name)])"
    assert run(python, tmp_path, "-c", code).stdout.split() == []


@pytest.mark.parametrize(
    "line",
    [
        "--help", "--version", "check mine.kv", "check roco --format json", "check mine_test.kv", "fmt mine.kv", "fmt --check mine.kv",
        "explain mine.kv", "explain roco --json", "explain KV0301", "compile mine.kv", "compile roco h2o quest adakv",
        "compile roco --emit plan", "compile roco --emit ir", "test mine_test.kv", "list", "list --json", "run --help", "build --help",
    ],
)  # fmt: skip
def test_the_language_half(python: Path, tmp_path: Path, line: str) -> None:
    for stem in ("h2o", "h2o_test"):
        text = (ROOT / "policies" / f"{stem}.kv").read_text(encoding="utf-8")
        (tmp_path / f"{stem.replace('h2o', 'mine')}.kv").write_text(text, encoding="utf-8")
    done = kvdsl(python, tmp_path, line)
    assert done.returncode == 0, done.stderr
    assert done.stdout + done.stderr or line.startswith("fmt")
    if "json" in line:
        json.loads(done.stdout)


def test_what_it_compiles_is_what_others_compile(python: Path, tmp_path: Path) -> None:
    assert kvdsl(python, tmp_path, "compile roco").returncode == 0
    for file in (tmp_path / "generated" / "roco").iterdir():
        assert file.read_bytes() == (ROOT / "generated" / "roco" / file.name).read_bytes()


@pytest.mark.parametrize("line", ["run --model nowhere --prompt x", "run --model nowhere --prompt x --json", "build roco"])
def test_what_needs_torch_says_so(python: Path, tmp_path: Path, line: str) -> None:
    done = kvdsl(python, tmp_path, line)
    assert done.returncode == 2
    assert "torch, which is not installed" in done.stderr.splitlines()[0]
    assert len(done.stderr.splitlines()) <= 2


def test_doctor_says_what_is_missing(python: Path, tmp_path: Path) -> None:
    done = kvdsl(python, tmp_path, "doctor --json")
    assert done.returncode == 1
    checks = {check["name"]: check for check in json.loads(done.stdout)["checks"] if check["group"] == "packages"}
    assert [name for name in checks if checks[name]["ok"] is False] == ["torch", "transformers"]


@pytest.mark.parametrize(
    "code",
    ["import kvdsl; kvdsl.load('h2o')", "from kvdsl.policies import H2OCache", "import kvdsl; kvdsl.load_model('nowhere')"],
)
def test_python_says_so_too(python: Path, tmp_path: Path, code: str) -> None:
    done = run(python, tmp_path, "-c", code)
    assert done.returncode == 1
    assert re.fullmatch(r"kvdsl\.errors\.KvdslError: .* needs torch, which is not installed: pip install torch", last(done))


@pytest.mark.parametrize("call", ["load_reference_model()", "book_text()"])
def test_the_model_and_the_books_come_with_the_laboratory(python: Path, tmp_path: Path, call: str) -> None:
    done = run(python, tmp_path, "-c", f"import kvdsl.assets; kvdsl.assets.{call}")
    assert "kvdsl-lab, which is not installed: pip install 'kvdsl[lab]'" in last(done)


def last(done: subprocess.CompletedProcess[str]) -> str:
    return done.stderr.splitlines()[-1]
