"""Which labelled pods have the cache: what is kept of a pod, how those of a pool are counted, what is told about one.

The webhook answers while a pod is created, and its answer stands on the pod: it is there from the first moment or
never, so nothing is waited for. A pod without one went past the webhook, or got its label later.

Whoever makes a pod may write its annotations. So a reason counts if it is a word of ours, texts are made plain, and
`injected` counts together with the volume that comes with it: a template copied from an injected pod may have the
annotation alone, and the webhook passes over whatever has it.

Pure but for `Roster`, which counts. Only small facts are kept: of each pod less than a kilobyte.
"""

import heapq
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from enum import Enum
from typing import Any

from pykvcache_contract.calibration import plain_text
from pykvcache_contract.injection import SkipReason
from pykvcache_contract.names import (
    CONDITION_INJECTION_HEALTHY,
    INJECTED_ANNOTATION,
    POOL_NAME_LABEL,
    POOL_VOLUME,
    SKIPPED_ANNOTATION,
    WARNINGS_ANNOTATION,
)
from pykvcache_operator.calibration_job import COMPONENT_LABELS
from pykvcache_operator.conditions import Finding
from pykvcache_operator.resources import Notice, PodCounts, Severity

TEXT_LENGTH_MAX = 400
"""Of what is kept of an annotation."""
NAMES_MAX = 5
NAME_LENGTH_MAX = 120
"""A namespace and a name may be 317 letters, and a message with five of them must keep its advice."""
EVENT_SECONDS = 3600
"""How long an API server keeps Events by default. A pod that is older when it is first seen was told about before; an
Event now would be about a time that is over."""
WEBHOOK_PODS = "kubectl get pods -A -l app.kubernetes.io/name=py-kvcache,app.kubernetes.io/component=webhook"
_REASONS = frozenset(reason.word for reason in SkipReason)
_ENDED = ("Succeeded", "Failed")
_COPIED = (
    f"The pod has the annotation {INJECTED_ANNOTATION} but not the volume {POOL_VOLUME}, as if copied from an injected "
    "pod; the webhook passes such pods over. Remove the annotation from the pod's template"
)
_MISSED = (
    "The webhook of py-kvcache left nothing on this pod, which runs without the cache. Either it did not answer when "
    f"the pod was made ({WEBHOOK_PODS}), or the pod got its label later. Delete the pod then: its replacement gets the "
    "cache. Or the webhook does not look at this namespace (kube-system and those of py-kvcache are left out), or "
    "the pod has no room for an annotation, or the webhook has a defect, which its log shows"
)


class PodState(Enum):
    """What became of a labelled pod."""

    INJECTED = "injected"
    SKIPPED = "skipped"
    MISSED = "missed"


@dataclass(frozen=True, slots=True)
class PodFacts:
    """A labelled pod.

    Args:
        pool: value of its label; anything, and not always a pool's name.
        created: Unix time in seconds.
        state: None: it does not count, because it has ended, is about to, or is one of our own Jobs.
        reason: why it is SKIPPED, a word of `SkipReason`.
        text: SKIPPED: the rest of the annotation. INJECTED: the warnings, "" if there are none. MISSED: what is odd.
    """

    namespace: str
    name: str
    uid: str
    pool: str
    created: int
    state: PodState | None
    reason: str = ""
    text: str = ""


def pod_facts(document: Mapping[str, Any]) -> PodFacts:
    """Return what is needed of a pod."""
    metadata = document["metadata"]
    state, reason, text = _state(document)
    return PodFacts(
        namespace=metadata["namespace"],
        name=metadata["name"],
        uid=metadata["uid"],
        pool=(metadata.get("labels") or {}).get(POOL_NAME_LABEL, ""),
        created=_seconds(metadata.get("creationTimestamp", "")),
        state=state,
        reason=reason,
        text=text,
    )


def _state(document: Mapping[str, Any]) -> tuple[PodState | None, str, str]:
    metadata = document["metadata"]
    annotations = metadata.get("annotations") or {}
    if _does_not_count(document):
        return None, "", ""
    if INJECTED_ANNOTATION in annotations:
        volumes = (document.get("spec") or {}).get("volumes") or ()
        if any(volume.get("name") == POOL_VOLUME for volume in volumes):
            return PodState.INJECTED, "", _plain("; ".join(annotations.get(WARNINGS_ANNOTATION, "").splitlines()))
        return PodState.MISSED, "", _COPIED
    if SKIPPED_ANNOTATION in annotations:
        word, _, message = annotations[SKIPPED_ANNOTATION].partition(":")
        if word in _REASONS:
            return PodState.SKIPPED, word, _plain(message.strip())
        return PodState.SKIPPED, SkipReason.ERROR.word, _plain(annotations[SKIPPED_ANNOTATION])
    return PodState.MISSED, "", ""


def _does_not_count(document: Mapping[str, Any]) -> bool:
    metadata = document["metadata"]
    is_over = (document.get("status") or {}).get("phase") in _ENDED or "deletionTimestamp" in metadata
    return is_over or COMPONENT_LABELS.items() <= (metadata.get("labels") or {}).items()


def _plain(text: str) -> str:
    return plain_text(text, TEXT_LENGTH_MAX)


def _seconds(text: str) -> int:
    return int(datetime.fromisoformat(text.replace("Z", "+00:00")).timestamp()) if text else 0


def notice(before: PodFacts | None, after: PodFacts | None, now: datetime) -> Notice | None:
    """Return the Event that a change of a pod is worth: for each pod one, and none for a pod that has the cache."""
    if after is None or after.state is None:
        return None
    if before is None or before.uid != after.uid:
        if now.timestamp() - after.created > EVENT_SECONDS:
            return None
    elif (before.state, before.reason) == (after.state, after.reason):
        return None
    if after.state is PodState.SKIPPED:
        return Notice(Severity.WARNING, "CacheSkipped", f"{after.reason}: {after.text}")
    if after.state is PodState.MISSED:
        return Notice(Severity.WARNING, "CacheNotInjected", after.text or _MISSED)
    return Notice(Severity.WARNING, "CacheWarnings", after.text) if after.text else None


# ---- all pods of a pool ----


@dataclass(slots=True)
class _Tally:
    injected: int = 0
    skipped: dict[tuple[str, str], str] = field(default_factory=dict)
    missed: set[tuple[str, str]] = field(default_factory=set)

    @property
    def is_empty(self) -> bool:
        return not (self.injected or self.skipped or self.missed)


class Roster:
    """How many pods are in which state, by pool. A change costs the same however many pods there are."""

    def __init__(self) -> None:
        self._tallies: dict[str, _Tally] = {}
        self.skipped: Counter[str] = Counter()
        """Pods by reason, over all pools."""

    def change(self, before: PodFacts | None, after: PodFacts | None) -> None:
        """Take it that a pod was as `before` (None: it was not there) and is as `after` (None: it is gone)."""
        if before is not None and before.state is not None:
            self._count(before, -1)
        if after is not None and after.state is not None:
            self._count(after, 1)

    def counts(self, pool: str) -> PodCounts:
        """Return the pods of one pool."""
        tally = self._tallies.get(pool)
        if tally is None:
            return PodCounts()
        skipped = (f"{_name(key)} ({reason})" for key, reason in heapq.nsmallest(NAMES_MAX, tally.skipped.items()))
        return PodCounts(
            injected=tally.injected,
            skipped=len(tally.skipped),
            missed=len(tally.missed),
            skipped_pods=tuple(skipped),
            missed_pods=tuple(map(_name, heapq.nsmallest(NAMES_MAX, tally.missed))),
        )

    def numbers(self) -> Iterator[tuple[str, int, int]]:
        """Yield (pool, pods injected, pods missed) of everything that labels name."""
        for pool, tally in self._tallies.items():
            yield pool, tally.injected, len(tally.missed)

    def missed(self, pool: str) -> int:
        """Return how many pods of a pool went past the webhook."""
        tally = self._tallies.get(pool)
        return len(tally.missed) if tally else 0

    def _count(self, pod: PodFacts, step: int) -> None:
        tally, key = self._tallies.setdefault(pod.pool, _Tally()), (pod.namespace, pod.name)
        if pod.state is PodState.INJECTED:
            tally.injected += step
        elif pod.state is PodState.SKIPPED:
            self.skipped[pod.reason] += step
            if step > 0:
                tally.skipped[key] = pod.reason
            else:
                del tally.skipped[key]
        elif step > 0:
            tally.missed.add(key)
        else:
            tally.missed.remove(key)
        if tally.is_empty:
            del self._tallies[pod.pool]


def _name(key: tuple[str, str]) -> str:
    return plain_text("/".join(key), NAME_LENGTH_MAX)


def finding(pool: str, counts: PodCounts, *, problem: str) -> Finding:
    """Return what a pool's condition InjectionHealthy says; `problem` is why pods cannot be read, "" if they can."""
    kind, total = CONDITION_INJECTION_HEALTHY, counts.injected + counts.skipped + counts.missed
    if problem:
        advice = "Allow the operator to list pods, or start it without --follow-pods"
        return Finding(kind, None, "PodsUnreadable", f"{problem}. {advice}")
    if counts.missed:
        missed = _some(counts.missed_pods, counts.missed)
        advice = (
            f"Look after the webhook ({WEBHOOK_PODS}), then delete them: their replacements get the cache. Their "
            "Events say what else it may be"
        )
        text = f"{counts.missed} of {total} labelled pods went past the webhook and run without the cache: {missed}"
        return Finding(kind, False, "MissedPods", f"{text}. {advice}")
    if counts.skipped:
        skipped = _some(counts.skipped_pods, counts.skipped)
        text = f"the webhook saw all {total} labelled pods and left out {counts.skipped}: {skipped}"
        return Finding(kind, True, "SomeSkipped", f"{text}. Their Events say why, and what to do")
    if counts.injected:
        return Finding(kind, True, "AllInjected", f"all {total} labelled pods have the cache")
    return Finding(kind, True, "NoPods", f"no pod is labelled {POOL_NAME_LABEL}={pool}")


def _some(names: Iterable[str], count: int) -> str:
    shown = list(names)
    rest = count - len(shown)
    return ", ".join(shown) + (f" and {rest} more" if rest > 0 else "")
