"""The previous version of py-kvcache, from its source: its images, its chart, and a vLLM pod as its users wrote one."""

import json
import tarfile
from pathlib import Path

from harness import images, vllm_pods
from harness.binaries import make_once
from harness.chart import RELEASE
from harness.cluster import LocalCluster
from harness.helm import Helm
from harness.kubectl import Object

VERSION = "0.1.0"
SOURCE = Path(__file__).parents[1] / "previous" / f"py-kvcache-{VERSION}.tar.xz"
MOUNT = "/pykvcache"
STRICT = {
    "allowPrivilegeEscalation": False,
    "capabilities": {"drop": ["ALL"]},
    "runAsUser": 65532,
}


class Previous:
    """One cluster's images of it."""

    def __init__(self, cluster: LocalCluster, cache: Path) -> None:
        """Unpack, build and load what the cache and the nodes lack."""
        self.source = make_once(cache / SOURCE.name.removesuffix(".tar.xz"), _unpack)
        self.names = {target: self._load(cluster, target, cache) for target in ("operator", "sidecar", "connector")}
        self._kubelet_root = cluster.kubelet_root

    def install(self, helm: Helm) -> None:
        """Install its chart, as the release that the present one will upgrade, and wait until its pods are ready."""
        values = {"agent.kubeletDir": self._kubelet_root}
        for target in ("operator", "sidecar"):
            registry, _, name = self.names[target].rpartition("/")
            repository, _, tag = name.partition(":")
            values |= {f"images.{target}.repository": repository, f"images.{target}.tag": tag}
            values["images.registry"] = registry
        options = [part for path, value in values.items() for part in ("--set-json", f"{path}={json.dumps(value)}")]
        helm.run("install", RELEASE, str(self.source / "charts" / RELEASE), "--wait", "--timeout=180s", *options)

    def vllm_pod(self, name: str, *, pool: str) -> Object:
        """Return a pod of vLLM with the connector of that version, put there by hand as it had to be."""
        pod = vllm_pods.pod(name, node="node1")
        spec, (container,) = pod["spec"], pod["spec"]["containers"]
        container["args"] += ["--prefix-caching-hash-algo=sha256_cbor", "--kv-transfer-config", _transfer_config()]
        container["env"] += [
            {"name": "PYTHONPATH", "value": f"{MOUNT}/library"},
            {"name": "PYTHONHASHSEED", "value": "0"},
        ]
        library = {"name": "library", "mountPath": f"{MOUNT}/library"}
        container["volumeMounts"] += [library, {"name": "pool", "mountPath": f"{MOUNT}/pool"}]
        copy = {"name": "library", "image": self.names["connector"], "args": [library["mountPath"]]}
        spec["initContainers"] = [
            {**copy, "imagePullPolicy": "Never", "securityContext": STRICT, "volumeMounts": [library]}
        ]
        spec["volumes"] += [
            {"name": "library", "emptyDir": {}},
            {"name": "pool", "csi": {"driver": "csi.pykvcache.io", "volumeAttributes": {"pool": pool}}},
        ]
        return pod

    def _load(self, cluster: LocalCluster, target: str, cache: Path) -> str:
        name = images.local_name(target, self.source)
        cluster.load(images.build(target, cache, self.source), name)
        return name


def _unpack(folder: Path) -> None:
    with tarfile.open(SOURCE) as archive:
        archive.extractall(folder, filter="data")


def _transfer_config() -> str:
    options = {"pool": f"{MOUNT}/pool", "staging": "32MiB", "block_size": vllm_pods.BLOCK_TOKENS}
    extra = {"spec_name": "PyKVCacheSpec", "spec_module_path": "pykvcache_connector.spec", **options}
    config = {
        "kv_connector": "PyKVCacheConnector",
        "kv_connector_module_path": "pykvcache_connector.connector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": extra,
    }
    return json.dumps(config)
