"""Families without code of our own, through a real gateway: callers get what transformers generates."""

from __future__ import annotations

from pathlib import Path

import torch
from quire.v1 import executor_pb2 as pb

from tests.gateway_process import GatewayProcess
from tests.workers.test_library_model import VOCAB, tiny_model

PROMPT = [(7 * i + 3) % VOCAB for i in range(40)]
COUNT = 32


def test_greedy_tokens_are_those_of_transformers(tmp_path: Path) -> None:
    model_type = "bloom"
    model = tiny_model(model_type)
    model.save_pretrained(tmp_path, max_shard_size="60KB")
    expected = [int(token) for token in _generate(model, PROMPT)]
    flags = ["--dtype", "float32", "--kv-pages", "64", "--max-batch-tokens", "16"]
    with GatewayProcess(model=str(tmp_path), flags=flags) as gateway:
        info = gateway.stub.GetModelInfo(pb.GetModelInfoRequest()).model
        assert info.backend == "transformers" and info.architecture == model_type
        assert '"backend": "transformers"' in gateway.log()
        reply = gateway.stub.Prefill(pb.PrefillRequest(token_ids=PROMPT))
        chosen = [reply.output.token_id]
        while len(chosen) < COUNT:
            request = pb.DecodeRequest(cache_id=reply.kv_cache.cache_id, token_id=chosen[-1])
            chosen.append(gateway.stub.Decode(request).output.token_id)
        gateway.stub.ReleaseCache(pb.ReleaseCacheRequest(cache_id=reply.kv_cache.cache_id))
        gateway.assert_pools_are_whole()
    assert chosen == expected


def _generate(model: torch.nn.Module, prompt: list[int]) -> list[int]:
    """What is likeliest after the prompt, end tokens ignored."""
    tokens = list(prompt)
    with torch.inference_mode():
        for _ in range(COUNT):
            tokens.append(
                int(model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax())
            )
    return tokens[len(prompt) :]
