"""The interface of all models."""

from __future__ import annotations

from typing import Protocol

import torch

from workers.kv.tensors import KvTensors
from workers.models.hidden_states import HiddenStateCapture
from workers.models.inputs import ForwardInputs


class Model(Protocol):
    """A model that reads and writes paged KV."""

    # Whether `forward` fills `capture`.
    has_hidden_states: bool

    def forward(
        self, inputs: ForwardInputs, kv: KvTensors, capture: HiddenStateCapture | None = None
    ) -> torch.Tensor:
        """Run a batch. Writes its K and V to their slots, and fills `capture` if hidden states are wanted.

        Returns [R, ...], the wanted rows, for `logits`.
        """

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits [R, vocab] of the result of `forward`, in the model's dtype or float32."""
