"""Rollouts for reinforcement learning: n samples of each prompt, with on-policy log-probabilities.

`sampled_logprob` is the log-probability of a token under the distribution that it was drawn from, as a policy
gradient or an importance ratio needs it. `logprob` is the model's own, before temperature and filters. The
same seeds give the same samples.

Cost: one prefill, which draws all first tokens, one fork, and one decode for each further token.
Shares steps: all rollouts are tasks on one Session, whose calls are batched.

    python clients/python/examples/rollouts.py [TARGET] [PROMPT] [N] [TEMPERATURE]
"""

from __future__ import annotations

import asyncio
import functools
import json
import sys
from collections.abc import Container
from dataclasses import asdict, dataclass, field

from quire import AsyncCache, AsyncClient, OutputOptions, SampledToken, StepOutput, output_options


@dataclass
class Rollout:
    """Tokens, the end token included, and two log-probabilities of each, in nats."""

    seed: int
    tokens: list[int] = field(default_factory=list)
    sampled_logprobs: list[float] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)

    def add(self, drawn: SampledToken | StepOutput) -> None:
        """One more token."""
        self.tokens.append(drawn.token_id)
        self.sampled_logprobs.append(drawn.sampled_logprob)
        self.logprobs.append(drawn.logprob)


async def rollout(
    cache: AsyncCache, done: Rollout, count: int, end: Container[int], output: OutputOptions
) -> Rollout:
    """Decodes up to `count` tokens, then releases the cache."""
    async with cache:
        while done.tokens[-1] not in end and len(done.tokens) < count:
            done.add(await cache.decode(done.tokens[-1], output=output))
    return done


async def rollouts(
    client: AsyncClient, prompt: list[int], n: int, count: int, end: Container[int], temperature: float
) -> list[Rollout]:
    """`n` samples with the seeds 0 to n - 1."""
    say = functools.partial(output_options, temperature=temperature, sampled_logprob=True, logprob=True)
    async with client.session() as session:
        root = await session.prefill(prompt, output=say(), sample_seeds=range(n))
        tasks = []
        for seed, cache in enumerate([root, *await root.fork(n - 1)]):
            done = Rollout(seed)
            done.add(root.samples[seed])
            tasks.append(rollout(cache, done, count, end, say(seed=seed)))
        return await asyncio.gather(*tasks)


async def main(
    target: str = "127.0.0.1:50051", prompt: str = "12+34=", n: str = "8", temperature: str = "1.0"
) -> None:
    """Prints a line of JSON for each rollout."""
    async with AsyncClient(target, timeout_s=600) as client:
        tokenizer = await client.tokenizer()
        ids = tokenizer.encode(prompt)
        for done in await rollouts(client, ids, int(n), 64, tokenizer.end_ids, float(temperature)):
            print(json.dumps({"text": tokenizer.decode(done.tokens)} | asdict(done)))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
