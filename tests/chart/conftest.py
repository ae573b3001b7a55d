"""Helm, which every test of the chart needs: without it they fail with the reason, they never skip."""

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from gen_manifests import find_helm, render

Render = Callable[..., list[dict[str, Any]]]


@pytest.fixture(scope="session")
def helm() -> Path:
    """Helm's program, fetched once into the cache of the tests on Kubernetes."""
    return find_helm()


@pytest.fixture(scope="session")
def rendered(helm) -> Render:
    """A function that renders the chart with some values and returns its objects."""

    def objects(values: dict[str, Any] | None = None, *arguments: str) -> list[dict[str, Any]]:
        sets = [part for key, value in (values or {}).items() for part in ("--set-json", f"{key}={value}")]
        return [row for row in yaml.load_all(render(helm, *sets, *arguments), UniqueKeys) if row]

    return objects


@pytest.fixture(scope="session")
def refused(helm) -> Callable[..., str]:
    """A function that returns what Helm says when it refuses values."""

    def message(values: dict[str, str], *arguments: str) -> str:
        sets = [part for key, value in values.items() for part in ("--set-json", f"{key}={value}")]
        with pytest.raises(subprocess.CalledProcessError) as caught:
            render(helm, *sets, *arguments)
        return str(caught.value.stderr)

    return message


class UniqueKeys(yaml.CSafeLoader):
    """A loader that refuses a key written twice, of which API servers take one without a word."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [key.value for key, _ in node.value]
        if twice := {key for key in keys if keys.count(key) > 1}:
            raise yaml.constructor.ConstructorError(None, None, f"twice: {sorted(twice)}", node.start_mark)
        return super().construct_mapping(node, deep)
