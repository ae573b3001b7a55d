"""What the operator costs in a large cluster: `python -m pykvcache_bench.operator_scale --help`.

Makes pools, Nodes and what node agents would write in an API server that has nothing else to do (in e2e/: `python -m
harness api`), starts the operator and measures, one after the other:

first start    until every pool has its finalizer, labels and status, all of which must be written
second start   the same when nothing is left to write: reading and deciding only
change         from a node agent's report that a pool is not ready there, to the pool's status that says so
missed         with --pods: from a pod that went past the webhook to the pool's status that says so
idle           requests per second while every node agent sends its heartbeat once a minute

The simulated agents share the machine, and the API server does too: figures are upper bounds. Objects stay; use an API
server of its own.
"""

import argparse
import asyncio
import json
import random
import re
import subprocess
import sys
import time
import urllib.request
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from kubernetes.aio import client as kubernetes_client
from kubernetes.aio import config as kubernetes_config

GIB = 2**30
GROUP = "/apis/pykvcache.io/v1alpha1"
NODES_PER_POOL = 4
APPLY = "application/apply-patch+yaml"
MERGE = "application/merge-patch+json"
PARALLEL = 16
Document = dict[str, Any]


class Server:
    """Requests to the API server."""

    def __init__(self, configuration: Any) -> None:
        self._client = kubernetes_client.ApiClient(configuration)
        self._room = asyncio.Semaphore(PARALLEL)

    async def send(self, method: str, path: str, body: Document | None = None, *, kind: str = "") -> Document:
        """Send one request and return the answer; a conflict at creation is fine."""
        headers = {"Accept": "application/json", "Content-Type": kind or "application/json"}
        async with self._room:
            request = await self._client.param_serialize(
                method, path, header_params=headers, body=body, auth_settings=["BearerToken"]
            )
            answer = (await self._client.call_api(*request)).response
            async with answer:
                text: Document = await answer.json()
            if answer.status >= 400 and answer.status != 409:
                raise SystemExit(f"Error: {method} {path}: {answer.status} {text.get('message')}")
            return text

    async def watch(self, path: str, version: str) -> Any:
        """Return the open stream of a watch."""
        request = await self._client.param_serialize("GET", f"{path}?watch=true&resourceVersion={version}")
        return (await self._client.call_api(*request, _request_timeout=3600)).response

    async def close(self) -> None:
        await self._client.close()


class Fleet:
    """Simulated nodes and pools: pool i is on the nodes of group i modulo the number of groups."""

    def __init__(self, server: Server, *, pools: int, nodes: int, pods: int) -> None:
        self._server, self.pools, self.nodes, self.pods = server, pools, nodes, pods
        self.groups = max(1, nodes // NODES_PER_POOL)
        self._uids: dict[str, str] = {}

    async def make(self) -> None:
        """Make everything, in the order in which a cluster grows."""
        await _all(self._make_node(number) for number in range(self.nodes))
        await _all(self._make_pool(number) for number in range(self.pools))
        found = await self._server.send("GET", f"{GROUP}/kvcachepools")
        self._uids = {item["metadata"]["name"]: item["metadata"]["uid"] for item in found["items"]}
        await _all(self.report(number) for number in range(self.nodes))
        await _all(self.make_pod(f"pod-{number}", pool=number % self.pools) for number in range(self.pods))

    async def make_pod(self, name: str, *, pool: int, is_missed: bool = False) -> None:
        """Make a labelled pod as the webhook leaves it, or one that it did not see; nobody runs it."""
        annotations = {} if is_missed else {"pykvcache.io/injected": "bench"}
        metadata = {"name": name, "labels": {"pykvcache.io/pool": f"pool-{pool}"}, "annotations": annotations}
        spec = {
            "containers": [{"name": "vllm", "image": "none.invalid/vllm"}],
            "volumes": [{"name": "pykvcache-pool", "emptyDir": {}}],
        }
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}
        await self._server.send("POST", "/api/v1/namespaces/default/pods", pod)

    async def report(self, node: int, *, broken: int | None = None) -> None:
        """Write what a node's agent says; pool `broken` is not ready there."""
        pools = [self._entry(pool, is_ready=pool != broken) for pool in self.pools_of(node)]
        disk = {"mountPath": "/mnt/nvme", "type": "NVMe", "sizeBytes": 4000 * GIB, "freeBytes": 1000 * GIB}
        now = datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
        status = {
            "agentVersion": "bench",
            "ioUring": "Available",
            "heartbeatTime": now,
            "disks": [disk],
            "pools": pools,
        }
        path = f"{GROUP}/kvcachenodes/n{node}/status?fieldManager=pykvcache-agent&force=true"
        await self._server.send("PATCH", path, self._cache(node) | {"status": status}, kind=APPLY)

    def pools_of(self, node: int) -> range:
        """Return the numbers of the pools on a node."""
        return range(node % self.groups, self.pools, self.groups)

    def _entry(self, pool: int, *, is_ready: bool) -> Document:
        name = f"pool-{pool}"
        state = {"state": "Ready"} if is_ready else {"state": "NotReady", "reason": "DiskFull", "message": "bench"}
        place = {"path": f"/mnt/nvme/pykvcache/{name}", "capacityBytes": 10 * GIB, "usedBytes": GIB}
        return {"name": name, "uid": self._uids[name], **place, **state}

    def _cache(self, node: int) -> Document:
        return {"apiVersion": "pykvcache.io/v1alpha1", "kind": "KVCacheNode", "metadata": {"name": f"n{node}"}}

    async def _make_node(self, number: int) -> None:
        labels = {"group": str(number % self.groups)}
        node = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": f"n{number}", "labels": labels}}
        await self._server.send("POST", "/api/v1/nodes", node)
        ready = {"type": "Ready", "status": "True", "reason": "Bench", "message": "simulated"}
        patch = {"status": {"conditions": [ready]}}
        await self._server.send("PATCH", f"/api/v1/nodes/n{number}/status", patch, kind=MERGE)
        await self._server.send("POST", f"{GROUP}/kvcachenodes", self._cache(number))

    async def _make_pool(self, number: int) -> None:
        storage = {"type": "NodeLocal", "capacityPerNode": "10Gi"}
        spec = {"storage": storage, "nodeSelector": {"group": str(number % self.groups)}}
        head = {"apiVersion": "pykvcache.io/v1alpha1", "kind": "KVCachePool"}
        await self._server.send(
            "POST", f"{GROUP}/kvcachepools", {**head, "metadata": {"name": f"pool-{number}"}, "spec": spec}
        )


class Operator:
    """The operator's process and its metrics."""

    def __init__(self, log: Path) -> None:
        self.started = time.perf_counter()
        command = [
            sys.executable,
            "-m",
            "pykvcache_operator.main",
            "run",
            "--namespace=default",
            "--listen=127.0.0.1:0",
            "--follow-pods",
        ]
        with log.open("wb") as output:
            self.process = subprocess.Popen(command, stdout=output, stderr=output)
        self._log, self._port = log, 0

    async def wait_until_all_are_ready(self, pools: int) -> float:
        """Return the seconds from the start until each pool was looked at and is Ready."""
        while True:
            await asyncio.sleep(0.1)
            if self.process.poll() is not None:
                raise SystemExit(f"Error: the operator ended:\n{self._log.read_text()[-2000:]}")
            if not self._port:
                found = re.search(r"on port (\d+)", self._log.read_text())
                self._port = int(found[1]) if found else 0
                continue
            values = await asyncio.to_thread(self.metrics)
            looked_at = values.get('pykvcache_operator_reconcile_total{result="success"}', 0)
            is_calm = values.get("pykvcache_operator_reconcile_waiting") == 0
            if values.get('pykvcache_operator_pools{ready="true"}') == pools and looked_at >= pools and is_calm:
                return time.perf_counter() - self.started

    def metrics(self) -> dict[str, float]:
        """Return all series."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self._port}/metrics", timeout=30) as answer:
            lines = answer.read().decode().splitlines()
        pairs = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
        return {name: float(value) for name, value in pairs}

    def requests(self) -> dict[str, float]:
        """Return the requests sent so far, by verb."""
        pattern = re.compile(r'pykvcache_operator_api_requests_total{verb="(\w+)"}')
        return {found[1]: value for name, value in self.metrics().items() if (found := pattern.fullmatch(name))}

    def resident_mib(self) -> float:
        """Return its memory now."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(re.findall(r"VmRSS:\s+(\d+)", status)[0]) / 1024

    def cpu_seconds(self) -> float:
        """Return the processor time it took so far."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / 100


@contextmanager
def running(log: Path) -> Iterator[Operator]:
    """Run the operator meanwhile."""
    operator = Operator(log)
    try:
        yield operator
    finally:
        operator.process.terminate()
        operator.process.wait(30)


async def measure(arguments: argparse.Namespace) -> Document:
    """Return all figures."""
    configuration = kubernetes_client.Configuration()
    await kubernetes_config.load_kube_config(client_configuration=configuration)
    server = Server(configuration)
    fleet = Fleet(server, pools=arguments.pools, nodes=arguments.nodes, pods=arguments.pods)
    await fleet.make()
    log = Path(arguments.log)
    result: Document = {"pools": fleet.pools, "nodes": fleet.nodes, "pods": fleet.pods}
    result["pools_per_node"] = len(fleet.pools_of(0))
    with running(log) as operator:
        result["first_start_seconds"] = round(await operator.wait_until_all_are_ready(fleet.pools), 1)
        result["first_start_requests"] = sum(operator.requests().values())
        result["first_start_cpu_seconds"] = round(operator.cpu_seconds(), 1)
        result["first_start_resident_mib"] = round(operator.resident_mib())
    await _all(fleet.report(number) for number in range(fleet.nodes))
    with running(log) as operator:
        result["second_start_seconds"] = round(await operator.wait_until_all_are_ready(fleet.pools), 1)
        result["second_start_requests"] = operator.requests()
        result["second_start_cpu_seconds"] = round(operator.cpu_seconds(), 1)
        result["second_start_resident_mib"] = round(operator.resident_mib())
        delays = await _changes(server, fleet, count=arguments.changes)
        result |= {"change_ms_p50": _percentile(delays, 50), "change_ms_p99": _percentile(delays, 99)}
        if fleet.pods:
            delays = await _misses(server, fleet, count=min(50, fleet.pools))
            result |= {"missed_ms_p50": _percentile(delays, 50), "missed_ms_p99": _percentile(delays, 99)}
        result |= await _idle(operator, fleet, seconds=arguments.idle_seconds)
        result["resident_mib"] = round(operator.resident_mib())
    await server.close()
    return result


async def _changes(server: Server, fleet: Fleet, *, count: int) -> list[float]:
    """Break pools on single nodes, five a second, and return how many seconds each took to show."""

    async def break_it(pool: int) -> None:
        await fleet.report(pool % fleet.groups, broken=pool)

    chosen = random.Random(1).sample(range(fleet.pools), count)
    return await _delays(server, chosen, break_it, lambda status: bool(status["failingNodes"]))


async def _misses(server: Server, fleet: Fleet, *, count: int) -> list[float]:
    """Let pods go past the webhook, five a second, and return how many seconds each took to show."""

    async def miss_it(pool: int) -> None:
        await fleet.make_pod(f"missed-{pool}", pool=pool, is_missed=True)

    return await _delays(server, list(range(count)), miss_it, lambda status: bool(status.get("missedPods")))


async def _delays(
    server: Server, pools: list[int], change: Callable[[int], Awaitable[None]], shows: Callable[[Document], bool]
) -> list[float]:
    """Change pools, five a second, and return how many seconds each took to have a status that shows it."""
    version = (await server.send("GET", f"{GROUP}/kvcachepools?limit=1"))["metadata"]["resourceVersion"]
    stream = await server.watch(f"{GROUP}/kvcachepools", version)
    changed: dict[str, float] = {}
    delays: dict[str, float] = {}

    async def change_them() -> None:
        for pool in pools:
            changed[f"pool-{pool}"] = time.perf_counter()
            await change(pool)
            await asyncio.sleep(0.2)

    changing = asyncio.ensure_future(change_them())
    async for line in stream.content:
        found = json.loads(line)["object"]
        name = found["metadata"]["name"]
        if name in changed and name not in delays and shows(found["status"]):
            delays[name] = time.perf_counter() - changed[name]
        if len(delays) == len(pools):
            break
    await changing
    stream.close()
    return list(delays.values())


async def _idle(operator: Operator, fleet: Fleet, *, seconds: float) -> Document:
    """Send heartbeats at the pace of real agents and count what the operator does."""
    await _all(fleet.report(number) for number in range(fleet.nodes))
    await asyncio.sleep(35)  # figures that may wait are written after half a minute
    before, cpu, start = operator.requests(), operator.cpu_seconds(), time.perf_counter()
    number = 0
    while time.perf_counter() - start < seconds:
        await fleet.report(number % fleet.nodes)
        number += 1
        await asyncio.sleep(max(0.0, start + number * 60 / fleet.nodes - time.perf_counter()))
    took, after = time.perf_counter() - start, operator.requests()
    return {
        "idle_requests_per_second": {verb: round((after[verb] - before[verb]) / took, 2) for verb in after},
        "idle_cpu_percent": round(100 * (operator.cpu_seconds() - cpu) / took, 1),
    }


def _percentile(values: Sequence[float], percent: int) -> int:
    ordered = sorted(values)
    return round(1000 * ordered[min(len(ordered) - 1, len(ordered) * percent // 100)])


async def _all(works: Iterable[Awaitable[None]]) -> None:
    await asyncio.gather(*works)


def main() -> None:
    """Measure and print one JSON object."""
    parser = argparse.ArgumentParser(
        prog="python -m pykvcache_bench.operator_scale",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="The API server is that of $KUBECONFIG; the CRDs in crds/ must be installed.",
    )
    parser.add_argument("--pools", type=int, default=1000, help="how many KVCachePools (default: 1000)")
    parser.add_argument("--nodes", type=int, default=500, help="how many simulated nodes (default: 500)")
    parser.add_argument("--pods", type=int, default=0, help="how many labelled pods (default: 0)")
    parser.add_argument("--changes", type=int, default=200, help="how many changes are timed (default: 200)")
    parser.add_argument("--idle-seconds", type=float, default=60, help="how long to count when idle (default: 60)")
    parser.add_argument("--log", default="operator.log", help="file for the operator's log")
    print(json.dumps(asyncio.run(measure(parser.parse_args())), indent=2))


if __name__ == "__main__":
    main()
