"""Entry point of `pykvcache-operator`."""

import importlib.metadata
from typing import Annotated, Any

try:
    import typer

    from pykvcache_operator import settings as options
    from pykvcache_operator.commands import run_until_asked, told
    from pykvcache_operator.run import run
    from pykvcache_operator.webhook.command import webhook
except ModuleNotFoundError as missing:
    raise SystemExit(
        f"Error: pykvcache-operator needs {missing.name}. Install it: pip install 'py-kvcache[operator]'"
    ) from None

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
ENVIRONMENT_PREFIX = "PYKVCACHE_OPERATOR_"


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"pykvcache-operator {importlib.metadata.version('py-kvcache')}")
        raise typer.Exit


@app.callback()
def _group(
    version: bool = typer.Option(
        False, "--version", help="Print the version and exit.", callback=_print_version, is_eager=True
    ),
) -> None:
    """Keep every KVCachePool of a cluster at its declared state, and let pods use them.

    The chart starts `run` and `webhook`; each of their options has an environment variable too.
    Outside a cluster it uses $KUBECONFIG, for trying things out.
    """


def _told(variable: str, text: str, **more: Any) -> Any:
    """Return an option with an environment variable."""
    return told(ENVIRONMENT_PREFIX + variable, text, **more)


AllowedPaths = Annotated[
    list[str],
    _told(
        "ALLOWED_HOST_PATH",
        "Prefix under which pools with volume HostPath may lie, as given to the node agent; may be repeated (in the "
        "environment: separated by spaces). None: such pools are refused.",
    ),
]


FollowPods = Annotated[
    bool,
    _told(
        "FOLLOW_PODS",
        "Watch the pods of all namespaces that are labelled for a pool, and tell which of them go without the cache. "
        "Needs the right to list pods and to create Events everywhere.",
    ),
]
WebhookConfiguration = Annotated[
    str,
    _told(
        "WEBHOOK_CONFIGURATION",
        "MutatingWebhookConfiguration whose certificates the operator makes and renews. Empty: it keeps none.",
    ),
]


@app.command("run")
def _run(
    namespace: Annotated[
        str, _told("NAMESPACE", "The operator's own namespace: its Lease and the calibration Jobs are there.")
    ],
    calibration_image: Annotated[
        str,
        _told(
            "CALIBRATION_IMAGE",
            "Image of calibration Jobs, the same as the node agent's. Empty: nothing is measured.",
        ),
    ] = "",
    calibration_pull_secret: Annotated[
        list[str],
        _told(
            "CALIBRATION_PULL_SECRET",
            "Secret in the operator's namespace to pull that image with; may be repeated.",
        ),
    ] = [],  # noqa: B006 - typer reads it, nobody writes it
    calibration_priority_class: Annotated[
        str,
        _told(
            "CALIBRATION_PRIORITY_CLASS",
            "PriorityClass of calibration Jobs, one that never preempts. Empty: the cluster's default.",
        ),
    ] = "",
    allowed_host_path: AllowedPaths = [],  # noqa: B006 - as above
    lease_name: Annotated[
        str, _told("LEASE_NAME", "Lease that the active process holds; others wait for it.")
    ] = "pykvcache-operator",
    listen: Annotated[
        str,
        _told("LISTEN", "Address of /healthz, /readyz and /metrics; :0 takes a free port and logs it."),
    ] = ":9411",
    watch_seconds: Annotated[
        float,
        _told(
            "WATCH_SECONDS",
            "How long one watch stays open. Three times as long without news, /healthz says no.",
            min=3,
        ),
    ] = options.WATCH_SECONDS,
    resync_seconds: Annotated[
        float,
        _told("RESYNC_SECONDS", "How often all pools are looked at, whatever the watches told.", min=1),
    ] = options.RESYNC_SECONDS,
    workers: Annotated[int, _told("WORKERS", "Pools looked at side by side.", min=1, max=100)] = options.WORKERS,
    follow_pods: FollowPods = False,
    webhook_configuration: WebhookConfiguration = "",
    webhook_service: Annotated[
        str, _told("WEBHOOK_SERVICE", "Service of the webhook, in the operator's namespace: the certificate's name.")
    ] = options.WEBHOOK_SERVICE,
) -> None:
    """Run until SIGTERM. Exits 1 when it must be started again, for instance after losing its Lease; 2 when an option
    is wrong.
    """
    run_until_asked(
        run,
        options.make_settings,
        namespace=namespace,
        lease_name=lease_name,
        calibration_image=calibration_image,
        calibration_pull_secrets=tuple(calibration_pull_secret),
        calibration_priority_class=calibration_priority_class,
        allowed_host_paths=tuple(allowed_host_path),
        listen=listen,
        watch_seconds=watch_seconds,
        resync_seconds=resync_seconds,
        workers=workers,
        follow_pods=follow_pods,
        webhook_configuration=webhook_configuration,
        webhook_service=webhook_service,
    )


app.command("webhook")(webhook)


def main() -> None:
    """Run the command line."""
    app(prog_name="pykvcache-operator")


if __name__ == "__main__":
    main()
