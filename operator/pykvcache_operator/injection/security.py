"""The security context of our own containers: what Pod Security `restricted` wants, whatever the pod's own says.

Facts: Pod Security judges the pod with what was injected, so one field missing in our containers keeps the whole pod
from being made. A container inherits user and group from the pod. runAsNonRoot with user 0, inherited or in the image,
is an error when the container starts; our images run as user 65532. Files of one user in a pool are not removed by
another who is not root. Therefore every field that `restricted` asks for is set, a user 0 is replaced, and the sidecar
runs as the user of vLLM where that is told.
"""

from collections.abc import Mapping
from typing import Any

from pykvcache_operator.injection.outcome import Document
from pykvcache_operator.injection.pod import mapping

USER = 65532
"""Of our images."""
ROOT = 0


def own_security_context(spec: Mapping[str, Any], *, like: Mapping[str, Any] | None = None) -> Document:
    """Return the securityContext of a container of ours.

    Args:
        spec: of the pod, for what is inherited.
        like: a container whose user it is to share; None: it needs no particular one.
    """
    own: Document = {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "runAsNonRoot": True,
        "capabilities": {"drop": ["ALL"]},
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    of_pod = mapping(spec, "securityContext")
    of_container = mapping(like, "securityContext") if like else {}
    for key in ("runAsUser", "runAsGroup"):
        inherited, wanted = _id(of_pod, key), _id(of_container, key)
        if wanted and wanted != inherited:
            own[key] = wanted
        elif key == "runAsUser" and inherited == ROOT:
            own[key] = USER
    return own


def _id(context: Mapping[str, Any], key: str) -> int | None:
    value = context.get(key)
    return value if isinstance(value, int) and not isinstance(value, bool) else None
