"""What the scheduler's half decides once at start: is the configuration right, is the cache on, who are we.

Runs in the scheduler's process before the first request. A wrong option raises `ConfigurationError`, which stops the
engine unless the options say `when_unfit: adapt`; whatever else is wrong is a reason to stay off.
"""

import logging
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pykvcache_connector import identity as identities
from pykvcache_connector import vllm_api
from pykvcache_connector.messages import Identity, WorkerHello
from pykvcache_connector.scheduler.staging import smallest_blocks_max
from pykvcache_connector.settings import Settings
from pykvcache_connector.vllm_api import GroupShape
from pykvcache_contract import names
from pykvcache_contract.errors import ConfigurationError, PoolUnavailableError
from pykvcache_contract.units import format_size
from pykvcache_storage.pool import open_pool

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class EngineShape:
    """What of the engine the decisions depend on.

    Args:
        shapes: of the KV-cache groups.
        factor: GPU blocks of one offloaded block.
    """

    vllm_config: Any
    kv_cache_config: Any
    shapes: tuple[GroupShape, ...]
    factor: int


def check_configuration(vllm_config: Any, kv_cache_config: Any) -> str:
    """Complete vLLM's configuration, and refuse what cannot work with a message that says what to change.

    Returns:
        What was changed to make it work, where `when_unfit` is `adapt`; empty: nothing.

    Raises:
        ConfigurationError: an option must be changed.
    """
    transfer = vllm_config.kv_transfer_config
    extra = transfer.kv_connector_extra_config
    extra.setdefault("spec_name", names.SPEC_CLASS)
    extra.setdefault("spec_module_path", names.SPEC_MODULE)
    # A block that cannot be loaded is recomputed; vLLM's default would fail the request.
    transfer.kv_load_failure_policy = "recompute"
    settings = Settings.parse(extra)
    chunk, block = vllm_api.configured_chunk_tokens(vllm_config)
    if chunk is None:
        return ""
    if settings.when_unfit == "adapt":
        return _adapt_block_size(chunk, vllm_config, kv_cache_config)
    if chunk <= 0 or chunk % block:
        raise ConfigurationError(
            f"kv_connector_extra_config: block_size = {chunk} is not a multiple of vLLM's block size, {block} tokens. "
            f"Set it to {round_up(chunk, block)}."
        )
    return ""


def _adapt_block_size(chunk: int, vllm_config: Any, kv_cache_config: Any) -> str:
    block = vllm_api.gpu_block_tokens(vllm_config, kv_cache_config)
    window = vllm_api.shortest_window_tokens(kv_cache_config)
    fitting = round_up(chunk, block)
    if window is not None and fitting > window:
        fitting = max(block, window // block * block)
    if fitting == chunk:
        return ""
    vllm_config.kv_transfer_config.kv_connector_extra_config["block_size"] = fitting
    why = f"vLLM's blocks of {block} tokens" + (f" and a sliding window of {window}" if window is not None else "")
    return f"block_size = {chunk} does not suit {why}: offloaded blocks have {fitting} tokens"


def round_up(tokens: int, block: int) -> int:
    """Return the nearest multiple of a block's tokens that is not less, at least one block.

    >>> round_up(100, 32), round_up(64, 32), round_up(-1, 32)
    (128, 64, 32)
    """
    return max(block, -(-tokens // block) * block)


def why_off(engine: EngineShape, hellos: Sequence[WorkerHello], *, settings: Settings) -> str | None:
    """Return why this engine runs without the cache, with the remedy, or None.

    Args:
        hellos: of all workers that answered, by rank.
    """
    _, world = vllm_api.rank_and_world(engine.vllm_config)
    if [hello.rank for hello in hellos] != list(range(world)):
        return f"{len(hellos)} of {world} workers answered (pipeline parallelism needs vLLM 0.27 or later)"
    unavailable = [hello.unavailable for hello in hellos if hello.unavailable is not None]
    if unavailable:
        return unavailable[0]
    reason = _why_unsupported(engine)
    if reason is not None:
        return reason
    if vllm_api.none_hash(engine.vllm_config) is None:
        return (
            "block hashes are random in every process, so stored blocks would never be found again. "
            "Set PYTHONHASHSEED=0 in the environment of vLLM"
        )
    try:
        open_pool(settings.pool, create=settings.create_pool, for_writing=True)
    except PoolUnavailableError as error:
        return str(error)
    return None


def _why_unsupported(engine: EngineShape) -> str | None:
    kind = vllm_api.unsupported_layers(engine.kv_cache_config)
    if kind is not None:
        return f"models with {kind} layers are not supported yet"
    window = vllm_api.shortest_window_tokens(engine.kv_cache_config)
    longest = max(shape.tokens_per_block for shape in engine.shapes)
    if window is not None and engine.factor > 1 and longest > window:
        return (
            f"an offloaded block is longer than the model's sliding window of {window} tokens, so its front leaves "
            f"the GPU before it is whole. Set block_size in kv_connector_extra_config to at most {window}"
        )
    if vllm_api.has_runtime_scales(engine.vllm_config):
        return "calculate_kv_scales makes the KV of each process its own. Leave the flag out"
    return None


def staged_max(engine: EngineShape, hellos: Sequence[WorkerHello], *, loading: str) -> int:
    """Return how many blocks may be staged in two-phase loads, 0 where loads are streamed.

    Raises:
        ConfigurationError: the option does not fit the model, or staging memory is too small for it.
    """
    can_recompute = vllm_api.can_recompute(engine.kv_cache_config)
    if loading == "streaming" and not can_recompute:
        raise ConfigurationError(
            "loading = streaming does not work for models with several KV-cache groups or sliding windows: vLLM "
            "cannot be told of their failed loads. Leave it out, or set it to staged."
        )
    if loading == "streaming" or (loading == "auto" and can_recompute):
        return 0
    found, least = min(hello.staged_max for hello in hellos), smallest_blocks_max(engine.shapes)
    if found < least:
        size_bytes = max(max(hello.block_sizes_bytes.values()) for hello in hellos)
        # A quarter of the slots and one more stay free for stores.
        enough = -(-4 * (least + 1) // 3) * size_bytes
        raise ConfigurationError(
            f"staging is too small for this model: {found} blocks can be staged at once, {least} are needed. "
            f"Set staging to at least {enough} bytes ({format_size(enough)})."
        )
    return found


class IdentityMaker:
    """Makes the identity of a generation; reads the model's weights once.

    Raises:
        OSError: the weights cannot be read.
    """

    def __init__(self, engine: EngineShape, hellos: Sequence[WorkerHello]) -> None:
        self._engine = engine
        self._hellos = tuple(hellos)
        model = engine.vllm_config.model_config
        self._weights = identities.weights_identity(model.model, model.revision)

    def __call__(self, generation: int) -> Identity:
        """Return where blocks of a generation live; later ones than the first get a random epoch."""
        described = vllm_api.describe_model(self._engine.vllm_config)
        model = described.pop("model")
        hashing, epoch = self._hashing(), uuid.uuid4().hex if generation else None
        descriptions = tuple(
            identities.describe(
                model=model,
                engine={**described, "vllm": vllm_api.vllm_generation()},
                layout=hello.layout,
                weights=self._weights,
                hashing=hashing,
                epoch=epoch,
            )
            for hello in self._hellos
        )
        fingerprints = tuple(identities.fingerprint(description) for description in descriptions)
        logger.info("fingerprint %s, weights %s", fingerprints[0][:12], self._weights)
        return Identity(generation, fingerprints, descriptions)

    def _hashing(self) -> dict[str, Any]:
        none_hash = vllm_api.none_hash(self._engine.vllm_config)
        assert none_hash is not None
        tokens = [shape.tokens_per_block for shape in self._engine.shapes]
        return {
            "algorithm": vllm_api.hash_algorithm(self._engine.vllm_config),
            "seed": none_hash.hex(),
            "block_tokens": tokens[0] if len(tokens) == 1 else tokens,
        }
