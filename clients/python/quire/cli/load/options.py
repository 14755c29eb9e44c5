"""The flags of `quire load`. Imports only the standard library, because every command loads this module."""

from __future__ import annotations

import argparse
import math
from typing import TYPE_CHECKING

from quire.cli.options import add_target, count, flags, option_type

if TYPE_CHECKING:
    from quire.cli.options import Commands

_seconds = option_type(float, "a number of seconds", lambda value: 0 <= value < math.inf)
_above_zero = option_type(float, "a number above 0", lambda value: 0 < value < math.inf)
_numbers = option_type(
    lambda text: [float(part) for part in text.split(",")],
    "numbers above 0 with commas between them",
    lambda values: all(0 < value < math.inf for value in values),
)
_counts = option_type(
    lambda text: [int(part) for part in text.split(",")],
    "whole numbers from 1 with commas between them",
    lambda values: all(value >= 1 for value in values),
)


def add_load(commands: Commands) -> None:
    """Adds `quire load`."""
    parser = commands.add_parser(
        "load",
        help="test a server under load",
        description="Sends requests at a given rate, and reports the latencies of their tokens, and whether"
        " the server or the client was the limit. Ctrl-C stops it and reports the results so far.",
    )
    parser.set_defaults(run="quire.cli.load.command:load")
    add_target(parser)
    _add_pace(parser)
    _add_workload(parser)
    _add_run(parser)
    _add_output(parser)


def _add_pace(parser: argparse.ArgumentParser) -> None:
    flag = flags(parser, "arrivals (one of the first three; default --callers 4)")
    flag("--rate", _numbers, "R", "open loop: R requests a second, independent of earlier ones")
    flag("--sweep", _numbers, "R,R,...", "several open-loop runs, one for each rate")
    flag("--callers", _counts, "N", "closed loop: N callers; N,N,...: one run for each number")
    arrivals = "intervals of an open loop: as of independent callers, or constant (default poisson)"
    flag("--arrivals", None, None, arrivals, "poisson", choices=("poisson", "constant"))


def _add_workload(parser: argparse.ArgumentParser) -> None:
    flag = flags(parser, "requests (lengths are N, or drawn from a range N-M or a list N,M,...)")
    length = "length of prompts, including shared prefixes (default 128, or what fits)"
    flag("--prompt-tokens", str, "N", length)
    flag("--output-tokens", str, "N", "tokens to generate (default 32)")
    flag("--shared-prefix-tokens", str, "N", "length of the prefix that prompts share")
    flag("--shared-prefixes", count, "K", "the number of different shared prefixes (default 1)", 1)
    flag(
        "--trace",
        str,
        "FILE",
        "requests from JSON lines: at_s, prompt_tokens, output_tokens and optionally shared_prefix "
        "(a name) and shared_prefix_tokens; at their times, unless --rate or --callers is given",
    )
    flag("--seed", int, "N", "the seed of lengths and prompts (default 0)", 0)


def _add_run(parser: argparse.ArgumentParser) -> None:
    flag = flags(parser, "the run")
    mode = (
        "unary Prefill and Decode, BatchDecode of --batch sequences of one caller, "
        "one Session for each process, or Execute (default unary)"
    )
    flag("--mode", None, None, mode, "unary", choices=("unary", "batch", "session", "execute"))
    flag("--batch", count, "N", "with --mode batch: sequences per caller (default 8)", 8)
    flag("--warm-up", _seconds, "S", "seconds before the measurement (default 2; with a trace 0)")
    flag("--duration", _above_zero, "S", "seconds of the measurement (default 30, or the whole trace)")
    flag("--grace", _seconds, "S", "seconds to wait for unfinished requests (default 30)", 30.0)
    flag("--timeout", _above_zero, "S", "the deadline of each call in seconds (default none)")
    flag("--processes", count, "N", "client processes (default: half of the cores, at most 8)")
    late = "if 1 in 100 requests is sent later than this, the client was the limit (default 10)"
    flag("--max-lateness-ms", _above_zero, "MS", late, 10.0)


def _add_output(parser: argparse.ArgumentParser) -> None:
    flag = flags(parser, "results")
    flag("--slo-ttft-ms", _above_zero, "MS", "a request is good if its time to first token is at most MS")
    flag("--slo-tbt-ms", _above_zero, "MS", "and no gap between two messages with tokens is longer")
    flag("--slo-tpot-ms", _above_zero, "MS", "and its mean time per token after the first is at most MS")
    flag("--out", str, "FILE", "write the results as JSON, with their course over time")
    flag("--report", str, "FILE", "write an HTML page with plots")
