"""What runs a forward: the seam between the executor and the way kernels are launched."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

import torch

from workers.models.inputs import ForwardInputs
from workers.models.taps import Taps
from workers.sampling import SamplingError, SamplingRow

# In errors of the device that are no AcceleratorError: those of libraries, and of Triton's launcher.
_DEVICE_ERRORS = ("CUDA error", "Triton Error [CUDA]")


class DeviceLostError(Exception):
    """The device has failed, and nothing on it can be used any more: the process has to end."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step gave for each wanted row. Valid until the runner's next step.

    Attributes:
        logits: [R, vocab] in the model's dtype or float32, on the runner's device.
        chosen: [R] int64, the chosen token of each row, on any device.
        failed: By row, why it has none.
    """

    logits: torch.Tensor
    chosen: torch.Tensor
    failed: Mapping[int, SamplingError] = field(default_factory=dict)


class Runner(Protocol):
    """Runs forwards on one device."""

    name: str
    # Whether the model fills taps.
    has_hidden_states: bool

    def step(
        self, inputs: ForwardInputs, rows: Sequence[SamplingRow], taps: Taps | None = None
    ) -> StepResult:
        """Runs the batch and chooses a token for each of its wanted rows.

        Args:
            inputs: The batch, on the host.
            rows: How to choose, one for each of `inputs.wanted_rows`.
            taps: Filled with the hidden states that are wanted. None: nobody asks for any.

        Raises:
            BadLogitsError: Rows that a graph chooses for have no usable logits.
            DeviceLostError: See there.
        """


@contextmanager
def device_errors() -> Iterator[None]:
    """Turn an error after which the device's context is of no use into DeviceLostError."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise  # Nothing was done to the device: the step may be run again, in smaller parts.
    except RuntimeError as error:
        text = str(error)
        if isinstance(error, torch.AcceleratorError) or any(marker in text for marker in _DEVICE_ERRORS):
            raise DeviceLostError(text.partition("\n")[0]) from error
        raise
