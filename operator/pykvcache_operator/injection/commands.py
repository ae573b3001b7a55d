"""What a container starts, and whether an argument at its end would reach vLLM.

The rule: an argument is added only where it surely becomes an argument of vLLM's own parser. A shell ignores what
follows its text, a script does with it what it likes, and a program that does not know the argument ends with an error.
Everything that is not surely vLLM is therefore told about the pool by an environment variable, which harms nobody.

Kubernetes runs `command` + `args`; where there is no command, the image's entry point + `args`; where there is neither,
the image's entry point and its default arguments, which setting `args` would remove.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from pykvcache_contract.injection import SkipReason
from pykvcache_operator.injection.images import is_server_image, is_vllm_image
from pykvcache_operator.injection.outcome import Skip

SHELLS = frozenset({"sh", "bash", "dash", "ash", "zsh", "ksh", "fish", "busybox"})
WRAPPERS = frozenset(
    {
        *("tini", "tini-static", "dumb-init", "catatonit", "nvidia_entrypoint.sh"),
        *("env", "nice", "ionice", "chrt", "taskset", "numactl", "prlimit", "stdbuf", "timeout", "nohup", "setsid"),
        *("time", "nsys", "opentelemetry-instrument", "gosu", "su-exec", "uv"),
    }
)
"""Programs that run the command which follows their own options, with all of its arguments and its environment."""
PARSING_SUBCOMMANDS = frozenset({"serve", "run-batch"})
"""Of `vllm`: those that take an engine's arguments anywhere behind them."""
SUBCOMMANDS = PARSING_SUBCOMMANDS | {"bench", "chat", "complete", "collect-env", "launch", "preload", "snapshot"}
MODULES = frozenset(
    f"vllm.entrypoints.{name}" for name in ("openai.api_server", "openai.run_batch", "api_server", "grpc_server")
)
"""Run by `python -m`: those that take an engine's arguments."""
CLI_MODULE = "vllm.entrypoints.cli.main"
_PYTHON = re.compile(r"python(\d+(\.\d+)?)?")
_IN_TEXT = re.compile(
    r"vllm(?<!\wvllm)(?:\s+(?:serve|run-batch|bench)\b|\.entrypoints\b|(?<=\bfrom vllm)\b|(?<=\bimport vllm)\b)"
)
"""In the text of a shell or of `python -c`. It begins with plain letters, which are found fast in long texts."""
WORDS_MAX = 10_000
"""Of a command or of its arguments, each."""
_EMPTIES = re.compile(r"-|-[0v]*i|--ignore-environment")
_REMOVES = re.compile(r"(?:-u|--unset=|--unset)(.*)", re.DOTALL)
_LOST_BY_ENV = ("PYTHONPATH", "VLLM_PLUGINS", "PYKVCACHE_INJECTED", "PYKVCACHE_KV_TRANSFER_CONFIG")


@dataclass(frozen=True, slots=True)
class Command:
    """What a container starts.

    Args:
        tokens: command and args as one list.
        arguments: of vLLM's own parser, which an argument at the end reaches; None where that is not certain.
        obstacle: what stands in between, where `arguments` is None.
        cut_off: what keeps our environment from vLLM's Python, such as `python3 -I`; empty: nothing known.
        runs_vllm: whether it says by itself that it runs vLLM.
        mentions_vllm: whether it, or its image, names vllm.
    """

    tokens: tuple[str, ...]
    arguments: tuple[str, ...] | None
    obstacle: str = ""
    cut_off: str = ""
    runs_vllm: bool = False
    mentions_vllm: bool = False


@dataclass(frozen=True, slots=True)
class _Found:
    """The program that a list of tokens comes down to."""

    arguments: tuple[str, ...] | None = None
    obstacle: str = ""
    cut_off: str = ""
    runs_vllm: bool = False


def read(container: Mapping[str, Any]) -> Command:
    """Return what the container starts.

    Raises:
        Skip: its command or its args are not lists of strings, or too long.
    """
    command, arguments = strings(container, "command"), strings(container, "args")
    image = container.get("image")
    image = image if isinstance(image, str) else ""
    tokens = command + arguments
    found = _program(command, arguments, image)
    in_text = any(map(_IN_TEXT.search, tokens))
    named = any(token == "vllm" or token.endswith("=vllm") for token in tokens)
    return Command(
        tokens,
        found.arguments,
        found.obstacle,
        found.cut_off,
        found.runs_vllm or in_text,
        named or is_vllm_image(image),
    )


def strings(container: Mapping[str, Any], key: str) -> tuple[str, ...]:
    """Return `command` or `args` of a container.

    Raises:
        Skip: it is not a list of strings, or too long a one.
    """
    value = container.get(key)
    if value is None:
        return ()
    if not isinstance(value, list | tuple) or not all(isinstance(item, str) for item in value):
        message = f"container {container.get('name')}: {key} is not a list of strings. Quote numbers and booleans."
        raise Skip(SkipReason.UNSUPPORTED_POD, message)
    if len(value) > WORDS_MAX:
        message = f"container {container.get('name')}: {key} has {len(value)} entries, more than {WORDS_MAX}."
        raise Skip(SkipReason.UNSUPPORTED_POD, message)
    return tuple(value)


def _program(command: tuple[str, ...], arguments: tuple[str, ...], image: str) -> _Found:
    if not command and not arguments:
        obstacle = "neither command nor args: setting args would replace the image's own"
        return _Found(obstacle=obstacle, runs_vllm=is_server_image(image))
    if command:
        return _checked(_unwrap(command + arguments))
    found = _unwrap(arguments)
    if found.runs_vllm or not _continues_server(arguments, image):
        return _checked(found)
    # vLLM's image: its entry point is `vllm serve`, in old releases the module; either takes what follows.
    rest = arguments[1:] if arguments[0] == "serve" else arguments
    return _checked(_Found(rest, runs_vllm=True))


def _continues_server(arguments: Sequence[str], image: str) -> bool:
    if not is_server_image(image):
        return False
    first = arguments[0]
    if first.startswith("--") or first == "serve":
        return True
    return is_server_image(image, has_fixed_entry_point=True) and first not in SUBCOMMANDS


def _unwrap(tokens: Sequence[str]) -> _Found:
    """Follow wrappers to the program at their end."""
    position, cut_off = 0, ""
    while position < len(tokens):
        name = _base(tokens[position])
        if name == "vllm":
            return _of_vllm(tokens[position + 1 :], cut_off)
        if _PYTHON.fullmatch(name):
            return _of_python(tokens[position:], cut_off)
        if name in SHELLS:
            return _Found(obstacle="a shell, which ignores arguments behind its text", cut_off=cut_off)
        if name not in WRAPPERS:
            break
        following = _next_program(tokens, position + 1)
        if name == "env":
            cut_off = cut_off or _lost_by_env(tokens[position + 1 : following])
        position = following
    if position >= len(tokens):
        return _Found(obstacle="a wrapper around a program that is not known", cut_off=cut_off)
    return _Found(obstacle=f"{_base(tokens[position])[:40]}, which is not known to be vLLM", cut_off=cut_off)


def _next_program(tokens: Sequence[str], start: int) -> int:
    """Return the index of the next token that names a program known to us, or the number of tokens."""
    for index in range(start, len(tokens)):
        name = _base(tokens[index])
        if "=" in tokens[index]:
            continue  # a variable of `env` or an option
        if name == "vllm" and tokens[index + 1 : index + 2] and tokens[index + 1] in SUBCOMMANDS:
            return index
        if name in SHELLS or name in WRAPPERS or _PYTHON.fullmatch(name):
            return index
    return len(tokens)


def _lost_by_env(options: Sequence[str]) -> str:
    """Return what `env` does with its options that keeps our variables from vLLM."""
    for option, following in zip_longest(options, options[1:], fillvalue=""):
        assigned = option.partition("=")[0]
        if _EMPTIES.fullmatch(option):
            return f"env {option}"
        if assigned in _LOST_BY_ENV:
            return f"env {assigned}=…"
        removed = _REMOVES.fullmatch(option)
        if removed and (removed[1] or following) in _LOST_BY_ENV:
            return f"env -u {removed[1] or following}"
    return ""


def _of_vllm(arguments: Sequence[str], cut_off: str) -> _Found:
    subcommand = arguments[0] if arguments else ""
    if subcommand not in PARSING_SUBCOMMANDS:
        obstacle = f"vllm {subcommand[:40]}".strip() + ", which takes no arguments of an engine at its end"
        return _Found(obstacle=obstacle, cut_off=cut_off, runs_vllm=True)
    return _Found(tuple(arguments[1:]), cut_off=cut_off, runs_vllm=True)


def _of_python(tokens: Sequence[str], cut_off: str) -> _Found:
    """Read Python's own options up to the module or the script."""
    name = _base(tokens[0])
    letters = _python_options(tokens)
    for letter, value, following in letters:
        if letter in ("I", "E"):
            cut_off = cut_off or f"{name} -{letter}"
        elif letter == "c":
            return _Found(obstacle=f"{name} -c", cut_off=cut_off, runs_vllm=bool(_IN_TEXT.search(value)))
        elif letter == "m":
            return _of_module(value, tokens[following:], cut_off)
        elif letter == "":
            if _base(value) == "vllm":
                return _of_vllm(tokens[following:], cut_off)
            return _Found(obstacle=f"a script of {name}", cut_off=cut_off)
    return _Found(obstacle=f"{name} without a script", cut_off=cut_off)


def _python_options(tokens: Sequence[str]) -> Iterator[tuple[str, str, int]]:
    """Yield (letter, value, index of what follows) of each option, and last ("", script, …)."""
    index = 1
    while index < len(tokens):
        token = tokens[index]
        index += 1
        if token.startswith("--"):
            index += token == "--check-hash-based-pycs"
            continue
        if not token.startswith("-") or token == "-":
            yield "", token, index
            return
        for place, letter in enumerate(token[1:], 2):
            if letter not in "cmWX":
                yield letter, "", index
                continue
            value = token[place:]
            if not value:
                value = tokens[index] if index < len(tokens) else ""
                index += 1
            yield letter, value, index
            break


def _of_module(module: str, arguments: Sequence[str], cut_off: str) -> _Found:
    if module == CLI_MODULE:
        return _of_vllm(arguments, cut_off)
    if module in MODULES:
        return _Found(tuple(arguments), cut_off=cut_off, runs_vllm=True)
    is_vllm = module.partition(".")[0] == "vllm"
    return _Found(obstacle=f"the module {module[:60]}", cut_off=cut_off, runs_vllm=is_vllm)


def _checked(found: _Found) -> _Found:
    """Give up on arguments among which ours would be lost, or would hide what the user says elsewhere."""
    obstacle = next((text for text in map(_obstacle, found.arguments or ()) if text), "")
    if not obstacle:
        return found
    return _Found(obstacle=obstacle, cut_off=found.cut_off, runs_vllm=found.runs_vllm)


def _obstacle(argument: str) -> str:
    if argument == "--":
        return "`--`, behind which there are no options"
    if argument.partition("=")[0] == "--config":
        return "--config: its file may have a kv-transfer-config, which an argument would override"
    if argument == "--omni":
        return "--omni: another program takes over"
    return ""


def _base(token: str) -> str:
    return token.rsplit("/", 1)[-1]
