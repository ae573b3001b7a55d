"""Entry point of `pykvcache`: one table of sub-commands, each loaded only when it is called.

So `pykvcache inspect` imports neither vLLM nor torch nor a Kubernetes client, starts in a fraction of a second, and
works where the other parts are not installed. A part adds a sub-command by adding a row.
"""

import importlib
import importlib.metadata
from dataclasses import dataclass
from typing import Any

import typer
import typer.core
import typer.main

from pykvcache_cli.console import fail
from pykvcache_cli.kubectl import PROGRAM as KUBECTL_PLUGIN


@dataclass(frozen=True, slots=True)
class SubCommand:
    """Where a sub-command lives.

    Args:
        module: imported when the sub-command is called; its `command` is what typer runs: a function, or a group of
            further sub-commands.
        summary: the line in `pykvcache --help`, where nothing is imported.
        extra: the extra that installs what the module needs.
    """

    module: str
    summary: str
    extra: str = "cli"


SUB_COMMANDS = {
    "calibrate": SubCommand(
        "pykvcache_cli.calibrate", "Measure how fast a disk reads and writes blocks.", extra="bench"
    ),
    "demo": SubCommand("pykvcache_cli.demo", "Show that vLLM finds its KV blocks on disk after a restart."),
    "doctor": SubCommand("pykvcache_cli.doctor", "Say what will be used here, why, and what to repair."),
    "inject": SubCommand("pykvcache_cli.inject", "Add the cache to the vLLM pods of manifests, without a cluster."),
    "inspect": SubCommand("pykvcache_cli.inspect_pool", "Show what a pool holds; --verify checks every block."),
    "vllm-args": SubCommand("pykvcache_cli.vllm_args", "Print the flags that make vLLM use a pool."),
}


class LazyGroup(typer.core.TyperGroup):
    """A group that knows its sub-commands by name and imports one only to run it."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names, as `--help` lists them."""
        return list(SUB_COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return a stand-in that has a name and a summary, and nothing imported."""
        if cmd_name not in SUB_COMMANDS:
            return None
        return _as_command(cmd_name, _do_nothing, summary=SUB_COMMANDS[cmd_name].summary)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return the real sub-command that is about to run, in place of its stand-in."""
        name, stand_in, rest = super().resolve_command(ctx, args)
        return name, load(name) if name is not None and stand_in is not None else stand_in, rest


app = typer.Typer(
    cls=LazyGroup,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        try:
            version = importlib.metadata.version("py-kvcache")
        except importlib.metadata.PackageNotFoundError:
            version = "(run from a source tree that is not installed)"
        print(f"pykvcache {version}")
        raise typer.Exit


@app.callback()
def _group(
    version: bool = typer.Option(
        False, "--version", help="Print the version and exit.", callback=_print_version, is_eager=True
    ),
) -> None:
    """Keep vLLM's KV blocks on this node's disk, and bring them back when that is faster than recomputing them.

    Start with `pykvcache doctor DIR` on the machine that runs vLLM, then paste what `pykvcache vllm-args --pool DIR`
    prints after `vllm serve MODEL`. `pykvcache inspect DIR` shows what was kept.
    """


def load(name: str) -> Any:
    """Import a sub-command and return it as a command; explain a part that is not installed."""
    row = SUB_COMMANDS[name]
    try:
        function = importlib.import_module(row.module).command
    except ModuleNotFoundError as error:
        fail(f"pykvcache {name} needs {error.name}. Install it: pip install 'py-kvcache[{row.extra}]'")
    if isinstance(function, typer.Typer):
        return typer.main.get_command(function)
    return _as_command(name, function, summary=None)


def _as_command(name: str, function: Any, *, summary: str | None) -> Any:
    single = typer.Typer(add_completion=False, rich_markup_mode=None)
    single.command(name=name, help=summary)(function)
    return typer.main.get_command(single)


def _do_nothing() -> None:
    raise AssertionError("a stand-in is never called")


def main() -> None:
    """Run the command line."""
    app(prog_name="pykvcache")


def kubectl_plugin() -> None:
    """Run the same command line as a plugin of kubectl, which finds `kubectl-pykvcache` on the PATH."""
    app(prog_name=KUBECTL_PLUGIN)


if __name__ == "__main__":
    main()
