"""What HTTP answers, from a book alone: no disk, no loop."""

import json
import socket
import urllib.error
import urllib.request

import pytest
from prometheus_client.parser import text_string_to_metric_families

from pykvcache_contract.errors import ConfigurationError
from pykvcache_contract.metrics import FINGERPRINTS_MAX, SIDECAR_METRICS, Kind
from pykvcache_sidecar.book import SCAN, Book, FingerprintRow, Levels, ScanRow
from pykvcache_sidecar.server import TICK_SECONDS_MAX, PoolAnswers, serve


@pytest.fixture
def now():
    return [0.0]


@pytest.fixture
def book(make_settings, now):
    return Book(make_settings(), monotonic=lambda: now[0])


@pytest.fixture
def get(book):
    """Return a function from a path to status code, content type and body."""
    server = serve(PoolAnswers(book).paths, host="127.0.0.1", port=0)

    def ask(path):
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{server.server_address[1]}{path}", timeout=60) as answer:
                return answer.status, answer.headers["Content-Type"], answer.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.headers["Content-Type"], error.read().decode()

    yield ask
    server.shutdown()
    server.server_close()


def rows(count):
    return [FingerprintRow(f"{number:012x}", f"model-{number}", 2, 100 + number, 5.0, 1.0) for number in range(count)]


def families(get):
    return {family.name: family for family in text_string_to_metric_families(get("/metrics")[2])}


def test_served_metrics_are_those_of_the_table(book, get):
    book.set_scan(ScanRow(), rows(1))
    book.set_levels(Levels(1, 2, 3, 4, 5))
    served = families(get)
    assert set(served) == {metric.name.removesuffix("_total") for metric in SIDECAR_METRICS}
    for metric in SIDECAR_METRICS:
        family = served[metric.name.removesuffix("_total")]
        assert (family.type, family.documentation) == (metric.kind.value, metric.help)
        assert family.samples, f"{metric.name} has no series"
        assert {frozenset(sample.labels) for sample in family.samples} == {frozenset(metric.labels)}
        if metric.kind is Kind.COUNTER:
            assert [tuple(sample.labels.values()) for sample in family.samples] == list(metric.initial_labels)


def test_what_is_unknown_is_absent_and_not_zero(get):
    served = families(get)
    for name in ("used_bytes", "allowed_bytes", "free_bytes", "write_budget_bytes", "written_bytes_today"):
        assert served[f"pykvcache_pool_{name}"].samples == []
    document = json.loads(get("/status")[2])
    assert [document[name] for name in ("used_bytes", "allowed_bytes", "free_bytes")] == [None] * 3
    assert document["write_budget"] == {"bytes_per_day": None, "written_bytes": None}


def test_a_known_level_of_zero_is_shown(book, get):
    book.set_levels(Levels(used_bytes=0, write_budget_bytes=0))
    served = families(get)
    assert [0.0] == [sample.value for sample in served["pykvcache_pool_used_bytes"].samples]
    assert [0.0] == [sample.value for sample in served["pykvcache_pool_write_budget_bytes"].samples]


def test_problems_that_last_are_shown_beside_the_remark_and_outlast_a_round(book, get):
    book.set_state("working", "no flock", uid="u")
    assert book.note_problem(SCAN, "a folder cannot be read")
    assert not book.note_problem(SCAN, "two folders cannot be read")
    book.note_error("no ledger")
    book.tick()
    assert json.loads(get("/status")[2])["reason"] == "no flock; two folders cannot be read"
    book.note_problem(SCAN, "")
    assert json.loads(get("/status")[2])["reason"] == "no flock"


def test_fingerprints_beyond_the_bound_are_added_up(book, get):
    book.set_scan(ScanRow(), rows(FINGERPRINTS_MAX + 3))
    samples = families(get)["pykvcache_pool_size_bytes"].samples
    assert len(samples) == FINGERPRINTS_MAX + 1
    values = {sample.labels["fingerprint"]: sample.value for sample in samples}
    assert values["other"] == 100 + 101 + 102
    assert sum(values.values()) == json.loads(get("/status")[2])["size_bytes"]


def test_names_that_are_odd_are_escaped(book, get):
    book.set_scan(ScanRow(), [FingerprintRow("a" * 12, 'a "quoted"\nname\\', 1, 1, None, None)])
    (sample,) = families(get)["pykvcache_pool_blocks"].samples
    assert sample.labels["model"] == 'a "quoted"\nname\\'


def test_it_is_healthy_while_rounds_come_and_says_what_is_wrong_otherwise(book, get, now):
    assert get("/healthz")[0] == 200
    book.note_error("input/output error")
    now[0] = TICK_SECONDS_MAX
    assert get("/healthz")[0] == 200
    now[0] += 1
    code, _, text = get("/healthz")
    assert code == 503
    assert "input/output error" in text
    book.tick()
    assert get("/healthz")[0] == 200


@pytest.mark.parametrize(
    ("state", "ready", "active"),
    [("starting", 503, 0), ("working", 200, 1), ("standby", 200, 0), ("unmounted", 503, 0), ("read_only", 503, 0)],
)
def test_it_is_ready_while_the_pool_is_cared_for(book, get, state, ready, active):
    book.set_state(state, "because", uid="u")
    code, _, text = get("/readyz")
    assert code == ready
    assert text.startswith(state)
    served = families(get)
    assert served["pykvcache_pool_active"].samples[0].value == active
    assert [s.labels["state"] for s in served["pykvcache_pool_state"].samples if s.value] == [state]


def test_the_status_has_the_agreed_fields(book, get):
    book.set_scan(ScanRow(1.0, 2.0, 3), rows(2))
    code, kind, text = get("/status?pretty")
    assert (code, kind) == (200, "application/json")
    document = json.loads(text)
    assert set(document) == {
        *("pool", "uid", "state", "reason", "active", "capacity_bytes", "allowed_bytes", "used_bytes", "free_bytes"),
        *("min_free_bytes", "blocks", "size_bytes", "fingerprints", "scan", "evicted", "scrub", "write_budget"),
    }
    assert document["scan"] == {"ended_seconds": 1.0, "duration_seconds": 2.0, "files": 3}
    assert (document["blocks"], document["size_bytes"]) == (4, 201)
    assert set(document["fingerprints"][0]) == {
        *("directory", "model", "blocks", "size_bytes", "newest_seconds", "oldest_seconds")
    }


def test_another_path_is_not_found_and_says_what_there_is(get):
    code, _, text = get("/nothing")
    assert code == 404
    assert "/metrics" in text


def test_a_port_in_use_is_a_clear_error(book):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigurationError, match=rf"--listen 127.0.0.1:{port}: .*in use.*another port"):
            serve(PoolAnswers(book).paths, host="127.0.0.1", port=port)


def test_an_address_that_is_not_ours_is_a_clear_error(book):
    with pytest.raises(ConfigurationError, match="--listen"):
        serve(PoolAnswers(book).paths, host="192.0.2.1", port=0)


def test_ipv6_is_served(book):
    try:
        server = serve(PoolAnswers(book).paths, host="::1", port=0)
    except ConfigurationError as error:
        pytest.skip(f"no IPv6 here: {error}")
    with urllib.request.urlopen(f"http://[::1]:{server.server_address[1]}/healthz", timeout=60) as answer:
        assert answer.status == 200
    server.shutdown()
    server.server_close()
