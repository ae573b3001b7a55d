"""How a pool is cared for, and what options say of it: parsed once, checked, and frozen.

Every error is a `ConfigurationError` that names the option, what is wrong with it and a value that works.
"""

import math
import os
from dataclasses import dataclass

from pykvcache_contract.errors import ConfigurationError
from pykvcache_contract.units import parse_size
from pykvcache_sidecar.policy import POLICY_NAMES
from pykvcache_storage.anchor import is_mount_point

INTERVAL_SECONDS_MAX = 10.0
"""Several looks fit into the half minute after which /healthz says that none was finished."""
_AGE_SECONDS_MAX = 100 * 365 * 86_400.0
"""Longer than any file lives, and no arithmetic on times overflows."""
CANDIDATES_MAX = 65_536
"""Blocks of one batch: some 30 MB of memory; at 28 MiB a block it is good for 1.8 TB."""
_MAX_PORT = 65535


@dataclass(frozen=True, slots=True)
class CareSettings:
    """How one pool is cared for.

    Args:
        pool_directory: absolute path.
        capacity_bytes: most bytes that all files of the pool may take.
        high, low: watermarks, shares of the capacity: eviction begins above `high` and stops at `low`.
            Writers stop at the capacity itself, so `high` lies below it: else nothing would ever be evicted.
        min_free_bytes: what the filesystem must keep free, whoever fills it.
        write_budget_bytes: most bytes that writers may store a day; 0 for no limit.
        scrub_bytes_per_second: 0 for no scrubbing.
        unused_seconds: after this long without a use a fingerprint is removed; 0 for never.
        quarantine_seconds: how long a damaged file is kept for people to look at, while there is room.
        require_mount: refuse a pool directory that is no mount point, bind mounts included, and leads to none.
        interval_seconds: between two looks at the pool; at most `INTERVAL_SECONDS_MAX`.
        candidates_max: blocks that a scan keeps in memory, to be evicted before the next scan.
    """

    pool_directory: str
    capacity_bytes: int
    high: float
    low: float
    min_free_bytes: int
    write_budget_bytes: int
    policy: str
    scrub_bytes_per_second: int
    unused_seconds: float
    quarantine_seconds: float
    require_mount: bool
    interval_seconds: float
    candidates_max: int = CANDIDATES_MAX

    def __post_init__(self) -> None:
        if self.capacity_bytes <= 0:
            raise ConfigurationError("--capacity is zero: say how much the pool may take, for example 64GiB")
        if not 0 < self.low < self.high < 1:
            raise ConfigurationError(
                f"--low {self.low:g} --high {self.high:g}: both are shares of the capacity with 0 < low < high < 1, "
                "for example --high 0.9 --low 0.8"
            )
        if self.policy not in POLICY_NAMES:
            raise ConfigurationError(f"--policy {self.policy}: choose one of {', '.join(POLICY_NAMES)}")
        _check_duration("--interval", self.interval_seconds, at_least=0.01, at_most=INTERVAL_SECONDS_MAX)
        _check_duration("--unused-days", self.unused_seconds, at_least=0, at_most=_AGE_SECONDS_MAX)
        _check_duration("--quarantine-hours", self.quarantine_seconds, at_least=0, at_most=_AGE_SECONDS_MAX)

    def check_mount(self) -> None:
        """Raise ConfigurationError if a mount point was demanded and the pool directory is none."""
        if self.require_mount and not _leads_to_mount_point(self.pool_directory):
            raise ConfigurationError(
                f"--require-mount: {self.pool_directory} is no mount point. Mount the disk there first, or leave the "
                "option out to keep the pool on the filesystem that is there now."
            )


def parse_size_option(name: str, text: str) -> int:
    """Return the bytes of an option's value.

    Raises:
        ConfigurationError: not a size.
    """
    try:
        return parse_size(text)
    except ValueError as error:
        raise ConfigurationError(f"{name}: {error}") from error


def parse_listen(text: str) -> tuple[str, int]:
    """Return host and port.

    >>> parse_listen("0.0.0.0:9478"), parse_listen("[::1]:80"), parse_listen(":9478")
    (('0.0.0.0', 9478), ('::1', 80), ('', 9478))

    Raises:
        ConfigurationError: no port, or none that exists.
    """
    host, colon, port = text.rpartition(":")
    if not colon or not port.isascii() or not port.isdigit() or int(port) > _MAX_PORT:
        raise ConfigurationError(f"--listen {text}: write an address and a port, for example 0.0.0.0:9478")
    return host.removeprefix("[").removesuffix("]"), int(port)


def _leads_to_mount_point(directory: str) -> bool:
    try:
        return is_mount_point(os.path.realpath(directory))
    except OSError:
        return False


def _check_duration(name: str, seconds: float, *, at_least: float, at_most: float) -> None:
    if not (math.isfinite(seconds) and at_least <= seconds <= at_most):
        raise ConfigurationError(
            f"{name} is {seconds:g} seconds, too small, too large or no number: choose from {at_least:g} "
            f"to {at_most:g} seconds"
        )
