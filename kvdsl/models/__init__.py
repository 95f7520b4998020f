"""Language models by name: which exist, where they come from, and where they are on this machine.

Only `fetch.get` downloads, and only `kvdsl models get` and `make demo` call it.
"""

from kvdsl.models.catalogue import CATALOGUE, NamedModel, named
from kvdsl.models.place import flaw, here, model_folder, place_of

__all__ = ["CATALOGUE", "NamedModel", "flaw", "here", "model_folder", "named", "place_of"]
