"""A pool's measured speed, put into its pool directories as `profiles/storage.json`, where connectors read it.

Facts: pods may write to a pool directory and know its names; in its sticky mode they cannot remove what we made, but
they can be first. What they mean: `profiles` is made before a pod sees the directory, reached without following links,
and used only if it is ours. A connector never sees half a file.
"""

import contextlib
import os
import uuid

from pykvcache_contract.api.fields import to_dict
from pykvcache_contract.api.node import Profile
from pykvcache_contract.errors import PoolUnavailableError
from pykvcache_sidecar.node.folders import READ_FLAGS, below_descriptor, open_folder, open_inside, parts_of
from pykvcache_storage.documents import create_document, read_document

PROFILES_DIRECTORY = "profiles"
STORAGE_PROFILE = "storage.json"


def put_profile(pool_directory: str, profile: Profile | None) -> None:
    """Write a profile into a pool directory, or remove the one there; writes only what is new.

    Raises:
        OSError: the disk refuses, or something else has the folder's name.
    """
    pool = open_folder("/", parts_of(pool_directory))
    try:
        folder = _made_folder(pool)
        try:
            _replace(folder, None if profile is None else to_dict(profile))
        finally:
            os.close(folder)
    finally:
        os.close(pool)


def _made_folder(pool: int) -> int:
    with contextlib.suppress(FileExistsError):
        os.mkdir(PROFILES_DIRECTORY, 0o755, dir_fd=pool)
    folder = open_inside(pool, PROFILES_DIRECTORY, flags=READ_FLAGS)
    if os.fstat(folder).st_uid != os.geteuid():
        os.close(folder)
        raise PermissionError(f"{PROFILES_DIRECTORY} is not the agent's; remove it, and it is made anew")
    return folder


def _replace(folder: int, document: "dict[str, object] | None") -> None:
    path = below_descriptor(folder, STORAGE_PROFILE)
    if document is None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        return
    with contextlib.suppress(FileNotFoundError, PoolUnavailableError):
        if read_document(path, remedy="") == document:
            return
    name = f".{STORAGE_PROFILE}.{uuid.uuid4().hex}"
    create_document(below_descriptor(folder, name), document)
    os.rename(name, STORAGE_PROFILE, src_dir_fd=folder, dst_dir_fd=folder)
