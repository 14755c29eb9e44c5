"""A model that native code does not run, through a gateway: its tokens, and what the server says of it."""

from __future__ import annotations

from pathlib import Path

import grpc
import pytest
from quire.v1 import admin_pb2

from tests.bad_directories import setting
from tests.e2e.parity_machine import assert_greedy_tokens_match
from tests.error_details import reason_of
from tests.gateway_process import GatewayProcess
from tests.model_factory import TinyModel, make_model

FLAGS = ["--dtype", "float32", "--kv-pages", "64", "--max-batch-tokens", "16"]
# The library ignores it. Families that only the library has: tests/workers/test_library_model.py.
WHY = "config.json: attention_chunk_size: is not supported, got 64"


def test_tokens_are_those_of_transformers_and_callers_are_told_why_it_runs_the_model(tmp_path: Path) -> None:
    directory = make_model(tmp_path / "model", TinyModel())
    setting(attention_chunk_size=64)(directory)
    with GatewayProcess(model=str(directory), flags=FLAGS) as gateway:
        assert gateway.model().backend == "transformers"
        gateway.wait_until(lambda: '"backend": "transformers"' in gateway.log())
        assert_greedy_tokens_match(gateway, directory)
        gateway.assert_pools_are_whole()
        capabilities = gateway.capabilities()
        assert not capabilities.executor.supports_lora
        assert capabilities.executor.backend_reason == WHY
        load = admin_pb2.LoadAdapterRequest(adapter_id="mine", source=str(tmp_path))
        (tmp_path / "adapter_config.json").write_text("{}")
        (tmp_path / "adapter_model.safetensors").write_bytes(b"")
        for ask in (
            lambda: gateway.prefill([1], adapter_id="mine"),
            lambda: gateway.admin.LoadAdapter(iter([load])),
        ):
            with pytest.raises(grpc.RpcError) as refused:
                ask()
            assert reason_of(refused.value) == "UNSUPPORTED_BY_EXECUTOR"
            assert WHY in str(refused.value.details())
