"""The parts of the harness that make vLLM pods, without a cluster."""

import tarfile

import pytest

from harness import oci, prometheus, vllm_image, vllm_pods


def test_the_example_for_the_cpu_has_the_label_only_where_a_pool_is_named():
    labelled, plain = vllm_pods.example(pool="p"), vllm_pods.example()
    assert labelled["spec"]["template"]["metadata"]["labels"]["pykvcache.io/pool"] == "p"
    del labelled["spec"]["template"]["metadata"]["labels"]["pykvcache.io/pool"]
    assert labelled == plain


def test_the_last_prompt_begins_as_the_first_does_and_the_others_begin_differently():
    first, second, third = vllm_pods.prompts()
    assert first[:250] == third[:250]
    assert first[:10] != second[:10]
    assert vllm_pods.prompts(seed=1)[0] != first


def test_a_pod_is_scraped_where_its_annotations_say_and_not_without_them_or_an_address():
    metadata = {"namespace": "n", "name": "p"}
    asked = metadata | {"annotations": {"prometheus.io/scrape": "true", "prometheus.io/port": "8000"}}
    status = {"podIP": "10.0.0.1"}
    found = prometheus._target({"metadata": asked, "status": status})
    assert found == {"targets": ["10.0.0.1:8000"], "labels": {"namespace": "n", "pod": "p"}}
    assert prometheus._target({"metadata": metadata, "status": status}) is None
    assert prometheus._target({"metadata": asked, "status": {}}) is None


@pytest.mark.parametrize(
    "path",
    ["py_kvcache-0.2.0.dist-info", "_py_kvcache.pth", "pip", "torch/include", "kubernetes/client/__init__.py"],
)
def test_nothing_of_ours_and_of_our_tools_is_in_vllms_image(path):
    entry = tarfile.TarInfo(f"{vllm_image.SITE}/{path}")
    assert vllm_image._Filter(vllm_image._site())(entry) is None


def test_what_vllm_needs_is_in_its_image_readable_by_every_user():
    entry = tarfile.TarInfo(f"{vllm_image.SITE}/torch/bin/torch_shm_manager")
    entry.mode = 0o700
    kept = vllm_image._Filter(vllm_image._site())(entry)
    assert kept is not None
    assert kept.mode == 0o744


def test_a_file_can_be_left_out_of_an_image(tmp_path):
    root = tmp_path / "root"
    root.mkdir()
    for name in ("kept", "left"):
        (root / name).write_text(name)
    archive = tmp_path / "image.tar"

    def accept(entry):
        return None if entry.name.endswith("left") else entry

    oci.write_image(archive, name="localhost/x:1", entries=[("opt", root)], config={"Cmd": ["x"]}, accept=accept)
    with tarfile.open(archive) as outer:
        layer = max(outer.getmembers(), key=lambda member: member.size)
        with tarfile.open(fileobj=outer.extractfile(layer)) as inner:
            assert inner.getnames() == ["opt", "opt/kept"]
