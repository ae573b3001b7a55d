"""vLLM's kv-transfer-config as it names our connector: for the command line, injection and benchmarks alike."""

import json
from collections.abc import Mapping
from typing import Any

from pykvcache_contract.names import (
    CONNECTOR_CLASS,
    CONNECTOR_MODULE,
    HASH_ALGORITHM,
    HASH_FLAG,
    SPEC_CLASS,
    SPEC_MODULE,
    TRANSFER_CONFIG_FLAG,
)


def transfer_config(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration; `options` are the connector's and vLLM's `block_size`."""
    return {
        "kv_connector": CONNECTOR_CLASS,
        "kv_connector_module_path": CONNECTOR_MODULE,
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",  # vLLM's default fails the request
        "kv_connector_extra_config": {"spec_name": SPEC_CLASS, "spec_module_path": SPEC_MODULE, **options},
    }


def to_json(config: Mapping[str, Any]) -> str:
    """Return a configuration as one argument or variable."""
    return json.dumps(config, separators=(",", ":"))


def vllm_flags(options: Mapping[str, Any]) -> list[str]:
    """Return the flags of `vllm serve` for a pool."""
    return [HASH_FLAG, HASH_ALGORITHM, TRANSFER_CONFIG_FLAG, to_json(transfer_config(options))]
