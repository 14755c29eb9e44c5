"""Subcommands of `quire` that the server distribution adds by entry points: serve, state and token.

Each function adds one subcommand with its flags. The code of the subcommand is imported when it runs.
"""

from __future__ import annotations

import argparse
import math
from typing import TYPE_CHECKING, TypeAlias

from service.config import add_flags

if TYPE_CHECKING:
    # What add_subparsers returns has no public name.
    Commands: TypeAlias = argparse._SubParsersAction[argparse.ArgumentParser]  # noqa: SLF001


def add_serve(commands: Commands) -> None:
    """`quire serve`."""
    serve = commands.add_parser(
        "serve",
        help="serve a model",
        description="Serves a model until SIGTERM or Ctrl-C, which drain the server and stop the workers; "
        "SIGUSR2 drains, but leaves the workers running for the next server with the same data directory and "
        "settings. Flags override the environment, which overrides the file.",
    )
    serve.set_defaults(run="service.cli.serve:run")
    add_flags(serve)


def add_state(commands: Commands) -> None:
    """`quire state`."""
    state = commands.add_parser(
        "state",
        help="list or remove the stored state of servers on this machine",
        description="Without --data-dir a server stores its caches in a directory for its address and model,"
        " below $XDG_STATE_HOME/quire (~/.local/state/quire). The directory stays when the server stops.",
    )
    actions = state.add_subparsers(dest="action", required=True, metavar="list|remove")
    listing = actions.add_parser("list", help="show the directories with size and time since the last write")
    listing.set_defaults(run="service.cli.state:list_state")
    remove = actions.add_parser(
        "remove", help="remove directories, with the caches in them; never one in use"
    )
    remove.set_defaults(run="service.cli.state:remove_state")
    which = remove.add_mutually_exclusive_group(required=True)
    which.add_argument("names", nargs="*", default=[], metavar="NAME", help="as `quire state list` shows it")
    which.add_argument("--older-than", type=_days, metavar="DAYS", help="all without writes for so many days")


def add_token(commands: Commands) -> None:
    """`quire token`."""
    token = commands.add_parser(
        "token",
        help="make a bearer token for a tenant",
        description="Prints a new token, and the line for the server's tokens file.",
    )
    token.set_defaults(run="service.cli.token:make_token")
    token.add_argument("name", metavar="TENANT", help="the tenant that calls with this token")
    token.add_argument(
        "--roles", default="call", metavar="ROLE,...", help="of call, observe, administer (default call)"
    )


def _days(text: str) -> float:
    try:
        days = float(text)
    except ValueError:
        days = math.nan
    if not 0 <= days < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is refused: must be a number of days from 0")
    return days
