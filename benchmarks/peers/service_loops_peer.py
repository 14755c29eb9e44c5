"""Decoding loops of clients over the service: gateway and worker processes, and the Python client.

The loops are those of the recipes. The prompts of a turn are new, and the same for all competitors.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from quire import AsyncClient, Cache, Client, OutputOptions, ScoreItem, checked, output_options

from benchmarks.peers.base import PeerConfig, Sample, prompts, timed
from benchmarks.peers.grpc_peer import GrpcPeer

_TIMEOUT_S = 300.0


class ServiceLoopsPeer(GrpcPeer):
    """Loops of one caller use unary calls and batches; `chats` are independent callers."""

    def __init__(self, config: PeerConfig) -> None:
        self._vocab_size = config.shape.vocab_size
        flags = ["--threads-per-worker", str(config.threads), "--kv-pages", str(config.kv_pages)]
        super().__init__(config, str(config.model_dir()), flags)
        self._client = Client(self.gateway.address, timeout_s=_TIMEOUT_S)
        self._turns = 0

    def close(self) -> None:
        self._client.close()
        super().close()

    def loop(self, name: str, seed: int, sizes: dict[str, int]) -> Sample:
        """The loop of this name, once."""
        work: Callable[..., Sample] = getattr(self, name)
        return work(seed=seed, **sizes)

    def greedy(self, context: int, tokens: int, seed: int) -> Sample:
        """One caller, one token at a time."""
        (prompt,) = self._prompts(1, context, seed)

        def work() -> None:
            with self._prefill(prompt) as cache:
                self._decode(cache, tokens)

        return _sample(work, tokens)

    def chats(self, chats: int, context: int, tokens: int, seed: int) -> Sample:
        """Independent callers, each with a loop like `greedy`."""
        all_prompts = self._prompts(chats, context, seed)

        self._turns += 1
        salt = str(self._turns)

        async def chat(client: AsyncClient, prompt: list[int]) -> None:
            async with client.prefill(prompt, cache_salt=salt) as cache:
                for _ in range(tokens - 1):
                    await cache.decode(cache.output.token_id)

        async def all_chats() -> None:
            async with AsyncClient(self.gateway.address, timeout_s=_TIMEOUT_S) as client:
                await asyncio.gather(*(chat(client, prompt) for prompt in all_prompts))

        return _sample(lambda: asyncio.run(all_chats()), chats * tokens)

    def samples(self, samples: int, context: int, tokens: int, seed: int) -> Sample:
        """Samples of one prompt, with the log-probabilities of their draws."""
        (prompt,) = self._prompts(1, context, seed)
        outputs = [output_options(temperature=1.0, seed=n, sampled_logprob=True) for n in range(samples)]

        def work() -> None:
            first = self._prefill(prompt, outputs[0], range(samples))
            caches = [first, *first.fork(samples - 1)]
            chosen = [sample.token_id for sample in first.samples]
            for _ in range(tokens - 1):
                items = list(zip(caches, chosen, outputs, strict=True))
                chosen = [output.token_id for output in checked(self._client.batch_decode(items))]
            first.fork(0, release=caches)

        return _sample(work, samples * tokens)

    def beams(self, beams: int, context: int, tokens: int, seed: int) -> Sample:
        """Beam search to a fixed length; caches without a child are released as others are forked."""
        (prompt,) = self._prompts(1, context, seed)
        ask = output_options(top_logprobs=beams)

        def work() -> None:
            first = self._prefill(prompt, ask)
            top = first.output.top
            caches = [first, *first.fork(beams - 1)]
            scores, chosen = list(top.logprobs), list(top.token_ids)
            for _ in range(tokens - 1):
                checked(self._client.batch_decode(list(zip(caches, chosen, strict=True)), output=ask))
                candidates = [
                    (score + logprob, at, token)
                    for at, (score, cache) in enumerate(zip(scores, caches, strict=True))
                    for token, logprob in zip(
                        cache.output.top.token_ids, cache.output.top.logprobs, strict=True
                    )
                ]
                best = sorted(candidates, reverse=True)[:beams]
                scores, chosen = [score for score, *_ in best], [token for *_, token in best]
                caches = self._grown(caches, [at for _, at, _ in best])
            caches[0].fork(0, release=caches)

        return _sample(work, beams * tokens)

    def choices(self, choices: int, context: int, tokens: int, seed: int) -> Sample:
        """Scores continuations."""
        (drawn,) = self._prompts(1, context + choices * tokens, seed)
        prompt, rest = drawn[:context], drawn[context:]
        self._turns += 1
        items = [
            ScoreItem(prompt + rest[at : at + tokens], score_from=context, cache_salt=str(self._turns))
            for at in range(0, len(rest), tokens)
        ]
        return _sample(lambda: checked(self._client.score_batch(items)), choices * tokens)

    def drafts(self, context: int, steps: int, width: int, right: int, seed: int) -> Sample:
        """Verifies of `width` drafts, of which the first `right` are those of a greedy loop."""
        (prompt,) = self._prompts(1, context, seed)
        with self._prefill(prompt) as cache:
            said = self._decode(cache, steps * (right + 1) + width)

        def work() -> None:
            at = 0
            with self._prefill(prompt) as cache:
                for _ in range(steps):
                    drafted = said[at + 1 : at + 1 + right] + [0] * (width - right)
                    cache.verify([said[at], *drafted])
                    at += 1 + right

        return _sample(work, steps * (right + 1))

    def attempts(self, attempts: int, context: int, tokens: int, seed: int) -> Sample:
        """An agent that generates, reads a result, and truncates both."""
        (drawn,) = self._prompts(1, context + 8 * attempts, seed)
        asked = [drawn[at : at + 8] for at in range(context, len(drawn), 8)]

        def work() -> None:
            with self._prefill(drawn[:context]) as cache:
                for more in asked:
                    cache.extend(more)
                    self._decode(cache, tokens)
                    cache.truncate(context)

        return _sample(work, attempts * tokens)

    def masked(self, context: int, tokens: int, allowed: int, seed: int) -> Sample:
        """A loop with a token mask at each step, as grammars make them."""
        (prompt,) = self._prompts(1, context, seed)
        sets = prompts(self._vocab_size, tokens, allowed, seed)
        asks = [output_options(allowed=sorted(set(ids))) for ids in sets]

        def work() -> None:
            with self._prefill(prompt, asks[0]) as cache:
                for ask in asks[1:]:
                    cache.decode(cache.output.token_id, output=ask)

        return _sample(work, tokens)

    def _grown(self, caches: Sequence[Cache], parents: Sequence[int]) -> list[Cache]:
        """A cache for each beam: its parent's, or a copy. Caches without a child are released."""
        dead = [cache for at, cache in enumerate(caches) if at not in parents]
        alive = sorted(set(parents))
        copies: list[list[Cache]] = [[] for _ in alive]
        if dead:
            forks = [(caches[at], parents.count(at) - 1) for at in alive]
            copies = self._client.fork_caches(forks, release=dead)
        heirs = {at: [caches[at], *new] for at, new in zip(alive, copies, strict=True)}
        return [heirs[at].pop() for at in parents]

    def _prefill(
        self, prompt: Sequence[int], output: OutputOptions | None = None, sample_seeds: Sequence[int] = ()
    ) -> Cache:
        """A cache of a prompt that is not in the server's prefix cache."""
        self._turns += 1
        salt = str(self._turns)
        return self._client.prefill(prompt, output=output, cache_salt=salt, sample_seeds=sample_seeds)

    def _prompts(self, batch: int, tokens: int, seed: int) -> list[list[int]]:
        return prompts(self._vocab_size, batch, tokens, seed)

    def _decode(self, cache: Cache, tokens: int) -> list[int]:
        """The next tokens; the last one is not appended."""
        said = [cache.output.token_id]
        for _ in range(tokens - 1):
            said.append(cache.decode(said[-1]).token_id)
        return said


def _sample(work: Callable[[], object], tokens: int) -> Sample:
    return Sample([timed(work)], tokens)
