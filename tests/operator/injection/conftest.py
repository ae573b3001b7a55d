"""Pods and pools as injection sees them."""

from pathlib import Path

import pytest
import yaml

from pykvcache_contract.api.pool import KVCachePool
from pykvcache_operator.injection.inject import inject
from pykvcache_operator.injection.outcome import InjectionSettings
from pykvcache_operator.resources import NamespaceFacts

SHAPES = sorted((Path(__file__).parent / "shapes").glob("*.yaml"))
NODE_LOCAL = {"type": "NodeLocal", "capacityPerNode": "100Gi"}


class Injector:
    """Makes pools and pods, and injects them."""

    settings = InjectionSettings(
        version="1.2.3", connector_image="r/connector:1", sidecar_image="r/sidecar:1", pull_secrets=("registry",)
    )

    def pool(self, name="fast", *, status=None, deleted=False, storage=None, **spec):
        """Return a pool; NodeLocal by CSI unless `storage` says otherwise."""
        metadata = {"name": name, "uid": f"uid-{name}"}
        if deleted:
            metadata["deletionTimestamp"] = "2026-01-31T12:00:00Z"
        document = {"metadata": metadata, "spec": {"storage": storage or NODE_LOCAL, **spec}, "status": status or {}}
        return KVCachePool.parse(document)

    def pod(self, *, pool="fast", annotations=None, container=None, **spec):
        """Return a labelled pod of one vLLM container; `container` adds to it, `spec` to the spec."""
        vllm = {
            "name": "vllm",
            "image": "vllm/vllm-openai:v0.32.0",
            "command": ["vllm", "serve", "m"],
            **(container or {}),
        }
        metadata = {"name": "p", "labels": {"app": "m", "pykvcache.io/pool": pool}, "annotations": annotations or {}}
        return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": {"containers": [vllm], **spec}}

    def __call__(self, pod, *pools, namespace=None, labels=None, **more):
        """Return what becomes of a pod in namespace `team`, where these pools exist."""
        facts = namespace or NamespaceFacts("team", labels or {}, False)
        known = {pool.name: pool for pool in pools or (self.pool(),)}
        return inject(pod, pools=known, namespace=facts, settings=more.get("settings", self.settings))


@pytest.fixture(scope="session")
def injector():
    return Injector()


@pytest.fixture(scope="session")
def shapes():
    """Pods that platforms make, by name."""
    return {path.stem: yaml.safe_load(path.read_text()) for path in SHAPES}
