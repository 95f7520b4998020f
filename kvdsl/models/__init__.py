"""Language models by name: which exist, where they come from, and where they are on this machine.

Only `fetch.get` downloads, and only `kvdsl models get` and `make demo` call it.
"""

from __future__ import annotations

from pathlib import Path

from kvdsl.build import store, user_folder
from kvdsl.diagnostics import did_you_mean, listed
from kvdsl.errors import KvdslError
from kvdsl.models import hub
from kvdsl.models.catalogue import CATALOGUE, NamedModel, named

__all__ = [
    "CATALOGUE",
    "ELSEWHERE",
    "NamedModel",
    "data_folder",
    "flaw",
    "here",
    "model_folder",
    "named",
    "place",
    "place_of",
]

ELSEWHERE = "set KVDSL_DATA_DIR to a folder on a disk with room"
"""What to do about an unusable data folder."""


def data_folder() -> Path:
    """Return `$KVDSL_DATA_DIR`, else kvdsl's folder in the user's data directory. It need not exist.

    Raises:
        KvdslError: as in `user_folder`.
    """
    return user_folder("KVDSL_DATA_DIR", "user_data_dir")


def place(model: NamedModel) -> Path:
    """Return the folder of a model, whether it exists or not."""
    return data_folder() / "models" / model.name


def here(model: NamedModel) -> bool:
    """Return whether a model is there and sound; unchanged files are not read again (`kvdsl.build.store`)."""
    return store.flaw(place(model), known=True) is None


def flaw(model: NamedModel) -> str | None:
    """Return why an existing model is unusable; None if it is sound or missing."""
    return store.flaw(place(model), known=True) if place(model).exists() else None


def model_folder(name: str) -> Path:
    """Return the folder of a named model for `AutoModelForCausalLM.from_pretrained`.

    Raises:
        KvdslError: for an unknown name, or a model that is missing or damaged.
    """
    model = named(name)
    if (flaw := store.flaw(place(model), known=True)) is not None:
        state = f"is damaged ({flaw})" if place(model).exists() else "is not on this machine"
        raise KvdslError(f"the model `{name}` {state}: run `kvdsl models get {name}`")
    return place(model)


def place_of(name: str) -> str:
    """Return what transformers should load: the folder of a named model, the user's folder, or an id of the hub.

    This machine comes first. The hub is queried only for names of the form owner/name.

    Raises:
        KvdslError: if the folder or the named model is missing, the name is also a folder's, or the hub does not respond.
    """
    if name in CATALOGUE:
        if Path(name).is_dir():
            which = f"write ./{name} for the folder, $(kvdsl models path {name}) for the model"
            raise KvdslError(f"`{name}` is a folder here and the name of a model: {which}")
        return str(model_folder(name))
    folder = _expanded(name)
    if folder.is_dir():
        if not (folder / "config.json").exists():
            raise KvdslError(f"{folder} has no config.json, so it is not the folder of a model")
        return str(folder)
    if folder.is_file():
        raise KvdslError(f"{folder} is a file; use the folder of a model")
    return _fetchable(name, folder)


def _expanded(name: str) -> Path:
    """Expand `~` to the user's home."""
    try:
        return Path(name).expanduser()
    except RuntimeError as error:
        raise KvdslError(f"there is no model folder {name}: its home folder is unknown") from error


def _fetchable(name: str, folder: Path) -> str:
    """Return an id that the hub can resolve, or its folder from an earlier download."""
    near = _near(name, folder)
    if name.count("/") > 1 or name.startswith((".", "/", "~")):
        raise KvdslError(
            f"there is no model folder {name}; {near or 'use a folder with a config.json, or an id on the Hugging Face hub'}"
        )
    if hub.is_id(name) and hub.answers():
        return name
    here = hub.fetched(name)
    if here is not None:
        return str(here)
    if hub.is_id(name):
        why = "the Hugging Face hub does not respond" if near is None else f"{near} (the Hugging Face hub does not respond)"
        raise KvdslError(f"the model `{name}` is not on this machine: {why}")
    known = f"there are {listed(CATALOGUE)}" if len(CATALOGUE) > 1 else f"there is `{next(iter(CATALOGUE))}`"
    raise KvdslError(
        f"no model is called `{name}`; {near or f'{known}, folders, and ids on the Hugging Face hub, of the form owner/name'}"
    )


def _near(name: str, folder: Path) -> str | None:
    """Return the named model or model folder with a similar name."""
    try:
        beside = [str(path.parent) for path in folder.parent.glob("*/config.json")]
    except OSError:
        beside = []
    return did_you_mean(name, [*CATALOGUE, *(f"./{path}" if name.startswith("./") else path for path in beside)])
