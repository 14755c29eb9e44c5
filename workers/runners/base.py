"""What runs a forward: the seam between the executor and the way kernels are launched."""

from __future__ import annotations

from typing import Protocol

import torch

from workers.kv.tensors import KvTensors
from workers.models.inputs import ForwardInputs


class Model(Protocol):
    """A model that reads and writes paged KV."""

    def forward(self, inputs: ForwardInputs, kv: KvTensors) -> torch.Tensor:
        """Writes the batch's K and V into their slots; returns the wanted hidden rows [R, hidden]."""

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Hidden rows [R, hidden] to logits [R, vocab], float32."""


class Runner(Protocol):
    """Runs forwards on one device."""

    name: str

    def forward(self, inputs: ForwardInputs) -> torch.Tensor:
        """Runs the batch; returns the logits of its wanted rows, [R, vocab] float32, the caller's own."""
