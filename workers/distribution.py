"""Rejection sampling of drafts (speculative decoding), and log-probabilities of drawn tokens.

Where the logits are: on a GPU, or on the host by one call for all rows. `numpy_choice` has the method. All
draws are pure functions of (seed, position). They use other random streams than plain draws, which may have
made the drafts.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from kernels.cpu.sampling import Drafts, RowChoice
from workers import device_sampling
from workers.counter_rng import mix_key
from workers.outputs import OutputSpec
from workers.sampling import Draft, RowChoices, SamplingRow, choose_rows

# They separate these streams from those of plain draws. Any numbers but 0 would do.
_KEEP_STREAM = 0xD1B54A32D192ED03
_RESIDUAL_STREAM = 0x8CB92BA72F3D8DD7


def apply_drafts(logits: Tensor, chosen: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    """The tokens of a step: `chosen`, but for rows with drafts one of these, or what replaces them.

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
    known, choices = RowChoices(vocab), dict[int, RowChoice]()
    for at, (_, row, draft) in enumerate(drafted):
        choices[at] = choice = known.choice(row)
        choice.tokens, choice.drafts = np.zeros(1, dtype=np.int64), drafts_of(row, draft)
    choose_rows(some, choices)
    tokens = [int(choice.tokens[0]) for choice in choices.values()]
    chosen[indexes] = torch.tensor(tokens, device=chosen.device)
    return chosen


def _seed(row: SamplingRow) -> int:
    return 0 if row.spec is None else row.spec.seed


def _keys(row: SamplingRow) -> tuple[int, int]:
    """The keys for keeping drafts, and for drawing other tokens."""
    seed = _seed(row)
    return mix_key(seed ^ _KEEP_STREAM, row.position), mix_key(seed ^ _RESIDUAL_STREAM, row.position)


def drafts_of(row: SamplingRow, draft: Draft) -> Drafts:
    """The drafts of a row, with the keys by which they are kept or replaced."""
    keep_key, residual_key = _keys(row)
    return Drafts(
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

    -infinity for a token that rounding has moved just outside of `outputs.FILTERS`. Arguments as for
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
    known, choices = RowChoices(logits.shape[1]), dict[int, RowChoice]()
    for at, index in enumerate(wanted):
        choices[at] = choice = known.choice(rows[index])
        choice.tokens, choice.wants_logprobs = np.array([chosen[index]]), True
    choose_rows(some, choices)
    return {index: float(choices[at].logprobs[0]) for at, index in enumerate(wanted)}
