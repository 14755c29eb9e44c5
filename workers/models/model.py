"""What every model is to those who run it."""

from __future__ import annotations

from typing import Protocol

import torch

from workers.kv.tensors import KvTensors
from workers.models.inputs import ForwardInputs
from workers.models.taps import Taps


class Model(Protocol):
    """A model that reads and writes paged KV."""

    # Whether `forward` fills taps.
    has_hidden_states: bool

    def forward(self, inputs: ForwardInputs, kv: KvTensors, taps: Taps | None = None) -> torch.Tensor:
        """Writes the batch's K and V into their slots; returns [R, ...] of the wanted rows for `logits`.

        Mutates `taps`, which are None unless somebody asks for hidden states: fills each of them.
        """

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """What `forward` gave to logits [R, vocab], in the model's dtype or float32."""
