"""kvdsl and kvdsl-lab work from a wheel, from an editable install and from a plain checkout alike, and compile to the same files."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import kvdsl
import kvdsl_lab
import kvdsl_lab.cli

ROOT = Path(__file__).parent.parent.parent
NEEDED = [
    "grammar/kv.lark",
    "grammar/prelude.kv",
    "templates/python/cache.py.jinja",
    "policies/roco.kv",
    "policies/roco_test.kv",
    "policies/gallery/keydiff.kv",
]

pytest.importorskip("hatchling")


def build(kind: str, source: Path, folder: Path) -> Path:
    """An archive of the project: a `wheel`, `wheel:editable` or `sdist`."""
    command = [sys.executable, "-m", "hatchling", "build", "-t", kind, "-d", str(folder)]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (made,) = folder.iterdir()
    return made


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("wheel", ROOT, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("sdist", ROOT, tmp_path_factory.mktemp("sdist"))


@pytest.fixture(scope="module")
def lab_wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("wheel", ROOT / "lab", tmp_path_factory.mktemp("lab-wheel"))


def environment(folder: Path, *wheels: Path) -> Path:
    """A virtual environment's Python that has the wheels, and sees what this one has installed, but no other kvdsl."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    (site,) = folder.glob("lib/python*/site-packages")
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(site)
    # A path that a .pth file adds is searched, but .pth files in it (such as this environment's own kvdsl) are not read.
    others = [path for path in sys.path if "site-packages" in path]
    (site / "others.pth").write_text("\n".join(others) + "\n")
    return folder / "bin" / "python"


def outside() -> dict[str, str]:
    """The variables of a process that does not see this checkout."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


def run(python: str | Path, folder: Path, *arguments: str, **variables: str) -> str:
    done = subprocess.run(
        [str(python), *arguments], cwd=folder, env=outside() | variables, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def works(python: str | Path, folder: Path, home: Path, **variables: str) -> None:
    """What must work wherever kvdsl comes from; `home` is where its code has to lie."""
    where = run(python, folder, "-c", "import kvdsl; print(kvdsl.__file__, kvdsl.__version__)", **variables).split()
    assert where == [str(home / "kvdsl" / "__init__.py"), kvdsl.__version__]
    assert "roco " in run(python, folder, "-m", "kvdsl", "list", **variables)
    run(python, folder, "-m", "kvdsl", "compile", "roco", "vatp_h2o", **variables)
    run(sys.executable, folder, "-m", "kvdsl", "compile", "--check", "roco", "vatp_h2o", PYTHONPATH=str(ROOT))
    code = "from generated.roco import RoCoCache; print(RoCoCache.spec.cpu_source.exists())"
    assert run(python, folder, "-c", code, **variables) == "True\n"
    code = "from kvdsl.build.cxx import DRIVER as d, INCLUDE as i; print((d / 'decode.cpp').exists() and (i / 'kvdsl/decode.hpp').exists())"
    assert run(python, folder, "-c", code, **variables) == "True\n"


def lab_works(python: str | Path, folder: Path, home: Path, **variables: str) -> None:
    """The same of the laboratory."""
    where = run(python, folder, "-c", "import kvdsl_lab; print(kvdsl_lab.__file__)", **variables)
    assert where == f"{home / 'kvdsl_lab' / '__init__.py'}\n"
    code = "import kvdsl_lab.assets as a; a.check_digests(a.reference_model_path()); print(len(a.book_text()) > 1000)"
    assert run(python, folder, "-c", code, **variables) == "True\n"
    listed = run(python, folder, "-m", "kvdsl", "--help", **variables)
    assert all(f"\n  {name} " in listed for name in kvdsl_lab.cli.COMMANDS)
    code = "import kvdsl_lab.cli as lab, kvdsl.cli as cli; print([cli.main([name, '--help']) for name in lab.COMMANDS])"
    shown = run(python, folder, "-c", code, **variables)
    assert all(f"kvdsl {name}" in shown for name in kvdsl_lab.cli.COMMANDS)
    assert shown.splitlines()[-1] == str([0] * len(kvdsl_lab.cli.COMMANDS))


def test_a_wheel(wheel: Path, tmp_path: Path) -> None:
    """Alone, without the laboratory: that is named where it is asked for."""
    python = environment(tmp_path / "venv", wheel)
    (site,) = (tmp_path / "venv").glob("lib/python*/site-packages")
    works(python, tmp_path, site)
    code = "from kvdsl.policies import H2OCache; print(H2OCache.__name__)"
    assert run(python, tmp_path, "-c", code, KVDSL_CACHE_DIR=str(tmp_path / "cache")) == "H2OCache\n"
    assert "pip install 'kvdsl[lab]'" in run(python, tmp_path, "-m", "kvdsl", "--help")
    for words in (["bench", "decode"], ["eval", "ppl"], ["run", "--policy", "full"]):
        done = subprocess.run([python, "-m", "kvdsl", *words], cwd=tmp_path, env=outside(), capture_output=True, text=True)
        assert done.returncode == 2
        assert "pip install 'kvdsl[lab]'" in done.stderr
        assert len(done.stderr.splitlines()) <= 2


def test_the_laboratory_beside_it(wheel: Path, lab_wheel: Path, tmp_path: Path) -> None:
    python = environment(tmp_path / "venv", wheel, lab_wheel)
    (site,) = (tmp_path / "venv").glob("lib/python*/site-packages")
    lab_works(python, tmp_path, site)


def test_an_editable_install(tmp_path: Path) -> None:
    pytest.importorskip("editables")
    wheels = build("wheel:editable", ROOT, tmp_path / "dist"), build("wheel:editable", ROOT / "lab", tmp_path / "lab-dist")
    python = environment(tmp_path / "venv", *wheels)
    works(python, tmp_path, ROOT)
    lab_works(python, tmp_path, ROOT / "lab")


def test_a_plain_checkout(tmp_path: Path) -> None:
    """Without any metadata: kvdsl looks for the laboratory on the path, too."""
    paths = os.pathsep.join([str(ROOT), str(ROOT / "lab")])
    works(sys.executable, tmp_path, ROOT, PYTHONPATH=paths)
    lab_works(sys.executable, tmp_path, ROOT / "lab", PYTHONPATH=paths)


def test_what_a_wheel_holds(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        metadata = archive.read(next(name for name in names if name.endswith("dist-info/METADATA"))).decode()
        entry_points = archive.read(next(name for name in names if name.endswith("entry_points.txt"))).decode()
    assert {f"kvdsl/_data/{name}" for name in NEEDED} <= set(names)
    assert {"kvdsl/py.typed", "kvdsl/runtime/cpu/include/kvdsl/decode.hpp"} <= set(names)
    assert all(name.startswith(("kvdsl/", f"kvdsl-{kvdsl.__version__}.dist-info/")) for name in names)
    assert not [name for name in names if "__pycache__" in name or name.endswith((".so", ".pyc"))]
    assert "License-Expression: Apache-2.0" in metadata
    assert "kvdsl = kvdsl.cli:main" in entry_points
    assert wheel.stat().st_size <= 2**20


def test_what_the_wheel_of_the_laboratory_holds(lab_wheel: Path) -> None:
    with zipfile.ZipFile(lab_wheel) as archive:
        names = archive.namelist()
        metadata = archive.read(next(name for name in names if name.endswith("dist-info/METADATA"))).decode()
        entry_points = archive.read(next(name for name in names if name.endswith("entry_points.txt"))).decode()
    assert {
        "kvdsl_lab/py.typed", "kvdsl_lab/assets/reference_model/model.safetensors", "kvdsl_lab/eval/trace.html.jinja",
        "kvdsl_lab/bench/read.cpp", "kvdsl_lab/reproduce/variants/roco_prompt.kv",
    } <= set(names)  # fmt: skip
    version = kvdsl_lab.__version__
    assert all(name.startswith(("kvdsl_lab/", f"kvdsl_lab-{version}.dist-info/")) for name in names)
    assert not [name for name in names if "__pycache__" in name or name.endswith((".so", ".pyc"))]
    assert f"Version: {kvdsl.__version__}\n" in metadata
    assert f"Requires-Dist: kvdsl=={kvdsl.__version__}\n" in metadata
    assert "[kvdsl.commands]\nlab = kvdsl_lab.cli:COMMANDS" in entry_points
    assert lab_wheel.stat().st_size < 40 * 2**20


def test_what_an_sdist_holds(sdist: Path, wheel: Path, tmp_path: Path) -> None:
    """The sources and the tests, nothing built; and a wheel made from it is the wheel made from the checkout."""
    top = f"kvdsl-{kvdsl.__version__}"
    with tarfile.open(sdist) as archive:
        names = archive.getnames()
        archive.extractall(tmp_path / "source", **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))  # type: ignore[arg-type]
    others = (
        "pyproject.toml",
        "Makefile",
        "README.md",
        "LICENSE",
        "tests/conftest.py",
        "kvdsl/py.typed",
        "lab/pyproject.toml",
        "results/search/smollm2_128/search.json",  # which tests and documents read
    )
    for name in (*NEEDED, *others, "lab/kvdsl_lab/py.typed"):
        assert f"{top}/{name}" in names
    assert not [name for name in names if "/.venv" in name or "__pycache__" in name or "_cache/" in name]
    again = build("wheel", tmp_path / "source" / top, tmp_path / "dist")
    with zipfile.ZipFile(again) as second, zipfile.ZipFile(wheel) as first:
        assert sorted(second.namelist()) == sorted(first.namelist())
