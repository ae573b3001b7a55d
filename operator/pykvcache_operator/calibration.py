"""Which disks are measured next, and what is known of them afterwards: the policy of storage calibration. Pure.

Facts: measuring takes seconds of a disk's whole bandwidth; nodes of one kind have disks of one kind; a Job may crash,
hang, be evicted or answer nonsense; the operator may stop at any moment. What they mean: few nodes at a time; when two
of a class are measured, the others only compare themselves in a short run; whatever a Job did is turned into a profile
before the Job is deleted, and both are repeated without harm. Nothing is remembered but profiles and Jobs: the same
ones give the same actions. Calibration never makes a pool unready.

The life of a profile: none → Running → Measured, or Failed until the next attempt. A Failed one keeps the figures of
an earlier measurement of the same thing; when another thing would be measured (`profile_key`), all is forgotten.
"""

import contextlib
import hashlib
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta, timezone
from enum import IntEnum

from pykvcache_contract.api.node import KVCacheNode, NodePool, NodePoolState, Profile, ProfileState
from pykvcache_contract.api.pool import KVCachePool
from pykvcache_contract.calibration import StorageCalibration
from pykvcache_contract.names import RECALIBRATE_ANNOTATION
from pykvcache_operator.calibration_job import (
    ATTEMPT_MAX,
    DEADLINE_SECONDS,
    CalibrationFailure,
    CalibrationJob,
    StartJob,
    is_overdue,
    parse_result,
)

JOBS_MAX = 5
"""In the whole cluster: they share the registry that serves their image."""
CLASS_NODES = 2
"""How many nodes of a class are measured in full before others may inherit."""
CLASS_TOLERANCE = 0.2
CONTENDED_ATTEMPTS = 3
"""The last one counts even if others used the disk again: they always do, then."""
BACKOFF_SECONDS_MIN = 60
BACKOFF_SECONDS_MAX = 6 * 3600
AGE_JITTER = 0.1
"""Nodes that were measured one after the other do not become due one after the other for ever."""
HUNG = timedelta(seconds=2 * DEADLINE_SECONDS)
"""The deadline ends a Job in half of it, unless Kubernetes's own controller stands still."""
RESULT_WAIT = timedelta(seconds=60)
"""A Job may be seen to end before its pod is."""

REASON_CONTENDED = "Contended"
REASON_INHERITED = "Inherited"
REASON_SHORT_RUN = "ShortRun"


@dataclass(frozen=True, slots=True)
class DeleteJob:
    """A Job to delete, with its pods."""

    name: str


@dataclass(frozen=True, slots=True)
class RecordProfile:
    """A profile to write to a node's status, in place of the one of its pool."""

    node: str
    profile: Profile


@dataclass(frozen=True, slots=True)
class ForgetProfile:
    """A pool's profile to remove from a node's status: it is about something else than what is there now."""

    node: str


Action = RecordProfile | ForgetProfile | DeleteJob | StartJob


@dataclass(frozen=True, slots=True)
class CalibrationPlan:
    """What to do, in this order, and when to look again without news; None: only with news."""

    actions: tuple[Action, ...]
    look_again: datetime | None


def plan(
    pool: KVCachePool,
    *,
    nodes: Iterable[KVCacheNode],
    reachable: Collection[str],
    jobs: Iterable[CalibrationJob],
    now: datetime,
    jobs_max: int = JOBS_MAX,
) -> CalibrationPlan:
    """Return what to do about the calibration of a NodeLocal pool.

    Args:
        nodes: every KVCacheNode; those without the pool are left out.
        reachable: names of nodes that can run a Job now.
        jobs: the calibration Jobs of all pools, with those that were created and are not seen yet.
        now: in UTC.
        jobs_max: most Jobs at a time in the cluster.
    """
    jobs = sorted(jobs, key=lambda job: job.name)
    own = [job for job in jobs if job.pool_uid == pool.metadata.uid]
    wanted = pool.spec.calibration.enabled and pool.metadata.deletion_timestamp is None
    places = {node.name: place for node in nodes if wanted and (place := _place(node, pool)) is not None}
    draft = _Draft(pool, now, [places[name] for name in sorted(places)])
    draft.forget_others()
    for job in own:
        draft.settle(job, places.get(job.node))
    active = [job for job in jobs if job.finished is None]
    busy = {job.node for job in active} | {job.node for job in own}
    ours = sum(job.pool_uid == pool.metadata.uid for job in active)
    free = min(pool.spec.calibration.max_concurrent_nodes - ours, jobs_max - len(active))
    draft.start([name for name in reachable if name not in busy], count=max(0, free))
    later = [time for time in draft.times if time > now]
    return CalibrationPlan(tuple(draft.actions), min(later, default=None))


def profile_key(node: KVCacheNode, entry: NodePool) -> str:
    """Return the hash of everything that a measurement of a pool on a node is about."""
    about = (entry.disk_model, entry.filesystem, entry.engine, entry.direct_io, node.agent.kernel, entry.generation)
    return hashlib.sha256("\n".join((entry.uid, *map(str, about))).encode()).hexdigest()[:16]


def backoff(failures: int) -> timedelta:
    """Return how long to wait after so many failures in a row.

    >>> [int(backoff(failures).total_seconds()) for failures in (1, 2, 3, 9, 10, 1000)]
    [60, 120, 240, 15360, 21600, 21600]
    """
    doublings = min(max(failures, 1) - 1, 20)
    return timedelta(seconds=min(BACKOFF_SECONDS_MAX, BACKOFF_SECONDS_MIN << doublings))


@dataclass(slots=True)
class _Place:
    """The pool on one node.

    Args:
        key: what would be measured now; "" while the pool is not ready there.
        kind: the node's class; None if the disk does not say what it is.
        profile: as known, and as changed by the plan so far.
    """

    node: KVCacheNode
    entry: NodePool
    key: str
    kind: tuple[object, ...] | None
    profile: Profile | None

    @property
    def name(self) -> str:
        return self.node.name


def _place(node: KVCacheNode, pool: KVCachePool) -> _Place | None:
    entry = node.pool(pool.name)
    if entry is None or entry.uid != pool.metadata.uid:
        return None
    key = profile_key(node, entry) if entry.state is NodePoolState.READY else ""
    return _Place(node, entry, key, _kind(node, entry), node.profile(pool.name))


def _kind(node: KVCacheNode, entry: NodePool) -> tuple[object, ...] | None:
    """Return what nodes have in common whose disks should be equally fast."""
    if not entry.disk_model:
        return None
    below = [disk for disk in node.agent.disks if f"{entry.path}/".startswith(f"{disk.mount_path.rstrip('/')}/")]
    disk = max(below, key=lambda disk: len(disk.mount_path), default=None)
    return entry.disk_model, entry.filesystem, entry.engine, entry.direct_io, disk.size_bytes if disk else 0


@dataclass(slots=True)
class _Draft:
    """A plan in the making.

    Args:
        places: by name of their nodes.
        times: when something will be due.
    """

    pool: KVCachePool
    now: datetime
    places: list[_Place]
    actions: list[Action] = field(default_factory=list)
    times: list[datetime] = field(default_factory=list)

    def forget_others(self) -> None:
        """Forget profiles that are about another disk, or another pool of the same name."""
        for place in self.places:
            profile = place.profile
            if profile is not None and place.key and (profile.pool_uid, profile.key) != (place.entry.uid, place.key):
                self.actions.append(ForgetProfile(place.name))
                place.profile = None

    def settle(self, job: CalibrationJob, place: _Place | None) -> None:
        """Turn a Job that has ended into a profile, and delete it and any other that is not wanted."""
        if job.is_deleting or (place is not None and not place.key):
            return
        if place is None or job.key != place.key:
            self.actions.append(DeleteJob(job.name))
        elif job.finished is None:
            self._watch(job, place)
        elif job.message is None and not is_overdue(job) and self.now < job.finished + RESULT_WAIT:
            self.times.append(job.finished + RESULT_WAIT)
        else:
            # A Job that was deleted already may still be seen, long after it was recorded.
            if all(job.finished >= time for time in _tried(place.profile)):
                self._record(place, _after(job, job.finished, parse_result(job), place, self._peers(place)))
            self.actions.append(DeleteJob(job.name))

    def _watch(self, job: CalibrationJob, place: _Place) -> None:
        end = job.created + HUNG
        if self.now >= end:
            hung = CalibrationFailure("Hung", f"it still ran after {HUNG.total_seconds():.0f} s; is the node alive?")
            self._record(place, _after(job, end, hung, place, []))
            self.actions.append(DeleteJob(job.name))
            return
        self.times.append(end)
        if place.profile is None:
            self._record(place, _new_profile(place, ProfileState.RUNNING))

    def _record(self, place: _Place, profile: Profile) -> None:
        if profile != place.profile:
            self.actions.append(RecordProfile(place.name, profile))
            place.profile = profile

    def _peers(self, place: _Place) -> list[Profile]:
        """Return what was measured in full, and undisturbed, on other nodes of a node's class."""
        if place.kind is None:
            return []
        others = (other for other in self.places if other is not place and other.kind == place.kind)
        return [other.profile for other in others if other.profile is not None and _is_full(other.profile)]

    def start(self, names: Collection[str], *, count: int) -> None:
        """Start the most urgent Jobs on some nodes."""
        ranked = [(rank, place) for place in self.places if (rank := self._rank(place)) is not None]
        waiting = [(rank, place.name, place) for rank, place in ranked if place.name in names]
        for rank, _, place in sorted(waiting, key=lambda entry: entry[:2])[:count]:
            profile = place.profile
            asked = rank is _Rank.ASKED_FOR or (profile is not None and profile.reason == REASON_SHORT_RUN)
            self.actions.append(
                StartJob(
                    node=place.name,
                    key=place.key,
                    attempt=min(profile.failures + 1, ATTEMPT_MAX) if profile else 1,
                    short=not asked and len(self._peers(place)) >= CLASS_NODES,
                )
            )

    def _rank(self, place: _Place) -> "_Rank | None":
        """Return why a node is to be measured now, None if it is not; note when it will be."""
        profile = place.profile
        if not place.key:
            return None
        if profile is None or profile.state is ProfileState.RUNNING:
            return _Rank.NEVER_MEASURED
        if self._is_asked_for(place, profile):
            return _Rank.ASKED_FOR
        if profile.next_attempt is not None:
            return self._from(profile.next_attempt, _Rank.AGAIN)
        if profile.measured_at is None:
            return _Rank.NEVER_MEASURED
        age_max = round(self.pool.spec.calibration.max_age_seconds * (1 + AGE_JITTER * _jitter(place)))
        if (self.now - profile.measured_at).total_seconds() >= age_max:
            return _Rank.EXPIRED
        with contextlib.suppress(OverflowError):  # a maxAge of centuries
            self.times.append(profile.measured_at + timedelta(seconds=age_max))
        return None

    def _is_asked_for(self, place: _Place, profile: Profile) -> bool:
        for annotations in (self.pool.metadata.annotations, place.node.metadata.annotations):
            asked = _asked_time(annotations.get(RECALIBRATE_ANNOTATION, ""))
            if asked is not None and all(time < asked for time in _tried(profile)):
                if self._from(asked, _Rank.ASKED_FOR):
                    return True
        return False

    def _from(self, time: datetime, rank: "_Rank") -> "_Rank | None":
        if self.now >= time:
            return rank
        self.times.append(time)
        return None


class _Rank(IntEnum):
    """Why a node is measured, most urgent first."""

    NEVER_MEASURED = 1
    AGAIN = 2
    ASKED_FOR = 3
    EXPIRED = 4


def _tried(profile: Profile | None) -> list[datetime]:
    """Return when a pool was measured last, and when it was tried last if that went wrong."""
    times = [profile.measured_at] if profile and profile.measured_at else []
    if profile is not None and profile.next_attempt is not None and profile.failures:
        with contextlib.suppress(OverflowError):  # a node may say anything, and only harm itself
            times.append(profile.next_attempt - backoff(profile.failures))
    return times


def _asked_time(text: str) -> datetime | None:
    """Return the time that an annotation asks for; None for nonsense, which asks for nothing."""
    try:
        time = datetime.fromisoformat(text.strip().replace("Z", "+00:00"))
        return (time if time.tzinfo else time.replace(tzinfo=timezone.utc)).astimezone(timezone.utc)
    except (ValueError, OverflowError):
        return None


def _jitter(place: _Place) -> float:
    """Return a number from -1 to 1 that is always the same for a node and a pool."""
    digest = hashlib.sha256(f"{place.entry.uid}/{place.name}".encode()).digest()
    return int.from_bytes(digest[:4], "big") / (2**31 - 0.5) - 1


# ---- from an answer to a profile ----


def _after(
    job: CalibrationJob,
    ended: datetime,
    answer: StorageCalibration | CalibrationFailure,
    place: _Place,
    peers: Sequence[Profile],
) -> Profile:
    """Return what is known after a Job; the same again when it has been recorded already."""
    if isinstance(answer, CalibrationFailure):
        return replace(
            place.profile or _new_profile(place, ProfileState.FAILED),
            state=ProfileState.FAILED,
            failures=job.attempt,
            next_attempt=ended + backoff(job.attempt),
            reason=answer.reason,
            message=answer.message,
        )
    measured = replace(
        _new_profile(place, ProfileState.MEASURED),
        measured_at=ended,
        read_bytes_per_second=answer.read_bytes_per_second,
        write_bytes_per_second=answer.write_bytes_per_second,
        contended=bool(answer.contended),
        engine=answer.engine,
        points=answer.points,
    )
    if job.short and (like := _reference(peers)) is not None and _is_close(measured, like):
        return _inherited(measured, like, len(peers))
    if measured.contended:
        return _disturbed(measured, job, ended, place.profile)
    if job.short:
        message = "a short run differs from other nodes with this disk, or they are gone; a full one follows"
        return replace(measured, reason=REASON_SHORT_RUN, message=message, next_attempt=ended)
    return measured


def _new_profile(place: _Place, state: ProfileState) -> Profile:
    return Profile(pool=place.entry.name, pool_uid=place.entry.uid, state=state, key=place.key)


def _is_full(profile: Profile) -> bool:
    return profile.state is ProfileState.MEASURED and not profile.reason and not profile.contended


def _reference(peers: Sequence[Profile]) -> Profile | None:
    """Return the one in the middle by speed."""
    ordered = sorted(peers, key=lambda profile: profile.read_bytes_per_second)
    return ordered[(len(ordered) - 1) // 2] if len(ordered) >= CLASS_NODES else None


def _is_close(measured: Profile, like: Profile) -> bool:
    difference = abs(measured.read_bytes_per_second - like.read_bytes_per_second)
    return measured.engine == like.engine and difference <= like.read_bytes_per_second * CLASS_TOLERANCE


def _inherited(measured: Profile, like: Profile, count: int) -> Profile:
    return replace(
        measured,
        contended=False,
        read_bytes_per_second=like.read_bytes_per_second,
        write_bytes_per_second=like.write_bytes_per_second,
        points=like.points,
        reason=REASON_INHERITED,
        message=f"a short run agrees within {CLASS_TOLERANCE:.0%} with {count} measured nodes that have this disk",
    )


def _disturbed(measured: Profile, job: CalibrationJob, ended: datetime, former: Profile | None) -> Profile:
    """Return a measurement that others disturbed: the best of all attempts, to be repeated unless it is the last."""
    is_of_series = former is not None and (former.reason == REASON_CONTENDED or former.measured_at == ended)
    if former is not None and is_of_series and former.read_bytes_per_second > measured.read_bytes_per_second:
        figures = {"read_bytes_per_second", "write_bytes_per_second", "points"}
        measured = replace(measured, **{name: getattr(former, name) for name in figures})
    if job.attempt >= CONTENDED_ATTEMPTS:
        return measured
    return replace(
        measured,
        failures=job.attempt,
        next_attempt=ended + backoff(job.attempt),
        reason=REASON_CONTENDED,
        message="others moved more than a fifth as many bytes on the disk meanwhile; it is repeated",
    )
