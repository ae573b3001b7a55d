"""vLLM engines in child processes that run equal batches when told to: for ratios that a slow minute cannot change.

The parent asks one child at a time and measures pair by pair, in the order A B B A; so slow minutes of the machine hit
both sides, and each pair gives one ratio. A child is one engine without prefix caching, with or without the connector.
It answers line by line on stdout; what vLLM prints goes to a file. Used by store_overhead and care_overhead.
"""

import argparse
import contextlib
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pykvcache_contract.names import METRIC_PREFIX
from pykvcache_contract.transfer_config import transfer_config

SETTLE_SECONDS_MAX = 60.0
_CHILD = "import json, sys; from pykvcache_bench.turns import serve; serve(json.loads(sys.argv[1]))"
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 512,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
"""The model without `--model`; vLLM makes its weights up."""


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that every child needs."""
    parser.add_argument("--model", help="directory of the model")
    parser.add_argument("--directory", required=True, help="parent of the pool: on the disk to be measured")
    parser.add_argument("--pairs", type=int, default=20, help="how many ratios")
    parser.add_argument("--prompts", type=int, default=4, help="prompts of a batch")
    parser.add_argument("--tokens", type=int, default=512, help="tokens of a prompt")
    parser.add_argument("--new-tokens", type=int, default=16)
    parser.add_argument("--vocabulary", type=int, default=500)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--block-size", type=int, default=32, help="vLLM's, in tokens")
    parser.add_argument("--offload-block", type=int, default=64, help="ours, in tokens")
    parser.add_argument("--staging", default="64MiB")
    parser.add_argument("--kv-cache-bytes", type=int, default=256 << 20)


@contextlib.contextmanager
def folders(options: argparse.Namespace, name: str) -> Iterator[str]:
    """Yield a new pool directory; make a model with made-up weights where none was given; remove both at the end."""
    pool = tempfile.mkdtemp(prefix=f"{name}-", dir=options.directory)
    model = tempfile.mkdtemp(prefix=f"{name}-model-", dir=options.directory)
    Path(model, "config.json").write_text(json.dumps(CONFIG))
    options.load_format = "auto" if options.model else "dummy"
    options.model = options.model or model
    try:
        yield pool
    finally:
        shutil.rmtree(pool)
        shutil.rmtree(model)


def summarise(options: argparse.Namespace, ratios: list[float], seconds: list[float]) -> dict[str, Any]:
    """Return the ratios' spread, and what a batch without what is measured takes."""
    low, middle, high = statistics.quantiles(ratios, n=4)
    return {
        "ratio_median": round(middle, 4),
        "ratio_quartiles": [round(low, 4), round(high, 4)],
        "ratio_min_max": [round(min(ratios), 4), round(max(ratios), 4)],
        "pairs": len(ratios),
        "batch_seconds_median": round(statistics.median(seconds), 3),
        "batch_tokens": options.prompts * options.tokens,
    }


def blocks_of_batch(options: argparse.Namespace) -> int:
    """Return how many blocks a batch stores."""
    blocks: int = options.prompts * (options.tokens // options.offload_block)
    return blocks


class Child:
    """A vLLM process that answers line by line."""

    def __init__(self, options: argparse.Namespace, name: str, *, pool: str | None) -> None:
        self._log = Path(options.directory, f"{name}-{os.getpid()}.log")
        child = json.dumps({**vars(options), "pool": pool})
        with self._log.open("w") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _CHILD, child],
                env={**os.environ, "PYTHONHASHSEED": "0", "HF_HUB_OFFLINE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                text=True,
            )

    def ask(self, name: str, **arguments: Any) -> Any:
        """Return what the child's engine answers; end this program with its log if it died."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):  # It ended; there will be no answer either.
            self._process.stdin.write(json.dumps([name, arguments]) + "\n")
            self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            sys.exit(f"vLLM ended:\n{self._log.read_text()[-6000:]}")
        return json.loads(line)

    def end(self) -> None:
        """End the child and its vLLM."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()
        self._log.unlink(missing_ok=True)


# ---- in the child ----


def serve(options: dict[str, Any]) -> None:
    """Answer until stdin ends; what vLLM prints goes to stderr."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    engine = _Engine(options)
    for line in sys.stdin:
        name, arguments = json.loads(line)
        answers.write(json.dumps(getattr(engine, name)(**arguments)) + "\n")
        answers.flush()
    engine.end()


class _Engine:
    """One vLLM engine without prefix caching, so that every prompt is computed."""

    def __init__(self, options: dict[str, Any]) -> None:
        from vllm import LLM

        self._options = options
        self._llm = LLM(
            model=options["model"],
            load_format=options["load_format"],
            dtype=options["dtype"],
            block_size=options["block_size"],
            kv_cache_memory_bytes=options["kv_cache_bytes"],
            max_model_len=options["tokens"] + options["new_tokens"],
            enable_prefix_caching=False,
            enforce_eager=True,
            seed=0,
            skip_tokenizer_init=True,
            disable_log_stats=False,
            **_connector(options),
        )

    def run(self, batch: int) -> float:
        """Run one batch of fresh prompts, wait until it is stored, and return the seconds of the batch."""
        # Equal batches for both engines; a batch is never repeated. Text, because the seeds 1 and -1 give the same.
        source = random.Random(f"batch {batch}")
        prompts = [
            [source.randrange(3, self._options["vocabulary"]) for _ in range(self._options["tokens"])]
            for _ in range(self._options["prompts"])
        ]
        started = time.perf_counter()
        self._generate(prompts, self._options["new_tokens"])
        seconds = time.perf_counter() - started
        self._settle()
        return seconds

    def counts(self) -> dict[str, float]:
        """Return what was stored."""
        metrics = self._metrics()
        return {name: metrics.get(METRIC_PREFIX + name, 0) for name in ("store_blocks", "store_bytes")}

    def end(self) -> None:
        """End vLLM's threads and processes."""
        self._llm.llm_engine.engine_core.shutdown()

    def _generate(self, prompts: list[list[int]], max_tokens: int) -> None:
        from vllm import SamplingParams

        sampling = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
        self._llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], sampling, use_tqdm=False)

    def _metrics(self) -> dict[str, float]:
        return {metric.name: metric.value for metric in self._llm.get_metrics() if hasattr(metric, "value")}

    def _settle(self) -> None:
        """Let the engine step, with a prompt too short to be stored, until no staging slot is in use."""
        deadline = time.monotonic() + SETTLE_SECONDS_MAX
        quiet = 0
        while quiet < 3 and time.monotonic() < deadline:
            self._generate([[3, 4, 5]], 2)
            metrics = self._metrics()
            busy = metrics.get(f"{METRIC_PREFIX}staging_slots_used", 0) + metrics.get(f"{METRIC_PREFIX}queue_depth", 0)
            quiet = 0 if busy else quiet + 1


def _connector(options: dict[str, Any]) -> dict[str, Any]:
    if options["pool"] is None:
        return {}
    ours = {"pool": options["pool"], "staging": options["staging"], "block_size": options["offload_block"]}
    return {"kv_transfer_config": transfer_config(ours)}
