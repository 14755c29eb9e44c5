"""Hidden states through a real gateway: who gets them, and in what form. parity_machine.py compares them."""

from __future__ import annotations

from pathlib import Path

import grpc
import pytest
import torch
from quire.errors import from_rpc_error
from quire.v1 import executor_pb2 as pb
from quire.v1 import types_pb2

from tests.e2e.conftest import NewCache
from tests.gateway_process import GatewayProcess
from tests.model_factory import hf_states

PROMPT = [5, 9, 2, 40, 41, 7, 33]
LAYERS = 2
WIDTH = 64
TIMEOUT_S = 30
RELATIVE_ERROR = 2e-5


def hidden(*layers: int, dtype: int = types_pb2.DATA_TYPE_UNSPECIFIED) -> types_pb2.OutputOptions:
    asked = types_pb2.HiddenStates(layers=layers, dtype=dtype)  # type: ignore[arg-type]
    return types_pb2.OutputOptions(hidden=asked)


@pytest.fixture
def cache(new_cache: NewCache) -> str:
    return new_cache(PROMPT)


def values(tensor: types_pb2.Tensor) -> torch.Tensor:
    dtype = {
        types_pb2.DATA_TYPE_F32: torch.float32,
        types_pb2.DATA_TYPE_BF16: torch.bfloat16,
        types_pb2.DATA_TYPE_F16: torch.float16,
    }[tensor.dtype]
    row = torch.frombuffer(bytearray(tensor.data), dtype=dtype)
    assert list(tensor.shape) == [len(row)] == [WIDTH]
    return row.float()


def assert_is(
    model: Path, output: types_pb2.StepOutput, tokens: list[int], layers: tuple[int, ...] = (0, 1, 2)
) -> None:
    """The states that an output has are those of the last of these tokens."""
    expected = torch.stack(hf_states(model, tokens)[:-1])[:, -1]
    assert len(output.hidden) == len(layers)
    for layer, tensor in zip(layers, output.hidden, strict=True):
        error = (values(tensor) - expected[layer]).abs().max()
        assert error < RELATIVE_ERROR * expected[layer].abs().max(), layer


def test_only_who_asks_in_a_batch_is_told(
    tiny_gateway: GatewayProcess, tiny_model: Path, cache: str, new_cache: NewCache
) -> None:
    other = new_cache(PROMPT)
    items = [
        pb.DecodeRequest(cache_id=cache, token_id=1, output=hidden(2, 0, 2)),
        pb.DecodeRequest(cache_id=other, token_id=2),
    ]
    decoded = tiny_gateway.stub.BatchDecode(pb.BatchDecodeRequest(items=items), timeout=TIMEOUT_S).results
    assert_is(tiny_model, decoded[0].response.output, [*PROMPT, 1], (2, 0, 2))
    assert not decoded[1].response.output.hidden
    unified = [
        pb.UnifiedForwardItem(cache_id=cache, token_ids=[3]),
        pb.UnifiedForwardItem(cache_id=other, token_ids=[4, 5, 6], output=hidden()),
        pb.UnifiedForwardItem(token_ids=PROMPT, output=hidden(0, 1), is_final_chunk=False),
    ]
    request = pb.UnifiedForwardRequest(items=unified)
    results = tiny_gateway.stub.UnifiedForward(request, timeout=TIMEOUT_S).results
    assert not results[0].response.output.hidden
    assert_is(tiny_model, results[1].response.output, [*PROMPT, 2, 4, 5, 6], (LAYERS,))
    assert not results[2].response.HasField("output")
    made = results[2].response.kv_cache.cache_id
    tiny_gateway.stub.ReleaseCache(pb.ReleaseCacheRequest(cache_id=made), timeout=TIMEOUT_S)


def test_number_formats(tiny_gateway: GatewayProcess, cache: str) -> None:
    exact = None
    for dtype, rounded in (
        (types_pb2.DATA_TYPE_F32, torch.float32),
        (types_pb2.DATA_TYPE_BF16, torch.bfloat16),
        (types_pb2.DATA_TYPE_F16, torch.float16),
    ):
        request = pb.DecodeRequest(
            cache_id=cache, token_id=1, position=len(PROMPT), output=hidden(1, dtype=dtype)
        )
        (tensor,) = tiny_gateway.stub.Decode(request, timeout=TIMEOUT_S).output.hidden
        tiny_gateway.stub.TruncateKV(
            pb.TruncateKVRequest(cache_id=cache, new_len=len(PROMPT)), timeout=TIMEOUT_S
        )
        assert tensor.dtype == dtype
        row = values(tensor)
        exact = row if exact is None else exact
        assert torch.equal(row, exact.to(rounded).float())


def test_what_is_not_there_is_refused(
    tiny_gateway: GatewayProcess, weightless_gateway: GatewayProcess, cache: str
) -> None:
    capabilities = pb.GetCapabilitiesRequest()
    assert tiny_gateway.stub.GetCapabilities(capabilities).executor.supports_hidden_states
    assert not weightless_gateway.stub.GetCapabilities(capabilities).executor.supports_hidden_states
    request = pb.DecodeRequest(cache_id=cache, token_id=1, output=hidden(0, LAYERS, LAYERS + 1))
    with pytest.raises(grpc.RpcError) as failed:
        tiny_gateway.stub.Decode(request, timeout=TIMEOUT_S)
    assert failed.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    refused = from_rpc_error(failed.value)
    assert refused.reason == "BAD_OUTPUT" and refused.violations[0][0] == "output.hidden.layers[2]"
    prefill = pb.PrefillRequest(token_ids=PROMPT, output=hidden())
    with pytest.raises(grpc.RpcError) as failed:
        weightless_gateway.stub.Prefill(prefill, timeout=TIMEOUT_S)
    assert failed.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert from_rpc_error(failed.value).reason == "UNSUPPORTED_BY_EXECUTOR"
