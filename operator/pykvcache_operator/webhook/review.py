"""AdmissionReviews: what the API server asks about a pod, and what it is answered. Pure.

Facts: an answer that is not `allowed` refuses the pod whatever failurePolicy says; only an HTTP error, or no answer,
falls under failurePolicy. A warning with control characters is dropped, one of more than 256 characters may be cut, and
of all warnings together 4096 characters are kept. Before admission nothing of a pod is validated: names, labels and
annotations may hold anything.

Therefore a pod that asks to be refused is the only one that is, a defect of ours admits the pod as it came, and what
goes into logs or warnings is made printable and short first. Values of a pod never go into a log: they may be secrets.
"""

import base64
import json
import logging
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pykvcache_contract.errors import PyKVCacheError
from pykvcache_contract.injection import SkipReason
from pykvcache_contract.names import INJECTED_ANNOTATION, POOL_NAME_LABEL
from pykvcache_operator.injection.annotations import clip
from pykvcache_operator.injection.outcome import Document, Outcome, Result

logger = logging.getLogger(__name__)

REVIEW_VERSION = "admission.k8s.io/v1"
REVIEW_KIND = "AdmissionReview"
WARNING_CHARACTERS_MAX = 256
WARNINGS_MAX = 16
"""Of the greatest length; the API server keeps no more. All of them stand in the pod's annotation."""
LOG_CHARACTERS_MAX = 80
REFUSAL_CHARACTERS_MAX = 1024
FORBIDDEN = 403

Inject = Callable[[Document, str], Outcome]
"""Decides about a pod in the namespace of this name."""


class MalformedReviewError(PyKVCacheError):
    """What came is no AdmissionReview that we understand; the answer is an HTTP error, and failurePolicy decides."""


@dataclass(frozen=True, slots=True)
class Question:
    """One review: about which pod, and in which namespace; the pod itself need not say it."""

    uid: str
    namespace: str
    pod: Document
    is_creation_of_pod: bool

    @property
    def title(self) -> str:
        """How logs name the pod; one of a Deployment has only the beginning of a name so far."""
        metadata = self.pod.get("metadata")
        metadata = metadata if isinstance(metadata, dict) else {}
        name = metadata.get("name") or f"{metadata.get('generateName', '')}*"
        return f"{short(self.namespace)}/{short(name)}"


@dataclass(frozen=True, slots=True)
class Answer:
    """What is sent back, and how it is counted.

    Args:
        document: an AdmissionReview with a response.
        result, reason: labels of the metric of requests.
    """

    document: Document
    result: str
    reason: str


def read(body: bytes) -> Question:
    """Return what a request's body asks.

    Raises:
        MalformedReviewError: it is no AdmissionReview of version v1 with a uid and an object.
    """
    try:
        review = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise MalformedReviewError(f"the body is no JSON: {type(error).__name__}") from None
    if not isinstance(review, dict) or review.get("kind") != REVIEW_KIND:
        raise MalformedReviewError(f"the body is no {REVIEW_KIND}")
    if review.get("apiVersion") != REVIEW_VERSION:
        raise MalformedReviewError(f"apiVersion is not {REVIEW_VERSION}: set admissionReviewVersions to [v1]")
    request = review.get("request")
    uid = request.get("uid") if isinstance(request, dict) else None
    if not isinstance(request, dict) or not isinstance(uid, str) or not uid:
        raise MalformedReviewError("there is no request with a uid")
    pod = request.get("object")
    if not isinstance(pod, dict):
        raise MalformedReviewError("request.object is missing: the rules must name only the operation CREATE")
    return Question(uid, str(request.get("namespace") or ""), pod, _is_creation_of_pod(request))


def respond(question: Question, inject: Inject) -> Answer:
    """Ask `inject` about the pod and return the answer; whatever `inject` raises, the pod is admitted as it came."""
    if not question.is_creation_of_pod:
        return _allow(question, Outcome(Result.UNCHANGED, question.pod))
    try:
        return _answer(question, inject(question.pod, question.namespace))
    except Exception as error:
        frames = "".join(traceback.format_tb(error.__traceback__))  # no message: it may hold values of the pod
        logger.error("a defect of ours: %s about pod %s\n%s", type(error).__name__, question.title, frames)
        warning = f"py-kvcache could not look at this pod: {type(error).__name__}. It goes without the cache."
        return Answer(_document(question, {"allowed": True, "warnings": [warning]}), "error", SkipReason.ERROR.word)


def pool_name(pod: Document) -> str:
    """Return the name of the pool that a pod asks for; "" if it asks for none, or has it already."""
    metadata = pod.get("metadata")
    if not isinstance(metadata, dict):
        return ""
    labels, annotations = metadata.get("labels"), metadata.get("annotations")
    if not isinstance(labels, dict) or (isinstance(annotations, dict) and INJECTED_ANNOTATION in annotations):
        return ""
    name = labels.get(POOL_NAME_LABEL)
    return name if isinstance(name, str) else ""


def short(text: object) -> str:
    """Return what a log may say of something that nobody has checked."""
    return clip(str(text), characters_max=LOG_CHARACTERS_MAX)


def patch_of(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[Document]:
    """Return the JSON patch that makes the one pod of the other: whole values below metadata and spec."""
    return [step for part in ("metadata", "spec") for step in _steps(part, before, after)]


def _is_creation_of_pod(request: Mapping[str, Any]) -> bool:
    kind = request.get("kind")
    is_pod = isinstance(kind, dict) and (kind.get("group") or "", kind.get("kind")) == ("", "Pod")
    return is_pod and request.get("operation") == "CREATE" and not request.get("subResource")


def _answer(question: Question, outcome: Outcome) -> Answer:
    if outcome.result is Result.REJECTED:
        message = clip(outcome.message, characters_max=REFUSAL_CHARACTERS_MAX)
        status = {"code": FORBIDDEN, "reason": "Forbidden", "message": message}
        return Answer(_document(question, {"allowed": False, "status": status}), outcome.result.value, "")
    return _allow(question, outcome)


def _allow(question: Question, outcome: Outcome) -> Answer:
    response: Document = {"allowed": True}
    steps = patch_of(question.pod, outcome.pod) if outcome.pod is not question.pod else []
    if steps:
        text = json.dumps(steps, separators=(",", ":"))
        response |= {"patchType": "JSONPatch", "patch": base64.b64encode(text.encode()).decode()}
    if warnings := list(_warnings(outcome)):
        response["warnings"] = warnings[:WARNINGS_MAX]
    reason = outcome.reason.word if outcome.reason else ""
    return Answer(_document(question, response), outcome.result.value, reason)


def _warnings(outcome: Outcome) -> Iterator[str]:
    told = list(outcome.warnings)
    if outcome.result is Result.SKIPPED:
        word = outcome.reason.word if outcome.reason else ""
        told.insert(0, f"this pod goes without the cache: {word}: {outcome.message}")
    for text in told:
        yield clip(f"py-kvcache: {text}", characters_max=WARNING_CHARACTERS_MAX)


def _steps(part: str, before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[Document]:
    old, new = before.get(part), after.get(part)
    if not isinstance(old, dict) or not isinstance(new, dict):
        if old != new:
            yield {"op": "add", "path": f"/{part}", "value": new}
        return
    for key in old.keys() - new.keys():
        yield {"op": "remove", "path": _path(part, key)}
    for key, value in new.items():
        if key not in old or old[key] != value:
            yield {"op": "add", "path": _path(part, key), "value": value}


def _path(part: str, key: str) -> str:
    return f"/{part}/{key.replace('~', '~0').replace('/', '~1')}"


def _document(question: Question, response: Document) -> Document:
    return {"apiVersion": REVIEW_VERSION, "kind": REVIEW_KIND, "response": {"uid": question.uid, **response}}
