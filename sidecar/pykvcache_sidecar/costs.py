"""What a byte of a fingerprint's blocks costs to recompute, relative to the other fingerprints of a pool.

Facts: computing a prompt takes about two floating-point operations per parameter that a token meets; what a token
leaves in the KV cache depends on other numbers (layers, KV heads, latent attention). Llama 3 70B takes nine times as
many operations a token as 8B and leaves 2.5 times as many bytes, so a byte of its blocks is worth 3.5 of the other's.
What they mean: both numbers stand in a fingerprint's config.json, as the connector wrote it (docs/format.md), and their
quotient orders models well enough, because only the ratio between two models of one pool counts.

Left out, because it is equal or small between models of one pool: attention over what came before, the speed of
quantised weights, embeddings. A fingerprint that cannot be estimated counts like the median of the others.

`read_costs` reads one small file a fingerprint; all else is pure. Blocking calls, any thread.
"""

import ast
import os
import statistics
from collections.abc import Mapping
from typing import Any

from pykvcache_contract.errors import PoolUnavailableError
from pykvcache_contract.paths import CONFIG_FILE
from pykvcache_storage.documents import read_document
from pykvcache_storage.inventory import fingerprint_directories

RATIO_MAX = 16.0
"""Costs lie between the median's sixteenth and its sixteenfold: models in use lie within, a misread one must too."""

_HIDDEN = ("hidden_size", "n_embd", "d_model")
_LAYERS = ("num_hidden_layers", "n_layer", "num_layers")
_HEADS = ("num_attention_heads", "n_head")
_KV_HEADS = ("num_key_value_heads", "num_kv_heads")
_INTERMEDIATE = ("intermediate_size", "ffn_dim", "n_inner", "d_ff")
_UNGATED_WHEN = "activation_function"
"""How configurations of the older kind (GPT-2, OPT), whose MLP has two matrices instead of three, name it."""


def read_costs(pool_directory: str) -> dict[str, float]:
    """Return the relative cost of each fingerprint whose config.json tells enough, by folder; the median is 1.0.

    Raises:
        TransientError: the pool cannot be listed.
    """
    estimates: dict[str, float | None] = {}
    for name in fingerprint_directories(pool_directory):
        try:
            document = read_document(os.path.join(pool_directory, name, CONFIG_FILE), remedy="It counts as average.")
        except (FileNotFoundError, PoolUnavailableError):
            continue
        estimates[name] = operations_per_byte(document.get("identity"))
    return _relative(estimates)


def relative_costs(identities: Mapping[str, Any]) -> dict[str, float]:
    """Return costs relative to their median; identities that tell too little are left out."""
    return _relative({name: operations_per_byte(identity) for name, identity in identities.items()})


def _relative(estimates: Mapping[str, float | None]) -> dict[str, float]:
    known = {name: estimate for name, estimate in estimates.items() if estimate is not None}
    if not known:
        return {}
    median = statistics.median(known.values())
    return {name: min(max(value / median, 1 / RATIO_MAX), RATIO_MAX) for name, value in known.items()}


def operations_per_byte(identity: Any) -> float | None:
    """Return the floating-point operations that made one byte of a rank's blocks; None if the identity does not tell.

    Ranks share the work. Where every rank of a tensor-parallel group holds the same bytes (latent attention), only one
    of them writes, and its byte stands for the work of all.
    """
    if not isinstance(identity, dict):
        return None
    engine, layout, hashing = (_section(identity, name) for name in ("engine", "layout", "hashing"))
    model = parse_model(engine.get("hf_config"))
    operations = operations_per_token(model)
    size = _bytes_per_token(layout, hashing.get("block_tokens"))
    if operations is None or size is None:
        return None
    ranks = _first(engine, ("pipeline_parallel",)) or 1
    if "kv_lora_rank" not in model:
        ranks *= _first(engine, ("tensor_parallel",)) or 1
    return operations / ranks / size


def operations_per_token(model: Mapping[str, Any]) -> float | None:
    """Return the floating-point operations of a token's way through the layers: 2 × the parameters that it meets.

    >>> llama_8b = dict(hidden_size=4096, num_hidden_layers=32, num_attention_heads=32)
    >>> operations_per_token(llama_8b | dict(num_key_value_heads=8, intermediate_size=14336)) / 1e9
    13.958643712
    """
    hidden, layers, heads = _first(model, _HIDDEN), _first(model, _LAYERS), _first(model, _HEADS)
    if hidden is None or layers is None or heads is None:
        return None
    head_dim = _first(model, ("head_dim",)) or hidden // heads
    attention = 2 * hidden * head_dim * (heads + (_first(model, _KV_HEADS) or heads))
    dense = _first(model, _INTERMEDIATE) or 4 * hidden
    experts = _expert_width(model, dense)
    dense_layers = layers if experts is None else min(layers, _first(model, ("first_k_dense_replace",)) or 0)
    width = dense_layers * dense + (layers - dense_layers) * (experts or 0)
    matrices = 2 if _UNGATED_WHEN in model else 3
    return 2.0 * (layers * attention + matrices * hidden * width)


def _expert_width(model: Mapping[str, Any], dense: int) -> int | None:
    """Return the width of all experts that one token meets in a layer; None for a model without experts."""
    chosen = _first(model, ("num_experts_per_tok",))
    if chosen is None:
        return None
    width = _first(model, ("moe_intermediate_size",)) or dense
    shared = (_first(model, ("n_shared_experts",)) or 0) * width
    return chosen * width + (_first(model, ("shared_expert_intermediate_size",)) or shared)


def parse_model(hf_config: Any) -> dict[str, Any]:
    """Return a model's configuration with values instead of their text; that of the language part stands on top."""
    if not isinstance(hf_config, dict):
        return {}
    model = {str(name): _parse(value) for name, value in hf_config.items()}
    text = model.get("text_config")
    return {**model, **text} if isinstance(text, dict) else model


def _parse(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return ast.literal_eval(value)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return None


def _bytes_per_token(layout: Mapping[str, Any], block_tokens: Any) -> float | None:
    """Return the KV bytes that one rank keeps of a token, all groups together."""
    pages, gpu_blocks = layout.get("page_sizes_bytes"), _first(layout, ("gpu_blocks",))
    if not isinstance(pages, list) or not pages or gpu_blocks is None:
        return None
    groups = pages if isinstance(pages[0], list) else [pages]
    tokens = block_tokens if isinstance(block_tokens, list) else [block_tokens] * len(groups)
    if len(tokens) != len(groups) or not all(_is_count(count) for count in tokens):
        return None
    if not all(isinstance(sizes, list) and sizes and all(map(_is_count, sizes)) for sizes in groups):
        return None
    return float(sum(sum(sizes) * gpu_blocks / count for sizes, count in zip(groups, tokens, strict=True)))


def _section(identity: Mapping[str, Any], name: str) -> dict[str, Any]:
    section = identity.get(name)
    return section if isinstance(section, dict) else {}


def _first(values: Mapping[str, Any], names: tuple[str, ...]) -> int | None:
    return next((values[name] for name in names if _is_count(values.get(name))), None)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0
