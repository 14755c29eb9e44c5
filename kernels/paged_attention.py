"""Causal attention of a mixed batch over paged keys and values.

An item is a run of new tokens of one sequence: one token when decoding, many when prefilling or verifying.
Its last token is the last of its context. A token sees every position up to its own, or with a sliding window
of W only the last W of them. Keys and values of the new tokens are in the pages already.

What this module must not do: let memory that holds no token of the sequence (the end of a last page, page 0
behind an unused page table entry) reach a result. 0 * NaN is NaN, so masking the scores is not enough.

Dimension letters: T tokens; N items; P pages in the longest page table; S tokens a page; H query heads;
K key-value heads; G = H / K; D head width. In a group: B items, Q tokens each, L gathered positions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch.nn import functional

from kernels.attention_batch import AttentionBatch
from kernels.checks import FLOAT_DTYPES, check_pages, check_tensor
from kernels.cpu import paged_attention as cpu

# Head widths that the kernels of CUDA devices are made and checked for; others are left to torch there.
CUDA_WIDTHS = (64, 80, 96, 128, 256)
# The copies of K and V that a group of several items may make. A single item may need more: its own context.
GROUP_SCRATCH_BYTES = 64 << 20
# Items with more tokens than this are attended one by one: they fill the cores alone.
GROUP_MAX_QUERY_TOKENS = 16
# Queries of one item at a time: bounds the mask, and skips most of the keys that causality hides.
QUERY_BLOCK_TOKENS = 256
MASK_ELEMENTS = 4 << 20


@dataclass(frozen=True, slots=True)
class _Group:
    """Items attended at once: the same number of new tokens, contexts of similar length, ascending."""

    items: list[int]
    query_len: int
    contexts: list[int]


def paged_attention(
    query: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    batch: AttentionBatch,
    *,
    scale: float,
    sliding_window: int | None = None,
) -> torch.Tensor:
    """Attend every item to its own sequence.

    Args:
        query: [T, H, D]; float32, bfloat16 or float16; heads contiguous.
        k_pages: [pages, S, K, D] contiguous; dtype of query.
        v_pages: [pages, S, K, D] contiguous; dtype of query.
        batch: Rows and pages of the items.
        scale: Multiplies the scores.
        sliding_window: Positions a token sees, its own included; None: all of them.

    Returns:
        A new contiguous tensor [T, H, D] with the dtype of query.

    Raises:
        ValueError, TypeError: An argument does not fit, by name.
    """
    check_tensor("query", query, (sum(batch.query_lens), None, None), FLOAT_DTYPES)
    heads, width = query.shape[1:]
    check_pages(k_pages, v_pages, None, width, "query", query)
    page_size, kv_heads = k_pages.shape[1:3]
    if heads % kv_heads:
        raise ValueError(f"query: {heads} heads are not a multiple of the {kv_heads} heads of k_pages")
    longest, capacity = max(batch.context_lens_host, default=0), batch.page_tables.shape[1] * page_size
    if longest > capacity:
        raise ValueError(f"page_tables: must hold {longest} positions, got {capacity}")
    if sliding_window is not None and sliding_window < 1:
        raise ValueError(f"sliding_window: must be positive or None, got {sliding_window}")
    if query.is_cuda and width in CUDA_WIDTHS:
        from kernels.cuda import paged_attention as cuda

        return cuda.paged_attention(
            query, k_pages, v_pages, batch, scale=scale, sliding_window=sliding_window
        )
    if not cpu.can_attend(query, k_pages, batch):
        return paged_attention_reference(query, k_pages, v_pages, batch, scale, sliding_window)
    long_items = max(batch.query_lens, default=0) > GROUP_MAX_QUERY_TOKENS
    if long_items and not cpu.can_attend_chunks(query, k_pages, batch):
        # Long chunks are matrix products: torch is good at them where the kernel has no instructions for it.
        short = [length <= GROUP_MAX_QUERY_TOKENS for length in batch.query_lens]
        out = paged_attention_reference(query, k_pages, v_pages, batch, scale, sliding_window, skipped=short)
    else:
        allocate = torch.zeros if 0 in batch.context_lens_host else torch.empty  # padded rows are not written
        out = allocate(query.shape, dtype=query.dtype)  # [T, H, D]
    cpu.attend(out, query, k_pages, v_pages, batch, GROUP_MAX_QUERY_TOKENS, scale, sliding_window)
    return out


def paged_attention_reference(
    query: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    batch: AttentionBatch,
    scale: float,
    sliding_window: int | None,
    skipped: Sequence[bool] | None = None,
) -> torch.Tensor:
    """Attention in plain torch: gathers the pages of similar items and attends them together.

    Scores and softmax are float32 whatever the dtype of the pages. The rows of items in `skipped` are left to
    the caller, unless they are padded.
    """
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device)  # [T, H, D]
    starts = list(accumulate(batch.query_lens, initial=0))
    for item, context in enumerate(batch.context_lens_host):
        if context == 0:
            out[starts[item] : starts[item + 1]] = 0
    query_lens = batch.query_lens
    if skipped is not None:
        query_lens = [0 if skip else length for skip, length in zip(skipped, query_lens, strict=True)]
    bytes_per_token = 2 * k_pages.shape[2] * k_pages.shape[3] * k_pages.element_size()
    max_tokens = GROUP_SCRATCH_BYTES // bytes_per_token
    for group in _groups(query_lens, batch.context_lens_host, max_tokens):
        keys, values, lengths = _gather(group, k_pages, v_pages, batch.page_tables, sliding_window)
        if len(group.items) == 1:
            rows = slice(starts[group.items[0]], starts[group.items[0] + 1])
            _attend_one(out[rows], query[rows], keys, values, scale, sliding_window)
            continue
        firsts = torch.tensor([starts[item] for item in group.items], device=query.device)
        offsets = torch.arange(group.query_len, device=query.device)
        indices = (firsts[:, None] + offsets).flatten()  # [B * Q]
        picked = query.index_select(0, indices).view(-1, group.query_len, *query.shape[1:])  # [B, Q, H, D]
        mask = _group_mask(lengths, group.query_len, sliding_window, query.device)
        out.index_copy_(0, indices, _attend(picked, keys, values, mask, scale).flatten(0, 1))
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
            # Contexts ascend: this one decides the padding of the whole group.
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
        Keys and values [B, L, K, D], zero where an item has fewer than L positions; and the number of
        positions of each item. The last of them is the last token of the item.
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
    # An item with fewer pages than the longest reads entries without meaning; the copy is cleared below.
    pages = page_tables[items, columns.clamp_(max=page_tables.shape[1] - 1)].flatten()  # [B * pages]
    copies = [source.index_select(0, pages).flatten(0, 1) for source in (k_pages, v_pages)]  # [B * L, K, D]
    if min(lengths) != longest:
        limits = torch.tensor(lengths, device=pages.device)[:, None]
        unused = torch.arange(num_pages * page_size, device=pages.device) >= limits  # [B, pages * S]
        empty = unused.flatten().nonzero().flatten()
        for copy in copies:
            copy.index_fill_(0, empty, 0)
    by_item = (len(group.items), num_pages * page_size, *k_pages.shape[2:])
    keys, values = (copy.view(by_item)[:, :longest] for copy in copies)
    return keys, values, lengths


def _visible(
    lengths: torch.Tensor, queries: torch.Tensor, keys: torch.Tensor, sliding_window: int | None
) -> torch.Tensor:
    """Which keys a query sees, all counted from the first gathered position.

    Args:
        lengths: Positions up to and including the last token, broadcastable.
        queries: How many tokens before the last one each query is (0: the last), broadcastable.
        keys: Position of each key, broadcastable.
        sliding_window: As in `paged_attention`.

    Returns:
        bool, the broadcast of the three.
    """
    own = lengths - 1 - queries
    seen = keys <= own
    return seen if sliding_window is None else seen & (keys > own - sliding_window)


def _group_mask(
    lengths: list[int], query_len: int, sliding_window: int | None, device: torch.device
) -> torch.Tensor | None:
    """The mask [B, Q, L] of a group, or None where every query sees every position."""
    longest = max(lengths)
    if query_len == 1 and min(lengths) == longest and sliding_window is None:
        return None
    ends = torch.tensor(lengths, device=device)[:, None, None]  # [B, 1, 1]
    before_last = torch.arange(query_len - 1, -1, -1, device=device)[:, None]  # [Q, 1]
    return _visible(ends, before_last, torch.arange(longest, device=device), sliding_window)


def _attend_one(
    out: torch.Tensor,
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scale: float,
    sliding_window: int | None,
) -> None:
    """Attend a single item in blocks of queries, each over the keys that some query of the block sees.

    Writes `out`, [Q, H, D]. Query is [Q, H, D]; keys and values are [1, L, K, D], the last of
    the L positions being that of the last query.
    """
    query_len, heads = query.shape[:2]
    length = keys.shape[1]
    group_size = heads // keys.shape[2]
    step = max(1, min(QUERY_BLOCK_TOKENS, MASK_ELEMENTS // (group_size * length)))
    for first in range(0, query_len, step):
        last = min(first + step, query_len)
        end = length - query_len + last
        begin = 0
        if sliding_window is not None:
            begin = max(0, length - query_len + first + 1 - sliding_window)
        mask = None
        if last - first > 1:
            before_last = torch.arange(last - first - 1, -1, -1, device=query.device)[:, None]  # [Q, 1]
            positions = torch.arange(end - begin, device=query.device)
            ends = torch.tensor(end - begin, device=query.device)
            mask = _visible(ends, before_last, positions, sliding_window)[None]  # [1, Q, L]
        block = query[first:last][None]  # [1, Q, H, D]
        out[first:last] = _attend(block, keys[:, begin:end], values[:, begin:end], mask, scale)[0]


def _attend(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None, scale: float
) -> torch.Tensor:
    """Grouped-query attention over dense keys and values.

    The G query heads of a key-value head are laid side by side as further queries of it, so that keys and
    values are read once and never repeated in memory.

    Args:
        query: [B, Q, H, D].
        keys: [B, L, K, D].
        values: [B, L, K, D].
        mask: [B, Q, L] bool, True where a query sees a key; None: everywhere.
        scale: Multiplies the scores.

    Returns:
        [B, Q, H, D].
    """
    batch, query_len, heads, width = query.shape
    kv_heads = keys.shape[2]
    group_size = heads // kv_heads
    by_group = query.reshape(batch, query_len, kv_heads, group_size, width)  # [B, Q, K, G, D]
    folded = by_group.permute(0, 2, 3, 1, 4)  # [B, K, G, Q, D]
    if mask is not None:
        mask = mask[:, None, None].expand(-1, 1, group_size, -1, -1).flatten(2, 3)  # [B, 1, G * Q, L]
    attended = functional.scaled_dot_product_attention(
        folded.reshape(batch, kv_heads, group_size * query_len, width),
        keys.transpose(1, 2),  # [B, K, L, D]
        values.transpose(1, 2),
        attn_mask=mask,
        scale=scale,
    )  # [B, K, G * Q, D]
    unfolded = attended.reshape(batch, kv_heads, group_size, query_len, width).permute(0, 3, 1, 2, 4)
    return unfolded.reshape(batch, query_len, heads, width)
