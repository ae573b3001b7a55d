"""`pykvcache demo`: a real vLLM keeps its KV on disk and finds it again after a restart.

Three runs of the same prompts: without the connector (what the answers must be), with an empty pool, and after a
restart with the filled pool.
"""

import contextlib
import json
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import typer
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from pykvcache_cli.console import EXIT_PROBLEM, fail, stderr, stdout
from pykvcache_cli.tiny_model import make_tiny_model
from pykvcache_cli.vllm_args import ENVIRONMENT as POOL_ENVIRONMENT
from pykvcache_cli.vllm_server import Completion, ServerError, VllmServer, running
from pykvcache_contract.transfer_config import vllm_flags
from pykvcache_contract.units import format_size
from pykvcache_storage.inventory import summarise

HIT_TOKENS = "vllm:pykvcache_hit_tokens_total"
LOAD_BYTES = "vllm:pykvcache_load_bytes_total"
MAX_TOKENS = 24
OPTIONS = {"capacity": "8GiB", "staging": "256MiB", "block_size": 256}
ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", **POOL_ENVIRONMENT}
SERVE_FLAGS = [
    "--dtype=float32",  # greedy answers of a random model flip on rounding in 16 bits
    "--enforce-eager",
    "--max-model-len=8192",
    "--max-num-seqs=4",
    "--block-size=32",
    "--kv-cache-memory-bytes=134217728",
    "--seed=0",
]


@dataclass(frozen=True, slots=True)
class Row:
    """What became of one prompt.

    Args:
        loaded_tokens, read_bytes: from disk, after the restart.
    """

    prompt: str
    prompt_tokens: int
    loaded_tokens: int
    ttft_cold_seconds: float
    ttft_warm_seconds: float
    read_bytes: int
    identical: bool


@dataclass(frozen=True, slots=True)
class Answer:
    """A completion with what it read from disk."""

    completion: Completion
    loaded_tokens: int
    read_bytes: int


def command(
    json_file: Path | None = typer.Option(None, "--json", metavar="FILE", help="Also write the results as JSON."),
    keep: Path | None = typer.Option(
        None, "--keep", metavar="DIR", help="Use this directory (made if missing, empty) as pool, and keep it."
    ),
) -> None:
    """Show on this machine that vLLM finds its KV blocks on disk after a restart; no GPU and no download needed.

    Makes a tiny model, starts the real vLLM server three times (without py-kvcache, with an empty pool, and again
    with the filled pool), sends the same long prompts each time, and compares answers and times to first token.
    Takes about three minutes on two cores. Exits with 1 if an answer differs or nothing was loaded.
    """
    with tempfile.TemporaryDirectory(prefix="pykvcache-demo-") as folder, _progress() as show:
        pool = keep or Path(folder, "pool")
        pool.mkdir(parents=True, exist_ok=True)
        if any(pool.iterdir()):
            fail(f"{pool} is not empty: the first run would not be cold. Give an empty directory.")
        try:
            rows = _run(Path(folder), pool.resolve(), show)
        except ServerError as error:
            fail(str(error))
        document = {"prompts": [asdict(row) for row in rows], "pool": _pool_summary(pool)}
    if json_file is not None:
        json_file.write_text(json.dumps(document, indent=2) + "\n")
    _print(rows, document["pool"], kept=keep)
    if not all(row.identical for row in rows) or not any(row.loaded_tokens for row in rows):
        raise typer.Exit(EXIT_PROBLEM)


def _run(folder: Path, pool: Path, show: Any) -> list[Row]:
    show("making a tiny model")
    model = folder / "model"
    make_tiny_model(model)
    prompts = _prompts()
    plain = _answers("without py-kvcache", folder, model, [], prompts, show)
    flags = vllm_flags({"pool": str(pool), **OPTIONS})
    cold = _answers("with an empty pool", folder, model, flags, prompts, show)
    warm = _answers("restarted, with the filled pool", folder, model, flags, prompts, show)
    return [
        Row(
            prompt=name,
            prompt_tokens=warm[name].completion.prompt_tokens,
            loaded_tokens=warm[name].loaded_tokens,
            ttft_cold_seconds=cold[name].completion.ttft_seconds,
            ttft_warm_seconds=warm[name].completion.ttft_seconds,
            read_bytes=warm[name].read_bytes,
            identical=plain[name].completion.text == cold[name].completion.text == warm[name].completion.text,
        )
        for name in prompts
    ]


def _prompts() -> dict[str, str]:
    """Return long prompts about two documents: each document a shared prefix, each question with an own tail."""
    manual = "".join(f"Section {n}: valve {n * 37 % 101} opens at {n * 53 % 211} bar. " for n in range(120))
    diary = "".join(f"On day {n} we walked {n * 29 % 83} miles and met {n * 7 % 13} people. " for n in range(60))
    return {
        "manual, question 1": manual + _tail("Which valve opens first?", 31),
        "manual, question 2": manual + _tail("At how many bar does valve 74 open?", 43),
        "manual, question 3": manual + _tail("Summarise the last section.", 59),
        "diary, question 1": diary + _tail("How far did we walk?", 61),
        "diary, question 2": diary + _tail("Whom did we meet, and when?", 67),
    }


def _tail(question: str, seed: int) -> str:
    notes = "".join(f"Note {n}: reading {n * seed % 97}, limit {n * seed % 89}. " for n in range(24))
    return f"{notes}{question}"


def _answers(
    title: str, folder: Path, model: Path, flags: list[str], prompts: dict[str, str], show: Any
) -> dict[str, Answer]:
    show(f"vLLM {title}: starting")
    with running(str(model), [*SERVE_FLAGS, *flags], environment=ENVIRONMENT, log=folder / "vllm.log") as server:
        # The first request pays for warm-up; it must not count as a prompt's time to first token.
        server.complete(str(model), "warm-up", max_tokens=2)
        answers = {}
        for number, (name, prompt) in enumerate(prompts.items(), start=1):
            show(f"vLLM {title}: prompt {number} of {len(prompts)}")
            answers[name] = _answer(server, str(model), prompt)
        show(f"vLLM {title}: stopping")
    return answers


def _answer(server: VllmServer, model: str, prompt: str) -> Answer:
    before = server.metrics()
    completion = server.complete(model, prompt, max_tokens=MAX_TOKENS)
    after = server.metrics()
    loaded, read = (int(after.get(name, 0) - before.get(name, 0)) for name in (HIT_TOKENS, LOAD_BYTES))
    return Answer(completion, loaded, read)


def _pool_summary(pool: Path) -> dict[str, Any]:
    summaries = summarise(str(pool))
    return {
        "directory": str(pool),
        "files": sum(summary.blocks.count for summary in summaries),
        "bytes": sum(summary.blocks.size_bytes for summary in summaries),
    }


def _print(rows: list[Row], pool: Any, *, kept: Path | None) -> None:
    table = Table(title="The same prompts, cold and after a restart")
    for heading in ("prompt", "prompt tokens", "from disk", "TTFT cold", "TTFT warm", "read", "identical"):
        table.add_column(heading, justify="left" if heading == "prompt" else "right")
    for row in rows:
        table.add_row(
            row.prompt,
            str(row.prompt_tokens),
            str(row.loaded_tokens),
            f"{row.ttft_cold_seconds * 1000:.0f} ms",
            f"{row.ttft_warm_seconds * 1000:.0f} ms",
            format_size(row.read_bytes),
            "yes" if row.identical else "[red]NO[/]",
        )
    console = stdout()
    console.print(table)
    where = f"kept in {kept}" if kept is not None else "removed (keep it with --keep DIR)"
    console.print(f"Pool: {pool['files']} block files, {format_size(pool['bytes'])}; {where}.")
    console.print("[dim]TTFT: time to first token. Tokens not from disk were computed or found in memory.[/]")


@contextlib.contextmanager
def _progress() -> Iterator[Any]:
    """Yield a function that shows what is being done: a spinner on a terminal, lines elsewhere."""
    console = stderr()
    if not console.is_terminal:
        yield lambda text: console.print(text)
        return
    with Progress(
        SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn(), console=console, transient=True
    ) as bar:
        task = bar.add_task("starting")
        yield lambda text: bar.update(task, description=text)
