"""vLLM's `EngineArgs.create_engine_config`, so that an engine gets the cache, and starts without it where it cannot.

Facts: every way to an engine (command line, config file, offline `LLM`) makes an `EngineArgs` and calls this method, in
the process that starts the engine and in each API server. vLLM refuses some combinations only because a connector is
configured, in this method or, for a few, when the engine is already starting. Which ones differs from release to
release.

Therefore: the method is tried with us, and once more without us if that fails; what it refuses then is not our doing
and is raised. What is known to fail later is asked of the finished configuration. Syntax of Python 3.8, see `plugin`.
"""

from __future__ import annotations

import copy
import functools
import json
import logging
from collections.abc import Callable
from typing import Any

from pykvcache_connector import preflight, reach, transfer_configs
from pykvcache_contract.names import CONNECTOR_CLASS, CONNECTOR_MODULE, HASH_ALGORITHM, MULTI_CONNECTOR

logger = logging.getLogger("vllm.pykvcache")

_MARK = "_pykvcache_wraps"
_REASON_LENGTH_MAX = 600
"""vLLM's validation errors show whole configurations."""


def install(transfer_config: str) -> None:
    """Wrap the method, once in a process.

    Args:
        transfer_config: JSON for engines whose user gives none; empty: ours comes with the arguments, if at all.
    """
    from vllm.engine.arg_utils import EngineArgs

    original = EngineArgs.create_engine_config
    if hasattr(original, _MARK):
        return

    @functools.wraps(original)
    def create_engine_config(self: Any, *args: Any, **options: Any) -> Any:
        is_headless = bool(options.get("headless", args[1:2] == (True,)))
        make = functools.partial(original, self, *args, **options)
        return create(self, make, transfer_config, is_headless=is_headless)

    setattr(create_engine_config, _MARK, True)
    EngineArgs.create_engine_config = create_engine_config


def say_off(reason: str) -> None:
    """Log, once for a process, why vLLM runs without the cache."""
    logger.warning("py-kvcache is off: %s. vLLM starts without the cache.", reason)


def create(arguments: Any, original: Callable[[], Any], transfer_config: str, *, is_headless: bool = False) -> Any:
    """Return the engine's configuration: with the cache, or without it and the reason in the log.

    Args:
        arguments: vLLM's EngineArgs; changed as vLLM itself changes them, and in what concerns us.
        original: makes a configuration of the arguments as they are.
        transfer_config: see `install`.
        is_headless: the engines' server is another process.

    Raises:
        Exception: what vLLM says to the user's own arguments.
    """
    before = _snapshot(arguments)
    try:
        config, reason = _attempt(arguments, original, transfer_config, is_headless=is_headless)
    except Exception as error:  # ours: what vLLM says is caught where it is called
        config, reason = None, f"a mistake of ours, please report it: {_brief(error)}"
    if config is not None:
        return config
    if not reason:
        return original()
    vars(arguments).clear()
    vars(arguments).update(before)
    arguments.kv_transfer_config = transfer_configs.without_ours(getattr(arguments, "kv_transfer_config", None))
    config = original()
    say_off(reason)
    return config


def _snapshot(arguments: Any) -> dict[str, Any]:
    """Return the arguments' values; a first attempt must leave nothing behind for the second."""
    try:
        return copy.deepcopy(vars(arguments))
    except Exception:  # users may put anything into them
        return dict(vars(arguments))


def _adopt(arguments: Any, transfer_config: str) -> str:
    """Give arguments without a kv-transfer-config ours; return why the cache stays off, empty if it does not."""
    given = getattr(arguments, "kv_transfer_config", None)
    if given is None and transfer_config:
        try:
            values = json.loads(transfer_config)
            from vllm.config import KVTransferConfig

            arguments.kv_transfer_config = KVTransferConfig(**values)
        except Exception as error:  # not JSON, or fields that this vLLM does not know
            return f"{preflight.image()}, which does not take the kv-transfer-config of injection: {_brief(error)}"
        if arguments.prefix_caching_hash_algo == type(arguments).prefix_caching_hash_algo:
            arguments.prefix_caching_hash_algo = HASH_ALGORITHM
    elif given is not None and transfer_config and not transfer_configs.has_ours(given):
        name = transfer_configs.connector(given)
        return f"vLLM is given a kv-transfer-config of its own, with {name}. Leave it out to have the cache"
    return ""


def _attempt(
    arguments: Any, original: Callable[[], Any], transfer_config: str, *, is_headless: bool
) -> tuple[Any, str]:
    """Return a configuration with us, or None and why there is none; no reason, where nobody asks for us."""
    reason = _adopt(arguments, transfer_config)
    given = getattr(arguments, "kv_transfer_config", None)
    if reason or not transfer_configs.has_ours(given):
        return None, reason
    if getattr(arguments, "kv_offloading_size", None) is not None:
        return None, "vLLM is told to keep KV blocks in host memory. Leave out --kv-offloading-size to have the cache"
    reason = preflight.why_unfit() or _why_not_merged(given)
    if reason:
        return None, reason
    try:
        config = original()
    except Exception as error:  # perhaps because of us, perhaps not: the next attempt shows it
        return None, f"vLLM does not start with it: {_brief(error)}"
    reason = _why_not_later(config) or reach.why_too_far(arguments, config, is_headless=is_headless)
    if reason:
        return None, reason
    _keep_inputs_closed(arguments, config)
    _make_known(arguments.kv_transfer_config)
    return config, ""


def _why_not_merged(transfer_config: Any) -> str:
    """Return why we cannot be one of several connectors with this vLLM.

    Up to 0.25 or so a MultiConnector shows blocks only to the connector that loads them. The others do not see that a
    block which they still copy is given to another request: they would store its bytes under the wrong key.
    """
    if transfer_configs.connector(transfer_config) != MULTI_CONNECTOR:
        return ""
    from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector

    if "new_empty" not in MultiConnector.update_state_after_alloc.__code__.co_names:
        return ""
    return f"{preflight.image()}, whose MultiConnector hides blocks from its parts. Use vLLM 0.26 or later to have both"


def _why_not_later(config: Any) -> str:
    """Return what vLLM will refuse when the engine starts, only because there is a connector."""
    if getattr(config.model_config, "is_encoder_decoder", False):
        return "vLLM has no KV connectors for encoder-decoder models"
    return ""


def _keep_inputs_closed(arguments: Any, config: Any) -> None:
    """Take back what vLLM 0.32 opens for everyone that loads KV: clients may send embeddings in place of images.

    It means instances that get their KV from another one. Ours computes its own, and whether clients may send tensors
    is the user's decision (`--enable-mm-embeds`).
    """
    inputs: Any = getattr(config.model_config, "multimodal_config", None)
    opened = getattr(inputs, "allow_missing_mm_embeddings", False)
    is_consumer = getattr(getattr(config, "ec_transfer_config", None), "is_ec_consumer", False)
    if opened and not is_consumer and transfer_configs.connector(config.kv_transfer_config) == CONNECTOR_CLASS:
        inputs.allow_missing_mm_embeddings = False
        inputs.enable_mm_embeds = bool(arguments.enable_mm_embeds)


def _make_known(transfer_config: Any) -> None:
    """Tell vLLM our module where it asks by the class's name: for the statistics of a MultiConnector's parts."""
    if transfer_configs.connector(transfer_config) != MULTI_CONNECTOR:
        return
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    try:
        KVConnectorFactory.register_connector(CONNECTOR_CLASS, CONNECTOR_MODULE, CONNECTOR_CLASS)
    except ValueError:
        pass  # known already: a second engine in this process


def _brief(error: Exception) -> str:
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return text if len(text) <= _REASON_LENGTH_MAX else text[:_REASON_LENGTH_MAX] + "…"
