"""How long the webhook takes to answer: `python -m pykvcache_bench.webhook --help`.

Starts `pykvcache-operator webhook` on one processor beside a stand-in for the API server, and sends it reviews as the
API server does: over TLS, on connections that stay open, so many a second at times that do not depend on the answers. A
request counts from when it was due, so one that waits behind slow ones counts in full.

In turn with it the same bodies go to a server that reads and sends them back, on the same processor: what TLS, HTTP and
the event loop cost by themselves. The ratio to that limit is the part that is ours.

On a machine with other work `--realtime` keeps that out of the figures (as root): everything measured goes first, the
servers on their processor and the sender on the others.
"""

import argparse
import asyncio
import copy
import json
import os
import re
import ssl
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

POOLS = "/apis/pykvcache.io/v1alpha1/kvcachepools"
NAMESPACES = "/api/v1/namespaces"
NAMESPACE_COUNT = 500
POOL_COUNT = 100
SUBJECT = "/CN=webhook"
START_SECONDS_MAX = 60.0
BODY_BYTES_MAX = 8 * 2**20
WARM_SECONDS = 3.0
ECHO = "pykvcache_bench.webhook"
Document = dict[str, Any]


# ---- pods ----


def plain_pod() -> Document:
    """Return a vLLM pod as people write it."""
    container = {
        "name": "vllm",
        "image": "vllm/vllm-openai:v0.32.0",
        "command": ["vllm", "serve", "/models/llama"],
        "args": ["--tensor-parallel-size", "2", "--max-model-len", "32768"],
        "env": [{"name": "HF_HOME", "value": "/cache"}],
        "resources": {"requests": {"cpu": "8", "memory": "64Gi"}, "limits": {"nvidia.com/gpu": "2", "memory": "64Gi"}},
        "volumeMounts": [{"name": "models", "mountPath": "/models"}],
    }
    volume = {"name": "models", "persistentVolumeClaim": {"claimName": "models"}}
    labels = {"app": "vllm", "pykvcache.io/pool": "pool-1"}
    metadata = {"generateName": "vllm-7d9c-", "labels": labels, "namespace": "team-1"}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": _spec([container], [volume])}


def platform_pod() -> Document:
    """Return one as platforms make them: several containers, probes, and much environment."""
    pod = plain_pod()
    (vllm,) = pod["spec"]["containers"]
    probe = {"httpGet": {"path": "/health", "port": 8000}, "periodSeconds": 10, "failureThreshold": 60}
    vllm |= {"startupProbe": probe, "livenessProbe": probe, "readinessProbe": probe}
    vllm["env"] += [{"name": f"PLATFORM_{number}", "value": "some value"} for number in range(60)]
    helpers = [
        {"name": f"helper-{number}", "image": "registry.example/helper:1", "args": ["run"], "livenessProbe": probe}
        for number in range(4)
    ]
    pod["spec"]["containers"] += helpers
    pod["metadata"]["annotations"] = {f"platform.example/key-{number}": "x" * 60 for number in range(30)}
    return pod


def shell_pod() -> Document:
    """Return one that starts vLLM by a shell, so that the plug-in is used."""
    pod = plain_pod()
    script = "set -e; python -c 'import torch'; exec vllm serve /models/llama --max-model-len 32768"
    pod["spec"]["containers"][0] |= {"command": ["sh", "-c", script], "args": []}
    return pod


def large_pod() -> Document:
    """Return one with 100 KiB of environment."""
    pod = plain_pod()
    pod["spec"]["containers"][0]["env"] += [{"name": f"LARGE_{n}", "value": "x" * 1000} for n in range(100)]
    return pod


def skipped_pod() -> Document:
    """Return one that has a kv-transfer-config of its own."""
    pod = plain_pod()
    config = json.dumps({"kv_connector": "NixlConnector", "kv_role": "kv_both"})
    pod["spec"]["containers"][0]["args"] += ["--kv-transfer-config", config]
    return pod


SHAPES = (plain_pod, platform_pod, shell_pod, large_pod, skipped_pod)


def _spec(containers: list[Document], volumes: list[Document]) -> Document:
    return {
        "containers": containers,
        "volumes": volumes,
        "restartPolicy": "Always",
        "terminationGracePeriodSeconds": 30,
        "serviceAccountName": "default",
        "securityContext": {},
        "schedulerName": "default-scheduler",
    }


def bodies() -> list[bytes]:
    """Return one review of each shape."""
    return [json.dumps(_review(make())).encode() for make in SHAPES]


def _review(pod: Document) -> Document:
    kind = {"group": "", "version": "v1", "kind": "Pod"}
    request = {
        "uid": "705ab4f5-6393-11e8-b7cc-42010a800002",
        "kind": kind,
        "resource": {"group": "", "version": "v1", "resource": "pods"},
        "namespace": "team-1",
        "operation": "CREATE",
        "userInfo": {"username": "system:serviceaccount:kube-system:replicaset-controller", "groups": ["a", "b"]},
        "object": pod,
        "oldObject": None,
        "dryRun": False,
    }
    return {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": request}


# ---- the servers ----


class StandIn:
    """As much of an API server as the webhook reads from: pools and namespaces that do not change."""

    async def start(self) -> int:
        """Serve; return the port."""
        application = web.Application()
        application.router.add_get(POOLS, self._pools)
        application.router.add_get(NAMESPACES, self._namespaces)
        self._runner = web.AppRunner(application, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        return int(self._runner.addresses[0][1])

    async def stop(self) -> None:
        """End it."""
        await self._runner.cleanup()

    async def _pools(self, request: web.Request) -> web.Response:
        storage = {"type": "NodeLocal", "capacityPerNode": "100Gi"}
        return await self._list(request, [(f"pool-{n}", {"spec": {"storage": storage}}) for n in range(POOL_COUNT)])

    async def _namespaces(self, request: web.Request) -> web.Response:
        names = [f"team-{number}" for number in range(NAMESPACE_COUNT)]
        return await self._list(request, [(name, {"labels": {"kubernetes.io/metadata.name": name}}) for name in names])

    async def _list(self, request: web.Request, rows: Sequence[tuple[str, Document]]) -> web.Response:
        if request.query.get("watch") == "true":
            await asyncio.Event().wait()
        items = []
        for name, more in rows:
            more = copy.deepcopy(more)
            metadata = {"name": name, "uid": name, "resourceVersion": "1", "labels": more.pop("labels", {})}
            items.append({"metadata": metadata, **more})
        return web.json_response({"metadata": {"resourceVersion": "1"}, "items": items})


async def echo(folder: Path) -> None:
    """Serve a server that sends back what it gets, until the process is ended."""

    async def answer(request: web.Request) -> web.Response:
        return web.Response(body=await request.read(), content_type="application/json")

    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(folder / "tls.crt", folder / "tls.key")
    application = web.Application(client_max_size=BODY_BYTES_MAX)
    application.router.add_post("/mutate", answer)
    runner = web.AppRunner(application, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=tls).start()
    print(f"serving reviews on port {runner.addresses[0][1]}", flush=True)
    await asyncio.Event().wait()


def make_certificate(folder: Path) -> None:
    """Write tls.crt and tls.key, of the kind that the operator makes."""
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    command += ["-keyout", str(folder / "tls.key"), "-out", str(folder / "tls.crt"), "-days", "1", "-subj", SUBJECT]
    subprocess.run([*command, "-addext", "subjectAltName=IP:127.0.0.1"], check=True, capture_output=True)


def write_kubeconfig(path: Path, port: int) -> None:
    """Write a way to the stand-in."""
    named = {"name": "bench"}
    document = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{**named, "cluster": {"server": f"http://127.0.0.1:{port}"}}],
        "users": [{**named, "user": {}}],
        "contexts": [{**named, "context": {"cluster": "bench", "user": "bench"}}],
        "current-context": "bench",
    }
    path.write_text(json.dumps(document))


@contextmanager
def pinned(command: Sequence[str], *, processor: int, log: Path, kubeconfig: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run a command on one processor meanwhile; its output goes to `log`."""
    environment = {"KUBECONFIG": str(kubeconfig), "PATH": "/usr/bin:/bin", "PYTHONUNBUFFERED": "1"}
    with log.open("wb") as output:
        process = subprocess.Popen(
            ["taskset", "-c", str(processor), *command], stdout=output, stderr=output, env=environment
        )
    try:
        yield process
    finally:
        process.terminate()
        process.wait(30)


async def port_of(log: Path, process: "subprocess.Popen[bytes]", *, what: str) -> int:
    """Return the port that a process logs."""
    deadline = time.monotonic() + START_SECONDS_MAX
    while not (found := re.search(rf"{what} on port (\d+)", read := _text(log))):
        if process.poll() is not None or time.monotonic() > deadline:
            raise SystemExit(f"Error: a server did not start:\n{read[-2000:]}")
        await asyncio.sleep(0.05)
    return int(found[1])


def _text(log: Path) -> str:
    return log.read_text()


def cpu_seconds(process: "subprocess.Popen[bytes]") -> float:
    """Return the processor time that a process took so far."""
    fields = Path(f"/proc/{process.pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def go_first(processor: int) -> None:
    """Give this process, and those that it starts, realtime priority; itself on the other processors."""
    others = os.sched_getaffinity(0) - {processor}
    os.sched_setaffinity(0, others or {processor})
    os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(10))


async def until_ready(port: int) -> None:
    """Return when the webhook has read the stand-in's objects."""
    deadline = time.monotonic() + START_SECONDS_MAX
    async with aiohttp.ClientSession() as session:
        while True:
            async with session.get(f"http://127.0.0.1:{port}/readyz") as answer:
                text = await answer.text()
            if answer.status == 200:
                return
            if time.monotonic() > deadline:
                raise SystemExit(f"Error: the webhook is not ready: {text}")
            await asyncio.sleep(0.1)


# ---- measuring ----


async def load(port: int, *, folder: Path, rate: float, seconds: float, connections: int) -> list[float]:
    """Send reviews, `rate` a second, and return how many seconds each took from when it was due."""
    tls = ssl.create_default_context(cafile=str(folder / "tls.crt"))
    connector = aiohttp.TCPConnector(ssl=tls, limit=connections, keepalive_timeout=90)
    texts, taken = bodies(), list[float]()
    async with aiohttp.ClientSession(f"https://127.0.0.1:{port}", connector=connector) as session:

        async def send(number: int, due: float) -> None:
            headers = {"Content-Type": "application/json"}
            async with session.post("/mutate", data=texts[number % len(texts)], headers=headers) as answer:
                text = await answer.read()
            if answer.status != 200 or (b'"response"' not in text and b'"request"' not in text):
                raise SystemExit(f"Error: {answer.status} {text[:500]!r}")
            taken.append(time.perf_counter() - due)

        start, sending = time.perf_counter(), set[asyncio.Task[None]]()
        for number in range(int(rate * seconds)):
            due = start + number / rate
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            task = asyncio.ensure_future(send(number, due))
            sending.add(task)
            task.add_done_callback(sending.discard)
        await asyncio.gather(*sending)
    return taken


async def measure(arguments: argparse.Namespace) -> Document:
    """Return all figures."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_certificate(folder)
        stand_in = StandIn()
        write_kubeconfig(folder / "kubeconfig", await stand_in.start())
        logs = {"webhook": folder / "webhook.log", "echo": folder / "echo.log"}
        own = [sys.executable, "-m", "pykvcache_operator.main", "webhook", f"--certificate-directory={folder}"]
        own += ["--connector-image=registry.example/connector:1", "--sidecar-image=registry.example/sidecar:1"]
        own += ["--listen=127.0.0.1:0", "--metrics-listen=127.0.0.1:0", "--grace-seconds=0"]
        peer = [sys.executable, "-m", ECHO, "--echo", str(folder)]
        where = {"processor": arguments.processor, "kubeconfig": folder / "kubeconfig"}
        with (
            pinned(own, log=logs["webhook"], **where) as ours,
            pinned(peer, log=logs["echo"], **where) as theirs,
        ):
            ports = {
                "webhook": await port_of(logs["webhook"], ours, what="serving reviews"),
                "echo": await port_of(logs["echo"], theirs, what="serving reviews"),
            }
            await until_ready(await port_of(logs["webhook"], ours, what="/metrics"))
            before = cpu_seconds(ours)
            result = await _rounds(arguments, ports, folder)
            requests = (arguments.seconds + WARM_SECONDS) * arguments.rate
            result["webhook"]["cpu_ms_per_request"] = round(1000 * (cpu_seconds(ours) - before) / requests, 2)
        await stand_in.stop()
        return result


async def _rounds(arguments: argparse.Namespace, ports: dict[str, int], folder: Path) -> Document:
    """Measure the two in turn, after a short time that does not count."""
    taken: dict[str, list[float]] = {name: [] for name in ports}
    common = {"folder": folder, "rate": arguments.rate, "connections": arguments.connections}
    for port in ports.values():
        await load(port, seconds=WARM_SECONDS, **common)
    for _ in range(arguments.rounds):
        for name, port in ports.items():
            taken[name] += await load(port, seconds=arguments.seconds / arguments.rounds, **common)
    figures = {name: _figures(values) for name, values in taken.items()}
    ratio = figures["webhook"]["p99_ms"] / figures["echo"]["p99_ms"]
    sizes = {make.__name__: len(text) for make, text in zip(SHAPES, bodies(), strict=True)}
    return {"rate": arguments.rate, "body_bytes": sizes, **figures, "p99_webhook_to_echo": round(ratio, 2)}


def _figures(seconds: Sequence[float]) -> Document:
    ordered = sorted(seconds)
    percents = {"p50_ms": 0.50, "p90_ms": 0.90, "p99_ms": 0.99, "max_ms": 1.0}
    last = len(ordered) - 1
    return {"requests": len(ordered)} | {
        name: round(1000 * ordered[min(last, int(len(ordered) * part))], 2) for name, part in percents.items()
    }


def main() -> None:
    """Measure and print one JSON object."""
    parser = argparse.ArgumentParser(
        prog="python -m pykvcache_bench.webhook",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--rate", type=float, default=50, help="reviews a second (default: 50)")
    parser.add_argument("--seconds", type=float, default=60, help="how long for each of the two (default: 60)")
    parser.add_argument("--rounds", type=int, default=6, help="in so many turns (default: 6)")
    parser.add_argument("--connections", type=int, default=25, help="most connections open at once (default: 25)")
    parser.add_argument("--processor", type=int, default=0, help="on which both servers run (default: 0)")
    parser.add_argument("--realtime", action="store_true", help="go before all other work on the machine")
    parser.add_argument("--echo", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.echo:
        asyncio.run(echo(arguments.echo))
        return
    if arguments.realtime:
        go_first(arguments.processor)
    print(json.dumps(asyncio.run(measure(arguments)), indent=2))


if __name__ == "__main__":
    main()
