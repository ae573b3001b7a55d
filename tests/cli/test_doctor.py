"""`pykvcache doctor`: what it finds here for real, and every problem it must name."""

import json
import os
import resource
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from pykvcache_cli import checks
from pykvcache_cli.checks import Level
from pykvcache_storage.probe import ProbeResult, PublishMethod
from pykvcache_storage.usage import UsageLedger

GOOD = ProbeResult("uring", "io_uring works", True, "O_DIRECT works", False, PublishMethod.LINK, "links", "ext4", 512)
BAD = ProbeResult("threads", "forbidden", False, "refused", False, PublishMethod.RENAME, "no links", "fuse", 1)


def findings(run: Callable, *arguments: object) -> dict[str, dict[str, str]]:
    document = json.loads(run("doctor", *arguments, "--json").stdout)
    return {finding["subject"]: finding for finding in document["findings"]}


def test_every_subject_is_reported_for_a_pool(run: Callable, pool: Path) -> None:
    found = findings(run, pool)
    assert list(found) == [
        "kernel",
        "vLLM",
        "liburing",
        "PYTHONHASHSEED",
        "RLIMIT_MEMLOCK",
        "huge pages",
        "pool",
        "engine",
        "direct I/O",
        "publish",
        "filesystem",
        "free space",
        "pool usage",
    ]
    assert all(finding["remedy"] for finding in found.values() if finding["level"] != "ok")
    assert found["engine"]["value"] in ("io_uring", "threads")


def test_a_usable_pool_exits_0_and_is_left_as_it_was(run: Callable, pool: Path) -> None:
    before = sorted(os.listdir(pool))
    result = run("doctor", pool)
    assert result.exit_code == 0
    assert "The cache can be used." in result.output
    assert sorted(os.listdir(pool)) == before


def test_without_a_pool_the_machine_alone_is_checked(run: Callable) -> None:
    found = findings(run)
    assert found["pool"]["value"] == "not given"
    assert "engine" in found
    assert "direct I/O" not in found


def test_an_empty_directory_may_become_a_pool_and_stays_empty(run: Callable, tmp_path: Path) -> None:
    found = findings(run, tmp_path)
    assert found["pool"]["level"] == "ok"
    assert "makes it a pool" in found["pool"]["reason"]
    assert os.listdir(tmp_path) == []


def test_a_missing_directory_prevents_use_and_exits_1(run: Callable, tmp_path: Path) -> None:
    result = run("doctor", tmp_path / "gone")
    assert result.exit_code == 1
    assert "mkdir -p" in result.output
    assert "cannot be used" in result.output


def test_a_foreign_directory_prevents_use(run: Callable, tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").touch()
    assert findings(run, tmp_path)["pool"]["level"] == "error"


def test_a_read_only_pool_is_a_warning_because_loads_work(run: Callable, pool: Path, tmp_path: Path) -> None:
    view = tmp_path / "view"
    view.mkdir()
    if subprocess.run(["mount", "--bind", pool, view], capture_output=True, check=False).returncode:
        pytest.skip("bind mounts are not allowed here")
    try:
        subprocess.run(["mount", "-o", "remount,bind,ro", view], check=True)
        result = run("doctor", view)
        assert result.exit_code == 0
        assert "loaded but not stored" in result.output
    finally:
        subprocess.run(["umount", view], check=True)


def test_a_lower_rung_of_every_ladder_is_a_warning_with_a_reason(
    run: Callable, pool: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checks, "probe", lambda _: BAD)
    found = findings(run, pool)
    for subject, reason in (("engine", "forbidden"), ("direct I/O", "refused"), ("publish", "no links")):
        assert (found[subject]["level"], found[subject]["reason"]) == ("warning", reason)


def test_the_best_rungs_are_no_problem(run: Callable, pool: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "probe", lambda _: GOOD)
    found = findings(run, pool)
    assert [found[subject]["level"] for subject in ("engine", "direct I/O", "publish")] == ["ok"] * 3
    assert found["direct I/O"]["value"] == "on, aligned to 512 bytes"


def test_usage_is_compared_with_the_capacity(run: Callable, pool: Path) -> None:
    assert "unknown" in findings(run, pool)["pool usage"]["value"]
    UsageLedger(str(pool)).ensure(lambda: 1 << 20)
    fine = findings(run, pool, "--capacity", "2MiB")["pool usage"]
    assert (fine["value"], fine["level"]) == ("1.0 MiB of 2.0 MiB", "ok")
    assert findings(run, pool, "--capacity", "1MiB")["pool usage"]["reason"] == "full"
    assert "smaller than the capacity" in findings(run, pool, "--capacity", "1000PiB")["pool usage"]["reason"]


def test_a_capacity_that_is_no_size_is_a_wrong_argument(run: Callable, pool: Path) -> None:
    result = run("doctor", pool, "--capacity", "much")
    assert result.exit_code == 2
    assert "64GiB" in result.output


@pytest.mark.parametrize(("value", "level"), [("0", "ok"), ("17", "ok"), ("random", "warning"), (None, "warning")])
def test_a_random_hash_seed_is_a_problem(
    run: Callable, monkeypatch: pytest.MonkeyPatch, value: str | None, level: str
) -> None:
    if value is None:
        monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    else:
        monkeypatch.setenv("PYTHONHASHSEED", value)
    assert findings(run)["PYTHONHASHSEED"]["level"] == level


@pytest.mark.parametrize(
    ("version", "level"),
    [("0.22.1", Level.FINE), ("0.32.0+cpu", Level.FINE), ("0.33.0", Level.FINE), ("0.24.0", Level.WARNING)],
)
def test_vllm_releases_that_we_tested_are_told_from_others(version: str, level: Level) -> None:
    assert checks._check_vllm(version).level is level


def test_packages_that_are_missing_are_named_with_a_remedy() -> None:
    assert "environment that runs vLLM" in checks._check_vllm(None).remedy
    assert "pip install" in checks._check_liburing(None).remedy


@pytest.mark.parametrize(
    ("text", "value", "level"),
    [
        ("always [madvise] never\n", "madvise", Level.FINE),
        ("[always] madvise never\n", "always", Level.FINE),
        ("always madvise [never]\n", "never", Level.WARNING),
    ],
)
def test_the_setting_of_huge_pages_is_read(tmp_path: Path, text: str, value: str, level: Level) -> None:
    file = tmp_path / "enabled"
    file.write_text(text)
    finding = checks._check_huge_pages(file)
    assert (finding.value, finding.level) == (value, level)
    assert checks._check_huge_pages(tmp_path / "gone").value == "unknown"


def test_only_a_very_low_limit_of_locked_memory_is_a_problem() -> None:
    assert checks._check_memory_lock(resource.RLIM_INFINITY).value == "unlimited"
    assert checks._check_memory_lock(64 << 10).level is Level.FINE
    assert checks._check_memory_lock((64 << 10) - 1).level is Level.WARNING
