"""What injection adds to a pod's start: `make cluster`, then in e2e/ python -m harness.startup [RUNS]

Pods that are no vLLM start one after the other, in turn: not labelled, labelled for a pool on the node's disk, and for
one with a sidecar. The time runs from the request to make a pod until its container's program runs. Images are on the
node. Prints the median of each, and what it adds.
"""

import statistics
import sys
import time

from harness.binaries import find_binaries
from harness.cluster import LocalCluster
from harness.injection import ephemeral, installed, labelled, pool_on_disk
from harness.kubectl import Kubectl
from harness.settings import DEVELOPER, Settings, SettingsError

RUNS = 7
NAMESPACE = "startup"
NODE_LOCAL, EPHEMERAL = "startup-node", "startup-pod"
CASES = {"not labelled": "", "library and volume": NODE_LOCAL, "library, volume and sidecar": EPHEMERAL}
SCRIPT = "import time; print(time.time())"  # the clock of the node, which is this machine's


def main(arguments: list[str]) -> int:
    """Measure, and print a table."""
    settings = Settings.read()
    binaries = find_binaries(settings.cache)
    cluster = LocalCluster.attach(settings.state / DEVELOPER, binaries=binaries, cache=settings.cache)
    if cluster is None:
        raise SettingsError("no cluster is up; start one with `make cluster`")
    runs = int(arguments[0]) if arguments else RUNS
    with installed(cluster, settings, with_vllm=False), pool_on_disk(cluster, NODE_LOCAL, {}):
        cluster.kubectl.apply(ephemeral(EPHEMERAL))
        cluster.kubectl.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}})
        try:
            report(measure(cluster, runs))
        finally:
            cluster.kubectl.delete("namespace", NAMESPACE)
    return 0


def measure(cluster: LocalCluster, runs: int) -> dict[str, list[float]]:
    """Return the seconds of each start, by case; the first round is not counted."""
    inside, image = cluster.kubectl.within(NAMESPACE), cluster.image("sidecar")
    seconds: dict[str, list[float]] = {case: [] for case in CASES}
    for run in range(runs + 1):
        for number, (case, pool) in enumerate(CASES.items()):
            taken = start(inside, f"pod-{run}-{number}", pool=pool, image=image)
            if run:
                seconds[case].append(taken)
    return seconds


def start(inside: Kubectl, name: str, *, pool: str, image: str) -> float:
    """Return the seconds until the program of a new pod runs."""
    pod = labelled(name, pool=pool, image=image, script="")
    container = pod["spec"]["containers"][0]
    container |= {"command": ["python3", "-c", SCRIPT], "resources": {}}
    if not pool:
        del pod["metadata"]["labels"]
    began = time.time()
    inside.apply(pod)
    inside.wait_for_phase(name, "Succeeded", limit_s=120)
    ended = float(inside.logs(name, container="main"))
    annotations = inside.get("pod", name)["metadata"].get("annotations", {})
    if bool(pool) != ("pykvcache.io/injected" in annotations):
        raise RuntimeError(f"{name}: annotations {annotations}")
    inside.delete("pod", name)
    return ended - began


def report(seconds: dict[str, list[float]]) -> None:
    """Print the medians, and what each case adds to the first."""
    plain = statistics.median(next(iter(seconds.values())))
    for case, values in seconds.items():
        median = statistics.median(values)
        spread = f"{min(values):.2f}-{max(values):.2f}"
        sys.stdout.write(f"{case:30} {median:5.2f} s (of {len(values)}: {spread})  adds {median - plain:5.2f} s\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
