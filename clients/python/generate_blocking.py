"""Writes the blocking client from the asyncio one, word for word without `await`.

    python clients/python/generate_blocking.py            writes quire/client.py from quire/aio.py
    python clients/python/generate_blocking.py --check    fails if that differs from what would be written

So there is one description of both, and each stands in the repository as plain code, with its types and
docstrings. What the two do not say alike is in _PHRASES. Needs ruff, which lays the result out.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent / "quire"
SOURCE, GENERATED = PACKAGE / "aio.py", PACKAGE / "client.py"
COMMAND = "clients/python/generate_blocking.py"

# What is said once only, and must be there.
_PHRASES = (
    (
        '"""The asyncio client. The blocking one is generated from this file: see generate_blocking.py."""',
        f'"""The blocking client. Generated from aio.py by {COMMAND}: change that file."""',
    ),
    (
        "A connection to a Quire server, of the event loop it was made in. Close it, or use `async with`.",
        "A connection to a Quire server. Safe for use by several threads; close it, or use it in a `with`.",
    ),
    (
        "A stream of many calls, by any number of tasks of one event loop. Close it, or use `async with`.",
        "A stream of many calls. Safe for use by several threads; close it, or use it in a `with`.",
    ),
    ("given up (cancelled, or its time limit\n    passed) may", "given up (its time limit passed)\n    may"),
    ("use it in an `async with`", "use it in a `with`"),
    ("# The stream's tasks do not know", "# The stream's threads do not know"),
)
# What is said all over, words or patterns.
_WORDS = (
    (r"\bimport asyncio\b", "import time"),
    (r"\basyncio\.sleep\(", "time.sleep("),
    (r"grpc\.aio\.AioRpcError\b", "grpc.RpcError"),
    (r"\bgrpc\.aio\.", "grpc."),
    (r"\b__a(enter|exit)__\b", r"__\1__"),
    (r"\b(_?)Async(?=[A-Z])", r"\1"),
    (r"\bawait ", ""),
    (r"\basync (?=def |with |for )", ""),
)


def main() -> int:
    """Runs the command line. Returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="fail if it is stale; write nothing")
    wanted = blocking(SOURCE.read_text(encoding="utf-8"))
    if not parser.parse_args().check:
        GENERATED.write_text(wanted, encoding="utf-8")
        return 0
    if GENERATED.read_text(encoding="utf-8") == wanted:
        return 0
    print(f"{GENERATED.name} is not that of {SOURCE.name}: run {COMMAND}", file=sys.stderr)
    return 1


def blocking(source: str) -> str:
    """The blocking client, of the asyncio one. Raises ValueError where a phrase is not there."""
    for phrase, other in _PHRASES:
        if source.count(phrase) != 1:
            raise ValueError(f"{SOURCE.name} should say once: {phrase}")
        source = source.replace(phrase, other)
    for pattern, word in _WORDS:
        source = re.sub(pattern, word, source)
    if left := re.search(r".*\b(?:async|asyncio|await|Async\w*)\b.*", source):
        raise ValueError(f"in the blocking client there would be: {left[0].strip()}")
    return formatted(source)


def formatted(source: str) -> str:
    """`source` as `ruff` lays it out, its imports in order."""
    ruff = Path(sys.executable).with_name("ruff")
    name = ("--stdin-filename", str(GENERATED), "-")
    for command in (("check", "--quiet", "--fix-only", "--select", "I"), ("format", "--quiet")):
        done = subprocess.run(  # noqa: S603 - our own tool
            [ruff, *command, "--no-cache", *name], input=source, capture_output=True, text=True, check=True
        )
        source = done.stdout
    return source


if __name__ == "__main__":
    sys.exit(main())
