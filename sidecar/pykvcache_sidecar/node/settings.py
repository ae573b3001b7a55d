"""What `pykvcache-sidecar node` was asked to do: parsed once, checked, frozen."""

import os
from dataclasses import dataclass

from pykvcache_contract.errors import ConfigurationError
from pykvcache_contract.names import DRIVER_NAME
from pykvcache_sidecar.settings import INTERVAL_SECONDS_MAX


@dataclass(frozen=True, slots=True)
class NodeSettings:
    """How the agent works on its node.

    Args:
        node_name: of the Node and of the KVCacheNode that this agent writes.
        kubelet_directory: where kubelet keeps pods and plug-ins; pods' volumes are mounted below it.
        allowed_paths: a pool with a path must lie in one of these or below.
        allow_root_filesystem: pools may lie on the node's root filesystem.
        disk_patterns: where disks are mounted; `*` stands for any text within one component.
        operator_namespace: its pods, the calibration Jobs, get a directory of their own in every pool.
        interval_seconds: between two looks at everything.
    """

    node_name: str
    kubelet_directory: str
    allowed_paths: tuple[str, ...]
    allow_root_filesystem: bool
    disk_patterns: tuple[str, ...]
    operator_namespace: str
    interval_seconds: float

    def __post_init__(self) -> None:
        if not self.node_name:
            raise ConfigurationError("--node-name is empty: give the name that `kubectl get nodes` shows")
        for option, paths in (
            ("--kubelet-dir", (self.kubelet_directory,)),
            ("--allowed-path", self.allowed_paths),
            ("--disks", self.disk_patterns),
        ):
            for path in paths:
                if not path.startswith("/") or os.path.normpath(path) != path:
                    raise ConfigurationError(
                        f"{option} {path}: write a plain absolute path, without .. or a / at the end"
                    )
        if not 0.01 <= self.interval_seconds <= INTERVAL_SECONDS_MAX:
            raise ConfigurationError(
                f"--interval {self.interval_seconds:g}: choose from 0.01 to {INTERVAL_SECONDS_MAX:g} seconds"
            )

    @property
    def plugin_directory(self) -> str:
        """Return the agent's own folder below kubelet's: its socket, and what it remembers."""
        return f"{self.kubelet_directory}/plugins/{DRIVER_NAME}"

    def allows(self, path: str) -> bool:
        """Return whether a pool may lie at a path.

        >>> settings = NodeSettings("n", "/k", ("/mnt/a",), False, (), "o", 1.0)
        >>> [settings.allows(path) for path in ("/mnt/a", "/mnt/a/b", "/mnt/ab")]
        [True, True, False]
        """
        return any(path == allowed or path.startswith(allowed.rstrip("/") + "/") for allowed in self.allowed_paths)
