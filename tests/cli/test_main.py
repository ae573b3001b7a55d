"""The command itself: help without imports, parts loaded only when called, parts that are not installed."""

from collections.abc import Callable
from pathlib import Path

import pytest

from pykvcache_cli import main
from pykvcache_cli.main import SUB_COMMANDS, SubCommand

HEAVY = """
import sys
from pykvcache_cli.main import main
try:
    main()
except SystemExit as stop:
    code = stop.code
heavy = sorted({"torch", "vllm", "kopf", "numpy", "liburing"} & set(sys.modules))
ours = sorted(name for name in sys.modules if name.startswith("pykvcache_connector"))
print("code", code, "heavy", heavy, ours)
"""


def test_help_lists_every_sub_command_with_its_summary(run: Callable) -> None:
    result = run("--help")
    assert result.exit_code == 0
    for name, row in SUB_COMMANDS.items():
        assert name in result.output
        assert row.summary in result.output


@pytest.mark.slow
def test_inspect_imports_no_other_part(run_apart: Callable, pool: Path, write_block: Callable) -> None:
    write_block(1)
    result = run_apart(HEAVY, "inspect", pool)
    assert result.stdout.splitlines()[-1] == "code 0 heavy [] []", result.stderr


@pytest.mark.slow
def test_help_imports_no_part_at_all(run_apart: Callable) -> None:
    assert run_apart(HEAVY, "--help").stdout.splitlines()[-1] == "code 0 heavy [] []"


@pytest.mark.slow
def test_doctor_and_vllm_args_import_neither_vllm_nor_torch(run_apart: Callable, tmp_path: Path) -> None:
    for arguments in (["doctor"], ["vllm-args", "--pool", tmp_path]):
        last = run_apart(HEAVY, *arguments).stdout.splitlines()[-1]
        assert last.startswith("code 0")
        assert not {"torch", "vllm", "kopf"} & set(last.replace("'", " ").split())


@pytest.mark.slow
def test_inject_imports_no_client_and_no_vllm(run_apart: Callable) -> None:
    examples = Path(__file__).parents[2] / "examples"
    result = run_apart(HEAVY, "inject", "-f", examples / "nodelocal.yaml")
    assert result.stdout.splitlines()[-1] == "code 0 heavy [] []", result.stderr


def test_every_sub_command_explains_itself(run: Callable) -> None:
    for name in SUB_COMMANDS:
        result = run(name, "--help")
        assert result.exit_code == 0
        assert f"pykvcache {name}" in result.output


def test_a_part_that_is_not_installed_is_named_with_its_extra(run: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(main.SUB_COMMANDS, "fly", SubCommand("pykvcache_no_such_part.fly", "Fly.", extra="wings"))
    result = run("fly")
    assert result.exit_code == 2
    assert "pip install 'py-kvcache[wings]'" in result.output
    assert "Fly." in run("--help").output


def test_an_unknown_sub_command_is_an_error(run: Callable) -> None:
    result = run("inspekt", "x")
    assert result.exit_code == 2
    assert "inspekt" in result.output


def test_the_version_is_printed(run: Callable) -> None:
    result = run("--version")
    assert result.exit_code == 0
    assert result.output.startswith("pykvcache ")
