"""The offloading spec that vLLM's connector instantiates: gives the manager and the worker's handler.

vLLM builds it once per role, from one configuration object (0.26 and later) or two (0.22); the connector fills in the
rest right after (`PyKVCacheConnector`), before either half does any work.
"""

from collections.abc import Iterator
from typing import Any

from pykvcache_connector.messages import BlockKeysSpec
from pykvcache_connector.scheduler.manager import Manager
from pykvcache_connector.settings import Settings
from pykvcache_connector.stats import Counts
from pykvcache_connector.vllm_api import GPULoadStoreSpec, OffloadingSpec
from pykvcache_connector.worker.handler import Handler


class PyKVCacheSpec(OffloadingSpec):
    """Our spec.

    Attributes:
        counts: of this process; shared by everything that counts.
        make_handler: set by the connector in worker processes; called with vLLM's canonical KV caches.
    """

    def __init__(self, *configs: Any) -> None:
        super().__init__(*configs)
        self.settings = Settings.parse(self.extra_config)
        self.counts = Counts()
        self.make_handler: Any = None

    def get_manager(self) -> Manager:
        """Return the scheduler's half; it stays off until the workers have said hello."""
        return Manager(self.settings, self.counts)

    def get_worker(self, kv_caches: Any) -> Handler:
        """Return the worker's half (vLLM 0.26 and later)."""
        handler: Handler = self.make_handler(kv_caches)
        return handler

    def get_handlers(self, kv_caches: Any) -> Iterator[tuple[Any, Any, Handler]]:
        """Yield the worker's half for both directions (vLLM 0.22)."""
        handler = self.make_handler(kv_caches)
        yield GPULoadStoreSpec, BlockKeysSpec, handler
        yield BlockKeysSpec, GPULoadStoreSpec, handler
