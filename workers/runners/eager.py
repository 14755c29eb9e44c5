"""Runs a forward by calling the model. Works on every device."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from workers import device_sampling, sampling
from workers.kv.tensors import KvTensors
from workers.models.capture import RowCapture
from workers.models.decoder import Decoder
from workers.models.inputs import ForwardInputs
from workers.models.model import Model
from workers.runners.base import StepResult
from workers.sampling import SamplingRow


class EagerRunner:
    """A runner that launches each operation separately."""

    name = "eager"
    can_launch = False

    def __init__(self, model: Model, kv: KvTensors) -> None:
        self._model = model
        self._kv = kv
        self.has_hidden_states = model.has_hidden_states

    def use(self, model: Model) -> None:
        """Run another model of the same config from the next step on."""
        self._model = model

    def step(
        self, inputs: ForwardInputs, rows: Sequence[SamplingRow], capture: RowCapture | None = None
    ) -> StepResult:
        """See `Runner.step`. The caller owns the logits."""
        # The model's methods enter inference mode themselves. The rest of a step computes no gradients
        # anyway.
        hidden = self._model.forward(inputs.to(self._kv.device), self._kv, capture)  # [R, hidden]
        if hidden.is_cuda and not rows:
            # Nothing is read back. Without waiting, errors and time would be attributed to the next step.
            torch.cuda.current_stream(hidden.device).synchronize()
        logits = self._model.logits(hidden)  # [R, vocab]
        if not logits.is_cuda:
            logits = logits.float()  # numpy has no bfloat16; converted once for all that follows
        result = choose_tokens(logits, rows)
        if isinstance(self._model, Decoder) and self._model.mtp_head is not None:
            result.hidden = hidden
        return result

    def draft(
        self, inputs: ForwardInputs, rows: Sequence[SamplingRow], hidden: torch.Tensor
    ) -> tuple[list[int], torch.Tensor]:
        """The tokens that the model's head for multi-token prediction drafts; see `Decoder.draft`.

        Raises SamplingError if a row has no token.
        """
        assert isinstance(self._model, Decoder)
        logits, after = self._model.draft(inputs, hidden, self._kv)
        chosen: list[int] = _choose(logits.float(), rows).tolist()
        return chosen, after

    def launch(self, *_: object, **__: object) -> None:
        """See `Runner.launch`: it cannot."""


def choose_tokens(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> StepResult:
    """Choose tokens on the device of the logits. Rows without a token are in `failed`."""
    try:
        return StepResult(logits, _choose(logits, rows))
    except sampling.SamplingError as error:
        left = [row for row in range(len(rows)) if row not in error.rows]
        others = choose_tokens(logits[left], [rows[row] for row in left])
        chosen = torch.zeros(len(rows), dtype=torch.int64, device=others.chosen.device)
        chosen[left] = others.chosen
        failed = dict.fromkeys(error.rows, error) | {left[row]: why for row, why in others.failed.items()}
        return StepResult(logits, chosen, failed)


def _choose(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> torch.Tensor:
    """See `workers.sampling.choose_tokens`."""
    if not rows:
        return torch.empty(0, dtype=torch.int64)
    if logits.is_cuda:
        return device_sampling.choose_tokens(logits, rows)
    return sampling.choose_tokens(logits, rows)
