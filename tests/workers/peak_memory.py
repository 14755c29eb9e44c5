"""Prints the peak resident bytes before and after a load, and the bytes of the weights.

python -m tests.workers.peak_memory DIRECTORY SMALL_DIRECTORY PART_BYTES [QUANTIZATION]

The model in SMALL_DIRECTORY is loaded first: what the first load imports, and the pages of libraries that
it runs through, are not a model's, and how many become resident depends on what the system has cached.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from workers.models import checkpoint
from workers.models.weights import load_planned, plan_load


def peak_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


def main() -> None:
    """See the module's docstring."""
    torch.set_num_threads(1)
    checkpoint.PART_BYTES = int(sys.argv[3])
    quantization = next(iter(sys.argv[4:]), None)
    load_planned(plan_load(Path(sys.argv[2]), quantization=quantization), pack=True)
    before = peak_bytes()
    _, model = load_planned(plan_load(Path(sys.argv[1]), quantization=quantization), pack=True)
    print(before, peak_bytes(), model.weight_bytes)


if __name__ == "__main__":
    main()
