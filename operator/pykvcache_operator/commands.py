"""What the operator's commands share: options that the environment may give, the log, and how a process ends."""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

import typer

from pykvcache_contract.errors import ConfigurationError, TransientError

_LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


def told(variable: str, text: str, **more: Any) -> Any:
    """Return an option that may also come by an environment variable."""
    return typer.Option(envvar=variable, help=text, **more)


def run_until_asked(run: Callable[[Any], Coroutine[Any, Any, None]], check: Callable[..., Any], **given: Any) -> None:
    """Run a process in an event loop of its own, with the log on stderr.

    Args:
        run: what is to run, with its settings.
        check: makes the settings of what was given.

    Raises:
        typer.Exit: 1 when it must be started again, 2 when an option is wrong; stderr says why.
    """
    logging.basicConfig(level=logging.INFO, format=_LOG_FORMAT)
    try:
        asyncio.run(run(check(**given)))
    except (ConfigurationError, TransientError) as error:
        typer.echo(f"Error: {error}", err=True)
        raise typer.Exit(2 if isinstance(error, ConfigurationError) else 1) from None
