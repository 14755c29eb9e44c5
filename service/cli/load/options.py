"""The flags of `quire load`. The standard library only: every command of `quire` loads them."""

from __future__ import annotations

import argparse
import math

from service.cli.option_type import option_type

MODES = ("unary", "batch", "session", "execute")


def add_load_flags(parser: argparse.ArgumentParser) -> None:
    """All but those that say where the server is."""
    _add_pace(parser)
    _add_workload(parser)
    _add_run(parser)
    _add_output(parser)


def _add_pace(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("how fast requests begin (one of the first three; default --callers 4)")
    group.add_argument(
        "--rate",
        type=_numbers,
        metavar="R",
        help="open loop: R requests a second, whatever became of earlier ones",
    )
    group.add_argument(
        "--sweep",
        type=_numbers,
        metavar="R,R,...",
        help="one run after the other, each with a rate of its own",
    )
    group.add_argument(
        "--callers",
        type=_counts,
        metavar="N",
        help="closed loop: N callers; N,N,... is one run after the other",
    )
    group.add_argument(
        "--arrivals",
        choices=("poisson", "constant"),
        default="poisson",
        help="of an open loop: as independent callers come, or evenly (default poisson)",
    )


def _add_workload(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "what requests ask for (N, a range N-M, or a list N,M,... to draw from)"
    )
    group.add_argument(
        "--prompt-tokens",
        metavar="N",
        help="length of prompts, with what they share (default 128, or what there is room for)",
    )
    group.add_argument("--output-tokens", metavar="N", help="tokens to generate (default 32)")
    group.add_argument(
        "--shared-prefix-tokens", metavar="N", help="so much of a prompt others begin with, too"
    )
    group.add_argument(
        "--shared-prefixes",
        type=_count,
        default=1,
        metavar="K",
        help="how many such beginnings there are (default 1)",
    )
    group.add_argument(
        "--trace",
        metavar="FILE",
        help="requests from JSON lines: at_s, prompt_tokens, output_tokens and, if any, shared_prefix "
        "(a name) and shared_prefix_tokens; at their times, unless --rate or --callers is given",
    )
    group.add_argument(
        "--seed", type=int, default=0, metavar="N", help="the same seed: the same requests (default 0)"
    )


def _add_run(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("the run")
    group.add_argument(
        "--mode",
        choices=MODES,
        default="unary",
        help="Prefill and Decode as calls of their own, BatchDecode for --batch sequences of one caller, "
        "all on one Session for each process, or Execute (default unary)",
    )
    group.add_argument(
        "--batch",
        type=_count,
        default=8,
        metavar="N",
        help="with --mode batch: sequences of a caller (default 8)",
    )
    group.add_argument(
        "--warm-up", type=_seconds, metavar="S", help="seconds that do not count (default 2; of a trace 0)"
    )
    group.add_argument(
        "--duration", type=_above_zero, metavar="S", help="seconds that count (default 30, or all of a trace)"
    )
    group.add_argument(
        "--grace",
        type=_seconds,
        default=30.0,
        metavar="S",
        help="wait so long for what has not ended (default 30)",
    )
    group.add_argument(
        "--timeout", type=_above_zero, metavar="S", help="deadline of each call (default none)"
    )
    group.add_argument(
        "--processes",
        type=_count,
        metavar="N",
        help="client processes (default: half of the cores, at most 8)",
    )
    group.add_argument(
        "--max-lateness-ms",
        type=_above_zero,
        default=10.0,
        metavar="MS",
        help="if 1 in 100 requests is sent later than that, the client was the limit (default 10)",
    )


def _add_output(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("what comes of it")
    group.add_argument(
        "--slo-ttft-ms",
        type=_above_zero,
        metavar="MS",
        help="a request is good if its first token came by then",
    )
    group.add_argument(
        "--slo-tbt-ms",
        type=_above_zero,
        metavar="MS",
        help="and no gap between two messages with tokens was longer",
    )
    group.add_argument(
        "--slo-tpot-ms",
        type=_above_zero,
        metavar="MS",
        help="and its time for each token after the first was at most that",
    )
    group.add_argument("--out", metavar="FILE", help="write all figures as JSON")
    group.add_argument("--report", metavar="FILE", help="write a page with plots as HTML")
    group.add_argument(
        "--compare",
        nargs=2,
        metavar=("A.json", "B.json"),
        help="run nothing: say how B differs from A, and what of it is noise",
    )


_seconds = option_type(float, "a number of seconds", lambda value: 0 <= value < math.inf)
_above_zero = option_type(float, "a number above 0", lambda value: 0 < value < math.inf)
_count = option_type(int, "a whole number from 1", lambda value: value >= 1)
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
