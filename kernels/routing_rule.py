"""The rules by which experts are chosen: see `kernels.experts.route`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RoutingRule:
    """How experts are chosen and weighted. The default is that of Mixtral and Qwen.

    Attributes:
        sigmoid: Scores are the sigmoids of logits, not their softmax. A group is then as good as its two best
            experts, else as its best one.
        groups: The experts are divided into so many groups of adjacent ones.
        best_groups: Those of which experts are chosen.
        scale: Multiplies the weights.
        eps: Added to the sum by which scores are divided.
    """

    sigmoid: bool = False
    groups: int = 1
    best_groups: int = 1
    scale: float = 1.0
    eps: float = 0.0


BEST_SOFTMAX = RoutingRule()
