"""Greedy texts: what a server decodes, and what a decoder of this process chooses."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from quire.v1 import executor_pb2 as pb

from tests.gateway_process import GatewayProcess
from tests.model_factory import load_decoder
from tests.workers.packing import HandSequence, Item, new_packer, poisoned_pages
from workers.models.model import AUTO_KV

TIMEOUT_S = 60


def decoded(gateway: GatewayProcess, prompt: Sequence[int], count: int) -> list[int]:
    """The tokens behind a prompt, one Decode after the other."""
    stub = gateway.stub
    answer = stub.Prefill(pb.PrefillRequest(token_ids=prompt), timeout=TIMEOUT_S)
    handle, chosen = answer.kv_cache, [answer.output.token_id]
    while len(chosen) < count:
        request = pb.DecodeRequest(cache_id=handle.cache_id, token_id=chosen[-1], position=handle.seq_len)
        step = stub.Decode(request, timeout=TIMEOUT_S)
        handle = step.kv_cache
        chosen.append(step.output.token_id)
    stub.ReleaseCache(pb.ReleaseCacheRequest(cache_id=handle.cache_id), timeout=TIMEOUT_S)
    return chosen


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
