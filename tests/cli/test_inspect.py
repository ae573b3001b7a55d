"""`pykvcache inspect` on real pools."""

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

from pykvcache_contract.keys import fingerprint_of
from pykvcache_storage.usage import UsageLedger


def flip_byte(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


def folder_of(pool: Path) -> Path:
    return next(path for path in pool.iterdir() if path.is_dir())


def test_the_table_names_model_blocks_bytes_and_ranks(run: Callable, pool: Path, write_block: Callable) -> None:
    for number in range(3):
        write_block(number, rank=number % 2)
    result = run("inspect", pool)
    assert result.exit_code == 0
    for text in (folder_of(pool).name, "meta/llama-test", "36.0 KiB", "r0: 2, r1: 1", "Total: 3 blocks, 36.0 KiB"):
        assert text in result.output


def test_json_totals_agree_with_du(run: Callable, pool: Path, write_block: Callable) -> None:
    for number in range(20):
        write_block(number, pages=1 + number % 5)
    document = json.loads(run("inspect", pool, "--json").stdout)
    command = f"find {pool} -name '*.kvb' -print0 | du --apparent-size --block-size=1 --files0-from=- -c | tail -1"
    output = subprocess.run(command, shell=True, capture_output=True, text=True, check=True).stdout
    assert document["size_bytes"] == int(output.split()[0])
    assert document["blocks"] == 20
    assert document["fingerprints"][0]["model"] == "meta/llama-test"
    assert document["verification"] is None


def test_temporary_and_quarantined_files_are_shown_apart(run: Callable, pool: Path, write_block: Callable) -> None:
    block = write_block(1)
    (folder_of(pool) / "tmp" / f"{'a' * 32}-0.tmp").write_bytes(bytes(4096))
    block.rename(folder_of(pool) / "quarantine" / f"r0_{block.name}")
    row = json.loads(run("inspect", pool, "--json").stdout)["fingerprints"][0]
    assert (row["blocks"]["count"], row["temporaries"]["count"], row["quarantined"]["count"]) == (0, 1, 1)
    assert "1 (4.0 KiB)" in run("inspect", pool).output


def test_the_fill_level_of_the_ledger_is_shown(run: Callable, pool: Path) -> None:
    assert "no fill level recorded yet" in run("inspect", pool).output
    UsageLedger(str(pool)).ensure(lambda: 1 << 20)
    assert "1.0 MiB counted against the capacity" in run("inspect", pool).output
    assert json.loads(run("inspect", pool, "--json").stdout)["used_bytes"] == 1 << 20


def test_verify_passes_a_good_pool(run: Callable, pool: Path, write_block: Callable) -> None:
    for number in range(5):
        write_block(number)
    result = run("inspect", pool, "--verify")
    assert result.exit_code == 0
    assert "Verified: 5 blocks, 0 damaged, 0 unreadable." in result.output


def test_verify_names_damaged_blocks_with_the_reason_and_exits_1(
    run: Callable, pool: Path, write_block: Callable
) -> None:
    good, payload, header, short = (write_block(number) for number in range(4))
    flip_byte(payload, 5000)
    flip_byte(header, 100)
    os.truncate(short, 4097)
    result = run("inspect", pool, "--verify")
    assert result.exit_code == 1
    for path, reason in ((payload, "checksum"), (header, "CRC"), (short, "4097 bytes long")):
        assert any(path.name in line and reason in line for line in result.output.splitlines())
    assert good.name not in result.output
    document = json.loads(run("inspect", pool, "--verify", "--json").stdout)
    assert document["verification"]["damaged"] == 3
    assert {finding["path"] for finding in document["verification"]["findings"]} == {
        str(path.relative_to(pool)) for path in (payload, header, short)
    }
    assert payload.exists()


def test_blocks_whose_fingerprint_is_unknown_are_not_called_good(
    run: Callable, pool: Path, write_block: Callable
) -> None:
    write_block(1)
    (folder_of(pool) / "config.json").write_text("{")
    assert run("inspect", pool).exit_code == 0
    result = run("inspect", pool, "--verify")
    assert result.exit_code == 1
    assert "config.json is damaged" in result.output
    (folder_of(pool) / "config.json").unlink()
    assert "config.json is missing" in run("inspect", pool, "--verify").output


def test_one_fingerprint_can_be_chosen_by_its_first_digits_or_whole(
    run: Callable, pool: Path, write_block: Callable
) -> None:
    write_block(1)
    (pool / "0123456789ab").mkdir()
    whole = json.loads((folder_of(pool).parent / _ours(pool) / "config.json").read_text())["fingerprint"]
    for wanted in (whole, whole[:12], whole[:20].upper()):
        rows = json.loads(run("inspect", pool, "--json", "--fingerprint", wanted).stdout)["fingerprints"]
        assert [row["directory"] for row in rows] == [whole[:12]]


def _ours(pool: Path) -> str:
    return next(path.parent.name for path in pool.glob("*/config.json"))


def test_an_unknown_fingerprint_is_an_error_that_lists_those_there(run: Callable, pool: Path) -> None:
    result = run("inspect", pool, "--fingerprint", fingerprint_of({"other": 1}))
    assert result.exit_code == 2
    assert _ours(pool) in result.output
    assert run("inspect", pool, "--fingerprint", "abc").exit_code == 2


def test_a_missing_pool_is_an_error_with_a_remedy(run: Callable, tmp_path: Path) -> None:
    result = run("inspect", tmp_path / "gone")
    assert result.exit_code == 2
    assert "mkdir -p" in result.output
    assert "Traceback" not in result.output


def test_an_empty_directory_is_not_a_pool_and_stays_empty(run: Callable, tmp_path: Path) -> None:
    result = run("inspect", tmp_path)
    assert result.exit_code == 2
    assert "is not a cache pool" in result.output
    assert os.listdir(tmp_path) == []


def test_odd_bytes_in_names_and_markup_in_models_do_no_harm(run: Callable, tmp_path: Path, pool: Path) -> None:
    odd = os.fsencode(tmp_path) + b"/p\xff[bold]\x1b"
    os.rename(pool, odd)
    config = next(Path(os.fsdecode(odd)).glob("*/config.json"))
    config.write_text(config.read_text().replace("meta/llama-test", "[red]model[/]"))
    result = run("inspect", os.fsdecode(odd))
    assert result.exit_code == 0
    assert "[red]model[/]" in result.output
    assert json.loads(run("inspect", os.fsdecode(odd), "--json").stdout)["fingerprints"][0]["model"] == "[red]model[/]"
