"""What pods of a namespace stored leaves with the namespace, so that nobody gets it who makes one of the same name.

Every few minutes the namespaces that have a directory on this node are compared with a list asked for afterwards. Only
one that is missing there is gone: a directory made since is not judged, and while the API server does not answer
nothing is. The pools' workers then erase, each on its own thread, what no pod mounts.

One thread.
"""

import logging
import random
import threading
from collections.abc import Callable, Sequence

from pykvcache_sidecar.node.worker import PoolWorker

logger = logging.getLogger(__name__)

CHECK_SECONDS = 300.0


class NamespaceCheck:
    """Compares again and again.

    Args:
        workers: returns those of all pools.
        list_namespaces: asks the API server for the names of all that exist now; None if it does not answer.
    """

    def __init__(
        self,
        *,
        workers: Callable[[], Sequence[PoolWorker]],
        list_namespaces: Callable[[], "frozenset[str] | None"],
    ) -> None:
        self._workers = workers
        self._list_namespaces = list_namespaces

    def run(self, stopped: threading.Event) -> None:
        """Compare until it is stopped; not at once, so that agents of all nodes do not ask together."""
        while not stopped.wait(CHECK_SECONDS * random.uniform(0.8, 1.2)):
            try:
                self.check()
            except Exception:
                logger.exception("namespaces that are gone could not be looked for")

    def check(self) -> None:
        """Compare once."""
        seen = {worker: worker.namespaces() for worker in self._workers()}
        if not any(seen.values()):
            return
        living = self._list_namespaces()
        if living is None:
            return
        for worker, names in seen.items():
            if gone := names - living:
                worker.clear_out(gone)
