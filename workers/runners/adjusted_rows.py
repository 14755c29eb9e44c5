"""The rows of a decode step whose tokens are chosen once more, in fixed memory, which CUDA graphs read.

They have a mask, biases, penalties or filters. The graph of a step chooses a token for every row
by its temperature alone. A second, short one copies the logits of these rows, adjusts the copies, and
replaces the tokens. The other rows are not read, and nothing waits for the host.

There is a second graph for each number of such rows, rounded up to a bucket. The rest of a bucket is padded:
such a row chooses for row 0 of the batch, and its result is put after those of the batch.

Penalties need the tokens before the next one. How often each occurs is counted when a row is loaded, and each
second graph counts the tokens that it has chosen: so steps with penalties follow each other without the host.

Dimension letters: B rows of the largest bucket; A adjusted rows of a part of a bucket; V vocabulary; W words
of a mask; N biases; H tokens of all histories.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from workers.device_sampling import HISTORY_COLUMNS, Columns, adjustments, choose_adjusted, is_simple
from workers.outputs import Sampling
from workers.runners.device_queue import DeviceQueue
from workers.sampling import SamplingRow

# How many biases, and tokens of histories, there is room for, by the row. Batches with more are adjusted
# outside of the graph.
_BIASES = 64
_HISTORY = 4096

# By row. What it has if it is padded, or has nothing of the kind.
_INTEGERS: Mapping[str, int] = {
    "rows": 0,  # where the row is in the batch
    "places": 0,  # where its results are put
    "is_masked": 0,
    "counted_from": 0,  # the position from which on frequencies and presences count
    # Where its history is, for the first count.
    "begins": 0,
    "prompt_ends": 0,
    "ends": 0,
}
_REALS: Mapping[str, float] = {"repetitions": 1.0, "frequencies": 0.0, "presences": 0.0}
_NO_ROW = -1


class Adjustments(NamedTuple):
    """The adjustments that a batch needs, on the host.

    Attributes:
        which: The rows, those with masks first.
        columns: Their settings, by names of `device_sampling`.
        key: What it is known by if it stays the same from step to step.
        is_loaded: Whether the device has it.
    """

    which: Sequence[int]
    columns: Columns
    key: tuple[Sequence[int], list[Sampling | None]] | None
    is_loaded: bool = False


class _Memory:
    """The data of one step, on the device or on the host: flat tensors, of which the first part is in use."""

    def __init__(self, max_rows: int, vocab: int, device: torch.device, *, pinned: bool = False) -> None:
        def zeros(size: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(size, dtype=dtype, device=device, pin_memory=pinned)

        self.tensors = {
            "integers": zeros(len(_INTEGERS) * max_rows, torch.int64),
            "reals": zeros(len(_REALS) * max_rows, torch.float64),
            "bias_rows": zeros(_BIASES * max_rows, torch.int32),
            "bias_ids": zeros(_BIASES * max_rows, torch.int32),
            "biases": zeros(_BIASES * max_rows, torch.float64),
            "words": zeros(max_rows * -(-vocab // 32), torch.int32),  # [B, W]
            "history": zeros(_HISTORY * max_rows, torch.int32),
        }

    def rows(self, max_rows: int) -> dict[str, Tensor]:
        """The columns of rows: [B] each."""
        integers = zip(_INTEGERS, self.tensors["integers"].view(-1, max_rows), strict=True)
        return dict(integers) | dict(zip(_REALS, self.tensors["reals"].view(-1, max_rows), strict=True))


class AdjustedRows:
    """Owner of the device memory that the second graphs read. Its tensors never move."""

    def __init__(self, max_rows: int, vocab: int, device: torch.device, queue: DeviceQueue) -> None:
        """Allocate for batches of up to `max_rows`."""
        self._max_rows, self._vocab, self._queue = max_rows, vocab, queue
        self._device = _Memory(max_rows, vocab, device)
        self._columns = self._device.rows(max_rows)
        self._numbers = torch.arange(max_rows, dtype=torch.int32, device=device)
        # How often each token occurs in the text of a row: see `kernels.cuda.sampling_adjust`.
        self._counts = torch.zeros(max_rows, vocab, dtype=torch.int32, device=device)  # [B, V]
        pinned = device.type == "cuda"  # without that the host would wait for each transfer
        # Two steps can be on their way. Each has the event after its transfers.
        staging = [_Memory(max_rows, vocab, torch.device("cpu"), pinned=pinned) for _ in range(2)]
        self._staging = [(memory, queue.event()) for memory in staging]
        # How many biases may be on the device.
        self._num_biases = len(self._device.tensors["biases"])
        # What the device has: see `Adjustments.key`. None: unknown, or other data in each step.
        self._loaded: tuple[Sequence[int], list[Sampling | None]] | None = None
        self._send(self._row_columns([], {}) | self._bias_columns({}))
        self._num_biases = 0

    def prepare(self, batch: Sequence[SamplingRow], which: Sequence[int]) -> Adjustments | None:
        """The adjustments of these rows of a batch. None: there is no room for their biases or histories."""
        key = which, [batch[index].spec for index in which]
        stays = not any(batch[index].mask or _has_penalty(batch[index]) for index in which)
        if stays and key == self._loaded:
            return Adjustments(which, {}, key, is_loaded=True)
        # Then the first masks are those of the first rows.
        ordered = sorted(which, key=lambda index: batch[index].mask is None)
        columns = adjustments([batch[index] for index in ordered], self._vocab)
        room = {name: len(self._device.tensors[name]) for name in ("biases", "history")}
        if any(len(columns.get(name, ())) > size for name, size in room.items()):
            return None
        return Adjustments(ordered, columns, key if stays else None)

    def load(self, needed: Adjustments, token_ids: Tensor, positions: Tensor) -> None:
        """Load what a batch needs, whose tokens [B] and their positions [B] are on the device.

        The last token of a history is one of these, and is not read from it.
        """
        if needed.is_loaded:
            return
        self._loaded = None
        columns = needed.columns
        data = {name: columns[name].reshape(-1) for name in ("words", "history") if name in columns}
        self._send(data | self._row_columns(needed.which, columns) | self._bias_columns(columns))
        self._num_biases = len(columns.get("biases", ()))
        self._loaded = needed.key
        if "history" in columns:
            count = len(needed.which)
            self._queue.launch(lambda: self._count_histories(count, token_ids, positions))

    def _count_histories(self, count: int, token_ids: Tensor, positions: Tensor) -> None:
        from kernels.cuda import sampling_adjust  # noqa: PLC0415 - without a GPU triton is not needed

        counts = self._counts[:count].zero_()
        begins, prompt_ends, ends = (self._columns[name][:count] for name in HISTORY_COLUMNS[1:])
        history = self._device.tensors["history"]
        sampling_adjust.count_histories(counts, history, begins, prompt_ends, ends)
        self.count_next(count, token_ids, positions)

    def count_next(self, count: int, token_ids: Tensor, positions: Tensor) -> None:
        """Count the next token of the first `count` rows: that which the batch [B] has."""
        from kernels.cuda import sampling_adjust  # noqa: PLC0415 - as above

        rows, counted_from = self._columns["rows"][:count], self._columns["counted_from"][:count]
        sampling_adjust.count_next(self._counts[:count], rows, counted_from, token_ids, positions)

    def _row_columns(self, which: Sequence[int], columns: Columns) -> Columns:
        """Integers and reals, padded."""
        both = (_INTEGERS, np.int64), (_REALS, np.float64)
        integers, reals = (
            np.repeat(np.array([*padding.values()], dtype), self._max_rows).reshape(-1, self._max_rows)
            for padding, dtype in both
        )
        rows = dict(zip(_INTEGERS, integers, strict=True)) | dict(zip(_REALS, reals, strict=True))
        rows["places"][:] = self._max_rows
        rows["rows"][: len(which)] = rows["places"][: len(which)] = which
        rows["is_masked"][: len(columns.get("words", ()))] = 1
        if "history" in columns:
            begins, prompt_ends, ends = (columns[name] for name in HISTORY_COLUMNS[1:])
            # Nothing is to be counted of an empty history.
            having = ends > begins
            penalised = columns["penalty_rows"][having]
            for name in _REALS:
                rows[name][penalised] = columns[name][having]
            rows["begins"][penalised] = begins[having]
            rows["prompt_ends"][penalised] = prompt_ends[having]
            rows["ends"][penalised] = ends[having] - 1
            rows["counted_from"][penalised] = (prompt_ends - begins)[having]
        return {"integers": integers.reshape(-1), "reals": reals.reshape(-1)}

    def _bias_columns(self, columns: Columns) -> Columns:
        """The biases, and padding in place of earlier ones."""
        count = len(columns.get("biases", ()))
        # Until they are sent, both may be there.
        self._num_biases = sent = max(count, self._num_biases)
        biases: Columns = {
            "bias_rows": np.full(sent, _NO_ROW, np.int32),
            "bias_ids": np.zeros(sent, np.int32),
            "biases": np.zeros(sent),
        }
        for name, values in biases.items() if count else ():
            values[:count] = columns[name]
        return biases if sent else {}

    def _send(self, data: Columns) -> None:
        """Send what the tensors with these names begin with."""
        memory, sent = self._staging[0]
        self._staging.reverse()
        # A launch that has failed may have left transfers behind.
        sent.synchronize()
        pairs = [(self._device.tensors[name], memory.tensors[name], len(data[name])) for name in data]
        for (_, staged, size), values in zip(pairs, data.values(), strict=True):
            staged.numpy()[:size] = values

        def copy() -> None:
            for device, staged, size in pairs:
                device[:size].copy_(staged[:size], non_blocking=True)

        try:
            self._queue.launch(copy)
        finally:
            sent.record()

    def choose(
        self,
        part: slice,
        logits: Tensor,
        settings: Callable[[Tensor], dict[str, Tensor]],
        chosen: Tensor,
        best: Tensor,
    ) -> None:
        """Choose for a part of these rows. Launches what follows from the shapes alone.

        Args:
            part: Which of them, A.
            logits: [B, V] of the batch.
            settings: How tokens of named rows [A] of the batch are chosen, besides what is loaded here: the
                columns that `device_sampling.choose_adjusted` takes.
            chosen: [B + 1] int64; mutated.
            best: [B + 1] float32, the largest logit that is left of each row; mutated.
        """
        ours = {name: column[part] for name, column in self._columns.items()}
        count = part.stop - part.start
        # Biases and masks that none of these rows has are applied to one after them.
        copy = torch.empty(count + 1, logits.shape[1], dtype=torch.float32, device=logits.device)
        copy[:count] = logits.index_select(0, ours["rows"])
        copy[count:].zero_()
        columns = settings(ours["rows"]) | self._changes(part, ours)
        ids = torch.empty_like(ours["places"])
        left = torch.empty(count, dtype=torch.float32, device=logits.device)
        choose_adjusted(copy, columns, ids, left)
        chosen.index_copy_(0, ours["places"], ids)
        best.index_copy_(0, ours["places"], left)

    def _changes(self, part: slice, ours: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The columns of masks, biases and penalties, for copies of these rows and one more."""
        tensors, count = self._device.tensors, part.stop - part.start
        numbers, bias_rows = self._numbers[:count], tensors["bias_rows"]
        is_here = (bias_rows >= part.start) & (bias_rows < part.stop)
        return {
            "mask_rows": torch.where(ours["is_masked"] != 0, numbers, count),
            "words": tensors["words"].view(self._max_rows, -1)[part],
            "bias_rows": torch.where(is_here, bias_rows - part.start, count),
            "bias_ids": tensors["bias_ids"],
            "biases": tensors["biases"],
            "penalty_rows": numbers,
            "counts": self._counts[part],
            **{name: ours[name] for name in _REALS},
        }


def adjusted_among(rows: Sequence[SamplingRow]) -> list[int]:
    """The indexes of rows that need more than a temperature."""
    return [index for index, row in enumerate(rows) if not is_simple(row)]


def _has_penalty(row: SamplingRow) -> bool:
    return row.spec is not None and row.spec.has_penalty
