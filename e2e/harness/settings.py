"""What the environment says about the tests on Kubernetes, read once.

PYKVCACHE_E2E            local (default): our own cluster; kubeconfig: the one of $KUBECONFIG; kind: made by kind
PYKVCACHE_E2E_CACHE      where built programs and base images are kept; default ~/.cache/pykvcache-e2e
PYKVCACHE_E2E_STATE      where clusters run; default /var/tmp/pykvcache-e2e. Short: it holds sockets
PYKVCACHE_E2E_REGISTRY   kubeconfig only: push images there, say registry.example.com/team
PYKVCACHE_E2E_IMAGES     kubeconfig only: nothing is built, say sidecar=NAME,operator=NAME
"""

import enum
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
REPORTS = REPOSITORY / ".cache" / "e2e"  # what diagnose writes, one folder for each failed test
DEVELOPER = "dev"  # folder of the developer's cluster, below the state
STATE_LENGTH_MAX = 40  # a path of a socket has at most 107 bytes, and plug-ins append up to 62


class SettingsError(Exception):
    """The environment asks for something impossible; the message says what to change."""


class Mode(enum.Enum):
    """Which cluster the tests use."""

    LOCAL = "local"
    KUBECONFIG = "kubeconfig"
    KIND = "kind"


@dataclass(frozen=True, slots=True)
class Settings:
    """One run's settings; paths are absolute."""

    mode: Mode
    cache: Path
    state: Path
    kubeconfig: Path | None = None
    registry: str = ""
    images: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def read(cls, environment: Mapping[str, str] = os.environ) -> "Settings":
        """Parse the environment.

        Raises:
            SettingsError: a variable has no valid value, or one that the mode needs is missing.
        """
        name = environment.get("PYKVCACHE_E2E") or Mode.LOCAL.value
        try:
            mode = Mode(name)
        except ValueError:
            raise SettingsError(f"PYKVCACHE_E2E={name}: use {', '.join(m.value for m in Mode)}") from None
        caches = Path(environment.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        state = Path(environment.get("PYKVCACHE_E2E_STATE") or "/var/tmp/pykvcache-e2e").absolute()
        if len(str(state)) > STATE_LENGTH_MAX:
            raise SettingsError(
                f"PYKVCACHE_E2E_STATE={state}: longer than {STATE_LENGTH_MAX} characters; sockets lie in it"
            )
        kubeconfig = environment.get("KUBECONFIG")
        if mode is Mode.KUBECONFIG and not (kubeconfig and Path(kubeconfig).is_file()):
            raise SettingsError(f"PYKVCACHE_E2E=kubeconfig needs KUBECONFIG=FILE; it is {kubeconfig or 'not set'}")
        return cls(
            mode=mode,
            cache=Path(environment.get("PYKVCACHE_E2E_CACHE") or caches / "pykvcache-e2e").absolute(),
            state=state,
            kubeconfig=Path(kubeconfig).absolute() if kubeconfig else None,
            registry=environment.get("PYKVCACHE_E2E_REGISTRY", "").rstrip("/"),
            images=_parse_images(environment.get("PYKVCACHE_E2E_IMAGES", "")),
        )


def _parse_images(text: str) -> dict[str, str]:
    pairs = [pair.strip() for pair in text.split(",") if pair.strip()]
    images = dict(pair.split("=", 1) for pair in pairs if "=" in pair)
    if len(images) != len(pairs) or not all(images.values()):
        raise SettingsError(f"PYKVCACHE_E2E_IMAGES={text}: write TARGET=NAME,TARGET=NAME")
    return images
