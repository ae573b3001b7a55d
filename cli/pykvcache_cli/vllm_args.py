"""`pykvcache vllm-args`: the flags and the environment that make vLLM use a pool, checked as vLLM will check them."""

import json
import os
import shlex

import typer

from pykvcache_cli.console import fail, printable, stderr
from pykvcache_connector.settings import Settings
from pykvcache_contract.errors import ConfigurationError, PoolUnavailableError
from pykvcache_contract.transfer_config import vllm_flags
from pykvcache_storage.pool import NotYetAPoolError, open_pool

ENVIRONMENT = {"PYTHONHASHSEED": "0"}
"""Without it vLLM up to 0.26 hashes blocks differently after every start."""


def command(
    model: str = typer.Argument(
        "", metavar="MODEL", help="Print a whole `vllm serve MODEL` command instead of its flags."
    ),
    pool: str = typer.Option(..., "--pool", metavar="DIR", help="Where blocks are kept; created if missing."),
    capacity: str = typer.Option(
        "", "--capacity", metavar="SIZE", help="Most bytes the pool may hold.  [default: what a sidecar allows]"
    ),
    staging: str = typer.Option(
        "1GiB", "--staging", metavar="SIZE", help="Host memory of each worker (one per GPU) between disk and GPU."
    ),
    block_size: int = typer.Option(
        256, "--block-size", min=1, metavar="TOKENS", help="Tokens in one file; a multiple of vLLM's own --block-size."
    ),
    output: str = typer.Option("shell", "--format", metavar="shell|json", help="For a shell, or for a program."),
) -> None:
    """Print what to add to `vllm serve` so that it keeps its KV blocks in a pool.

    The first line sets the environment, the second holds the flags: run the first, and paste the second after
    `vllm serve MODEL`. With MODEL, the two are one command. Every value is checked as vLLM will check it. Restarted
    with the same flags, vLLM finds its blocks again; several vLLM processes may share one pool.

    Exit status: 0 printed, 2 an option is wrong or the directory cannot be used.

    Example: pykvcache vllm-args --pool /var/cache/kv
    """
    if output not in ("shell", "json"):
        fail(f"--format {output}: write shell or json")
    directory = os.path.abspath(pool)
    options: dict[str, object] = {"pool": directory, "staging": staging, "block_size": block_size}
    if capacity:
        options["capacity"] = capacity
    try:
        Settings.parse(options)
        _prepare(directory)
    except (ConfigurationError, PoolUnavailableError) as error:
        fail(printable(str(error)))
    arguments = vllm_flags(options)
    if output == "json":
        print(json.dumps({"env": ENVIRONMENT, "args": arguments}, indent=2))
    else:
        print(_shell_text(arguments, model))


def _prepare(directory: str) -> None:
    """Create the directory, or make sure that an existing one can be used; leave the pool itself to vLLM's user."""
    if not os.path.lexists(directory):
        try:
            os.makedirs(directory)
        except OSError as error:
            raise PoolUnavailableError(
                f"cannot create {directory}: {error.strerror}. Choose another --pool."
            ) from error
        stderr().print(f"created {printable(directory)}", markup=False)
    try:
        open_pool(directory, create=False)
    except NotYetAPoolError:
        return


def _shell_text(arguments: list[str], model: str) -> str:
    flags = shlex.join(arguments)
    if model:
        prefix = " ".join(f"{name}={shlex.quote(value)}" for name, value in ENVIRONMENT.items())
        return f"{prefix} vllm serve {shlex.quote(model)} {flags}"
    exports = "\n".join(f"export {name}={shlex.quote(value)}" for name, value in ENVIRONMENT.items())
    return f"{exports}\n{flags}"
