"""What is added to a pod, and what stays as it was."""

import copy

import pytest

from pykvcache_operator.injection.inject import inject
from pykvcache_operator.injection.outcome import Result

EPHEMERAL = {"type": "Ephemeral", "capacity": "200Gi"}
SHARED = {"type": "SharedFilesystem", "claimName": "kv"}


def named(entries, name):
    return next(entry for entry in entries if entry["name"] == name)


def test_a_pod_without_the_label_and_one_that_has_the_cache_stay_as_they_are(injector):
    plain, done = injector.pod(), injector.pod(annotations={"pykvcache.io/injected": "0.1.0"})
    del plain["metadata"]["labels"]
    for pod in (plain, done, {}, {"metadata": None}, {"metadata": {"labels": ["pykvcache.io/pool"]}}):
        outcome = injector(pod)
        assert (outcome.result, outcome.pod is pod) == (Result.UNCHANGED, True)


def test_a_calibration_job_carries_the_label_and_is_none_of_the_users(injector):
    pod = injector.pod()
    pod["metadata"]["labels"] |= {"app.kubernetes.io/name": "py-kvcache", "app.kubernetes.io/component": "calibration"}
    assert injector(pod).result is Result.UNCHANGED


def test_a_node_local_pool_comes_as_a_volume_of_the_driver_and_the_library_by_an_init_container(injector):
    outcome = injector(injector.pod())
    spec = outcome.pod["spec"]
    assert outcome.result is Result.INJECTED
    assert named(spec["volumes"], "pykvcache-pool")["csi"] == {
        "driver": "csi.pykvcache.io",
        "volumeAttributes": {"pool": "fast"},
    }
    assert [container["name"] for container in spec["initContainers"]] == ["pykvcache-library"]
    assert spec["initContainers"][0]["args"] == ["/pykvcache/library"]
    assert spec["containers"][0]["volumeMounts"] == [
        {"name": "pykvcache-library", "mountPath": "/pykvcache/library", "readOnly": True},
        {"name": "pykvcache-pool", "mountPath": "/pykvcache/pool"},
    ]
    assert outcome.pod["metadata"]["annotations"]["pykvcache.io/injected"] == "1.2.3"
    assert spec["imagePullSecrets"] == [{"name": "registry"}]


@pytest.mark.parametrize(
    ("storage", "volume"),
    [
        (EPHEMERAL, {"emptyDir": {"sizeLimit": "200Gi"}}),
        (SHARED, {"persistentVolumeClaim": {"claimName": "kv"}}),
    ],
)
def test_a_pool_without_a_node_agent_gets_a_native_sidecar_behind_the_library(injector, storage, volume):
    ready = {
        "type": "Ready",
        "status": "True",
        "reason": "ClaimBound",
        "message": "",
        "lastTransitionTime": "2026-01-31T12:00:00Z",
    }
    pool = injector.pool(storage=storage, status={"conditions": [ready]})
    spec = injector(injector.pod(), pool).pod["spec"]
    assert named(spec["volumes"], "pykvcache-pool") == {"name": "pykvcache-pool", **volume}
    library, sidecar = spec["initContainers"]
    assert (library["name"], sidecar["name"]) == ("pykvcache-library", "pykvcache-sidecar")
    assert "restartPolicy" not in library
    assert sidecar["restartPolicy"] == "Always"
    assert sidecar["volumeMounts"] == [{"name": "pykvcache-pool", "mountPath": "/pykvcache/pool"}]


def test_the_users_containers_volumes_and_secrets_stay_in_front_and_in_order(injector):
    pod = injector.pod(
        initContainers=[{"name": "download", "image": "d"}],
        volumes=[{"name": "model", "emptyDir": {}}],
        imagePullSecrets=[{"name": "registry"}, {"name": "mine"}],
        container={"volumeMounts": [{"name": "model", "mountPath": "/model"}]},
    )
    pod["spec"]["containers"].append({"name": "proxy", "image": "p"})
    spec = injector(pod, injector.pool(storage=EPHEMERAL)).pod["spec"]
    assert [c["name"] for c in spec["initContainers"]] == ["download", "pykvcache-library", "pykvcache-sidecar"]
    assert [v["name"] for v in spec["volumes"]] == ["model", "pykvcache-library", "pykvcache-pool"]
    assert spec["containers"][0]["volumeMounts"][0] == {"name": "model", "mountPath": "/model"}
    assert spec["containers"][1] == {"name": "proxy", "image": "p"}
    assert spec["imagePullSecrets"] == [{"name": "registry"}, {"name": "mine"}]


def test_what_is_given_is_never_changed(injector, shapes):
    for pod in shapes.values():
        before = copy.deepcopy(pod)
        injector(pod, injector.pool(pod["metadata"]["labels"]["pykvcache.io/pool"], storage=EPHEMERAL))
        assert pod == before


def test_done_twice_it_is_done_once_also_when_the_annotation_was_lost(injector, shapes):
    pods = [*shapes.values(), injector.pod(container={"ports": [{"containerPort": 9478}]})]
    done = 0
    for pod in pods:
        pool = injector.pool(pod["metadata"]["labels"]["pykvcache.io/pool"], storage=EPHEMERAL)
        first = injector(pod, pool)
        if first.result is not Result.INJECTED:
            continue
        done += 1
        assert injector(first.pod, pool).pod is first.pod
        lost = copy.deepcopy(first.pod)
        del lost["metadata"]["annotations"]["pykvcache.io/injected"]
        assert injector(lost, pool).pod["spec"] == first.pod["spec"]
    assert done > len(pods) / 2


def test_an_image_volume_needs_no_init_container_and_an_image_with_the_library_needs_nothing(injector):
    by_image = injector(injector.pod(annotations={"pykvcache.io/library": "ImageVolume"})).pod["spec"]
    image = {"reference": "r/connector:1", "pullPolicy": "IfNotPresent"}
    assert named(by_image["volumes"], "pykvcache-library")["image"] == image
    assert "initContainers" not in by_image
    path = named(by_image["containers"][0]["env"], "PYTHONPATH")["value"]
    assert path == "/pykvcache/library/library"
    baked = injector(injector.pod(), injector.pool(injection={"library": "None"})).pod["spec"]
    assert [volume["name"] for volume in baked["volumes"]] == ["pykvcache-pool"]
    assert "imagePullSecrets" not in baked
    assert "PYTHONPATH" not in [entry["name"] for entry in baked["containers"][0]["env"]]


def test_only_where_a_sidecar_cares_may_vllm_make_a_pool_of_an_empty_directory(injector):
    def command(storage):
        return " ".join(
            map(str, injector(injector.pod(), injector.pool(storage=storage)).pod["spec"]["containers"][0]["args"])
        )

    assert '"create_pool":true' in command(EPHEMERAL)
    assert '"create_pool":false' in command(None)


def test_an_emptydir_never_takes_what_the_kubelet_evicts_for_although_its_sidecar_is_dead(injector):
    arguments = injector(injector.pod(), injector.pool(storage=EPHEMERAL)).pod["spec"]["containers"][0]["args"]
    assert f'"capacity":{int(0.95 * 200 * 2**30)}' in " ".join(arguments)
    assert '"capacity"' not in " ".join(injector(injector.pod()).pod["spec"]["containers"][0]["args"])


def test_staging_comes_from_the_pool_unless_the_pod_says_otherwise(injector):
    pool = injector.pool(memory={"stagingBytes": "2Gi"})
    of_pool = injector(injector.pod(), pool).pod["spec"]["containers"][0]["args"]
    of_pod = injector(injector.pod(annotations={"pykvcache.io/staging": "64Mi"}), pool).pod["spec"]["containers"][0][
        "args"
    ]
    assert f'"staging":{2 * 2**30}' in " ".join(of_pool)
    assert f'"staging":{64 * 2**20}' in " ".join(of_pod)


@pytest.fixture
def shared(injector):
    """A SharedFilesystem pool that is ready."""
    when = "2026-01-31T12:00:00Z"
    ready = {"type": "Ready", "status": "True", "reason": "ClaimBound", "message": "", "lastTransitionTime": when}
    return injector.pool(storage=SHARED, status={"conditions": [ready]})


def test_a_claim_whose_files_all_get_another_group_at_each_start_is_warned_of(injector, shared):
    def is_warned(pool, **context):
        outcome = injector(injector.pod(securityContext=context), pool)
        return any("fsGroupChangePolicy" in warning for warning in outcome.warnings)

    assert is_warned(shared, fsGroup=0)
    assert is_warned(shared, fsGroup=5, fsGroupChangePolicy="Always")
    assert not is_warned(shared, fsGroup=5, fsGroupChangePolicy="OnRootMismatch")
    assert not is_warned(shared, runAsUser=5)
    assert not is_warned(injector.pool(storage=EPHEMERAL), fsGroup=5)


def test_user_namespaces_on_a_claim_are_warned_of(injector, shared):
    assert any("hostUsers" in warning for warning in injector(injector.pod(hostUsers=False), shared).warnings)
    assert injector(injector.pod(), shared).warnings == ()
    assert injector(injector.pod(hostUsers=False)).warnings == ()


def test_a_former_reason_to_skip_goes_when_the_pod_gets_the_cache(injector):
    pod = injector.pod(
        annotations={"pykvcache.io/skipped": "PoolNotFound: …", "pykvcache.io/warnings": "old", "a": "b"}
    )
    annotations = injector(pod).pod["metadata"]["annotations"]
    assert annotations["a"] == "b"
    assert annotations["pykvcache.io/injected"] == "1.2.3"
    assert not {"pykvcache.io/skipped", "pykvcache.io/warnings"} & annotations.keys()


def test_a_pod_that_asks_for_it_is_rejected_and_nothing_else_is(injector):
    pod = injector.pod(
        annotations={"pykvcache.io/on-conflict": "Reject"},
        container={"command": ["vllm", "serve", "m", "--kv-transfer-config", '{"kv_connector":"Other"}']},
    )
    outcome = injector(pod)
    assert (outcome.result, outcome.pod is pod) == (Result.REJECTED, True)
    assert outcome.message


def test_offline_nobody_knows_the_namespace_and_allowed_namespaces_are_not_looked_at(injector):
    pool = injector.pool(allowedNamespaces={"names": ["other"]})
    assert injector(injector.pod(), pool).result is Result.SKIPPED
    offline = inject(injector.pod(), pools={"fast": pool}, namespace=None, settings=injector.settings)
    assert offline.result is Result.INJECTED


def test_null_stays_null_where_nothing_is_added(injector):
    pod = injector.pod(annotations={"pykvcache.io/library": "ImageVolume"}, initContainers=None)
    first = injector(pod).pod
    del first["metadata"]["annotations"]["pykvcache.io/injected"]
    assert injector(first).pod["spec"] == first["spec"]
    assert first["spec"]["initContainers"] is None
