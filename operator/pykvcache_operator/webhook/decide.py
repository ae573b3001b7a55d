"""What the webhook makes of a pod: injection's answer, said better where the webhook itself knows too little."""

from pykvcache_contract.injection import SkipReason
from pykvcache_operator.injection import annotations
from pykvcache_operator.injection.inject import inject
from pykvcache_operator.injection.outcome import Document, InjectionSettings, Outcome, Result
from pykvcache_operator.webhook.known import Known
from pykvcache_operator.webhook.review import Inject, pool_name, short


def decider(known: Known, settings: InjectionSettings) -> Inject:
    """Return the function that decides about pods by what is known at that moment."""

    def decide(pod: Document, namespace: str) -> Outcome:
        facts = known.namespaces.get(namespace)
        is_known = known.is_read and facts is not None
        outcome = inject(pod, pools=known.pools if is_known else {}, namespace=facts, settings=settings)
        if outcome.reason is not SkipReason.POOL_NOT_FOUND:
            return outcome
        if not is_known:
            problem = known.problem or f"namespace {short(namespace)} was not told by the API server yet"
            return _restated(outcome, pod, SkipReason.WEBHOOK_STARTING, problem)
        if problem := known.unreadable.get(pool_name(pod), ""):
            return _restated(outcome, pod, SkipReason.POOL_UNREADABLE, problem)
        return outcome

    return decide


def _restated(outcome: Outcome, pod: Document, reason: SkipReason, problem: str) -> Outcome:
    """Return the same with another reason; where the pod has no room for an annotation it gets none."""
    message = annotations.clip(f"{problem}. {reason.meaning}")
    metadata = annotations.skipped(pod, reason=reason, message=message)
    new = pod if outcome.pod is pod or metadata is None else {**pod, "metadata": metadata}
    return Outcome(Result.SKIPPED, new, reason, message)
