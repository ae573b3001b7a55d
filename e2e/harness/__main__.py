"""A cluster for developers, that stays until it is told to go. Run in e2e/: python -m harness COMMAND

up [NODES]             start one (1 node), print its kubeconfig file; tests use it while it is up
kubectl ARGUMENTS      kubectl with administrator rights
helm ARGUMENTS         the same with helm
node NUMBER COMMAND    run a command on a node: ip, mount, ctr -n k8s.io, …
image TARGET …         build images of the product and load them; print their names
down                   stop it and remove it
api                    run an API server without nodes until Ctrl-C, and print its kubeconfig file
prepare                only build or fetch the programs and the images that tests need
images                 only build all images; print the archives, for `docker load` or `ctr images import`
base                   only make the base image; print its archive
"""

import os
import shutil
import signal
import subprocess
import sys

from harness import images, vllm_image
from harness.api_cluster import ApiCluster
from harness.binaries import Binaries, MissingError, find_binaries
from harness.cluster import LocalCluster
from harness.settings import DEVELOPER, Mode, Settings, SettingsError
from harness.waiting import NotYetError

TESTED = ("operator", "sidecar", "connector")  # targets that tests run


def main(arguments: list[str]) -> int:
    """Run one command and return its exit status."""
    settings = Settings.read()
    if not arguments or arguments[0] not in {
        "up",
        "kubectl",
        "helm",
        "node",
        "image",
        "down",
        "api",
        "prepare",
        "images",
        "base",
    }:
        print(__doc__)
        return 2
    command, *rest = arguments
    if command == "prepare":
        return prepare(settings)
    if command == "images":
        for target in images.TARGETS:
            print(images.build(target, settings.cache))
        return 0
    if command == "base":
        print(images.base(settings.cache))
        return 0
    binaries = find_binaries(settings.cache)
    if command == "api":
        return run_api_server(settings, binaries)
    cluster = LocalCluster.attach(settings.state / DEVELOPER, binaries=binaries, cache=settings.cache)
    if command == "up":
        return up(settings, binaries=binaries, cluster=cluster, nodes=int(rest[0]) if rest else 1)
    if cluster is None:
        raise SettingsError("no cluster is up; start one with `make cluster`")
    if command == "down":
        cluster.stop()
        return 0
    return use(cluster, command=command, arguments=rest, binaries=binaries)


def prepare(settings: Settings) -> int:
    """Make what the cache lacks, so that no test waits for it."""
    if settings.mode is Mode.LOCAL:
        find_binaries(settings.cache)
        vllm_image.build(settings.cache)
    if not settings.images:
        for target in TESTED:
            images.build(target, settings.cache)
    return 0


def up(settings: Settings, *, binaries: Binaries, cluster: LocalCluster | None, nodes: int) -> int:
    """Start the developer's cluster, or add nodes to it, and say how to use it."""
    if cluster is None:
        state = settings.state / DEVELOPER
        shutil.rmtree(state, ignore_errors=True)  # of one that went with the machine
        cluster = LocalCluster(state, binaries=binaries, cache=settings.cache, lasting=True)
        cluster.start()
    while len(cluster.nodes) < nodes:
        cluster.add_node()
    print(f"export KUBECONFIG={cluster.kubeconfig}")
    return 0


def run_api_server(settings: Settings, binaries: Binaries) -> int:
    """Run a control plane without nodes until the user ends it."""
    cluster = ApiCluster(settings.state, binaries=binaries)
    try:
        cluster.start()
        print(f"export KUBECONFIG={cluster.kubeconfig}", flush=True)
        signal.sigwait({signal.SIGINT, signal.SIGTERM})
    finally:
        cluster.stop()
    return 0


def use(cluster: LocalCluster, *, command: str, arguments: list[str], binaries: Binaries) -> int:
    """Run a command that needs the cluster."""
    if command == "image":
        for target in arguments or images.TARGETS:
            print(cluster.image(target))
        return 0
    if command == "node":
        sandbox = cluster.nodes[int(arguments[0]) - 1].sandbox
        return subprocess.run(sandbox.command(*arguments[1:]), check=False).returncode
    program = [str(binaries.tools / command), f"--kubeconfig={cluster.kubeconfig}"]
    os.execv(program[0], [*program, *arguments])


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except (SettingsError, MissingError, NotYetError, TimeoutError, RuntimeError) as error:
        sys.exit(f"Error: {error}")
