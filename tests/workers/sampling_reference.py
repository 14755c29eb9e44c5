"""What settings do to logits, one token at a time; for tests of the choice on any device."""

from __future__ import annotations

from collections import Counter

import numpy as np

from workers.outputs import Sampling, TokenMask
from workers.sampling import SamplingRow

INF = float("inf")
FLOAT32_MAX = float(np.finfo(np.float32).max)
# Biases and masks that leave nothing of 18 tokens, of which the model forbids token 3.
FORBIDDING_ALL: list[tuple[dict[int, float], TokenMask | None]] = [
    ({}, TokenMask(allowed=[])),
    ({}, TokenMask(packed=b"\x00\x00\xfc")),  # Only bits beyond the vocabulary.
    ({}, TokenMask()),
    ({}, TokenMask(allowed=[3, 18, 2**31])),  # The model itself forbids 3; the others are no tokens.
    ({5: -INF}, TokenMask(allowed=[5])),
    (dict.fromkeys(range(18), -INF), None),
]


def as_float32(value: float) -> float:
    return float(np.float32(min(max(value, -FLOAT32_MAX), FLOAT32_MAX)))


def adjust(logits: list[float], row: SamplingRow) -> list[float]:
    """Mask, bias and penalties, one token at a time."""
    spec = row.spec or Sampling()
    before = [*row.history[: row.history_len], *row.path]
    count = Counter(before[row.prompt_len :])
    result = []
    for token, raw in enumerate(logits):
        value, allowed = raw, True
        if row.mask and row.mask.packed is not None:
            allowed = row.mask.packed[token // 8] >> token % 8 & 1 == 1
        elif row.mask and row.mask.allowed is not None:
            allowed = token in row.mask.allowed
        if not allowed or value == -INF or spec.logit_bias.get(token) == -INF:
            result.append(-INF)
            continue
        value = as_float32(value + spec.logit_bias.get(token, 0.0))
        if token in before:
            penalty = spec.repetition_penalty
            value = as_float32(value / penalty if value > 0 else value * penalty)
        if count[token]:
            value = as_float32(value - (count[token] * spec.frequency_penalty + spec.presence_penalty))
        result.append(value)
    return result
