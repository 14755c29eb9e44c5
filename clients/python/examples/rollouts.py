"""Rollouts for reinforcement learning: n samples of each prompt, with on-policy log-probabilities.

`sampled_logprob` is how likely a token was among what it was drawn from: what a policy gradient or an
importance ratio needs. `logprob` is the model's own, before temperature and cuts. Each rollout has its seed,
and can be said again.

Cost: the prompt once (prompts that begin alike and come together are computed once), one decode for each
token of each rollout. Shares steps: all rollouts are tasks on one Session; what is asked for together runs in
one forward, and who is done leaves it to the others.

    python clients/python/examples/rollouts.py [TARGET] [PROMPT] [N] [TEMPERATURE]
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Container
from dataclasses import asdict, dataclass, field

from quire import AsyncClient, AsyncSession, output_options
from tokenizers import Tokenizer


@dataclass
class Rollout:
    """Tokens, the end token included, and two log-probabilities of each, in nats."""

    seed: int
    tokens: list[int] = field(default_factory=list)
    sampled_logprobs: list[float] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)


async def rollout(
    session: AsyncSession, prompt: list[int], seed: int, count: int, end: Container[int], temperature: float
) -> Rollout:
    """One sample of at most `count` tokens."""
    output = output_options(temperature=temperature, seed=seed, sampled_logprob=True, logprob=True)
    done = Rollout(seed)
    async with await session.prefill(prompt, output=output) as cache:
        while True:
            done.tokens.append(cache.output.token_id)
            done.sampled_logprobs.append(cache.output.sampled_logprob)
            done.logprobs.append(cache.output.logprob)
            if cache.output.token_id in end or len(done.tokens) == count:
                return done
            await cache.decode(cache.output.token_id, output=output)


async def rollouts(
    client: AsyncClient, prompt: list[int], n: int, count: int, end: Container[int], temperature: float
) -> list[Rollout]:
    """`n` samples with the seeds 0 to n - 1."""
    async with client.session() as session:
        samples = (rollout(session, prompt, seed, count, end, temperature) for seed in range(n))
        return await asyncio.gather(*samples)


async def main(
    target: str = "127.0.0.1:50051", prompt: str = "12+34=", n: str = "8", temperature: str = "1.0"
) -> None:
    """Prints a line of JSON for each rollout."""
    async with AsyncClient(target, timeout_s=600) as client:
        info = await client.model_info(include_tokenizer=True)
        tokenizer = Tokenizer.from_buffer(info.tokenizer_json)
        ids, end = tokenizer.encode(prompt).ids, info.model.eos_token_ids
        for done in await rollouts(client, ids, int(n), 64, end, float(temperature)):
            print(json.dumps({"text": tokenizer.decode(done.tokens)} | asdict(done)))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
