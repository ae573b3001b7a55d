"""Every error of py-kvcache, sorted by what the caller must do about it.

A cache failure is a miss, never a failed request: only `ConfigurationError` may stop an engine, and only at start-up.
"""


class PyKVCacheError(Exception):
    """Root of all errors raised by py-kvcache."""


class ConfigurationError(PyKVCacheError, ValueError):
    """The user must change an option; the message says which one and to what."""


class PoolUnavailableError(PyKVCacheError):
    """The pool directory cannot be used (missing, foreign, another format); go on without the cache."""


class TransientError(PyKVCacheError):
    """The operation may succeed later (EIO, EMFILE, a timeout); it proves nothing about the data."""


class BlockMissingError(PyKVCacheError):
    """No such offloaded block: treat it as a miss."""


class CorruptBlockError(PyKVCacheError):
    """The block file is proved bad (header, length or checksum): quarantine it and treat it as a miss."""


class CapacityError(PyKVCacheError):
    """No room (pool capacity, ENOSPC, EDQUOT): skip this store."""


class ReadOnlyError(PyKVCacheError):
    """The pool cannot be written (EROFS, EACCES, EPERM): skip stores, loads may go on."""
