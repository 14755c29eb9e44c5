"""Hidden states that are wanted of a forward, and where the model leaves them.

Layers are counted as the transformers library counts `hidden_states`: 0 is the embedding that the first layer
reads, i what layer i leaves, and the number of layers the last one, after the final norm.

Dimension letters: T tokens of the batch; R wanted rows; K tapped rows of a layer; C hidden width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch


class Taps:
    """Which of a forward's wanted rows are read in which layers. Of rows that nobody reads nothing is copied.

    Attributes:
        found: By layer, [K, C] in the model's dtype, owned by the taps: what the model has left.
    """

    def __init__(self, rows: Mapping[int, Sequence[int]]) -> None:
        """`rows`: by layer, indices into `ForwardInputs.wanted_rows`, at least one."""
        self.rows = rows
        self.found: dict[int, torch.Tensor] = {}

    def tap(self, layer: int, wanted_rows: torch.Tensor, *parts: torch.Tensor) -> None:
        """Keep what a layer leaves of the rows that are read there, if any is.

        Args:
            layer: Its number.
            wanted_rows: [R] int64, the rows of T that are wanted, on the device of the parts.
            parts: [T, C] each, which together are the hidden states. Not modified.
        """
        rows = self.rows.get(layer)
        if rows is not None:
            index = wanted_rows.index_select(0, torch.tensor(rows, device=wanted_rows.device))  # [K]
            first, *others = (part.index_select(0, index) for part in parts)
            for other in others:
                first += other
            self.found[layer] = first

    def tap_last(self, layer: int, states: torch.Tensor) -> None:
        """The same of the last ones, of which there are the wanted rows only: `states` is [R, C]."""
        rows = self.rows.get(layer)
        if rows is not None:
            self.found[layer] = states.index_select(0, torch.tensor(rows, device=states.device))
