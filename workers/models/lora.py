"""The weights of LoRA adapters: what is read from a directory, for any model that has the projections."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class LoraPair:
    """One adapted projection: y += (x A^T) B^T.

    Attributes:
        a: [r, I], on the CPU, in float32 or the model's dtype.
        b: [O, r], as `a`. The scale (alpha / r, or alpha / sqrt(r)) is multiplied in.
    """

    a: torch.Tensor
    b: torch.Tensor


LoraWeights = Mapping[str, LoraPair]
"""By the name of the module in the model's checkpoint: "model.layers.0.self_attn.q_proj"."""
