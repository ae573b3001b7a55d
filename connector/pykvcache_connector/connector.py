"""The class that vLLM is told to load: `kv_connector = PyKVCacheConnector`.

vLLM's own offloading connector does the bookkeeping of requests, jobs and GPU blocks; this subclass adds what it lacks:
lookups away from the scheduler's thread, a limit on loads, failures that are only misses, identity, and metrics. One
instance lives in the scheduler's process and one in each worker; the class methods also run in the API server, so
importing this module starts nothing.

Two rules: a wrong option stops the engine at start-up with `ConfigurationError`; anything else that is wrong turns the
cache off, is logged with the remedy, and shows as `vllm:pykvcache_enabled 0`. Where `when_unfit` is `adapt`, as in
injected pods, a wrong option turns it off too, and so does whatever vLLM has against us.
"""

import contextlib
import logging
from collections.abc import Iterator
from typing import Any

from pykvcache_connector import vllm_api
from pykvcache_connector.messages import ConnectorMetadata, OffMetadata, WorkerHello, WorkerMetadata
from pykvcache_connector.off import OffConnector
from pykvcache_connector.scheduler.manager import Manager
from pykvcache_connector.scheduler.staging import Progress, longest_end, needed
from pykvcache_connector.settings import Settings
from pykvcache_connector.startup import EngineShape, IdentityMaker, check_configuration, staged_max, why_off
from pykvcache_connector.stats import ConnectorPromMetrics, ConnectorStats, Counts
from pykvcache_connector.vllm_api import KVConnectorRole, OffloadingConnector
from pykvcache_connector.worker.start import WorkerSide
from pykvcache_contract import metrics
from pykvcache_contract.errors import PyKVCacheError

logger = logging.getLogger(__name__)


class PyKVCacheConnector(OffloadingConnector):
    """KV blocks on disk for vLLM, stock releases 0.22 to 0.33."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        vllm_api.adopt_logging()
        self._adapts = Settings.adapts(vllm_config.kv_transfer_config.kv_connector_extra_config)
        try:
            self._start(vllm_config, role, kv_cache_config)
        except Exception as error:
            if not self._adapts:
                raise
            self._become_off(error, vllm_config, role, kv_cache_config)

    def _start(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        adapted = check_configuration(vllm_config, kv_cache_config)
        # Workers start first; in one process with the scheduler they have adapted its options too.
        if adapted and role == KVConnectorRole.WORKER and vllm_api.rank_and_world(vllm_config)[0] == 0:
            logger.warning("%s", adapted)
        super().__init__(vllm_config, role, kv_cache_config)
        self._config = vllm_config
        self._kv_cache_config = kv_cache_config
        self._questions: dict[str, int] = {}
        self._deferred: set[str] = set()
        self._reset_pending = False
        if role == KVConnectorRole.SCHEDULER:
            self._counts: Counts = self._manager.counts
            self._shapes = vllm_api.group_shapes(self.connector_scheduler)
        else:
            spec = self.connector_worker.spec
            self._counts = spec.counts
            self._worker = WorkerSide(
                vllm_config,
                kv_cache_config,
                spec.settings,
                spec.counts,
                blocks=vllm_api.chunk_factor(spec),
                group_ids=vllm_api.offloaded_groups(spec),
            )
            spec.make_handler = self._worker.make_handler

    def _become_off(self, error: Exception, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        """Go on as a connector that does nothing; the scheduler's half says why, for itself or for a worker."""
        reason = _explain(error)
        if role == KVConnectorRole.SCHEDULER:
            logger.error("py-kvcache is off, vLLM runs without it: %s", reason)
        self.__class__ = OffConnector
        OffConnector.start_off(self, vllm_config, role, kv_cache_config, reason=reason)

    @property
    def _manager(self) -> Manager:
        manager: Manager = self.connector_scheduler.manager
        return manager

    # ---- scheduler's process: start-up ----

    def set_xfer_handshake_metadata(self, metadata: dict[Any, Any]) -> None:
        """Take in the workers' hellos and switch the cache on, or say why not."""
        try:
            self._switch_on(metadata)
        except Exception as error:
            if not self._adapts:
                raise
            self._turn_off(_explain(error))

    def _switch_on(self, metadata: dict[Any, Any]) -> None:
        # Beside another connector in vLLM's MultiConnector, the workers' answers may all be that one's.
        answers = [answer for answer in metadata.values() if isinstance(answer, WorkerHello)]
        hellos = sorted(answers, key=lambda hello: hello.rank)
        engine = EngineShape(
            self._config, self._kv_cache_config, self._shapes, vllm_api.chunk_factor(self.connector_scheduler.config)
        )
        reason = why_off(engine, hellos, settings=self._manager.settings)
        if reason is not None:
            self._turn_off(reason)
            return
        try:
            make_identity = IdentityMaker(engine, hellos)
        except OSError as error:
            self._turn_off(f"the model's weights cannot be identified: {error}")
            return
        self._manager.start(
            make_identity,
            block_sizes=tuple(hello.block_sizes_bytes for hello in hellos),
            writers=(0,) if vllm_api.is_replicated(self._config) else tuple(range(len(hellos))),
            shapes=self._shapes,
            staged_max=staged_max(engine, hellos, loading=self._manager.settings.loading),
        )
        self._counts.set(metrics.ENABLED.name, 1)
        if self._manager.settings.trace and len(self._shapes) > 1:
            logger.warning(
                "this model has %d KV-cache groups: the access trace lists the blocks of one, with the bytes of all, "
                "so a simulated pool holds fewer prefixes than a real one",
                len(self._shapes),
            )

    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[Any, Any]) -> None:
        """The same on vLLM 0.27 and later; keys are (pipeline rank, tensor rank)."""
        self.set_xfer_handshake_metadata(metadata)

    def _turn_off(self, reason: str) -> None:
        logger.error("py-kvcache is off, vLLM runs without it: %s", reason)
        self._manager.off_reason = reason
        self._counts.set(metrics.ENABLED.name, 0)

    # ---- scheduler's process: every request and step ----

    def on_new_request(self, request: Any) -> None:
        """Start the lookup of a request's blocks as soon as it arrives."""
        super().on_new_request(request)
        with self._shield():
            if vllm_api.uses_adapter(request):
                # A new adapter under an old name has the same hashes: its KV on disk would be the old one's.
                self._manager.exclude(request.request_id)
                return
            keys = [key for shape in self._shapes for key in vllm_api.block_keys(request, shape)]
            self._manager.begin(request.request_id, keys, hashes=request.block_hashes)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Return how many tokens to load beyond those on the GPU; None asks to come back next step."""
        if vllm_api.has_transfers(self.connector_scheduler, request.request_id):
            # Preempted while its blocks are being copied out: vLLM asserts that a load starts without other jobs.
            return None, False
        if request.request_id in self._deferred and self._manager.is_waiting(request.request_id):
            # vLLM would walk over all blocks again, every step, only to come to the same "later".
            return None, False
        if self._manager.staged_max:
            matched, is_async = self._match_staged(request, num_computed_tokens)
        else:
            matched, is_async = super().get_num_new_matched_tokens(request, num_computed_tokens)
        if matched is None:
            self._deferred.add(request.request_id)
        if vllm_api.skips_cache(request):
            matched, is_async = 0, False
        if matched and not self._manager.may_start_load(self._needed_counts(num_computed_tokens, matched)):
            return None, False
        if matched is not None:
            self._questions[request.request_id] = max(0, request.num_tokens - num_computed_tokens)
        return matched, is_async

    def _match_staged(self, request: Any, computed: int) -> tuple[int | None, bool]:
        """Return what vLLM finds, once its blocks are staged; None until then, 0 when that takes too long.

        vLLM chooses among what is on disk. Where that is more than may be staged, it chooses again among less: the
        blocks that a sliding window needs depend on where the prefix ends.
        """
        request_id, blocks_max = request.request_id, self._manager.staged_max
        self._manager.limit_lookup(request_id, ())
        matched, is_async = super().get_num_new_matched_tokens(request, computed)
        if matched:
            end = longest_end(
                self._shapes, computed_tokens=computed, end_tokens=computed + matched, blocks_max=blocks_max
            )
            if end < computed + matched:
                self._manager.limit_lookup(request_id, self._keys_beyond(request, end))
                matched, is_async = super().get_num_new_matched_tokens(request, computed)
        if matched is None:
            return None, False
        progress = Progress.LATE
        with self._shield():
            if not matched or vllm_api.skips_cache(request):
                self._manager.drop_staged(request_id)
            else:
                progress = self._manager.stage(request_id, self._needed_keys(request, computed, matched))
        if progress is Progress.WAITING:
            return None, False
        return (matched, is_async) if progress is Progress.READY else (0, False)

    def _needed_keys(self, request: Any, computed: int, matched: int) -> list[bytes]:
        """Return the keys that vLLM loads at most for these tokens."""
        keys: list[bytes] = []
        for shape in self._shapes:
            blocks = needed(shape, computed_tokens=computed, end_tokens=computed + matched)
            keys += vllm_api.block_keys(request, shape)[blocks.start : blocks.stop]
        return keys

    def _keys_beyond(self, request: Any, end: int) -> list[bytes]:
        """Return the keys of the blocks that end behind a token."""
        keys: list[bytes] = []
        for shape in self._shapes:
            keys += vllm_api.block_keys(request, shape)[end // shape.tokens_per_block :]
        return keys

    def _needed_counts(self, computed: int, matched: int) -> dict[int, int]:
        """Return how many blocks of each group vLLM loads at most for these tokens."""
        return {
            shape.group: len(needed(shape, computed_tokens=computed, end_tokens=computed + matched))
            for shape in self._shapes
        }

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Count what was asked for and what is now certain to be loaded.

        Only here, because vLLM asks again for a request that it could not admit; one that is preempted later, or whose
        load fails, asks a question of its own.
        """
        super().update_state_after_alloc(request, blocks, num_external_tokens)
        self._counts.add(metrics.LOOKUP_TOKENS.name, self._questions.pop(request.request_id, 0))
        if num_external_tokens:
            self._counts.add(metrics.HIT_TOKENS.name, num_external_tokens, metrics.TIER_DISK)

    def build_connector_meta(self, scheduler_output: Any) -> ConnectorMetadata:
        """Return what the workers need this step."""
        base = super().build_connector_meta(scheduler_output)
        if not self._reset_pending and not _reuses_blocks(scheduler_output, base):
            base.jobs_to_flush = None
        self._reset_pending = False
        orders = None
        with self._shield():
            orders = self._manager.staging_orders()
            self._manager.step_over()
        metadata: ConnectorMetadata = vllm_api.extend(
            ConnectorMetadata, base, identity=self._manager.identity(), staging=orders
        )
        return metadata

    def update_connector_output(self, connector_output: Any) -> None:
        """Take in the workers' reports, ours first: a failed key must be a miss before it is asked for again."""
        report = getattr(connector_output.kv_connector_worker_meta, "report", None)
        if report is not None:
            with self._shield():
                self._manager.apply(report)
        super().update_connector_output(connector_output)

    def request_finished(self, request: Any, block_ids: Any) -> tuple[bool, Any]:
        """Forget a request."""
        self._forget(request)
        result: tuple[bool, Any] = super().request_finished(request, block_ids)
        return result

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, Any]:
        """Forget a request."""
        self._forget(request)
        result: tuple[bool, Any] = super().request_finished_all_groups(request, block_ids)
        return result

    @contextlib.contextmanager
    def _shield(self) -> Iterator[None]:
        """Turn the cache off instead of letting a mistake of ours reach vLLM and end the engine."""
        try:
            yield
        except Exception:
            logger.exception("py-kvcache made a mistake; please report it")
            self._turn_off("an internal error, logged above")

    def _forget(self, request: Any) -> None:
        self._questions.pop(request.request_id, None)
        self._deferred.discard(request.request_id)
        self._manager.forget(request.request_id)

    def reset_cache(self) -> bool | None:
        """Start over with an empty cache of a new fingerprint."""
        self._reset_pending = True
        result: bool | None = super().reset_cache()
        return result

    # ---- worker's process ----

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Build the worker's half over vLLM's KV cache."""
        with self._starting():
            super().register_kv_caches(kv_caches)

    def register_cross_layers_kv_cache(self, kv_cache: Any, attn_backend: Any) -> None:
        """Build the worker's half over a KV cache whose rows hold all layers (vLLM before 0.32)."""
        with self._starting():
            super().register_cross_layers_kv_cache(kv_cache, attn_backend)

    @contextlib.contextmanager
    def _starting(self) -> Iterator[None]:
        """Where vLLM must start in any case, become a connector that does nothing instead of failing."""
        try:
            yield
        except Exception as error:
            if not self._adapts:
                raise
            self._become_off(error, self._config, KVConnectorRole.WORKER, self._kv_cache_config)

    def get_handshake_metadata(self) -> WorkerHello | None:
        """Return this worker's layout, from which the scheduler makes the fingerprint."""
        return self._worker.hello()

    def handle_preemptions(self, kv_connector_metadata: Any) -> None:
        """Adopt the identity, and stage and let go blocks, before any job of this step starts."""
        if isinstance(kv_connector_metadata, OffMetadata):
            self._follow_off()
            self.handle_preemptions(kv_connector_metadata)
            return
        self._worker.use(kv_connector_metadata.identity, kv_connector_metadata.staging)
        super().handle_preemptions(kv_connector_metadata)

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        """Adopt the identity, and stage and let go blocks, before any job of this step starts."""
        if isinstance(connector_metadata, OffMetadata):
            self._follow_off()
            self.bind_connector_metadata(connector_metadata)
            return
        self._worker.use(connector_metadata.identity, connector_metadata.staging)
        super().bind_connector_metadata(connector_metadata)

    def _follow_off(self) -> None:
        """Do nothing from now on, because the scheduler's half is off; it has said why."""
        self.__class__ = OffConnector
        OffConnector.start_off(self, self._config, KVConnectorRole.WORKER, self._kv_cache_config, reason="")

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Return the GPU blocks of finished loads that vLLM must recompute."""
        return self._worker.take_failed_rows()

    def build_connector_worker_meta(self) -> Any:
        """Return finished jobs and our report, or None if there is neither."""
        base = super().build_connector_worker_meta()
        report = self._worker.take_report()
        if base is None and report is None:
            return None
        if base is None:
            return WorkerMetadata(report=report)
        return vllm_api.extend(WorkerMetadata, base, report=report)

    # ---- metrics ----

    def get_kv_connector_stats(self) -> ConnectorStats:
        """Return the counts since the last step; never None, or vLLM 0.22 would not ask the scheduler's half."""
        return self._counts.take()

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> ConnectorStats:
        """Return stats around data that travelled to the API server."""
        return ConnectorStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: dict[int, list[Any]]
    ) -> ConnectorPromMetrics:
        """Register our metrics on vLLM's /metrics."""
        return ConnectorPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)


# vLLM's MultiConnector files a connector's statistics under the name of its class.
OffConnector.__name__ = PyKVCacheConnector.__name__


def _explain(error: Exception) -> str:
    """Return why the cache is off: our own messages as they are, others with a trace in the log."""
    if isinstance(error, PyKVCacheError):
        return str(error)
    logger.warning("py-kvcache could not start", exc_info=error)
    return f"{type(error).__name__}: {error}".rstrip(": ")


def _reuses_blocks(scheduler_output: Any, metadata: Any) -> bool:
    """Return whether GPU blocks may change hands this step: then stores that still read them must be flushed.

    Otherwise stores that wait for a slot need not be dropped; vLLM 0.22 flushes all jobs when the last request has
    finished. Loads get blocks in steps without a token too, and those of a preempted request are free from now on.
    """
    return bool(scheduler_output.total_num_scheduled_tokens or scheduler_output.preempted_req_ids or metadata.load_jobs)
