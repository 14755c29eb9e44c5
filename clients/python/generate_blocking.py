"""Generates the blocking client from the asyncio one by removing `async` and `await`.

    python clients/python/generate_blocking.py            writes client.py, _caches.py and _server.py in quire
    python clients/python/generate_blocking.py --check    fails if one of them is not up to date

There is one source for both, and both are committed as plain code with types and docstrings. _PHRASES has the
texts in which they differ. Needs ruff to format the result.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent / "quire"
# The source of each generated file.
SOURCES = {"client.py": "aio.py", "_caches.py": "_aio_caches.py", "_server.py": "_aio_server.py"}
COMMAND = "clients/python/generate_blocking.py"

# Texts that occur exactly once in the sources.
_PHRASES = (
    (
        '"""The asyncio client. The blocking one is generated from this file: see generate_blocking.py."""',
        f'"""The blocking client. Generated from aio.py by {COMMAND}: change that file."""',
    ),
    (
        "A connection to a Quire server, for one event loop. Close it, or use `async with`.",
        "A connection to a Quire server. Thread-safe. Close it, or use `with`.",
    ),
    (
        "A stream of many calls, for any number of tasks of one event loop. Close it, or use `async with`.",
        "A stream of many calls. Thread-safe. Close it, or use `with`.",
    ),
    (
        "An abandoned call (cancelled, or its timeout\n    passed) may",
        "An abandoned call (its timeout passed)\n    may",
    ),
    (
        """Caches, and the calls that make them or score, of the asyncio client and its sessions.

The blocking ones are generated from this file: see generate_blocking.py.
""",
        f"""Caches, and the calls that make them or score, of the blocking client and its sessions.

Generated from _aio_caches.py by {COMMAND}: change that file.
""",
    ),
    (
        """The calls of the asyncio client that concern the server itself: its model, adapters and workers.

The blocking ones are generated from this file: see generate_blocking.py.
""",
        f"""The calls of the blocking client that concern the server itself: its model, adapters and workers.

Generated from _aio_server.py by {COMMAND}: change that file.
""",
    ),
    ("# The stream's tasks do not refer", "# The stream's threads do not refer"),
)
# Patterns that are replaced everywhere.
_WORDS = (
    (r"\bimport asyncio\b", "import time"),
    (r"\b_aio_(caches|server)\b(?!\.py)", r"_\1"),
    (r"\basyncio\.sleep\(", "time.sleep("),
    (r"grpc\.aio\.AioRpcError\b", "grpc.RpcError"),
    (r"\bgrpc\.aio\.", "grpc."),
    (r"\b__a(enter|exit|iter)__\b", r"__\1__"),
    (r"\b(_?)Async(?=[A-Z])", r"\1"),
    (r"\bawait ", ""),
    (r"\ban `async ", "a `async "),
    (r"\basync (?=(?:def|with|for)\b)", ""),
    # What makes `async with client.prefill(...)` possible.
    (r"(?m)^ *(@opens|from quire\._opening import opens)\n", ""),
)


def main() -> int:
    """Runs the command line. Returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="fail if it is stale; write nothing")
    options = parser.parse_args()
    sources = {name: (PACKAGE / name).read_text(encoding="utf-8") for name in SOURCES.values()}
    for phrase, _ in _PHRASES:
        if sum(source.count(phrase) for source in sources.values()) != 1:
            raise ValueError(f"{' and '.join(sources)} must contain exactly once: {phrase}")
    stale = []
    for name, source_name in SOURCES.items():
        generated, wanted = PACKAGE / name, formatted(blocking(sources[source_name]), name)
        if not options.check:
            generated.write_text(wanted, encoding="utf-8")
        elif generated.read_text(encoding="utf-8") != wanted:
            stale.append(f"{name} is not that of {source_name}: run {COMMAND}")
    print(*stale, sep="\n", end="\n" if stale else "", file=sys.stderr)
    return 1 if stale else 0


def blocking(source: str) -> str:
    """The blocking module for an asyncio one, not formatted. Raises ValueError if a word is left."""
    for phrase, other in _PHRASES:
        source = source.replace(phrase, other)
    for pattern, word in _WORDS:
        source = re.sub(pattern, word, source)
    if left := re.search(r".*\b(?:async|asyncio|await|Async\w*)\b.*", source):
        raise ValueError(f"in the blocking client there would be: {left[0].strip()}")
    return source


def formatted(source: str, file_name: str) -> str:
    """`source` formatted by ruff, with sorted imports."""
    ruff = Path(sys.executable).with_name("ruff")
    name = ("--stdin-filename", str(PACKAGE / file_name), "-")
    for command in (("check", "--quiet", "--fix-only", "--select", "I"), ("format", "--quiet")):
        done = subprocess.run(  # noqa: S603 - our own tool
            [ruff, *command, "--no-cache", *name], input=source, capture_output=True, text=True, check=True
        )
        source = done.stdout
    return source


if __name__ == "__main__":
    sys.exit(main())
