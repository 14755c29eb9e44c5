"""The command `quire`: the client's commands, and those of an installed server.

A package adds a command by an entry point of the group `quire.commands`: a function that takes argparse's
subparsers and adds a parser with the entry point's name. The parser's default `run` is the function that runs
the command, as "module:function". `quire-llm-server` adds serve and others.

Exit status: 0 success, 1 failure, 2 invalid usage. Each command imports its dependencies when it runs, so
that it does not load those of the others. This module imports only the standard library.
"""

from __future__ import annotations

import argparse
import difflib
import errno
import importlib
import io
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from typing import Any, NoReturn, TypeAlias

from quire.cli import options
from quire.cli.load.options import add_load
from quire.cli.standard_files import open_standard_files
from quire.cli.terminal import CommandFailed, tell

_Adders: TypeAlias = Mapping[str, Callable[[Any], None]]  # by the command's name
_ENTRY_POINTS = "quire.commands"
_CLIENT_COMMANDS: _Adders = {
    "status": options.add_status,
    "top": options.add_top,
    "generate": options.add_generate,
    "load": add_load,
    "caches": options.add_caches,
    "adapters": options.add_adapters,
    "completion": options.add_completion,
}
_SERVER_COMMANDS = ("serve", "token", "pool", "worker")
# The order in the help. Other commands come last.
_ORDER = ("serve", *_CLIENT_COMMANDS, *_SERVER_COMMANDS[1:])
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# Files, processes or memory.
_NO_MORE = (errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.ENOMEM)
_NO_EXTRA = "needs the extra `cli`; in a checkout of Quire: `pip install './clients/python[cli]'`"
# How like a known option one has to be to be taken for it: `--max-model-len` is not `--model-backend`.
_LEAST_LIKENESS = 0.8
_NO_SERVER = (
    "comes with the server (quire-llm-server); in a checkout of Quire: `pip install ./clients/python .`"
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command. Returns the exit status. argparse exits with 2 on invalid usage."""
    open_standard_files()
    if isinstance(sys.stdout, io.TextIOWrapper):  # a replaced stdout may be anything
        # What a terminal has no character for.
        sys.stdout.reconfigure(errors="replace")
    parsed = _parsed(sys.argv[1:] if arguments is None else arguments)
    try:
        status = _run(parsed)
        # What can fail here would fail later, where Python prints a traceback.
        sys.stdout.flush()
        return status
    except CommandFailed as error:
        for line in error.args:
            tell(line)
        return error.exit_status
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 1
    except BrokenPipeError:
        # The reader has closed the pipe.
        _drop_output()
        return 1
    except OSError as error:
        text, status = _said(error, parsed.command)
        tell(text)
        return status


def _said(error: OSError, command: str) -> tuple[str, int]:
    """What the system refuses to a command, and the exit status. Raises what may be a fault of the code."""
    if error.filename is None and error.errno == errno.ENOENT:
        # A temporary directory, as Python says, or where a relative path begins.
        is_current = error.strerror == os.strerror(errno.ENOENT)
        return "the current directory does not exist any more" if is_current else f"{error.strerror}", 2
    if command == "serve":
        raise error
    if error.filename is not None:
        return f"{error.filename}: {error.strerror}", 2
    if error.errno in _NO_ROOM:
        _drop_output()
        return f"the output cannot be written: {error.strerror}", 1
    if error.errno in _NO_MORE:
        return f"the system refuses it: {error.strerror}", 1
    raise error


def _drop_output() -> None:
    """Prevents a second error when Python flushes at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _run(parsed: argparse.Namespace) -> int:
    module, _, function = parsed.run.partition(":")
    try:
        status: int = getattr(importlib.import_module(module), function)(parsed)
    except ImportError as error:
        if parsed.command not in _CLIENT_COMMANDS:
            raise
        raise CommandFailed(f"{parsed.command} {_NO_EXTRA} ({error})") from error
    return status


class _Parser(argparse.ArgumentParser):
    """One that says in a line what is wrong. The usage of some commands has forty."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message} (see {self.prog} --help)\n")


class _Version(argparse.Action):
    """Prints the version, which is looked up only then, and exits."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        print(f"quire {metadata.version('quire-llm')}")
        parser.exit()


def _parsed(arguments: Sequence[str]) -> argparse.Namespace:
    """Parses the arguments. Exits with 2 if an option is unknown."""
    first = arguments[0] if arguments else ""
    # To search the installed entry points takes time, as do the parsers of all commands.
    known = _CLIENT_COMMANDS if first in _CLIENT_COMMANDS else _installed()
    parser, commands = _parser({first: known[first]} if first in known else known)
    if first and (wrong := _unknown_command(first, list(commands))):
        parser.error(wrong)
    parsed, unknown = parser.parse_known_args(arguments)
    if unknown:
        command = commands[parsed.command]
        name = next((text.partition("=")[0] for text in unknown if text.startswith("-")), unknown[0])
        known_flags = re.findall(r"--[\w-]+", command.format_usage())
        names = [flag.removeprefix("--") for flag in known_flags]
        close = difflib.get_close_matches(name.removeprefix("--"), names, n=1, cutoff=_LEAST_LIKENESS)
        meant = [f"--{each}" for each in close]
        if not name.startswith("-") and "--model" in known_flags:  # as other servers are told the model
            meant = [f"--model {name}"]
        elif not name.startswith("-") and parsed.command == "generate":
            meant = ["a PROMPT in quotes"]
        if name in ("--host", "--port") and "--listen" in known_flags:  # likewise the address
            meant = ["--listen HOST:PORT"]
        command.error(f"{name} is not known" + (f"; did you mean {meant[0]}?" if meant else ""))
    return parsed


def complete_parser() -> argparse.ArgumentParser:
    """The parser of all commands."""
    return _parser(_installed())[0]


def _unknown_command(first: str, commands: list[str]) -> str:
    """The error of the first argument; empty if it is valid."""
    is_flag = first.startswith("-")
    known = ["-h", "--help", "--version"] if is_flag else commands
    # argparse accepts abbreviated flags.
    if first in known or (is_flag and any(flag.startswith(first) for flag in known)):
        return ""
    if first in _SERVER_COMMANDS:
        return f"{first} {_NO_SERVER}"
    close = difflib.get_close_matches(first, known, n=1)
    hint = f"did you mean {close[0]}?" if close else f"the commands are {', '.join(commands)}"
    return f"{first} is {'not known' if is_flag else 'no command'}; {hint}"


def _installed() -> _Adders:
    """All commands."""
    found = {one.name: one.load() for one in metadata.entry_points(group=_ENTRY_POINTS)}
    found.update(_CLIENT_COMMANDS)
    return {name: found[name] for name in sorted(found, key=lambda name: (*_ORDER, name).index(name))}


def _parser(added: _Adders) -> tuple[argparse.ArgumentParser, Mapping[str, argparse.ArgumentParser]]:
    """A parser with these commands, and the subparser of each."""
    parser = _Parser(prog="quire", description="An LLM server whose API is the forward pass, and its client.")
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version")
    commands = parser.add_subparsers(dest="command", required=True, metavar="|".join(added))
    for add in added.values():
        add(commands)
    return parser, commands.choices
