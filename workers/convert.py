"""`python -m workers.convert MODEL OUT QUANTIZATION`, as `quire convert` runs it.

See `workers.models.gguf.convert`.
"""

from __future__ import annotations

import logging
import signal
import sys
from pathlib import Path

from workers.common.protocol import EXIT_CONFIG
from workers.models.errors import ModelError
from workers.models.gguf.convert import convert

_STEP_PERCENT = 10


def main(model: str, out: str, quantization: str) -> int:
    """Write a file. Returns the exit status, with a line to standard error if it is not 0."""
    printed = 0

    def report(done: int, total: int) -> None:
        nonlocal printed
        percent = 100 * done // total // _STEP_PERCENT * _STEP_PERCENT
        if percent > printed:
            printed = percent
            _print(f"{percent}% converted")

    try:
        nbytes = convert(Path(model), Path(out), quantization, report)
    except ModelError as error:
        _print(str(error))
        return EXIT_CONFIG
    except OSError as error:
        _print(f"{out} cannot be written: {error.strerror}")
        return 1
    _print(f"{out} has {nbytes / 1e6:,.0f} MB")
    return 0


def _print(text: str) -> None:
    print(f"quire: {text}", file=sys.stderr, flush=True)


def _stop(number: int, _: object) -> None:
    """Ends the process by an exception, which removes the temporary file."""
    sys.exit(128 + number)


if __name__ == "__main__":
    logging.basicConfig(format="quire: %(message)s", level=logging.WARNING)
    for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(each) is not signal.SIG_IGN:  # as nohup has it
            signal.signal(each, _stop)
    sys.exit(main(*sys.argv[1:]))
