"""A process that breaks its device: `python -m tests.gpu.lose_device MODEL_DIR DEVICE prefill|decode`.

It asks the engine, which does not look, for a token beyond the vocabulary: on a GPU that is an assertion in a
kernel. Nothing can be done in the process after that, which is why it is one of its own. Prints the type of
what is raised.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from benchmarks.in_process import LlmExecutor
from workers.executors.memory import StepLimits
from workers.operations import Chunk, Forward

BEYOND = 1_000_000


def main() -> None:
    directory, device, operation = sys.argv[1:]
    limits = StepLimits(max_tokens=64, max_items=2)
    executor = LlmExecutor.load(Path(directory), device=device, kv_pages=16, limits=limits, self_check=False)
    executor.prefill(0, [1, 2, 3])
    executor.decode(0, 4)
    try:
        prefill, decode = Forward(1, 1, 0, [5, BEYOND, 6]), Forward(2, 0, 4, [BEYOND])
        forward = prefill if operation == "prefill" else decode
        executor.engine.begin(forward)
        executor.engine.execute([Chunk(forward, 0, forward.remaining)])
        print("nothing", flush=True)
    except Exception as error:
        print(type(error).__name__, flush=True)
    os._exit(0)  # what would be torn down otherwise is on the device


if __name__ == "__main__":
    main()
