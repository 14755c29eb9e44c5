"""The command `quire`: serve | status | generate | load | token.

Exit status: 0 done, 1 it failed while it ran, 2 it was called wrongly. Each command imports what it needs
when it runs, so that none waits for another's libraries; what is loaded here is the standard library only.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import functools
import math
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from service.cli.load.options import add_load_flags
from service.cli.option_type import option_type
from service.config import ConfigError, add_flags, is_hub_id, load_config

_DEFAULT_PORT = 50051
DEFAULT_TARGET = f"127.0.0.1:{_DEFAULT_PORT}"
# A name, or an address of IPv6 in brackets.
_HOST_ALONE = re.compile(r"[^:/\[\]]+|\[[^/\[\]]+\]")


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
_COMMANDS = {"serve": _serve, "status": _status, "generate": _generate, "load": _load, "token": _token}


class _Version(argparse.Action):
    """Prints the version and exits. It is looked up only then."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from importlib import metadata

        print(f"quire {metadata.version('quire-server')}")
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
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    serve = commands.add_parser(
        "serve",
        help="serve a model",
        description="Serves a model until SIGTERM or Ctrl-C, which drain and end the workers; SIGUSR2 drains "
        "and leaves them, as they are, for the next server with the same data directory and settings. Flags "
        "win over the environment, which wins over the file.",
    )
    add_flags(serve)

    status = commands.add_parser("status", help="show a server's workers")
    _add_target(status)
    status.add_argument(
        "--watch",
        nargs="?",
        type=_seconds,
        const=1.0,
        metavar="SECONDS",
        help="repeat, and show rates between two readings (default: every second)",
    )
    status.add_argument(
        "--wide", action="store_true", help="every column, also beyond the width of the terminal"
    )

    generate = commands.add_parser(
        "generate",
        help="continue a prompt",
        description="Continues a prompt, and shows what comes as it comes. Tokens are drawn as the model's"
        " makers recommend (its generation_config.json), but for what the flags say.",
    )
    _add_target(generate)
    prompt = generate.add_mutually_exclusive_group(required=True)
    prompt.add_argument(
        "prompt",
        nargs="?",
        metavar="PROMPT",
        help="a message to answer, or the text to continue (see --raw); - reads it from standard input",
    )
    prompt.add_argument("--tokens", type=_token_ids, metavar="1,2,3", help="token ids to continue, not text")
    generate.add_argument(
        "--max-tokens", type=_count, default=64, metavar="N", help="stop after N (default 64)"
    )
    _add_chat(generate)
    _add_sampling(generate)
    generate.add_argument(
        "--logprobs", action="store_true", help="a line for each token: id, log-probability, text"
    )

    load = commands.add_parser(
        "load",
        help="test a server under load",
        description="Sends requests as fast as it is told, and says how long their tokens took, and whether"
        " the server or the client was the limit. Ctrl-C ends it with what there is.",
    )
    _add_target(load)
    add_load_flags(load)

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


def _add_chat(parser: argparse.ArgumentParser) -> None:
    form = parser.add_mutually_exclusive_group()
    form.add_argument(
        "--chat",
        action="store_true",
        help="PROMPT is a message, written as the model's chat template says (default where it has one)",
    )
    form.add_argument("--raw", action="store_true", help="PROMPT is sent as it is")
    parser.add_argument("--system", metavar="TEXT", help="a message of the system's before PROMPT")


def _add_sampling(parser: argparse.ArgumentParser) -> None:
    """The settings of a draw, by the names that the API has for them."""
    own = "(default: the model's own)"
    for name, kind, metavar, help_text in (
        ("temperature", _number, "T", "0: greedy (default: the model's own, else 0)"),
        ("top-k", _whole_number, "K", f"draw from the K most likely tokens, 0: all {own}"),
        ("top-p", _number, "P", f"draw from the top probability mass P {own}"),
        ("min-p", _number, "P", f"drop tokens below P of the most likely {own}"),
        ("repetition-penalty", _number, "R", f"above 1: what was seen before is less likely {own}"),
        ("seed", _whole_number, "N", "makes a draw repeatable"),
    ):
        parser.add_argument(f"--{name}", type=kind, metavar=metavar, help=help_text)


def _add_target(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--target",
        type=_target,
        default=os.environ.get("QUIRE_TARGET", DEFAULT_TARGET),
        metavar="HOST[:PORT]",
        help=f"the server, also unix:/path (env QUIRE_TARGET; default {DEFAULT_TARGET})",
    )
    for name, metavar, help_text in (
        ("ca", "FILE", "connect with TLS, to a server whose certificate is of these CAs"),
        ("cert", "FILE", "with --ca: the certificate to show"),
        ("key", "FILE", "with --ca: its key"),
        ("token", "TOKEN", "a bearer token; better in the environment, where others do not see it"),
    ):
        variable = f"QUIRE_{name.upper()}"
        default = os.environ.get(variable, "")
        parser.add_argument(
            f"--{name}", default=default, metavar=metavar, help=f"{help_text} (env {variable})"
        )


def _target(text: str) -> str:
    """With our default port where it names none: gRPC's is 443."""
    return f"{text}:{_DEFAULT_PORT}" if _HOST_ALONE.fullmatch(text) else text


_number = option_type(float, "a number")
_whole_number = option_type(int, "a whole number")
_seconds = option_type(float, "a number of seconds above 0", lambda value: 0 < value < math.inf)
_count = option_type(int, "a whole number from 1", lambda value: value >= 1)
_token_ids = option_type(
    lambda text: [int(part) for part in text.split(",")],
    "whole numbers of 32 bits with commas between them",
    lambda ids: all(0 <= token_id < 1 << 32 for token_id in ids),
)


if __name__ == "__main__":
    sys.exit(main())
