"""Options are checked once, and every error says what to change."""

import pytest

from pykvcache_contract.errors import ConfigurationError
from pykvcache_sidecar.settings import parse_listen, parse_size_option


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"capacity_bytes": 0}, ["--capacity", "64GiB"]),
        ({"high": 0.8, "low": 0.8}, ["--low 0.8 --high 0.8", "low < high"]),
        ({"high": 0.7, "low": 0.8}, ["--low", "--high"]),
        ({"high": 1.5}, ["--high 1.5", "high < 1"]),
        ({"high": 1.0}, ["--high 1:", "high < 1", "--high 0.9"]),
        ({"low": 0.0}, ["--low 0", "0 < low"]),
        ({"high": float("nan")}, ["--high nan"]),
        ({"policy": "fifo"}, ["--policy fifo", "lru", "cost"]),
        ({"interval_seconds": 0.0}, ["--interval"]),
        ({"interval_seconds": float("nan")}, ["--interval"]),
        ({"interval_seconds": 10.1}, ["--interval", "10.1", "to 10 seconds"]),
        ({"interval_seconds": 1e12}, ["--interval", "to 10 seconds"]),
        ({"unused_seconds": 1e300}, ["--unused-days"]),
        ({"unused_seconds": -1.0}, ["--unused-days"]),
        ({"quarantine_seconds": float("inf")}, ["--quarantine-hours"]),
    ],
)
def test_a_wrong_option_is_named_with_a_remedy(make_settings, given, words):
    with pytest.raises(ConfigurationError) as caught:
        make_settings(**given)
    assert [word for word in words if word not in str(caught.value)] == []


def test_the_edges_are_allowed(make_settings):
    settings = make_settings(high=0.999, low=0.99, capacity_bytes=1, unused_seconds=0.0, quarantine_seconds=0.0)
    assert settings.high == 0.999
    assert make_settings(interval_seconds=10.0).interval_seconds == 10.0


def test_a_directory_that_is_no_mount_point_is_refused_only_if_one_is_required(make_settings, tmp_path):
    make_settings(pool_directory=str(tmp_path)).check_mount()
    make_settings(pool_directory="/proc", require_mount=True).check_mount()
    for directory in (tmp_path, tmp_path / "missing"):
        with pytest.raises(ConfigurationError, match="no mount point"):
            make_settings(pool_directory=str(directory), require_mount=True).check_mount()


@pytest.mark.parametrize("text", ["9478", "localhost", "localhost:", ":x", "host:70000", "host:-1", "host:²"])
def test_an_address_without_a_port_is_refused(text):
    with pytest.raises(ConfigurationError, match="--listen"):
        parse_listen(text)


def test_sizes_are_those_of_kubernetes_and_of_people():
    assert parse_size_option("--capacity", "64Gi") == parse_size_option("--capacity", "64GiB") == 64 << 30
    with pytest.raises(ConfigurationError, match=r"--capacity.*64GB5"):
        parse_size_option("--capacity", "64GB5")
