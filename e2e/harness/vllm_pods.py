"""Real vLLM in pods, on the CPU with a tiny model: examples/vllm.yaml made small, and what one asks its servers.

Requests are made on a node, whose network reaches the pods.
"""

import json
import random
import re
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import yaml

from harness import vllm_image
from harness.kubectl import Kubectl, KubectlError, Object
from harness.node import Node
from harness.settings import REPOSITORY
from harness.waiting import NotYetError, wait_for

EXAMPLE = REPOSITORY / "examples" / "vllm.yaml"
NAME = "vllm"  # of the Deployment, its container and its model
PORT = 8000
START_S = 800.0  # an engine starts in half a minute; several at once on a busy machine take minutes
BLOCK_TOKENS = 64
FLAGS = (
    f"--model={vllm_image.MODEL}",
    f"--served-model-name={NAME}",
    "--dtype=float32",  # greedy answers of a random model flip on rounding in 16 bits
    "--enforce-eager",
    "--max-model-len=2048",
    "--max-num-seqs=4",
    "--block-size=32",
    "--kv-cache-memory-bytes=67108864",
    "--seed=0",
    "--enable-prompt-tokens-details",
    "--no-enable-prefix-caching",  # so that each request asks the pool, not only the first
)
PROMPT_TOKENS = 500  # the tokenizer makes one of each letter
WHOLE_TOKENS = PROMPT_TOKENS // BLOCK_TOKENS * BLOCK_TOKENS  # of them, those in whole blocks
INJECTION = {"injection": {"blockTokens": BLOCK_TOKENS}, "memory": {"stagingBytes": "32Mi"}}  # of a pool for it
REQUEST_LIMIT_S = 300
REQUEST = """
import sys, urllib.error, urllib.request
body = sys.stdin.buffer.read() or None
try:
    request = urllib.request.Request(sys.argv[1], body, {"Content-Type": "application/json"})
    sys.stdout.buffer.write(urllib.request.urlopen(request, timeout=240).read())
except urllib.error.HTTPError as error:
    sys.exit(f"{error}: {error.read().decode(errors='replace')[:2000]}")
"""
SAMPLE = re.compile(r"^(vllm:[a-z_]+)(?:\{[^}]*\})? (\S+)$", re.MULTILINE)


class Answer(NamedTuple):
    """What a server said, and how many tokens of the prompt it took from a cache, GPU memory's included."""

    text: str
    cached_tokens: int


def example(*, pool: str = "", replicas: int = 1, node: str = "") -> Object:
    """Return the Deployment of the example, for the CPU; without a pool it has no label."""
    deployment: Object = next(
        document for document in yaml.safe_load_all(EXAMPLE.read_text()) if document["kind"] == "Deployment"
    )
    template = deployment["spec"]["template"]
    template["metadata"]["labels"] = {"app": NAME, **({"pykvcache.io/pool": pool} if pool else {})}
    container = template["spec"]["containers"][0]
    container |= {"image": vllm_image.name(), "imagePullPolicy": "Never", "args": list(FLAGS)}
    container["resources"] = {"requests": {"cpu": "300m", "memory": "1Gi"}, "limits": {"memory": "6Gi"}}
    template["spec"] |= {"terminationGracePeriodSeconds": 5}
    if node:
        template["spec"]["nodeSelector"] = {"kubernetes.io/hostname": node}
    deployment["spec"]["replicas"] = replicas
    return deployment


def pod(name: str, *, pool: str = "", node: str = "", **spec: Any) -> Object:
    """Return one pod of the example; `spec` replaces parts of its only container."""
    template = example(pool=pool, node=node)["spec"]["template"]
    template["spec"]["containers"][0] |= spec
    template["metadata"]["name"] = name
    return {"apiVersion": "v1", "kind": "Pod", **template}


class Servers:
    """The vLLM pods of one namespace, seen from a node."""

    def __init__(self, kubectl: Kubectl, node: Node) -> None:
        self.kubectl, self._node = kubectl, node

    def pods(self) -> list[Object]:
        """Return the Deployment's pods that are not about to end."""
        found = self.kubectl.list("pods", selector=f"app={NAME}")
        return [pod for pod in found if "deletionTimestamp" not in pod["metadata"]]

    def wait_until_ready(self, count: int, *, without: Sequence[str] = (), limit_s: float = START_S) -> list[str]:
        """Wait until so many pods, and only these, are ready; none of the names `without` counts. Return the names.

        Raises:
            TimeoutError: with the state of each container.
        """

        def probe() -> list[str]:
            pods = self.pods()
            ready = [pod["metadata"]["name"] for pod in pods if is_ready(pod)]
            if len(ready) == len(pods) == count and not set(ready) & set(without):
                return ready
            raise KubectlError("; ".join(_state(pod) for pod in pods))

        return wait_for(f"{count} vLLM pods to be ready", probe, limit_s=limit_s, every_s=1)

    def complete(self, pod: str, prompt: str, *, max_tokens: int = 16) -> Answer:
        """Return the greedy completion of a prompt by one pod."""
        body = {"model": NAME, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0}
        said = json.loads(self._ask(pod, "v1/completions", json.dumps(body)))
        details = said["usage"].get("prompt_tokens_details") or {}
        return Answer(said["choices"][0]["text"], details.get("cached_tokens") or 0)

    def answers(self, pod: str, prompts: Sequence[str]) -> list[Answer]:
        """Return the completions of prompts, one after the other."""
        return [self.complete(pod, prompt) for prompt in prompts]

    def fill(self, pod: str, prompts: Sequence[str]) -> list[str]:
        """Let a pod answer prompts, and wait until it has stored the blocks of each; return the answers."""
        texts = [answer.text for answer in self.answers(pod, prompts)]
        self.find(pod, prompts, texts)
        return texts

    def find(self, pod: str, prompts: Sequence[str], texts: Sequence[str]) -> None:
        """Ask until a pod finds all whole blocks of each prompt; every answer must be as expected.

        A lookup that takes too long is a miss, by design, and here the machine may be busy.

        Raises:
            AssertionError: an answer differs.
            TimeoutError: a prompt is not found.
        """
        for prompt, text in zip(prompts, texts, strict=True):

            def is_found(prompt: str = prompt, text: str = text) -> bool:
                answer = self.complete(pod, prompt)
                assert answer.text == text
                if answer.cached_tokens != WHOLE_TOKENS:
                    raise NotYetError(f"{answer.cached_tokens} of {WHOLE_TOKENS} tokens")
                return True

            wait_for(f"{pod} to find a prompt of {len(prompt)} tokens", is_found, limit_s=120, every_s=0.5)

    def metrics(self, pod: str) -> dict[str, float]:
        """Return vLLM's metrics, summed over labels."""
        text = self._ask(pod, "metrics")
        sums: dict[str, float] = {}
        for name, value in SAMPLE.findall(text):
            sums[name] = sums.get(name, 0.0) + float(value)
        return sums

    def _ask(self, pod: str, path: str, body: str = "") -> str:
        """Return what a server answers; NotYetError with its words if that is an error."""
        address = self.kubectl.get("pod", pod)["status"]["podIP"]
        url = f"http://{address}:{PORT}/{path}"
        return self._node.sandbox.run(sys.executable, "-I", "-c", REQUEST, url, text=body, limit_s=REQUEST_LIMIT_S)


def prompts(count: int = 3, *, seed: int = 7) -> list[str]:
    """Return long prompts; the last begins as the first does."""
    source = random.Random(seed)
    drawn = ["".join(source.choices("abcdefgh ", k=PROMPT_TOKENS)) for _ in range(count)]
    return [*drawn[:-1], drawn[0][: PROMPT_TOKENS // 2] + drawn[-1][PROMPT_TOKENS // 2 :]]


def is_ready(pod: Object) -> bool:
    """Whether a pod has the condition Ready."""
    rows = pod.get("status", {}).get("conditions", [])
    return any((row["type"], row["status"]) == ("Ready", "True") for row in rows)


def _state(pod: Object) -> str:
    status = pod.get("status", {})
    rows = [*status.get("initContainerStatuses", []), *status.get("containerStatuses", [])]
    states = {row["name"]: (row["restartCount"], row.get("state")) for row in rows}
    return f"{pod['metadata']['name']} {status.get('phase')} {json.dumps(states)}"
