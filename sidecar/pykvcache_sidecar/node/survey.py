"""What lies on the node's disks: the disks themselves, and trees of pools that exist no more.

Looked at every few seconds on a thread of its own; everybody else sees the last result. A filesystem that is asked may
hang: it is left out, as if it were not mounted, and the others are told all the same. A tree is an orphan only if a
list of pools that was asked for after the tree was seen does not name its uid: a watch that lags, or a second agent
that knows more, must never cost a living pool its data.
"""

import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from pykvcache_contract.api.node import Disk
from pykvcache_sidecar.node.cluster import Cluster
from pykvcache_sidecar.node.disks import discover
from pykvcache_sidecar.node.memory import Memory
from pykvcache_sidecar.node.patience import Patience
from pykvcache_sidecar.node.placing import ROOT_NAME
from pykvcache_sidecar.node.tree import PoolTree, find_trees
from pykvcache_sidecar.node.tree_file import TreeError

logger = logging.getLogger(__name__)

SURVEY_SECONDS = 10.0
PATIENCE_SECONDS = 2.0
"""With one disk; sysfs and a directory answer in milliseconds."""


@dataclass(frozen=True, slots=True)
class Findings:
    """One survey.

    Args:
        disks: by place.
        orphans: trees of no pool, and none that is to be retained.
    """

    disks: tuple[Disk, ...] = ()
    orphans: tuple[PoolTree, ...] = ()


class Survey:
    """Looks again and again.

    Args:
        patterns: where disks are mounted.
        list_uids: asks the API server for the uids of all pools that exist now; None if it does not answer.
        on_change: called when something else is found than before.
    """

    def __init__(
        self,
        *,
        patterns: Sequence[str],
        cluster: Cluster,
        memory: Memory,
        list_uids: Callable[[], "frozenset[str] | None"],
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        self._patterns = patterns
        self._cluster = cluster
        self._memory = memory
        self._list_uids = list_uids
        self._on_change = on_change
        self._patience = Patience(PATIENCE_SECONDS)
        self._findings: Findings | None = None

    def findings(self) -> Findings | None:
        """Return what was found last; None before the first survey."""
        return self._findings

    def disks(self) -> tuple[Disk, ...]:
        """Return the disks found last."""
        return () if self._findings is None else self._findings.disks

    def run(self, stopped: threading.Event) -> None:
        """Look until it is stopped."""
        while not stopped.is_set():
            try:
                self.look()
            except Exception:
                logger.exception("the node's disks could not be looked at")
            stopped.wait(SURVEY_SECONDS)

    def look(self) -> None:
        """Look once.

        Raises:
            OSError: the mount table cannot be read.
        """
        disks = tuple(discover(self._patterns, patience=self._patience))
        findings = Findings(disks, tuple(self._orphans(disks)))
        if findings != self._findings:
            self._findings = findings
            self._on_change()

    def _orphans(self, disks: Iterable[Disk]) -> list[PoolTree]:
        uids = self._cluster.view().uids
        if uids is None:
            return []
        suspects = [
            tree
            for root in sorted(self._roots(disks))
            for tree in self._trees_in(root)
            if tree.record.identity.uid not in uids and not tree.record.identity.retain
        ]
        living = self._list_uids() if suspects else None
        if living is None:
            return []
        return [tree for tree in suspects if tree.record.identity.uid not in living]

    def _roots(self, disks: Iterable[Disk]) -> set[str]:
        pools = (self._cluster.view().pools or {}).values()
        paths = {pool.spec.storage.path for pool in pools if pool.spec.storage.path}
        return paths | self._memory.roots() | {f"{disk.mount_path}/{ROOT_NAME}" for disk in disks}

    def _trees_in(self, root: str) -> list[PoolTree]:
        try:
            return self._patience.ask(root, lambda: find_trees(root))
        except (TreeError, TimeoutError) as error:
            logger.debug("%s was not searched for orphans: %s", root, error)
            return []
