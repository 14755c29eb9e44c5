"""The flags of `quire status`, `top`, `generate`, `caches` and `adapters`, and those of all client commands.

Imports only the standard library, so that invalid flags are reported quickly.
"""

from __future__ import annotations

import argparse
import math
import os
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from quire._proxies import require_target
from quire.v1.sampling_settings import SETTINGS

if TYPE_CHECKING:
    # The return type of add_subparsers has no public name.
    Commands: TypeAlias = argparse._SubParsersAction[argparse.ArgumentParser]  # noqa: SLF001

_DEFAULT_PORT = 50051
_DEFAULT_TARGET = f"127.0.0.1:{_DEFAULT_PORT}"
# A host name, or an IPv6 address in brackets, without a port.
_HOST_ALONE = re.compile(r"[^:/\[\]]+|\[[^/\[\]]+\]")
_Value = TypeVar("_Value")


def option_type(
    convert: Callable[[str], _Value], allowed: str, accepts: Callable[[_Value], bool] = lambda _: True
) -> Callable[[str], _Value]:
    """A type for argparse. `allowed` describes the valid values in the error message."""

    def parse(text: str) -> _Value:
        try:
            value = convert(text)
        except ValueError:
            value = None
        if value is None or not accepts(value):
            raise argparse.ArgumentTypeError(f"{text!r} is refused: must be {allowed}")
        return value

    return parse


count = option_type(int, "a whole number from 1", lambda value: value >= 1)
_number = option_type(float, "a number")
_max_tokens = option_type(int, f"a whole number from 1 to {2**32 - 1}", lambda value: 0 < value < 1 << 32)
_seed = option_type(int, f"a whole number from 0 to {2**64 - 1}", lambda value: 0 <= value < 1 << 64)
_seconds = option_type(float, "a number of seconds above 0", lambda value: 0 < value < math.inf)
_token_ids = option_type(
    lambda text: [int(part) for part in text.split(",")],
    "whole numbers of 32 bits with commas between them",
    lambda ids: all(0 <= token_id < 1 << 32 for token_id in ids),
)


def flags(parser: argparse._ActionsContainer, title: str = "") -> Callable[..., None]:
    """A function that adds a flag to `parser`, or with `title` to a new group of it.

    Its arguments are the flag's name, type, metavar, help, default, and other arguments of argparse.
    """
    group = parser.add_argument_group(title) if title else parser

    def flag(name: str, kind: Any, metavar: Any, help_text: str, default: Any = None, **more: Any) -> None:
        group.add_argument(name, type=kind, metavar=metavar, help=help_text, default=default, **more)

    return flag


def add_target(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of the connection."""
    flag = flags(parser)
    help_text = f"the server, also unix:/path (env QUIRE_TARGET; default {_DEFAULT_TARGET})"
    flag("--target", _target, "HOST[:PORT]", help_text, os.environ.get("QUIRE_TARGET") or _DEFAULT_TARGET)
    for name, metavar, help_text in (
        ("ca", "FILE", "use TLS, and trust these CAs for the server's certificate"),
        ("cert", "FILE", "with --ca: the client certificate"),
        ("key", "FILE", "with --ca: the private key of --cert"),
        ("token", "TOKEN", "a bearer token; prefer the environment variable, which other users cannot see"),
    ):
        variable = f"QUIRE_{name.upper()}"
        flag(f"--{name}", str, metavar, f"{help_text} (env {variable})", os.environ.get(variable, ""))


def _target(text: str) -> str:
    """Adds Quire's default port to a host without a port, because gRPC's default is 443."""
    try:
        require_target(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is refused: {error}") from None
    addresses = text.split(",")
    return ",".join(f"{one}:{_DEFAULT_PORT}" if _HOST_ALONE.fullmatch(one) else one for one in addresses)


_STATUS_WORDS = """\
the server:
  operations in flight  requests that wait or run
  connections           those of gRPC, counted once a second
  of tokens             size of the tokens of all caches (limit: --max-journal-bytes)
  of answers unread     size of computed answers that callers have not read (limit: --max-unread-bytes)
  longest stall         the longest time since the start in which the event loop was blocked
  refused               calls since the start that ended with an error; --json has the reasons

each worker:
  pid, epoch            its process, or address on another host; a number that grows with each start
  device, runner        where it computes; how steps are launched: eager, or as CUDA graphs
  seqs                  sequences whose KV it holds
  used, cached, free    KV pages in use, kept for reuse as prefixes, and empty; together: pages
  running               requests that wait for it or run
  prefills, decodes     requests since its start; `prefill ms`, `decode ms`: their mean time in the worker
  batch                 the mean number of requests that share a step
  memory                resident memory of its process, without GPU memory
  disk                  size of its kv_disk; -: none
"""


def add_status(commands: Commands) -> None:
    """Adds `quire status`."""
    parser = commands.add_parser(
        "status",
        help="show a server's workers",
        epilog=_STATUS_WORDS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run="quire.cli.status:show_status")
    add_target(parser)
    switch = parser.add_argument
    switch("--wide", action="store_true", help="show all columns, even if they do not fit")
    json = "print GetStatus's response as one line of protobuf JSON, in which 64-bit numbers are strings"
    switch("--json", action="store_true", help=json)


_TOP_WORDS = """\
Figures are of the time between two readings, except what is in use, hits, and "in all":
  tokens/s    in: of prompts; out: one for each decode, verify and accepted draft; computed: of all steps
  operations  prefills, decodes, verifies and scorings; those in flight that are not at workers wait for
              a worker, for pages, or for the journal
  mean ms     from the start of an operation in its worker to its result
  KV pages    | in use, : kept for reuse as prefixes
  caches      yours are those of the token's tenant
  queue       operations that wait for this worker or run there
  batch       the mean number of operations that share a step
  hits        the share of prompt tokens found in the prefix cache, since the start

q or Ctrl-C ends it. "-": unknown, as after a restart, or none.
"""


def add_top(commands: Commands) -> None:
    """Adds `quire top`."""
    parser = commands.add_parser(
        "top",
        help="follow a server's load in the terminal",
        epilog=_TOP_WORDS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run="quire.cli.top:show_top")
    add_target(parser)
    flags(parser)("--interval", _seconds, "SECONDS", "between two readings (default 1)", 1.0)
    once = "read twice, print one table, and exit"
    parser.add_argument("--once", action="store_true", help=once)


def add_generate(commands: Commands) -> None:
    """Adds `quire generate`."""
    parser = commands.add_parser(
        "generate",
        help="continue a prompt",
        description="Continues a prompt and streams the output. The default sampling settings are those"
        " of the model's generation_config.json; flags override them.",
    )
    parser.set_defaults(run="quire.cli.generate:generate")
    add_target(parser)
    prompt = flags(parser.add_mutually_exclusive_group(required=True))
    text = "a message to answer, or a text to continue (see --raw); - reads standard input"
    prompt("prompt", str, "PROMPT", text, nargs="?")
    prompt("--tokens", _token_ids, "1,2,3", "token ids to continue, instead of text")
    flag = flags(parser)
    flag("--max-tokens", _max_tokens, "N", "generate at most N tokens (default 64)", 64)
    form = parser.add_mutually_exclusive_group()
    chat = "PROMPT is a message for the model's chat template (default if it has one)"
    form.add_argument("--chat", action="store_true", help=chat)
    form.add_argument("--raw", action="store_true", help="PROMPT is a text to continue, without a template")
    flag("--system", str, "TEXT", "a system message before PROMPT")
    # The names are those of the API.
    for setting in SETTINGS:
        kind: Callable[[str], float] = _number
        if setting.type is int:
            allowed = f"a whole number from {setting.minimum:.0f} to {setting.maximum:.0f}"
            kind = option_type(int, allowed, setting.allows)
        name, own = setting.name.replace("_", "-"), f"(default: the model's own, else {setting.neutral:.10g})"
        flag(f"--{name}", kind, "X", f"{setting.description} {own}")
    flag("--seed", _seed, "N", "the seed of the sampling, for repeatable results")
    flag("--adapter", str, "ID", "a LoRA adapter of the server, see `quire adapters` (default: none)", "")
    lines = "print a line for each token: id, log-probability, text"
    parser.add_argument("--logprobs", action="store_true", help=lines)


def add_caches(commands: Commands) -> None:
    """Adds `quire caches`."""
    parser = commands.add_parser("caches", help="list or release a server's caches")
    actions = parser.add_subparsers(dest="action", required=True, metavar="list|release")
    listing = actions.add_parser("list", help="list the caches, oldest first")
    listing.set_defaults(run="quire.cli.caches:list_caches")
    add_target(listing)
    release = actions.add_parser("release", help="release caches")
    release.set_defaults(run="quire.cli.caches:release_caches")
    add_target(release)
    which = release.add_mutually_exclusive_group(required=True)
    which.add_argument("cache_ids", nargs="*", default=[], metavar="CACHE_ID", help="the caches to release")
    which.add_argument("--all", action="store_true", help="release all that `quire caches list` shows")
    release.add_argument("--yes", action="store_true", help="with --all: confirm the release")


def add_adapters(commands: Commands) -> None:
    """Adds `quire adapters`."""
    parser = commands.add_parser("adapters", help="list, load or unload a server's LoRA adapters")
    actions = parser.add_subparsers(dest="action", required=True, metavar="list|load|unload")
    listing = actions.add_parser("list", help="list the adapters that you can use, by id")
    listing.set_defaults(run="quire.cli.adapters:list_adapters")
    load = actions.add_parser(
        "load",
        help="load an adapter, or a new version of it",
        description="Loads a LoRA adapter in PEFT's layout: adapter_config.json and"
        " adapter_model.safetensors. If the id is in use, this makes a new version; caches keep theirs until"
        " they are released.",
    )
    load.set_defaults(run="quire.cli.adapters:load_adapter")
    load.add_argument("adapter_id", metavar="ID", help="its name in calls")
    source = "a directory on the server's machine (with --upload: on this one)"
    load.add_argument("source", metavar="DIRECTORY", help=source)
    load.add_argument("--upload", action="store_true", help="send the files of DIRECTORY to the server")
    pin = "keep it in the memory of workers that have loaded it"
    load.add_argument("--pin", action="store_true", help=pin)
    unload = actions.add_parser(
        "unload", help="remove an adapter; its caches can be used until their release"
    )
    unload.set_defaults(run="quire.cli.adapters:unload_adapter")
    unload.add_argument("adapter_id", metavar="ID", help="the adapter to remove")
    for changing, shared in ((load, "for"), (unload, "the one of")):
        changing.add_argument(
            "--shared", action="store_true", help=f"{shared} all tenants, not only your own"
        )
    for action in (listing, load, unload):
        add_target(action)


def add_completion(commands: Commands) -> None:
    """Adds `quire completion`."""
    parser = commands.add_parser(
        "completion",
        help="print a completion script for a shell",
        description="Prints a completion script with all commands and flags of this installation. Store it"
        " where the shell looks for completions, and again after an upgrade.",
    )
    parser.set_defaults(run="quire.cli.completion:print_script")
    parser.add_argument("shell", choices=("bash", "zsh", "fish"), help="the shell")
