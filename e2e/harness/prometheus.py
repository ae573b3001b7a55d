"""A real Prometheus on a node: finds pods by the usual annotations, scrapes them, answers queries."""

import json
import shutil
from pathlib import Path
from typing import Any

from harness.binaries import require
from harness.control_plane import SERVICE_IP
from harness.node import Node
from harness.processes import Process
from harness.waiting import NotYetError, wait_for

PORT = 9090
CONFIGURATION = """\
global: {{scrape_interval: 1s, scrape_timeout: 1s}}
scrape_configs:
  - job_name: pods
    kubernetes_sd_configs: [{{role: pod, kubeconfig_file: {kubeconfig}}}]
    relabel_configs:
      - {{source_labels: [__meta_kubernetes_pod_annotation_prometheus_io_scrape], regex: "true", action: keep}}
      - {{source_labels: [__meta_kubernetes_pod_container_init], regex: "true", action: drop}}
      - source_labels: [__address__, __meta_kubernetes_pod_annotation_prometheus_io_port]
        regex: '([^:]+)(?::\\d+)?;(\\d+)'
        replacement: $1:$2
        target_label: __address__
      - {{source_labels: [__meta_kubernetes_namespace], target_label: namespace}}
      - {{source_labels: [__meta_kubernetes_pod_name], target_label: pod}}
"""


class Prometheus:
    """One, in the network of a node; its data lie in the node's folder."""

    def __init__(self, node: Node) -> None:
        """Start it and wait until it answers.

        Raises:
            MissingError: Debian's package is not there.
            TimeoutError: it did not start; with its log's end.
        """
        program = require("prometheus", "promtool")
        self._node, folder = node, node.state / "prometheus"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        kubeconfig = node.authority.kubeconfig(folder / "kubeconfig", user="admin", server=f"https://{SERVICE_IP}:443")
        (folder / "prometheus.yml").write_text(CONFIGURATION.format(kubeconfig=kubeconfig))
        self._process = self._start(program, folder)
        wait_for("Prometheus", self._is_ready, limit_s=90)

    def query(self, expression: str) -> list[dict[str, Any]]:
        """Return the rows of an instant query: each with `metric`, its labels, and `value`.

        Raises:
            NotYetError: it failed, for example as the expression is wrong.
        """
        text = self._run("promtool", "query", "instant", "-o", "json", f"http://127.0.0.1:{PORT}", expression)
        rows: list[dict[str, Any]] = json.loads(text)
        return rows

    def value(self, expression: str) -> float:
        """Return the value of a query's only row.

        Raises:
            NotYetError: there is none, or several.
        """
        rows = self.query(expression)
        if len(rows) != 1:
            raise NotYetError(f"{expression}: {rows}")
        return float(rows[0]["value"][1])

    def stop(self) -> None:
        """End it."""
        self._process.kill()

    def _start(self, program: Path, folder: Path) -> Process:
        options = [
            f"--config.file={folder}/prometheus.yml",
            f"--storage.tsdb.path={folder}/data",
            f"--web.listen-address=127.0.0.1:{PORT}",
        ]
        return self._node.sandbox.spawn("prometheus", [program, *options])

    def _is_ready(self) -> bool:
        self._process.check()
        return self.query("vector(1)") != []

    def _run(self, *command: str) -> str:
        return self._node.sandbox.run(*command)
