"""Runs a forward by calling the model. Works everywhere."""

from __future__ import annotations

import torch

from workers.kv.tensors import KvTensors
from workers.models.inputs import ForwardInputs
from workers.runners.base import Model


class EagerRunner:
    """A runner without any preparation."""

    name = "eager"

    def __init__(self, model: Model, kv: KvTensors) -> None:
        self._model = model
        self._kv = kv

    def forward(self, inputs: ForwardInputs) -> torch.Tensor:
        """Runs the batch; returns the logits of its wanted rows, [R, vocab] float32, the caller's own."""
        with torch.inference_mode():
            hidden = self._model.forward(inputs, self._kv)  # [R, hidden]
            return self._model.logits(hidden)  # [R, vocab]
