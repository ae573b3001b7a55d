"""Writes what follows from crds/ and the chart: the chart's copies of the CRDs, manifests/install.yaml and the table of
values in docs/kubernetes.md. Run by `make gen`; tests/chart fails where a file is not what this would write.
"""

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parent.parent
CHART = ROOT / "charts" / "py-kvcache"
INSTALL = ROOT / "manifests" / "install.yaml"
VALUES_PAGE = ROOT / "docs" / "kubernetes.md"
NAMESPACE = "pykvcache-system"
TABLE_BEGIN, TABLE_END = "<!-- values: begin, written by `make gen` -->\n", "<!-- values: end -->\n"

INSTALL_HEAD = f"""# py-kvcache for Kubernetes, with the chart's defaults: kubectl apply --server-side -f install.yaml
# Written from charts/py-kvcache by `make gen`; for other values use the chart.
---
apiVersion: v1
kind: Namespace
metadata:
  name: {NAMESPACE}
  labels:
    app.kubernetes.io/name: py-kvcache
    app.kubernetes.io/part-of: py-kvcache
    pod-security.kubernetes.io/enforce: restricted
"""


@dataclass(frozen=True, slots=True)
class Value:
    """One value of the chart: its dotted path, its default and its documentation."""

    path: str
    default: object
    text: str


def chart_values(text: str) -> list[Value]:
    """Parse values.yaml: a value's documentation is the comment right above it.

    A mapping without a comment is a group; what it holds is documented one by one.

    Raises:
        SystemExit: a value has no comment.
    """
    lines = text.splitlines()
    return list(_values_of(yaml.compose(text), lines, ""))


def _values_of(node: yaml.Node | None, lines: list[str], prefix: str) -> Iterator[Value]:
    assert isinstance(node, yaml.MappingNode)
    for key, value in node.value:
        path = f"{prefix}{key.value}"
        comment = _comment_above(lines, key.start_mark.line)
        if comment:
            yield Value(path, yaml.SafeLoader("").construct_document(value), comment)
        elif isinstance(value, yaml.MappingNode) and value.value:
            yield from _values_of(value, lines, f"{path}.")
        else:
            raise SystemExit(f"values.yaml: {path} has no comment; write above it what it is for")


def _comment_above(lines: list[str], index: int) -> str:
    comment: list[str] = []
    while index and lines[index - 1].strip().startswith("#"):
        index -= 1
        comment.insert(0, lines[index].strip().lstrip("# "))
    return " ".join(comment)


def values_table(values: list[Value]) -> str:
    rows = [f"| `{value.path}` | `{json.dumps(value.default)}` | {value.text} |" for value in values]
    return "\n".join(["| value | default | meaning |", "|---|---|---|", *rows]) + "\n"


def with_table(page: str, table: str) -> str:
    """Return the page with what stands between its two marks replaced."""
    before, rest = page.split(TABLE_BEGIN)
    return before + TABLE_BEGIN + table + TABLE_END + rest.split(TABLE_END)[1]


def crd_copies() -> dict[Path, str]:
    """Return what the chart's copies of the CRDs must hold; Helm reads no file outside a chart."""
    return {CHART / "files" / "crds" / path.name: path.read_text() for path in (ROOT / "crds").glob("*.yaml")}


def render(helm: Path, *arguments: str) -> str:
    """Return the chart as Helm renders it.

    Raises:
        subprocess.CalledProcessError: Helm refused; its `stderr` says why.
    """
    command = [str(helm), "template", "py-kvcache", str(CHART), "--namespace", NAMESPACE, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def install_manifest(helm: Path) -> str:
    """Return all objects of the defaults, but those that only Helm runs."""
    documents = [part.strip("\n") for part in f"\n{render(helm, '--skip-tests')}".split("\n---\n")]
    kept = [part for part in documents if part and "app.kubernetes.io/component: chart\n" not in part]
    text = "\n---\n".join([INSTALL_HEAD.strip(), *kept]) + "\n"
    text = text.replace("app.kubernetes.io/managed-by: Helm", "app.kubernetes.io/managed-by: kubectl")
    return "\n".join(line.rstrip() for line in text.splitlines()) + "\n"


def generated(helm: Path) -> dict[Path, str]:
    """Return what each generated file must hold, given that the chart's copies of the CRDs are right."""
    table = values_table(chart_values((CHART / "values.yaml").read_text()))
    return {INSTALL: install_manifest(helm), VALUES_PAGE: with_table(VALUES_PAGE.read_text(), table)}


def find_helm() -> Path:
    """Return Helm from the cache of the tests on Kubernetes, which fetches it once."""
    sys.path.insert(0, str(ROOT / "e2e"))
    from harness.binaries import fetch_tools
    from harness.settings import Settings

    return fetch_tools(Settings.read({}).cache) / "helm"


def main() -> None:
    copies = crd_copies()
    for path in set((CHART / "files" / "crds").glob("*.yaml")) - set(copies):
        path.unlink()
    for path, text in copies.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    for path, text in generated(find_helm()).items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


if __name__ == "__main__":
    main()
