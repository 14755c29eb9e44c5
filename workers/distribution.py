"""The distribution from which a token is drawn, and rejection sampling of drafts (speculative decoding).

`sampling` draws without computing the whole distribution. Here it is computed, on the host and for single
rows: for log-probabilities of drawn tokens, and for lossless speculative decoding.

A draft x, drawn from q, is kept with probability min(1, p(x) / q(x)). Otherwise the token is drawn from the
residual max(0, p - q), normalised. So the token is distributed as p for any q (Leviathan et al., "Fast
inference from transformers via speculative decoding", and Chen et al., "Accelerating large language model
decoding with speculative sampling", both 2023). If several drafts were drawn independently from q, each is
tried against the residual that the one before leaves (Miao et al., "SpecInfer: accelerating large language
model serving with tree-based speculative inference and verification", 2024). All draws are pure functions of
(seed, position). They use other random streams than plain draws, which may have made the drafts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from workers.counter_rng import gumbel, mix_key, uniform
from workers.logit_settings import HistoryCounter, Ids, Masks
from workers.operations import OutputSpec, Sampling
from workers.sampling import Draft, Reals, Row, SamplingRow, adjusted, best_k

# They separate the streams from those of plain draws: any numbers but 0.
_KEEP_STREAM = 0xD1B54A32D192ED03
_RESIDUAL_STREAM = 0x8CB92BA72F3D8DD7


@dataclass(frozen=True, slots=True)
class Distribution:
    """The tokens that can be drawn, and their probabilities.

    Attributes:
        ids: [n], ascending.
        probabilities: [n] float64, above 0, whose sum is 1.
    """

    ids: Ids
    probabilities: Reals

    def of(self, token_id: int) -> float:
        """The probability of one token."""
        at = int(np.searchsorted(self.ids, token_id))
        return float(self.probabilities[at]) if at < len(self.ids) and self.ids[at] == token_id else 0.0

    def residual(self, draft: Draft) -> Distribution | None:
        """The normalised max(0, p - q), where q is the draft's distribution. None: p and q are the same."""
        more = self.probabilities - draft.of(self.ids)
        left = np.flatnonzero(more > 0)
        return Distribution(self.ids[left], more[left] / more[left].sum()) if len(left) else None


def distribution(logits: Row, row: SamplingRow, masks: Masks, counter: HistoryCounter) -> Distribution:
    """The distribution from which the token of a row is drawn.

    Args:
        logits: [V] float32, accepted by `choose_tokens` with this row. Not modified.
        row: How it is chosen; without a temperature the most likely token has probability 1.
        masks, counter: For this vocabulary; may be shared by rows of one step.
    """
    spec = row.spec or Sampling()
    values = adjusted(logits, row, masks, counter)
    if spec.temperature <= 0:
        return Distribution(np.array([values.argmax()]), np.ones(1))
    ids = np.flatnonzero(values > -np.inf)
    if 0 < spec.top_k < len(values):
        ids = np.sort(best_k(values, spec.top_k))
    weights = np.exp((values[ids].astype(np.float64) - float(values.max())) / spec.temperature)
    kept = weights > 0
    if spec.top_p < 1.0:
        kept &= _smallest_set(weights, spec.top_p)
    if spec.min_p > 0.0:
        kept &= weights >= spec.min_p
    return Distribution(ids[kept], weights[kept] / weights[kept].sum())


def _smallest_set(weights: Reals, top_p: float) -> NDArray[np.bool_]:
    """[n] which tokens are in the top_p set: the most likely ones, the lower id first, that reach top_p."""
    order = np.argsort(-weights, kind="stable")
    before = np.cumsum(weights[order]) - weights[order]
    kept = np.zeros(len(weights), dtype=np.bool_)
    kept[order[before < top_p * weights.sum()]] = True
    kept[order[0]] = True
    return kept


def choose_with_draft(target: Distribution, draft: Draft, seed: int, position: int) -> int:
    """Keep one of the draft's tokens, or draw another one: in all a draw from `target`.

    Args:
        target: The model's distribution.
        draft: Independently drawn tokens and their distribution, where their probabilities are above 0.
        seed: Of the random stream.
        position: The position of the token.
    """
    proposed = draft.of(np.asarray(draft.token_ids))
    numbers = np.arange(len(proposed), dtype=np.int64)
    keep = uniform(mix_key(seed ^ _KEEP_STREAM, position), numbers)
    for token, limit in zip(draft.token_ids, keep * proposed, strict=True):
        if limit < target.of(token):
            return token
        residual = target.residual(draft)
        if residual is None:
            # Both distributions are equal up to rounding, so any likely token will do.
            return int(target.ids[target.probabilities.argmax()])
        target = residual
    noise = gumbel(mix_key(seed ^ _RESIDUAL_STREAM, position), target.ids)
    return int(target.ids[(np.log(target.probabilities) + noise).argmax()])


def apply_drafts(logits: Tensor, chosen: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    """The tokens of a step: `chosen`, but for rows with drafts the result of `choose_with_draft`.

    Args:
        logits: [R, V], any floating dtype and device. Not modified.
        chosen: [R] int64. Not modified.
        rows: R of them.

    Returns:
        [R] int64 on the device of `chosen`.
    """
    drafted = {index: row.draft for index, row in enumerate(rows) if row.draft is not None}
    if not drafted:
        return chosen
    chosen = chosen.clone()
    masks, counter = Masks(logits.shape[1]), HistoryCounter(logits.shape[1])
    for index, draft in drafted.items():
        row = rows[index]
        target = distribution(logits[index].float().cpu().numpy(), row, masks, counter)
        seed = 0 if row.spec is None else row.spec.seed
        chosen[index] = choose_with_draft(target, draft, seed, row.position)
    return chosen


def sampled_logprobs(
    logits: Tensor, chosen: Sequence[int], rows: Sequence[SamplingRow], specs: Sequence[OutputSpec]
) -> dict[int, float]:
    """By row, if requested: the log-probability of the chosen token in the distribution it was drawn from.

    -infinity for a token that rounding has moved just outside of top_k, top_p or min_p. Arguments as for
    `apply_drafts`.
    """
    wanted = [index for index, spec in enumerate(specs) if spec.sampled_logprob]
    if not wanted:
        return {}
    masks, counter = Masks(logits.shape[1]), HistoryCounter(logits.shape[1])
    found = {}
    for index in wanted:
        drawn_from = distribution(logits[index].float().cpu().numpy(), rows[index], masks, counter)
        probability = drawn_from.of(chosen[index])
        found[index] = math.log(probability) if probability > 0 else -math.inf
    return found
