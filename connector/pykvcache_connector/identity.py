"""The fingerprint: everything that changes the bytes of a block, gathered once at start-up.

Facts: a model's path or name says nothing about its weights; a fine-tune keeps the configuration and changes almost
every weight. Therefore a local model is identified by a sample of its weight files' contents, a model of the hub by the
name and the commit of its snapshot. Modification times and absolute paths are left out, so that copies on several nodes
share.
"""

import hashlib
import os
from typing import Any

from pykvcache_contract.keys import Fingerprint, fingerprint_of
from pykvcache_contract.paths import FORMAT_VERSION

WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
SAMPLES_PER_FILE = 16
SAMPLE_SIZE_BYTES = 64 * 1024


def weights_identity(model: str, revision: str | None) -> str:
    """Return what identifies the weights: a digest of sampled contents, or the name on the hub and the commit.

    A directory without any file that looks like weights is identified by all its files, never by nothing.

    Args:
        model: local directory, local file, or a name on the hub.
    """
    if os.path.isdir(model):
        paths = sorted(entry.path for entry in os.scandir(model) if entry.is_file())
        return _digest_files([path for path in paths if path.endswith(WEIGHT_SUFFIXES)] or paths)
    if os.path.isfile(model):
        return _digest_files([model])
    return f"hub:{model}@{_hub_commit(model, revision) or revision or 'main'}"


def _digest_files(paths: list[str]) -> str:
    digest = hashlib.sha256()
    for path in paths:
        size = os.path.getsize(path)
        digest.update(f"{os.path.basename(path)}:{size}\n".encode())
        with open(path, "rb") as file:
            for number in range(SAMPLES_PER_FILE):
                file.seek(max(0, size - SAMPLE_SIZE_BYTES) * number // (SAMPLES_PER_FILE - 1))
                digest.update(file.read(SAMPLE_SIZE_BYTES))
    return f"sampled-sha256:{digest.hexdigest()}"


def _hub_commit(model: str, revision: str | None) -> str | None:
    """Return the commit of the snapshot in the local hub cache; its path is …/snapshots/<commit>/config.json."""
    try:
        from huggingface_hub import try_to_load_from_cache
    except ImportError:
        return None
    path = try_to_load_from_cache(model, "config.json", revision=revision)
    return os.path.basename(os.path.dirname(path)) if isinstance(path, str) else None


def describe(
    *,
    model: str,
    engine: dict[str, Any],
    layout: dict[str, Any],
    weights: str,
    hashing: dict[str, Any],
    epoch: str | None,
) -> dict[str, Any]:
    """Return the identity of one rank's blocks, as written to the fingerprint's config.json.

    Args:
        model: name or path, for people; not part of the fingerprint.
        engine: from `vllm_api.describe_model`, with the vLLM generation.
        layout: the rank's own, from its worker.
        hashing: algorithm, seed hash and tokens of a block.
        epoch: set after the prefix cache was reset, because weights in memory may then differ from the files.
    """
    return {
        "model": model,
        "format_version": FORMAT_VERSION,
        "engine": engine,
        "weights": weights,
        "layout": layout,
        "hashing": hashing,
        "epoch": epoch,
    }


def fingerprint(identity: dict[str, Any]) -> Fingerprint:
    """Return the fingerprint of an identity: of everything in it but the model's name, which `weights` stands for."""
    return fingerprint_of({name: value for name, value in identity.items() if name != "model"})
