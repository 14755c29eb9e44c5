"""Paged attention in plain torch: the reference of the compiled kernels, and the fallback without them.

Gathers the pages of similar items and runs their attention together. Scores and softmax are float32 for any
dtype of the pages. kernels/paged_attention.py has the checks, and says which memory must never reach a
result.

Dimension letters: T tokens; N items; S tokens a page; H query heads; K key-value heads; G = H / K; D width of
a key, V of a value. In a group: B items, Q tokens each, L gathered positions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch.nn import functional

from kernels.attention_batch import AttentionBatch
from kernels.attention_scoring import Scoring
from kernels.attention_trees import distances

# The most bytes of K and V that are copied for a group of several items. A single long item may need more.
GROUP_SCRATCH_BYTES = 64 << 20
# Items with more tokens than this are run one by one: each uses all cores.
GROUP_MAX_QUERY_TOKENS = 16
# Queries of one item that are run at once. This bounds the mask, and skips most of the keys in their future.
QUERY_BLOCK_TOKENS = 256
MASK_ELEMENTS = 4 << 20


@dataclass(frozen=True, slots=True)
class _Group:
    """Items that are run at once: the same number of new tokens, ascending contexts of similar length."""

    items: list[int]
    query_len: int
    contexts: list[int]


def paged_attention_reference(
    query: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    batch: AttentionBatch,
    scoring: Scoring,
) -> torch.Tensor:
    """The attention of every item. Arguments are as in `paged_attention`, and checked."""
    heads, width = query.shape[1], v_pages.shape[3]
    out = torch.empty((len(query), heads, width), dtype=query.dtype, device=query.device)  # [T, H, V]
    starts = list(accumulate(batch.query_lens, initial=0))
    for item, context in enumerate(batch.context_lens_host):
        if context == 0:
            out[starts[item] : starts[item + 1]] = 0
    query_lens = list(batch.query_lens)
    for item, is_tree in enumerate([] if batch.trees is None else batch.trees.is_tree):
        if is_tree and query_lens[item]:
            rows = slice(starts[item], starts[item + 1])
            out[rows] = _attend_tree(query[rows], k_pages, v_pages, batch, item, rows, scoring)
            query_lens[item] = 0
    bytes_per_token = k_pages.shape[2] * (k_pages.shape[3] + width) * k_pages.element_size()
    max_tokens = GROUP_SCRATCH_BYTES // bytes_per_token
    for group in _groups(query_lens, batch.context_lens_host, max_tokens):
        keys, values, lengths = _gather(group, k_pages, v_pages, batch.page_tables, scoring.sliding_window)
        if len(group.items) == 1:
            rows = slice(starts[group.items[0]], starts[group.items[0] + 1])
            _attend_one(out[rows], query[rows], keys, values, scoring)
            continue
        firsts = torch.tensor([starts[item] for item in group.items], device=query.device)
        offsets = torch.arange(group.query_len, device=query.device)
        indices = (firsts[:, None] + offsets).flatten()  # [B * Q]
        picked = query.index_select(0, indices).view(-1, group.query_len, *query.shape[1:])  # [B, Q, H, D]
        own = torch.tensor(lengths, device=query.device)[:, None] - group.query_len + offsets  # [B, Q]
        see_all = group.query_len == 1 and min(lengths) == max(lengths) and scoring.sliding_window is None
        ahead = _ahead(own, keys.shape[1])
        attended = _attend(picked, keys, values, ahead, scoring, masked=not see_all)
        out.index_copy_(0, indices, attended.flatten(0, 1))
    return out


def _groups(query_lens: Sequence[int], contexts: Sequence[int], max_tokens: int) -> Iterator[_Group]:
    """Split the items that have rows and context into groups of at most `max_tokens` padded positions."""
    lengths = zip(query_lens, contexts, range(len(query_lens)), strict=True)
    order = sorted(item for item in lengths if item[0] and item[1])
    group: _Group | None = None
    for query_len, context, item in order:
        if (
            group is not None
            and query_len == group.query_len <= GROUP_MAX_QUERY_TOKENS
            # Contexts ascend, so this one determines the padding of the whole group.
            and context <= group.contexts[0] * 1.25 + 64
            and (len(group.items) + 1) * context <= max_tokens
        ):
            group.items.append(item)
            group.contexts.append(context)
            continue
        if group is not None:
            yield group
        group = _Group([item], query_len, [context])
    if group is not None:
        yield group


def _gather(
    group: _Group,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    page_tables: torch.Tensor,
    sliding_window: int | None,
) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
    """Copy the pages that a group needs.

    Returns:
        Keys [B, L, K, D] and values [B, L, K, V], zero after the end of shorter items; and the number of
        positions of each item. The last position is the last token of the item.
    """
    page_size = k_pages.shape[1]
    skipped = [0] * len(group.items)  # whole pages before the window of the first query
    if sliding_window is not None:
        oldest = [context - group.query_len - sliding_window + 1 for context in group.contexts]
        skipped = [max(0, position) // page_size for position in oldest]
    lengths = [context - pages * page_size for context, pages in zip(group.contexts, skipped, strict=True)]
    longest = max(lengths)
    num_pages = -(-longest // page_size)
    items = torch.tensor(group.items, device=page_tables.device)[:, None]
    columns = torch.tensor(skipped, device=page_tables.device)[:, None] + torch.arange(
        num_pages, device=page_tables.device
    )
    # For items with fewer pages this reads unused entries. Their copies are set to zero below.
    pages = page_tables[items, columns.clamp_(max=page_tables.shape[1] - 1)].flatten()  # [B * pages]
    copies = [source.index_select(0, pages).flatten(0, 1) for source in (k_pages, v_pages)]  # [B * L, K, ..]
    if min(lengths) != longest:
        limits = torch.tensor(lengths, device=pages.device)[:, None]
        unused = torch.arange(num_pages * page_size, device=pages.device) >= limits  # [B, pages * S]
        empty = unused.flatten().nonzero().flatten()
        for copy in copies:
            copy.index_fill_(0, empty, 0)
    keys, values = (copy.view(len(group.items), -1, *copy.shape[1:])[:, :longest] for copy in copies)
    return keys, values, lengths


def _attend_one(
    out: torch.Tensor,
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scoring: Scoring,
) -> None:
    """The attention of a single item in blocks of queries, each over the keys that are visible to the block.

    Writes `out`, [Q, H, V]. Query is [Q, H, D]; keys are [1, L, K, D] and values [1, L, K, V]. The last of
    the L positions is that of the last query.
    """
    query_len, heads = query.shape[:2]
    length = keys.shape[1]
    # A mask is shared by all key-value heads; explicit scores are not.
    masks = heads // keys.shape[2] if scoring.is_plain else heads
    step = max(1, min(QUERY_BLOCK_TOKENS, MASK_ELEMENTS // (masks * length)))
    for first in range(0, query_len, step):
        last = min(first + step, query_len)
        end = length - query_len + last
        begin = 0
        if scoring.sliding_window is not None:
            begin = max(0, length - query_len + first + 1 - scoring.sliding_window)
        own = torch.arange(end - begin - (last - first), end - begin, device=query.device)[None]  # [1, Q]
        block = query[first:last][None]  # [1, Q, H, D]
        seen = slice(begin, end)
        masked = last - first > 1
        ahead = _ahead(own, end - begin)
        out[first:last] = _attend(block, keys[:, seen], values[:, seen], ahead, scoring, masked=masked)[0]


def _attend_tree(
    query: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    batch: AttentionBatch,
    item: int,
    rows: slice,
    scoring: Scoring,
) -> torch.Tensor:
    """The attention of one tree with queries [Q, H, D]. Returns [Q, H, V]."""
    trees = batch.trees
    assert trees is not None
    context, root = batch.context_lens_host[item], int(trees.roots[item])
    # The root counts as the first query: no query of the tree sees a key before the root's window.
    group = _Group([item], context - root, [context])
    keys, values, (length,) = _gather(group, k_pages, v_pages, batch.page_tables, scoring.sliding_window)
    ahead = distances(trees.ancestors[rows], root, context - length, context)[None]  # [1, Q, L]
    return _attend(query[None], keys, values, ahead, scoring, masked=True)[0]


def _ahead(own: torch.Tensor, length: int) -> torch.Tensor:
    """How far each of `length` positions is ahead of the positions `own` [B, Q] of queries, as [B, Q, L]."""
    return torch.arange(length, device=own.device) - own[..., None]


def _attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    ahead: torch.Tensor,
    scoring: Scoring,
    *,
    masked: bool,
) -> torch.Tensor:
    """Grouped-query attention over dense keys and values.

    The G query heads of a key-value head become additional queries of it, so that keys and values are read
    once and not repeated in memory.

    Args:
        query: [B, Q, H, D].
        keys: [B, L, K, D].
        values: [B, L, K, V].
        ahead: [B, Q, L] int64, by how many positions a key is ahead of a query. Above 0 it is not visible.
        scoring: How scores become weights.
        masked: Whether some positions are not visible to some query.

    Returns:
        [B, Q, H, V].
    """
    batch, query_len, heads, width = query.shape
    kv_heads = keys.shape[2]
    group_size = heads // kv_heads
    by_group = query.reshape(batch, query_len, kv_heads, group_size, width)  # [B, Q, K, G, D]
    folded = by_group.permute(0, 2, 3, 1, 4).reshape(batch, kv_heads, -1, width)  # [B, K, G * Q, D]
    by_head = keys.transpose(1, 2), values.transpose(1, 2)  # [B, K, L, D], [B, K, L, V]
    mask = None  # [B, Q, L]
    if masked:
        mask = ahead <= 0
        if scoring.sliding_window is not None:
            mask &= ahead > -scoring.sliding_window
    if scoring.is_plain:
        if mask is not None:
            mask = mask[:, None, None].expand(-1, 1, group_size, -1, -1).flatten(2, 3)  # [B, 1, G * Q, L]
        attended = functional.scaled_dot_product_attention(
            folded, *by_head, attn_mask=mask, scale=scoring.scale
        )  # [B, K, G * Q, V]
    else:
        attended = _attend_in_steps(folded, *by_head, ahead, mask, scoring)
    unfolded = attended.reshape(batch, kv_heads, group_size, query_len, -1).permute(0, 3, 1, 2, 4)
    return unfolded.reshape(batch, query_len, heads, -1)


def _attend_in_steps(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    ahead: torch.Tensor,
    mask: torch.Tensor | None,
    scoring: Scoring,
) -> torch.Tensor:
    """The formulas of kernels/attention_scoring.py one by one in float32, for those that torch does not have.

    Args:
        query: [B, K, G * Q, D].
        keys: [B, K, L, D].
        values: [B, K, L, V].
        ahead: [B, Q, L], as in `_attend`.
        mask: [B, Q, L] bool, True if a key is visible to a query; None: all are.
        scoring: How scores become weights.

    Returns:
        [B, K, G * Q, V] with the dtype of query.
    """
    batch, kv_heads = query.shape[:2]
    query_len, length = ahead.shape[1:]
    by_query = (batch, kv_heads, -1, query_len, length)  # [B, K, G, Q, L]
    scores = (query.float() @ keys.float().transpose(2, 3) * scoring.scale).view(by_query)
    if scoring.softcap is not None:
        scores = scoring.softcap * torch.tanh(scores / scoring.softcap)
    if scoring.alibi_slopes is not None:
        scores += scoring.alibi_slopes.view(kv_heads, -1, 1, 1) * ahead[:, None, None]
    if mask is not None:
        scores.masked_fill_(~mask[:, None, None], -torch.inf)
    if scoring.sinks is None:
        weights = scores.softmax(-1)
    else:
        sinks = scoring.sinks.view(kv_heads, -1, 1, 1).expand(*scores.shape[:4], 1)
        weights = torch.cat([scores, sinks], -1).softmax(-1)[..., :length]
    return (weights.flatten(2, 3) @ values.float()).to(query.dtype)
