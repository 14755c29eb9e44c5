"""The inputs of decode steps in fixed device memory, which CUDA graphs read.

The first rows are the batch. The others, up to the bucket, are padded: context 0, slots -1. In each step the
device advances each row by the chosen token (`kernels.cuda.advance`). If the next batch is exactly that, as
while callers append the chosen tokens and need no new pages, no data is sent to the device. So a step can be
launched while the one before it runs, whose tokens the host does not know yet (`load_after`).

Rows that need more than a temperature are named here, and what they need is in `adjusted_rows`.

Dimension letters: B rows of the largest bucket; N rows of a batch; P pages of the longest sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from workers.counter_rng import mix64, mix_keys
from workers.device_sampling import NEUTRAL_FILTERS, filters
from workers.models.inputs import AttentionBatch, ForwardInputs, StateRows
from workers.outputs import Sampling
from workers.runners.adjusted_rows import adjusted_among
from workers.runners.decode_memory import (
    COLUMN_BYTES,
    PADDING,
    Results,
    RowColumns,
    Staging,
    StepTokens,
    columns_in,
    filters_in,
)
from workers.runners.device_queue import DeviceQueue
from workers.sampling import SamplingRow

_GREEDY = Sampling()


class _NextTokens(NamedTuple):
    """The tokens of the next step that the device has, and their positions: int64, as bytes to compare."""

    token_ids: bytes
    positions: bytes


class DecodeBuffers:
    """Owner of the device memory that decode graphs read and write. Tensors never move.

    Attributes:
        results: What a step writes, with room after its rows.
        chosen: [B] int64, where it writes the token of each row.
        best: [B] float32, where it writes the largest logit of each row, which must be finite.
        adjusted: Which rows of the batch need more than a temperature.
    """

    def __init__(
        self,
        max_rows: int,
        max_pages: int,
        device: torch.device,
        queue: DeviceQueue | None = None,
        share: Callable[[torch.Tensor], None] | None = None,
    ) -> None:
        """Allocate for buckets of up to `max_rows`, and page tables of up to `max_pages`.

        Args:
            max_rows, max_pages, device: See above.
            queue: That of the device, or of a test.
            share: In a group, gives all ranks rank 0's values of a tensor. None: there are no others.
        """
        self.queue = queue or DeviceQueue(device)
        self._share = share
        pinned = device.type == "cuda"  # without that the host would wait for each transfer
        # Two steps can be on their way.
        staging = [Staging(max_rows, max_pages, self.queue, pinned=pinned) for _ in range(2)]
        self._staging, self._other_staging = staging
        self._host_memory = torch.zeros(COLUMN_BYTES * max_rows, dtype=torch.uint8)
        self._memory = torch.zeros(COLUMN_BYTES * max_rows, dtype=torch.uint8, device=device)
        # Arrays, since an assignment to a tensor takes several times as long.
        self._host = RowColumns(*(column.numpy() for column in columns_in(self._host_memory, max_rows)))
        self._columns = columns_in(self._memory, max_rows)
        self._host_filters = {
            name: column.numpy() for name, column in filters_in(self._host_memory, max_rows).items()
        }
        self._filters = filters_in(self._memory, max_rows)
        self._page_tables = torch.zeros(max_rows, max_pages, dtype=torch.int32, device=device)  # [B, P]
        self._row_numbers = torch.arange(max_rows + 1, device=device)  # [B + 1]
        self._query_starts = self._row_numbers.to(torch.int32)
        self.results = Results.allocate(max_rows, device)
        self.chosen, self.best = self.results.chosen[:max_rows], self.results.best[:max_rows]
        # [B, vocab], once they are known.
        self._logits: torch.Tensor | None = None
        self.clear()

    def clear(self) -> None:
        """Pad all rows."""
        self._rows = len(self._host.token_ids)
        self._pad_from(0)
        self._memory.copy_(self._host_memory)
        self._page_tables.zero_()
        # What the device has: the tokens that the step before has left, None if they are unknown or cannot be
        # used; the page tables; and the settings of the rows, as they were given.
        self._next: _NextTokens | None = None
        self._tables = torch.zeros(0, 0, dtype=torch.int32)  # [N, P]
        self._given: list[Sampling | None] = []  # [N]
        self._is_masked: list[bool] = []  # [N]
        # The rows that are drawn, and the stream of each.
        self._drawn = np.zeros(0, np.int64)
        self._streams = np.zeros(0, np.uint64)
        self.adjusted: list[int] = []
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
            state_rows=StateRows(
                begins=self._row_numbers[:bucket],
                sources=self._columns.state_sources[:bucket],
                keeps=self._columns.state_keeps[:bucket],
                starts=self._query_starts[: bucket + 1],
            ),
        )

    def draws(self, bucket: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Temperatures and keys of the first `bucket` rows."""
        return self._columns.temperatures[:bucket], self._columns.keys[:bucket]

    def settings(self, rows: torch.Tensor) -> dict[str, torch.Tensor]:
        """How tokens of these rows are chosen: columns that `device_sampling.choose_adjusted` takes."""
        columns = {"temperatures": self._columns.temperatures, "keys": self._columns.keys} | self._filters
        return {name: column.index_select(0, rows) for name, column in columns.items()}

    def keep_logits(self, logits: torch.Tensor) -> torch.Tensor:
        """A copy of those of a step [N, vocab], where those of all steps are."""
        if self._logits is None:
            self._logits = logits.new_zeros(len(self._columns.token_ids), logits.shape[1])
        return self._logits[: len(logits)].copy_(logits)

    @property
    def tokens(self) -> tuple[torch.Tensor, torch.Tensor]:
        """[B] the tokens of the next step, and their positions."""
        return self._columns.token_ids, self._columns.positions

    def use_chosen(self) -> None:
        """Continue with what was chosen once more, after `advance` has taken what was chosen before."""
        self._columns.token_ids.copy_(self.chosen)

    def load(self, inputs: ForwardInputs, rows: Sequence[SamplingRow]) -> bool:
        """Load a batch of single tokens into the buffers, without what adjusts rows.

        Returns:
            Whether data was sent to the device.
        """
        count, tables = len(rows), inputs.attention.page_tables
        same_settings = self._use_settings(rows)
        same_tables = _are_same(tables, self._tables)
        lora_slots = None if inputs.lora_slots is None else inputs.lora_slots.tolist()
        token_ids = inputs.token_ids.numpy()
        is_there = self._next == _NextTokens(token_ids.tobytes(), inputs.positions.numpy().tobytes())
        self.invalidate()  # until this step has run
        same_rows = same_settings and same_tables and lora_slots == self._lora_slots
        # The states of a step are in other slots than those of the one before it.
        if is_there and same_rows and not len(self._drawn) and not inputs.states:
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

    def load_after(
        self, inputs: ForwardInputs, rows: Sequence[SamplingRow], places: NDArray[np.int64] | None
    ) -> None:
        """Load the step behind the one that runs.

        Args:
            inputs: As for `load`. Tokens that only the device has are not read.
            rows: As for `load`; not read without `places`.
            places: As in `After`.
        """
        tables = inputs.attention.page_tables
        same_tables = _are_same(tables, self._tables)
        if self._share is not None:
            self._use_shared(self._share)
        if places is not None:
            self._load_rows(inputs, rows, places)
        elif not same_tables or len(self._drawn):
            self._set_places(inputs)
            self._send_columns(with_tokens=False)
        if not same_tables:
            self._send_tables(tables)

    def _use_shared(self, share: Callable[[torch.Tensor], None]) -> None:
        """Continue with the tokens that rank 0 has chosen: it alone has all logits."""
        self.queue.launch(lambda: share(self.chosen))
        self.queue.launch(self.use_chosen)

    def _load_rows(
        self, inputs: ForwardInputs, rows: Sequence[SamplingRow], places: NDArray[np.int64]
    ) -> None:
        count = len(rows)
        self._use_settings(rows)
        self._pad_from(count)
        self._set_places(inputs)
        # Below 0, where the device finds a token.
        self._host.token_ids[:count] = np.where(places >= 0, ~places, inputs.token_ids.numpy())
        self._send_columns()
        token_ids = self._columns.token_ids[:count]
        self.queue.launch(lambda: _find_tokens(token_ids, self.chosen))

    def _set_places(self, inputs: ForwardInputs) -> None:
        """Set what follows from the positions of the rows, on the host."""
        host, positions = self._host, inputs.positions.numpy()
        count = len(positions)
        host.positions[:count] = positions
        host.slots[:count] = inputs.slots.numpy()
        host.context_lens[:count] = inputs.attention.context_lens.numpy()
        if inputs.states:
            host.state_sources[:count] = [run.source.slot for run in inputs.states]
            host.state_keeps[:count] = [run.writes[-1].slot for run in inputs.states]
        if len(self._drawn):
            # A draw depends on the position of the chosen token.
            host.keys[self._drawn] = mix_keys(self._streams, positions[self._drawn] + 1).view(np.int64)

    def fetch(self, count: int, adjusted: Sequence[int]) -> StepTokens:
        """The tokens that the launched step chooses for the first `count` rows, on their way to the host.

        `adjusted`: the rows that it has adjusted.
        """
        staging, self._staging, self._other_staging = self._staging, self._other_staging, self._staging
        staging.transfer(lambda: staging.results.copy_(self.results.memory, non_blocking=True))
        return StepTokens(staging, count, adjusted)

    def advanced(self, inputs: ForwardInputs, chosen: torch.Tensor) -> None:
        """Note that the step with these inputs has run, and that the buffers contain these tokens now."""
        self._next = _NextTokens(chosen.numpy().tobytes(), (inputs.positions.numpy() + 1).tobytes())

    def invalidate(self) -> None:
        """Note that the device's buffers are unknown or unusable for the next step."""
        self._next = None

    def _use_settings(self, rows: Sequence[SamplingRow]) -> bool:
        """Set how the tokens of these rows are chosen, on the host. Returns whether nothing has changed."""
        given = [row.spec for row in rows]
        is_masked = [row.mask is not None for row in rows]
        if is_masked == self._is_masked and given == self._given:
            return True
        self._given, self._is_masked = given, is_masked
        self.adjusted = adjusted_among(rows)
        specs = [spec or _GREEDY for spec in given]
        temperatures = np.array([spec.temperature for spec in specs])
        self._host.temperatures[: len(specs)] = temperatures
        for name, values in (filters(specs) or NEUTRAL_FILTERS).items():
            self._host_filters[name][: len(specs)] = values
        self._drawn = (temperatures > 0).nonzero()[0]
        self._streams = np.array([mix64(specs[index].seed) for index in self._drawn.tolist()], np.uint64)
        return False

    def _pad_from(self, count: int) -> None:
        """Pad the rows from `count` on that are not padded already, on the host."""
        if count < self._rows:
            for column, value in zip(self._host, PADDING, strict=True):
                column[count : self._rows] = value
            for name, neutral in NEUTRAL_FILTERS.items():
                self._host_filters[name][count : self._rows] = neutral
        self._rows = count

    def _send_columns(self, *, with_tokens: bool = True) -> None:
        """Send the columns, or all but the first one. Page tables are sent after them, or not at all."""
        first = 0 if with_tokens else self._host.token_ids.nbytes
        staging = self._staging
        # The results of the step before the last one were read, unless a launch has failed: then copies from
        # this memory may still be pending.
        staging.arrived.synchronize()
        staged = staging.columns
        staged.copy_(self._host_memory)
        staging.transfer(lambda: self._memory[first:].copy_(staged[first:], non_blocking=True))

    def _send_tables(self, tables: torch.Tensor) -> None:
        rows, pages = tables.shape
        staging = self._staging
        staged = staging.tables[: tables.numel()].view(tables.shape)
        staged.copy_(tables)
        device = self._page_tables.device
        staging.transfer(lambda: self._page_tables[:rows, :pages].copy_(staged.to(device, non_blocking=True)))
        self._tables = tables


def _find_tokens(token_ids: torch.Tensor, chosen: torch.Tensor) -> None:
    """Replace each of these [N] that is ~p by chosen[p]."""
    found = chosen.index_select(0, (~token_ids).clamp_(min=0))
    token_ids.copy_(torch.where(token_ids < 0, found, token_ids))


def _are_same(tables: torch.Tensor, others: torch.Tensor) -> bool:
    """Whether these page tables, which nobody changes, are equal."""
    if tables.shape != others.shape:
        return False
    return tables.data_ptr() == others.data_ptr() or torch.equal(tables, others)
