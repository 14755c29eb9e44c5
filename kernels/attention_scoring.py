"""How attention turns scores into weights: the settings of a layer besides its queries, keys and values.

A score is the product of a query and a key. It is scaled, then either capped or lowered by the distance of
the key. The softmax over the visible keys may have an additional term, the sink:

    s = scale * query . key
    s = softcap * tanh(s / softcap)                        soft-capping: Gemma 2
    s = s + slope[h] * (key position - own position)       ALiBi: BLOOM, MPT, some Falcons
    weight = exp(s) / (sum of exp(s) + exp(sink[h]))       a sink, in the last term: gpt-oss

Dimension letters: H query heads.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from kernels.checks import check_tensor


@dataclass(frozen=True, slots=True, eq=False)
class Scoring:
    """The parameters of the formulas above, the same for all tokens of a forward.

    Attributes:
        scale: Multiplies the scores.
        sliding_window: The number of positions that a token attends to, its own included; None: all.
        softcap: The bound of the absolute value of scores; None: no bound.
        sinks: [H] float32 contiguous, the logit of each head's sink; -inf: no sink.
        alibi_slopes: [H] float32 contiguous, the decrease of a head's scores per position of distance.
    """

    scale: float
    sliding_window: int | None = None
    softcap: float | None = None
    sinks: torch.Tensor | None = None
    alibi_slopes: torch.Tensor | None = None

    @property
    def is_plain(self) -> bool:
        """Whether there is only a scale and a mask."""
        return self.softcap is None and self.sinks is None and self.alibi_slopes is None

    def check(self, heads: int, device: torch.device) -> None:
        """Check the parameters for a layer with `heads` query heads. Does not read the content of tensors.

        Raises:
            ValueError, TypeError: A field does not fit, by name.
        """
        if self.sliding_window is not None and self.sliding_window < 1:
            raise ValueError(f"sliding_window: must be positive or None, got {self.sliding_window}")
        if self.softcap is not None and not 0 < self.softcap < math.inf:
            raise ValueError(f"softcap: must be positive and finite, or None, got {self.softcap}")
        if self.softcap is not None and self.alibi_slopes is not None:
            raise ValueError("softcap: no order is known for it and alibi_slopes together")
        for name, of_heads in (("sinks", self.sinks), ("alibi_slopes", self.alibi_slopes)):
            if of_heads is None:
                continue
            check_tensor(name, of_heads, (heads,), (torch.float32,))
            if of_heads.device != device:
                raise TypeError(f"{name}: must be on the device of query, {device}, got {of_heads.device}")
