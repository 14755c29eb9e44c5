"""Compiles a model's kernels: `python -m benchmarks.gpu.precompiled SHAPE BATCH CONTEXT REHEARSAL FORMAT`.

FORMAT: how its matrices are quantised, a name of `workers.models.recipes`; empty: they are not. Prints
JSON: how many there are, the seconds of the slowest ones by name, and the errors.
"""

from __future__ import annotations

import json
import sys

import torch

from benchmarks.gpu.dry_run import Steps
from benchmarks.gpu.launches import Device
from benchmarks.gpu.precompile import precompile
from benchmarks.gpu.shapes import SHAPES
from workers.models.config import ModelConfig
from workers.models.model import PAGE_SIZE

# In a rehearsal without a device, that of an H100.
_H100 = Device((9, 0), 132, 232_448)
_SHOWN = 3


def main() -> None:
    """Compiles in a process for each core."""
    shape, batch, context_tokens, rehearses = sys.argv[1], *map(int, sys.argv[2:5])
    quantization = sys.argv[5] or None
    config = ModelConfig.from_settings(SHAPES[shape].hf_config())
    steps = Steps(batch, -(-context_tokens // PAGE_SIZE))
    device = _H100 if rehearses else None
    done = list(precompile(config, torch.bfloat16, steps, device, quantization=quantization))
    done.sort(key=lambda one: -one.seconds)
    found = {
        "kernels": len(done),
        "slowest": {one.name: one.seconds for one in done[:_SHOWN]},
        "errors": [f"{one.name}: {one.error}" for one in done if one.error],
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
