"""The distribution that a token is drawn from, and drawing against another model's draft of it.

`sampling` draws without ever writing the distribution down. Here it is written down, on the host and for
single rows: for callers who want to know how likely their token was, and for speculative decoding that loses
nothing.

A draft x, drawn from q, is kept with probability min(1, p(x) / q(x)); else the token is drawn from what p has
more than q, max(0, p - q). So it is distributed as p, whatever q is (Leviathan et al., "Fast inference from
transformers via speculative decoding", and Chen et al., "Accelerating large language model decoding with
speculative sampling", both 2023). Where several were drawn from q, each on its own, the next one is a draft
of that rest (Miao et al., "SpecInfer: accelerating large language model serving with tree-based speculative
inference and verification", 2024). All draws are pure functions of (seed, position), and of other streams
than plain draws, which a draft may have been made with.
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

# Streams of their own: any numbers but 0.
_KEEP_STREAM = 0xD1B54A32D192ED03
_RESIDUAL_STREAM = 0x8CB92BA72F3D8DD7


@dataclass(frozen=True, slots=True)
class Distribution:
    """Which tokens can be drawn, and how likely each is.

    Attributes:
        ids: [n], ascending.
        probabilities: [n] float64, above 0, together 1.
    """

    ids: Ids
    probabilities: Reals

    def of(self, token_id: int) -> float:
        """The probability of one token."""
        at = int(np.searchsorted(self.ids, token_id))
        return float(self.probabilities[at]) if at < len(self.ids) and self.ids[at] == token_id else 0.0

    def beyond(self, draft: Draft) -> Distribution | None:
        """What is more likely here than in what a draft was drawn from; None: nothing, but for rounding."""
        more = self.probabilities - draft.of(self.ids)
        left = np.flatnonzero(more > 0)
        return Distribution(self.ids[left], more[left] / more[left].sum()) if len(left) else None


def distribution(logits: Row, row: SamplingRow, masks: Masks, counter: HistoryCounter) -> Distribution:
    """What the token of a row is drawn from.

    Args:
        logits: [V] float32, accepted by `choose_tokens` with this row. Not modified.
        row: How it is chosen; without a temperature the most likely token has all of it.
        masks, counter: Of the vocabulary; may be shared by rows of one step.
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
    """[n] the most likely tokens, the lower id first among equals, until together they reach top_p."""
    order = np.argsort(-weights, kind="stable")
    before = np.cumsum(weights[order]) - weights[order]
    kept = np.zeros(len(weights), dtype=np.bool_)
    kept[order[before < top_p * weights.sum()]] = True
    kept[order[0]] = True
    return kept


def choose_with_draft(target: Distribution, draft: Draft, seed: int, position: int) -> int:
    """One of the draft's tokens, or another in their place: a draw from `target`.

    Args:
        target: What the model says.
        draft: Tokens and what they were drawn from, each on its own; their probabilities there are above 0.
        seed: Of the stream.
        position: Where the token would stand.
    """
    proposed = draft.of(np.asarray(draft.token_ids))
    numbers = np.arange(len(proposed), dtype=np.int64)
    keep = uniform(mix_key(seed ^ _KEEP_STREAM, position), numbers)
    for token, limit in zip(draft.token_ids, keep * proposed, strict=True):
        if limit < target.of(token):
            return token
        left = target.beyond(draft)
        if left is None:
            # They are the same but for rounding, which has to end somewhere.
            return int(target.ids[target.probabilities.argmax()])
        target = left
    noise = gumbel(mix_key(seed ^ _RESIDUAL_STREAM, position), target.ids)
    return int(target.ids[(np.log(target.probabilities) + noise).argmax()])


def with_drafts(logits: Tensor, chosen: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    """The tokens of a step: where a draft stands it is kept or replaced, elsewhere it is what was chosen.

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
    """By row, for those that ask for it: the log-probability of what was chosen, among what could be drawn.

    A token that rounding has put just outside of a cut is -infinity there. Arguments as for `with_drafts`.
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
