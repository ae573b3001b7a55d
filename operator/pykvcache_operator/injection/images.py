"""What the name of an image says about vLLM."""

import re

_SERVER_WORDS = frozenset(
    {
        *("vllm", "openai", "server", "serving", "release", "nightly", "dev", "repo", "base"),
        *("cpu", "gpu", "cuda", "rocm", "xpu", "tpu", "hpu", "gaudi", "neuron", "amd", "nvidia", "intel"),
        *("arm64", "aarch64", "x86", "amd64", "ubi8", "ubi9", "rhel8", "rhel9", "rhel10", "ubuntu"),
    }
)
_NUMBERED = re.compile(r"v?\d+|cu\d+")
_SPLIT = re.compile(r"[-_.]")


def repository(image: str) -> str:
    """Return the last part of an image's name, without tag and digest.

    >>> repository("registry:5000/vllm/vllm-openai:v0.32.0@sha256:abc")
    'vllm-openai'
    """
    return image.partition("@")[0].rsplit("/", 1)[-1].partition(":")[0].lower()


def is_vllm_image(image: str) -> bool:
    """Return whether an image's name says that it is about vLLM: the server, but also a router or a simulator.

    >>> is_vllm_image("ghcr.io/acme/my-vllm:1"), is_vllm_image("vllm/semantic-router"), is_vllm_image("lm")
    (True, False, False)
    """
    return "vllm" in _SPLIT.split(repository(image))


def is_server_image(image: str, *, has_fixed_entry_point: bool = False) -> bool:
    """Return whether an image's name says that it is vLLM's server and nothing else.

    Args:
        has_fixed_entry_point: only those that always start the server: the images `vllm-openai`. Others named vllm
            may start a shell.

    >>> is_server_image("vllm/vllm-openai-rocm:v1"), is_server_image("vllm/vllm-router"), is_server_image("my-vllm")
    (True, False, False)
    """
    words = _SPLIT.split(repository(image))
    if words[:1] != ["vllm"] or (has_fixed_entry_point and words[:2] != ["vllm", "openai"]):
        return False
    return all(word in _SERVER_WORDS or _NUMBERED.fullmatch(word) for word in words)
