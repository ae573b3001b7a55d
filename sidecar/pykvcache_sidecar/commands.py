"""The sub-commands of `pykvcache-sidecar`."""

import importlib.metadata

try:
    import typer

    from pykvcache_sidecar import run, simulate
    from pykvcache_sidecar.node import command
except ModuleNotFoundError as missing:
    raise SystemExit(
        f"Error: pykvcache-sidecar needs {missing.name}. Install it: pip install 'py-kvcache[sidecar]'"
    ) from None

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("run")(run.command)
app.command("simulate")(simulate.command)
app.command("node")(command.command)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"pykvcache-sidecar {importlib.metadata.version('py-kvcache')}")
        raise typer.Exit


@app.callback()
def _group(
    version: bool = typer.Option(
        False, "--version", help="Print the version and exit.", callback=_print_version, is_eager=True
    ),
) -> None:
    """Look after a pool of KV blocks beside vLLM: evict, check, clean up, and tell how full and how healthy it is.

    One `pykvcache-sidecar run --pool DIR --capacity 64GiB` for each pool directory, with or without Kubernetes. Which
    capacity and which eviction policy pay off, `pykvcache-sidecar simulate` says from a trace of your own requests.
    On Kubernetes the chart runs `pykvcache-sidecar node` once on each node.
    """
