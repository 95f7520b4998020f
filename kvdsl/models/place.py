"""Where named models lie on this machine."""

from __future__ import annotations

import os
from pathlib import Path

from kvdsl.build import store
from kvdsl.errors import KvdslError
from kvdsl.models.catalogue import NamedModel, named


def data_folder() -> Path:
    """`$KVDSL_DATA_DIR`, else kvdsl's folder in the user's data directory. It need not exist."""
    chosen = os.environ.get("KVDSL_DATA_DIR")
    if chosen:
        return Path(chosen).expanduser()
    import platformdirs

    return Path(platformdirs.user_data_dir("kvdsl", appauthor=False))


def place(model: NamedModel) -> Path:
    """Where the model lies, or would lie."""
    return data_folder() / "models" / model.name


def here(model: NamedModel) -> bool:
    """Whether it is there whole, and what was made; see `kvdsl.build.stamps` on files that nobody has touched."""
    return store.flaw(place(model), known=True) is None


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
