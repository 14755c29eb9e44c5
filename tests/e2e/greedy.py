"""Greedy texts: what a server decodes, and what a decoder of this process chooses."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from tests.gateway_process import GatewayProcess
from tests.model_factory import hf_greedy, load_decoder
from tests.workers.packing import HandSequence, Item, new_packer, poisoned_pages
from workers.models.model import AUTO_KV

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4]
STEPS = 10


class Text:
    """A cache that is decoded greedily, one token after the other."""

    def __init__(
        self,
        gateway: GatewayProcess,
        adapter_id: str = "",
        request_id: str = "",
        prompt: Sequence[int] = PROMPT,
    ) -> None:
        self.gateway = gateway
        self.prompt = list(prompt)
        response = gateway.prefill(prompt, adapter_id=adapter_id, request_id=request_id)
        self.reused = response.reused_tokens
        self.weights = response.kv_cache.weights_version
        self.cache_id = response.kv_cache.cache_id
        self.tokens = [response.output.token_id]
        # Computed again, because no worker had their KV any more.
        self.replayed_tokens = 0

    def decode(self, steps: int = 1) -> list[int]:
        """Each step is refused unless all before it are applied, once."""
        for _ in range(steps):
            at = len(self.prompt) + len(self.tokens) - 1
            response = self.gateway.decode(self.cache_id, self.tokens[-1], position=at)
            self.tokens.append(response.output.token_id)
            self.weights = response.kv_cache.weights_version
            self.replayed_tokens += response.replayed_tokens
        return self.tokens

    def finish(self) -> list[int]:
        """STEPS tokens."""
        return self.decode(STEPS - len(self.tokens))

    def release(self) -> None:
        self.gateway.release(self.cache_id)


def assert_serves(gateway: GatewayProcess, model: Path, adapter_id: str = "") -> None:
    """A text that begins now is what transformers says with the weights of a directory."""
    text = Text(gateway, adapter_id)
    assert text.finish() == hf_greedy(model, PROMPT, STEPS)
    text.release()


def decoded(gateway: GatewayProcess, prompt: Sequence[int], count: int) -> list[int]:
    """The tokens behind a prompt, one Decode after the other."""
    text = Text(gateway, prompt=prompt)
    text.decode(count - 1)
    text.release()
    return text.tokens


def chosen_here(
    model: Path,
    prompt: Sequence[int],
    count: int,
    quantization: str | None = None,
    kv_dtype: str = AUTO_KV,
) -> list[int]:
    """Those of native code with a model's files, each after a forward of the whole text."""
    return chosen_by(load_decoder(model, pack=True, quantization=quantization), prompt, count, kv_dtype)


def chosen_by(decoder: Any, prompt: Sequence[int], count: int, kv_dtype: str = AUTO_KV) -> list[int]:
    """As `chosen_here`, by a model of this process."""
    torch.set_num_threads(1)
    text = list(prompt)
    for _ in range(count):
        inputs = new_packer(1).pack([Item(HandSequence(), text, [len(text) - 1])])
        logits = decoder.logits(decoder.forward(inputs, poisoned_pages(decoder, kv_dtype=kv_dtype)))
        text.append(int(logits[0].argmax()))
    return text[len(prompt) :]
