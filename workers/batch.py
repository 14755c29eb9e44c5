"""Packs the chunks of one step into the tensors of one forward.

Plain decodes are columns already (`decodes`), and come first. Chunks are packed one after the other.

Dimension letters: T tokens; N plain decodes and chunks; R wanted rows; P pages in the longest page table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from workers.decodes import NO_DECODES, Column, Decodes
from workers.models.capture import RowCapture
from workers.models.inputs import (
    MAX_TREE_TOKENS,
    AttentionBatch,
    ForwardInputs,
    TokenTrees,
    depths_and_ancestors,
)
from workers.operations import Chunk
from workers.outputs import GREEDY, OutputSpec, Sampling, VerifyRow
from workers.sampling import Draft, SamplingRow
from workers.token_trees import children_of, path_to

Tables = NDArray[np.int32]
# Returns the tokens of the sequence of the decode with this index, including the decode's own token.
HistoryOf = Callable[[Decodes, int], NDArray[np.int64]]

_NO_OWN_CHOICE = VerifyRow()
_GREEDY_ROW = SamplingRow()
_NO_TABLES: Tables = np.zeros((0, 0), np.int32)


def pack(
    chunks: Sequence[Chunk], page_size: int, decodes: Decodes = NO_DECODES, tables: Tables = _NO_TABLES
) -> ForwardInputs:
    """Builds the inputs of one forward over plain decodes and then `chunks`, in their order, on the host.

    The pages for their tokens must be reserved. `tables`: [N, P] int32, the page tables of the plain decodes.
    """
    if not chunks:
        return _of_decodes(decodes, tables, page_size)
    packed = _of_chunks(chunks, page_size)
    return _of_decodes(decodes, tables, page_size).with_chunks(packed) if decodes.size else packed


def _of_decodes(decodes: Decodes, tables: Tables, page_size: int) -> ForwardInputs:
    count, columns = decodes.size, decodes.columns
    positions, starts, adapters = columns[Column.POSITION], np.arange(count + 1), columns[Column.LORA_SLOT]
    items, page = starts[:count], positions // page_size
    slots = (tables[items, page] - page) * page_size + positions
    context_lens = (positions + 1).astype(np.int32)
    has_adapter = max(adapters.tolist(), default=-1) >= 0
    # torch.from_numpy copies nothing, and takes a fraction of the time of torch.tensor.
    return ForwardInputs(
        token_ids=torch.from_numpy(columns[Column.TOKEN]),
        positions=torch.from_numpy(positions),
        slots=torch.from_numpy(slots),
        wanted_rows=torch.from_numpy(items),
        lora_slots=torch.from_numpy(adapters.astype(np.int32)) if has_adapter else None,
        attention=AttentionBatch(
            page_tables=torch.from_numpy(tables),
            query_starts=torch.from_numpy(starts.astype(np.int32)),
            context_lens=torch.from_numpy(context_lens),
            query_lens=[1] * count,
            context_lens_host=context_lens.tolist(),
        ),
    )


def _of_chunks(chunks: Sequence[Chunk], page_size: int) -> ForwardInputs:
    token_ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    wanted_rows: list[int] = []
    query_starts = [0]
    context_lens: list[int] = []
    for chunk in chunks:
        forward, first_row = chunk.forward, len(token_ids)
        start, pages = forward.position + chunk.start, forward.kv.pages
        end = start + chunk.count
        token_ids.extend(chunk.token_ids)
        positions.extend(_positions_in_tree(chunk) if forward.parents else range(start, end))
        slots += [pages[i // page_size] * page_size + i % page_size for i in range(start, end)]
        wanted_rows.extend(range(first_row + chunk.wanted.start, first_row + chunk.count))
        query_starts.append(len(token_ids))
        context_lens.append(end)
    return ForwardInputs(
        token_ids=_tensor(token_ids, np.int64),
        positions=_tensor(positions, np.int64),
        slots=_tensor(slots, np.int64),
        wanted_rows=_tensor(wanted_rows, np.int64),
        lora_slots=_lora_slots(chunks),
        experts=_given_experts(chunks),
        attention=AttentionBatch(
            page_tables=_page_tables(chunks, context_lens, page_size),
            query_starts=_tensor(query_starts, np.int32),
            context_lens=_tensor(context_lens, np.int32),
            query_lens=[chunk.count for chunk in chunks],
            context_lens_host=context_lens,
            trees=_trees(chunks, context_lens),
        ),
    )


def _tensor(values: Sequence[int], dtype: type[np.signedinteger[Any]]) -> torch.Tensor:
    return torch.from_numpy(np.array(values, dtype))


def _lora_slots(chunks: Sequence[Chunk]) -> torch.Tensor | None:
    """[T] int32, the slot of each token's adapter (-1: it has none). None: no token has one."""
    slots = [chunk.forward.lora_slot for chunk in chunks]
    if max(slots) < 0:
        return None
    counts = torch.tensor([chunk.count for chunk in chunks])
    return torch.tensor(slots, dtype=torch.int32).repeat_interleave(counts)


def _given_experts(chunks: Sequence[Chunk]) -> torch.Tensor | None:
    """[T, L, E] int64, the given experts of each token in each layer, or -1. None: none are given."""
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
    """The position of each token of a tree: its depth counts, not its index."""
    depths, _ = depths_and_ancestors(chunk.forward.parents)
    return [chunk.forward.position + depth for depth in depths[chunk.start : chunk.start + chunk.count]]


def _trees(chunks: Sequence[Chunk], context_lens: Sequence[int]) -> TokenTrees | None:
    """The trees of the chunks, for attention. None: there are none."""
    is_tree = [bool(chunk.forward.parents) for chunk in chunks]
    if True not in is_tree:
        return None
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
    """[N, P] int32, padded with zeros."""
    counts = [-(-length // page_size) for length in context_lens]
    tables = np.zeros((len(chunks), max(counts)), np.int32)
    for item, (chunk, count) in enumerate(zip(chunks, counts, strict=True)):
        tables[item, :count] = chunk.forward.kv.pages[:count]
    return torch.from_numpy(tables)


def sampling_rows(
    chunks: Sequence[Chunk], decodes: Decodes = NO_DECODES, history_of: HistoryOf | None = None
) -> list[SamplingRow]:
    """How the token of each wanted row is chosen; R entries in the order of `ForwardInputs.wanted_rows`.

    `history_of`: for the plain decodes; only called for those that need it.
    """
    rows = [_GREEDY_ROW] * decodes.size
    for spec in decodes.distinct_outputs:
        if spec.sampling or spec.mask:
            rows = _rows_of_decodes(decodes, history_of)
            break
    for chunk in chunks:
        forward = chunk.forward
        sampling = forward.output.sampling
        if sampling is None and forward.output.mask is None and not forward.choices:
            rows += [_GREEDY_ROW] * chunk.rows
            continue
        # The rows before those with an output only score the next token.
        rows += [_GREEDY_ROW] * (chunk.rows - chunk.output_rows)
        rows += _rows_of_chunk(chunk)
    return rows


def _rows_of_decodes(decodes: Decodes, history_of: HistoryOf | None) -> list[SamplingRow]:
    rows = [
        SamplingRow(spec.sampling, spec.mask, position + 1) if spec.sampling or spec.mask else _GREEDY_ROW
        for spec, position in zip(decodes.outputs, decodes.column(Column.POSITION), strict=True)
    ]
    for index, spec in enumerate(decodes.outputs):
        if spec.needs_history:
            assert history_of is not None, "it is given with decodes that need it"
            prompt_len = int(decodes.columns[Column.PROMPT_LEN, index])
            rows[index].history = history_of(decodes, index)
            rows[index].prompt_len = _counted_from(spec.sampling, prompt_len)
    return rows


def _rows_of_chunk(chunk: Chunk) -> Iterator[SamplingRow]:
    """The rows with an output. In a tree, the history of each is the sequence and its path."""
    op, tree, needs_history = chunk.forward, chunk.forward.parents, chunk.forward.output.needs_history
    first, end = op.position + chunk.start, chunk.start + chunk.count
    positions: Sequence[int] = _positions_in_tree(chunk) if tree else range(first, first + chunk.count)
    children = children_of(tree) if tree else None
    history: Sequence[int] | NDArray[np.int64] = ()
    if chunk.output_rows and needs_history:
        # One array for all rows of the chunk: a separate one for each would take tokens x rows.
        known = op.kv.token_ids.as_array()
        history = known.astype(np.int64) if tree else np.concatenate([known, chunk.token_ids])
    for index in range(end - chunk.output_rows, end):
        # The position of the chosen token; the tokens before it are its history.
        position = positions[index - chunk.start] + 1
        choice = op.choices[index] if op.choices else _NO_OWN_CHOICE
        draft = None
        if choice.draft is not None:
            following = [index + 1] if children is None else children[index]
            draft = Draft([op.token_ids[one] for one in following], choice.draft)
        yield SamplingRow(
            spec=op.output.sampling,
            mask=choice.mask or op.output.mask,
            draft=draft,
            position=position,
            history=history,
            history_len=None if tree else min(position, len(history)),
            prompt_len=_counted_from(op.output.sampling, op.prompt_len),
            path=[op.token_ids[at] for at in path_to(tree, index)] if tree and needs_history else (),
        )


def _counted_from(sampling: Sampling | None, prompt_len: int) -> int:
    """The first position that frequency and presence penalties count."""
    return prompt_len if sampling is None or sampling.penalty_from is None else sampling.penalty_from


def output_specs(chunks: Sequence[Chunk], decodes: Decodes = NO_DECODES) -> list[OutputSpec]:
    """The requested outputs of each wanted row; R entries in the order of `ForwardInputs.wanted_rows`."""
    specs = list(decodes.outputs)
    for chunk in chunks:
        output = chunk.forward.output
        if chunk.rows > chunk.output_rows:
            is_mean = output.hidden is not None and output.hidden.mean
            before = OutputSpec(hidden=output.hidden) if is_mean else GREEDY
            specs += [before] * (chunk.rows - chunk.output_rows)
        specs += [output] * chunk.output_rows
    return specs


def captured_rows(specs: Sequence[OutputSpec]) -> RowCapture | None:
    """Which hidden states and experts of which rows to capture. None: none."""
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

    Rows are counted from the chunk's first wanted row.
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
