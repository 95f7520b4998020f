"""Language models by name: what can be had, from where, and where it lies on this machine.

Nothing here downloads unasked: `fetch.get` does, and only `kvdsl models get` and `make demo` call it.
"""

from kvdsl.models.catalogue import CATALOGUE, NamedModel, named
from kvdsl.models.place import flaw, here, model_folder, place_of

__all__ = ["CATALOGUE", "NamedModel", "flaw", "here", "model_folder", "named", "place_of"]
