"""The command `quire`: serve | status | generate | load | caches | state | token.

Exit status: 0 done, 1 it failed while it ran, 2 it was called wrongly. Each command imports what it needs
when it runs, so that none waits for another's libraries; what is loaded here is the standard library only.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import functools
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from service.cli.load.options import add_load_flags
from service.cli.options import add_generate_flags, add_target, days, seconds
from service.config import ConfigError, add_flags, is_hub_id, load_config


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command. Returns the exit status; argparse exits by itself with 2 on wrong usage."""
    parsed = _parsed(arguments)
    try:
        return _COMMANDS[parsed.command](parsed)
    except ConfigError as error:
        print(f"quire: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 1
    except BrokenPipeError:
        # The reader has seen enough. Python would complain once more when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        if error.filename is None or parsed.command == "serve":
            raise
        print(f"quire: {error.filename}: {error.strerror}", file=sys.stderr)
        return 2


def _status(parsed: argparse.Namespace) -> int:
    from service.cli.status import show_status

    return show_status(parsed)


def _generate(parsed: argparse.Namespace) -> int:
    from service.cli.generate import generate

    return generate(parsed)


def _load(parsed: argparse.Namespace) -> int:
    from service.cli.load.command import load

    return load(parsed)


def _caches(parsed: argparse.Namespace) -> int:
    from service.cli.caches import list_caches, release_caches

    return list_caches(parsed) if parsed.action == "list" else release_caches(parsed)


def _state(parsed: argparse.Namespace) -> int:
    from service.cli.state import list_state, remove_state

    return list_state() if parsed.action == "list" else remove_state(parsed)


def _token(parsed: argparse.Namespace) -> int:
    from service.cli.token import make_token

    return make_token(parsed.name, parsed.roles.split(","))


def _serve(parsed: argparse.Namespace) -> int:
    config = load_config(vars(parsed), os.environ)
    if is_hub_id(config.model):
        from service.cli.hub import HubError, find_model

        try:
            found = find_model(config.model, config.model_revision, download=config.model_download == "on")
        except HubError as error:
            print(f"quire: {error}", file=sys.stderr)
            return 1
        config = dataclasses.replace(config, model=str(found), model_revision=None)

    import asyncio

    import uvloop

    from service.doors.descriptors import TooFewDescriptors, with_descriptors
    from service.logging import configure_logging
    from service.server import serve

    configure_logging(config.log_level, config.log_format)
    try:
        # Before the event loop, which takes some.
        config = with_descriptors(config)
    except TooFewDescriptors as error:
        print(f"quire: {error}", file=sys.stderr)
        return 1
    # A busy event loop releases the interpreter for moments only. A thread that wants it, such as the
    # journal's, asks for it after so long without such a moment. With Python's 5 ms that may never be, and
    # commits waited seconds.
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        may_download = config.model_download == "on"
        return runner.run(serve(config, functools.partial(_find_on_hub, download=may_download)))


def _find_on_hub(hub_id: str, on_progress: Callable[[float], None], *, download: bool) -> Path:
    """A model that a running server is to serve. Raises LoadFailed."""
    from service.cli.hub import HubError, find_model
    from service.errors import LoadFailed

    try:
        return find_model(hub_id, None, download=download, on_progress=on_progress)
    except HubError as error:
        raise LoadFailed(str(error)) from None


_SWITCH_INTERVAL_S = 0.0005
_COMMANDS = {
    "serve": _serve, "status": _status, "generate": _generate, "load": _load, "caches": _caches,
    "state": _state, "token": _token,
}  # fmt: skip


class _Version(argparse.Action):
    """Prints the version and exits. It is looked up only then."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from importlib import metadata

        print(f"quire {metadata.version('quire-llm-server')}")
        parser.exit()


def _parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options of one command. Exits with 2 and that command's usage if one is not known."""
    parser, commands = _parser()
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments and (told := _no_command(arguments[0], list(commands))):
        parser.error(told)
    parsed, unknown = parser.parse_known_args(arguments)
    if unknown:
        command = commands[parsed.command]
        name = next((text for text in unknown if text.startswith("-")), unknown[0]).partition("=")[0]
        close = difflib.get_close_matches(name, re.findall(r"--[\w-]+", command.format_usage()), n=1)
        command.error(f"{name} is not known" + (f"; did you mean {close[0]}?" if close else ""))
    return parsed


def _no_command(first: str, commands: list[str]) -> str:
    """What is wrong with the first argument; empty if nothing is."""
    is_flag = first.startswith("-")
    known = ["-h", "--help", "--version"] if is_flag else commands
    # Flags may be shortened.
    if first in known or (is_flag and any(flag.startswith(first) for flag in known)):
        return ""
    close = difflib.get_close_matches(first, known, n=1)
    hint = f"did you mean {close[0]}?" if close else f"the commands are {', '.join(commands)}"
    return f"{first} is {'not known' if is_flag else 'no command'}; {hint}"


def _parser() -> tuple[argparse.ArgumentParser, Mapping[str, argparse.ArgumentParser]]:
    """The parser, and that of each command."""
    parser = argparse.ArgumentParser(prog="quire", description="A token-level LLM executor behind gRPC.")
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version")
    commands = parser.add_subparsers(dest="command", required=True, metavar="|".join(_COMMANDS))

    serve = commands.add_parser(
        "serve",
        help="serve a model",
        description="Serves a model until SIGTERM or Ctrl-C, which drain and end the workers; SIGUSR2 drains "
        "and leaves them, as they are, for the next server with the same data directory and settings. Flags "
        "win over the environment, which wins over the file.",
    )
    add_flags(serve)

    status = commands.add_parser("status", help="show a server's workers")
    add_target(status)
    status.add_argument(
        "--watch",
        nargs="?",
        type=seconds,
        const=1.0,
        metavar="SECONDS",
        help="repeat, and show rates between two readings (default: every second)",
    )
    status.add_argument(
        "--wide", action="store_true", help="every column, also beyond the width of the terminal"
    )
    status.add_argument(
        "--json",
        action="store_true",
        help="GetStatus's answer in a line, as protobuf writes JSON: numbers of 64 bits are strings",
    )

    generate = commands.add_parser(
        "generate",
        help="continue a prompt",
        description="Continues a prompt, and shows what comes as it comes. Tokens are drawn as the model's"
        " makers recommend (its generation_config.json), but for what the flags say.",
    )
    add_target(generate)
    add_generate_flags(generate)

    load = commands.add_parser(
        "load",
        help="test a server under load",
        description="Sends requests as fast as it is told, and says how long their tokens took, and whether"
        " the server or the client was the limit. Ctrl-C ends it with what there is.",
    )
    add_target(load)
    add_load_flags(load)

    _add_caches(commands.add_parser("caches", help="list or release a server's caches"))
    _add_state(commands.add_parser("state", help="list or remove what servers on this machine have kept"))

    token = commands.add_parser(
        "token",
        help="make a bearer token for a tenant",
        description="Prints a new token, and its line for the server's file of tokens.",
    )
    token.add_argument("name", metavar="TENANT", help="whose calls it makes")
    token.add_argument(
        "--roles", default="call", metavar="ROLE,...", help="of call, observe, administer (default call)"
    )
    return parser, commands.choices


def _add_caches(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True, metavar="list|release")
    add_target(actions.add_parser("list", help="list the caches, oldest first"))
    release = actions.add_parser("release", help="release caches")
    add_target(release)
    which = release.add_mutually_exclusive_group(required=True)
    which.add_argument("cache_ids", nargs="*", default=[], metavar="CACHE_ID", help="the caches to release")
    which.add_argument("--all", action="store_true", help="every cache that `quire caches list` shows")
    release.add_argument(
        "--yes", action="store_true", help="with --all: release them, and not only count them"
    )


def _add_state(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Without --data-dir a server keeps its caches in a directory for its address and model, below"
        " $XDG_STATE_HOME/quire (~/.local/state/quire), also after its end."
    )
    actions = parser.add_subparsers(dest="action", required=True, metavar="list|remove")
    actions.add_parser("list", help="show the directories: size, and how long ago each was written to")
    remove = actions.add_parser(
        "remove", help="remove directories, with the caches in them; never one in use"
    )
    which = remove.add_mutually_exclusive_group(required=True)
    which.add_argument("names", nargs="*", default=[], metavar="NAME", help="as `quire state list` shows it")
    which.add_argument("--older-than", type=days, metavar="DAYS", help="those not written to for so long")


if __name__ == "__main__":
    sys.exit(main())
