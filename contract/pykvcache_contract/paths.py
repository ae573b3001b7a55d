"""Where things lie in a pool directory (format v1, docs/format.md). Pure string work; touches no disk."""

import re

from pykvcache_contract.keys import FINGERPRINT_DIRECTORY_LENGTH, BlockKey, Fingerprint

FORMAT_VERSION = 1
POOL_FILE = "pool.json"
USAGE_FILE = "usage"
CARE_LOCK_FILE = "care.lock"
CONFIG_FILE = "config.json"
TEMPORARY_DIRECTORY = "tmp"
QUARANTINE_DIRECTORY = "quarantine"
BLOCK_SUFFIX = ".kvb"

FINGERPRINT_DIRECTORY = re.compile(rf"[0-9a-f]{{{FINGERPRINT_DIRECTORY_LENGTH}}}")
RANK_DIRECTORY = re.compile(r"r(\d{1,5})")
BLOCK_FILE = re.compile(r"([0-9a-f]{2,128})_g(\d{1,4})\.kvb")
TEMPORARY_FILE = re.compile(r"([0-9a-f]{32})-(\d+)\.tmp")
WRITER_LOCK = re.compile(r"([0-9a-f]{32})\.lock")


def fingerprint_directory(fingerprint: Fingerprint) -> str:
    """Return the folder of a fingerprint, relative to the pool."""
    return fingerprint[:FINGERPRINT_DIRECTORY_LENGTH]


def rank_directory(fingerprint: Fingerprint, rank: int) -> str:
    """Return the folder of all blocks of one rank, relative to the pool."""
    return f"{fingerprint_directory(fingerprint)}/r{rank}"


def block_file(block_hash: bytes, group: int) -> str:
    """Return a block's file, relative to its rank's folder: `<hhh>/<hh>/<hash>_g<group>.kvb`.

    The two fan-out levels (4096 × 256) keep each folder small at hundreds of millions of blocks.
    """
    name = block_hash.hex()
    return f"{name[:3]}/{name[3:5]}/{name}_g{group}{BLOCK_SUFFIX}"


def block_path(key: BlockKey) -> str:
    """Return a block's file, relative to the pool: `<fp12>/r<rank>/<hhh>/<hh>/<hash>_g<group>.kvb`."""
    return f"{rank_directory(key.fingerprint, key.rank)}/{block_file(key.block_hash, key.group)}"


def temporary_path(fingerprint: Fingerprint, writer: str, number: int) -> str:
    """Return an unpublished file of one writer; `writer` is 32 hexadecimal digits, unique to the process."""
    return f"{fingerprint_directory(fingerprint)}/{TEMPORARY_DIRECTORY}/{writer}-{number}.tmp"


def writer_lock_path(fingerprint: Fingerprint, writer: str) -> str:
    """Return the file that a living writer holds locked; unlocked means that the writer is dead."""
    return f"{fingerprint_directory(fingerprint)}/{TEMPORARY_DIRECTORY}/{writer}.lock"


def quarantine_path(key: BlockKey) -> str:
    """Return where a damaged block is moved."""
    name = f"r{key.rank}_{key.block_hash.hex()}_g{key.group}{BLOCK_SUFFIX}"
    return f"{fingerprint_directory(key.fingerprint)}/{QUARANTINE_DIRECTORY}/{name}"
