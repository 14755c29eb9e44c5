"""Many concurrent requests, as in nano-vllm's benchmark: random prompt and output lengths, with sampling.

First all prompts are prefilled, as many in a step as its token budget allows. Then all decode until they end.
"""

from __future__ import annotations

import random
import time

from benchmarks.gpu.model import SEED, Bench
from benchmarks.peers.base import Sample
from workers.outputs import OutputSpec, Sampling

_TEMPERATURE = 0.6


def serve(bench: Bench, count: int, low: int, high: int, step_tokens: int) -> Sample:
    """The time from the first prompt to the last token. Sequences 0 to `count` must be free."""
    dice, vocabulary = random.Random(SEED), range(bench.shape.vocab_size)
    prompts = [dice.choices(vocabulary, k=dice.randint(low, high)) for _ in range(count)]
    wanted = [dice.randint(low, high) for _ in range(count)]
    drawn = [OutputSpec(sampling=Sampling(temperature=_TEMPERATURE, seed=key)) for key in range(count)]
    executor, steps, decode_steps = bench.executor, 0, 0
    next_token: dict[int, int] = {}
    made = [0] * count
    began_ns = time.perf_counter_ns()
    for keys in _groups(prompts, step_tokens):
        outputs = executor.batch_prefill([(key, prompts[key], drawn[key]) for key in keys])
        next_token |= {key: output.token_id for key, output in zip(keys, outputs, strict=True)}
        steps += 1
    while next_token:
        for key in list(next_token):
            made[key] += 1
            if made[key] == wanted[key]:
                del next_token[key]
                executor.release_cache(key)
        if next_token:
            outputs = executor.batch_decode([(key, token, drawn[key]) for key, token in next_token.items()])
            next_token = dict(zip(next_token, (output.token_id for output in outputs), strict=True))
            decode_steps += 1
    took_ns = time.perf_counter_ns() - began_ns
    more: dict[str, float] = {
        "prompt tokens": sum(map(len, prompts)),
        "prefill steps": steps,
        "decode steps": decode_steps,
    }
    return Sample([took_ns], sum(made), more=more | {"output tokens": sum(made)})


def _groups(prompts: list[list[int]], step_tokens: int) -> list[list[int]]:
    """Groups of keys, in order, each with at most the token budget of a step."""
    groups: list[list[int]] = [[]]
    room = step_tokens
    for key, prompt in enumerate(prompts):
        if len(prompt) > room and groups[-1]:
            groups.append([])
            room = step_tokens
        groups[-1].append(key)
        room -= len(prompt)
    return groups
