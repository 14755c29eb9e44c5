"""The loops of `service_loops_peer`, hand-written with transformers and its DynamicCache.

By somebody who knows the library: contexts are computed once and copied, what can run in one batch does, and
drafts and attempts are taken back by cropping. Methods and arguments are those of `ServiceLoopsPeer`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from transformers import DynamicCache

from benchmarks.peers.base import Sample, prompts, timed
from benchmarks.peers.transformers_peer import TransformersPeer


class TransformersLoopsPeer(TransformersPeer):
    """Samples from the softmax of float32 logits, with torch's generator."""

    def loop(self, name: str, seed: int, sizes: dict[str, int]) -> Sample:
        """The loop of this name, once."""
        work: Callable[..., Sample] = getattr(self, name)
        return work(seed=seed, **sizes)

    def greedy(self, context: int, tokens: int, seed: int) -> Sample:
        (prompt,) = self._drawn(1, context, seed)
        return _sample(lambda: self._greedy(prompt, tokens), tokens)

    def chats(self, chats: int, context: int, tokens: int, seed: int) -> Sample:
        all_prompts = torch.tensor(prompts(self._vocab_size, chats, context, seed))

        def work() -> None:
            # All in one batch, which requires prompts of one length that arrive together.
            cache = self._new_cache()
            chosen = self._logits(all_prompts, cache)[:, -1].argmax(-1, keepdim=True)
            for _ in range(tokens - 1):
                chosen = self._logits(chosen, cache)[:, -1].argmax(-1, keepdim=True)
                chosen.tolist()

        return _sample(work, chats * tokens)

    def samples(self, samples: int, context: int, tokens: int, seed: int) -> Sample:
        (prompt,) = self._drawn(1, context, seed)

        def work() -> None:
            cache = self._new_cache()
            logits = self._logits(prompt, cache)[:, -1].repeat(samples, 1)
            cache.batch_repeat_interleave(samples)
            for index in range(tokens):
                logprobs = logits.float().log_softmax(-1)
                chosen = torch.multinomial(logprobs.exp(), 1)
                logprobs.gather(1, chosen).tolist()
                if index < tokens - 1:
                    logits = self._logits(chosen, cache)[:, -1]

        return _sample(work, samples * tokens)

    def beams(self, beams: int, context: int, tokens: int, seed: int) -> Sample:
        (prompt,) = self._drawn(1, context, seed)

        def work() -> None:
            cache = self._new_cache()
            logprobs = self._logits(prompt, cache)[:, -1].float().log_softmax(-1)
            scores, chosen = logprobs[0].topk(beams)
            cache.batch_repeat_interleave(beams)
            for _ in range(tokens - 1):
                logprobs = self._logits(chosen[:, None], cache)[:, -1].float().log_softmax(-1)
                scores, best = (scores[:, None] + logprobs).flatten().topk(beams)
                cache.batch_select_indices(best // self._vocab_size)
                chosen = best % self._vocab_size
                chosen.tolist()

        return _sample(work, beams * tokens)

    def choices(self, choices: int, context: int, tokens: int, seed: int) -> Sample:
        (drawn,) = self._drawn(1, context + choices * tokens, seed)
        prompt, ids = drawn[:, :context], drawn[:, context:].reshape(choices, tokens)

        def work() -> None:
            cache = self._new_cache()
            first = self._logits(prompt, cache)[:, -1:].repeat(choices, 1, 1)
            cache.batch_repeat_interleave(choices)
            rows = torch.cat([first, self._logits(ids[:, :-1], cache, all_rows=True)], dim=1)
            rows.float().log_softmax(-1).gather(2, ids[:, :, None]).sum((1, 2)).tolist()

        return _sample(work, choices * tokens)

    def drafts(self, context: int, steps: int, width: int, right: int, seed: int) -> Sample:
        (prompt,) = self._drawn(1, context, seed)
        said = self._greedy(prompt, steps * (right + 1) + width)

        def work() -> None:
            cache = self._new_cache()
            length, at = context, 0
            self._logits(prompt, cache)
            for _ in range(steps):
                drafted = said[at + 1 : at + 1 + right] + [0] * (width - right)
                rows = self._logits(torch.tensor([[said[at], *drafted]]), cache, all_rows=True)[0]
                chosen = rows.argmax(-1).tolist()
                same = [a == b for a, b in zip(drafted, chosen, strict=False)]
                # Keep the planned number of drafts despite rounding, so that all take the same steps.
                kept = 1 + (right if same else 0)
                length, at = length + kept, at + kept
                cache.crop(length - cache.get_seq_length())

        return _sample(work, steps * (right + 1))

    def attempts(self, attempts: int, context: int, tokens: int, seed: int) -> Sample:
        (drawn,) = self._drawn(1, context + 8 * attempts, seed)
        prompt, asked = drawn[:, :context], drawn[:, context:].reshape(attempts, 1, 8)

        def work() -> None:
            cache = self._new_cache()
            self._logits(prompt, cache)
            for more in asked:
                self._greedy(more, tokens, cache)
                cache.crop(context - cache.get_seq_length())

        return _sample(work, attempts * tokens)

    def masked(self, context: int, tokens: int, allowed: int, seed: int) -> Sample:
        (prompt,) = self._drawn(1, context, seed)
        masks = [torch.tensor(ids) for ids in prompts(self._vocab_size, tokens, allowed, seed)]

        def work() -> None:
            cache = self._new_cache()
            logits = self._logits(prompt, cache)[0, -1]
            for index, ids in enumerate(masks):
                forbidden = torch.full_like(logits, -torch.inf)
                forbidden[ids] = 0
                chosen = (logits + forbidden).argmax().view(1, 1)
                chosen.tolist()
                if index < tokens - 1:
                    logits = self._logits(chosen, cache)[0, -1]

        return _sample(work, tokens)

    def _drawn(self, batch: int, tokens: int, seed: int) -> list[Tensor]:
        """[1, tokens] each."""
        return [torch.tensor([ids]) for ids in prompts(self._vocab_size, batch, tokens, seed)]

    def _greedy(self, prompt: Tensor, tokens: int, cache: DynamicCache | None = None) -> list[int]:
        cache = self._new_cache() if cache is None else cache
        said, ids = [], prompt
        for _ in range(tokens):
            ids = self._logits(ids, cache)[:, -1].argmax(-1, keepdim=True)
            said.append(int(ids))
        return said

    @torch.inference_mode()
    def _logits(self, input_ids: Tensor, cache: DynamicCache, *, all_rows: bool = False) -> Tensor:
        """[B, 1 or T, V] of the model's dtype."""
        keep = 0 if all_rows else 1
        result = self._model(input_ids, past_key_values=cache, use_cache=True, logits_to_keep=keep)
        logits: Tensor = result.logits
        return logits


@torch.inference_mode()
def _sample(work: Callable[[], object], tokens: int) -> Sample:
    return Sample([timed(work)], tokens)
