"""vLLM's plugin (entry point `vllm.general_plugins`): gives an injected vLLM the cache, or lets it start without.

vLLM calls `register` in each of its processes, before it has a configuration; in `vllm serve` even before it reads its
command line. Outside of injected containers, where `PYKVCACHE_INJECTED` is not set, `register` does nothing.

The image's Python and vLLM are unknown here. So this module, the plugin's others (`engine_args`, `preflight`, `reach`,
`transfer_configs`) and `pykvcache_contract.names` keep to the standard library and to syntax of Python 3.8, and no
exception leaves `register`.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import sys

from pykvcache_connector import engine_args, preflight, transfer_configs
from pykvcache_contract import names

logger = logging.getLogger("vllm.pykvcache")
"""vLLM's handlers print what is logged below `vllm`."""

ENGINE_ARGUMENTS_MODULE = "vllm.engine.arg_utils"


def register() -> None:
    """Prepare this process; vLLM may call it more than once."""
    if not os.environ.get(names.INJECTED_VARIABLE):
        return
    try:
        clean_command_line(sys.argv)
        if creates_engines():
            engine_args.install(os.environ.get(names.TRANSFER_CONFIG_VARIABLE, ""))
    except Exception as error:  # whatever it is, vLLM must start
        logger.warning("py-kvcache: its vLLM plugin failed, please report it: %s: %s", type(error).__name__, error)


def clean_command_line(arguments: list[str]) -> None:
    """Take what injection added out of a command line, in place, if this vLLM cannot have the cache.

    An older vLLM would end at flags and fields that it does not know.
    """
    cleaned = transfer_configs.without_our_arguments(arguments)
    if cleaned == arguments:
        return
    reason = preflight.why_unfit()
    if reason:
        engine_args.say_off(reason)
        arguments[:] = cleaned


def creates_engines() -> bool:
    """Return whether this process may make an engine's configuration; vLLM's helpers must not import more than needed.

    Workers and engine processes are children of multiprocessing; a program of its own inspects models.
    """
    if ENGINE_ARGUMENTS_MODULE in sys.modules:
        return True
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    is_inspector = spec is not None and spec.name.startswith("vllm.model_executor.")
    return multiprocessing.parent_process() is None and not is_inspector
