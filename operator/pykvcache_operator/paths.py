"""Paths of the API server that the operator uses. Pure."""

from pykvcache_contract.names import API_GROUP, API_VERSION, NODE_PLURAL, POOL_PLURAL

POOLS = f"/apis/{API_GROUP}/{API_VERSION}/{POOL_PLURAL}"
CACHES = f"/apis/{API_GROUP}/{API_VERSION}/{NODE_PLURAL}"
NODES = "/api/v1/nodes"
NAMESPACES = "/api/v1/namespaces"
CLAIMS = "/api/v1/persistentvolumeclaims"
ALL_PODS = "/api/v1/pods"


def claims(namespace: str) -> str:
    """Return the collection of a namespace's claims."""
    return f"{NAMESPACES}/{namespace}/persistentvolumeclaims"


def jobs(namespace: str) -> str:
    """Return the collection of a namespace's Jobs."""
    return f"/apis/batch/v1/namespaces/{namespace}/jobs"


def pods(namespace: str) -> str:
    """Return the collection of a namespace's pods."""
    return f"{NAMESPACES}/{namespace}/pods"


def events(namespace: str) -> str:
    """Return the collection of a namespace's Events."""
    return f"/apis/events.k8s.io/v1/namespaces/{namespace}/events"


def secret(namespace: str, name: str = "") -> str:
    """Return a Secret, or without a name the collection of a namespace's Secrets."""
    return f"{NAMESPACES}/{namespace}/secrets" + (f"/{name}" if name else "")


def webhook_configuration(name: str) -> str:
    """Return a MutatingWebhookConfiguration."""
    return f"/apis/admissionregistration.k8s.io/v1/mutatingwebhookconfigurations/{name}"
