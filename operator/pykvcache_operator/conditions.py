"""Conditions of a pool: findings become conditions, and changes become Events.

Pure. A condition's time changes only with its status; its generation always says which spec it is about. An Event is
posted for a transition only, so a state that lasts costs nothing.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime

from pykvcache_contract.api.objects import Condition, ConditionStatus
from pykvcache_contract.names import (
    CONDITION_CAPACITY_OK,
    CONDITION_DEGRADED,
    CONDITION_DELETING,
    CONDITION_INJECTION_HEALTHY,
    CONDITION_READY,
    REASON_ERROR,
)
from pykvcache_operator.resources import Notice, Severity

_WORD = re.compile("[A-Za-z]{1,64}")
REASON_PREPARING = "Preparing"
"""Nothing is wrong, it only takes a moment."""
_BAD = {
    CONDITION_READY: ConditionStatus.FALSE,
    CONDITION_DEGRADED: ConditionStatus.TRUE,
    CONDITION_CAPACITY_OK: ConditionStatus.FALSE,
    CONDITION_DELETING: ConditionStatus.TRUE,
    CONDITION_INJECTION_HEALTHY: ConditionStatus.FALSE,
}
"""Conditions whose changes are Events, and the status that is bad news; the other conditions explain these."""
_GOOD_NEWS = {
    CONDITION_READY: "Ready",
    CONDITION_DEGRADED: "Recovered",
    CONDITION_CAPACITY_OK: "CapacityOK",
    CONDITION_INJECTION_HEALTHY: "InjectionHealthy",
}
"""Reasons of the Events for the better."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One aspect of a pool as found now; `holds` None: not known yet."""

    type: str
    holds: bool | None
    reason: str
    message: str


def merged(
    known: Sequence[Condition], findings: Iterable[Finding], *, generation: int, now: datetime
) -> tuple[Condition, ...]:
    """Return the conditions that the findings make of those known; one without a finding goes."""
    before = {condition.type: condition for condition in known}
    return tuple(_condition(finding, before.get(finding.type), generation, now) for finding in findings)


def kept(known: Sequence[Condition], kind: str) -> tuple[Finding, ...]:
    """Return the finding that leaves a known condition as it is; none if it is not known."""
    holds = {ConditionStatus.TRUE: True, ConditionStatus.FALSE: False, ConditionStatus.UNKNOWN: None}
    return tuple(Finding(c.type, holds[c.status], c.reason, c.message) for c in known if c.type == kind)


def word(reason: str) -> str:
    """Return a reason that others wrote, if a condition may carry it."""
    return reason if _WORD.fullmatch(reason) else REASON_ERROR


def notices(known: Sequence[Condition], current: Sequence[Condition]) -> tuple[Notice, ...]:
    """Return the Events that tell what changed."""
    before = {condition.type: condition for condition in known}
    return tuple(_notice(condition) for condition in current if _is_news(before.get(condition.type), condition))


def _notice(condition: Condition) -> Notice:
    if condition.status is not _BAD[condition.type]:
        return Notice(Severity.NORMAL, _GOOD_NEWS.get(condition.type, condition.reason), condition.message)
    is_harmless = condition.type == CONDITION_DELETING or condition.reason == REASON_PREPARING
    return Notice(Severity.NORMAL if is_harmless else Severity.WARNING, condition.reason, condition.message)


def _is_news(before: Condition | None, condition: Condition) -> bool:
    if condition.type not in _BAD or condition.status is ConditionStatus.UNKNOWN:
        return False
    is_bad = condition.status is _BAD[condition.type]
    if before is None:
        return condition.reason != REASON_PREPARING if is_bad else condition.type == CONDITION_READY
    return before.status is not condition.status or (is_bad and before.reason != condition.reason)


def _condition(finding: Finding, before: Condition | None, generation: int, now: datetime) -> Condition:
    status = {True: ConditionStatus.TRUE, False: ConditionStatus.FALSE, None: ConditionStatus.UNKNOWN}[finding.holds]
    is_same = before is not None and before.status is status
    return Condition(
        type=finding.type,
        status=status,
        reason=word(finding.reason),
        message=finding.message,
        last_transition_time=before.last_transition_time if before is not None and is_same else now,
        observed_generation=generation,
    )
