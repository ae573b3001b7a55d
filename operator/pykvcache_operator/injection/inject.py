"""What is done to a pod so that its vLLM uses a pool: one pure function, for the webhook and for manifests.

Nothing of the user's is removed, reordered or loosened; the pod given is not changed. Done twice it is done once. What
cannot have the cache goes without, with the reason as the answer: no input makes it raise anything.
"""

from collections.abc import Mapping
from typing import Any

from pykvcache_contract.api.pool import KVCachePool, StorageType
from pykvcache_contract.names import INJECTED_ANNOTATION, POOL_NAME_LABEL
from pykvcache_operator.calibration_job import COMPONENT_LABELS
from pykvcache_operator.injection import annotations
from pykvcache_operator.injection.checks import check_namespace, check_pod, check_volume, find_pool
from pykvcache_operator.injection.containers import choose
from pykvcache_operator.injection.library import deliver
from pykvcache_operator.injection.outcome import Document, InjectionSettings, Outcome, Reject, Result, Skip
from pykvcache_operator.injection.parts import (
    Own,
    check_names,
    check_size,
    has_room,
    with_mounts,
    with_own,
    without_own,
)
from pykvcache_operator.injection.pod import check_shape, metadata_of
from pykvcache_operator.injection.resources import fitting_staging
from pykvcache_operator.injection.sidecar_container import capacity_of, sidecar
from pykvcache_operator.injection.transfer_config import TransferOptions
from pykvcache_operator.injection.vllm_container import configure
from pykvcache_operator.injection.volumes import needs_sidecar, pool_mount, pool_volume, volume_warnings
from pykvcache_operator.resources import NamespaceFacts


def inject(
    pod: Document,
    *,
    pools: Mapping[str, KVCachePool],
    namespace: NamespaceFacts | None,
    settings: InjectionSettings,
) -> Outcome:
    """Give a pod the cache, if it is labelled for a pool and can have it.

    Args:
        pod: as it comes, or the template of a Deployment and the like; never changed.
        pools: all, by name.
        namespace: in which the pod will be. None: it is not known, offline; then allowedNamespaces and Pod Security are
            not looked at, and metadata.namespace tells the name where it is needed.
    """
    if not _wants_cache(pod):
        return Outcome(Result.UNCHANGED, pod)
    try:
        return _inject(pod, pools, namespace, settings)
    except Skip as skip:
        return _skipped(pod, skip)
    except Reject as rejection:
        return Outcome(Result.REJECTED, pod, message=annotations.clip(str(rejection)))


def _wants_cache(pod: Document) -> bool:
    """Say whether the pod is labelled, not done yet, and none of our own: calibration Jobs have that label too."""
    labels = metadata_of(pod, "labels")
    is_own = all(labels.get(key) == value for key, value in COMPONENT_LABELS.items())
    return POOL_NAME_LABEL in labels and not is_own and INJECTED_ANNOTATION not in metadata_of(pod, "annotations")


def _inject(
    pod: Document, pools: Mapping[str, KVCachePool], namespace: NamespaceFacts | None, settings: InjectionSettings
) -> Outcome:
    check_shape(pod)
    check_pod(pod)
    pool = find_pool(metadata_of(pod, "labels")[POOL_NAME_LABEL], pools)
    if namespace is not None:
        check_namespace(pool, namespace)
    name = namespace.name if namespace is not None else _declared_namespace(pod)
    check_volume(pool, name)
    return _build(pod, pool, name, settings)


def _build(pod: Document, pool: KVCachePool, namespace: str, settings: InjectionSettings) -> Outcome:
    spec, told = without_own(pod["spec"]), metadata_of(pod, "annotations")
    wishes = annotations.read_wishes(told, pool)
    index = choose(spec, told)
    vllm = spec["containers"][index]
    check_names(spec, vllm)
    delivery = deliver(wishes.library, spec=spec, vllm=vllm, settings=settings)
    staging_bytes, about_memory = fitting_staging(spec, vllm, wishes.staging_bytes)
    options = _options(pool, namespace, staging_bytes=staging_bytes, library_path=delivery.path)
    configured = configure(vllm, options=options, annotations=told, version=settings.version)
    warnings = (*configured.warnings, *about_memory, *volume_warnings(pool, spec))
    sidecars = _sidecars(pool, namespace, spec=spec, vllm=vllm, settings=settings)
    own = Own(
        vllm=with_mounts(configured.container, [*delivery.mounts, pool_mount()]),
        init_containers=[*delivery.init_containers, *sidecars],
        volumes=[*delivery.volumes, pool_volume(pool, namespace)],
    )
    version = settings.version
    new = {
        **pod,
        "metadata": annotations.injected(pod, version=version, warnings=warnings, volumes=own.volumes),
        "spec": with_own(spec, index, own, settings.pull_secrets),
    }
    check_size(new)
    return Outcome(Result.INJECTED, new, warnings=warnings)


def _options(pool: KVCachePool, namespace: str, *, staging_bytes: int, library_path: str) -> TransferOptions:
    # A sidecar that never came up would set no limit, and the kubelet evicts a pod whose emptyDir is too full.
    is_bounded = pool.spec.storage.type is StorageType.EPHEMERAL
    return TransferOptions(
        staging_bytes=staging_bytes,
        block_tokens=pool.spec.injection.block_tokens,
        create_pool=needs_sidecar(pool),
        capacity_bytes=capacity_of(pool, namespace) if is_bounded else 0,
        library_path=library_path,
    )


def _sidecars(
    pool: KVCachePool, namespace: str, *, spec: Mapping[str, Any], vllm: Document, settings: InjectionSettings
) -> list[Document]:
    if not needs_sidecar(pool):
        return []
    return [sidecar(pool, capacity_of(pool, namespace), spec=spec, vllm=vllm, settings=settings)]


def _skipped(pod: Document, skip: Skip) -> Outcome:
    message = annotations.clip(skip.message)
    metadata = annotations.skipped(pod, reason=skip.reason, message=message)
    new = pod if metadata is None else {**pod, "metadata": metadata}
    return Outcome(Result.SKIPPED, new if has_room(new) else pod, skip.reason, message)


def _declared_namespace(pod: Document) -> str:
    name = (pod.get("metadata") or {}).get("namespace")
    return name if isinstance(name, str) else ""
