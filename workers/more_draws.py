"""More tokens from one row of logits: what would be drawn there with other seeds.

A draw is a pure function of seed and position, so these are the tokens that the copies of a sequence, each
with a seed of its own, would draw there. On the host, whatever device the row is on.
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
from workers.sampling import Race, SamplingRow, adjusted

# What a draw costs beside the tokens that take part in it, in such tokens.
_DRAW_COST = 1 << 13
# What is drawn at a time, in such tokens: a few milliseconds' worth.
_PART_COST = 1 << 20


def draw_more(
    logits: Tensor, row: SamplingRow, seeds: Sequence[int], spec: OutputSpec
) -> Iterator[tuple[int, list[RowOutput]]]:
    """One token for each seed, with the log-probabilities that `spec` asks for and nothing else.

    A part at a time, with what it has cost: the tokens that took part in its draws. A thousand draws from a
    flat distribution over a large vocabulary take a second. Masks, penalties and cuts are computed once.
    Without a temperature all tokens are the most likely one.

    Args:
        logits: [V] float32, any device, accepted by `choose_tokens` with this row. Not modified; to be left
            as they are until all is drawn.
        row: How its own token is chosen, from which only the seed differs.
        seeds: One for each draw.
        spec: Of the row.
    """
    on_host = logits.cpu().numpy()
    masks, counter = Masks(len(on_host)), HistoryCounter(len(on_host))
    sampling = row.spec or Sampling()
    values = adjusted(on_host, row, masks, counter)
    best = int(values.argmax())
    race = None
    if sampling.temperature > 0:
        race = Race(values, float(values[best]), sampling, len(seeds))
    logprobs = torch.log_softmax(logits, dim=-1) if spec.logprob or spec.top_logprobs else None
    drawn_from = distribution(on_host, row, masks, counter) if spec.sampled_logprob else None
    cost = _DRAW_COST + (race.size if race is not None else 0)
    count = max(1, _PART_COST // cost)
    for start in range(0, len(seeds), count):
        keys = [mix_key(seed, row.position) for seed in seeds[start : start + count]]
        tokens = [best] * len(keys) if race is None else race.draw(keys)
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
