"""Which experts tokens go to, and which pairs of a token and an expert each expert has. One launch for each.

`route_kernel` chooses the experts of a token, with the formulas of `kernels.experts.route`. Of equal scores
the expert with the lower number is chosen; NaN counts as the highest score.

`group_kernel` sorts pairs by expert, and keeps their order within an expert. Each program counts the pairs of
each expert, all and those before its own, and so knows where its own belong. So there is neither an atomic
addition nor a second launch. The host reads nothing back.

Launches begin early (`kernels.cuda.dependent_launch`).

Dimension letters: T tokens; E experts; k experts of a token, K the power of two not below it; P pairs, T * k;
B pairs whose places are found at once; C pairs that are counted at once.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl

from kernels.cuda.dependent_launch import wait
from kernels.cuda.variant import Variant
from kernels.routing_rule import RoutingRule

# The score of NaN when experts are chosen. Excluded groups have the negative of it.
HIGHEST = tl.constexpr(3.0e38)
# B and C.
BLOCK = 64
CHUNK = 1024
# Programs that are worth having: each reads all pairs.
MOST_PROGRAMS = 128


@triton.jit
def scores_at(scores, expert, chosen, choice, TOP_K: tl.constexpr):
    """The scores of the chosen experts: [E], [E], [K], [K] -> [K]; zeros beyond TOP_K."""
    found = tl.zeros_like(chosen).to(tl.float32)
    for place in tl.static_range(TOP_K):
        one = tl.sum(tl.where(choice == place, chosen, 0), 0)
        found = tl.where(choice == place, tl.sum(tl.where(expert == one, scores, 0.0), 0), found)
    return found


@triton.jit
def among_best_groups(chosen_by, expert, inside, RULE: tl.constexpr, EXPERTS: tl.constexpr):
    """Whether experts [E] are in one of the best groups of a token. Of equal groups the first is better."""
    groups: tl.constexpr = RULE.groups
    best_groups: tl.constexpr = RULE.best_groups
    size: tl.constexpr = EXPERTS // groups
    padded: tl.constexpr = triton.next_power_of_2(groups)
    group = tl.arange(0, padded)
    worth = tl.full([padded], float("-inf"), tl.float32)
    for number in tl.static_range(groups):
        own = tl.where(inside & (expert // size == number), chosen_by, float("-inf"))
        best = tl.max(own, 0)
        if RULE.sigmoid:  # the sum of the two best
            place = tl.argmax(own, 0)
            best += tl.max(tl.where(expert == place, float("-inf"), own), 0)
        worth = tl.where(group == number, best, worth)
    allowed = expert < 0
    for _ in tl.static_range(best_groups):
        best_group = tl.argmax(worth, 0)
        allowed = allowed | (expert // size == best_group)
        worth = tl.where(group == best_group, float("-inf"), worth)
    return allowed


@triton.jit
def route_kernel(
    expert_ids,  # [T, k] contiguous, written
    expert_weights,  # [T, k] contiguous, written
    logits,  # [T, E]
    given,  # [T, k] contiguous, or None
    correction,  # [E] float32, or None
    logits_stride,
    RULE: tl.constexpr,  # a RoutingRule
    NORMALIZE: tl.constexpr,
    TOP_K: tl.constexpr,  # k
    EXPERTS: tl.constexpr,  # E
    E: tl.constexpr,  # the powers of two not below EXPERTS and TOP_K
    K: tl.constexpr,
    EARLY: tl.constexpr,
):
    """One token."""
    wait(EARLY)
    token = tl.program_id(0).to(tl.int64)
    expert, choice = tl.arange(0, E), tl.arange(0, K)
    inside = expert < EXPERTS
    row = tl.load(logits + token * logits_stride + expert, mask=inside, other=float("-inf")).to(tl.float32)
    if RULE.sigmoid:
        scores = 1.0 / (1.0 + tl.exp(-row))  # [E]
    else:
        scores = tl.exp(row - tl.max(row, 0))  # [E]
        scores = scores / tl.sum(scores, 0)
    left = scores
    if correction is not None:
        left += tl.load(correction + expert, mask=inside, other=0.0)
    left = tl.where(left >= -HIGHEST, left, HIGHEST)
    if RULE.groups > 1:
        left = tl.where(among_best_groups(left, expert, inside, RULE, EXPERTS), left, -HIGHEST)
    left = tl.where(inside, left, float("-inf"))
    chosen = tl.zeros([K], tl.int32)
    for place in tl.static_range(TOP_K):
        best = tl.min(tl.where(left == tl.max(left, 0), expert, E), 0)
        chosen = tl.where(choice == place, best, chosen)
        left = tl.where(expert == best, float("-inf"), left)
    if given is not None:
        told = tl.load(given + token * TOP_K + choice, mask=choice < TOP_K, other=0).to(tl.int32)
        is_told = tl.sum(tl.where(choice == 0, told, 0), 0) >= 0
        chosen = tl.where(is_told, told, chosen)
    weights = scores_at(scores, expert, chosen, choice, TOP_K)
    if NORMALIZE:
        total = tl.sum(weights, 0) + RULE.eps
        weights = weights / total
        if given is not None:
            # The scores of experts that the router would never choose may all be rounded to 0.
            alone = scores_at(row, expert, chosen, choice, TOP_K)
            highest = tl.max(tl.where(choice < TOP_K, alone, float("-inf")), 0)
            alone = tl.where(choice < TOP_K, tl.exp(alone - highest), 0.0)
            weights = tl.where(total > 0, weights, alone / tl.sum(alone, 0))
    to = token * TOP_K + choice
    tl.store(expert_ids + to, chosen.to(tl.int64), mask=choice < TOP_K)
    tl.store(
        expert_weights + to, (weights * RULE.scale).to(expert_weights.dtype.element_ty), mask=choice < TOP_K
    )


@triton.jit(do_not_specialize=["num_pairs", "pairs_a_program"])
def group_kernel(
    pairs,  # [P], written: pair numbers, sorted by expert; only as many as have an expert
    starts,  # [E + 1], written: where those of each expert begin
    expert_ids,  # [P]
    num_pairs,  # P
    pairs_a_program,  # a multiple of B
    EXPERTS: tl.constexpr,
    E: tl.constexpr,  # the power of two not below EXPERTS
    B: tl.constexpr,
    C: tl.constexpr,
    EARLY: tl.constexpr,
):
    """The places of the pairs of one program. The first one also writes where each expert's begin."""
    wait(EARLY)
    expert = tl.arange(0, E)
    begin = tl.program_id(0) * pairs_a_program
    total = tl.zeros([E], tl.int32)
    base = tl.zeros([E], tl.int32)  # pairs before this program's
    for first in range(0, num_pairs, C):
        pair = first + tl.arange(0, C)
        ids = tl.load(expert_ids + pair, mask=pair < num_pairs, other=-1)
        # An id that is none has no place.
        is_pair = (ids >= 0) & (ids < EXPERTS)
        bins = tl.where(is_pair, ids, 0).to(tl.int32)
        total += tl.histogram(bins, E, mask=is_pair)
        base += tl.histogram(bins, E, mask=is_pair & (pair < begin))
    ends = tl.cumsum(total, 0)
    if tl.program_id(0) == 0:
        tl.store(starts, 0)
        tl.store(starts + 1 + expert, ends, mask=expert < EXPERTS)
    base += ends - total
    lane = tl.arange(0, B)
    for first in range(begin, tl.minimum(begin + pairs_a_program, num_pairs), B):
        pair = first + lane
        ids = tl.load(expert_ids + pair, mask=pair < num_pairs, other=-1)  # [B]
        is_pair = (ids >= 0) & (ids < EXPERTS)
        bins = tl.where(is_pair, ids, 0).to(tl.int32)
        equal = (bins[:, None] == bins[None, :]) & is_pair[None, :]  # [B, B]
        before = tl.sum((equal & (lane[None, :] < lane[:, None])).to(tl.int32), 1)
        place = before + tl.sum(tl.where(bins[:, None] == expert[None, :], base[None, :], 0), 1)
        tl.store(pairs + place, pair, mask=is_pair)
        base += tl.histogram(bins, E, mask=is_pair)


@cache
def _route(experts: int, top_k: int, rule: RoutingRule, *, normalize: bool) -> Variant:
    constexprs = {
        "RULE": rule,
        "NORMALIZE": normalize,
        "TOP_K": top_k,
        "EXPERTS": experts,
        "E": triton.next_power_of_2(experts),
        "K": triton.next_power_of_2(top_k),
    }
    return Variant(route_kernel, constexprs, num_warps=1, num_stages=1, early=True)


@cache
def _group(experts: int) -> Variant:
    padded = triton.next_power_of_2(experts)
    constexprs = {"EXPERTS": experts, "E": padded, "B": BLOCK, "C": CHUNK}
    return Variant(group_kernel, constexprs, num_warps=8, num_stages=1, early=True)


def route(
    logits: torch.Tensor,
    k: int,
    normalize: bool,
    dtype: torch.dtype,
    given: torch.Tensor | None,
    rule: RoutingRule,
    correction: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Launch `route_kernel`; see `kernels.experts.route`. Arguments are checked.

    The bits of a row do not depend on the others.
    """
    tokens, experts = logits.shape
    ids = torch.empty(tokens, k, dtype=torch.int64, device=logits.device)
    weights = torch.empty(tokens, k, dtype=dtype, device=logits.device)
    if tokens:
        logits = logits if logits.stride(1) == 1 else logits.contiguous()
        given = None if given is None else given.contiguous()
        _route(experts, k, rule, normalize=normalize).launch(
            (tokens,), ids, weights, logits, given, correction, logits.stride(0)
        )
    return ids, weights


def group(expert_ids: torch.Tensor, experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Sort pairs by expert. What is launched follows from the shape alone.

    Args:
        expert_ids: [T, k] contiguous int64, at least one. A pair whose id is none is left out.
        experts: E.

    Returns:
        The numbers of the pairs [P] int32, token * k + choice, sorted by expert and then by number, and where
        those of each expert begin, [E + 1] int32. Behind the last expert's, `pairs` is not written.
    """
    count = expert_ids.numel()
    pairs = torch.empty(count, dtype=torch.int32, device=expert_ids.device)
    starts = torch.empty(experts + 1, dtype=torch.int32, device=expert_ids.device)
    size = BLOCK * triton.cdiv(triton.cdiv(count, BLOCK), MOST_PROGRAMS)
    _group(experts).launch((triton.cdiv(count, size),), pairs, starts, expert_ids, count, size)
    return pairs, starts
