"""Where named models lie on this machine."""

from __future__ import annotations

from pathlib import Path

from kvdsl.build import store
from kvdsl.build.cache import user_folder
from kvdsl.diagnostics import did_you_mean, listed
from kvdsl.errors import KvdslError
from kvdsl.models import hub
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
    """Whether it is there whole, and what was made; see `kvdsl.build.store` on files that nobody has touched."""
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
    """What transformers is to load: the folder of a named model, the folder that the user gave, or an id of the hub.

    Look on this machine first. Query the hub only for names of the form owner/name.

    Raises:
        KvdslError: if there is no such folder, the named model is not here, the name is a folder's, too, or the hub does not answer.
    """
    if name in CATALOGUE:
        if Path(name).is_dir():
            which = f"write ./{name} for the folder, $(kvdsl models path {name}) for the model"
            raise KvdslError(f"`{name}` is a folder here and the name of a model: {which}")
        return str(model_folder(name))
    folder = _expanded(name)
    if folder.is_dir():
        if not (folder / "config.json").exists():
            raise KvdslError(f"{folder} holds no config.json: it is not the folder of a model")
        return str(folder)
    if folder.is_file():
        raise KvdslError(f"{folder} is a file; give the folder of a model")
    return _fetchable(name, folder)


def _expanded(name: str) -> Path:
    """A path in which `~` is the user's home."""
    try:
        return Path(name).expanduser()
    except RuntimeError as error:
        raise KvdslError(f"there is no model folder {name}: its home folder is not known") from error


def _fetchable(name: str, folder: Path) -> str:
    """An id that the hub can be asked for, or what came of it before."""
    near = _near(name, folder)
    if name.count("/") > 1 or name.startswith((".", "/", "~")):
        raise KvdslError(
            f"there is no model folder {name}; {near or 'give a folder with a config.json, or an id on the Hugging Face hub'}"
        )
    if hub.is_id(name) and hub.answers():
        return name
    here = hub.fetched(name)
    if here is not None:
        return str(here)
    if hub.is_id(name):
        why = "the Hugging Face hub does not answer" if near is None else f"{near} (the Hugging Face hub does not answer)"
        raise KvdslError(f"the model `{name}` is not on this machine: {why}")
    known = f"there are {listed(CATALOGUE)}" if len(CATALOGUE) > 1 else f"there is `{next(iter(CATALOGUE))}`"
    raise KvdslError(
        f"no model is called `{name}`; {near or f'{known}, folders, and ids on the Hugging Face hub, of the form owner/name'}"
    )


def _near(name: str, folder: Path) -> str | None:
    """The named model or the folder of a model that was perhaps meant."""
    try:
        beside = [str(path.parent) for path in folder.parent.glob("*/config.json")]
    except OSError:
        beside = []
    return did_you_mean(name, [*CATALOGUE, *(f"./{path}" if name.startswith("./") else path for path in beside)])
