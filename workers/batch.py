"""Packs the items of one step into the tensors of one forward.

Dimension letters: T tokens of all items; N items; R wanted rows; P pages in the longest page table.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from workers.kv.table import KvSequence
from workers.models.inputs import ForwardInputs
from workers.operations import Kind, Rows
from workers.sampling import SamplingRow
from workers.scheduler import Chunk


@dataclass(frozen=True, slots=True)
class BatchItem:
    """A chunk of an operation and the sequence it extends, whose pages for it are reserved."""

    chunk: Chunk
    sequence: KvSequence

    @property
    def token_ids(self) -> Sequence[int]:
        """The tokens this step appends."""
        chunk = self.chunk
        return chunk.op.token_ids[chunk.start : chunk.start + chunk.count]

    @property
    def wanted(self) -> range:
        """Which of these tokens have an output, as indices into `token_ids`."""
        chunk = self.chunk
        if chunk.op.rows is Rows.ALL:
            return range(chunk.count)
        if chunk.op.rows is Rows.LAST and chunk.is_last:
            return range(chunk.count - 1, chunk.count)
        return range(0)


def pack(items: Sequence[BatchItem], page_size: int) -> ForwardInputs:
    """Builds the inputs of one forward over `items`, in their order, on the host."""
    token_ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    wanted_rows: list[int] = []
    query_starts = [0]
    context_lens: list[int] = []
    for item in items:
        first_row = len(token_ids)
        length = len(item.sequence.token_ids)
        chunk_tokens = item.token_ids
        end = length + len(chunk_tokens)
        token_ids.extend(chunk_tokens)
        positions.extend(range(length, end))
        pages = item.sequence.pages
        slots.extend(pages[i // page_size] * page_size + i % page_size for i in range(length, end))
        wanted_rows.extend(first_row + index for index in item.wanted)
        query_starts.append(len(token_ids))
        context_lens.append(end)
    return ForwardInputs(
        token_ids=torch.tensor(token_ids, dtype=torch.int64),  # [T]
        positions=torch.tensor(positions, dtype=torch.int64),  # [T]
        slots=torch.tensor(slots, dtype=torch.int64),  # [T]
        query_starts=torch.tensor(query_starts, dtype=torch.int32),  # [N + 1]
        context_lens=torch.tensor(context_lens, dtype=torch.int32),  # [N]
        page_tables=_page_tables(items, context_lens, page_size),  # [N, P]
        wanted_rows=torch.tensor(wanted_rows, dtype=torch.int64),  # [R]
        query_lens=[item.chunk.count for item in items],
        context_lens_host=context_lens,
    )


def _page_tables(items: Sequence[BatchItem], context_lens: Sequence[int], page_size: int) -> torch.Tensor:
    counts = [-(-length // page_size) for length in context_lens]
    longest = max(counts)
    rows = [
        item.sequence.pages[:count] + [0] * (longest - count)
        for item, count in zip(items, counts, strict=True)
    ]
    return torch.tensor(rows, dtype=torch.int32)  # [N, P]


def sampling_rows(items: Sequence[BatchItem]) -> list[SamplingRow]:
    """How the token of each wanted row is chosen; R entries in the order of `ForwardInputs.wanted_rows`."""
    rows = []
    for item in items:
        op = item.chunk.op
        length = len(item.sequence.token_ids)
        history: Sequence[int] = ()
        if item.wanted and op.output.sampling is not None and op.output.sampling.has_penalty:
            history = [*item.sequence.token_ids, *item.token_ids]
        for index in item.wanted:
            # The chosen token would stand at this position; the tokens before it are its history.
            position = length + index + 1
            rows.append(
                SamplingRow(
                    spec=op.output.sampling,
                    mask=op.output.mask,
                    position=position,
                    history=history[:position],
                    prompt_len=op.prompt_len,
                )
            )
    return rows


def score_targets(item: BatchItem) -> list[int]:
    """For a scoring item: the token that really follows each of its tokens; none after the last."""
    chunk = item.chunk
    if chunk.op.kind is not Kind.SCORE:
        return []
    return list(chunk.op.token_ids[chunk.start + 1 : chunk.start + chunk.count + 1])
