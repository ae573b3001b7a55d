"""The security context of our own containers: what Pod Security `restricted` wants, whatever the pod's own says.

Facts: Pod Security judges the pod with what was injected, so one field missing in our containers keeps the whole pod
from being made. A container inherits user and group from the pod. runAsNonRoot with user 0, inherited or in the image,
is an error when the container starts; our images run as user 65532. Files of one user in a pool are not removed by
another who is not root; files of one SELinux label are not read by another. Some of OpenShift's constraints (anyuid)
refuse a pod that sets a seccomp profile. Therefore every field that `restricted` asks for is set, a user 0 is replaced,
and the sidecar runs as the user of vLLM where that is told. The seccomp profile is left out of pods that would not be
`restricted` without us, because a container of theirs has none either.
"""

from collections.abc import Mapping
from typing import Any

from pykvcache_operator.injection.outcome import Document
from pykvcache_operator.injection.pod import all_containers, mapping

USER = 65532
"""Of our images."""
ROOT = 0


def own_security_context(
    spec: Mapping[str, Any], *, vllm: Mapping[str, Any], user_of: Mapping[str, Any] | None = None
) -> Document:
    """Return the securityContext of a container of ours.

    Args:
        spec: of the pod, for what is inherited.
        vllm: vLLM's container, which reads the same files.
        user_of: a container whose user it is to share; None: it needs no particular one.
    """
    own: Document = {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "runAsNonRoot": True,
        "capabilities": {"drop": ["ALL"]},
    }
    if _has_seccomp(spec):
        own["seccompProfile"] = {"type": "RuntimeDefault"}
    if label := mapping(vllm, "securityContext").get("seLinuxOptions"):
        own["seLinuxOptions"] = label
    of_pod = mapping(spec, "securityContext")
    of_container = mapping(user_of or {}, "securityContext")
    for key in ("runAsUser", "runAsGroup"):
        inherited, wanted = _id(of_pod, key), _id(of_container, key)
        if wanted and wanted != inherited:
            own[key] = wanted
        elif key == "runAsUser" and inherited == ROOT:
            own[key] = USER
    return own


def _has_seccomp(spec: Mapping[str, Any]) -> bool:
    """Say whether the pod sets a seccomp profile for all of its containers."""
    contexts = (mapping(container, "securityContext") for container in all_containers(spec))
    of_pod = mapping(spec, "securityContext").get("seccompProfile")
    return bool(of_pod) or all(context.get("seccompProfile") for context in contexts)


def _id(context: Mapping[str, Any], key: str) -> int | None:
    value = context.get(key)
    return value if isinstance(value, int) and not isinstance(value, bool) else None
