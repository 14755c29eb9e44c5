"""More tokens from one row of logits: what would be drawn there with other seeds.

A draw is a pure function of seed and position, so these are the tokens that the copies of a sequence, each
with a seed of its own, would draw there. On the host, whatever device the row is on.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from workers.counter_rng import mix_key
from workers.distribution import distribution
from workers.logit_settings import HistoryCounter, Masks
from workers.operations import OutputSpec, RowOutput, Sampling
from workers.sampling import SamplingRow, adjusted, draw


def draw_more(logits: Tensor, row: SamplingRow, seeds: Sequence[int], spec: OutputSpec) -> list[RowOutput]:
    """One token for each seed, with the log-probabilities that `spec` asks for and nothing else.

    Masks, penalties and cuts are computed once. Without a temperature all tokens are the most likely one.

    Args:
        logits: [V] floating point, any device, accepted by `choose_tokens` with this row. Not modified.
        row: How its own token is chosen, from which only the seed differs.
        seeds: One for each draw.
        spec: Of the row.
    """
    on_host = logits.float().cpu().numpy()
    masks, counter = Masks(len(on_host)), HistoryCounter(len(on_host))
    sampling = row.spec or Sampling()
    values = adjusted(on_host, row, masks, counter)
    best = int(values.argmax())
    tokens = [best] * len(seeds)
    if sampling.temperature > 0:
        keys = [mix_key(seed, row.position) for seed in seeds]
        tokens = draw(values, float(values[best]), sampling, keys)
    samples = [RowOutput(token) for token in tokens]
    if spec.logprob or spec.top_logprobs:
        logprobs = torch.log_softmax(logits.float(), dim=-1)[torch.tensor(tokens, device=logits.device)]
        for sample, logprob in zip(samples, logprobs.tolist(), strict=True):
            sample.logprob = logprob
    if spec.sampled_logprob:
        drawn_from = distribution(on_host, row, masks, counter)
        for sample in samples:
            probability = drawn_from.of(sample.token_id)
            sample.sampled_logprob = math.log(probability) if probability > 0 else -math.inf
    return samples
