"""Quire's executor in process: without gateway, gRPC and step loop."""

from __future__ import annotations

import torch

from benchmarks.in_process import LlmExecutor
from benchmarks.peers.base import Peer, PeerConfig, Sample, prompts, timed, timed_steps
from workers.outputs import GREEDY


class ExecutorPeer(Peer):
    """Greedy, without log-probabilities. Each sequence has its own prompt, so that none share pages."""

    def __init__(self, config: PeerConfig) -> None:
        torch.set_num_threads(config.threads)
        self._vocab_size = config.shape.vocab_size
        self._executor = LlmExecutor.load(config.model_dir(), kv_pages=config.kv_pages)
        self._executor.warmup()
        self._context_tokens = 0
        self._first: list[int] = []
        self._next: list[int] = []

    def versions(self) -> dict[str, str]:
        said = self._executor.capabilities()
        return {"torch": torch.__version__, "kernels": ", ".join(said.kernels), "runner": said.runner}

    def prepare_decode(self, batch: int, context_tokens: int) -> list[int]:
        self._context_tokens = context_tokens
        own = enumerate(prompts(self._vocab_size, batch, context_tokens))
        self._first = [self._executor.prefill(key, prompt).token_id for key, prompt in own]
        self._next = self._first
        self._step()
        tokens = [self._first[0], self._next[0]]
        self._reset()
        return tokens

    def decode(self, steps: int) -> Sample:
        ns = timed_steps(self._step, steps)
        self._reset()
        return Sample(ns, len(self._first))

    def prefill(self, batch: int, prompt_tokens: int, seed: int) -> Sample:
        own = enumerate(prompts(self._vocab_size, batch, prompt_tokens, seed))
        items = [(key, prompt, GREEDY) for key, prompt in own]
        ns = timed(lambda: self._executor.batch_prefill(items))
        self._forget(batch)
        return Sample([ns], batch * prompt_tokens)

    def release(self) -> None:
        self._forget(len(self._first))
        self._first = []

    def _step(self) -> None:
        items = [(key, token, GREEDY) for key, token in enumerate(self._next)]
        self._next = [output.token_id for output in self._executor.batch_decode(items)]

    def _reset(self) -> None:
        for key in range(len(self._first)):
            self._executor.truncate_kv(key, self._context_tokens)
        self._next = self._first

    def _forget(self, count: int) -> None:
        for key in range(count):
            self._executor.release_cache(key)
