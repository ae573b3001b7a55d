"""What a fingerprint's folder says about itself: its whole fingerprint, its model, and when it was last touched."""

import contextlib
import os
from dataclasses import dataclass
from typing import Any

from pykvcache_contract.errors import PoolUnavailableError
from pykvcache_contract.keys import Fingerprint
from pykvcache_contract.paths import CONFIG_FILE, TEMPORARY_DIRECTORY
from pykvcache_storage.documents import read_document

UNKNOWN_MODEL = "?"


@dataclass(frozen=True, slots=True)
class Description:
    """What config.json says.

    Args:
        fingerprint: whole; None if config.json is missing, damaged or another folder's, and `problem` then says so.
    """

    fingerprint: Fingerprint | None
    model: str = UNKNOWN_MODEL
    problem: str = ""


def describe(pool_directory: str, directory: str) -> Description:
    """Read the config.json of a fingerprint's folder; never raises for what is in it."""
    path = os.path.join(pool_directory, directory, CONFIG_FILE)
    try:
        document = read_document(path, remedy="Remove it: the next vLLM that uses this fingerprint writes a new one.")
    except FileNotFoundError:
        problem = f"{path} is missing: the next vLLM that uses this fingerprint writes a new one."
        return Description(None, problem=problem)
    except PoolUnavailableError as error:
        return Description(None, problem=str(error))
    fingerprint = document.get("fingerprint")
    if not isinstance(fingerprint, str) or not fingerprint.startswith(directory):
        return Description(None, problem=f"{path} names another fingerprint than its folder.")
    return Description(Fingerprint(fingerprint), _model(document.get("identity")))


def touched_seconds(pool_directory: str, directory: str) -> float:
    """Return when a vLLM last prepared the folder or created a temporary file in it (Unix time), 0.0 if unknown.

    A fingerprint without a block is not unused if a vLLM has just started with it.
    """
    newest = 0.0
    for name in (CONFIG_FILE, TEMPORARY_DIRECTORY):
        with contextlib.suppress(OSError):
            newest = max(newest, os.stat(os.path.join(pool_directory, directory, name), follow_symlinks=False).st_mtime)
    return newest


def _model(identity: Any) -> str:
    """Return the model in what the connector wrote: at the top, or below `engine`."""
    for place in (identity, identity.get("engine") if isinstance(identity, dict) else None):
        if isinstance(place, dict) and isinstance(place.get("model"), str):
            return str(place["model"])
    return UNKNOWN_MODEL
