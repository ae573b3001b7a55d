"""One process with vLLM in it, told what to do line by line: the engine tests' only way to vLLM.

A line on stdin is a JSON object {"call": name, "arguments": {…}}; the answer on stdout is {"result": …} or
{"error": …}. Everything that vLLM logs goes to stderr. Scheduler and worker live in this one process (a second tensor-
parallel rank does not), so that engines follow each other in seconds and faults can be switched on in place.
"""

import gc
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

ENGINE = {
    "dtype": "float32",
    "block_size": 32,
    "kv_cache_memory_bytes": 64 << 20,
    "max_model_len": 2048,
    "max_num_seqs": 8,
    "enable_prefix_caching": False,
    "enforce_eager": True,
    "seed": 0,
    "skip_tokenizer_init": True,
    "disable_log_stats": False,
}
IDLE_SECONDS_MAX = 240.0
"""Far beyond the time that a few dozen blocks need on any disk."""


class Driver:
    """The calls. At most one engine lives at a time."""

    def __init__(self) -> None:
        self._llm: Any = None
        self._faults: Any = None

    def hello(self) -> str:
        """Import vLLM, so that a later timeout measures an engine only."""
        import vllm

        # Loads the rest, which vLLM does late.
        assert vllm.LLM is not None
        return str(vllm.__version__)

    def start(self, model: str, engine: dict[str, Any], connector: dict[str, Any] | None, faults: bool) -> float:
        """Start an engine, with our connector unless `connector` is None; return the seconds it took."""
        if faults:
            import faults as module

            self._faults = module.install()
        # Each worker of a tensor-parallel engine gets a processor of its own.
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "0|1" if engine.get("tensor_parallel_size") == 2 else "auto"
        from vllm import LLM

        options = {**ENGINE, **engine, "model": model}
        if connector is not None:
            options["kv_transfer_config"] = {
                "kv_connector": "PyKVCacheConnector",
                "kv_connector_module_path": "pykvcache_connector.connector",
                "kv_role": "kv_both",
                "kv_connector_extra_config": connector,
            }
        if options.get("tensor_parallel_size", 1) == 1:
            from vllm.v1.executor.uniproc_executor import UniProcExecutor

            options["distributed_executor_backend"] = UniProcExecutor
        begun = time.monotonic()
        self._llm = LLM(**options)
        _record_all_steps(self._llm.llm_engine)
        return time.monotonic() - begun

    def configure(self, model: str, transfer: dict[str, Any] | None, options: dict[str, Any]) -> dict[str, Any]:
        """Make an engine's configuration only; return its connector and hash."""
        from vllm.config import KVTransferConfig
        from vllm.engine.arg_utils import AsyncEngineArgs

        given = None if transfer is None else KVTransferConfig(**transfer)
        config = AsyncEngineArgs(model=model, kv_transfer_config=given, **options).create_engine_config()
        found = config.kv_transfer_config
        return {
            "connector": found and found.kv_connector,
            "extra": found and found.kv_connector_extra_config,
            "hash": config.cache_config.prefix_caching_hash_algo,
        }

    def generate(
        self, prompts: list[list[int]], max_tokens: int, salt: str | None = None, prompt_logprobs: int | None = None
    ) -> list[dict[str, Any]]:
        """Run prompts together; return the new tokens and how many of the prompt's came from a cache."""
        sampling = _greedy(max_tokens, prompt_logprobs=prompt_logprobs)
        outputs = self._llm.generate(_as_prompts(prompts, salt), sampling, use_tqdm=False)
        return [_as_output(output) for output in outputs]

    def wait_idle(self) -> None:
        """Let the engine step, with prompts too short to be stored, until its worker has nothing to do."""
        deadline = time.monotonic() + IDLE_SECONDS_MAX
        quiet = 0
        while quiet < 2:
            self.generate([[3, 4, 5]], 2)
            metrics = self.metrics()
            busy = [metrics.get(f"vllm:pykvcache_{name}", 0) for name in ("staging_slots_used", "queue_depth")]
            quiet = 0 if any(busy) else quiet + 1
            if time.monotonic() > deadline:
                raise TimeoutError(f"slots used and blocks waiting: {busy}")

    def metrics(self) -> dict[str, float]:
        """Return this engine's metrics; labels other than vLLM's own are appended, histograms give count and sum."""
        values: dict[str, float] = {}
        for metric in self._llm.get_metrics():
            labels = {k: v for k, v in metric.labels.items() if k not in ("model_name", "engine", "rank")}
            name = "|".join((metric.name, *labels.values()))
            if hasattr(metric, "value"):
                values[name] = max(values.get(name, 0), metric.value)
            elif hasattr(metric, "count"):
                values[f"{name}_count"], values[f"{name}_sum"] = metric.count, metric.sum
        return values

    def reset(self) -> bool:
        """Empty the prefix cache, the connector's included, as after a change of weights."""
        return bool(self._llm.reset_prefix_cache(reset_connector=True))

    def abort_one(self, prompts: list[list[int]], victim: int, max_tokens: int) -> list[dict[str, Any] | None]:
        """Hold reads, start all prompts, abort one whose load is in flight, let go; return the outputs."""
        self._faults.hold_reads()
        engine = self._llm.llm_engine
        # The engine lengthens a request's id; outputs carry ours.
        for index, prompt in enumerate(_as_prompts(prompts)):
            engine.add_request(f"r{index}", prompt, _greedy(max_tokens))
        self._step_until(self._faults.held)
        engine.abort_request([f"r{victim}"])
        for _ in range(3):
            engine.step()
        self._faults.release()
        finished = self._step_until(lambda: not engine.has_unfinished_requests())
        found = [finished.get(f"r{index}") for index in range(len(prompts))]
        return [None if output is None else _as_output(output) for output in found]

    def load_amid_stores(self, prompt: list[int], reads: int, stores: int, max_tokens: int) -> dict[str, Any]:
        """Run a prompt whose load hangs after some reads until all stores, held so far, are over; return the output."""
        self._faults.hold_reads(after=reads)
        engine = self._llm.llm_engine
        engine.add_request("r", *_as_prompts([prompt]), _greedy(max_tokens))
        self._step_until(self._faults.held_reads)
        self._faults.release_writes()
        self._step_until(lambda: self._stores_over() == stores)
        self._faults.release()
        (output,) = self._step_until(lambda: not engine.has_unfinished_requests()).values()
        return _as_output(output)

    def _stores_over(self) -> float:
        metrics = self.metrics()
        return sum(metrics[f"vllm:pykvcache_{name}"] for name in ("store_blocks", "declines|store|staging_full"))

    def _step_until(self, condition: Callable[[], Any]) -> dict[str, Any]:
        """Let the engine step until a condition holds; return what was finished meanwhile, by request."""
        deadline = time.monotonic() + IDLE_SECONDS_MAX
        finished: dict[str, Any] = {}
        while not condition():
            assert time.monotonic() < deadline, self.metrics()
            finished |= {output.request_id: output for output in self._llm.llm_engine.step() if output.finished}
        return finished

    def fault(self, name: str, arguments: dict[str, Any]) -> Any:
        """Switch a fault on or off, or ask about it."""
        return getattr(self._faults, name)(**arguments)

    def meet(self, mine: str, other: str) -> None:
        """Meet another process: create a file, then wait for its file."""
        Path(mine).touch()
        while not Path(other).exists():
            os.sched_yield()

    def stop(self) -> None:
        """Shut the engine down as vLLM does at its end, with the faults still on; then clean up for the next."""
        from vllm.distributed.kv_transfer import ensure_kv_transfer_shutdown
        from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

        if self._llm is not None:
            self._llm.llm_engine.engine_core.shutdown()
        self._llm = None
        if self._faults is not None:
            self._faults.remove()
            self._faults = None
        gc.collect()
        # Only an engine that failed to start leaves something here.
        ensure_kv_transfer_shutdown()
        cleanup_dist_env_and_memory()


def _record_all_steps(engine: Any) -> None:
    """Count steps without output tokens too, as vLLM's server does; the offline engine of 0.22 drops their numbers."""
    get_output = engine.engine_core.get_output

    def get_and_record() -> Any:
        outputs = get_output()
        if not outputs.outputs and outputs.scheduler_stats is not None:
            engine.logger_manager.record(scheduler_stats=outputs.scheduler_stats, iteration_stats=None)
            outputs.scheduler_stats = None
        return outputs

    engine.engine_core.get_output = get_and_record


def _as_prompts(prompts: list[list[int]], salt: str | None = None) -> list[Any]:
    extra = {} if salt is None else {"cache_salt": salt}
    return [{"prompt_token_ids": tokens, **extra} for tokens in prompts]


def _greedy(max_tokens: int, **options: Any) -> Any:
    from vllm import SamplingParams

    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False, **options)


def _as_output(output: Any) -> dict[str, Any]:
    return {
        "tokens": list(output.outputs[0].token_ids),
        "cached": output.num_cached_tokens or 0,
        "logprobs": len(output.prompt_logprobs or ()),
    }


def main() -> None:
    """Answer calls until stdin ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    driver = Driver()
    for line in sys.stdin:
        request = json.loads(line)
        answer: dict[str, Any]
        try:
            answer = {"result": getattr(driver, request["call"])(**request["arguments"])}
        except Exception as error:
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
