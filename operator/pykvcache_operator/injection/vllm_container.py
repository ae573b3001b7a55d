"""vLLM's container with the cache: its arguments and its environment. Volumes are the pod's matter."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pykvcache_operator.injection.outcome import Document
from pykvcache_operator.injection.transfer_config import TransferOptions


@dataclass(frozen=True, slots=True)
class Configured:
    """A container whose vLLM will use the pool. The container is new; what did not change in it is shared."""

    container: Document
    warnings: tuple[str, ...] = ()


def configure(
    container: Mapping[str, Any], *, options: TransferOptions, annotations: Mapping[str, Any], version: str
) -> Configured:
    """Return the container with vLLM told about its pool.

    Args:
        annotations: of the pod.
        version: of what injects; goes into PYKVCACHE_INJECTED.

    Raises:
        Skip: it has a kv-transfer-config already, or the library would not reach it.
        Reject: as Skip, and the pod's annotation asks for that.
    """
    raise NotImplementedError
