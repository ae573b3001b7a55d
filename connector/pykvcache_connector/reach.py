"""Whether an engine stays within its pod, asked of its finished configuration.

Facts: vLLM loads a connector in every worker, ends where one of them cannot, and a server that has none ends at the
statistics of an engine that has one. In other pods the library may be missing: a pod knows nothing of their labels.

Therefore: the cache is for engines whose workers and whose server are in one pod. Syntax of Python 3.8, see `plugin`.
"""

from __future__ import annotations

from typing import Any

_LOCAL_EXECUTORS = ("mp", "uni", "UniProcExecutor", "MultiprocExecutor")
"""By vLLM's short names, and by those of its own classes, which offline programs may give."""
_REMEDY = (
    "vLLM would fail where the library is missing. Run each engine and its server in one pod, or take the label away, "
    "install py-kvcache in the image and give vLLM the kv-transfer-config yourself"
)


def why_too_far(arguments: Any, config: Any, *, is_headless: bool) -> str:
    """Return why an engine may reach into other pods, and what to change; empty if it does not.

    Args:
        arguments: vLLM's EngineArgs that the configuration was made of.
        config: vLLM's VllmConfig.
        is_headless: this process starts engines for a server elsewhere.
    """
    spread = _spread(arguments, config.parallel_config, is_headless=is_headless)
    return spread and f"this engine may run in several pods ({spread}), and {_REMEDY}"


def _spread(arguments: Any, parallel: Any, *, is_headless: bool) -> str:
    executor = _name(parallel.distributed_executor_backend)
    if executor and executor not in _LOCAL_EXECUTORS:
        return f"its executor is {executor}"
    if is_headless:
        return "--headless"
    if getattr(parallel, "nnodes_within_dp", 1) > 1:
        return "--nnodes"
    # Offline, each process of a data-parallel group has an engine and a server of its own, as behind a load balancer.
    if getattr(arguments, "data_parallel_size", 1) <= 1:
        return ""
    if parallel.data_parallel_backend == "ray":
        return "--data-parallel-backend ray"
    is_balanced = parallel.data_parallel_external_lb or parallel.data_parallel_hybrid_lb
    if parallel.data_parallel_size_local != parallel.data_parallel_size and not is_balanced:
        return "--data-parallel-size-local"
    return ""


def _name(executor: Any) -> str:
    """Return how an executor is called; one that is not vLLM's own with its module, which makes it another."""
    if not isinstance(executor, type):
        return executor or ""
    is_of_vllm = executor.__module__.startswith("vllm.")
    return executor.__name__ if is_of_vllm else f"{executor.__module__}.{executor.__name__}"
