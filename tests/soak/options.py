"""The options that all soaks have. Imports nothing that opens connections."""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from typing import Any

WEIGHTLESS, TINY, HYBRID = "paged-attention", "tiny", "hybrid"


def parser(
    prog: str, description: str | None, models: Sequence[str] = (WEIGHTLESS, TINY), **defaults: Any
) -> argparse.ArgumentParser:
    """Of the command line. `models`: that can be served; `defaults`: other ones than here."""
    made = argparse.ArgumentParser(prog=prog, description=description)
    made.add_argument(
        "--model",
        choices=models,
        default=TINY,
        help="that is served: tiny has adapters, hybrid has recurrent layers",
    )
    made.add_argument("--faults", type=int, help="end after so many")
    made.add_argument("--minutes", type=float, default=60.0, help="or after so long")
    made.add_argument("--seed", type=int, default=random.randrange(1 << 31), help="of prompts and faults")
    made.add_argument("--callers", type=int, default=8, help="callers, each with a sequence")
    made.add_argument("--texts", type=int, default=40, help="that they ask for")
    made.add_argument("--workers", type=int, default=2, help="workers, in soaks of several hosts one on each")
    made.add_argument(
        "--kv-pages", type=int, default=64, help="pages of each: few, so that caches are evicted"
    )
    made.add_argument("--interval-s", type=float, default=0.5, help="between two faults, on average")
    made.set_defaults(**defaults)
    return made
