"""`pykvcache-operator webhook`."""

import asyncio
import logging
from typing import Annotated, Any

import typer

from pykvcache_contract.errors import ConfigurationError, TransientError
from pykvcache_operator.settings import WATCH_SECONDS
from pykvcache_operator.webhook import options
from pykvcache_operator.webhook.run import run

ENVIRONMENT_PREFIX = "PYKVCACHE_WEBHOOK_"
LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


def _told(variable: str, text: str, **more: Any) -> Any:
    """Return an option with an environment variable."""
    return typer.Option(envvar=ENVIRONMENT_PREFIX + variable, help=text, **more)


def webhook(
    connector_image: Annotated[
        str, _told("CONNECTOR_IMAGE", "Image from which the library gets into pods; its whole name.")
    ],
    sidecar_image: Annotated[str, _told("SIDECAR_IMAGE", "Image of the sidecar in pods; its whole name.")],
    pull_policy: Annotated[str, _told("PULL_POLICY", "imagePullPolicy of both.")] = "IfNotPresent",
    pull_secret: Annotated[
        list[str],
        _told(
            "PULL_SECRET",
            "Secret to pull them with, to be there in each namespace with injected pods; may be repeated (in the "
            "environment: separated by spaces).",
        ),
    ] = [],  # noqa: B006 - typer reads it, nobody writes it
    library_resources: Annotated[
        str, _told("LIBRARY_RESOURCES", "requests and limits of the init container that copies the library, as JSON.")
    ] = "",
    sidecar_resources: Annotated[str, _told("SIDECAR_RESOURCES", "requests and limits of the sidecar, as JSON.")] = "",
    certificate_directory: Annotated[
        str, _told("CERTIFICATE_DIRECTORY", "Folder with tls.crt and tls.key; read again when they change.")
    ] = "/etc/pykvcache/tls",
    listen: Annotated[
        str, _told("LISTEN", "Address of POST /mutate over HTTPS; :0 takes a free port and logs it.")
    ] = ":9443",
    metrics_listen: Annotated[
        str, _told("METRICS_LISTEN", "Address of /healthz, /readyz and /metrics over HTTP.")
    ] = ":9412",
    watch_seconds: Annotated[float, _told("WATCH_SECONDS", "How long one watch stays open.", min=3)] = WATCH_SECONDS,
    grace_seconds: Annotated[
        float, _told("GRACE_SECONDS", "How long it goes on answering after SIGTERM.", min=0)
    ] = options.GRACE_SECONDS,
) -> None:
    """Inject the cache into pods that ask for it: the server behind the MutatingWebhookConfiguration.

    Runs until SIGTERM. Exits 1 when it must be started again; 2 when an option is wrong.
    """
    logging.basicConfig(level=logging.INFO, format=LOG_FORMAT)
    _end_by_errors(
        certificate_directory=certificate_directory,
        listen=listen,
        metrics_listen=metrics_listen,
        connector_image=connector_image,
        sidecar_image=sidecar_image,
        pull_policy=pull_policy,
        pull_secrets=tuple(pull_secret),
        library_resources=library_resources,
        sidecar_resources=sidecar_resources,
        watch_seconds=watch_seconds,
        grace_seconds=grace_seconds,
    )


def _end_by_errors(**given: Any) -> None:
    try:
        asyncio.run(run(options.make_options(**given)))
    except (ConfigurationError, TransientError) as error:
        typer.echo(f"Error: {error}", err=True)
        raise typer.Exit(2 if isinstance(error, ConfigurationError) else 1) from None
