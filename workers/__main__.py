"""Entry point of a worker process: `python -m workers`. See `pool_member`."""

from __future__ import annotations

import gc
import os
import sys

# Imports make hundreds of thousands of objects that stay: looking through them again and again takes a third
# of the time. See `WorkerServer`.
gc.disable()

try:
    from workers.common.child_process import open_standard_files

    open_standard_files()
    from workers.logging import background_log
    from workers.pool_member import main
    from workers.process import STOP_TIMEOUT_S
except ModuleNotFoundError as missing:
    needed = "protobuf, psutil and uvloop, beside what kernels and models need"
    sys.exit(f"python -m workers needs {missing.name}, which is not installed. It needs {needed}.")

if __name__ == "__main__":
    sys.stdout.flush()
    # Not sys.exit: that would wait for a compute thread in a long step.
    status = main()
    background_log().drain(STOP_TIMEOUT_S)
    os._exit(status)
