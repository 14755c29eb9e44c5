"""Extra tokens from one row of logits, drawn with other seeds.

A draw is a pure function of seed and position. So forks of the sequence with these seeds would draw the same
tokens. Runs on the host, for rows on any device.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from workers.outputs import OutputSpec, RowOutput
from workers.row_outputs import log_probabilities
from workers.sampling import RowChoices, SamplingRow, choose_rows, keys_of

# The fixed cost of a draw, in candidate tokens.
_DRAW_COST = 1 << 13
# The cost of a batch of draws: a few milliseconds.
_BATCH_COST = 1 << 20


def draw_extra_samples(
    logits: Tensor, row: SamplingRow, seeds: Sequence[int], spec: OutputSpec
) -> Iterator[tuple[int, list[RowOutput]]]:
    """Yields one token for each seed, with the log-probabilities that `spec` requests and nothing else.

    Yields batches with their cost, in candidate tokens: a thousand draws from a flat distribution over a
    large vocabulary take a part of a second. Without a temperature all tokens are the most likely one.

    Args:
        logits: [V] float32, any device, accepted by `choose_tokens` with this row. Not modified; must not
            change until all tokens are drawn.
        row: The settings of the row's own token. Only the seed differs.
        seeds: One for each draw.
        spec: Of the row.
    """
    on_host, choice = logits[None].float().cpu(), RowChoices(len(logits)).choice(row)
    # First how many candidates there are.
    choice.keys, choice.wants_logprobs = keys_of([], row.position), spec.sampled_logprob
    choose_rows(on_host, {0: choice})
    cost = _DRAW_COST + choice.candidates
    count = max(1, _BATCH_COST // cost)
    for start in range(0, len(seeds), count):
        choice.keys = keys_of(seeds[start : start + count], row.position)
        choose_rows(on_host, {0: choice})
        tokens = choice.tokens.tolist()
        samples = [RowOutput(token) for token in tokens]
        if spec.logprob or spec.top_logprobs:
            found = log_probabilities(logits[None], torch.tensor([tokens], device=logits.device))
            for sample, logprob in zip(samples, found[0].tolist(), strict=True):
                sample.logprob = logprob
        if spec.sampled_logprob:
            for sample, logprob in zip(samples, choice.logprobs.tolist(), strict=True):
                sample.sampled_logprob = logprob
        yield cost * len(samples) + (0 if start else len(logits)), samples
