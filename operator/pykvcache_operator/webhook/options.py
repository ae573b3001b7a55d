"""What the webhook is told at its start, checked once."""

import importlib.metadata
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pykvcache_contract.api.quantities import parse_quantity
from pykvcache_contract.errors import ConfigurationError
from pykvcache_operator.injection.outcome import InjectionSettings
from pykvcache_operator.settings import parse_listen

PULL_POLICIES = ("Always", "IfNotPresent", "Never")
GRACE_SECONDS = 10.0
"""How long a process that is asked to end goes on: API servers learn of it by the Service's endpoints."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Options of `pykvcache-operator webhook`."""

    certificate_directory: Path
    host: str
    port: int
    metrics_host: str
    metrics_port: int
    watch_seconds: float
    grace_seconds: float
    injection: InjectionSettings


def make_options(
    *,
    certificate_directory: str,
    listen: str,
    metrics_listen: str,
    connector_image: str,
    sidecar_image: str,
    pull_policy: str,
    pull_secrets: tuple[str, ...],
    library_resources: str,
    sidecar_resources: str,
    watch_seconds: float,
    grace_seconds: float,
) -> Options:
    """Return checked options.

    Raises:
        ConfigurationError: an option cannot be used; the message says which, and what to write.
    """
    host, port = parse_listen(listen)
    metrics_host, metrics_port = parse_listen(metrics_listen, option="--metrics-listen")
    if pull_policy not in PULL_POLICIES:
        raise ConfigurationError(f"--pull-policy {pull_policy}: write one of {', '.join(PULL_POLICIES)}")
    injection = InjectionSettings(
        version=importlib.metadata.version("py-kvcache"),
        connector_image=_image("--connector-image", connector_image),
        sidecar_image=_image("--sidecar-image", sidecar_image),
        pull_policy=pull_policy,
        pull_secrets=pull_secrets,
        **_resources(library_resources=library_resources, sidecar_resources=sidecar_resources),
    )
    return Options(
        certificate_directory=Path(certificate_directory),
        host=host,
        port=port,
        metrics_host=metrics_host,
        metrics_port=metrics_port,
        watch_seconds=watch_seconds,
        grace_seconds=grace_seconds,
        injection=injection,
    )


def _image(option: str, name: str) -> str:
    if not name or re.search(r"\s", name):
        raise ConfigurationError(f"{option} {name!r}: write the whole name of an image, as registry/name:tag")
    return name


def _resources(**given: str) -> dict[str, dict[str, Any]]:
    """Return those that something is said about; for the others the defaults hold."""
    return {name: _parsed(f"--{name.replace('_', '-')}", text) for name, text in given.items() if text}


def _parsed(option: str, text: str) -> dict[str, Any]:
    """Return requests and limits of a container."""
    try:
        found = json.loads(text)
        if not isinstance(found, dict) or found.keys() - {"requests", "limits"}:
            raise ValueError("only requests and limits are known")
        for part in found.values():
            for amount in part.values():
                _check_amount(amount)
    except (ValueError, AttributeError) as error:
        example = '{"requests":{"cpu":"10m","memory":"32Mi"},"limits":{"memory":"128Mi"}}'
        raise ConfigurationError(f"{option}: {error}. Write JSON such as {example}") from None
    return found


def _check_amount(amount: object) -> None:
    if isinstance(amount, bool) or not isinstance(amount, str | int | float):
        raise ValueError(f"{amount!r} is no amount")
    if not re.fullmatch(r"\d+m", str(amount)):  # thousandths of a processor
        parse_quantity(str(amount))
