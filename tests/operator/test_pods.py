"""What a labelled pod's annotations say, how pods are counted, and what is told about them."""

import json
import tracemalloc
from datetime import datetime, timezone

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pykvcache_contract.api.objects import MESSAGE_LENGTH_MAX
from pykvcache_contract.injection import SkipReason
from pykvcache_contract.names import INJECTED_ANNOTATION, POOL_VOLUME, SKIPPED_ANNOTATION, WARNINGS_ANNOTATION
from pykvcache_operator.pods import (
    EVENT_SECONDS,
    TEXT_LENGTH_MAX,
    PodState,
    Roster,
    finding,
    notice,
    pod_facts,
)
from pykvcache_operator.resources import PodCounts

NOW = datetime(2026, 1, 31, 12, tzinfo=timezone.utc)
INJECTED = {INJECTED_ANNOTATION: "0.2.0"}


def skipped(text):
    return {SKIPPED_ANNOTATION: text}


def state_of(pod):
    facts = pod_facts(pod)
    return facts.state, facts.reason, facts.text


@pytest.fixture
def pod(make_pod):
    return make_pod


# ---- one pod ----


def test_a_pod_with_annotation_and_volume_has_the_cache(pod):
    assert state_of(pod(annotations=INJECTED)) == (PodState.INJECTED, "", "")


def test_warnings_of_an_injected_pod_are_kept_on_one_line(pod):
    annotations = {**INJECTED, WARNINGS_ANNOTATION: "memory is short\nport 9412 is taken"}
    assert state_of(pod(annotations=annotations)) == (PodState.INJECTED, "", "memory is short; port 9412 is taken")


def test_a_copied_annotation_without_the_volume_is_found_out(pod):
    state, _, text = state_of(pod(annotations=INJECTED, volumes=()))
    assert state is PodState.MISSED
    assert "Remove the annotation from the pod's template" in text


@pytest.mark.parametrize("reason", SkipReason)
def test_every_reason_to_skip_is_understood(pod, reason):
    annotations = skipped(f"{reason.word}: do this: and that")
    assert state_of(pod(annotations=annotations)) == (PodState.SKIPPED, reason.word, "do this: and that")


@pytest.mark.parametrize("text", ["", ":", "Nonsense: x", "poolnotfound: x", "PoolNotFound\n: x", "x" * 100_000])
def test_a_reason_that_is_not_ours_is_an_error_of_bounded_length(pod, text):
    state, reason, kept = state_of(pod(annotations=skipped(text)))
    assert (state, reason) == (PodState.SKIPPED, "Error")
    assert len(kept) <= TEXT_LENGTH_MAX


def test_text_that_would_confuse_a_terminal_is_made_plain(pod):
    assert state_of(pod(annotations=skipped("PodSecurity: \x1b[31mred\r\nµ")))[2] == "?[31mred???"


def test_a_pod_without_annotations_was_missed(pod):
    assert state_of(pod(annotations={})) == (PodState.MISSED, "", "")
    assert state_of(pod(annotations=None)) == (PodState.MISSED, "", "")


@pytest.mark.parametrize(
    "ended",
    [{"phase": "Succeeded"}, {"phase": "Failed"}, {"deletionTimestamp": "2026-01-31T12:00:00Z"}],
    ids=lambda ended: next(iter(ended)),
)
def test_a_pod_that_has_ended_or_is_about_to_does_not_count(pod, ended):
    assert pod_facts(pod(**ended)).state is None


def test_pods_of_our_own_measurements_do_not_count(pod):
    ours = {"app.kubernetes.io/name": "py-kvcache", "app.kubernetes.io/component": "calibration"}
    assert pod_facts(pod(labels=ours)).state is None
    assert pod_facts(pod(labels={**ours, "app.kubernetes.io/name": "vllm"})).state is PodState.MISSED


@given(st.dictionaries(st.sampled_from([INJECTED_ANNOTATION, SKIPPED_ANNOTATION, WARNINGS_ANNOTATION]), st.text()))
def test_whatever_the_annotations_say_a_pod_has_a_state_and_words_of_ours(annotations):
    document = {"metadata": {"namespace": "a", "name": "b", "uid": "u", "annotations": annotations}}
    facts = pod_facts(document)
    assert facts.state in PodState
    assert facts.reason in {"", *(reason.word for reason in SkipReason)}
    assert facts.text.isascii()
    assert "\n" not in facts.text


# ---- what is told about one ----


def facts_of(pod, *, age_s=10, **fields):
    created = datetime.fromtimestamp(NOW.timestamp() - age_s, timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
    return pod_facts(pod(created=created, **fields))


def told(before, after):
    found = notice(before, after, NOW)
    return found and (found.reason, found.note)


def test_good_news_needs_no_event(pod):
    assert told(None, facts_of(pod, annotations=INJECTED)) is None


def test_each_kind_of_bad_news_has_its_event(pod):
    assert told(None, facts_of(pod, annotations=skipped("PoolNotFound: no pool x"))) == (
        "CacheSkipped",
        "PoolNotFound: no pool x",
    )
    reason, note = told(None, facts_of(pod))
    assert reason == "CacheNotInjected"
    assert "Delete the pod" in note
    assert "namespace" in note
    assert "defect, which its log shows" in note
    assert len(note.encode()) < 1024
    warned = facts_of(pod, annotations={**INJECTED, WARNINGS_ANNOTATION: "short of memory"})
    assert told(None, warned) == ("CacheWarnings", "short of memory")


def test_news_about_the_same_state_is_no_news(pod):
    before, after = (facts_of(pod, annotations=skipped(f"PodSecurity: {word}")) for word in ("one", "two"))
    assert told(before, after) is None


def test_another_pod_of_the_same_name_is_told_about(pod):
    assert told(facts_of(pod, uid="old"), facts_of(pod, uid="new"))[0] == "CacheNotInjected"


def test_an_old_pod_is_told_about_only_when_it_changes(pod):
    old = facts_of(pod, age_s=EVENT_SECONDS + 1)
    assert told(None, old) is None
    assert told(None, facts_of(pod, age_s=EVENT_SECONDS - 1)) is not None
    assert told(facts_of(pod, age_s=EVENT_SECONDS + 1, annotations=INJECTED), old)[0] == "CacheNotInjected"


def test_a_pod_that_is_gone_or_has_ended_is_not_told_about(pod):
    assert told(facts_of(pod, annotations=INJECTED), None) is None
    assert told(None, facts_of(pod, phase="Failed")) is None


# ---- all pods of a pool ----


@pytest.fixture
def roster():
    return Roster()


def test_pods_are_counted_by_pool_as_they_come_change_and_go(pod, roster):
    missed = pod_facts(pod(name="m"))
    left_out = pod_facts(pod(name="s", annotations=skipped("PodSecurity: x")))
    injected = [pod_facts(pod(name=f"i{number}", annotations=INJECTED)) for number in range(3)]
    for facts in (missed, left_out, *injected):
        roster.change(None, facts)
    roster.change(None, pod_facts(pod(name="q", pool="other")))
    assert roster.counts("p") == PodCounts(
        injected=3, skipped=1, missed=1, skipped_pods=("team/s (PodSecurity)",), missed_pods=("team/m",)
    )
    assert roster.skipped == {"PodSecurity": 1}
    assert sorted(roster.numbers()) == [("other", 0, 1), ("p", 3, 1)]
    roster.change(injected[0], pod_facts(pod(name="i0", annotations=INJECTED, phase="Succeeded")))
    roster.change(missed, pod_facts(pod(name="m", pool="other")))  # its label was changed
    roster.change(left_out, None)
    assert roster.counts("p") == PodCounts(injected=2)
    assert (roster.missed("p"), roster.missed("other")) == (0, 2)


def test_labels_of_which_no_pod_is_left_leave_nothing_behind(pod, roster):
    for number in range(100):
        facts = pod_facts(pod(pool=f"nonsense-{number}"))
        roster.change(None, facts)
        roster.change(facts, None)
    assert list(roster.numbers()) == []


@given(st.lists(st.tuples(st.integers(0, 4), st.sampled_from(["injected", "skipped", "missed", "ended", "gone"]))))
def test_counts_are_those_of_the_pods_there_are(changes):
    roster, now = Roster(), {}
    annotations = {"injected": INJECTED, "skipped": skipped("PodSecurity: x")}
    for number, word in changes:
        metadata = {"namespace": "team", "name": str(number), "uid": "u", "labels": {"pykvcache.io/pool": "p"}}
        metadata["annotations"] = annotations.get(word, {})
        phase = "Failed" if word == "ended" else "Running"
        document = {"metadata": metadata, "spec": {"volumes": [{"name": POOL_VOLUME}]}, "status": {"phase": phase}}
        after = None if word == "gone" else pod_facts(document)
        roster.change(now.get(number), after)
        now[number] = after
    states = [facts.state for facts in now.values() if facts]
    counts = roster.counts("p")
    assert (counts.injected, counts.skipped, counts.missed) == tuple(map(states.count, PodState))
    assert sum(roster.skipped.values()) == counts.skipped


def test_a_labelled_pod_takes_little_memory(pod):
    text = json.dumps(pod(annotations=INJECTED))
    tracemalloc.start()
    kept = [pod_facts(json.loads(text)) for _ in range(1000)]
    size_bytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert size_bytes / len(kept) < 1024


# ---- the condition ----


def said(**counts):
    found = finding("p", PodCounts(**counts), problem="")
    return found.holds, found.reason, found.message


def test_the_condition_says_what_became_of_the_pods():
    assert said() == (True, "NoPods", "no pod is labelled pykvcache.io/pool=p")
    assert said(injected=2) == (True, "AllInjected", "all 2 labelled pods have the cache")
    holds, reason, message = said(injected=1, skipped=1, skipped_pods=("team/x (PodSecurity)",))
    assert (holds, reason) == (True, "SomeSkipped")
    assert "saw all 2 labelled pods and left out 1: team/x (PodSecurity)." in message
    holds, reason, message = said(injected=1, missed=7, missed_pods=("team/a", "team/b"))
    assert (holds, reason) == (False, "MissedPods")
    assert message.startswith("7 of 8 labelled pods went past the webhook")
    assert "team/a, team/b and 5 more." in message
    assert "then delete them" in message


def test_pods_that_cannot_be_read_make_the_condition_unknown():
    found = finding("p", PodCounts(injected=3), problem="list pods: 403")
    assert (found.holds, found.reason) == (None, "PodsUnreadable")
    assert found.message.startswith("list pods: 403.")


def test_the_advice_stays_in_the_message_however_long_names_are(pod, roster):
    for number in range(9):
        roster.change(None, pod_facts(pod(namespace="n" * 63, name=f"{number}" + "x" * 252)))
    message = finding("p", roster.counts("p"), problem="").message
    assert "then delete them" in message[:MESSAGE_LENGTH_MAX]
    assert "and 4 more" in message
