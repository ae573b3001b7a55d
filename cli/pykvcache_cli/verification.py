"""Checking every block of a pool, with a progress bar on a terminal. Proves blocks bad; moves and removes none."""

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from pykvcache_cli.console import stderr
from pykvcache_contract.errors import BlockMissingError, CorruptBlockError, TransientError
from pykvcache_contract.keys import Fingerprint
from pykvcache_contract.paths import fingerprint_directory
from pykvcache_storage.inventory import PoolFile, iterate_blocks
from pykvcache_storage.verify import verify_block

MAX_LISTED = 1000
"""Most blocks named per kind of finding; the rest is only counted."""


@dataclass(slots=True)
class Findings:
    """A number of blocks, and path and reason of the first of them."""

    count: int = 0
    listed: list[tuple[str, str]] = field(default_factory=list)

    def add(self, pool_directory: str, path: str, error: Exception) -> None:
        """Take up one block; the reason leaves out the path, which stands beside it."""
        self.count += 1
        if len(self.listed) < MAX_LISTED:
            self.listed.append((path, str(error).removeprefix(f"{os.path.join(pool_directory, path)}: ")))


@dataclass(slots=True)
class Verification:
    """What checking every block found.

    Args:
        checked: blocks that were there; one that is evicted meanwhile is not counted.
        damaged: proved bad.
        unreadable: an error of the disk or of permissions, which proves nothing about the block.
    """

    checked: int = 0
    damaged: Findings = field(default_factory=Findings)
    unreadable: Findings = field(default_factory=Findings)

    @property
    def is_clean(self) -> bool:
        """Return whether every block was read and is good."""
        return not self.damaged.count and not self.unreadable.count


def verify_blocks(pool_directory: str, fingerprints: Iterable[Fingerprint], *, total_bytes: int) -> Verification:
    """Check every block of some fingerprints.

    Args:
        total_bytes: their size, for the progress bar.
    """
    result = Verification()
    for fingerprint, file in _with_progress(pool_directory, fingerprints, total_bytes):
        try:
            verify_block(os.path.join(pool_directory, file.path), file.key(fingerprint))
        except BlockMissingError:
            continue
        except CorruptBlockError as error:
            result.damaged.add(pool_directory, file.path, error)
        except TransientError as error:
            result.unreadable.add(pool_directory, file.path, error)
        result.checked += 1
    return result


def _with_progress(
    pool_directory: str, fingerprints: Iterable[Fingerprint], total_bytes: int
) -> Iterator[tuple[Fingerprint, PoolFile]]:
    console = stderr()
    columns = (TextColumn("verifying"), BarColumn(), DownloadColumn(binary_units=True), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as progress:
        bar = progress.add_task("", total=total_bytes)
        for fingerprint in fingerprints:
            for file in iterate_blocks(pool_directory, fingerprint_directory(fingerprint)):
                yield fingerprint, file
                progress.advance(bar, file.size_bytes)
