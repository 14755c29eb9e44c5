"""Subcommands of `quire` that the server distribution adds through entry points, such as serve.

Each function adds one subcommand with its flags. The code of the subcommand is imported when it runs.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, TypeAlias

from service.config import QUANTIZATIONS, UNQUANTISED, ExtensionUnusable
from service.config_sources import add_flags
from service.printable import escaped
from service.setting_rules import MAX_PORT, are_addresses

if TYPE_CHECKING:
    # The type that add_subparsers returns has no public name.
    Commands: TypeAlias = argparse._SubParsersAction[argparse.ArgumentParser]  # noqa: SLF001

_MAX_DAYS = 36_500


def add_serve(commands: Commands) -> None:
    """Adds `quire serve`."""
    serve = commands.add_parser(
        "serve",
        help="serve a model",
        description="Serves a model until SIGTERM or Ctrl-C, which drain the server and stop the workers; "
        "SIGUSR2 drains, but leaves the workers running for the next server with the same data directory and "
        "settings. Flags override the environment, which overrides the file.",
    )
    serve.set_defaults(run="service.cli.serve:run")
    check = "start nothing: print the settings that are set, or with exit status 2 why a start would fail"
    serve.add_argument("--check", action="store_true", help=check)
    try:
        add_flags(serve)
    except ExtensionUnusable as error:
        serve.exit(2, f"quire: {escaped(str(error))}\n")


def add_convert(commands: Commands) -> None:
    """Adds `quire convert`."""
    convert = commands.add_parser(
        "convert",
        help="write a model as a GGUF file with quantised weights",
        description="Quantises a model as `quire serve --quantization` does at each load, and writes it with"
        " its tokenizer and chat template as a GGUF file that quire and llama.cpp read.",
    )
    convert.set_defaults(run="service.cli.convert:run")
    what = "a model that `quire serve` takes, whose weights are not quantised"
    convert.add_argument("model", metavar="MODEL", help=what)
    convert.add_argument("out", metavar="OUT", help="the file, which must not exist: NAME.gguf")
    formats = tuple(name for name in QUANTIZATIONS if name != UNQUANTISED)
    which = "the formats of weights, as for `quire serve` (default: q4_k_m)"
    convert.add_argument("--quantization", choices=formats, default="q4_k_m", help=which)
    revision = "commit, branch or tag of a model on the hub"
    convert.add_argument("--model-revision", metavar="REVISION", help=revision)


def add_token(commands: Commands) -> None:
    """Adds `quire token`."""
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


def add_pool(commands: Commands) -> None:
    """Adds `quire pool`."""
    pool = commands.add_parser("pool", help="make certificates for workers on other hosts")
    actions = pool.add_subparsers(dest="action", required=True, metavar="init")
    init = actions.add_parser(
        "init",
        help="make a directory with a CA and the certificates of gateways and workers",
        description="Gateways and workers accept only each other's certificates, of the same CA.",
    )
    init.set_defaults(run="service.cli.pool:init")
    init.add_argument("directory", metavar="DIRECTORY", help="must be new, or empty")
    init.add_argument("--days", type=_validity, default=3650, metavar="N", help="validity (default: 3650)")


def _validity(text: str) -> int:
    days = int(text)
    if not 1 <= days <= _MAX_DAYS:
        raise argparse.ArgumentTypeError(f"{text} is refused: must be from 1 to {_MAX_DAYS} days")
    return days


def _addresses(text: str) -> str:
    if not (text and are_addresses(text)):
        problem = f"must be HOST:PORT or [IPV6]:PORT, with a port up to {MAX_PORT}, or several different ones"
        raise argparse.ArgumentTypeError(f"{text!r} is refused: {problem}")
    return text


def add_worker(commands: Commands) -> None:
    """Adds `quire worker`."""
    worker = commands.add_parser(
        "worker",
        help="run a worker for a gateway on another host",
        description="Dials the --pool-listen of a gateway, which determines the configuration, except for the"
        " flags given here. Runs until SIGTERM or Ctrl-C, and restarts the worker whenever it ends.",
    )
    worker.set_defaults(run="service.cli.worker:run")
    directory = "the directory with ca.pem, worker.pem and worker-key.pem of `quire pool init`"
    worker.add_argument("--pool", required=True, metavar="DIRECTORY", help=directory)
    there = "the --pool-listen of the gateway, or of each of several, separated by commas"
    worker.add_argument("--gateway", required=True, metavar="HOST:PORT,...", type=_addresses, help=there)
    elsewhere = "the model's directory on this host, if the gateway's does not exist here"
    worker.add_argument("--model", metavar="DIRECTORY", help=elsewhere)
    worker.add_argument("--device", choices=("auto", "cpu", "cuda"), help="in place of the gateway's setting")
    worker.add_argument("--device-index", type=int, default=0, metavar="N", help="which GPU (default: 0)")
    worker.add_argument("--threads", type=int, metavar="N", help="compute threads (default: all cores)")
    worker.add_argument("--kv-pages", type=int, metavar="N", help="KV pages (default: what fits)")
    hang = "kill a worker whose process does nothing for so long (default: 60)"
    worker.add_argument("--hang-timeout-s", type=float, default=60.0, metavar="S", help=hang)
    worker.add_argument("--log-level", choices=("debug", "info", "warning", "error"), default="info")
