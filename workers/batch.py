"""Packs the chunks of one step into the tensors of one forward.

Dimension letters: T tokens of all chunks; N chunks; R wanted rows; P pages in the longest page table.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from workers.models.inputs import AttentionBatch, ForwardInputs
from workers.operations import Kind
from workers.running import Chunk
from workers.sampling import SamplingRow


def pack(chunks: Sequence[Chunk], page_size: int) -> ForwardInputs:
    """Builds the inputs of one forward over `chunks`, in their order, on the host.

    The pages for their tokens are reserved.
    """
    token_ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    wanted_rows: list[int] = []
    query_starts = [0]
    context_lens: list[int] = []
    for chunk in chunks:
        sequence, first_row = chunk.running.sequence, len(token_ids)
        length = len(sequence)
        end = length + chunk.count
        token_ids.extend(chunk.token_ids)
        positions.extend(range(length, end))
        slots.extend(sequence.pages[i // page_size] * page_size + i % page_size for i in range(length, end))
        wanted_rows.extend(first_row + index for index in chunk.wanted)
        query_starts.append(len(token_ids))
        context_lens.append(end)
    return ForwardInputs(
        token_ids=torch.tensor(token_ids, dtype=torch.int64),  # [T]
        positions=torch.tensor(positions, dtype=torch.int64),  # [T]
        slots=torch.tensor(slots, dtype=torch.int64),  # [T]
        wanted_rows=torch.tensor(wanted_rows, dtype=torch.int64),  # [R]
        attention=AttentionBatch(
            page_tables=_page_tables(chunks, context_lens, page_size),  # [N, P]
            query_starts=torch.tensor(query_starts, dtype=torch.int32),  # [N + 1]
            context_lens=torch.tensor(context_lens, dtype=torch.int32),  # [N]
            query_lens=[chunk.count for chunk in chunks],
            context_lens_host=context_lens,
        ),
    )


def _page_tables(chunks: Sequence[Chunk], context_lens: Sequence[int], page_size: int) -> torch.Tensor:
    counts = [-(-length // page_size) for length in context_lens]
    longest = max(counts)
    rows = [
        chunk.running.sequence.pages[:count].tolist() + [0] * (longest - count)
        for chunk, count in zip(chunks, counts, strict=True)
    ]
    return torch.tensor(rows, dtype=torch.int32)  # [N, P]


def sampling_rows(chunks: Sequence[Chunk]) -> list[SamplingRow]:
    """How the token of each wanted row is chosen; R entries in the order of `ForwardInputs.wanted_rows`."""
    rows = []
    for chunk in chunks:
        op, committed = chunk.op, len(chunk.running.sequence)
        history: Sequence[int] | NDArray[np.int64] = ()
        if chunk.wanted and op.output.sampling is not None and op.output.sampling.has_penalty:
            # One for all rows of the chunk: each of them a history of its own would cost tokens x rows.
            history = np.concatenate([chunk.running.sequence.token_ids.as_array(), chunk.token_ids])
        for index in chunk.wanted:
            # The chosen token would stand at this position; the tokens before it are its history.
            position = committed + index + 1
            rows.append(
                SamplingRow(
                    spec=op.output.sampling,
                    mask=op.output.mask,
                    position=position,
                    history=history,
                    history_len=min(position, len(history)),
                    prompt_len=op.prompt_len,
                )
            )
    return rows


def score_targets(chunk: Chunk) -> list[int]:
    """Of a scoring operation: the token that really follows each wanted one; none after the last."""
    if chunk.op.kind is not Kind.SCORE:
        return []
    first, end = chunk.start + chunk.wanted.start, chunk.start + chunk.count
    return list(chunk.op.token_ids[first + 1 : end + 1])
