"""Runs the self-check of native code in a child process, so that its memory is freed at its end.

The libraries that the check imports take 180 MB, and its tensors up to 200 MB more, of which malloc keeps a
part. In the worker's process this memory would never be freed.
"""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
from typing import Any

import torch

from workers.common.child_process import import_path, set_death_signal
from workers.common.machine_limits import available_bytes
from workers.kv.sizing import KvSizingError
from workers.models.errors import ModelError

# It takes seconds, or minutes on an overloaded machine.
_TIMEOUT_S = 1800.0


def check_apart(*arguments: Any) -> float | None:
    """The result of `check_native` on the CPU with these arguments, computed in a child process.

    Raises:
        ModelError, KvSizingError: As `check_native`.
        ImportError: The transformers library cannot be imported.
        MemoryError, RuntimeError: Memory ran out; or the process ended without a result, or timed out.
    """
    try:
        process = subprocess.run(
            # -P: modules are not imported from the current directory.
            [sys.executable, "-P", "-m", "workers.models.check_process"],
            # Pickle is safe here: both processes run the same code, and nobody else has the pipe.
            input=pickle.dumps((os.getpid(), torch.get_num_threads(), arguments)),
            stdout=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": import_path()},
            check=False,
            timeout=_TIMEOUT_S,
        )
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"the self-check has not ended within {_TIMEOUT_S:.0f} s") from None
    if process.returncode:
        raise RuntimeError(
            f"the self-check's process has ended with status {process.returncode}, and"
            f" {available_bytes() >> 20} MiB of memory are free"
        )
    found: float | Exception | None = pickle.loads(process.stdout)  # noqa: S301 - of our own child
    if isinstance(found, Exception):
        raise found
    return found


def _main() -> None:
    """Runs in the child: reads arguments from standard input, writes the result to standard output."""
    set_death_signal(signal.SIGKILL)
    parent, threads, arguments = pickle.load(sys.stdin.buffer)  # noqa: S301 - of our own parent
    if os.getppid() != parent:
        sys.exit(1)  # it ended before the signal was set
    result = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # for what libraries print
    torch.set_num_threads(threads)
    found: float | Exception | None
    try:
        # Imported here: the parent must not import it, and the import may run out of memory.
        from workers.models.native_parity_check import check_native  # noqa: PLC0415

        found = check_native(*arguments)
    except (ImportError, ModelError, KvSizingError, MemoryError, RuntimeError) as error:
        found = error
    with result:
        result.write(pickle.dumps(found))


if __name__ == "__main__":
    _main()
