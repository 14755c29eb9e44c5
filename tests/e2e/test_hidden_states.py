"""Hidden states through a real gateway: in what form, and refusals. parity_machine.py compares them.

Who of a step gets them: tests/workers/test_hidden_states.py.
"""

from __future__ import annotations

import grpc
import pytest
import torch
from quire.errors import from_rpc_error
from quire.v1 import executor_pb2 as pb
from quire.v1 import types_pb2

from tests.e2e.conftest import NewCache
from tests.gateway_process import GatewayProcess

PROMPT = [5, 9, 2, 40, 41, 7, 33]
LAYERS = 2
WIDTH = 64


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


def test_number_formats(tiny_gateway: GatewayProcess, cache: str) -> None:
    exact = None
    for dtype, rounded in (
        (types_pb2.DATA_TYPE_F32, torch.float32),
        (types_pb2.DATA_TYPE_BF16, torch.bfloat16),
        (types_pb2.DATA_TYPE_F16, torch.float16),
    ):
        (tensor,) = tiny_gateway.decode(
            cache, 1, position=len(PROMPT), output=hidden(1, dtype=dtype)
        ).output.hidden
        tiny_gateway.truncate(cache, len(PROMPT))
        assert tensor.dtype == dtype
        row = values(tensor)
        exact = row if exact is None else exact
        assert torch.equal(row, exact.to(rounded).float())


def test_layers_that_are_not_there_are_refused(
    tiny_gateway: GatewayProcess, weightless_gateway: GatewayProcess, cache: str
) -> None:
    """A model that has none: error_cases.py."""
    capabilities = pb.GetCapabilitiesRequest()
    assert tiny_gateway.stub.GetCapabilities(capabilities).executor.supports_hidden_states
    assert not weightless_gateway.stub.GetCapabilities(capabilities).executor.supports_hidden_states
    with pytest.raises(grpc.RpcError) as failed:
        tiny_gateway.decode(cache, 1, output=hidden(0, LAYERS, LAYERS + 1))
    assert failed.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    refused = from_rpc_error(failed.value)
    assert refused.reason == "BAD_OUTPUT" and refused.violations[0][0] == "output.hidden.layers[2]"
