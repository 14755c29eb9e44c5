"""The distribution from which a token is drawn, and rejection sampling of drafts (speculative decoding).

For log-probabilities of drawn tokens, and for lossless speculative decoding. Where the logits are: on a GPU,
or on the host by one compiled call for all rows, and by numpy, row by row, where nothing is compiled.

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
import torch
from torch import Tensor

from kernels.cpu import sampling as compiled
from workers import device_sampling, sampling
from workers.counter_rng import gumbel, mix_key, uniform
from workers.logit_settings import HistoryCounter, Ids, Masks
from workers.operations import OutputSpec, Sampling
from workers.sampling import CompiledRows, Draft, Reals, Row, SamplingRow, adjusted, candidates

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

    def log_of(self, token_id: int) -> float:
        """The log-probability of one token."""
        probability = self.of(token_id)
        return math.log(probability) if probability > 0 else -math.inf

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
    ids, log_weights = candidates(adjusted(logits, row, masks, counter), spec)
    weights = np.exp(log_weights)
    likely = weights > 0
    return Distribution(ids[likely], weights[likely] / weights[likely].sum())


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
    drafted = [(index, row, row.draft) for index, row in enumerate(rows) if row.draft is not None]
    if not drafted:
        return chosen
    indexes = [index for index, _, _ in drafted]
    some, vocab, chosen = logits[indexes], logits.shape[1], chosen.clone()
    if logits.is_cuda:
        keys = [_keys(row) for _, row, _ in drafted]
        found = device_sampling.choose_with_drafts(some, [row for _, row, _ in drafted], keys)
        chosen[indexes] = found.to(chosen.device)
        return chosen
    on_host = sampling.on_host(some)
    if compiled.available():
        known, choices = CompiledRows(vocab), dict[int, compiled.RowChoice]()
        for at, (_, row, draft) in enumerate(drafted):
            choices[at] = choice = known.choice(row)
            choice.tokens, choice.drafts = np.zeros(1, dtype=np.int64), _compiled_drafts(row, draft)
        compiled.choose(on_host, choices)
        tokens = [int(choice.tokens[0]) for choice in choices.values()]
    else:
        masks, counter = Masks(vocab), HistoryCounter(vocab)
        targets = [
            distribution(logits.numpy(), row, masks, counter)
            for logits, (_, row, _) in zip(on_host, drafted, strict=True)
        ]
        tokens = [
            choose_with_draft(target, draft, _seed(row), row.position)
            for target, (_, row, draft) in zip(targets, drafted, strict=True)
        ]
    chosen[indexes] = torch.tensor(tokens, device=chosen.device)
    return chosen


def _seed(row: SamplingRow) -> int:
    return 0 if row.spec is None else row.spec.seed


def _keys(row: SamplingRow) -> tuple[int, int]:
    """By which drafts are kept, and by which other tokens are drawn."""
    seed = _seed(row)
    return mix_key(seed ^ _KEEP_STREAM, row.position), mix_key(seed ^ _RESIDUAL_STREAM, row.position)


def _compiled_drafts(row: SamplingRow, draft: Draft) -> compiled.Drafts:
    keep_key, residual_key = _keys(row)
    return compiled.Drafts(
        token_ids=np.array(draft.token_ids, dtype=np.int64),
        ids=draft.drawn_from.ids,
        probabilities=draft.drawn_from.probabilities,
        keep_key=keep_key,
        residual_key=residual_key,
    )


def sampled_logprobs(
    logits: Tensor, chosen: Sequence[int], rows: Sequence[SamplingRow], specs: Sequence[OutputSpec]
) -> dict[int, float]:
    """By row, if requested: the log-probability of the chosen token in the distribution it was drawn from.

    -infinity for a token that rounding has moved just outside of `operations.LIMITS`. Arguments as for
    `apply_drafts`.
    """
    wanted = [index for index, spec in enumerate(specs) if spec.sampled_logprob]
    if not wanted:
        return {}
    some = logits if len(wanted) == len(logits) else logits[wanted]
    if logits.is_cuda:
        likely = device_sampling.sampled_logprobs(
            some, [chosen[index] for index in wanted], [rows[index] for index in wanted]
        )
        return dict(zip(wanted, likely, strict=True))
    on_host, vocab, found = sampling.on_host(some), logits.shape[1], dict[int, float]()
    if compiled.available():
        known, choices = CompiledRows(vocab), dict[int, compiled.RowChoice]()
        for at, index in enumerate(wanted):
            choices[at] = choice = known.choice(rows[index])
            choice.tokens, choice.wants_logprobs = np.array([chosen[index]]), True
        compiled.choose(on_host, choices)
        return {index: float(choices[at].logprobs[0]) for at, index in enumerate(wanted)}
    masks, counter = Masks(vocab), HistoryCounter(vocab)
    for row, index in zip(on_host, wanted, strict=True):
        found[index] = distribution(row.numpy(), rows[index], masks, counter).log_of(chosen[index])
    return found
