"""The inputs of decode steps in fixed device memory, which CUDA graphs read.

The first rows are the batch. The others, up to the bucket, are padded: context 0, slots -1. In each step the
device advances each row by the chosen token (`kernels.cuda.advance`). If the next batch is exactly that, as
while callers append the chosen tokens and need no new pages, no data is sent to the device. So a step can be
launched while the one before it runs, whose tokens the host does not know yet (`load_next`).

Dimension letters: B rows of the largest bucket; N rows of a batch; P pages of the longest sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from workers.counter_rng import mix64, mix_keys
from workers.device_sampling import changes_logits, limits
from workers.models.inputs import AttentionBatch, ForwardInputs
from workers.operations import Sampling
from workers.runners.base import SomeRows
from workers.runners.device_queue import DeviceQueue
from workers.sampling import BadLogitsError, SamplingRow

Column = TypeVar("Column")

_GREEDY = Sampling()


class _Columns(NamedTuple, Generic[Column]):
    """One number for each row, [B]: tensors on the device, arrays on the host, over equal bytes."""

    token_ids: Column  # int64
    positions: Column  # int64
    slots: Column  # int64; -1: nothing is written
    keys: Column  # int64, the bits of the uint64 from `mix_key`
    temperatures: Column  # float64; 0: the most likely token
    top_ps: Column  # float64
    min_ps: Column  # float64
    top_ks: Column  # int32
    context_lens: Column  # int32; 0: a padded row
    lora_slots: Column  # int32; -1: no adapter


def _columns_in(memory: torch.Tensor, rows: int) -> _Columns[torch.Tensor]:
    """Views of `memory`, [68 * B] uint8."""
    integers = memory[: 32 * rows].view(torch.int64).view(4, rows)
    reals = memory[32 * rows : 56 * rows].view(torch.float64).view(3, rows)
    return _Columns(*integers, *reals, *memory[56 * rows :].view(torch.int32).view(3, rows))


# What a padded row has; its key does not matter.
_PADDING = _Columns[float](0, 0, -1, 0, 0.0, 1.0, 0.0, 0, 0, -1)
_COLUMN_BYTES = 68
_TOKEN_BYTES = 8  # the first column
_RESULT_BYTES = 12


class _Staging:
    """Host memory of one step: what is sent to the device, and its results."""

    def __init__(self, max_rows: int, max_pages: int, queue: DeviceQueue, *, pinned: bool) -> None:
        self.columns = torch.zeros(_COLUMN_BYTES * max_rows, dtype=torch.uint8, pin_memory=pinned)
        self.tables = torch.empty(max_rows * max_pages, dtype=torch.int32, pin_memory=pinned)
        self.results = torch.zeros(_RESULT_BYTES * max_rows, dtype=torch.uint8, pin_memory=pinned)
        self.chosen, best = _results_in(self.results, max_rows)
        self.best: NDArray[np.float32] = best.numpy()
        # Behind the transfer of the results.
        self.arrived = queue.event()


class DecodeBuffers:
    """Owner of the device memory that decode graphs read and write. Tensors never move.

    Attributes:
        chosen: [B] int64, where a step writes the token of each row.
        best: [B] float32, where it writes the largest logit of each row, which must be finite.
        is_cut: Whether top_k, top_p or min_p matter to a row of the batch.
        is_adjusted: Whether a mask, bias or penalties change the logits of one.
    """

    def __init__(
        self, max_rows: int, max_pages: int, device: torch.device, queue: DeviceQueue | None = None
    ) -> None:
        """Allocate for buckets of up to `max_rows`, and page tables of up to `max_pages`.

        `queue`: that of the device, or of a test.
        """
        self.queue = queue or DeviceQueue(device)
        pinned = device.type == "cuda"  # without that the host would wait for each transfer
        # Two steps can be on their way.
        staging = [_Staging(max_rows, max_pages, self.queue, pinned=pinned) for _ in range(2)]
        self._staging, self._other_staging = staging
        self._host_memory = torch.zeros(_COLUMN_BYTES * max_rows, dtype=torch.uint8)
        self._memory = torch.zeros(_COLUMN_BYTES * max_rows, dtype=torch.uint8, device=device)
        # Arrays, since an assignment to a tensor takes several times as long.
        self._host = _Columns(*(column.numpy() for column in _columns_in(self._host_memory, max_rows)))
        self._columns = _columns_in(self._memory, max_rows)
        self._page_tables = torch.zeros(max_rows, max_pages, dtype=torch.int32, device=device)  # [B, P]
        self._row_numbers = torch.arange(max_rows + 1, device=device)  # [B + 1]
        self._query_starts = self._row_numbers.to(torch.int32)
        # The results of a step, in one transfer.
        self._results = torch.zeros(_RESULT_BYTES * max_rows, dtype=torch.uint8, device=device)
        self.chosen, self.best = _results_in(self._results, max_rows)
        self.clear()

    def clear(self) -> None:
        """Pad all rows."""
        self._rows = len(self._host.token_ids)
        self._pad_from(0)
        self._memory.copy_(self._host_memory)
        self._page_tables.zero_()
        # The device's buffers as the step before has left them, as bytes. None: unknown.
        self._next_tokens: bytes | None = None
        self._next_positions = b""
        self._tables = torch.zeros(0, 0, dtype=torch.int32)  # [N, P]
        # The settings of the rows as they were given.
        self._given: list[Sampling | None] = []  # [N]
        # The rows that are drawn, and the stream of each.
        self._drawn = np.zeros(0, np.int64)
        self._streams = np.zeros(0, np.uint64)
        self.is_cut = self.is_adjusted = False
        self._lora_slots: list[int] | None = None  # [N]; None: no row has an adapter

    def inputs(self, bucket: int, *, lora: bool) -> ForwardInputs:
        """The inputs of a forward over the first `bucket` rows, with or without the slots of adapters.

        Its host lengths are placeholders.
        """
        return ForwardInputs(
            token_ids=self._columns.token_ids[:bucket],
            positions=self._columns.positions[:bucket],
            slots=self._columns.slots[:bucket],
            wanted_rows=self._row_numbers[:bucket],
            attention=AttentionBatch(
                page_tables=self._page_tables[:bucket],
                query_starts=self._query_starts[: bucket + 1],
                context_lens=self._columns.context_lens[:bucket],
                query_lens=[1] * bucket,
                context_lens_host=[1] * bucket,
            ),
            lora_slots=self._columns.lora_slots[:bucket] if lora else None,
        )

    def settings(self, rows: slice) -> dict[str, torch.Tensor]:
        """How tokens of some rows are chosen: the columns that `device_sampling.choose_adjusted` takes."""
        names = ("temperatures", "keys", "top_ks", "top_ps", "min_ps")
        return {name: getattr(self._columns, name)[rows] for name in names}

    def load(self, inputs: ForwardInputs, rows: Sequence[SamplingRow]) -> bool:
        """Load a batch of single tokens into the buffers.

        Rows whose settings change their logits are set to greedy.

        Returns:
            Whether data was sent to the device.
        """
        count, tables = len(rows), inputs.attention.page_tables
        same_settings = self._use_settings(rows)
        same_tables = _are_same(tables, self._tables)
        lora_slots = None if inputs.lora_slots is None else inputs.lora_slots.tolist()
        token_ids, positions = inputs.token_ids.numpy(), inputs.positions.numpy()
        next_tokens = self._next_tokens
        self.invalidate()  # until this step has run
        if (
            same_tables
            and same_settings
            and not len(self._drawn)
            and lora_slots == self._lora_slots
            and token_ids.tobytes() == next_tokens
            and positions.tobytes() == self._next_positions
        ):
            return False
        self._pad_from(count)
        self._host.token_ids[:count] = token_ids
        self._host.lora_slots[:count] = -1 if lora_slots is None else lora_slots
        self._set_places(inputs)
        self._send_columns()
        if not same_tables:
            self._send_tables(tables)
        self._lora_slots = lora_slots
        return True

    def load_next(self, inputs: ForwardInputs, some: SomeRows | None) -> None:
        """Load the step after the one that runs: its rows, or some of them, with the tokens chosen for them.

        `inputs`: as for `load`; their tokens are not read.
        """
        tables = inputs.attention.page_tables
        same_tables = _are_same(tables, self._tables)
        if some is not None:
            self._load_some(inputs, some)
        elif not same_tables or len(self._drawn):
            self._set_places(inputs)
            self._send_columns(_TOKEN_BYTES * len(self._host.token_ids))
        if not same_tables:
            self._send_tables(tables)

    def _load_some(self, inputs: ForwardInputs, some: SomeRows) -> None:
        count = len(some.rows)
        self._use_settings(some.rows)
        self._pad_from(count)
        self._set_places(inputs)
        # Where the device finds their tokens.
        self._host.token_ids[:count] = some.places
        self._send_columns()
        token_ids = self._columns.token_ids[:count]
        self.queue.launch(lambda: token_ids.copy_(self.chosen.index_select(0, token_ids)))

    def _set_places(self, inputs: ForwardInputs) -> None:
        """Set what follows from the positions of the rows, on the host."""
        host, positions = self._host, inputs.positions.numpy()
        count = len(positions)
        host.positions[:count] = positions
        host.slots[:count] = inputs.slots.numpy()
        host.context_lens[:count] = inputs.attention.context_lens.numpy()
        if len(self._drawn):
            # A draw depends on the position of the chosen token.
            host.keys[self._drawn] = mix_keys(self._streams, positions[self._drawn] + 1).view(np.int64)

    def fetch(self, count: int) -> StepTokens:
        """The tokens that the launched step chooses for the first `count` rows, on their way to the host."""
        staging, self._staging, self._other_staging = self._staging, self._other_staging, self._staging
        self.queue.launch(lambda: staging.results.copy_(self._results, non_blocking=True))
        staging.arrived.record()
        return StepTokens(staging, count)

    def advanced(self, inputs: ForwardInputs, chosen: torch.Tensor) -> None:
        """Note that the step with these inputs has run, and that the buffers contain these tokens now."""
        self._next_tokens = chosen.numpy().tobytes()
        self._next_positions = (inputs.positions.numpy() + 1).tobytes()

    def invalidate(self) -> None:
        """Note that the device's buffers are unknown or unusable for the next step."""
        self._next_tokens = None

    def _use_settings(self, rows: Sequence[SamplingRow]) -> bool:
        """Set how the tokens of these rows are chosen, on the host. Returns whether nothing has changed."""
        given = [row.spec for row in rows]
        is_masked = any([row.mask is not None for row in rows])  # noqa: C419 - faster
        if not is_masked and not self.is_adjusted and given == self._given:
            return True
        adjusted = list(map(changes_logits, rows))
        self._given, self.is_adjusted = given, any(adjusted)
        both = zip(given, adjusted, strict=True)
        specs = [_GREEDY if spec is None or is_adjusted else spec for spec, is_adjusted in both]
        columns = limits(specs)
        self.is_cut = bool(columns)
        temperatures = np.array([spec.temperature for spec in specs])
        for name, values in (columns | {"temperatures": temperatures}).items():
            getattr(self._host, name)[: len(specs)] = values
        self._drawn = (temperatures > 0).nonzero()[0]
        self._streams = np.array([mix64(specs[index].seed) for index in self._drawn.tolist()], np.uint64)
        return False

    def _pad_from(self, count: int) -> None:
        """Pad the rows from `count` on that are not padded already, on the host."""
        if count < self._rows:
            for column, value in zip(self._host, _PADDING, strict=True):
                column[count : self._rows] = value
        self._rows = count

    def _send_columns(self, first: int = 0) -> None:
        """Send the columns, from this byte on."""
        staged = self._staging.columns
        staged.copy_(self._host_memory)
        self.queue.launch(lambda: self._memory[first:].copy_(staged[first:], non_blocking=True))

    def _send_tables(self, tables: torch.Tensor) -> None:
        rows, pages = tables.shape
        staged = self._staging.tables[: tables.numel()].view(tables.shape)
        staged.copy_(tables)
        device = self._page_tables.device
        self.queue.launch(
            lambda: self._page_tables[:rows, :pages].copy_(staged.to(device, non_blocking=True))
        )
        self._tables = tables


class StepTokens:
    """The tokens of a step that was launched. Valid until two further steps are."""

    def __init__(self, staging: _Staging, count: int) -> None:
        self._staging = staging
        self._count = count

    def have_arrived(self) -> bool:
        """Whether `read` would not wait."""
        return self._staging.arrived.query()

    def read(self) -> torch.Tensor:
        """Wait for them.

        Returns:
            [N] int64 on the host.

        Raises:
            BadLogitsError: Rows with NaN or +infinity, or nothing but -infinity.
        """
        self._staging.arrived.synchronize()
        usable = np.isfinite(self._staging.best[: self._count])
        if not all(usable.tolist()):
            raise BadLogitsError((~usable).nonzero()[0].tolist())
        return self._staging.chosen[: self._count]


def _results_in(memory: torch.Tensor, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Views of `memory`, [12 * B] uint8: tokens [B] int64, and logits [B] float32."""
    return memory[: 8 * rows].view(torch.int64), memory[8 * rows :].view(torch.float32)


def _are_same(tables: torch.Tensor, others: torch.Tensor) -> bool:
    """Whether these page tables, which nobody changes, are equal."""
    if tables.shape != others.shape:
        return False
    return tables.data_ptr() == others.data_ptr() or torch.equal(tables, others)
