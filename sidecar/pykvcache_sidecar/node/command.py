"""`pykvcache-sidecar node`: the options of the node agent.

The agent itself is loaded when it is called: it needs gRPC and a Kubernetes client, which `pykvcache-sidecar run`, in
every pod, has no use for.
"""

import logging
import sys
from collections.abc import Callable

import typer

from pykvcache_contract.errors import ConfigurationError
from pykvcache_sidecar.node.disks import DEFAULT_PATTERNS
from pykvcache_sidecar.node.settings import NodeSettings
from pykvcache_sidecar.run import fail
from pykvcache_sidecar.settings import parse_listen


def command(
    node_name: str = typer.Option(
        ..., envvar="NODE_NAME", help="Name of the Node object of this machine, as `kubectl get nodes` shows it."
    ),
    kubelet_dir: str = typer.Option(
        "/var/lib/kubelet",
        metavar="DIR",
        help="The kubelet's --root-dir, mounted into the agent at the same path; pods Bidirectional.",
    ),
    allowed_path: list[str] = typer.Option(
        ["/mnt"], metavar="DIR", help="A pool with a path must lie in such a directory or below. Repeat it for more."
    ),
    disks: str = typer.Option(
        ",".join(DEFAULT_PATTERNS),
        metavar="PATTERN,…",
        help="Where disks are mounted that pools without a path may use; * stands for any text between two slashes.",
    ),
    allow_root_filesystem: bool = typer.Option(
        False,
        "--allow-root-filesystem",
        help="Let pools lie on the node's root filesystem: for tests and for machines with one disk.",
    ),
    operator_namespace: str = typer.Option(
        "pykvcache-system",
        metavar="NAMESPACE",
        help="Where the operator runs its calibration Jobs: they may mount every pool, in a directory of their own.",
    ),
    listen: str = typer.Option(
        "0.0.0.0:9479", metavar="ADDRESS:PORT", help="Where /metrics, /healthz, /readyz and /status are served."
    ),
    interval: float = typer.Option(1.0, help="Seconds between two looks at each pool, at most 10."),
) -> None:
    """Keep the pools of one Kubernetes node. Runs as root, once on each node, until SIGTERM or SIGINT.

    It finds disks that are mounted (it never formats one), prepares the directory of each KVCachePool that belongs to
    the node, mounts it into pods that name it (CSI driver csi.pykvcache.io), cares for it as `pykvcache-sidecar run`
    does, erases it when the pool is deleted, and tells of all that in the KVCacheNode named like the node.

    The chart of py-kvcache runs it as a DaemonSet. It finds the API server by its service account, or by KUBECONFIG.

    Exit status: 0 after a signal; 2 if an option is wrong, or the kubelet's directory is not there.
    """
    try:
        host, port = parse_listen(listen)
        settings = NodeSettings(
            node_name=node_name,
            kubelet_directory=kubelet_dir,
            allowed_paths=tuple(allowed_path),
            allow_root_filesystem=allow_root_filesystem,
            disk_patterns=tuple(filter(None, (pattern.strip() for pattern in disks.split(",")))),
            operator_namespace=operator_namespace,
            interval_seconds=interval,
        )
        logging.basicConfig(
            stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s [%(threadName)s] %(message)s"
        )
        _load_run()(settings, host=host, port=port)
    except ConfigurationError as error:
        fail(str(error))


def _load_run() -> Callable[..., None]:
    try:
        from pykvcache_sidecar.node.run import run
    except ModuleNotFoundError as missing:
        raise ConfigurationError(
            f"pykvcache-sidecar node needs {missing.name}. Install it: pip install 'py-kvcache[node]'"
        ) from None
    return run
