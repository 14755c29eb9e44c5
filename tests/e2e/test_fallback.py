"""A model that native code does not run: what the server says of it."""

from __future__ import annotations

from pathlib import Path

import grpc
import pytest
from quire.v1 import admin_pb2
from quire.v1 import executor_pb2 as pb

from tests.bad_directories import setting
from tests.error_details import reason_of
from tests.gateway_process import GatewayProcess
from tests.model_factory import TinyModel, make_model

PATIENCE_S = 60
WHY = "config.json: attention_chunk_size: is not supported, got 64"


def test_the_setting_is_named_in_the_capabilities_and_to_those_who_want_an_adapter(tmp_path: Path) -> None:
    directory = make_model(tmp_path / "model", TinyModel())
    setting(attention_chunk_size=64)(directory)
    with GatewayProcess(model=str(directory), workers=1, flags=["--kv-pages", "32"]) as gateway:
        capabilities = gateway.stub.GetCapabilities(pb.GetCapabilitiesRequest(), timeout=PATIENCE_S)
        assert not capabilities.executor.supports_lora
        assert capabilities.executor.backend_reason == WHY
        with pytest.raises(grpc.RpcError) as refused:
            gateway.stub.Prefill(pb.PrefillRequest(token_ids=[1], adapter_id="mine"), timeout=PATIENCE_S)
        assert reason_of(refused.value) == "UNSUPPORTED_BY_EXECUTOR"
        assert WHY in str(refused.value.details())
        load = admin_pb2.LoadAdapterRequest(adapter_id="mine", source=str(tmp_path))
        (tmp_path / "adapter_config.json").write_text("{}")
        (tmp_path / "adapter_model.safetensors").write_bytes(b"")
        with pytest.raises(grpc.RpcError) as refused:
            gateway.admin.LoadAdapter(iter([load]), timeout=PATIENCE_S)
        assert reason_of(refused.value) == "UNSUPPORTED_BY_EXECUTOR"
        assert WHY in str(refused.value.details())
