"""Pods as nobody writes them: random ones that the API server takes, and others with any value in any place.

For tests of what changes pods. `pods()` draws from the fields of the API that matter to an injector and keeps the rules
that the API server checks, so that most of what is drawn is accepted; `damaged()` breaks such a pod in a few places.
"""

import copy
from typing import Any

from hypothesis import strategies as st

Document = dict[str, Any]
Pods = st.SearchStrategy[Document]

POOL_LABEL = "pykvcache.io/pool"
COMMANDS: list[Document] = [
    {},
    {"args": ["--model", "m"]},
    {"args": ["serve", "m", "--port=8000"]},
    {"command": ["vllm", "serve", "m"]},
    {
        "command": ["vllm", "serve"],
        "args": ["m", "--kv-transfer-config", '{"kv_connector":"Other","kv_role":"kv_both"}'],
    },
    {"command": ["python3", "-m", "vllm.entrypoints.openai.api_server"], "args": ["--model=m"]},
    {"command": ["sh", "-c", "exec vllm serve m $EXTRA"]},
    {"command": ["/bin/bash", "-lc"], "args": ["vllm serve m --kv-transfer-config.kv_connector=Other"]},
    {"command": ["tini", "--", "vllm", "serve", "m"]},
    {"command": ["/start.sh"]},
    {"command": ["sleep", "infinity"]},
]
IMAGES = ["vllm/vllm-openai:v0.32.0", "registry.example/team/server:1", "busybox"]
BESIDE: Document = {"image": "registry.example/team/proxy:1", "args": ["--upstream=http://127.0.0.1:8000"]}
"""A container that is not vLLM's."""
VARIABLES = [
    "HOME",
    "PYTHONPATH",
    "PYTHONHASHSEED",
    "VLLM_PLUGINS",
    "POD_NAME",
    "EXTRA",
    "PYKVCACHE_KV_TRANSFER_CONFIG",
]
VALUES = ["", "0", "random", "/app:/lib", "a,b", "$(HOME)/x", "$$(HOME)", "日本\n", "x" * 200]
MOUNT_PATHS = ["/models", "/dev/shm", "/data", "/etc/config", "/root/.cache", "/pykvcache2", "/scratch"]
VOLUMES: list[Document] = [
    {"emptyDir": {}},
    {"emptyDir": {"medium": "Memory", "sizeLimit": "1Gi"}},
    {"configMap": {"name": "config"}},
    {"secret": {"secretName": "secret", "optional": True}},
    {"persistentVolumeClaim": {"claimName": "models"}},
    {"csi": {"driver": "secrets-store.csi.k8s.io", "readOnly": True}},
    {
        "projected": {
            "sources": [{"downwardAPI": {"items": [{"path": "l", "fieldRef": {"fieldPath": "metadata.labels"}}]}}]
        }
    },
    {"hostPath": {"path": "/var/log"}},
]
QUANTITIES = {
    "cpu": ["100m", "1", "8"],
    "memory": ["64Mi", "4Gi", "64Gi"],
    "ephemeral-storage": ["1Gi", "100Gi"],
    "nvidia.com/gpu": ["1", "8"],
}
RESTRICTED: Document = {
    "allowPrivilegeEscalation": False,
    "capabilities": {"drop": ["ALL"]},
    "runAsNonRoot": True,
    "seccompProfile": {"type": "RuntimeDefault"},
}


def pods(*, is_restricted: bool = False) -> Pods:
    """Return pods labelled for the pool `fast`.

    Args:
        is_restricted: only such as Pod Security `restricted` admits.
    """
    return _pod(is_restricted=is_restricted)


@st.composite
def damaged(draw: st.DrawFn) -> Document:
    """Return pods in which one to four values, keys included, were replaced by anything; the label stays."""
    pod = copy.deepcopy(draw(pods()))  # parts of it are constants of this module
    for _ in range(draw(st.integers(1, 4))):
        _replace(draw, pod)
    if isinstance(pod.get("metadata"), dict) and isinstance(pod["metadata"].get("labels"), dict):
        pod["metadata"]["labels"].setdefault(POOL_LABEL, "fast")
    return pod


def anything() -> st.SearchStrategy[Any]:
    """Return values as JSON has them."""
    leaves = st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False) | _texts()
    return st.recursive(
        leaves, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_texts(), inner, max_size=3)
    )


def _texts() -> st.SearchStrategy[str]:
    known = [
        "name",
        "vllm",
        "sh",
        "-c",
        "--",
        "--kv-transfer-config",
        "pykvcache-pool",
        "/pykvcache/pool",
        "\ud800",
        "\x00",
    ]
    return st.sampled_from(known) | st.text(st.characters(), max_size=20)


def _replace(draw: st.DrawFn, value: Any) -> None:
    """Replace something below a value; the deeper it is the less often it is reached."""
    while isinstance(value, (dict, list)) and value:
        key = draw(st.sampled_from(list(value) if isinstance(value, dict) else range(len(value))))
        if not (isinstance(value[key], (dict, list)) and value[key]) or draw(st.integers(0, 3)) == 0:
            value[key] = draw(anything())
            return
        value = value[key]


@st.composite
def _pod(draw: st.DrawFn, *, is_restricted: bool) -> Document:
    volumes = [
        {"name": f"v{i}", **v}
        for i, v in enumerate(draw(st.lists(st.sampled_from(VOLUMES[: -1 if is_restricted else None]), max_size=3)))
    ]
    count = draw(st.sampled_from([1, 1, 1, 2, 3]))
    containers = [draw(_container(f"c{i}", volumes, is_restricted=is_restricted)) for i in range(count)]
    spec: Document = {"containers": containers, **draw(_spec_fields(is_restricted=is_restricted))}
    if draw(st.booleans()) or volumes:
        spec["volumes"] = volumes
    if draw(st.booleans()):
        inits = [
            draw(_container(f"i{i}", volumes, is_restricted=is_restricted)) for i in range(draw(st.integers(0, 2)))
        ]
        spec["initContainers"] = [{**c, **draw(st.sampled_from([{}, {"restartPolicy": "Always"}]))} for c in inits]
    annotations = draw(st.dictionaries(st.sampled_from(["example.com/a", "b"]), _printable(), max_size=2))
    annotations |= draw(_own_annotations())
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"generateName": "random-", "labels": {POOL_LABEL: "fast"}, "annotations": annotations},
        "spec": spec,
    }


def _own_annotations() -> st.SearchStrategy[Document]:
    choices: list[Document] = [
        {},
        {},
        {"pykvcache.io/on-conflict": "Merge"},
        {"pykvcache.io/container": "c0"},
        {"pykvcache.io/library": "ImageVolume"},
        {"pykvcache.io/library": "None"},
        {"pykvcache.io/staging": "64Mi"},
        {"pykvcache.io/skipped": "PoolNotFound: …"},
    ]
    return st.sampled_from(choices)


def _printable() -> st.SearchStrategy[str]:
    return st.text(st.characters(blacklist_categories=["Cs"]), max_size=30)


@st.composite
def _container(draw: st.DrawFn, name: str, volumes: list[Document], *, is_restricted: bool) -> Document:
    vllm = {"image": draw(st.sampled_from(IMAGES)), **draw(st.sampled_from(COMMANDS))}
    container: Document = {"name": name, **(vllm if name == "c0" or draw(st.integers(0, 9)) == 0 else BESIDE)}
    names = draw(st.lists(st.sampled_from(VARIABLES), max_size=4))  # a name may come twice
    if draw(st.booleans()) or names:
        container["env"] = [{"name": name, **draw(_variable())} for name in names]
    if draw(st.integers(0, 3)) == 0:
        container["envFrom"] = [{"configMapRef": {"name": "config", "optional": True}}]
    paths = draw(st.lists(st.sampled_from(MOUNT_PATHS), unique=True, max_size=len(volumes)))
    mounts = [{"name": volumes[i]["name"], "mountPath": path} for i, path in enumerate(paths)]
    if draw(st.booleans()) or mounts:
        container["volumeMounts"] = mounts
    if draw(st.booleans()):
        container["ports"] = [{"containerPort": draw(st.sampled_from([8000, 9478]))}]
    container["resources"] = draw(_resources())
    if is_restricted:
        container["securityContext"] = {**RESTRICTED, **draw(_users(may_be_root=False))}
    elif draw(st.booleans()):
        container["securityContext"] = draw(_security())
    return container


def _variable() -> st.SearchStrategy[Document]:
    by_reference = {"valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}
    by_secret = {"valueFrom": {"secretKeyRef": {"name": "s", "key": "k", "optional": True}}}
    return st.builds(lambda value: {"value": value}, st.sampled_from(VALUES)) | st.sampled_from(
        [by_reference, by_secret, {}]
    )


@st.composite
def _resources(draw: st.DrawFn) -> Document:
    names = draw(st.lists(st.sampled_from(list(QUANTITIES)), unique=True, max_size=4))
    limits = {name: draw(st.sampled_from(QUANTITIES[name])) for name in names}
    requests = {name: value for name, value in limits.items() if draw(st.booleans())}
    return {key: value for key, value in (("limits", limits), ("requests", requests)) if value}


def _users(*, may_be_root: bool) -> st.SearchStrategy[Document]:
    users: list[Document] = [{}, {"runAsUser": 1000}, {"runAsUser": 1000, "runAsGroup": 0}, {"runAsGroup": 2000}]
    return st.sampled_from([*users, {"runAsUser": 0}] if may_be_root else users)


@st.composite
def _security(draw: st.DrawFn) -> Document:
    parts: list[Document] = [
        {"privileged": True},
        {"allowPrivilegeEscalation": False},
        {"readOnlyRootFilesystem": True},
        {"runAsNonRoot": True},
        {"capabilities": {"add": ["SYS_PTRACE", "IPC_LOCK"]}},
        {"seccompProfile": {"type": "Localhost", "localhostProfile": "a.json"}},
        {"seccompProfile": {"type": "Unconfined"}},
        {"seLinuxOptions": {"level": "s0:c1,c2"}},
    ]
    context = draw(_users(may_be_root=True)).copy()
    for part in draw(st.lists(st.sampled_from(parts), max_size=3)):
        context |= part
    if context.get("privileged"):
        context.pop("allowPrivilegeEscalation", None)  # the API server refuses both
    return context


@st.composite
def _spec_fields(draw: st.DrawFn, *, is_restricted: bool) -> Document:
    fields: list[Document] = [
        {"shareProcessNamespace": True},
        {"restartPolicy": "Never"},
        {"terminationGracePeriodSeconds": 5},
        {"nodeSelector": {"kubernetes.io/os": "linux"}},
        {"os": {"name": "linux"}},
        {"tolerations": [{"operator": "Exists"}]},
        {"imagePullSecrets": [{"name": "registry"}, {"name": "mine"}]},
        {"initContainers": None},
        {"hostname": "h"},
        {"serviceAccountName": "default", "automountServiceAccountToken": False},
        {"resources": {"limits": {"cpu": "100", "memory": "1Ti"}, "requests": {"cpu": "64", "memory": "512Gi"}}},
        {"dnsPolicy": "None", "dnsConfig": {"nameservers": ["192.0.2.1"]}},
    ]
    if not is_restricted:
        fields += [{"hostNetwork": True}, {"hostPID": True}, {"hostUsers": False}]
    spec: Document = {}
    for field in draw(st.lists(st.sampled_from(fields), max_size=4)):
        spec |= field
    if draw(st.booleans()):
        context = draw(_users(may_be_root=not is_restricted)).copy()
        context |= draw(st.sampled_from([{}, {"fsGroup": 3000}, {"seccompProfile": {"type": "RuntimeDefault"}}]))
        spec["securityContext"] = context
    return spec
