"""Prints the peak resident bytes before and after a load, and the bytes of the weights.

python -m tests.workers.peak_memory DIRECTORY SMALL_DIRECTORY PART_BYTES [QUANTIZATION | transformers]

The model in SMALL_DIRECTORY is loaded first: what the first load imports, and the pages of libraries that
it runs through, are not a model's, and how many become resident depends on what the system has cached.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from workers.models import checkpoint
from workers.models.library.loading import load_library_model, plan_library_model
from workers.models.weights import load_planned, plan_load


def peak_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


def load(directory: str, how: str | None) -> int:
    """By native code, or by the library. The bytes of the weights."""
    if how == "transformers":
        return load_library_model(plan_library_model(Path(directory)))[1].weight_bytes
    return load_planned(plan_load(Path(directory), quantization=how), pack=True)[1].weight_bytes


def main() -> None:
    """See the module's docstring."""
    torch.set_num_threads(1)
    checkpoint.PART_BYTES = int(sys.argv[3])
    how = next(iter(sys.argv[4:]), None)
    load(sys.argv[2], how)
    before = peak_bytes()
    weight_bytes = load(sys.argv[1], how)
    print(before, peak_bytes(), weight_bytes)


if __name__ == "__main__":
    main()
