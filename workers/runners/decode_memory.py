"""The memory of a decode step: how its columns lie in it, and what is sent to the device and back.

What it contains, and when it is sent, is decided in `decode_buffers`.

Dimension letters: B rows of the largest bucket; N rows of a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from workers.device_sampling import NEUTRAL_FILTERS
from workers.runners.device_queue import DeviceQueue
from workers.sampling import BadLogitsError, NothingAllowedError

Column = TypeVar("Column")


class RowColumns(NamedTuple, Generic[Column]):
    """One number for each row, [B]: tensors on the device, arrays on the host, over equal bytes."""

    token_ids: Column  # int64
    positions: Column  # int64
    slots: Column  # int64; -1: nothing is written
    keys: Column  # int64, the bits of the uint64 from `mix_key`
    state_sources: Column  # int64, the slot of the recurrent state before the row; -1: there is none
    state_keeps: Column  # int64, that of the state after it; -1: it is not kept
    temperatures: Column  # float64; 0: the most likely token
    context_lens: Column  # int32; 0: a padded row
    lora_slots: Column  # int32; -1: no adapter


# The bytes of a row in the plain columns, with the columns of filters, and in the results.
_PLAIN_BYTES = 64
COLUMN_BYTES = _PLAIN_BYTES + sum(neutral.nbytes for neutral in NEUTRAL_FILTERS.values())
_RESULT_BYTES = 16


def columns_in(memory: torch.Tensor, rows: int) -> RowColumns[torch.Tensor]:
    """Views of `memory`, [COLUMN_BYTES * B] uint8."""
    integers = memory[: 48 * rows].view(torch.int64).view(6, rows)
    temperatures = memory[48 * rows : 56 * rows].view(torch.float64).view(1, rows)
    places = memory[56 * rows : _PLAIN_BYTES * rows].view(torch.int32).view(2, rows)
    return RowColumns(*integers, *temperatures, *places)


def filters_in(memory: torch.Tensor, rows: int) -> dict[str, torch.Tensor]:
    """The columns of `outputs.FILTERS`, behind the others in `memory`, widest first to be aligned."""
    columns, start = dict[str, torch.Tensor](), _PLAIN_BYTES * rows
    for name, neutral in sorted(NEUTRAL_FILTERS.items(), key=lambda named: -named[1].nbytes):
        end = start + neutral.nbytes * rows
        columns[name] = memory[start:end].view(torch.from_numpy(np.empty(0, neutral.dtype)).dtype)
        start = end
    return columns


# What a padded row has; its key does not matter.
PADDING = RowColumns[float](0, 0, -1, 0, -1, -1, 0.0, 0, -1)


class Results(NamedTuple):
    """The results of a step, in one transfer: columns of more than B rows.

    Attributes:
        memory: uint8, all of them.
        chosen: int64.
        best: float32.
        best_left: float32, the largest logit that mask and biases have left to adjusted rows.
    """

    memory: torch.Tensor
    chosen: torch.Tensor
    best: torch.Tensor
    best_left: torch.Tensor

    @classmethod
    def allocate(cls, max_rows: int, device: torch.device, *, pinned: bool = False) -> Results:
        rows = -(-(max_rows + 1) // 16) * 16  # so that all of them are aligned
        memory = torch.zeros(_RESULT_BYTES * rows, dtype=torch.uint8, device=device, pin_memory=pinned)
        bests = memory[8 * rows :].view(torch.float32).view(2, rows)
        return cls(memory, memory[: 8 * rows].view(torch.int64), *bests)


class Staging:
    """Host memory of one step: what is sent to the device, and its results."""

    def __init__(self, max_rows: int, max_pages: int, queue: DeviceQueue, *, pinned: bool) -> None:
        self.columns = torch.zeros(COLUMN_BYTES * max_rows, dtype=torch.uint8, pin_memory=pinned)
        self.tables = torch.empty(max_rows * max_pages, dtype=torch.int32, pin_memory=pinned)
        results = Results.allocate(max_rows, torch.device("cpu"), pinned=pinned)
        self.results, self.chosen = results.memory, results.chosen
        self.best: NDArray[np.float32] = results.best.numpy()
        self.best_left: NDArray[np.float32] = results.best_left.numpy()
        self._queue = queue
        # Behind the last transfer, which is that of the results unless a launch has failed.
        self.arrived = queue.event()

    def transfer(self, copy: Callable[[], object]) -> None:
        """Launch a copy from or to this memory."""
        try:
            self._queue.launch(copy)
        finally:
            self.arrived.record()


class StepTokens:
    """The tokens of a step that was launched. Valid until two further steps are."""

    def __init__(self, staging: Staging, count: int, adjusted: Sequence[int]) -> None:
        self._staging, self._count, self._adjusted = staging, count, adjusted

    def have_arrived(self) -> bool:
        """Whether `read` would not wait."""
        return self._staging.arrived.query()

    def read(self) -> tuple[torch.Tensor, NothingAllowedError | None]:
        """Wait for them.

        Returns:
            [N] int64 on the host, and why adjusted rows have no token, if there are such.

        Raises:
            BadLogitsError: Rows with NaN or +infinity, or nothing but -infinity.
        """
        staging = self._staging
        staging.arrived.synchronize()
        usable = np.isfinite(staging.best[: self._count])
        if not all(usable.tolist()):
            raise BadLogitsError((~usable).nonzero()[0].tolist())
        forbidden = None
        if self._adjusted:
            left = np.isfinite(staging.best_left[self._adjusted]).tolist()
            without = [row for row, is_left in zip(self._adjusted, left, strict=True) if not is_left]
            forbidden = NothingAllowedError(without) if without else None
        return staging.chosen[: self._count], forbidden
