"""Where pods are in a Kubernetes object: a Pod itself, or the templates inside of whatever makes pods.

Found by their form, not by a list of kinds: a mapping with `spec.containers`. So Deployments, Jobs, CronJobs,
LeaderWorkerSets, RayClusters, Rollouts and kinds that nobody has thought of yet are all the same.
"""

from collections.abc import Iterator, Mapping, MutableMapping, MutableSequence
from dataclasses import dataclass
from typing import Any

from pykvcache_contract.names import POOL_NAME_LABEL

_DEPTH_MAX = 12


@dataclass(frozen=True, slots=True)
class PodTemplate:
    """A pod, or a template of pods.

    Args:
        node: the mapping in its document; may be changed in place.
        owner: `Kind/name` of the object it is in.
        path: where in that object, such as `spec.template`; "" for a Pod.
        namespace: of the object, "" where it names none.
    """

    node: MutableMapping[str, Any]
    owner: str
    path: str
    namespace: str

    def __str__(self) -> str:
        return f"{self.owner} {self.path}".rstrip()

    @property
    def pool_name(self) -> str:
        """The value of its label, "" if it has none."""
        labels = _mapping(_mapping(self.node.get("metadata")).get("labels"))
        return str(labels.get(POOL_NAME_LABEL) or "")


def pod_templates(document: MutableMapping[str, Any]) -> Iterator[PodTemplate]:
    """Yield all pod templates of a Kubernetes object."""
    metadata = _mapping(document.get("metadata"))
    name = metadata.get("name") or metadata.get("generateName") or "?"
    owner, namespace = f"{document.get('kind', '?')}/{name}", str(metadata.get("namespace") or "")
    if document.get("kind") == "Pod":
        if _is_pod(document):
            yield PodTemplate(document, owner, "", namespace)
        return
    for path, node in _walk(document.get("spec"), "spec", 0):
        yield PodTemplate(node, owner, path, namespace)


def _walk(node: Any, path: str, depth: int) -> Iterator[tuple[str, MutableMapping[str, Any]]]:
    if depth > _DEPTH_MAX:
        return
    if isinstance(node, MutableMapping):
        if _is_pod(node):
            yield path, node
            return
        for key, value in node.items():
            yield from _walk(value, f"{path}.{key}", depth + 1)
    elif isinstance(node, MutableSequence):
        for index, value in enumerate(node):
            yield from _walk(value, f"{path}[{index}]", depth + 1)


def _is_pod(node: Mapping[str, Any]) -> bool:
    return isinstance(_mapping(node.get("spec")).get("containers"), MutableSequence)


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
