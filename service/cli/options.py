"""The flags that the commands of `quire` have in common, and those of `quire generate`.

The standard library only: every command loads them.
"""

from __future__ import annotations

import argparse
import math
import os
import re

from service.cli.option_type import option_type

_DEFAULT_PORT = 50051
_DEFAULT_TARGET = f"127.0.0.1:{_DEFAULT_PORT}"
# A name, or an address of IPv6 in brackets.
_HOST_ALONE = re.compile(r"[^:/\[\]]+|\[[^/\[\]]+\]")


def add_target(parser: argparse.ArgumentParser) -> None:
    """Where the server is, and who calls it."""
    parser.add_argument(
        "--target",
        type=_target,
        default=os.environ.get("QUIRE_TARGET", _DEFAULT_TARGET),
        metavar="HOST[:PORT]",
        help=f"the server, also unix:/path (env QUIRE_TARGET; default {_DEFAULT_TARGET})",
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


def add_generate_flags(parser: argparse.ArgumentParser) -> None:
    """All but those that say where the server is."""
    prompt = parser.add_mutually_exclusive_group(required=True)
    prompt.add_argument(
        "prompt",
        nargs="?",
        metavar="PROMPT",
        help="a message to answer, or the text to continue (see --raw); - reads it from standard input",
    )
    prompt.add_argument("--tokens", type=token_ids, metavar="1,2,3", help="token ids to continue, not text")
    parser.add_argument("--max-tokens", type=count, default=64, metavar="N", help="stop after N (default 64)")
    _add_chat(parser)
    _add_sampling(parser)
    parser.add_argument(
        "--logprobs", action="store_true", help="a line for each token: id, log-probability, text"
    )


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


def _target(text: str) -> str:
    """With our default port where it names none: gRPC's is 443."""
    if text.startswith(("http://", "https://")):  # gRPC would look it up as a name
        raise argparse.ArgumentTypeError(f"{text!r} is refused: must be HOST:PORT, without http://")
    return f"{text}:{_DEFAULT_PORT}" if _HOST_ALONE.fullmatch(text) else text


_number = option_type(float, "a number")
_whole_number = option_type(int, "a whole number")
seconds = option_type(float, "a number of seconds above 0", lambda value: 0 < value < math.inf)
days = option_type(float, "a number of days from 0", lambda value: 0 <= value < math.inf)
count = option_type(int, "a whole number from 1", lambda value: value >= 1)
token_ids = option_type(
    lambda text: [int(part) for part in text.split(",")],
    "whole numbers of 32 bits with commas between them",
    lambda ids: all(0 <= token_id < 1 << 32 for token_id in ids),
)
