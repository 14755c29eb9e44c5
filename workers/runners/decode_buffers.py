"""The inputs of decode steps in fixed device memory, which CUDA graphs read.

The first rows are the batch. The others, up to the bucket, are padded: context 0, slots -1. In each step the
device advances each row by the chosen token (`kernels.cuda.advance`). If the next batch is exactly that, as
while callers append the chosen tokens and need no new pages, no data is sent to the device.

Dimension letters: B rows of the largest bucket; N rows of a batch; P pages of the longest sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from workers.counter_rng import mix64, mix_keys
from workers.device_sampling import changes_logits, limits
from workers.models.inputs import AttentionBatch, ForwardInputs
from workers.operations import Sampling
from workers.sampling import BadLogitsError, SamplingRow

_GREEDY = Sampling()


@dataclass(frozen=True, slots=True)
class _Columns:
    """One number for each row, [B]. The host's and the device's are two of these over equal bytes."""

    token_ids: torch.Tensor  # int64
    positions: torch.Tensor  # int64
    slots: torch.Tensor  # int64; -1: nothing is written
    keys: torch.Tensor  # int64, the bits of the uint64 from `mix_key`
    temperatures: torch.Tensor  # float64; 0: the most likely token
    top_ps: torch.Tensor  # float64
    min_ps: torch.Tensor  # float64
    top_ks: torch.Tensor  # int32
    context_lens: torch.Tensor  # int32; 0: a padded row
    lora_slots: torch.Tensor  # int32; -1: no adapter

    @classmethod
    def over(cls, memory: torch.Tensor, rows: int) -> _Columns:
        """Views of `memory`, [68 * B] uint8."""
        integers = memory[: 32 * rows].view(torch.int64).view(4, rows)
        reals = memory[32 * rows : 56 * rows].view(torch.float64).view(3, rows)
        return cls(*integers, *reals, *memory[56 * rows :].view(torch.int32).view(3, rows))


_COLUMN_BYTES = 68


class DecodeBuffers:
    """Owner of the device memory that decode graphs read and write. Tensors never move."""

    def __init__(self, max_rows: int, max_pages: int, device: torch.device) -> None:
        """Allocate for buckets of up to `max_rows`, and page tables of up to `max_pages`."""
        self.max_rows, self.max_pages = max_rows, max_pages
        self._device = device
        pinned = device.type == "cuda"  # without that the host would wait for each transfer
        self._host_memory = torch.zeros(_COLUMN_BYTES * max_rows, dtype=torch.uint8, pin_memory=pinned)
        self._memory = torch.zeros(_COLUMN_BYTES * max_rows, dtype=torch.uint8, device=device)
        self._host = _Columns.over(self._host_memory, max_rows)
        self._columns = _Columns.over(self._memory, max_rows)
        self._page_tables = torch.zeros(max_rows, max_pages, dtype=torch.int32, device=device)  # [B, P]
        self._table_staging = torch.empty(max_rows * max_pages, dtype=torch.int32, pin_memory=pinned)
        self._row_numbers = torch.arange(max_rows + 1, device=device)  # [B + 1]
        self._query_starts = self._row_numbers.to(torch.int32)
        # The results of a step: the chosen token and the largest logit of each row, which must be finite.
        self.chosen = torch.zeros(max_rows, dtype=torch.int64, device=device)  # [B]
        self.best = torch.zeros(max_rows, dtype=torch.float32, device=device)  # [B]
        self._host_chosen = torch.zeros(max_rows, dtype=torch.int64, pin_memory=pinned)
        self._host_best = torch.zeros(max_rows, dtype=torch.float32, pin_memory=pinned)
        self.clear()

    def clear(self) -> None:
        """Pad all rows."""
        self._pad(0)
        self._memory.copy_(self._host_memory)
        self._page_tables.zero_()
        # The device's buffers as the step before has left them. None: unknown.
        self._next_tokens: list[int] | None = None
        self._next_positions: list[int] = []
        self._tables = torch.zeros(0, 0, dtype=torch.int32)  # [N, P]
        self._specs: list[Sampling] = []  # [N]
        # The rows that are drawn, and the stream of each.
        self._drawn = np.zeros(0, np.int64)
        self._streams = np.zeros(0, np.uint64)
        # Whether top_k, top_p or min_p matter to a row; whether a mask, bias or penalties change its logits.
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
        count = len(rows)
        adjusted = list(map(changes_logits, rows))
        self.is_adjusted = any(adjusted)
        both = zip(rows, adjusted, strict=True)
        specs = [_GREEDY if row.spec is None or is_adjusted else row.spec for row, is_adjusted in both]
        same_specs = specs == self._specs
        same_tables = torch.equal(inputs.attention.page_tables, self._tables)
        lora_slots = None if inputs.lora_slots is None else inputs.lora_slots.tolist()
        if (
            same_tables
            and same_specs
            and not len(self._drawn)
            and lora_slots == self._lora_slots
            and inputs.token_ids.tolist() == self._next_tokens
            and inputs.positions.tolist() == self._next_positions
        ):
            return False
        self.invalidate()  # until this step has run
        host = self._host
        host.token_ids[:count] = inputs.token_ids
        host.positions[:count] = inputs.positions
        host.slots[:count] = inputs.slots
        host.context_lens[:count] = inputs.attention.context_lens
        host.lora_slots[:count] = -1 if inputs.lora_slots is None else inputs.lora_slots
        if not same_specs:
            self._set_specs(specs)
        if len(self._drawn):
            positions = np.array([rows[index].position for index in self._drawn.tolist()])
            keys = mix_keys(self._streams, positions).view(np.int64)
            host.keys[torch.from_numpy(self._drawn)] = torch.from_numpy(keys)
        self._pad(count)
        self._memory.copy_(self._host_memory, non_blocking=True)
        if not same_tables:
            self._send_tables(inputs.attention.page_tables)
        self._lora_slots = lora_slots
        return True

    def read(self, count: int) -> torch.Tensor:
        """Wait for the step, and read its tokens.

        Returns:
            [N] int64 on the host, the tokens chosen for the first `count` rows; overwritten by the next call.

        Raises:
            BadLogitsError: Rows with NaN or +infinity, or nothing but -infinity.
        """
        self._host_chosen.copy_(self.chosen, non_blocking=True)
        self._host_best.copy_(self.best, non_blocking=True)
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
        usable = self._host_best[:count].isfinite()
        if not usable.all():
            self.invalidate()
            raise BadLogitsError((~usable).nonzero().flatten().tolist())
        return self._host_chosen[:count]

    def advanced(self, inputs: ForwardInputs, chosen: torch.Tensor) -> None:
        """Note that the step with these inputs has run, and that the buffers contain these tokens now."""
        self._next_tokens = chosen.tolist()
        self._next_positions = [position + 1 for position in inputs.positions.tolist()]

    def invalidate(self) -> None:
        """Note that the device's buffers are unknown or unusable for the next step."""
        self._next_tokens = None

    def _set_specs(self, specs: list[Sampling]) -> None:
        """Set how the tokens of the first rows are chosen, on the host."""
        columns = limits(specs)
        self._specs, self.is_cut = specs, bool(columns)
        temperatures = np.array([spec.temperature for spec in specs])
        for name, values in (columns | {"temperatures": temperatures}).items():
            getattr(self._host, name)[: len(specs)] = torch.from_numpy(values)
        self._drawn = (temperatures > 0).nonzero()[0]
        self._streams = np.array([mix64(specs[index].seed) for index in self._drawn.tolist()], np.uint64)

    def _pad(self, count: int) -> None:
        """Pad the rows from `count` on, on the host."""
        for column in (self._host.token_ids, self._host.positions, self._host.context_lens):
            column[count:] = 0
        for column in (self._host.temperatures, self._host.min_ps, self._host.top_ks):
            column[count:] = 0
        self._host.top_ps[count:] = 1.0
        for slots in (self._host.slots, self._host.lora_slots):
            slots[count:] = -1

    def _send_tables(self, tables: torch.Tensor) -> None:
        staged = self._table_staging[: tables.numel()].view(tables.shape)
        staged.copy_(tables)
        rows, pages = tables.shape
        self._page_tables[:rows, :pages].copy_(staged.to(self._device, non_blocking=True))
        self._tables = tables
