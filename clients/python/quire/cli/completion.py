"""`quire completion`: a script with which a shell completes the command, made by shtab from the parsers."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import shtab
from quire.cli.main import complete_parser

# What completes a value, by its name in the help.
_FILES = {"FILE": shtab.FILE, "DIRECTORY": shtab.DIRECTORY}


def print_script(options: argparse.Namespace) -> int:
    """Prints the script for a shell. Returns the exit status."""
    parser = complete_parser()
    for action in _actions(parser):
        name = action.metavar if isinstance(action.metavar, str) else ""
        if name in _FILES:
            action.complete = _FILES[name]  # type: ignore[attr-defined]  # what shtab looks for
        elif action.choices is None and action.option_strings and name.islower() and "|" in name:
            # Values that are checked later, such as off|on.
            action.choices = name.split("|")
    print(shtab.complete(parser, options.shell))
    return 0


def _actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """The flags and arguments of a command and of its subcommands."""
    for action in parser._actions:  # noqa: SLF001 - there is no public list
        if isinstance(action, argparse._SubParsersAction):  # noqa: SLF001 - has no public name
            for command in action.choices.values():
                yield from _actions(command)
        else:
            yield action
