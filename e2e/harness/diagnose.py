"""What one wants to see of a cluster after a test failed, written to a folder before anything is deleted."""

import json
import re
import shutil
from collections.abc import Iterable
from pathlib import Path

from harness.kubectl import Kubectl, KubectlError, Object
from harness.processes import tail

# Of every namespace, since the operator and the agents live in others than the test.
LISTS = {
    "overview.txt": ["get", "nodes,pods,jobs,daemonsets,deployments", "-A", "-o", "wide"],
    "nodes.txt": ["describe", "nodes"],
    "pods.txt": ["describe", "pods", "-A"],
    "events.txt": ["get", "events", "-A", "--sort-by=.metadata.creationTimestamp"],
    "jobs.yaml": ["get", "jobs", "-A", "-o", "yaml"],
}
OURS = "pykvcache.io"  # the API group
LOG_LINES = 400  # kept of each log
COMMAND_LIMIT_S = 20  # the cluster may be what broke


def diagnose(kubectl: Kubectl, folder: Path, *, logs: Iterable[Path] = ()) -> Path:
    """Write everything to a folder, emptied before, and return it. What cannot be had is a file that says why."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for name, arguments in LISTS.items():
        _write(folder / name, _ask(kubectl, *arguments))
    kinds = _ask(kubectl, "api-resources", f"--api-group={OURS}", "-o", "name").split()
    for kind in (kind for kind in kinds if kind.endswith(OURS)):
        _write(folder / f"{kind}.yaml", _ask(kubectl, "get", kind, "-A", "-o", "yaml", "--show-managed-fields"))
    _write_container_logs(kubectl, folder / "containers")
    return keep_logs(logs, folder / "programs").parent


def keep_logs(logs: Iterable[Path], folder: Path) -> Path:
    """Copy the ends of logs of a cluster's programs to a folder, and return it."""
    for log in logs:
        _write(folder / f"{log.parent.parent.name}-{log.name}.txt", tail(log, lines=LOG_LINES))
    return folder


def folder_of(test: str, parent: Path) -> Path:
    """Return the folder for a test, by its name as pytest gives it."""
    return parent / re.sub(r"[^A-Za-z0-9_.-]+", "-", test).strip("-")[-100:]


def _write_container_logs(kubectl: Kubectl, folder: Path) -> None:
    try:
        pods = json.loads(_ask(kubectl, "get", "pods", "-A", "-o", "json"))["items"]
    except ValueError:
        return  # pods.txt says why
    for pod in pods:
        inside, name = kubectl.within(pod["metadata"]["namespace"]), pod["metadata"]["name"]
        for state in containers_of(pod):
            container, file = state["name"], f"{inside.namespace}-{name}-{state['name']}"
            arguments = ["logs", name, f"--container={container}", f"--tail={LOG_LINES}"]
            _write(folder / f"{file}.txt", _ask(inside, *arguments))
            if state.get("restartCount"):
                _write(folder / f"{file}.previous.txt", _ask(inside, *arguments, "--previous"))


def containers_of(pod: Object) -> list[Object]:
    """Return the states of all containers of a pod, those that start first too."""
    status = pod.get("status", {})
    return [*status.get("initContainerStatuses", []), *status.get("containerStatuses", [])]


def _ask(kubectl: Kubectl, *arguments: str) -> str:
    try:
        return kubectl.run(*arguments, limit_s=COMMAND_LIMIT_S)
    except KubectlError as error:
        return str(error)


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
