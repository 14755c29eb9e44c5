"""Causal attention of a mixed batch over paged keys and values.

An item has consecutive new tokens of one sequence: one token in a decode, many in a prefill or verify. Its
last token is the last of its context. Or its tokens are a tree, of which each attends to its own path
(kernels/attention_trees.py). A token attends to all positions up to its own, or with a sliding window of W to
the last W of them. Keys and values of the new tokens are in the pages already. kernels/attention_scoring.py
has the formula of the weights.

Memory without a token of the sequence (the end of the last page, pages of unused page table entries) must
never reach a result. Masking the scores is not enough, since 0 * NaN is NaN.

Dimension letters: T tokens; N items; P pages in the longest page table; S tokens per page; H query heads;
K key-value heads; G = H / K; D width of a key; V width of a value, in most models equal to D.
"""

from __future__ import annotations

from typing import Any

import torch

from kernels.attention_batch import AttentionBatch
from kernels.attention_reference import paged_attention_reference
from kernels.attention_scoring import Scoring
from kernels.checks import FLOAT_DTYPES, check_pages, check_tensor
from kernels.cpu import paged_attention as cpu
from kernels.packed_pages import LeadingValues, PackedKeys, PackedValues, Pages

# The head widths that the CUDA kernels support; other widths, and slopes, run in torch.
CUDA_WIDTHS = (64, 80, 96, 128, 256)
# The supported pairs of different widths of keys and values: DeepSeek's latent attention in its plain form.
CUDA_WIDTH_PAIRS = ((192, 128),)
# The widest values that are in their keys, and the most elements of a key after its value.
CUDA_LATENT_WIDTHS = (512, 64)


def paged_attention(  # noqa: PLR0913 - keyword-only options of one formula
    query: torch.Tensor,
    k_pages: Pages,
    v_pages: Pages | LeadingValues,
    batch: AttentionBatch,
    *,
    scale: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    batch_invariant: bool = False,
) -> torch.Tensor:
    """The attention of every item over its own sequence.

    Args:
        query: [T, H, D]; float32, bfloat16 or float16; heads contiguous.
        k_pages: [pages, S, K, D] contiguous, of the dtype of query; or packed, which takes it.
        v_pages: [pages, S, K, V], packed if the keys are; their dtype. Or a part of the keys.
        batch: Rows and pages of the items.
        scale: Multiplies the scores.
        sliding_window: The number of positions that a token attends to, its own included; None: all.
        softcap: Bounds the absolute value of the scaled scores: softcap * tanh(score / softcap).
        sinks: [H] float32, for each head a logit that is a term of the softmax and has no value.
        alibi_slopes: [H] float32; slope * (key position - own position) is added to the scaled scores. Not
            together with softcap, and not in the CUDA kernels: on a GPU it runs in torch.
        batch_invariant: On a GPU, the bits of a row must depend on its sequence only, and those of a tree on
            the tree.

    Returns:
        A new contiguous tensor [T, H, V] with the dtype of query.

    Raises:
        ValueError, TypeError: An argument is invalid; the message names it.
    """
    scoring = Scoring(scale, sliding_window, softcap, sinks, alibi_slopes)
    _check(query, k_pages, v_pages, batch, scoring)
    if isinstance(k_pages, PackedKeys) and isinstance(v_pages, PackedValues | LeadingValues):
        allocate = torch.zeros if 0 in batch.context_lens_host else torch.empty  # rows of padding stay zero
        out = allocate((*query.shape[:2], v_pages.shape[3]), dtype=query.dtype)  # [T, H, V]
        cpu.attend(out, query, k_pages, v_pages, batch, scoring)
        return out
    assert isinstance(k_pages, torch.Tensor)
    assert isinstance(v_pages, torch.Tensor | LeadingValues)
    if query.is_cuda and alibi_slopes is None and _has_cuda_kernel(k_pages, v_pages):
        from kernels.cuda import paged_attention as cuda

        return cuda.paged_attention(query, k_pages, v_pages, batch, scoring, batch_invariant=batch_invariant)
    if isinstance(v_pages, LeadingValues):
        v_pages = k_pages[..., : v_pages.shape[3]]
    return paged_attention_reference(query, k_pages, v_pages, batch, scoring)


def paged_attention_without_first(
    query: torch.Tensor, k_pages: Pages, v_pages: Pages | LeadingValues, batch: AttentionBatch, **options: Any
) -> torch.Tensor:
    """As `paged_attention` of one token of each item, which attends to all positions up to its own but 0."""
    attended = [
        paged_attention(
            query[item : item + 1],
            k_pages,
            v_pages,
            AttentionBatch(
                page_tables=batch.page_tables[item : item + 1],
                query_starts=batch.query_starts[:2],
                context_lens=batch.context_lens[item : item + 1],
                query_lens=batch.query_lens[item : item + 1],
                context_lens_host=[context],
            ),
            **(options | {"sliding_window": context - 1}),
        )
        for item, context in enumerate(batch.context_lens_host)
    ]
    return torch.cat(attended)


def _check(
    query: torch.Tensor,
    k_pages: Pages,
    v_pages: Pages | LeadingValues,
    batch: AttentionBatch,
    scoring: Scoring,
) -> None:
    """Check the arguments of `paged_attention`."""
    check_tensor("query", query, (sum(batch.query_lens), None, None), FLOAT_DTYPES)
    heads, width = query.shape[1:]
    if len(v_pages.shape) != 4:
        raise ValueError(f"v_pages: shape must be [any, any, any, any], got {list(v_pages.shape)}")
    check_pages(k_pages, v_pages, None, width, "query", query, value_width=v_pages.shape[3])
    page_size, kv_heads = k_pages.shape[1:3]
    if heads % kv_heads:
        raise ValueError(f"query: {heads} heads are not a multiple of the {kv_heads} heads of k_pages")
    longest, capacity = max(batch.context_lens_host, default=0), batch.page_tables.shape[1] * page_size
    if longest > capacity:
        raise ValueError(f"page_tables: must hold {longest} positions, got {capacity}")
    scoring.check(heads, query.device)


def _has_cuda_kernel(k_pages: torch.Tensor, v_pages: torch.Tensor | LeadingValues) -> bool:
    (kv_heads, width), value_width = k_pages.shape[2:], v_pages.shape[3]
    if isinstance(v_pages, LeadingValues):
        latent, rest = CUDA_LATENT_WIDTHS
        return kv_heads == 1 and value_width <= latent and 0 < width - value_width <= rest
    if width == value_width:
        return width in CUDA_WIDTHS
    return (width, value_width) in CUDA_WIDTH_PAIRS
