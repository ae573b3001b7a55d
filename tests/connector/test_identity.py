"""The fingerprint changes with everything that changes the bytes, and with nothing else."""

import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from pykvcache_connector import identity, vllm_api

ENGINE = {
    "revision": "None",
    "dtype": "bfloat16",
    "kv_cache_dtype": "auto",
    "quantization": "None",
    "hf_config": {"hidden_size": "128"},
    "tensor_parallel": 1,
    "pipeline_parallel": 1,
    "vllm": "0.32",
}
LAYOUT = {"page_sizes_bytes": [4096, 4096], "gpu_blocks": 16, "device": "cuda", "layout": "NHD", "backends": ["FLASH"]}
HASHING = {"algorithm": "sha256_cbor", "seed": "ab" * 32, "block_tokens": 256}


def fingerprint(**changes) -> str:
    parts = {"model": "/m", "engine": ENGINE, "layout": LAYOUT, "weights": "w", "hashing": HASHING, "epoch": None}
    return identity.fingerprint(identity.describe(**parts | changes))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model directory with two weight files."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    for number in range(2):
        (folder / f"model-{number}.safetensors").write_bytes(bytes([number]) * 3_000_000)
    return folder


CHANGES = [
    *({"engine": ENGINE | {name: "other"}} for name in ENGINE),
    *({"layout": LAYOUT | {name: "other"}} for name in LAYOUT),
    *({"hashing": HASHING | {name: "other"}} for name in HASHING),
    {"weights": "other"},
    {"epoch": "other"},
]


@pytest.mark.parametrize("change", CHANGES, ids=str)
def test_whatever_changes_the_bytes_changes_the_fingerprint(change):
    assert fingerprint(**change) != fingerprint()


def test_all_these_changes_give_different_fingerprints():
    assert len({fingerprint(**change) for change in CHANGES}) == len(CHANGES)


def test_the_models_path_is_told_to_people_and_changes_nothing():
    assert fingerprint(model="/another/path") == fingerprint()
    description = identity.describe(model="/m", engine=ENGINE, layout=LAYOUT, weights="w", hashing=HASHING, epoch=None)
    assert description["model"] == "/m"


# ---- weights ----


def test_copies_of_a_model_share_their_identity_whatever_their_path_and_times(model, tmp_path):
    copy = tmp_path / "elsewhere" / "renamed"
    shutil.copytree(model, copy)
    for path in copy.iterdir():
        os.utime(path, (1, 1))
    assert identity.weights_identity(str(copy), None) == identity.weights_identity(str(model), None)


@pytest.mark.parametrize("offset", [0, 1_500_000, 2_999_999])
def test_other_weights_under_the_same_names_and_sizes_are_another_model(model, offset):
    before = identity.weights_identity(str(model), None)
    path = model / "model-1.safetensors"
    content = bytearray(path.read_bytes())
    # A fine-tune changes almost every weight.
    content[offset::4096] = bytes(len(content[offset::4096]))
    content[offset] ^= 0xFF
    path.write_bytes(content)
    assert identity.weights_identity(str(model), None) != before


@pytest.mark.parametrize("change", ["longer", "renamed", "one more", "one less"])
def test_other_weight_files_are_another_model(model, change):
    before = identity.weights_identity(str(model), None)
    path = model / "model-1.safetensors"
    if change == "longer":
        path.write_bytes(path.read_bytes() + b"\1")
    elif change == "renamed":
        path.rename(model / "model-2.safetensors")
    elif change == "one more":
        (model / "model-2.safetensors").write_bytes(b"x")
    else:
        path.unlink()
    assert identity.weights_identity(str(model), None) != before


def test_files_beside_the_weights_do_not_matter(model):
    before = identity.weights_identity(str(model), None)
    (model / "README.md").write_text("changed")
    (model / "folder").mkdir()
    assert identity.weights_identity(str(model), None) == before


def test_a_directory_without_known_weights_is_identified_by_all_its_files(tmp_path):
    one, other = tmp_path / "one", tmp_path / "other"
    for folder, content in ((one, b"1"), (other, b"2")):
        folder.mkdir()
        (folder / "weights.tensors").write_bytes(content)
    assert identity.weights_identity(str(one), None) != identity.weights_identity(str(other), None)


def test_a_single_file_is_identified_by_its_content(tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(b"1" * 100)
    before = identity.weights_identity(str(path), None)
    path.write_bytes(b"2" * 100)
    assert identity.weights_identity(str(path), None) != before


def test_an_empty_weight_file_is_no_error(tmp_path):
    (tmp_path / "model.bin").touch()
    assert identity.weights_identity(str(tmp_path), None).startswith("sampled-sha256:")


def test_a_model_of_the_hub_is_identified_by_name_and_revision():
    one = identity.weights_identity("someone/no-such-model", "abc")
    assert one == "hub:someone/no-such-model@abc"
    assert identity.weights_identity("someone/no-such-model", None) == "hub:someone/no-such-model@main"
    assert identity.weights_identity("someone/another-model", "abc") != one


# ---- what vLLM says ----


def vllm_config(**changes):
    config = {"hidden_size": 128, "_name_or_path": "/m", "transformers_version": "5", "rope": {"dtype": "x", "base": 1}}
    values = {
        "model": "/m",
        "dtype": "torch.bfloat16",
        "cache_dtype": "auto",
        "quantization": None,
        "tp": 1,
        "pp": 1,
        "hf_config": config,
        "algorithm": "sha256_cbor",
        "mla": False,
    } | changes
    return SimpleNamespace(
        model_config=SimpleNamespace(
            model=values["model"],
            revision=None,
            dtype=values["dtype"],
            quantization=values["quantization"],
            hf_config=SimpleNamespace(to_dict=lambda: values["hf_config"]),
            use_mla=values["mla"],
        ),
        cache_config=SimpleNamespace(
            cache_dtype=values["cache_dtype"], prefix_caching_hash_algo=values["algorithm"], block_size=16
        ),
        parallel_config=SimpleNamespace(
            tensor_parallel_size=values["tp"],
            pipeline_parallel_size=values["pp"],
            world_size=values["tp"] * values["pp"],
        ),
    )


@pytest.mark.parametrize(
    "change",
    [
        {"dtype": "torch.float16"},
        {"cache_dtype": "fp8"},
        {"quantization": "awq"},
        {"tp": 2},
        {"pp": 2},
        {"hf_config": {"hidden_size": 256}},
    ],
    ids=str,
)
def test_the_engines_description_tells_what_changes_the_bytes(change):
    assert vllm_api.describe_model(vllm_config(**change)) != vllm_api.describe_model(vllm_config())


def test_the_engines_description_leaves_out_where_the_model_came_from():
    other = {"hidden_size": 128, "_name_or_path": "/x", "transformers_version": "6", "rope": {"dtype": "y", "base": 1}}
    assert vllm_api.describe_model(vllm_config(hf_config=other)) == vllm_api.describe_model(vllm_config())


def test_equal_seeds_give_equal_hashes_and_others_do_not(monkeypatch):
    monkeypatch.setattr(vllm_api.kv_cache_utils, "NONE_HASH", b"in use", raising=False)
    hashes = []
    for seed in ("0", "0", "1"):
        monkeypatch.setenv("PYTHONHASHSEED", seed)
        hashes.append(vllm_api.none_hash(vllm_config()))
    assert hashes[0] == hashes[1] != hashes[2]
    assert vllm_api.kv_cache_utils.NONE_HASH == b"in use"


@pytest.mark.parametrize(("algorithm", "is_versioned"), [("sha256", True), ("sha256_cbor", False)])
def test_hashes_that_pickle_belong_to_one_python_version(algorithm, is_versioned):
    name = vllm_api.hash_algorithm(vllm_config(algorithm=algorithm))
    assert ("python3." in name) is is_versioned


@pytest.mark.parametrize(
    ("change", "replicated"),
    [
        ({"mla": True, "tp": 2}, True),
        ({"mla": True}, False),
        ({"tp": 2}, False),
        ({"mla": True, "tp": 2, "pp": 2}, False),
    ],
    ids=str,
)
def test_only_mla_over_tensor_parallel_ranks_is_replicated(change, replicated):
    assert vllm_api.is_replicated(vllm_config(**change)) is replicated
