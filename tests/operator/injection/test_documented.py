"""docs/injection.md says what the code does: reasons, resources, names."""

from pathlib import Path

import yaml

from pykvcache_contract.injection import SkipReason
from pykvcache_operator.injection.outcome import LIBRARY_RESOURCES, SIDECAR_RESOURCES

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "injection.md").read_text()


def section(title):
    return PAGE.split(f"\n## {title}\n", 1)[1].split("\n## ", 1)[0]


def test_every_reason_to_go_without_is_in_the_table_with_its_meaning():
    rows = [line for line in section("When a pod goes without").splitlines() if line.startswith("| `")]
    assert rows == [f"| `{reason.word}` | {reason.meaning} |" for reason in SkipReason]


def test_reasons_are_words_that_differ_and_meanings_are_sentences():
    words = [reason.word for reason in SkipReason]
    assert len(set(words)) == len(words)
    for reason in SkipReason:
        assert reason.word.isalpha()
        assert reason.word[0].isupper()
        assert reason.meaning.endswith(".")


def test_resources_are_the_same_in_the_page_in_the_chart_and_in_the_code():
    values = yaml.safe_load((ROOT / "charts/py-kvcache/values.yaml").read_text())["injection"]
    assert values["library"]["resources"] == LIBRARY_RESOURCES
    assert values["sidecar"]["resources"] == SIDECAR_RESOURCES
    for name, resources in (("library", LIBRARY_RESOURCES), ("sidecar", SIDECAR_RESOURCES)):
        limits = resources["limits"]
        assert f"| `pykvcache-{name}` | {limits['cpu']}, {limits['memory']}" in section("What is added to a pod")


def test_what_an_example_pod_gets_is_named_in_the_page(injector):
    pool = injector.pool(storage={"type": "Ephemeral", "capacity": "1Gi"})
    spec = injector(injector.pod(), pool).pod["spec"]
    named = [*spec["volumes"], *spec["initContainers"]]
    paths = [mount["mountPath"] for mount in spec["containers"][0]["volumeMounts"]]
    for text in [entry["name"] for entry in named] + paths:
        assert f"`{text}`" in section("What is added to a pod")
