"""What settings do to logits and which tokens they keep, by their definitions; for tests of any device."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import torch

from workers.outputs import FILTERS, Sampling, TokenMask
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


def kept_tokens(logits: torch.Tensor, spec: Sampling) -> torch.Tensor:
    """Which tokens `outputs.FILTERS` keep of a row after mask, bias and penalties: their ids, ascending."""
    values, ids = logits.double().sort(descending=True, stable=True)
    log_weight = (logits.double() - values[0]) / spec.temperature
    weight = log_weight.exp()
    ids = ids[values > -INF][: spec.top_k or None]
    if spec.top_p < 1:
        before = weight[ids].cumsum(0) - weight[ids]
        ids = ids[before < spec.top_p * weight[ids].sum()]
    ids = ids[weight[ids] >= spec.min_p]
    if spec.typical_p < 1:
        logprob = log_weight[ids].log_softmax(0)
        entropy = -(logprob.exp() * logprob).sum()
        distance = (-logprob - entropy).abs()
        nearest = distance.argsort()
        is_short = logprob[nearest].exp().cumsum(0) < spec.typical_p
        ids = ids[distance <= distance[nearest[: 1 + int(is_short.sum())]].max()]
    return ids.sort().values


def any_filters(rng: np.random.Generator, vocab: int) -> dict[str, Any]:
    """A value of each of `outputs.FILTERS`: mild, extreme, or half of the time one that keeps all."""
    values: dict[str, list[float]] = {
        "top_k": [0, 0, 0, 1, 7, vocab // 2 + 1],
        "top_p": [1.0, 1.0, 1.0, 0.9, 0.3, 1e-9],
        "min_p": [0.0, 0.0, 0.0, 0.02, 0.05, 1.0],
        "typical_p": [1.0, 1.0, 1.0, 0.9, 0.2, 1e-9],
    }
    return {name: rng.choice(values[name]).item() for name in FILTERS}
