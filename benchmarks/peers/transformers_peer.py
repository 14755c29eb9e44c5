"""transformers: bfloat16, sdpa attention, DynamicCache, and the core loop of `generate`."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, DynamicCache

from benchmarks.peers.base import Peer, PeerConfig, Sample, prompts, timed, timed_steps


class TransformersPeer(Peer):
    """All sequences have one length, so that no attention mask is needed: the fastest path."""

    def __init__(self, config: PeerConfig) -> None:
        torch.set_num_threads(config.threads)
        self._vocab_size = config.shape.vocab_size
        # In evaluation mode, as from_pretrained leaves it.
        self._model: Any = AutoModelForCausalLM.from_pretrained(
            config.model_dir(), dtype=torch.bfloat16, attn_implementation="sdpa"
        )
        self._cache: Any = None
        self._context_tokens = 0
        self._next = torch.empty(0)
        self._first = self._next

    def versions(self) -> dict[str, str]:
        return {"transformers": transformers.__version__, "torch": torch.__version__}

    @torch.inference_mode()
    def prepare_decode(self, batch: int, context_tokens: int) -> list[int]:
        # One prompt for all, prefilled once and copied. Each sequence still has its own memory.
        own = torch.tensor(prompts(self._vocab_size, batch, context_tokens)[:1])
        self._cache, self._context_tokens = self._new_cache(), context_tokens
        self._first = self._forward(own, self._cache).repeat(batch, 1)  # [B, 1]
        self._cache.batch_repeat_interleave(batch)
        self._next = self._first
        self._step()
        tokens = [int(self._first[0]), int(self._next[0])]
        self._reset()
        return tokens

    @torch.inference_mode()
    def decode(self, steps: int) -> Sample:
        ns = timed_steps(self._step, steps)
        self._reset()
        return Sample(ns, len(self._first))

    @torch.inference_mode()
    def prefill(self, batch: int, prompt_tokens: int, seed: int) -> Sample:
        input_ids = torch.tensor(prompts(self._vocab_size, batch, prompt_tokens, seed))
        ns = timed(lambda: self._forward(input_ids, self._new_cache()).tolist())
        return Sample([ns], batch * prompt_tokens)

    def release(self) -> None:
        self._cache = None

    def _new_cache(self) -> DynamicCache:
        return DynamicCache(config=self._model.config)

    def _forward(self, input_ids: torch.Tensor, cache: DynamicCache) -> torch.Tensor:
        """The most likely next token of each row, [B, 1]."""
        result = self._model(input_ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        chosen: torch.Tensor = result.logits[:, -1:].argmax(-1)
        return chosen

    def _step(self) -> None:
        self._next = self._forward(self._next, self._cache)
        self._next.tolist()  # As for all competitors, the caller receives every token.

    def _reset(self) -> None:
        self._cache.crop(self._context_tokens - self._cache.get_seq_length())
        if self._cache.get_seq_length() != self._context_tokens:
            raise RuntimeError(f"the cache has {self._cache.get_seq_length()} tokens after a crop")
        self._next = self._first
