"""Prints the peak resident bytes before and after a load, and the bytes of the weights.

python -m tests.workers.peak_memory DIRECTORY PART_BYTES
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from kernels.linear import pack_weight
from workers.models import checkpoint
from workers.models.weights import load_planned, plan_load


def peak_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


def main() -> None:
    """See the module's docstring."""
    torch.set_num_threads(1)
    # Loads the code.
    pack_weight(torch.zeros(64, 64).bfloat16(), in_place=True)
    checkpoint.PART_BYTES = int(sys.argv[2])
    before = peak_bytes()
    _, model = load_planned(plan_load(Path(sys.argv[1])), pack=True)
    print(before, peak_bytes(), model.weight_bytes)


if __name__ == "__main__":
    main()
