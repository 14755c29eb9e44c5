"""What some models have in attention beside a scale and a mask, for the tests of all its kernels."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

# Of so many heads: a cap that most scores feel, sinks of no weight and of most of it, slopes as of BLOOM.
SCORINGS: dict[str, Callable[[int], Any]] = {
    "softcap": lambda heads: 1.5,
    "sinks": lambda heads: torch.tensor([-math.inf, *range(heads - 1)]).sub(1),
    "alibi_slopes": lambda heads: 2 ** (-8 * (torch.arange(heads) + 1.0) / heads),
}
# No model has both a cap and slopes, and no order is known for them.
FEATURES = [["softcap"], ["sinks"], ["alibi_slopes"], ["softcap", "sinks"], ["alibi_slopes", "sinks"]]
