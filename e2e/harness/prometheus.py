"""A real Prometheus on a node: scrapes the pods that it is told of where their annotations say, answers queries.

Debian's Prometheus is built without the discovery of pods, so their annotations are read here.
"""

import json
import os
import shutil
from collections.abc import Iterable
from typing import Any

from harness.binaries import require
from harness.kubectl import Object
from harness.node import Node
from harness.waiting import NotYetError, wait_for

PORT = 9090
CONFIGURATION = """\
global: {{scrape_interval: 5s, scrape_timeout: 5s}}
scrape_configs:
  - job_name: pods
    file_sd_configs: [{{files: [{targets}], refresh_interval: 1s}}]
"""
ANNOTATION = "prometheus.io/"


class Prometheus:
    """One, in the network of a node; its data lie in the node's folder."""

    def __init__(self, node: Node) -> None:
        """Start it and wait until it answers.

        Raises:
            MissingError: Debian's package is not there.
            RuntimeError, TimeoutError: it did not start; with its log's end.
        """
        program = require("prometheus", "promtool")
        folder = node.state / "prometheus"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        self._node, self._targets = node, folder / "targets.json"
        (folder / "prometheus.yml").write_text(CONFIGURATION.format(targets=self._targets))
        self.scrape([])
        options = [
            f"--config.file={folder}/prometheus.yml",
            f"--storage.tsdb.path={folder}/data",
            f"--web.listen-address=127.0.0.1:{PORT}",
        ]
        self._process = node.sandbox.spawn("prometheus", [program, *options])
        wait_for("Prometheus", self._is_ready, limit_s=180)

    def scrape(self, pods: Iterable[Object]) -> None:
        """Scrape these pods, and no others, if their annotations ask for it."""
        groups = [target for pod in pods if (target := _target(pod))]
        new = self._targets.with_suffix(".new")
        new.write_text(json.dumps(groups))
        os.replace(new, self._targets)

    def query(self, expression: str) -> list[dict[str, Any]]:
        """Return the rows of an instant query: each with `metric`, its labels, and `value`.

        Raises:
            NotYetError: it failed, for example as the expression is wrong.
        """
        command = ["promtool", "query", "instant", "-o", "json", f"http://127.0.0.1:{PORT}", expression]
        rows: list[dict[str, Any]] = json.loads(self._node.sandbox.run(*command))
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

    def _is_ready(self) -> bool:
        self._process.check()
        return self.query("vector(1)") != []


def _target(pod: Object) -> dict[str, Any] | None:
    """Return where a pod serves metrics and how its series are labelled, as Prometheus reads it from a file."""
    metadata = pod["metadata"]
    annotations = metadata.get("annotations", {})
    address = pod["status"].get("podIP")
    if annotations.get(f"{ANNOTATION}scrape") != "true" or not address:
        return None
    labels = {"namespace": metadata["namespace"], "pod": metadata["name"]}
    return {"targets": [f"{address}:{annotations[f'{ANNOTATION}port']}"], "labels": labels}
