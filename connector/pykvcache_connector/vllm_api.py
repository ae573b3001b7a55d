"""The only module that imports vllm: what we use of it, made equal for releases 0.22 to 0.33.

Features are detected one by one, never by version. `tools/compat/` proves for releases that cannot run here that every
name and parameter used exists.
"""

import copy
import dataclasses
import logging
import os
import platform
from collections.abc import Iterator
from typing import Any

import vllm
from vllm.config import get_layers_from_vllm_config
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
    OffloadingConnectorMetadata,
    OffloadingWorkerMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core import kv_cache_utils
from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec, UniformTypeKVCacheSpecs
from vllm.v1.kv_offload import base as offload_base
from vllm.v1.kv_offload.base import (
    GPULoadStoreSpec,
    LoadStoreSpec,
    OffloadingManager,
    OffloadingSpec,
    PrepareStoreOutput,
    make_offload_key,
)

__all__ = [
    "GPULoadStoreSpec",
    "KVConnectorBase_V1",
    "KVConnectorHandshakeMetadata",
    "KVConnectorMetadata",
    "KVConnectorPromMetrics",
    "KVConnectorRole",
    "KVConnectorStats",
    "LoadStoreSpec",
    "OffloadingConnector",
    "OffloadingConnectorMetadata",
    "OffloadingManager",
    "OffloadingSpec",
    "OffloadingWorkerMetadata",
    "PrepareStoreOutput",
    "SupportsHMA",
    "WorkerBase",
    "extend",
    "make_offload_key",
]

_LOOKUP_RESULT = getattr(offload_base, "LookupResult", None)
HIT: Any = _LOOKUP_RESULT.HIT if _LOOKUP_RESULT else True
MISS: Any = _LOOKUP_RESULT.MISS if _LOOKUP_RESULT else False
RETRY: Any = _LOOKUP_RESULT.RETRY if _LOOKUP_RESULT else None

WorkerBase: Any
if hasattr(offload_base, "OffloadingWorker"):
    from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult

    WorkerBase = OffloadingWorker
else:
    from vllm.v1.kv_offload.worker.worker import OffloadingHandler, TransferResult

    WorkerBase = OffloadingHandler

_RESULT_FIELDS = {field.name for field in dataclasses.fields(TransferResult)}


def extend(cls: Any, base: Any, **extra: Any) -> Any:
    """Return an instance of dataclass `cls`, a subclass of `base`'s class, with base's fields and the extra ones."""
    values = {field.name: getattr(base, field.name) for field in dataclasses.fields(base)}
    return cls(**values, **extra)


def transfer_result(job_id: int, *, size_bytes: int, seconds: float, is_store: bool) -> Any:
    """Return vLLM's record of a finished job; always a success, because a failure would kill the engine."""
    values = {
        "job_id": job_id,
        "success": True,
        "transfer_size": size_bytes,
        "transfer_time": seconds,
        "transfer_type": ("GPU", "DISK") if is_store else ("DISK", "GPU"),
    }
    return TransferResult(**{name: value for name, value in values.items() if name in _RESULT_FIELDS})


def default_offloading_context() -> Any:
    """Return how a new request's blocks are offloaded: vLLM's default policy."""
    context = getattr(offload_base, "RequestOffloadingContext", None)
    return context() if context else None


def disk_hit_source() -> Any:
    """Return vLLM's label for tokens loaded from disk, where it has one."""
    try:
        from vllm.v1.metrics.cache_hit_source import CacheHitSource
    except ImportError:
        return None
    return getattr(CacheHitSource, "DISK", CacheHitSource.EXTERNAL_UNSPECIFIED)


def adopt_logging() -> None:
    """Send our log lines to vLLM's handlers, at vLLM's level; they would be silent otherwise."""
    parent = logging.getLogger("vllm")
    for name in ("pykvcache_connector", "pykvcache_storage"):
        ours = logging.getLogger(name)
        ours.handlers, ours.propagate = parent.handlers, False
        ours.setLevel(parent.level)


# ---- sizes ----


def chunk_factor(spec: Any) -> int:
    """Return how many GPU blocks make one offloaded block."""
    value = getattr(spec, "blocks_per_chunk", None) or spec.block_size_factor
    return int(value)


def configured_chunk_tokens(vllm_config: Any) -> tuple[int | None, int]:
    """Return (`block_size` in our options, vLLM's block size), both in tokens."""
    extra = vllm_config.kv_transfer_config.kv_connector_extra_config
    value = extra.get("block_size")
    return (None if value is None else int(value)), int(vllm_config.cache_config.block_size)


def gpu_block_tokens(vllm_config: Any, kv_cache_config: Any) -> int:
    """Return the tokens of one GPU block as offloading counts them: a block of all context-parallel ranks together.

    Where KV-cache groups differ, vLLM's own block size stands for them all.
    """
    parallel = vllm_config.parallel_config
    ranks = int(getattr(parallel, "decode_context_parallel_size", 1)) * int(
        getattr(parallel, "prefill_context_parallel_size", 1)
    )
    sizes = {int(group.kv_cache_spec.block_size) for group in kv_cache_config.kv_cache_groups}
    return ranks * (sizes.pop() if len(sizes) == 1 else int(vllm_config.cache_config.block_size))


@dataclasses.dataclass(frozen=True, slots=True)
class GroupShape:
    """How one KV-cache group is cut.

    Args:
        group: vLLM's number of it.
        hashes_per_block, tokens_per_block: of one offloaded block.
        window_blocks: most offloaded blocks that its sliding window reaches back; None for full attention.
    """

    group: int
    hashes_per_block: int
    tokens_per_block: int
    window_blocks: int | None = None


def group_shapes(connector_scheduler: Any) -> tuple[GroupShape, ...]:
    """Return the shapes of the groups that vLLM's scheduler half offloads."""
    return tuple(_group_shape(group) for group in connector_scheduler.config.kv_group_configs)


def _group_shape(group: Any) -> GroupShape:
    hashes = getattr(group, "hashes_per_chunk", None) or group.hash_block_size_factor
    tokens = getattr(group, "tokens_per_chunk", None) or group.offloaded_block_size
    window = getattr(group, "sliding_window_size_in_chunks", None) or getattr(
        group, "sliding_window_size_in_blocks", None
    )
    return GroupShape(group.group_idx, int(hashes), int(tokens), None if window is None else int(window))


def offloaded_groups(spec: Any) -> list[int]:
    """Return vLLM's numbers of the KV-cache groups that are offloaded, in the order of its canonical KV caches."""
    config = getattr(spec, "config", None)
    if config is not None:
        return [int(getattr(group, "group_id", index)) for index, group in enumerate(config.groups)]
    return list(range(len(spec.kv_cache_config.kv_cache_groups)))


def can_recompute(kv_cache_config: Any) -> bool:
    """Return whether vLLM recomputes blocks whose load failed: only where one group keeps every block of a request."""
    specs = [spec for group in kv_cache_config.kv_cache_groups for spec in _layer_specs(group.kv_cache_spec)]
    return len(kv_cache_config.kv_cache_groups) == 1 and all(isinstance(spec, FullAttentionSpec) for spec in specs)


def unsupported_layers(kv_cache_config: Any) -> str | None:
    """Return the kind of layers whose KV cache we do not handle, None if we handle all."""
    for group in kv_cache_config.kv_cache_groups:
        for spec in _layer_specs(group.kv_cache_spec):
            if not isinstance(spec, FullAttentionSpec | SlidingWindowSpec):
                return type(spec).__name__.removesuffix("Spec")
    return None


def shortest_window_tokens(kv_cache_config: Any) -> int | None:
    """Return the tokens of the shortest sliding window, None where there is none."""
    specs = [spec for group in kv_cache_config.kv_cache_groups for spec in _layer_specs(group.kv_cache_spec)]
    return min((int(spec.sliding_window) for spec in specs if isinstance(spec, SlidingWindowSpec)), default=None)


def _layer_specs(spec: Any) -> list[Any]:
    """Return the specs that a group's layers share, or each layer's own."""
    return list(spec.kv_cache_specs.values()) if isinstance(spec, UniformTypeKVCacheSpecs) else [spec]


def block_keys(request: Any, shape: GroupShape) -> list[bytes]:
    """Return vLLM's offload keys (hash and group) of all whole offloaded blocks of a request, in order."""
    # A key is the hash and its group, which `split_offload_key` relies on too; adding the same group to each of
    # hundreds of hashes takes a fifth of as many calls.
    step, group = shape.hashes_per_block, bytes(make_offload_key(b"", shape.group))
    return [h + group for h in request.block_hashes[step - 1 :: step]]


def split_offload_key(key: bytes) -> tuple[bytes, int]:
    """Return (block hash, group) of an offload key."""
    return bytes(key[:-4]), int.from_bytes(key[-4:], "big")


# ---- requests ----


def has_transfers(connector_scheduler: Any, request_id: str) -> bool:
    """Return whether jobs of this request are outstanding; vLLM 0.22 asserts that a load starts without any."""
    status = connector_scheduler._req_status.get(request_id)
    return bool(status is not None and status.transfer_jobs)


def skips_cache(request: Any) -> bool:
    """Return whether the request must not read cached prefixes (it wants prompt log-probabilities)."""
    return bool(getattr(request, "skip_reading_prefix_cache", False))


def uses_adapter(request: Any) -> bool:
    """Return whether a LoRA adapter made the request's KV: vLLM's block hashes carry only the adapter's name."""
    return getattr(request, "lora_request", None) is not None


# ---- identity ----


def vllm_generation() -> str:
    """Return major and minor version: kernels and layouts may change the bytes between them."""
    return ".".join(str(vllm.__version__).split(".")[:2])


def rank_and_world(vllm_config: Any) -> tuple[int, int]:
    """Return (this worker's rank, number of ranks) within tensor × pipeline parallelism."""
    parallel = vllm_config.parallel_config
    return int(parallel.rank), int(parallel.world_size)


def none_hash(vllm_config: Any) -> bytes | None:
    """Return the hash that every chain of block hashes starts from, or None if it differs from process to process."""
    function = get_hash_fn_by_name(vllm_config.cache_config.prefix_caching_hash_algo)
    saved = {
        name: getattr(kv_cache_utils, name)
        for name in ("NONE_HASH", "_NONE_HASH_SEED")
        if hasattr(kv_cache_utils, name)
    }
    values = []
    try:
        for _ in range(2):
            kv_cache_utils.init_none_hash(function)
            values.append(bytes(kv_cache_utils.NONE_HASH))
    finally:
        for name, value in saved.items():
            setattr(kv_cache_utils, name, value)
    return values[0] if values[0] == values[1] else None


def hash_algorithm(vllm_config: Any) -> str:
    """Return the block-hash algorithm; those that pickle are stable only within one Python minor version."""
    name = str(vllm_config.cache_config.prefix_caching_hash_algo)
    return (
        name
        if "cbor" in name
        else f"{name}/python{platform.python_version_tuple()[0]}.{platform.python_version_tuple()[1]}"
    )


def describe_model(vllm_config: Any) -> dict[str, Any]:
    """Return what of vLLM's configuration changes the values in the KV cache, except weights and worker layout."""
    model, cache, parallel = vllm_config.model_config, vllm_config.cache_config, vllm_config.parallel_config
    return {
        "model": str(model.model),
        "revision": str(getattr(model, "revision", None)),
        "dtype": str(model.dtype).removeprefix("torch."),
        "kv_cache_dtype": str(cache.cache_dtype),
        "quantization": str(getattr(model, "quantization", None)),
        "hf_config": _hf_config(model.hf_config),
        "tensor_parallel": int(parallel.tensor_parallel_size),
        "pipeline_parallel": int(parallel.pipeline_parallel_size),
        "prefill_context_parallel": int(getattr(parallel, "prefill_context_parallel_size", 1)),
        "decode_context_parallel": int(getattr(parallel, "decode_context_parallel_size", 1)),
    }


def _hf_config(config: Any) -> dict[str, Any]:
    """Return the model's configuration without what depends on where and by what it was loaded."""
    values = copy.deepcopy(config.to_dict())
    return {str(name): repr(value) for name, value in sorted(_without_origin(values).items())}


def _without_origin(values: dict[str, Any]) -> dict[str, Any]:
    hidden = {"_name_or_path", "transformers_version", "torch_dtype", "dtype"}
    return {
        name: _without_origin(value) if isinstance(value, dict) else value
        for name, value in values.items()
        if name not in hidden
    }


def has_runtime_scales(vllm_config: Any) -> bool:
    """Return whether scales of a quantised KV cache are computed at run time, so that they differ per process."""
    return bool(getattr(vllm_config.cache_config, "calculate_kv_scales", False))


def is_replicated(vllm_config: Any) -> bool:
    """Return whether every tensor-parallel rank holds the same bytes (MLA), so that one rank writes and all read."""
    parallel = vllm_config.parallel_config
    return bool(
        getattr(vllm_config.model_config, "use_mla", False)
        and parallel.tensor_parallel_size > 1
        and parallel.world_size == parallel.tensor_parallel_size
        and getattr(parallel, "decode_context_parallel_size", 1) == 1
        and getattr(parallel, "prefill_context_parallel_size", 1) == 1
    )


def describe_layout(vllm_config: Any, kv_cache_config: Any) -> dict[str, Any]:
    """Return what decides where a KV value lies inside a page: backends, layout, runner, layers."""
    names = [name for group in kv_cache_config.kv_cache_groups for name in group.layer_names]
    layers = get_layers_from_vllm_config(vllm_config, AttentionLayerBase, names)
    backends = sorted({str(layer.get_attn_backend().get_name()) for layer in layers.values()})
    return {
        "layers": names,
        "backends": backends,
        "layout": str(_cache_layout(vllm_config)),
        "v2_runner": bool(getattr(vllm_config, "use_v2_model_runner", False)),
    }


def _cache_layout(vllm_config: Any) -> Any:
    layout = getattr(vllm_config.cache_config, "kv_cache_layout", None)
    if layout is not None:
        return layout
    from vllm.v1.attention.backends import utils

    return utils.get_kv_cache_layout() if hasattr(utils, "get_kv_cache_layout") else os.getenv("VLLM_KV_CACHE_LAYOUT")


def canonical_groups(kv_caches: Any) -> Iterator[list[tuple[Any, int]]]:
    """Yield per group the (tensor, page size in bytes) pairs whose pages make a block.

    Each tensor is int8 with one row per GPU block; the page is the used part of the row.
    """
    for refs in kv_caches.group_data_refs:
        yield [(kv_caches.tensors[ref.tensor_idx].tensor, int(ref.page_size_bytes)) for ref in refs]
