"""The node agent, all parts put together: one process on each node.

The main thread waits for SIGTERM or SIGINT. Beside it: threads that watch the API server, one that writes this node's
KVCacheNode, one that surveys the disks, one that looks for namespaces that are gone, one that gives orders, one for
each pool, those of each pool directory's care, gRPC's for kubelet, and HTTP's. The end takes less than two seconds
whatever they do: mounts stay, pods go on, and what a kill leaves behind the next start takes up.
"""

import importlib.metadata
import logging
import os
import threading

from pykvcache_contract.api.node import DISKS_MAX, POOLS_MAX, AgentStatus
from pykvcache_contract.errors import ConfigurationError
from pykvcache_sidecar import signals
from pykvcache_sidecar.node.answers import NodeAnswers, Views
from pykvcache_sidecar.node.api import Api, load_configuration
from pykvcache_sidecar.node.cluster import Cluster
from pykvcache_sidecar.node.csi import NodeService
from pykvcache_sidecar.node.exporter import NodeNow, PoolNow
from pykvcache_sidecar.node.kernel import io_uring, kernel_release
from pykvcache_sidecar.node.memory import Memory
from pykvcache_sidecar.node.namespaces import NamespaceCheck
from pykvcache_sidecar.node.orders import Surroundings
from pykvcache_sidecar.node.pools import PoolManager
from pykvcache_sidecar.node.registration import Driver
from pykvcache_sidecar.node.settings import NodeSettings
from pykvcache_sidecar.node.sockets import SocketError
from pykvcache_sidecar.node.survey import Survey
from pykvcache_sidecar.node.watcher import KubernetesSource
from pykvcache_sidecar.node.writer import StatusWriter
from pykvcache_sidecar.server import serve

logger = logging.getLogger(__name__)

END_SECONDS = 0.5
"""How long the end waits for calls of kubelet that are at work."""
DRIVER_CHECK_SECONDS = 5.0


def run(settings: NodeSettings, *, host: str, port: int) -> None:
    """Run the agent until a signal comes.

    Raises:
        ConfigurationError: the start failed; nothing runs.
    """
    signals.hold()
    agent = Agent(settings)
    agent.start(host=host, port=port)
    signals.wait()
    agent.stop()
    logger.info("stopped")
    # Threads that sit on a disk or on the network are left alone: they hold nothing that the next start needs.
    logging.shutdown()
    os._exit(0)


class Agent:
    """All parts of the agent, put together.

    Raises:
        ConfigurationError: there is no way to the API server.
    """

    def __init__(self, settings: NodeSettings) -> None:
        self._settings = settings
        self._version = importlib.metadata.version("py-kvcache")
        self._io_uring = io_uring()
        self._stopped = threading.Event()
        api = Api(load_configuration())
        self._cluster = Cluster()
        self._source = KubernetesSource(api, self._cluster, node_name=settings.node_name)
        memory = _memory(settings)
        self._survey = Survey(
            patterns=settings.disk_patterns,
            cluster=self._cluster,
            memory=memory,
            list_uids=self._source.list_uids,
            on_change=lambda: self._manager.wake.set(),
        )
        self._manager = PoolManager(
            cluster=self._cluster,
            survey=self._survey,
            surroundings=Surroundings(settings, memory, self._survey.disks),
        )
        self._namespaces = NamespaceCheck(workers=self._manager.workers, list_namespaces=self._source.list_namespaces)
        self._cluster.on_change = self._manager.wake.set
        self._writer = StatusWriter(api, cluster=self._cluster, node_name=settings.node_name, status=self.status)
        service = NodeService(
            self._manager,
            node_name=settings.node_name,
            kubelet_directory=settings.kubelet_directory,
            version=self._version,
        )
        self._driver = Driver(service, kubelet_directory=settings.kubelet_directory)

    def start(self, *, host: str, port: int) -> None:
        """Start everything.

        Raises:
            ConfigurationError: the address cannot be used, or the kubelet's directory is not there.
        """
        views = Views(
            now=self.now,
            status=self.status,
            tick_age_seconds=self._manager.tick_age_seconds,
            trouble=self.trouble,
        )
        self._server = serve(NodeAnswers(views).paths, host=host, port=port)
        try:
            self._driver.start()
        except SocketError as error:
            raise ConfigurationError(str(error)) from error
        self._source.start(self._stopped)
        for name, loop in (
            ("survey", self._survey.run),
            ("manager", self._manager.run),
            ("namespaces", self._namespaces.run),
            ("status", self._writer.run),
            ("driver", self._check_driver),
        ):
            threading.Thread(target=loop, args=(self._stopped,), name=name, daemon=True).start()
        logger.info(
            "node agent %s on node %s: disks at %s, pools allowed below %s; listening on %s:%s",
            self._version,
            self._settings.node_name,
            ", ".join(self._settings.disk_patterns),
            ", ".join(self._settings.allowed_paths),
            host,
            self._server.server_address[1],
        )

    def stop(self) -> None:
        """Take the driver off kubelet's list, and let every loop end."""
        self._stopped.set()
        self._manager.stop()
        self._manager.wake.set()
        self._driver.stop(grace_seconds=END_SECONDS)
        self._server.shutdown()

    def status(self) -> AgentStatus:
        """Return what is written into the KVCacheNode."""
        return AgentStatus(
            agent_version=self._version,
            kernel=kernel_release(),
            io_uring=self._io_uring,
            disks=tuple(self._survey.disks()[:DISKS_MAX]),
            pools=tuple(self._manager.reports()[:POOLS_MAX]),
        )

    def now(self) -> NodeNow:
        """Return everything that is counted and measured."""
        reports = {report.uid: report for report in self._manager.reports()}
        return NodeNow(
            pools=tuple(
                PoolNow(reports[worker.uid], tuple(worker.snapshots()), worker.problems())
                for worker in self._manager.workers()
                if worker.uid in reports
            ),
            disks=len(self._survey.disks()),
            is_registered=not self._driver.trouble,
            heard_seconds=self._source.heard_seconds,
            volumes=self._manager.volumes(),
            status_writes=dict(self._writer.writes),
        )

    def trouble(self) -> str:
        """Return why pods get no volumes; empty if they do."""
        view = self._cluster.view()
        if view.pools is None:
            return "the API server has not told which pools there are"
        if view.labels is None:
            return f"Node {self._settings.node_name} could not be read: is it the name that kubectl get nodes shows?"
        return self._driver.trouble and f"kubelet has not registered the driver: {self._driver.trouble}"

    def _check_driver(self, stopped: threading.Event) -> None:
        while not stopped.wait(DRIVER_CHECK_SECONDS):
            try:
                self._driver.check()
            except SocketError as error:
                logger.error("%s", error)


def _memory(settings: NodeSettings) -> Memory:
    try:
        return Memory(settings.plugin_directory)
    except OSError as error:
        raise ConfigurationError(
            f"--kubelet-dir {settings.kubelet_directory}: {settings.plugin_directory} cannot be made "
            f"({error.strerror}). Mount the kubelet's directory into the agent at the same path; it runs as root."
        ) from error
