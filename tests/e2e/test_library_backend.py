"""Families without code of our own, through a real gateway: callers get what transformers generates."""

from __future__ import annotations

from pathlib import Path

from quire.v1 import executor_pb2 as pb

from tests.e2e.parity_machine import assert_greedy_tokens_match
from tests.gateway_process import GatewayProcess
from tests.workers.test_library_model import tiny_model


def test_greedy_tokens_are_those_of_transformers(tmp_path: Path) -> None:
    model_type = "bloom"
    tiny_model(model_type).save_pretrained(tmp_path, max_shard_size="60KB")
    flags = ["--dtype", "float32", "--kv-pages", "64", "--max-batch-tokens", "16"]
    with GatewayProcess(model=str(tmp_path), flags=flags) as gateway:
        info = gateway.stub.GetModelInfo(pb.GetModelInfoRequest()).model
        assert info.backend == "transformers" and info.architecture == model_type
        assert '"backend": "transformers"' in gateway.log()
        assert_greedy_tokens_match(gateway, tmp_path)
        gateway.assert_pools_are_whole()
