"""Captures hidden states and routed experts of a forward for the caller.

Layers are numbered as in `hidden_states` of the transformers library: 0 is the embedding that the first layer
reads, i is the output of layer i, and the last one is after the final norm.

Dimension letters: T tokens of the batch; R wanted rows; K captured rows; L layers with experts; E experts of
a token; C hidden width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch


class RowCapture:
    """Copies chosen rows, and no others.

    Attributes:
        rows: By layer, the rows whose hidden states are captured.
        expert_rows: The rows whose experts are captured. None: all rows of the batch, if all are wanted; then
            nothing is copied and no kernel launched.
        found: By layer, [K, C] in the model's dtype, owned by this object.
        experts: One for each layer with experts, [K, E] int64, owned by this object. Empty: none.
    """

    def __init__(self, rows: Mapping[int, Sequence[int]], expert_rows: Sequence[int] | None = ()) -> None:
        """`rows`: at least one for each layer. All rows are indexes into `ForwardInputs.wanted_rows`."""
        self.rows = rows
        self.expert_rows = expert_rows
        self.found: dict[int, torch.Tensor] = {}
        self.experts: list[torch.Tensor] = []

    def capture_rows(self, layer: int, wanted_rows: torch.Tensor, *parts: torch.Tensor) -> None:
        """Copy the chosen rows of a layer, if there are any.

        Args:
            layer: The number of the layer.
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
        """Copy the chosen rows of `states` [R, C], which has only the wanted rows."""
        rows = self.rows.get(layer)
        if rows is not None:
            self.found[layer] = states.index_select(0, torch.tensor(rows, device=states.device))

    def keep(self, rows: Sequence[int]) -> None:
        """Drop the captured data of all rows but these."""
        kept = set(rows)
        for layer, states in self.found.items():
            self.found[layer] = states[[at for at, row in enumerate(self.rows[layer]) if row in kept]]
        if self.expert_rows:
            left = [at for at, row in enumerate(self.expert_rows) if row in kept]
            self.experts = [ids[left] for ids in self.experts]


@dataclass(frozen=True, slots=True)
class Routing:
    """Given experts for replay, and capture of routed experts, in layers with experts.

    Attributes:
        given: [rows, L, E] int64, the experts that each row is computed with. Rows of -1 are routed as usual.
            None: all are routed as usual.
        rows: [K] int64, the rows whose experts are captured. None: all rows.
        found: The list to which each layer appends [K, E]. None: nothing is captured.
    """

    given: torch.Tensor | None
    rows: torch.Tensor | None
    found: list[torch.Tensor] | None

    def given_of(self, layer: int) -> torch.Tensor | None:
        """The given experts [rows, E] of the layer with this number among the layers with experts."""
        return None if self.given is None else self.given[:, layer]

    def note(self, expert_ids: torch.Tensor) -> None:
        """Capture the experts [rows, E] of the next layer."""
        if self.found is not None:
            ids = expert_ids if self.rows is None else expert_ids.index_select(0, self.rows)
            self.found.append(ids)


def routing_of(
    given: torch.Tensor | None, wanted_rows: torch.Tensor, capture: RowCapture | None, num_rows: int
) -> tuple[Routing | None, Routing | None]:
    """For the rows of the batch, and for the wanted rows only, which is all that the last layer gets.

    Args:
        given: [T, L, E], `ForwardInputs.experts`.
        wanted_rows: [R] int64, on the device of the model.
        capture: Receives the captured experts.
        num_rows: T.

    Returns:
        None for both if the experts are neither given nor captured.
    """
    found, rows, wanted = None, None, None
    if capture is not None and capture.expert_rows is None:
        found = capture.experts
        if len(wanted_rows) < num_rows:  # some rows are of tokens that are computed again
            rows = wanted_rows
    elif capture is not None and capture.expert_rows:
        found = capture.experts
        wanted = torch.tensor(capture.expert_rows, device=wanted_rows.device)  # [K] int64
        rows = wanted_rows.index_select(0, wanted)
    if given is None and found is None:
        return None, None
    given_wanted = None if given is None else given.index_select(0, wanted_rows)
    return Routing(given, rows, found), Routing(given_wanted, wanted, found)
