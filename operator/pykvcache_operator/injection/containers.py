"""Which container of a pod runs vLLM."""

from collections.abc import Mapping
from typing import Any


def choose(spec: Mapping[str, Any], annotations: Mapping[str, Any]) -> int:
    """Return the index in spec.containers of the one that runs vLLM.

    Raises:
        Skip: none is known to, or several could; or the annotation names none of them.
    """
    raise NotImplementedError
