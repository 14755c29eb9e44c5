"""Chooses tokens as `kernels.cpu.sampling` does, in numpy, row by row: where nothing is compiled.

What compiled code is tested against, and the definition of its results.

A draft x, drawn from q, is kept with probability min(1, p(x) / q(x)). Otherwise the token is drawn from the
residual max(0, p - q), normalised. So the token is distributed as p for any q (Leviathan et al., "Fast
inference from transformers via speculative decoding", and Chen et al., "Accelerating large language model
decoding with speculative sampling", both 2023). If several drafts were drawn independently from q, each is
tried against the residual that the one before leaves (Miao et al., "SpecInfer: accelerating large language
model serving with tree-based speculative inference and verification", 2024).

Numbers: logits are float32. Bias, repetition penalty and frequency/presence penalty are each computed in
float64 and rounded once to float32; finite values stay finite. All later steps use float64.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from kernels.cpu.sampling import Drafts, RowChoice
from workers.counter_rng import gumbel, uniform
from workers.logit_settings import Ids

_NEG_INF = float("-inf")
_FLOAT32_MAX = float(np.finfo(np.float32).max)

Row = NDArray[np.float32]  # [V] logits
Reals = NDArray[np.float64]


def choose(logits: Tensor, rows: Mapping[int, RowChoice]) -> None:
    """As `kernels.cpu.sampling.choose`. Mutates the results in `rows`."""
    for index, row in rows.items():
        if row.keys is not None:
            row.tokens = np.zeros(len(row.keys), dtype=np.int64)
        values = adjusted(logits[index].numpy(), row)
        row.candidates = 0
        if not math.isfinite(values.max()):
            continue
        left = candidates(values, row.temperature, row.filters)
        row.candidates = len(left.ids)
        if row.keys is not None:
            row.tokens = np.array([left.draw(key) for key in row.keys.tolist()], dtype=np.int64)
        if row.wants_logprobs:
            drawn_from = left.distribution()
            row.logprobs = np.array([drawn_from.log_of(token) for token in row.tokens.tolist()])
        if row.drafts is not None:
            row.tokens = np.array([choose_with_draft(left.distribution(), row.drafts)])


def adjusted(logits: Row, row: RowChoice) -> Row:
    """Logits after mask, bias and penalties: [V] float32. Returns `logits` itself if none is set."""
    values = logits
    if row.mask is not None:
        allowed = np.unpackbits(row.mask, count=len(logits), bitorder="little").view(np.bool_)
        values = np.where(allowed, logits, np.float32(_NEG_INF))
    has_penalty = (row.repetition_penalty, row.frequency_penalty, row.presence_penalty) != (1.0, 0.0, 0.0)
    if not len(row.biased) and not has_penalty:
        return values
    values = values.copy()
    _store(values, row.biased, values[row.biased] + row.bias)
    values[row.biased[row.bias == _NEG_INF]] = _NEG_INF
    if has_penalty:
        _penalise(values, row)
    return values


def _penalise(values: Row, row: RowChoice) -> None:
    """Applies the penalties to the tokens that occur before the row. Mutates `values`."""
    tokens = np.concatenate([row.history[: row.history_len], row.path])
    is_known = (tokens >= 0) & (tokens < len(values))
    ids = np.unique(tokens[is_known])
    logits = values[ids].astype(np.float64)
    penalty = row.repetition_penalty
    _store(values, ids, np.where(logits > 0, logits / penalty, logits * penalty))
    ids, counts = np.unique(tokens[row.prompt_len :][is_known[row.prompt_len :]], return_counts=True)
    _store(values, ids, values[ids] - (counts * row.frequency_penalty + row.presence_penalty))


def _store(row: Row, ids: Ids, values: Reals) -> None:
    """Set row[ids], rounded to float32. Values of -infinity and finite values stay such."""
    finite = np.clip(values, -_FLOAT32_MAX, _FLOAT32_MAX).astype(np.float32)
    row[ids] = np.where(row[ids] == _NEG_INF, row[ids], finite)


class Candidates(NamedTuple):
    """Tokens that can be drawn, and their log-weights relative to the best token's."""

    ids: Ids  # [n], ascending
    log_weights: Reals  # [n]

    def draw(self, key: int) -> int:
        """The token with the largest log-weight + Gumbel noise."""
        return int(self.ids[(self.log_weights + gumbel(key, self.ids)).argmax()])

    def distribution(self) -> Distribution:
        """The probabilities of those that have one."""
        weights = np.exp(self.log_weights)
        likely = weights > 0
        return Distribution(self.ids[likely], weights[likely] / weights[likely].sum())


def candidates(row: Row, temperature: float, filters: Mapping[str, float]) -> Candidates:
    """The candidates that a temperature and `outputs.FILTERS` leave of a row.

    Args:
        row: [V] float32 after mask, bias and penalties, of which one is finite. Not modified.
        temperature: Without one only the most likely token is left.
        filters: Their values, by name.
    """
    best = int(row.argmax())
    if temperature <= 0:
        return Candidates(np.array([best]), np.zeros(1))
    top_p, min_p, typical_p = filters["top_p"], filters["min_p"], filters["typical_p"]
    order = np.argsort(-row, kind="stable")  # stable: ids stay ascending among equals
    order = order[row[order] > _NEG_INF][: int(filters["top_k"]) or None]
    log_weights = (row[order].astype(np.float64) - float(row[best])) / temperature
    if top_p < 1.0:
        # The weight of the tokens before each: the set has those before which is less than top_p.
        weights = np.exp(log_weights)
        left = 1 + np.count_nonzero(np.cumsum(weights)[:-1] < top_p * weights.sum())
        order, log_weights = order[:left], log_weights[:left]
    if min_p > 0.0:
        kept = np.exp(log_weights) >= min_p
        order, log_weights = order[kept], log_weights[kept]
    if typical_p < 1.0:
        # How far each token's information is from the entropy: both lack the logarithm of the total.
        weights = np.exp(log_weights)
        distances = np.abs(log_weights - (weights * log_weights).sum() / weights.sum())
        nearest = np.argsort(distances, kind="stable")
        is_short = np.cumsum(weights[nearest]) < typical_p * weights.sum()
        kept = distances <= distances[nearest[: np.count_nonzero(is_short) + 1]].max()
        order, log_weights = order[kept], log_weights[kept]
    by_id = np.argsort(order)
    return Candidates(order[by_id], log_weights[by_id])


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
        at = int(np.searchsorted(self.ids, token_id))
        return float(self.probabilities[at]) if at < len(self.ids) and self.ids[at] == token_id else 0.0

    def log_of(self, token_id: int) -> float:
        probability = self.of(token_id)
        return math.log(probability) if probability > 0 else -math.inf

    def residual(self, drafts: Drafts) -> Distribution | None:
        """The normalised max(0, p - q), where q is the drafts' distribution. None: p and q are the same."""
        more = self.probabilities - probabilities_of(drafts, self.ids)
        left = np.flatnonzero(more > 0)
        return Distribution(self.ids[left], more[left] / more[left].sum()) if len(left) else None


def probabilities_of(drafts: Drafts, token_ids: Ids) -> Reals:
    """[n] the probability of each of these tokens in the distribution of the drafts."""
    ids, probabilities = drafts.ids, drafts.probabilities
    if ids is None:
        return probabilities[token_ids]
    at = np.minimum(np.searchsorted(ids, token_ids), len(ids) - 1)
    return np.where(ids[at] == token_ids, probabilities[at], 0.0)


def choose_with_draft(target: Distribution, drafts: Drafts) -> int:
    """Keep one of the drafts, or draw another token: in all a draw from `target`.

    Args:
        target: The model's distribution.
        drafts: Independently drawn tokens and their distribution, where their probabilities are above 0.
    """
    proposed = probabilities_of(drafts, drafts.token_ids)
    keep = uniform(drafts.keep_key, np.arange(len(proposed), dtype=np.int64))
    for token, limit in zip(drafts.token_ids.tolist(), keep * proposed, strict=True):
        if limit < target.of(token):
            return int(token)
        residual = target.residual(drafts)
        if residual is None:
            # Both distributions are equal up to rounding, so any likely token will do.
            return int(target.ids[target.probabilities.argmax()])
        target = residual
    noise = gumbel(drafts.residual_key, target.ids)
    return int(target.ids[(np.log(target.probabilities) + noise).argmax()])
