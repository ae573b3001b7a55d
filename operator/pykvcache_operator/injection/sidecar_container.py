"""The sidecar of pools that no node agent looks after: a native sidecar, that is, an init container that goes on.

Facts: containers after a native sidecar start when its startup probe has succeeded, or at once if it has none; with a
probe that never succeeds they never start. Probes over the network are redirected by service meshes. In a pod on the
host's network each port is the node's. What they mean: the probe must not be able to fail for a reason that would not
stop the container anyway. Therefore it runs inside the container, waits for the sidecar to listen for some seconds and
then succeeds in any case; and where the port is not ours the sidecar takes a free one and nobody asks.

Errors: none; `--patient` makes the sidecar serve whatever is wrong with the pool.
"""

from collections.abc import Mapping
from typing import Any

from pykvcache_contract.api.pool import EvictionPolicy, KVCachePool, StorageType
from pykvcache_contract.names import POOL_PATH, SIDECAR_CONTAINER
from pykvcache_operator.injection.library import VOLUME_SIZE_BYTES
from pykvcache_operator.injection.outcome import Document, InjectionSettings
from pykvcache_operator.injection.pod import all_containers, items
from pykvcache_operator.injection.resources import own_resources
from pykvcache_operator.injection.security import own_security_context
from pykvcache_operator.injection.volumes import pool_mount

PORT = 9478
PORT_NAME = "pykvcache"
WAIT_SECONDS = 5
EPHEMERAL_SHARE = 0.95
"""Of the emptyDir's sizeLimit: the kubelet evicts the pod above it, and counts folders, which the pool does not."""
DEFAULT_CAPACITY_BYTES = 64 * 2**30
"""Of a claim whose size is not known: what a pool without limits takes, too."""

_POLICIES = {EvictionPolicy.LRU: "lru", EvictionPolicy.COST_AWARE: "cost"}
_DAY_SECONDS = 86_400
_WAIT_FOR_PORT = f"""import socket, time
for _ in range({WAIT_SECONDS * 10}):
    try:
        socket.create_connection(("127.0.0.1", {PORT}), 0.1).close()
        break
    except OSError:
        time.sleep(0.1)
"""
_SERVED: Document = {
    "ports": [{"name": PORT_NAME, "containerPort": PORT}],
    "startupProbe": {
        "exec": {"command": ["python3", "-c", _WAIT_FOR_PORT]},
        "periodSeconds": 1,
        "timeoutSeconds": 6 * WAIT_SECONDS,
        "failureThreshold": 30,
    },
}


def sidecar(
    pool: KVCachePool,
    capacity_bytes: int,
    *,
    spec: Mapping[str, Any],
    vllm: Mapping[str, Any],
    settings: InjectionSettings,
) -> Document:
    """Return the container that looks after the pool of a pod.

    Args:
        capacity_bytes: see `capacity_of`.
        spec: of the pod, for what is taken and what is inherited.
        vllm: vLLM's container, whose user the sidecar shares where it is told.
    """
    is_port_free = _is_port_free(spec)
    volumes_bytes = capacity_bytes if pool.spec.storage.type is StorageType.EPHEMERAL else 0
    return {
        "name": SIDECAR_CONTAINER,
        "image": settings.sidecar_image,
        "imagePullPolicy": settings.pull_policy,
        "restartPolicy": "Always",
        "command": ["pykvcache-sidecar", "run", "--patient", *_options(pool, capacity_bytes, _listen(is_port_free))],
        **(_SERVED if is_port_free else {}),
        "securityContext": own_security_context(spec, vllm=vllm, user_of=vllm),
        **own_resources(spec, settings.sidecar_resources, storage_bytes=volumes_bytes + 2 * VOLUME_SIZE_BYTES),
        "volumeMounts": [pool_mount()],
    }


def capacity_of(pool: KVCachePool, namespace: str) -> int:
    """Return the bytes that the pool may take, of one pod or of one claim; for NodeLocal pools it means nothing."""
    declared = pool.spec.storage.capacity_bytes
    if pool.spec.storage.type is StorageType.EPHEMERAL:
        return int(EPHEMERAL_SHARE * (declared or 0))
    sizes = {claim.namespace: claim.capacity_bytes for claim in pool.status.claims}
    return sizes.get(namespace) or declared or DEFAULT_CAPACITY_BYTES


def _is_port_free(spec: Mapping[str, Any]) -> bool:
    ports = (port.get("containerPort") for container in all_containers(spec) for port in items(container, "ports"))
    return not spec.get("hostNetwork") and PORT not in ports


def _listen(is_port_free: bool) -> str:
    return f"0.0.0.0:{PORT}" if is_port_free else "127.0.0.1:0"


def _options(pool: KVCachePool, capacity_bytes: int, listen: str) -> list[str]:
    eviction = pool.spec.eviction
    options = {
        "pool": POOL_PATH,
        "capacity": capacity_bytes,
        "high": eviction.high_watermark_percent / 100,
        "low": eviction.low_watermark_percent / 100,
        "policy": _POLICIES[eviction.policy],
        "unused-days": eviction.unused_after_seconds / _DAY_SECONDS,
        "scrub-rate": pool.spec.integrity.scrub_bytes_per_second,
        "listen": listen,
    }
    if pool.spec.storage.type is StorageType.EPHEMERAL:
        options["min-free"] = pool.spec.storage.min_free_bytes  # it lies on the kubelet's disk, which must not fill
    return [f"--{name}={value}" for name, value in options.items()]
