"""Captures hidden states during a forward.

Layers are numbered as in `hidden_states` of the transformers library: 0 is the embedding that the first layer
reads, i is the output of layer i, and the last one is after the final norm.

Dimension letters: T tokens of the batch; R wanted rows; K captured rows of a layer; C hidden width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch


class HiddenStateCapture:
    """Copies chosen rows of chosen layers, and no others.

    Attributes:
        found: By layer, [K, C] in the model's dtype, owned by this object.
    """

    def __init__(self, rows: Mapping[int, Sequence[int]]) -> None:
        """`rows`: by layer, at least one index into `ForwardInputs.wanted_rows`."""
        self.rows = rows
        self.found: dict[int, torch.Tensor] = {}

    def capture_rows(self, layer: int, wanted_rows: torch.Tensor, *parts: torch.Tensor) -> None:
        """Copy the chosen rows of a layer, if there are any.

        Args:
            layer: Its number.
            wanted_rows: [R] int64, `ForwardInputs.wanted_rows`, on the device of the parts.
            parts: [T, C] each; their sum is the hidden states. Not modified.
        """
        rows = self.rows.get(layer)
        if rows is not None:
            index = wanted_rows.index_select(0, torch.tensor(rows, device=wanted_rows.device))  # [K]
            first, *others = (part.index_select(0, index) for part in parts)
            for other in others:
                first += other
            self.found[layer] = first

    def capture_last(self, layer: int, states: torch.Tensor) -> None:
        """Copy the chosen rows of `states` [R, C], which has the wanted rows only."""
        rows = self.rows.get(layer)
        if rows is not None:
            self.found[layer] = states.index_select(0, torch.tensor(rows, device=states.device))
