"""Packs the chunks of one step into the tensors of one forward.

Dimension letters: T tokens of all chunks; N chunks; R wanted rows; P pages in the longest page table.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from workers.models.inputs import AttentionBatch, ForwardInputs
from workers.models.taps import Taps
from workers.operations import GREEDY, Forward, OutputSpec, RowChoice
from workers.running import Chunk
from workers.sampling import Draft, SamplingRow

_LIKE_ALL = RowChoice()


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
        if chunk.told and op.output.sampling is not None and op.output.sampling.has_penalty:
            # One for all rows of the chunk: each of them a history of its own would cost tokens x rows.
            history = np.concatenate([chunk.running.sequence.token_ids.as_array(), chunk.token_ids])
        # The first ones only say how likely the next token was.
        rows += [SamplingRow()] * (chunk.rows - chunk.told)
        for index in range(chunk.count - chunk.told, chunk.count):
            # The chosen token would stand at this position; the tokens before it are its history.
            position = committed + index + 1
            choice = op.choices[chunk.start + index] if op.choices else _LIKE_ALL
            draft = None
            if choice.draft is not None:
                draft = Draft(op.token_ids[chunk.start + index + 1], choice.draft)
            rows.append(
                SamplingRow(
                    spec=op.output.sampling,
                    mask=choice.mask or op.output.mask,
                    draft=draft,
                    position=position,
                    history=history,
                    history_len=min(position, len(history)),
                    prompt_len=_counted_from(op),
                )
            )
    return rows


def _counted_from(op: Forward) -> int:
    """Where the tokens begin that frequency and presence penalties count."""
    sampling = op.output.sampling
    return op.prompt_len if sampling is None or sampling.penalty_from is None else sampling.penalty_from


def output_specs(chunks: Sequence[Chunk]) -> list[OutputSpec]:
    """What is to be said of each wanted row; R entries in the order of `ForwardInputs.wanted_rows`."""
    specs: list[OutputSpec] = []
    for chunk in chunks:
        specs += [GREEDY] * (chunk.rows - chunk.told) + [chunk.op.output] * chunk.told
    return specs


def taps_of(specs: Sequence[OutputSpec]) -> Taps | None:
    """Which rows are read in which layers. None: nobody asks for hidden states."""
    rows: dict[int, list[int]] = {}
    for index, spec in enumerate(specs):
        for layer in dict.fromkeys(spec.hidden.layers) if spec.hidden is not None else ():
            rows.setdefault(layer, []).append(index)
    return Taps(rows) if rows else None


def score_targets(chunk: Chunk) -> tuple[int, list[int]]:
    """The scored tokens that follow wanted ones of a chunk, and how many of its wanted rows come before."""
    op, first_row = chunk.op, chunk.start + chunk.wanted.start
    first_scored = max(first_row + 1, len(op.token_ids) - op.scored)
    return first_scored - first_row - 1, list(op.token_ids[first_scored : chunk.start + chunk.count + 1])
