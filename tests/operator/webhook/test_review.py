"""Reviews become answers: patches, warnings, refusals; and nothing that goes wrong keeps a pod from being made."""

import base64
import copy
import json
import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pykvcache_contract.injection import SkipReason
from pykvcache_operator.injection.outcome import Outcome, Result
from pykvcache_operator.webhook import review

POD = {
    "metadata": {"generateName": "vllm-", "labels": {"pykvcache.io/pool": "p", "a/b~c": "d"}},
    "spec": {"containers": [{"name": "vllm", "image": "x"}]},
}


def body(pod=POD, **changes):
    """Return a review as the API server sends it; a change to None removes a field of the request."""
    request = {
        "uid": "u1",
        "kind": {"group": "", "version": "v1", "kind": "Pod"},
        "operation": "CREATE",
        "namespace": "team",
        "object": pod,
        "dryRun": False,
    }
    request = {key: value for key, value in {**request, **changes}.items() if value is not None}
    return json.dumps({"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": request}).encode()


def answer(inject, **changes):
    return review.respond(review.read(body(**changes)), inject)


def injected(pod, _namespace):
    """Stand for injection: change some things, as it does."""
    metadata = {**pod["metadata"], "annotations": {"pykvcache.io/injected": "1"}}
    spec = {**pod["spec"], "volumes": [{"name": "pykvcache-library"}]}
    return Outcome(Result.INJECTED, {**pod, "metadata": metadata, "spec": spec})


def apply(patch, pod):
    """Apply `add` and `remove` of values in objects, by RFC 6902."""
    pod = copy.deepcopy(pod)
    for step in json.loads(base64.b64decode(patch)):
        *parents, key = [part.replace("~1", "/").replace("~0", "~") for part in step["path"].split("/")[1:]]
        place = pod
        for parent in parents:
            place = place[parent]
        if step["op"] == "add":
            place[key] = step["value"]
        else:
            assert step["op"] == "remove"
            del place[key]
    return pod


def test_an_injected_pod_is_a_patch_of_what_changed():
    given = answer(injected)
    response = given.document["response"]
    assert (given.result, given.reason) == ("injected", "")
    assert (response["uid"], response["allowed"], response["patchType"]) == ("u1", True, "JSONPatch")
    steps = json.loads(base64.b64decode(response["patch"]))
    assert [step["path"] for step in steps] == ["/metadata/annotations", "/spec/volumes"]
    assert injected(POD, "").pod == apply(response["patch"], POD)
    assert "warnings" not in response


def test_the_namespace_is_that_of_the_request():
    seen = []
    answer(lambda pod, namespace: seen.append(namespace) or Outcome(Result.UNCHANGED, pod))
    assert seen == ["team"]


def test_an_unchanged_pod_has_no_patch():
    response = answer(lambda pod, _: Outcome(Result.UNCHANGED, pod)).document["response"]
    assert response == {"uid": "u1", "allowed": True}


def test_a_skipped_pod_says_why_in_a_warning():
    message = "There is no KVCachePool p."
    given = answer(lambda pod, _: Outcome(Result.SKIPPED, pod, reason=SkipReason.POOL_NOT_FOUND, message=message))
    assert (given.result, given.reason) == ("skipped", "PoolNotFound")
    expected = f"py-kvcache: this pod goes without the cache: PoolNotFound: {message}"
    assert given.document["response"]["warnings"] == [expected]


def test_a_rejected_pod_is_refused_with_the_reason():
    given = answer(lambda pod, _: Outcome(Result.REJECTED, pod, message="has a kv-transfer-config"))
    assert given.result == "rejected"
    response = given.document["response"]
    assert (response["allowed"], response["status"]["code"]) == (False, 403)
    assert response["status"]["message"] == "has a kv-transfer-config"


def test_a_dry_run_is_answered_like_any_other():
    assert answer(injected).document == answer(injected, dryRun=True).document


@pytest.mark.parametrize(
    "changes",
    [
        {"operation": "UPDATE"},
        {"subResource": "ephemeralcontainers"},
        {"kind": {"group": "apps", "version": "v1", "kind": "Deployment"}},
        {"kind": None},
    ],
)
def test_what_is_no_creation_of_a_pod_is_let_through(changes):
    given = answer(injected, **changes)
    assert given.document["response"] == {"uid": "u1", "allowed": True}
    assert given.result == "unchanged"


def explode(_pod, _namespace):
    token = "hf_secret"
    raise ValueError(f"cannot read {token}")


def test_a_defect_of_ours_admits_the_pod_with_a_warning_and_logs_no_values(caplog):
    given = answer(explode)
    response = given.document["response"]
    assert (given.result, given.reason) == ("error", "Error")
    assert response["allowed"] is True
    assert "patch" not in response
    assert response["warnings"] == ["py-kvcache could not look at this pod: ValueError. It goes without the cache."]
    assert "in explode" in caplog.text, "the log says where"
    assert "team/vllm-*" in caplog.text
    assert "hf_secret" not in caplog.text


def test_an_endless_recursion_of_ours_admits_the_pod_too():
    def deep(pod, namespace):
        return deep(pod, namespace)

    assert answer(deep).document["response"]["allowed"] is True


def test_warnings_are_printable_short_and_few():
    texts = ("two\nlines\x07", "x" * 1000, *(f"w{number}" for number in range(30)))
    given = answer(lambda pod, _: Outcome(Result.UNCHANGED, pod, warnings=texts))
    warnings = given.document["response"]["warnings"]
    assert warnings[0] == "py-kvcache: two lines "
    assert {256} == {len(text) for text in warnings if "x" in text}
    assert sum(map(len, warnings)) <= 4096
    assert all(text.isprintable() for text in warnings)


def test_hostile_names_do_not_reach_the_log_as_they_are(caplog):
    pod = {"metadata": {"name": "a\nERROR forged " + "x" * 500}, "spec": {}}
    with caplog.at_level(logging.INFO):
        answer(explode, pod=pod, namespace="b\n")
    line = caplog.records[0].getMessage().splitlines()[0]
    assert "a ERROR forged" in line
    assert len(line) < 300


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "no JSON"),
        (b"\xff{}", "no JSON"),
        (b"[" * 100_000, "no JSON"),
        (b"[]", "no AdmissionReview"),
        (b'{"kind": "Pod"}', "no AdmissionReview"),
        (b'{"kind": "AdmissionReview", "apiVersion": "admission.k8s.io/v1beta1"}', "admissionReviewVersions to [v1]"),
        (b'{"kind": "AdmissionReview", "apiVersion": "admission.k8s.io/v1"}', "no request with a uid"),
        (body(uid=None), "no request with a uid"),
        (body(uid=7), "no request with a uid"),
        (body(object=None), "request.object is missing"),
        (body(object="text"), "request.object is missing"),
    ],
)
def test_what_is_no_review_is_told_what_is_wrong(content, said):
    with pytest.raises(review.MalformedReviewError) as raised:
        review.read(content)
    assert said in str(raised.value)


TREES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=10,
)
PARTS = st.dictionaries(st.sampled_from(["a", "b/c", "~d", "", "é"]), TREES, max_size=4)


@pytest.mark.slow
@given(before=st.tuples(PARTS, PARTS), after=st.tuples(PARTS, PARTS))
def test_the_patch_of_any_two_pods_makes_the_one_of_the_other(before, after):
    old, new = ({"metadata": metadata, "spec": spec, "kind": "Pod"} for metadata, spec in (before, after))
    patch = base64.b64encode(json.dumps(review.patch_of(old, new)).encode())
    assert new == apply(patch, old)


@pytest.mark.parametrize("metadata", [None, [], "text", {"labels": []}, {"labels": {"pykvcache.io/pool": 3}}, {}])
def test_a_pod_without_a_proper_label_asks_for_no_pool(metadata):
    assert review.pool_name({"metadata": metadata}) == ""


def test_a_pod_that_has_the_cache_asks_for_no_pool_any_more():
    labels = {"pykvcache.io/pool": "p"}
    assert review.pool_name({"metadata": {"labels": labels}}) == "p"
    assert review.pool_name({"metadata": {"labels": labels, "annotations": {"pykvcache.io/injected": "1"}}}) == ""
