"""Publication: the single step after which others see an offloaded block.

Facts: a crash may come between any two steps; two processes may write the same block at once; a reader may open the
file the moment its name exists. What they mean: the name must appear only when the content is complete, and must never
replace a complete file by an incomplete one. Therefore a block is written under a temporary name of this writer in the
same filesystem and then linked (or renamed without replacing) to its own name. The first writer wins; the loser's copy
is equal and is dropped. Without fsync a power cut may tear the content; the checksum finds that, so durability is
optional and integrity is not.
"""

import contextlib
import enum
import os

from pykvcache_contract.errors import BlockMissingError, PyKVCacheError, TransientError
from pykvcache_storage.block import FileAccess, translate, write_all
from pykvcache_storage.memory import Slot
from pykvcache_storage.probe import PublishMethod
from pykvcache_storage.reactor.operations import Close, Link, MakeDirectory, Open, Rename, Sync, Task, Touch, Unlink


class Published(enum.Enum):
    """What became of a written block."""

    FIRST = "first"
    ALREADY_THERE = "already there"


def publish_block(
    *,
    slot: Slot,
    temporary: str,
    target: str,
    modified_ns: int,
    access: FileAccess,
    method: PublishMethod,
    fsync: bool,
) -> Task[Published]:
    """Write the slot to `temporary` and publish it as `target`; leave no temporary file behind on any outcome.

    Args:
        slot: header and payload, complete; owned by the task.
        temporary: a name no other writer uses, in the pool's filesystem.
        modified_ns: modification time that the file has from its first moment (`contract: recency.py`).
        fsync: make the content durable first, and the name as far as the filesystem can.

    Raises (in the task):
        CapacityError, ReadOnlyError, TransientError: the block is not published by us; nothing is left.
    """
    try:
        yield from _write_temporary(slot, temporary, access=access, fsync=fsync)
        yield from _set_recency(temporary, modified_ns)
        outcome = yield from _give_name(temporary, target, method)
    except OSError as error:
        yield from _discard(temporary)
        raise _store_error(error, target) from error
    except PyKVCacheError:
        yield from _discard(temporary)
        raise
    if fsync:
        # The block is published now, whatever becomes of its folder: without the folder's fsync a power cut may lose
        # the name, and some filesystems cannot sync a folder at all.
        with contextlib.suppress(OSError):
            yield from _sync_directory(os.path.dirname(target))
    return outcome


def _store_error(error: OSError, target: str) -> PyKVCacheError:
    translated = translate(error, operation="store", path=target)
    # A missing folder (somebody emptied the pool) is no missing block.
    return TransientError(str(translated)) if isinstance(translated, BlockMissingError) else translated


def _write_temporary(slot: Slot, temporary: str, *, access: FileAccess, fsync: bool) -> Task[None]:
    descriptor = yield Open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | access.flags)
    try:
        yield from write_all(descriptor, slot)
        if fsync:
            yield Sync(descriptor)
    finally:
        yield Close(descriptor)


def _set_recency(temporary: str, modified_ns: int) -> Task[None]:
    # After the file was closed: a network filesystem sends what was written then, with times of its own. A filesystem
    # that refuses costs only the order of eviction.
    with contextlib.suppress(OSError):
        yield Touch(temporary, modified_ns)


def _give_name(temporary: str, target: str, method: PublishMethod) -> Task[Published]:
    try:
        yield from _name_once(temporary, target, method)
    except FileNotFoundError:
        yield from _make_parents(target)
        try:
            yield from _name_once(temporary, target, method)
        except FileExistsError:
            yield from _discard(temporary)
            return Published.ALREADY_THERE
    except FileExistsError:
        yield from _discard(temporary)
        return Published.ALREADY_THERE
    return Published.FIRST


def _name_once(temporary: str, target: str, method: PublishMethod) -> Task[None]:
    if method is PublishMethod.LINK:
        yield Link(temporary, target)
        yield from _discard(temporary)
    else:
        yield Rename(temporary, target, replace=method is PublishMethod.RENAME)


def _make_parents(target: str) -> Task[None]:
    """Create the two fan-out folders and the rank's folder, as far as they are missing."""
    second = os.path.dirname(target)
    first = os.path.dirname(second)
    for folder in (os.path.dirname(first), first, second):
        try:
            yield MakeDirectory(folder)
        except FileExistsError:
            continue


def _sync_directory(folder: str) -> Task[None]:
    descriptor = yield Open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield Sync(descriptor)
    finally:
        yield Close(descriptor)


def _discard(temporary: str) -> Task[None]:
    # A name that cannot be removed stays until a start-up sweeps it; no published block is affected.
    with contextlib.suppress(OSError):
        yield Unlink(temporary)
