"""Keeps a draft or draws another token, for rows of logits: rejection sampling of drafts.

`workers/numpy_choice.py` has the method and its sources. A row has many programs, each with a span of its
tokens:

1. The largest logit of each span.
2. The sum of the weights of each span.
3. For each draft a launch. All programs of a row decide alike whether it is kept. If not, each sums what is
   left of its span.
4. The best draw of each span from what is left after all drafts; and in a last launch that of each row.

Each launch begins with what the one before it has found in all spans. Weights are
exp((logit - best) / temperature) in float64, as on the CPU, and added in another order: so tokens are the
same unless a draft is kept or not, or two scores differ, by about 1e-13.

What is left of the distribution p after drafts that were not kept, all drawn from q, is
max(0, p_factor * p - q_factor * q): otherwise the residual of a residual would need a table of its own.

Dimension letters: R rows; V vocabulary; D drafts of all rows together; P spans of a row.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl

from kernels.cuda.sampling import filtered, gumbel
from kernels.cuda.variant import Variant

BLOCK = 1024
# The tokens of a span: a multiple of BLOCK.
SPAN = 8 * BLOCK


@triton.jit
def best_of(maxima, maxima_ids, row, spans, PADDED: tl.constexpr):
    """The largest logit of a row in float64, and the lowest id of it."""
    span = tl.arange(0, PADDED)
    values = tl.load(maxima + row * spans + span, mask=span < spans, other=float("-inf"))
    best = tl.max(values, 0)
    # Spans are in the order of ids.
    first = tl.min(tl.where(values == best, span, spans - 1), 0)
    return best.to(tl.float64), tl.load(maxima_ids + row * spans + first)


@triton.jit
def weights_of(logits, ids, within, row, threshold_values, threshold_ids, best, best_id, temperature):
    """The weights of some tokens in float64: relative to the best's, 0 for those that are filtered out."""
    values = tl.load(logits + ids, mask=within, other=float("-inf"))
    values = filtered(values, ids, row, threshold_values, threshold_ids)
    drawn = tl.exp((values.to(tl.float64) - best) / tl.where(temperature > 0, temperature, 1.0))
    return tl.where(temperature > 0, drawn, (ids == best_id).to(tl.float64))


@triton.jit(do_not_specialize=["spans"])
def best_kernel(
    maxima,  # [R, P] float32, written: the largest logit of each span
    maxima_ids,  # [R, P] int32, written: the lowest id of it
    logits,  # [R, V]
    logits_stride,
    vocab,
    spans,
    BLOCK: tl.constexpr,
    SPAN: tl.constexpr,
):
    """One span."""
    row, span = tl.program_id(0).to(tl.int64), tl.program_id(1)
    logits += row * logits_stride
    lane_best = tl.full([BLOCK], float("-inf"), tl.float32)
    lane_ids = span * SPAN + tl.arange(0, BLOCK)
    for first in range(span * SPAN, span * SPAN + SPAN, BLOCK):
        ids = first + tl.arange(0, BLOCK)  # [BLOCK]
        values = tl.load(logits + ids, mask=ids < vocab, other=float("-inf"))
        lane_ids = tl.where(values > lane_best, ids, lane_ids)
        lane_best = tl.maximum(lane_best, values)
    best = tl.max(lane_best, 0)
    tl.store(maxima + row * spans + span, best)
    tl.store(maxima_ids + row * spans + span, tl.min(tl.where(lane_best == best, lane_ids, vocab), 0))


@triton.jit(do_not_specialize=["spans"])
def total_kernel(
    totals,  # [R, P] float64, written: the sum of the weights of each span
    maxima,
    maxima_ids,
    logits,
    logits_stride,
    vocab,
    spans,
    temperatures,  # [R]
    threshold_values,  # [R], or None
    threshold_ids,  # [R], or None
    BLOCK: tl.constexpr,
    SPAN: tl.constexpr,
    PADDED: tl.constexpr,
):
    """One span."""
    row, span = tl.program_id(0).to(tl.int64), tl.program_id(1)
    logits += row * logits_stride
    temperature = tl.load(temperatures + row).to(tl.float64)
    best, best_id = best_of(maxima, maxima_ids, row, spans, PADDED)
    total = tl.zeros([BLOCK], tl.float64)
    for first in range(span * SPAN, span * SPAN + SPAN, BLOCK):
        ids = first + tl.arange(0, BLOCK)  # [BLOCK]
        total += weights_of(
            logits, ids, ids < vocab, row, threshold_values, threshold_ids, best, best_id, temperature
        )
    tl.store(totals + row * spans + span, tl.sum(total, 0))


@triton.jit
def state_before(
    turn, factors, tokens, totals, lefts, likely, likely_ids, row, rows, spans, PADDED: tl.constexpr
):
    """The p_factor and q_factor of a row before its draft number `turn`, and its token; -1: none is kept yet.

    The launch before has left what it found where those of its turn are: see `draft_kernel`.
    """
    span = tl.arange(0, PADDED)
    within = span < spans
    p_factor = tl.full([], 0.0, tl.float64)
    q_factor = tl.full([], 0.0, tl.float64)
    chosen = tl.full([], -1, tl.int64)
    if turn == 0:
        p_factor = 1.0 / tl.sum(tl.load(totals + row * spans + span, mask=within, other=0.0), 0)
    else:
        last = ((turn - 1) % 2) * rows + row
        p_factor = tl.load(factors + 2 * last)
        q_factor = tl.load(factors + 2 * last + 1)
        chosen = tl.load(tokens + last)
        # -2: it was not kept.
        if chosen == -2:
            chosen = tl.full([], -1, tl.int64)
            residual = tl.sum(tl.load(lefts + last * spans + span, mask=within, other=0.0), 0)
            if residual > 0:
                p_factor = p_factor / residual
                q_factor = (q_factor + 1.0) / residual
            else:
                # Both distributions are equal up to rounding, so any likely token will do.
                most = tl.load(likely + last * spans + span, mask=within, other=float("-inf"))
                first = tl.min(tl.where(most == tl.max(most, 0), span, spans - 1), 0)
                chosen = tl.load(likely_ids + last * spans + first).to(tl.int64)
    return p_factor, q_factor, chosen


@triton.jit(do_not_specialize=["turn", "rows", "spans"])
def draft_kernel(
    factors,  # [2, R, 2] float64: p_factor and q_factor, at turn % 2; written
    tokens,  # [2, R] int64, likewise: the token; -1 none yet; -2 none, and the draft of this turn is not kept
    lefts,  # [2, R, P] float64, likewise: what is left of each span after this draft
    likely,  # [2, R, P] float64, likewise: the most that is left of a token before it
    likely_ids,  # [2, R, P] int32, likewise: the lowest id of these
    totals,
    maxima,
    maxima_ids,
    turn,
    logits,
    logits_stride,
    vocab,
    rows,
    spans,
    temperatures,
    threshold_values,
    threshold_ids,
    drawn_from,  # [R, V]
    drafts,  # [D]
    begins,  # [R + 1]
    keep_keys,  # [R]
    BLOCK: tl.constexpr,
    SPAN: tl.constexpr,
    PADDED: tl.constexpr,
):
    """A draft of each row: the one with this number, if there is one, and none before it was kept."""
    row, span = tl.program_id(0).to(tl.int64), tl.program_id(1)
    p_factor, q_factor, chosen = state_before(
        turn, factors, tokens, totals, lefts, likely, likely_ids, row, rows, spans, PADDED
    )
    now = (turn % 2) * rows + row
    at = tl.load(begins + row) + turn
    if (chosen < 0) & (at < tl.load(begins + row + 1)):
        logits += row * logits_stride
        drawn_from += row * vocab
        temperature = tl.load(temperatures + row).to(tl.float64)
        best, best_id = best_of(maxima, maxima_ids, row, spans, PADDED)
        draft = tl.load(drafts + at)
        weight = weights_of(
            logits, draft, draft < vocab, row, threshold_values, threshold_ids, best, best_id, temperature
        )
        q_draft = tl.load(drawn_from + draft)
        uniform = tl.rand(tl.load(keep_keys + row), turn).to(tl.float64)
        if uniform * q_draft < p_factor * weight - q_factor * q_draft:
            chosen = draft
        else:
            chosen = tl.full([], -2, tl.int64)
            left = tl.zeros([BLOCK], tl.float64)
            most = tl.full([BLOCK], float("-inf"), tl.float64)
            most_ids = span * SPAN + tl.arange(0, BLOCK)
            for first in range(span * SPAN, span * SPAN + SPAN, BLOCK):
                ids = first + tl.arange(0, BLOCK)  # [BLOCK]
                within = ids < vocab
                weights = weights_of(
                    logits, ids, within, row, threshold_values, threshold_ids, best, best_id, temperature
                )
                q = tl.load(drawn_from + ids, mask=within, other=0.0)
                left += tl.maximum(p_factor * weights - (q_factor + 1.0) * q, 0.0)
                before = tl.where(within, p_factor * weights - q_factor * q, float("-inf"))
                most_ids = tl.where(before > most, ids, most_ids)
                most = tl.maximum(most, before)
            best_left = tl.max(most, 0)
            tl.store(lefts + now * spans + span, tl.sum(left, 0))
            tl.store(likely + now * spans + span, best_left)
            tl.store(
                likely_ids + now * spans + span, tl.min(tl.where(most == best_left, most_ids, vocab - 1), 0)
            )
    if span == 0:
        tl.store(factors + 2 * now, p_factor)
        tl.store(factors + 2 * now + 1, q_factor)
        tl.store(tokens + now, chosen)


@triton.jit(do_not_specialize=["turn", "rows", "spans"])
def draw_kernel(
    out,  # [R] written: the token of rows that have kept one, else -1
    scores,  # [R, P] float64, written for the others: the best score of each span
    score_ids,  # [R, P] int32, likewise: the lowest id of it
    factors,
    tokens,
    lefts,
    likely,
    likely_ids,
    totals,
    maxima,
    maxima_ids,
    turn,  # after all drafts
    logits,
    logits_stride,
    vocab,
    rows,
    spans,
    temperatures,
    threshold_values,
    threshold_ids,
    drawn_from,
    draw_keys,  # [R]
    BLOCK: tl.constexpr,
    SPAN: tl.constexpr,
    PADDED: tl.constexpr,
):
    """A draw from what is left in one span."""
    row, span = tl.program_id(0).to(tl.int64), tl.program_id(1)
    p_factor, q_factor, chosen = state_before(
        turn, factors, tokens, totals, lefts, likely, likely_ids, row, rows, spans, PADDED
    )
    if chosen < 0:
        logits += row * logits_stride
        drawn_from += row * vocab
        key = tl.load(draw_keys + row)
        temperature = tl.load(temperatures + row).to(tl.float64)
        best, best_id = best_of(maxima, maxima_ids, row, spans, PADDED)
        lane_scores = tl.full([BLOCK], float("-inf"), tl.float64)
        lane_ids = span * SPAN + tl.arange(0, BLOCK)
        for first in range(span * SPAN, span * SPAN + SPAN, BLOCK):
            ids = first + tl.arange(0, BLOCK)  # [BLOCK]
            within = ids < vocab
            weights = weights_of(
                logits, ids, within, row, threshold_values, threshold_ids, best, best_id, temperature
            )
            left = p_factor * weights - q_factor * tl.load(drawn_from + ids, mask=within, other=0.0)
            noisy = tl.log(tl.where(left > 0, left, 1.0)) + gumbel(key, ids)
            noisy = tl.where(left > 0, noisy, float("-inf"))
            lane_ids = tl.where(noisy > lane_scores, ids, lane_ids)
            lane_scores = tl.maximum(lane_scores, noisy)
        score = tl.max(lane_scores, 0)
        tl.store(scores + row * spans + span, score)
        tl.store(
            score_ids + row * spans + span, tl.min(tl.where(lane_scores == score, lane_ids, vocab - 1), 0)
        )
    if span == 0:
        tl.store(out + row, chosen)


@triton.jit(do_not_specialize=["spans"])
def pick_kernel(
    out,  # [R]; mutated
    scores,  # [R, P]
    score_ids,  # [R, P]
    spans,
    PADDED: tl.constexpr,
):
    """The token of one row, if it has none."""
    row = tl.program_id(0).to(tl.int64)
    if tl.load(out + row) < 0:
        span = tl.arange(0, PADDED)
        values = tl.load(scores + row * spans + span, mask=span < spans, other=float("-inf"))
        first = tl.min(tl.where(values == tl.max(values, 0), span, spans - 1), 0)
        tl.store(out + row, tl.load(score_ids + row * spans + first).to(tl.int64))


@cache
def _variants(spans: int, span: int) -> tuple[Variant, ...]:
    """The variants of the five launches, for rows of `spans` spans of `span` tokens each."""
    sizes = {"BLOCK": BLOCK, "SPAN": span}
    padded = {"PADDED": triton.next_power_of_2(spans)}
    return (
        Variant(best_kernel, sizes, num_warps=4, num_stages=1),
        *(
            Variant(kernel, sizes | padded, num_warps=4, num_stages=1)
            for kernel in (total_kernel, draft_kernel, draw_kernel)
        ),
        Variant(pick_kernel, padded, num_warps=1, num_stages=1),
    )


def keep_or_draw(
    logits: torch.Tensor,
    temperatures: torch.Tensor,
    threshold_values: torch.Tensor | None,
    threshold_ids: torch.Tensor | None,
    drawn_from: torch.Tensor,
    drafts: torch.Tensor,
    begins: torch.Tensor,
    most_drafts: int,
    keep_keys: torch.Tensor,
    draw_keys: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """Keep one of each row's drafts, or draw another token.

    Checks nothing, reads no device tensor, and launches what follows from the shapes and `most_drafts` alone.
    Mutates `out`.

    Args:
        logits: [R, V] float32, in each row one that is finite and kept, none +infinity or NaN; rows at any
            stride, tokens contiguous.
        temperatures: [R] float64. 0 or less: the most likely token, the lowest of equals, has probability 1.
        threshold_values, threshold_ids: As for `kernels.cuda.sampling.choose`.
        drawn_from: [R, V] float64 contiguous, the probabilities in the distribution of each row's drafts.
        drafts: [D] int64, below V.
        begins: [R + 1] int64, the first draft of each row, and D.
        most_drafts: The most that a row has.
        keep_keys, draw_keys: [R] int64, the bits of the uint64 from `workers.counter_rng.mix_key`.
        out: [R] int64.
    """
    rows, vocab = logits.shape
    if not rows:
        return
    spans = triton.cdiv(vocab, SPAN)

    def found(*shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=logits.device)

    maxima, maxima_ids = found(rows, spans, dtype=torch.float32), found(rows, spans, dtype=torch.int32)
    totals, scores = (found(rows, spans, dtype=torch.float64) for _ in range(2))
    score_ids, likely_ids = (found(*shape, dtype=torch.int32) for shape in ((rows, spans), (2, rows, spans)))
    factors, tokens = found(2, rows, 2, dtype=torch.float64), found(2, rows, dtype=torch.int64)
    lefts, likely = (found(2, rows, spans, dtype=torch.float64) for _ in range(2))
    find_best, find_totals, try_draft, draw, pick = _variants(spans, SPAN)
    grid = rows, spans
    row_of = logits, logits.stride(0), vocab
    find_best.launch(grid, maxima, maxima_ids, *row_of, spans)
    thresholds = temperatures, threshold_values, threshold_ids
    find_totals.launch(grid, totals, maxima, maxima_ids, *row_of, spans, *thresholds)
    known = factors, tokens, lefts, likely, likely_ids, totals, maxima, maxima_ids
    for turn in range(most_drafts):
        try_draft.launch(
            grid, *known, turn, *row_of, rows, spans, *thresholds, drawn_from, drafts, begins, keep_keys
        )
    after = *known, most_drafts, *row_of, rows, spans, *thresholds
    draw.launch(grid, out, scores, score_ids, *after, drawn_from, draw_keys)
    pick.launch((rows,), out, scores, score_ids, spans)
