"""Packs the chunks of one step into the tensors of one forward.

Dimension letters: T tokens of all chunks; N chunks; R wanted rows; P pages in the longest page table.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from workers.models.capture import RowCapture
from workers.models.inputs import (
    MAX_TREE_TOKENS,
    AttentionBatch,
    ForwardInputs,
    TokenTrees,
    depths_and_ancestors,
)
from workers.operations import GREEDY, Chunk, Forward, OutputSpec, RowChoice
from workers.sampling import Draft, SamplingRow
from workers.token_trees import children_of, path_to

_NO_OWN_CHOICE = RowChoice()
_GREEDY_ROW = SamplingRow()


def pack(chunks: Sequence[Chunk], page_size: int) -> ForwardInputs:
    """Builds the inputs of one forward over `chunks`, in their order, on the host.

    The pages for their tokens must be reserved.
    """
    plain = plain_decodes(chunks)
    token_ids = [forward.token_ids[0] for forward in plain]
    positions = [forward.position for forward in plain]
    slots = [
        forward.kv.pages[at // page_size] * page_size + at % page_size
        for forward, at in zip(plain, positions, strict=True)
    ]
    wanted_rows = list(range(len(plain)))
    query_starts = list(range(len(plain) + 1))
    query_lens = [1] * len(plain)
    context_lens = [at + 1 for at in positions]
    is_tree = [False] * len(plain)
    has_adapter = has_experts = False
    for chunk in chunks[len(plain) :]:
        forward, first_row = chunk.forward, len(token_ids)
        start, pages = forward.position + chunk.start, forward.kv.pages
        end = start + chunk.count
        token_ids.extend(chunk.token_ids)
        positions.extend(_positions_in_tree(chunk) if forward.parents else range(start, end))
        slots += [pages[i // page_size] * page_size + i % page_size for i in range(start, end)]
        wanted_rows.extend(range(first_row + chunk.wanted.start, first_row + chunk.count))
        query_starts.append(len(token_ids))
        query_lens.append(chunk.count)
        context_lens.append(end)
        is_tree.append(bool(forward.parents))
        has_adapter |= forward.lora_slot >= 0
        has_experts |= forward.experts is not None
    return ForwardInputs(
        token_ids=_column(token_ids, np.int64),  # [T]
        positions=_column(positions, np.int64),  # [T]
        slots=_column(slots, np.int64),  # [T]
        wanted_rows=_column(wanted_rows, np.int64),  # [R]
        lora_slots=_lora_slots(chunks) if has_adapter else None,  # [T]
        experts=_given_experts(chunks) if has_experts else None,  # [T, L, E]
        attention=AttentionBatch(
            page_tables=_page_tables(chunks, context_lens, page_size),  # [N, P]
            query_starts=_column(query_starts, np.int32),  # [N + 1]
            context_lens=_column(context_lens, np.int32),  # [N]
            query_lens=query_lens,
            context_lens_host=context_lens,
            trees=_trees(chunks, context_lens, is_tree) if any(is_tree) else None,
        ),
    )


def _column(values: list[int], dtype: type[np.integer[Any]]) -> torch.Tensor:
    # Half as long as torch.tensor takes.
    return torch.from_numpy(np.array(values, dtype))


def plain_decodes(chunks: Sequence[Chunk]) -> list[Forward]:
    """The plain decodes among the first chunks, before any other."""
    forwards: list[Forward] = []
    for chunk in chunks:
        if not chunk.forward.is_plain:
            break
        forwards.append(chunk.forward)
    return forwards


def _lora_slots(chunks: Sequence[Chunk]) -> torch.Tensor:
    """The slot of each row's adapter. -1: it has none."""
    slots = torch.tensor([chunk.forward.lora_slot for chunk in chunks], dtype=torch.int32)
    return slots.repeat_interleave(torch.tensor([chunk.count for chunk in chunks]))


def _given_experts(chunks: Sequence[Chunk]) -> torch.Tensor | None:
    """The experts that each row is computed with, or -1. None: no token of these chunks has them given."""
    given: torch.Tensor | None = None
    row, rows = 0, sum([chunk.count for chunk in chunks])
    for chunk in chunks:
        experts, start, end = chunk.forward.experts, chunk.start, chunk.start + chunk.count
        if experts is not None:
            first, last = max(start, experts.start), min(end, experts.start + len(experts.ids))
            if first < last:
                if given is None:
                    given = torch.full((rows, *experts.ids.shape[1:]), -1, dtype=torch.int64)
                ids = experts.ids[first - experts.start : last - experts.start].astype(np.int64)
                given[row + first - start : row + last - start] = torch.from_numpy(ids)
        row += chunk.count
    return given


def _positions_in_tree(chunk: Chunk) -> list[int]:
    """The position of each token in the sequence that consists of its path only."""
    depths, _ = depths_and_ancestors(chunk.forward.parents)
    return [chunk.forward.position + depth for depth in depths[chunk.start : chunk.start + chunk.count]]


def _trees(chunks: Sequence[Chunk], context_lens: Sequence[int], is_tree: list[bool]) -> TokenTrees:
    """The trees of the chunks, for attention."""
    roots: list[int] = []
    ancestors: list[int] = []
    depths = torch.zeros((len(chunks), MAX_TREE_TOKENS), dtype=torch.int32)  # [N, 64]
    for item, (chunk, context) in enumerate(zip(chunks, context_lens, strict=True)):
        if chunk.forward.parents:
            roots.append(chunk.forward.position)
            tree_depths, tree_ancestors = depths_and_ancestors(chunk.forward.parents)
            ancestors += tree_ancestors[chunk.start : chunk.start + chunk.count]
            depths[item, : len(tree_depths)] = torch.tensor(tree_depths)
        else:
            roots.append(context)
            ancestors += [0] * chunk.count
    return TokenTrees(
        roots=torch.tensor(roots, dtype=torch.int32),  # [N]
        ancestors=torch.tensor(ancestors, dtype=torch.int64),  # [T]
        depths=depths,
        is_tree=is_tree,
    )


def _page_tables(chunks: Sequence[Chunk], context_lens: Sequence[int], page_size: int) -> torch.Tensor:
    counts = [-(-length // page_size) for length in context_lens]
    width = max(counts)
    padding = array("i", [0]) * width
    parts: list[array[int]] = []
    for chunk, count in zip(chunks, counts, strict=True):
        pages = chunk.forward.kv.pages
        parts.append(pages if len(pages) == count else pages[:count])
        if count < width:
            parts.append(padding[count:])
    # One copy of all of them: numpy takes longer to copy each row into a table.
    tables = np.frombuffer(bytearray().join(parts), np.int32).reshape(len(chunks), width)
    return torch.from_numpy(tables)  # [N, P]


def sampling_rows(chunks: Sequence[Chunk]) -> list[SamplingRow]:
    """How the token of each wanted row is chosen; R entries in the order of `ForwardInputs.wanted_rows`."""
    rows: list[SamplingRow] = []
    for chunk in chunks:
        forward = chunk.forward
        sampling = forward.output.sampling
        if forward.is_plain:
            position = forward.position + 1
            rows.append(_GREEDY_ROW if sampling is None else SamplingRow(sampling, None, position))
            continue
        if sampling is None and forward.output.mask is None and not forward.choices:
            rows += [_GREEDY_ROW] * chunk.rows
            continue
        # The rows before those with an output only score the next token.
        rows += [_GREEDY_ROW] * (chunk.rows - chunk.output_rows)
        rows += _rows_of_tree(chunk) if forward.parents else _rows_of_chain(chunk)
    return rows


def _rows_of_chain(chunk: Chunk) -> list[SamplingRow]:
    """The rows of a chunk whose tokens are consecutive."""
    op, counted_from = chunk.forward, _counted_from(chunk.forward)
    rows: list[SamplingRow] = []
    history: Sequence[int] | NDArray[np.int64] = ()
    if chunk.output_rows and _needs_history(op):
        # One for all rows of the chunk: a separate history for each would cost tokens x rows.
        history = np.concatenate([op.kv.token_ids.as_array(), chunk.token_ids])
    for index in range(chunk.count - chunk.output_rows, chunk.count):
        # The position of the chosen token; the tokens before it are its history.
        position = op.position + chunk.start + index + 1
        choice = op.choices[chunk.start + index] if op.choices else _NO_OWN_CHOICE
        draft = None
        if choice.draft is not None:
            draft = Draft((op.token_ids[chunk.start + index + 1],), choice.draft)
        row = SamplingRow(
            spec=op.output.sampling,
            mask=choice.mask or op.output.mask,
            draft=draft,
            position=position,
            history=history,
            history_len=min(position, len(history)),
            prompt_len=counted_from,
        )
        rows.append(row)
    return rows


def _rows_of_tree(chunk: Chunk) -> Iterator[SamplingRow]:
    """The rows of a tree's chunk. The history of each is the sequence and its path in the tree."""
    op = chunk.forward
    children = children_of(op.parents)
    history: Sequence[int] | NDArray[np.int64] = ()
    if _needs_history(op):
        history = op.kv.token_ids.as_array().astype(np.int64)
    for index, position in enumerate(_positions_in_tree(chunk), start=chunk.start):
        choice = op.choices[index] if op.choices else _NO_OWN_CHOICE
        draft = None
        if choice.draft is not None:
            draft = Draft([op.token_ids[child] for child in children[index]], choice.draft)
        yield SamplingRow(
            spec=op.output.sampling,
            mask=choice.mask or op.output.mask,
            draft=draft,
            position=position + 1,
            history=history,
            prompt_len=_counted_from(op),
            path=[op.token_ids[at] for at in path_to(op.parents, index)] if _needs_history(op) else (),
        )


def _needs_history(op: Forward) -> bool:
    """Whether its rows need the tokens before them."""
    return op.output.sampling is not None and op.output.sampling.has_penalty


def _counted_from(op: Forward) -> int:
    """The first position that frequency and presence penalties count."""
    sampling = op.output.sampling
    return op.prompt_len if sampling is None or sampling.penalty_from is None else sampling.penalty_from


def output_specs(chunks: Sequence[Chunk]) -> list[OutputSpec]:
    """The requested outputs of each wanted row; R entries in the order of `ForwardInputs.wanted_rows`."""
    specs: list[OutputSpec] = []
    for chunk in chunks:
        if chunk.rows > chunk.output_rows:
            specs += [GREEDY] * (chunk.rows - chunk.output_rows)
        specs += [chunk.forward.output] * chunk.output_rows
    return specs


def captured_rows(specs: Sequence[OutputSpec]) -> RowCapture | None:
    """Which rows' hidden states are captured in which layers, and which rows' experts. None: none of both."""
    rows: dict[int, list[int]] = {}
    expert_rows: list[int] = []
    for index, spec in enumerate(specs):
        if spec.experts:
            expert_rows.append(index)
        for layer in dict.fromkeys(spec.hidden.layers) if spec.hidden is not None else ():
            rows.setdefault(layer, []).append(index)
    return RowCapture(rows, expert_rows) if rows or expert_rows else None


def score_targets(chunk: Chunk) -> tuple[list[int], list[int]]:
    """The tokens that a chunk scores: their indexes in the request, and for each the row that scores it.

    Rows count from the chunk's first wanted one.
    """
    op, first_row = chunk.forward, chunk.start + chunk.wanted.start
    first_scored, end = len(op.token_ids) - op.scored, chunk.start + chunk.count
    if op.parents:
        scored = [
            index
            for index, parent in enumerate(op.parents, start=1)
            if index >= first_scored and first_row <= parent < end
        ]
        return scored, [op.parents[index - 1] - first_row for index in scored]
    scored = list(range(max(first_row + 1, first_scored), min(end + 1, len(op.token_ids))))
    return scored, [index - 1 - first_row for index in scored]
