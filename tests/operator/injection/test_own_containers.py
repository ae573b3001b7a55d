"""Our own containers: their users, their resources, their ports."""

import json

import pytest

EPHEMERAL = {"type": "Ephemeral", "capacity": "100Gi"}
RESTRICTED = {
    "allowPrivilegeEscalation": False,
    "readOnlyRootFilesystem": True,
    "runAsNonRoot": True,
    "capabilities": {"drop": ["ALL"]},
    "seccompProfile": {"type": "RuntimeDefault"},
}
CONFINED = {"seccompProfile": {"type": "RuntimeDefault"}}


@pytest.fixture
def own(injector):
    """Returns (library, sidecar) of a pod."""

    def inject(storage=EPHEMERAL, **pod):
        return injector(injector.pod(**pod), injector.pool(storage=storage)).pod["spec"]["initContainers"]

    return inject


def option(sidecar, name):
    return next(a.split("=", 1)[1] for a in sidecar["command"] if a.startswith(f"--{name}="))


@pytest.mark.parametrize(
    ("of_pod", "of_vllm", "of_library", "of_sidecar"),
    [
        ({}, {}, {}, {}),
        ({"runAsUser": 0}, {}, {"runAsUser": 65532}, {"runAsUser": 65532}),
        ({"runAsUser": 0}, {"runAsUser": 7}, {"runAsUser": 65532}, {"runAsUser": 7}),
        ({"runAsUser": 5}, {}, {}, {}),
        ({"runAsUser": 5}, {"runAsUser": 0}, {}, {}),
        ({"runAsUser": 5, "runAsGroup": 6}, {"runAsUser": 7, "runAsGroup": 8}, {}, {"runAsUser": 7, "runAsGroup": 8}),
        ({"runAsUser": "root"}, {"runAsUser": True}, {}, {}),
    ],
)
def test_own_containers_are_restricted_never_root_and_the_sidecar_shares_the_user_of_vllm(
    own, of_pod, of_vllm, of_library, of_sidecar
):
    library, sidecar = own(securityContext={**of_pod, **CONFINED}, container={"securityContext": of_vllm})
    assert library["securityContext"] == {**RESTRICTED, **of_library}
    assert sidecar["securityContext"] == {**RESTRICTED, **of_sidecar}


@pytest.mark.parametrize(
    ("of_pod", "of_vllm", "is_confined"),
    [({}, {}, False), (CONFINED, {}, True), ({}, CONFINED, True), ({"seccompProfile": None}, {"runAsUser": 0}, False)],
)
def test_a_seccomp_profile_is_only_where_the_pod_has_one_since_some_clusters_refuse_it(
    own, of_pod, of_vllm, is_confined
):
    for container in own(securityContext=of_pod, container={"securityContext": of_vllm}):
        assert ("seccompProfile" in container["securityContext"]) is is_confined


def test_what_vllm_reads_has_the_selinux_label_of_vllm(own):
    label = {"level": "s0:c1,c2"}
    for container in own(container={"securityContext": {"seLinuxOptions": label}}):
        assert container["securityContext"]["seLinuxOptions"] == label


def test_the_sidecar_stays_below_the_size_at_which_the_kubelet_evicts(own):
    _, sidecar = own()
    assert int(option(sidecar, "capacity")) == int(0.95 * 100 * 2**30)
    assert int(option(sidecar, "min-free")) == 10 * 2**30
    assert option(sidecar, "pool") == "/pykvcache/pool"
    assert "--patient" in sidecar["command"]


@pytest.mark.parametrize(
    ("storage", "claims", "capacity"),
    [
        ({"claimName": "kv"}, [{"namespace": "team", "capacityBytes": 5 * 2**30}], 5 * 2**30),
        ({"claimName": "kv"}, [], 64 * 2**30),
        ({"storageClassName": "x", "capacity": "7Gi"}, [], 7 * 2**30),
    ],
)
def test_of_a_claim_the_sidecar_takes_its_size_as_far_as_it_is_known(injector, storage, claims, capacity):
    when = "2026-01-31T12:00:00Z"
    ready = {"type": "Ready", "status": "True", "reason": "ClaimBound", "message": "", "lastTransitionTime": when}
    pool = injector.pool(
        storage={"type": "SharedFilesystem", **storage},
        allowedNamespaces={"names": ["team"]},
        status={"conditions": [ready], "claims": claims},
    )
    sidecar = injector(injector.pod(), pool).pod["spec"]["initContainers"][-1]
    assert int(option(sidecar, "capacity")) == capacity
    assert not any(argument.startswith("--min-free") for argument in sidecar["command"])


def test_the_sidecar_is_served_on_its_port_and_probed_from_inside(own):
    _, sidecar = own()
    assert sidecar["ports"] == [{"name": "pykvcache", "containerPort": 9478}]
    assert option(sidecar, "listen") == "0.0.0.0:9478"
    assert sidecar["startupProbe"]["exec"]["command"][:2] == ["python3", "-c"]


@pytest.mark.parametrize(
    "pod", [{"hostNetwork": True}, {"container": {"ports": [{"containerPort": 9478}]}}, {"container": {"ports": None}}]
)
def test_a_port_that_is_not_ours_is_left_to_others(own, pod):
    _, sidecar = own(**pod)
    is_free = pod == {"container": {"ports": None}}
    assert ("ports" in sidecar, "startupProbe" in sidecar) == (is_free, is_free)
    assert option(sidecar, "listen") == ("0.0.0.0:9478" if is_free else "127.0.0.1:0")


def test_the_probe_ends_well_although_nothing_listens(own, monkeypatch):
    _, sidecar = own()
    code = sidecar["startupProbe"]["exec"]["command"][2]
    waits = []
    monkeypatch.setattr("socket.create_connection", lambda *_: (_ for _ in ()).throw(ConnectionRefusedError))
    monkeypatch.setattr("time.sleep", waits.append)
    exec(compile(code, "probe", "exec"), {})
    assert sum(waits) == pytest.approx(5)
    assert sidecar["startupProbe"]["timeoutSeconds"] > 2 * 5


def test_requests_are_limits_so_that_quotas_hold_and_a_guaranteed_pod_stays_one(own):
    for container in own():
        resources = container["resources"]
        assert resources["requests"] == resources["limits"]
        assert set(resources["limits"]) == {"cpu", "memory"}


def test_a_pod_with_resources_of_its_own_shares_them(own):
    for container in own(resources={"limits": {"memory": "10Gi"}}):
        assert "resources" not in container


def test_a_pod_with_resources_of_its_own_that_limits_ephemeral_storage_is_not_evicted_for_ours(own):
    limited = {"resources": {"limits": {"ephemeral-storage": "1Gi"}}}
    _, sidecar = own(resources={"limits": {"memory": "10Gi"}}, container=limited)
    assert set(sidecar["resources"]["limits"]) == {"ephemeral-storage"}
    assert int(sidecar["resources"]["limits"]["ephemeral-storage"]) > 0.95 * 100 * 2**30


def test_where_ephemeral_storage_is_limited_the_limits_pay_for_what_comes_with_us(own):
    library, sidecar = own(container={"resources": {"limits": {"ephemeral-storage": "1Gi"}}})
    assert sidecar["resources"]["requests"]["ephemeral-storage"] == "0"
    assert int(sidecar["resources"]["limits"]["ephemeral-storage"]) > 0.95 * 100 * 2**30 + 64 * 2**20
    assert int(library["resources"]["limits"]["ephemeral-storage"]) == 64 * 2**20


@pytest.mark.parametrize(
    ("limits", "staging", "is_warned"),
    [
        ({"memory": "4Gi"}, "1Gi", False),
        ({"memory": "4Gi"}, "1025Mi", True),
        ({"memory": "8Gi", "nvidia.com/gpu": "2"}, "1Gi", False),
        ({"memory": "8Gi", "nvidia.com/gpu": 4}, "1Gi", True),
        ({"memory": "8Gi", "nvidia.com/mig-1g.5gb": "4"}, "1Gi", True),
        ({"memory": "8Gi", "amd.com/gpu": "many"}, "1Gi", False),
        ({"memory": "1e9"}, "1Gi", False),
        ({}, "64Gi", False),
    ],
)
def test_much_staging_memory_is_warned_of_and_no_limit_is_changed(injector, limits, staging, is_warned):
    pod = injector.pod(annotations={"pykvcache.io/staging": staging}, container={"resources": {"limits": limits}})
    outcome = injector(pod)
    assert any("Staging memory" in warning for warning in outcome.warnings) is is_warned
    assert ("pykvcache.io/warnings" in outcome.pod["metadata"]["annotations"]) is is_warned
    assert outcome.pod["spec"]["containers"][0]["resources"] == {"limits": limits}


@pytest.mark.parametrize(
    ("limits", "staging", "given"),
    [
        ({"memory": "4Gi"}, "2Gi", 2 * 2**30),
        ({"memory": "4Gi"}, "64Gi", 2 * 2**30),
        ({"memory": "8Gi", "nvidia.com/gpu": "4"}, "2Gi", 2**30),
        ({"memory": "16Mi"}, "1Gi", 2**24),
        ({}, "64Gi", 64 * 2**30),
    ],
)
def test_no_wish_takes_so_much_staging_memory_that_vllm_is_killed(injector, limits, staging, given):
    pod = injector.pod(annotations={"pykvcache.io/staging": staging}, container={"resources": {"limits": limits}})
    config = json.loads(injector(pod).pod["spec"]["containers"][0]["args"][-1])
    assert config["kv_connector_extra_config"]["staging"] == given


def test_the_memory_of_the_pod_counts_where_the_container_has_no_limit(injector):
    outcome = injector(injector.pod(resources={"limits": {"memory": "1Gi"}}))
    assert any("Staging memory" in warning for warning in outcome.warnings)
