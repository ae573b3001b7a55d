"""A connector that does nothing: what `PyKVCacheConnector` becomes where it cannot work and vLLM must run all the same.

Facts: vLLM's offloading connector and its parts check what they are given by assertions, which differ from release to
release, and end the engine with them; vLLM has no way to go on without a connector that it was told to use. Its base
class of connectors does nothing in nearly all of its methods.

Therefore: a connector that fails to start changes its class to this one, in place, because vLLM holds the object. The
halves of an engine may differ: a worker that is off says so in its hello, and a scheduler that is off sends
`OffMetadata`, at which workers turn off too.
"""

from typing import Any

from pykvcache_connector import vllm_api
from pykvcache_connector.messages import OffMetadata, WorkerHello
from pykvcache_connector.stats import ConnectorStats, Counts
from pykvcache_connector.vllm_api import KVConnectorBase_V1, SupportsHMA
from pykvcache_contract import metrics


class OffConnector(KVConnectorBase_V1, SupportsHMA):
    """No hits, no loads, no stores; `vllm:pykvcache_enabled` is 0."""

    def start_off(self, vllm_config: Any, role: Any, kv_cache_config: Any, *, reason: str) -> None:
        """Take the place of a connector that could not start.

        Args:
            reason: for the scheduler's log, where this is a worker.
        """
        KVConnectorBase_V1.__init__(self, vllm_config, role, kv_cache_config)
        self._config = vllm_config
        self._reason = reason
        self._counts = Counts()
        self._counts.set(metrics.ENABLED.name, 0)

    @property
    def requires_kv_delivery(self) -> bool:
        """Return False: no output need be kept for us."""
        return False

    # ---- scheduler's process ----

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        """Return that nothing was found."""
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Do nothing."""

    def build_connector_meta(self, scheduler_output: Any) -> OffMetadata:
        """Return that the cache is off."""
        return OffMetadata()

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, None]:
        """Return that the blocks are free."""
        return False, None

    def set_xfer_handshake_metadata(self, metadata: Any) -> None:
        """Do nothing."""

    def set_xfer_handshake_metadata_pp_aware(self, metadata: Any) -> None:
        """Do nothing; vLLM's own refuses pipeline parallelism."""

    # ---- worker's process ----

    def get_handshake_metadata(self) -> WorkerHello:
        """Return why there is no cache."""
        rank, _ = vllm_api.rank_and_world(self._config)
        return WorkerHello(rank, layout={}, block_sizes_bytes={}, unavailable=self._reason)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Do nothing."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Do nothing."""

    def wait_for_save(self) -> None:
        """Do nothing."""

    # ---- metrics ----

    def get_kv_connector_stats(self) -> ConnectorStats:
        """Return that the cache is off, once."""
        return self._counts.take()
