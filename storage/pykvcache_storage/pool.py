"""A pool directory: is it ours, may we use it, and the folder of one fingerprint in it.

Runs at start-up and in command-line tools, never per block. Several processes may open one pool at the same moment:
pool.json is created by the first and read by all. A directory that holds other people's files is never adopted,
because eviction and sweeping delete files. The pool directory itself may be a symbolic link (administrators move
pools between disks); nothing inside it may be one.

Errors: `PoolUnavailableError` names the operation, the directory, the cause and the remedy. A pool that can be read
but not written is no error: `Pool.writable` is False and `Pool.read_only_reason` says why.
"""

import errno
import os
import shlex
import stat
import uuid
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

from pykvcache_contract.errors import PoolUnavailableError, ReadOnlyError
from pykvcache_contract.keys import Fingerprint
from pykvcache_contract.names import UNAVAILABLE_MARKER
from pykvcache_contract.paths import (
    CARE_LOCK_FILE,
    CONFIG_FILE,
    FINGERPRINT_DIRECTORY,
    FORMAT_VERSION,
    POOL_FILE,
    QUARANTINE_DIRECTORY,
    TEMPORARY_DIRECTORY,
    USAGE_FILE,
    fingerprint_directory,
)
from pykvcache_storage.documents import create_document, read_document
from pykvcache_storage.sharing import share_file, share_folder

_OUR_NAMES = {POOL_FILE, USAGE_FILE, CARE_LOCK_FILE, "profiles", "lost+found"}
_NOT_WRITABLE = {errno.EROFS, errno.EACCES, errno.EPERM}
_FULL = {errno.ENOSPC, errno.EDQUOT}
_REASON_BYTES_MAX = 1024


class NotYetAPoolError(PoolUnavailableError):
    """An empty directory, which whoever looks after it, or the first vLLM that may, makes a pool."""


@dataclass(frozen=True, slots=True)
class Pool:
    """An opened pool directory.

    Args:
        directory: absolute path.
        uid: 32 hexadecimal digits, made when the pool was created.
        created: when that was, as an ISO 8601 time in UTC.
        filesystem_id: of the filesystem it was created on, for people; it may change at a reboot or a move.
        writable: whether blocks can be stored; loads work in any case.
        read_only_reason: why not; empty if writable.
    """

    directory: str
    uid: str
    created: str
    filesystem_id: str
    writable: bool
    read_only_reason: str

    def prepare_fingerprint(self, fingerprint: Fingerprint, config: dict[str, Any]) -> str:
        """Create the fingerprint's folder, its config.json and its tmp and quarantine folders; return the folder.

        In a pool that is not writable nothing is created: a folder that is missing just holds no blocks.

        Args:
            config: JSON-serialisable description of what the fingerprint covers, for people (model, dtype …).

        Raises:
            PoolUnavailableError: another fingerprint with the same first digits, a link, or a damaged config.json.
            ReadOnlyError: the pool has become read-only.
        """
        folder = os.path.join(self.directory, fingerprint_directory(fingerprint))
        path = os.path.join(folder, CONFIG_FILE)
        if self.writable:
            _make_directory(folder)
            share_folder(folder, pool_directory=self.directory)
            for name in (TEMPORARY_DIRECTORY, QUARANTINE_DIRECTORY):
                _make_directory(os.path.join(folder, name))
            document = {"format_version": FORMAT_VERSION, "fingerprint": fingerprint, "identity": config}
            _create(path, document)
        elif not os.path.lexists(path):
            return folder
        _check_fingerprint(path, fingerprint)
        return folder


def open_pool(directory: str, *, create: bool, for_writing: bool | None = None) -> Pool:
    """Open a pool directory.

    Args:
        create: make an empty directory a pool by writing its pool.json. The directory itself is never created: a
            mistyped path or a missing mount must not go unnoticed.
        for_writing: test with a real file whether it is writable, rather than ask for permissions; None: as `create`.

    Raises:
        PoolUnavailableError: missing, no directory, unreadable, foreign, damaged or of another format version; or what
            a node agent mounts in its place while the pool is not ready, with the agent's reason.
        NotYetAPoolError: empty, and `create` is False.
    """
    directory = os.path.abspath(directory)
    _check_directory(directory)
    identity = read_identity(directory)
    if identity is None:
        refuse_marker(directory)
        refuse_foreign(directory)
        if not create:
            raise NotYetAPoolError(
                f"{directory} is not a cache pool: it has no {POOL_FILE}. Check the path, and whether its disk is "
                "mounted; the first sidecar, node agent or vLLM that may do so makes an empty directory a pool."
            )
        identity = _create_identity(directory)
    reason = _why_not_writable(directory, test=create if for_writing is None else for_writing)
    return Pool(
        directory=directory,
        uid=identity["uid"],
        created=identity["created"],
        filesystem_id=identity["filesystem_id"],
        writable=not reason,
        read_only_reason=reason,
    )


def _check_directory(directory: str) -> None:
    quoted = shlex.quote(directory)
    try:
        mode = os.stat(directory).st_mode
    except (FileNotFoundError, NotADirectoryError) as error:
        what = "is a symbolic link to nothing" if os.path.islink(directory) else "does not exist"
        raise PoolUnavailableError(
            f"open the pool: {directory} {what}. Create it: mkdir -p {quoted} (or mount its disk first)"
        ) from error
    except OSError as error:
        raise PoolUnavailableError(
            f"open the pool: {directory}: {error.strerror}. Choose another directory."
        ) from error
    if not stat.S_ISDIR(mode):
        raise PoolUnavailableError(f"open the pool: {directory} is not a directory. Choose a directory.")
    if not os.access(directory, os.R_OK | os.X_OK):
        raise PoolUnavailableError(
            f"open the pool: {directory} is not readable for user {os.geteuid()}. "
            f"Give access: chown -R {os.geteuid()} {quoted}, or set fsGroup in the pod."
        )


def refuse_marker(directory: str) -> None:
    """Raise a PoolUnavailableError if this is the empty directory that stands for a pool that is not ready."""
    try:
        # Whoever may write here may put a pipe in its place, and opening that would wait for ever.
        file = os.open(os.path.join(directory, UNAVAILABLE_MARKER), os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
    except OSError:
        return
    try:
        reason = os.read(file, _REASON_BYTES_MAX).decode(errors="replace").strip()
    except OSError as error:
        reason = f"unreadable: {error.strerror}"
    finally:
        os.close(file)
    raise PoolUnavailableError(
        f"the pool was not ready on this node when the pod started ({reason}). vLLM runs without it; once "
        "`kubectl get kvcachenodes` shows it ready, delete the pod to start one with it."
    )


def read_identity(directory: str) -> dict[str, Any] | None:
    """Return the checked content of pool.json, None if there is none.

    Raises:
        PoolUnavailableError: unreadable, damaged or of another format version.
    """
    path = os.path.join(directory, POOL_FILE)
    remedy = f"Remove it (rm {shlex.quote(path)}): the next start writes a new one, and the blocks stay usable."
    try:
        identity = read_document(path, remedy=remedy)
    except FileNotFoundError:
        return None
    version = identity.get("format_version")
    if isinstance(version, int) and version != FORMAT_VERSION:
        raise PoolUnavailableError(
            f"{directory} has format version {version}, this program reads and writes version {FORMAT_VERSION}. "
            "Use another directory, or the py-kvcache release that made this one."
        )
    fields = ("uid", "created", "filesystem_id")
    if version != FORMAT_VERSION or not all(isinstance(identity.get(name), str) for name in fields):
        raise PoolUnavailableError(f"{path} is damaged: a field is missing or wrong. {remedy}")
    return identity


def refuse_foreign(directory: str) -> None:
    """Raise a PoolUnavailableError if a directory holds anything that no pool holds."""
    with os.scandir(directory) as entries:
        for entry in entries:
            name = entry.name
            if not (name.startswith(".") or name in _OUR_NAMES or FINGERPRINT_DIRECTORY.fullmatch(name)):
                raise PoolUnavailableError(
                    f"{directory} holds other files ({name!r}) and no {POOL_FILE}; py-kvcache does not adopt it, "
                    f"because it deletes what it evicts. Use an empty directory: mkdir {shlex.quote(directory)}/kvcache"
                )


def _create_identity(directory: str) -> dict[str, Any]:
    document = {
        "format_version": FORMAT_VERSION,
        "uid": uuid.uuid4().hex,
        "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "filesystem_id": f"{os.statvfs(directory).f_fsid:016x}",
    }
    try:
        create_document(os.path.join(directory, POOL_FILE), document)
    except OSError as error:
        raise PoolUnavailableError(
            f"{directory} is empty and cannot become a pool: {error.strerror}. {_remedy(directory, error)}"
        ) from error
    share_file(os.path.join(directory, POOL_FILE))
    identity = read_identity(directory)
    if identity is None:
        raise PoolUnavailableError(f"{directory}: {POOL_FILE} was removed while it was being created. Start again.")
    return identity


def _why_not_writable(directory: str, *, test: bool) -> str:
    """Return an empty string if files can be created here. `test` creates one; otherwise the permissions are asked."""
    if not test:
        return "" if os.access(directory, os.W_OK) else f"{directory} is not writable for user {os.geteuid()}"
    path = os.path.join(directory, f".writable.{uuid.uuid4().hex}")
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
        os.unlink(path)
    except OSError as error:
        # A full disk is no property of the pool: single stores fail until there is room again.
        return "" if error.errno in _FULL else f"{directory}: {error.strerror}. {_remedy(directory, error)}"
    return ""


def _remedy(directory: str, error: OSError) -> str:
    if error.errno == errno.EROFS:
        return "Mount it writable: mount -o remount,rw, or readOnly: false in the pod."
    if error.errno in _NOT_WRITABLE:
        return f"Give user {os.geteuid()} access: chown -R {os.geteuid()} {shlex.quote(directory)}, or set fsGroup."
    return "Free some space." if error.errno in _FULL else "Check the disk."


def _make_directory(path: str) -> None:
    try:
        os.mkdir(path)
    except FileExistsError:
        if not stat.S_ISDIR(os.lstat(path).st_mode):
            raise PoolUnavailableError(f"{path} is a link or a file, not a directory. Remove it: rm {path}") from None
    except OSError as error:
        raise _translate(path, error) from error


def _create(path: str, document: dict[str, Any]) -> None:
    if os.path.lexists(path):
        return
    try:
        create_document(path, document)
    except OSError as error:
        raise _translate(path, error) from error


def _translate(path: str, error: OSError) -> PoolUnavailableError | ReadOnlyError:
    kind = ReadOnlyError if error.errno in _NOT_WRITABLE else PoolUnavailableError
    return kind(f"cannot create {path}: {error.strerror}. {_remedy(path, error)}")


def _check_fingerprint(path: str, fingerprint: Fingerprint) -> None:
    remedy = f"Remove it (rm {shlex.quote(path)}): the next start writes a new one."
    found = read_document(path, remedy=remedy).get("fingerprint")
    if not isinstance(found, str):
        raise PoolUnavailableError(f"{path} is damaged: it names no fingerprint. {remedy}")
    if found != fingerprint:
        raise PoolUnavailableError(
            f"{path} belongs to fingerprint {found}, ours is {fingerprint}: the first digits are equal by chance. "
            "Use another pool directory for one of the two models."
        )
