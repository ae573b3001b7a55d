"""Which container of a pod gets the cache."""

import pytest

from pykvcache_contract.injection import SkipReason
from pykvcache_operator.injection.containers import choose
from pykvcache_operator.injection.outcome import Skip

SERVER = {"name": "server", "command": ["vllm", "serve", "m"]}
SHELL = {"name": "shell", "command": ["sh", "-c", "exec vllm serve m"]}
SCRIPT = {"name": "script", "image": "acme/my-vllm:1", "command": ["/start.sh"]}
PROXY = {"name": "proxy", "image": "envoy:1", "args": ["--vllm-port=8000", "--upstream=http://vllm:8000"]}
LOGS = {"name": "logs", "image": "fluent-bit:4"}
NAME = "pykvcache.io/container"


def chosen(*containers, **annotations):
    return containers[choose({"containers": list(containers)}, annotations)]["name"]


@pytest.mark.parametrize(
    ("containers", "name"),
    [
        ([LOGS, SERVER], "server"),
        ([PROXY, SHELL, LOGS], "shell"),
        ([SCRIPT, LOGS], "script"),
        ([SCRIPT, SERVER], "server"),
        ([LOGS], "logs"),
        ([PROXY, {"name": "vllm", "image": "acme/llm:1"}], "vllm"),
        (
            [{"name": "queue-proxy"}, {"name": "kserve-container", "image": "kserve/huggingfaceserver:1"}],
            "kserve-container",
        ),
        ([LOGS, {"name": "a", "args": ["--backend=vllm"]}], "a"),
    ],
)
def test_it_is_the_one_with_the_strongest_sign_or_the_only_one(containers, name):
    assert chosen(*containers) == name


def test_the_annotation_decides_against_every_sign():
    assert chosen(SERVER, LOGS, **{NAME: "logs"}) == "logs"


@pytest.mark.parametrize("value", ["missing", "", None, 7, "x" * 5000])
def test_an_annotation_that_names_no_container_names_those_there_are(value):
    with pytest.raises(Skip, match="the containers of the pod are server, logs") as caught:
        chosen(SERVER, LOGS, **{NAME: value})
    assert caught.value.reason is SkipReason.BAD_ANNOTATION
    assert len(caught.value.message) < 300


def test_several_are_refused_by_name_with_the_annotation_that_decides():
    with pytest.raises(
        Skip, match=r"^Several containers could run vLLM: server, shell\. .*pykvcache.io/container"
    ) as caught:
        chosen(SERVER, LOGS, SHELL)
    assert caught.value.reason is SkipReason.NO_VLLM_CONTAINER


def test_none_among_several_is_refused_and_long_lists_are_cut():
    many = [{"name": f"c{index}", "image": "x"} for index in range(30)]
    with pytest.raises(Skip, match=r"^No container is known to run vLLM: c0, c1, c2, c3, c4 and 25 more\."):
        chosen(*many)


@pytest.mark.parametrize("containers", [None, [], {}, "x", [None], ["vllm"], [[]]])
def test_a_pod_without_containers_is_skipped(containers):
    with pytest.raises(Skip):
        choose({"containers": containers}, {})
