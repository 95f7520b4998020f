"""The Hugging Face hub: its local cache, and whether it responds."""

from __future__ import annotations

import os
import re
import socket
import threading
from functools import cache
from importlib import util
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import getproxies

SECONDS = 1.0
"""Seconds to wait for the hub; transformers would retry for more than a minute."""

_PART = "[A-Za-z0-9][A-Za-z0-9._-]*"


def is_id(name: str) -> bool:
    """Return whether a name has the form owner/name."""
    return re.fullmatch(f"{_PART}/{_PART}", name) is not None


def fetched(name: str) -> Path | None:
    """Return the folder of a model fetched from the hub earlier; files that were never requested may be missing."""
    if util.find_spec("huggingface_hub") is None:
        return None
    from huggingface_hub import constants

    if not re.fullmatch(rf"(?:{_PART}/)?{_PART}", name):
        return None
    if not Path(
        constants.HF_HUB_CACHE, f"models--{name.replace('/', '--')}"
    ).is_dir():  # checked first, because the lookup itself has a slow import
        return None
    from huggingface_hub import try_to_load_from_cache

    config = try_to_load_from_cache(name, "config.json")
    return Path(config).parent if isinstance(config, str) else None


def host() -> tuple[str, int]:
    """Return the host and port of the hub, of the one that the environment names, or of the proxy before it."""
    hub = urlsplit(os.environ.get("HF_ENDPOINT") or "https://huggingface.co")
    proxy = urlsplit(getproxies().get(hub.scheme, ""))
    asked = proxy if proxy.hostname else hub
    return asked.hostname or "huggingface.co", asked.port or (80 if asked.scheme == "http" else 443)


def answers() -> bool:
    """Return whether the hub accepts connections, within a second; False if HF_HUB_OFFLINE is set."""
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in {"1", "ON", "YES", "TRUE"}:
        return False
    return _listens(*host())


@cache
def _listens(name: str, port: int) -> bool:
    found: list[bool] = []

    def connect() -> None:
        try:
            socket.create_connection((name, port), SECONDS).close()
            found.append(True)
        except OSError:
            found.append(False)

    # Resolving the address has no timeout, so this is a daemon thread.
    thread = threading.Thread(target=connect, daemon=True)
    thread.start()
    thread.join(SECONDS)
    return found == [True]
