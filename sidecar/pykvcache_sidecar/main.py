"""Entry point of `pykvcache-sidecar`. Signals are held before anything else is imported: see `signals`."""

from pykvcache_sidecar import signals


def main() -> None:
    """Run the command line."""
    signals.hold()
    from pykvcache_sidecar.commands import app

    app(prog_name="pykvcache-sidecar")


if __name__ == "__main__":
    main()
