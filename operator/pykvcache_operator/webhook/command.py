"""`pykvcache-operator webhook`."""

from typing import Annotated, Any

from pykvcache_operator.commands import run_until_asked, told
from pykvcache_operator.settings import WATCH_SECONDS
from pykvcache_operator.webhook import options
from pykvcache_operator.webhook.run import run

ENVIRONMENT_PREFIX = "PYKVCACHE_WEBHOOK_"


def _told(variable: str, text: str, **more: Any) -> Any:
    """Return an option with an environment variable."""
    return told(ENVIRONMENT_PREFIX + variable, text, **more)


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
    run_until_asked(
        run,
        options.make_options,
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
