"""The interface of runners, which launch the kernels of a forward."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from workers.models.capture import RowCapture
from workers.models.inputs import ForwardInputs
from workers.sampling import SamplingError, SamplingRow

# In device errors that are not of type AcceleratorError: those of libraries, and of Triton's launcher.
_DEVICE_ERRORS = ("CUDA error", "Triton Error [CUDA]")


class DeviceLostError(Exception):
    """The device has failed and is unusable: the process has to end."""


@dataclass(slots=True)
class StepResult:
    """A step's results for each wanted row. Valid until the runner's next step.

    Attributes:
        logits: [R, vocab] in the model's dtype or float32, on the runner's device.
        chosen: [R] int64, the chosen token of each row, on any device.
        failed: By row, why it has no chosen token.
        hidden: [R, C] the hidden states for the head for multi-token prediction. None: the model has none.
    """

    logits: torch.Tensor
    chosen: torch.Tensor
    failed: Mapping[int, SamplingError] = field(default_factory=dict)
    hidden: torch.Tensor | None = None


class LaunchedStep(Protocol):
    """A step that was launched, and whose tokens are not read yet."""

    def is_done(self) -> bool:
        """Whether `chosen` would not wait."""

    def chosen(self) -> torch.Tensor:
        """Waits for the tokens: [R] int64 on the host, valid until two further steps are launched.

        Raises:
            BadLogitsError: The logits of some rows are unusable.
            NothingAllowedError: Masks and biases leave some rows no token.
            DeviceLostError: The device has failed.
        """

    def logits(self) -> AbstractContextManager[torch.Tensor]:
        """[R, vocab] on the device, once `chosen` was called. Only to be read within the context."""


class After(NamedTuple):
    """The step behind which another one is launched, before its tokens are read.

    Attributes:
        step: The last step that was launched.
        places: [R] int64, which row of that step each row of the new one continues, so that only the device
            knows its token. -1: none, and the host knows its token. None: each row continues the row with the
            same index, and its next token is chosen with the same settings.
    """

    step: LaunchedStep
    places: NDArray[np.int64] | None = None


class Runner(Protocol):
    """Runs forwards on one device."""

    # Whether the model can fill `capture`.
    has_hidden_states: bool

    @property
    def name(self) -> str:
        """How decodes run: "eager" or "cuda_graph"."""

    @property
    def can_launch(self) -> bool:
        """Whether `launch` may return a step."""

    def step(
        self, inputs: ForwardInputs, rows: Sequence[SamplingRow], capture: RowCapture | None = None
    ) -> StepResult:
        """Runs the batch and chooses a token for each of its wanted rows.

        Args:
            inputs: The batch, on the host.
            rows: How to choose the token of each row in `inputs.wanted_rows`.
            capture: Filled with the hidden states and experts that it names. None: none.

        Raises:
            BadLogitsError: A graph has computed unusable logits for some rows.
            DeviceLostError: The device has failed.
        """

    def launch(
        self,
        inputs: ForwardInputs,
        rows: Sequence[SamplingRow],
        *,
        chunks: ForwardInputs | None = None,
        keeps_logits: bool = False,
        after: After | None = None,
    ) -> LaunchedStep | None:
        """Launches a step of single tokens without waiting for it. None, without an effect: it cannot.

        Until the tokens of the last launched step are read, `step` runs behind it.

        Args:
            inputs: As for `step`. Tokens that only the device knows are not read.
            rows: As for `step`. The last token of a history is not read if only the device knows it. May be
                empty if all rows are chosen as in the previous step.
            chunks: Chunks of prompts, computed in the same forward: see `ForwardInputs.with_chunks`. On the
                host.
            keeps_logits: Whether the logits can still be read after the next step was launched.
            after: The step behind which it is launched. None: the tokens of all earlier steps were read.

        Raises:
            DeviceLostError: The device has failed.
        """


def raise_if_lost(error: Exception) -> None:
    """Raise DeviceLostError for an error after which the device's context is unusable."""
    if not isinstance(error, RuntimeError) or isinstance(error, torch.OutOfMemoryError):
        return  # The device still works: the step may be run again, in smaller parts.
    text = str(error)
    if isinstance(error, torch.AcceleratorError) or any(marker in text for marker in _DEVICE_ERRORS):
        raise DeviceLostError(text.partition("\n")[0]) from error


@contextmanager
def device_errors() -> Iterator[None]:
    """Convert an error after which the device's context is unusable to DeviceLostError."""
    try:
        yield
    except Exception as error:
        raise_if_lost(error)
        raise
