"""A thin helper around kubectl: objects as dictionaries, errors with kubectl's own words, waits with a deadline."""

import json
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from harness.waiting import NotYetError, wait_for

Object = dict[str, Any]
COMMAND_LIMIT_S = 240  # for one kubectl, which has no limit of its own


class KubectlError(NotYetError):
    """kubectl failed; inside a wait it means "not yet"."""


class Kubectl:
    """kubectl with administrator rights; without a namespace, that of the kubeconfig file or of the object."""

    def __init__(self, program: Path, kubeconfig: Path, *, namespace: str = "") -> None:
        self.program, self.kubeconfig, self.namespace = program, kubeconfig, namespace

    def within(self, namespace: str) -> "Kubectl":
        """Return the same for one namespace."""
        return Kubectl(self.program, self.kubeconfig, namespace=namespace)

    def command(self, *arguments: str) -> list[str]:
        """Return the whole command line, for who runs it on their own."""
        scope = [f"--namespace={self.namespace}"] if self.namespace else []
        return [str(self.program), f"--kubeconfig={self.kubeconfig}", *scope, *arguments]

    def run(self, *arguments: str, text: str | None = None, limit_s: float = COMMAND_LIMIT_S) -> str:
        """Run it and return its standard output; `text` is its standard input.

        Raises:
            KubectlError: it failed, or took longer than limit_s.
        """
        try:
            done = subprocess.run(
                self.command(*arguments), input=text, capture_output=True, text=True, timeout=limit_s, check=False
            )
        except subprocess.TimeoutExpired:
            raise KubectlError(f"kubectl {' '.join(arguments)}: no end after {limit_s:g} s") from None
        if done.returncode:
            raise KubectlError(f"kubectl {' '.join(arguments)}: {done.stderr.strip() or done.stdout.strip()}")
        return done.stdout

    def apply(self, *objects: Mapping[str, Any] | str) -> None:
        """Apply objects, or YAML text, by server-side apply as field manager `e2e`."""
        for thing in objects:
            text = thing if isinstance(thing, str) else json.dumps(thing)
            self.run("apply", "--server-side", "--force-conflicts", "--field-manager=e2e", "-f", "-", text=text)

    def make_namespace(self, name: str, *, labels: Mapping[str, str] | None = None) -> None:
        """Make a namespace, and wait until pods can be made in it: none are before it has its service account."""
        self.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": labels or {}}})
        self.within(name).wait_for("serviceaccount", "default", bool, "to be made")

    def get(self, kind: str, name: str) -> Object:
        """Return one object; KubectlError if there is none."""
        found: Object = json.loads(self.run("get", kind, name, "-o", "json"))
        return found

    def find(self, kind: str, name: str) -> Object | None:
        """Return one object, or None."""
        text = self.run("get", kind, name, "-o", "json", "--ignore-not-found")
        return json.loads(text) if text.strip() else None

    def list(self, kind: str, *, selector: str = "") -> Sequence[Object]:
        """Return the objects of a kind."""
        found: list[Object] = json.loads(self.run("get", kind, "-o", "json", f"--selector={selector}"))["items"]
        return found

    def patch(self, kind: str, name: str, patch: Mapping[str, Any], *, subresource: str = "") -> None:
        """Change one object by a merge patch."""
        extra = [f"--subresource={subresource}"] if subresource else []
        self.run("patch", kind, name, "--type=merge", "-p", json.dumps(patch), *extra)

    def delete(self, kind: str, name: str, *, wait: bool = True) -> None:
        """Delete one object if it is there, and wait until it is gone."""
        self.run("delete", kind, name, "--ignore-not-found", f"--wait={str(wait).lower()}", "--timeout=180s")

    def logs(self, pod: str, *, container: str = "", previous: bool = False) -> str:
        """Return what a pod wrote."""
        extra = [f"--container={container}"] if container else []
        return self.run("logs", pod, *extra, *(["--previous"] if previous else []))

    def exec(self, pod: str, *command: str, container: str = "") -> str:
        """Run a command in a pod and return what it wrote."""
        extra = [f"--container={container}"] if container else []
        return self.run("exec", pod, *extra, "--", *command)

    def wait_for(
        self, kind: str, name: str, condition: Callable[[Object], object], what: str, *, limit_s: float = 120
    ) -> Object:
        """Wait until an object exists and the condition holds for it, and return it.

        Raises:
            TimeoutError: it says `what`, and the status seen last.
        """

        def probe() -> Object:
            found = self.get(kind, name)
            if not condition(found):
                raise NotYetError(f"status {json.dumps(found.get('status', {}))}")
            return found

        return wait_for(f"{kind}/{name} {what}", probe, limit_s=limit_s, every_s=0.3)

    def wait_for_phase(self, pod: str, *phases: str, limit_s: float = 120) -> Object:
        """Wait until a pod is in one of the phases."""

        def reached(found: Object) -> bool:
            return found.get("status", {}).get("phase") in phases

        return self.wait_for("pod", pod, reached, f"to be {' or '.join(phases)}", limit_s=limit_s)
