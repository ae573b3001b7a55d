"""The proof of the care: two vLLM servers on one pool of a quarter of their working set, and a sidecar beside them.

    python -m pykvcache_bench.shared_pool --directory POOL_PARENT [--minutes 10] [--model DIR]

First a server without the connector answers every prompt once: the reference. Then two servers with the connector share
a new pool and answer prompts of a seeded workload: documents chosen by a Zipf law, each with one of a few questions
behind it. Meanwhile the pool's ledger is read five times a second, and its files are measured by walks. Both servers
record their requests; afterwards `pykvcache-sidecar simulate` says what such a pool should have found.

A real pool takes minutes from its high watermark to its capacity, and hours until all of it was evicted once; here it
is seconds and minutes. So `--rate` and `--documents` must keep the turnover, which is printed, well above the minute to
which uses are noted: below, the order of eviction is an accident, and no simulation tells it.

The servers run without vLLM's own prefix cache: what GPU memory serves is not asked of the pool, so measured and
simulated hit rates would be of different tokens. Prompts are a whole number of blocks and one token long, because vLLM
computes at least the last token, and only full blocks are looked up. Without `--model` it is a tiny model with random
weights, made by `python -m pykvcache_cli.tiny_model`, whose greedy answers show a wrong byte of KV.

Exits with 1 if a request failed, an answer differs from the reference, ledger or files were ever above the
capacity, nothing was evicted or scrubbed, a block was damaged, the sidecar ended, or the hit rates differ by more than
`--points`.
"""

import argparse
import contextlib
import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from pykvcache_bench.processes import Served, sidecar, vllm_server
from pykvcache_bench.shared_load import Answers, Clients, SizeSampler, Workload, reference_answers
from pykvcache_contract.header import HEADER_SIZE_BYTES
from pykvcache_contract.metrics import (
    DAMAGED_BLOCKS,
    DECLINED,
    EVICTED_BLOCKS,
    EVICTED_BYTES,
    HIT_TOKENS,
    LOOKUP_TOKENS,
    SCRUBBED_BYTES,
)
from pykvcache_contract.transfer_config import vllm_flags
from pykvcache_contract.units import format_size, round_up

DTYPE_SIZES = {"float32": 4, "float16": 2, "bfloat16": 2}
SETTLE_SECONDS = 2.0
"""After the last answer: stores end."""


def main() -> int:
    """Run both parts, print the result as JSON and as a table, and return the exit status."""
    options = _parser().parse_args()
    directory = Path(tempfile.mkdtemp(prefix="shared-pool-", dir=options.directory))
    try:
        options.model = options.model or _make_model(directory / "model")
        result = _run(directory, options)
    finally:
        if not options.keep:
            shutil.rmtree(directory, ignore_errors=True)
    failures = _failures(result, options)
    print(json.dumps({**result, "failures": failures}, indent=2))
    _print_table(result, failures)
    return 1 if failures else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", required=True, help="parent of the pool, on a disk")
    parser.add_argument("--minutes", type=float, default=10.0, help="how long prompts are sent (default: 10)")
    parser.add_argument("--model", help="directory of the model; default: a tiny one is made")
    parser.add_argument("--dtype", default="float32", choices=DTYPE_SIZES)
    parser.add_argument("--documents", type=int, default=1000)
    parser.add_argument("--document-blocks", type=int, default=12, help="length of a document in blocks of ours")
    parser.add_argument("--questions", type=int, default=3, help="per document; a question has one block")
    parser.add_argument("--zipf", type=float, default=1.0, help="exponent of the documents' popularity")
    parser.add_argument("--new-tokens", type=int, default=8)
    parser.add_argument("--vocabulary", type=int, default=258, help="tokens of prompts are 3 … this")
    parser.add_argument("--clients", type=int, default=2, help="requests at once, per server")
    parser.add_argument("--rate", type=float, default=6.0, help="requests a second, at most, over both servers")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--block-size", type=int, default=32, help="vLLM's, in tokens")
    parser.add_argument("--offload-block", type=int, default=64, help="ours, in tokens")
    parser.add_argument("--staging", default="32MiB")
    parser.add_argument("--kv-cache-bytes", type=int, default=64 << 20)
    parser.add_argument("--share", type=float, default=0.25, help="capacity ÷ working set")
    parser.add_argument("--high", type=float, default=0.9)
    parser.add_argument("--low", type=float, default=0.8)
    parser.add_argument("--interval", type=float, default=0.25, help="the sidecar's; this pool fills in seconds")
    parser.add_argument("--scrub-rate", default="8MiB")
    parser.add_argument("--points", type=float, default=5.0, help="most that hit rate and simulation may differ by")
    parser.add_argument("--keep", action="store_true", help="leave pool, traces and logs")
    return parser


def _make_model(path: Path) -> str:
    subprocess.run([sys.executable, "-m", "pykvcache_cli.tiny_model", str(path)], check=True)
    return str(path)


def _run(directory: Path, options: argparse.Namespace) -> dict[str, Any]:
    workload = Workload.of(options)
    capacity = int(options.share * workload.block_count * block_size_bytes(options))
    _say(f"{len(workload.prompts)} prompts of {len(workload.prompts[0])} tokens; capacity {format_size(capacity)}")
    with vllm_server(options.model, *_serve_flags(options), log=directory / "reference.log") as server:
        answers = Answers(reference_answers(server, workload, options))
    _say("reference computed")
    pool = directory / "pool"
    pool.mkdir()
    result = _serve(directory, pool, capacity, workload, answers, options)
    simulated = _simulate(directory, capacity, options)
    measured = result["hit_tokens"] / max(1.0, result["lookup_tokens"])
    points = round(100 * abs(measured - simulated["simulated_hit_rate"]), 2)
    seconds = 60 * options.minutes
    turnover = {"turnover_seconds": round(seconds * capacity / max(1.0, result["evicted_bytes"]))}
    return result | turnover | {"hit_rate": round(measured, 4)} | simulated | {"difference_points": points}


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def block_size_bytes(options: argparse.Namespace) -> int:
    """Return the size of a block's file for a model with full attention, by its configuration."""
    config = json.loads(Path(options.model, "config.json").read_text())
    heads = config.get("num_key_value_heads") or config["num_attention_heads"]
    head = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    token = 2 * config["num_hidden_layers"] * heads * head * DTYPE_SIZES[options.dtype]
    return HEADER_SIZE_BYTES + round_up(token * options.offload_block)


# ---- the servers ----


def _serve_flags(options: argparse.Namespace) -> list[str]:
    length = Workload.prompt_tokens(options) + options.new_tokens
    flags = ["--dtype", options.dtype, "--block-size", str(options.block_size), "--max-model-len", str(length + 64)]
    flags += ["--kv-cache-memory-bytes", str(options.kv_cache_bytes), "--no-enable-prefix-caching"]
    return [*flags, "--max-num-seqs", "8", "--enforce-eager", "--seed", "0"]


def _connector_flags(pool: Path, capacity: int, trace: Path, options: argparse.Namespace) -> list[str]:
    ours = {"pool": str(pool), "capacity": capacity, "staging": options.staging, "trace": str(trace)}
    return vllm_flags({**ours, "block_size": options.offload_block})


def _serve(
    directory: Path, pool: Path, capacity: int, workload: Workload, answers: Answers, options: argparse.Namespace
) -> dict[str, Any]:
    """Send the workload to two servers beside a sidecar, and return what was counted."""
    flags = ["--high", str(options.high), "--low", str(options.low), "--scrub-rate", options.scrub_rate]
    flags += ["--interval", str(options.interval), "--policy", "lru"]
    with contextlib.ExitStack() as stack:
        care = stack.enter_context(sidecar(str(pool), capacity, *flags, log=directory / "sidecar.log"))
        servers = []
        for number in (1, 2):
            connector = _connector_flags(pool, capacity, directory / f"trace-{number}.jsonl", options)
            command = (options.model, *_serve_flags(options), *connector)
            servers.append(stack.enter_context(vllm_server(*command, log=directory / f"vllm-{number}.log")))
            _say(f"server {number} started")
        sampler = SizeSampler(str(pool), capacity)
        with sampler.running():
            Clients(servers, workload, answers, options).run()
        counts = _counts(servers, care, options)
    return {"minutes": options.minutes, "capacity_bytes": capacity, **answers.counts(), **sampler.counts(), **counts}


def _counts(servers: list[Served], care: Served, options: argparse.Namespace) -> dict[str, Any]:
    """Return the servers' and the sidecar's counters."""
    time.sleep(SETTLE_SECONDS)
    for server in servers:  # Counts travel with steps: one more request, too short for a lookup, brings the rest.
        server.post("/v1/completions", {"model": options.model, "prompt": [3, 4, 5], "max_tokens": 2})
    sums = [server.metrics() for server in servers]
    declines: dict[str, float] = {}
    for server in servers:
        for name, value in server.samples().items():
            if name.startswith(DECLINED.name) and value:
                reason = name.partition('reason="')[2].partition('"')[0]
                declines[reason] = declines.get(reason, 0) + value
    cared = care.metrics() if care.is_alive() else {}
    return {
        "lookup_tokens": sum(found[LOOKUP_TOKENS.name] for found in sums),
        "hit_tokens": sum(found[HIT_TOKENS.name] for found in sums),
        "declines": declines,
        "sidecar_alive": care.is_alive(),
        "evicted_blocks": cared.get(EVICTED_BLOCKS.name, 0),
        "evicted_bytes": cared.get(EVICTED_BYTES.name, 0),
        "scrubbed_bytes": cared.get(SCRUBBED_BYTES.name, 0),
        "damaged_blocks": cared.get(DAMAGED_BLOCKS.name, 0),
    }


# ---- the simulation and the verdict ----


def _simulate(directory: Path, capacity: int, options: argparse.Namespace) -> dict[str, Any]:
    """Return what the simulator finds for the recorded requests."""
    traces = sorted(str(path) for path in directory.glob("trace-*.jsonl"))
    command = [sys.executable, "-m", "pykvcache_sidecar.main", "simulate", *traces, "--capacity", str(capacity)]
    command += ["--policy", "lru", "--high", str(options.high), "--low", str(options.low)]
    command += ["--interval", str(options.interval)]
    done = subprocess.run([*command, "--json"], stdout=subprocess.PIPE, text=True, check=True)
    outcomes = {outcome["policy"]: outcome for outcome in json.loads(done.stdout)["outcomes"]}
    return {
        "simulated_hit_rate": round(outcomes["lru"]["hit_rate"], 4),
        "simulated_evicted_bytes": outcomes["lru"]["evicted_bytes"],
        "simulated_refused_bytes": outcomes["lru"]["refused_bytes"],
        "endless_hit_rate": round(outcomes["endless"]["hit_rate"], 4),
    }


def _failures(result: dict[str, Any], options: argparse.Namespace) -> list[str]:
    """Return what is wrong, each as a sentence."""
    checks = {
        f"{result['failed_requests']} requests failed": result["failed_requests"],
        f"{result['differing_outputs']} answers differ from the reference": result["differing_outputs"],
        f"the pool exceeded its capacity in {result['samples_above']} samples": result["samples_above"],
        "the pool's size was never measured": not result["walks"],
        "no request was answered": not result["requests"],
        "the sidecar ended": not result["sidecar_alive"],
        "nothing was evicted": not result["evicted_blocks"],
        "nothing was scrubbed": not result["scrubbed_bytes"],
        f"{result['damaged_blocks']} blocks were damaged": result["damaged_blocks"],
        f"hit rates differ by more than {options.points:g} points": result["difference_points"] > options.points,
    }
    return [text for text, is_wrong in checks.items() if is_wrong]


def _print_table(result: dict[str, Any], failures: list[str]) -> None:
    used, capacity = (format_size(result[name]) for name in ("walked_bytes_max", "capacity_bytes"))
    evicted = format_size(int(result["evicted_bytes"]))
    rows = {
        "requests": f"{result['requests']}, {result['failed_requests']} failed, {result['differing_outputs']} differ",
        "most used": f"{used} of {capacity}, {result['samples']} samples, {result['walks']} walks",
        "hit rate": f"{result['hit_rate']:.1%}; without bounds {result['endless_hit_rate']:.1%}",
        "simulated": f"{result['simulated_hit_rate']:.1%}: {result['difference_points']} points off",
        "evicted": f"{result['evicted_blocks']:.0f} blocks, {evicted}, a whole pool in {result['turnover_seconds']} s",
        "scrubbed": f"{format_size(int(result['scrubbed_bytes']))}, {result['damaged_blocks']:.0f} damaged blocks",
    }
    for title, text in rows.items():
        print(f"{title:10} {text}")
    print("ok" if not failures else "FAILED: " + "; ".join(failures))


if __name__ == "__main__":
    sys.exit(main())
