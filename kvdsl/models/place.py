"""Where named models lie on this machine."""

from __future__ import annotations

from pathlib import Path

from kvdsl.build import store
from kvdsl.build.cache import user_folder
from kvdsl.errors import KvdslError
from kvdsl.models.catalogue import CATALOGUE, NamedModel, named

ELSEWHERE = "set KVDSL_DATA_DIR to a folder on a disk with room"
"""What to do about a data folder that cannot be used."""


def data_folder() -> Path:
    """`$KVDSL_DATA_DIR`, else kvdsl's folder in the user's data directory. It need not exist.

    Raises:
        KvdslError: as `user_folder`.
    """
    return user_folder("KVDSL_DATA_DIR", "user_data_dir")


def place(model: NamedModel) -> Path:
    """Where the model lies, or would lie."""
    return data_folder() / "models" / model.name


def here(model: NamedModel) -> bool:
    """Whether it is there whole, and what was made; see `kvdsl.build.stamps` on files that nobody has touched."""
    return store.flaw(place(model), known=True) is None


def flaw(model: NamedModel) -> str | None:
    """What keeps a model that is there from being used; None if it is whole, or not there at all."""
    return store.flaw(place(model), known=True) if place(model).exists() else None


def model_folder(name: str) -> Path:
    """The folder of a named model, as `AutoModelForCausalLM.from_pretrained` reads it.

    Raises:
        KvdslError: if there is no such name, or it is not on this machine (whole).
    """
    model = named(name)
    if (flaw := store.flaw(place(model), known=True)) is not None:
        state = f"is damaged ({flaw})" if place(model).exists() else "is not on this machine"
        raise KvdslError(f"the model `{name}` {state}: run `kvdsl models get {name}`")
    return place(model)


def place_of(name: str) -> str:
    """What transformers is to load: the folder of a named model, or the folder or hub id that the user gave.

    Raises:
        KvdslError: if there is no such folder, if the named model is not here, or if the name is a folder's, too.
    """
    if name not in CATALOGUE:
        folder = _expanded(name)
        _check_folder(name, folder)
        return str(folder) if folder.is_dir() else name
    if Path(name).is_dir():
        raise KvdslError(
            f"`{name}` is a folder here and the name of a model: write ./{name} for the folder, $(kvdsl models path {name}) for the model"
        )
    return str(model_folder(name))


def _expanded(name: str) -> Path:
    """A path in which `~` is the user's home."""
    try:
        return Path(name).expanduser()
    except RuntimeError as error:
        raise KvdslError(f"there is no model folder {name}: its home folder is not known") from error


def _check_folder(name: str, path: Path) -> None:
    """Tell a folder that is not there from a hub id, which has at most one slash and does not begin with a dot or a slash."""
    if path.is_dir():
        if not (path / "config.json").exists():
            raise KvdslError(f"{path} holds no config.json: it is not the folder of a model")
        return
    if path.is_file():
        raise KvdslError(f"{path} is a file; give the folder of a model")
    if name.count("/") > 1 or name.startswith((".", "/", "~")):
        raise KvdslError(
            f"there is no model folder {name}; give a folder with a config.json, or a model's id on the Hugging Face hub"
        )
