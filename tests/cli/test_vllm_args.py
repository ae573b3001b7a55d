"""`pykvcache vllm-args`: what it prints works when a shell reads it, and is what the settings accept."""

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from pykvcache_connector.settings import Settings

SHOW = '#!/bin/sh\nprintf "%s\\n" "$PYTHONHASHSEED" "$@"\n'


@pytest.fixture
def shell(tmp_path: Path) -> Callable[[str], list[str]]:
    """Return a function that runs text in a shell whose `vllm` prints its hash seed and arguments, one a line."""
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "vllm").write_text(SHOW)
    (folder / "vllm").chmod(0o755)
    environment = {"PATH": f"{folder}:{os.environ['PATH']}"}

    def run_text(text: str) -> list[str]:
        return subprocess.run(
            ["sh", "-c", text], env=environment, capture_output=True, text=True, check=True
        ).stdout.split("\n")[:-1]

    return run_text


def test_the_flags_work_after_vllm_serve(run: Callable, tmp_path: Path, shell: Callable) -> None:
    directory = tmp_path / "it's a $pool"
    directory.mkdir()
    result = run("vllm-args", "--pool", directory)
    assert result.exit_code == 0
    environment, flags = result.stdout.splitlines()
    seed, *arguments = shell(f"{environment}\nvllm serve MODEL {flags}")
    assert seed == "0"
    assert arguments[:4] == ["serve", "MODEL", "--prefix-caching-hash-algo", "sha256_cbor"]
    assert arguments[4] == "--kv-transfer-config"
    assert json.loads(arguments[5]) == {
        "kv_connector": "PyKVCacheConnector",
        "kv_connector_module_path": "pykvcache_connector.connector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "spec_name": "PyKVCacheSpec",
            "spec_module_path": "pykvcache_connector.spec",
            "pool": str(directory),
            "staging": "1GiB",
            "block_size": 256,
        },
    }


def test_with_a_model_the_output_is_one_whole_command(run: Callable, tmp_path: Path, shell: Callable) -> None:
    result = run("vllm-args", "my model", "--pool", tmp_path / "pool")
    seed, *arguments = shell(result.stdout)
    assert (seed, arguments[:2]) == ("0", ["serve", "my model"])


def test_json_holds_environment_and_arguments_that_the_settings_accept(run: Callable, tmp_path: Path) -> None:
    options = ["--capacity", "1.5TiB", "--staging", "512MiB", "--block-size", "64", "--format", "json"]
    document = json.loads(run("vllm-args", "--pool", tmp_path, *options).stdout)
    assert document["env"] == {"PYTHONHASHSEED": "0"}
    extra = json.loads(document["args"][-1])["kv_connector_extra_config"]
    settings = Settings.parse(extra)
    assert (settings.capacity, settings.staging, extra["block_size"]) == (3 << 39, 512 << 20, 64)


def test_the_directory_is_created_and_that_is_said(run: Callable, tmp_path: Path) -> None:
    directory = tmp_path / "deep" / "pool"
    result = run("vllm-args", "--pool", directory)
    assert f"created {directory}" in result.output
    assert os.listdir(directory) == []
    assert "created /" not in run("vllm-args", "--pool", directory).output


def test_a_relative_directory_becomes_absolute(run: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert f'"pool":"{tmp_path}/pool"' in run("vllm-args", "--pool", "pool").stdout


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--capacity", "much"], ["capacity", "much"]),
        (["--capacity", "0"], ["capacity"]),
        (["--staging", "-1GiB"], ["staging"]),
        (["--format", "yaml"], ["yaml", "json"]),
    ],
)
def test_a_wrong_option_is_named_and_nothing_is_created(
    run: Callable, tmp_path: Path, options: list[str], words: list[str]
) -> None:
    result = run("vllm-args", "--pool", tmp_path / "pool", *options)
    assert result.exit_code == 2
    assert all(word in result.output for word in words)
    assert not (tmp_path / "pool").exists()


@pytest.mark.parametrize("size", ["0", "-1", "many"])
def test_a_block_size_below_one_token_is_refused(run: Callable, tmp_path: Path, size: str) -> None:
    assert run("vllm-args", "--pool", tmp_path, "--block-size", size).exit_code == 2


def test_a_foreign_directory_is_refused(run: Callable, tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").touch()
    result = run("vllm-args", "--pool", tmp_path)
    assert result.exit_code == 2
    assert "does not adopt" in result.output


def test_a_directory_that_cannot_be_created_is_an_error_with_the_cause(run: Callable, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    result = run("vllm-args", "--pool", tmp_path / "file" / "pool")
    assert result.exit_code == 2
    assert "Not a directory" in result.output
