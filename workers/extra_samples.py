"""Extra tokens from one row of logits, drawn with other seeds.

A draw is a pure function of seed and position. So forks of the sequence with these seeds would draw the same
tokens. Runs on the host, for rows on any device.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from workers.counter_rng import mix_key
from workers.distribution import distribution
from workers.logit_settings import HistoryCounter, Masks
from workers.operations import OutputSpec, RowOutput, Sampling
from workers.sampling import GumbelSampler, SamplingRow, adjusted

# The fixed cost of a draw, in candidate tokens.
_DRAW_COST = 1 << 13
# The cost of a batch of draws: a few milliseconds.
_BATCH_COST = 1 << 20


def draw_extra_samples(
    logits: Tensor, row: SamplingRow, seeds: Sequence[int], spec: OutputSpec
) -> Iterator[tuple[int, list[RowOutput]]]:
    """Yields one token for each seed, with the log-probabilities that `spec` requests and nothing else.

    Yields batches with their cost, in candidate tokens: a thousand draws from a flat distribution over a
    large vocabulary take a second. Masks, penalties, top_k and min_p are applied once. Without a
    temperature all tokens are the most likely one.

    Args:
        logits: [V] float32, any device, accepted by `choose_tokens` with this row. Not modified; must not
            change until all tokens are drawn.
        row: The settings of the row's own token. Only the seed differs.
        seeds: One for each draw.
        spec: Of the row.
    """
    on_host = logits.cpu().numpy()
    masks, counter = Masks(len(on_host)), HistoryCounter(len(on_host))
    sampling = row.spec or Sampling()
    values = adjusted(on_host, row, masks, counter)
    best = int(values.argmax())
    sampler = None
    if sampling.temperature > 0:
        sampler = GumbelSampler(values, float(values[best]), sampling, len(seeds))
    logprobs = torch.log_softmax(logits, dim=-1) if spec.logprob or spec.top_logprobs else None
    drawn_from = distribution(on_host, row, masks, counter) if spec.sampled_logprob else None
    cost = _DRAW_COST + (sampler.size if sampler is not None else 0)
    count = max(1, _BATCH_COST // cost)
    for start in range(0, len(seeds), count):
        keys = [mix_key(seed, row.position) for seed in seeds[start : start + count]]
        tokens = [best] * len(keys) if sampler is None else sampler.draw(keys)
        samples = [RowOutput(token) for token in tokens]
        if logprobs is not None:
            found = logprobs[torch.tensor(tokens, device=logits.device)].tolist()
            for sample, logprob in zip(samples, found, strict=True):
                sample.logprob = logprob
        if drawn_from is not None:
            for sample in samples:
                probability = drawn_from.of(sample.token_id)
                sample.sampled_logprob = math.log(probability) if probability > 0 else -math.inf
        yield cost * len(keys) + (0 if start else len(on_host)), samples
