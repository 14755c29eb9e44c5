"""The number formats of hidden states through a real gateway. parity_machine.py compares the states.

Who of a step gets them: tests/workers/test_hidden_states.py. Refusals: tests/service/test_validation.py.
"""

from __future__ import annotations

import torch
from quire.v1 import types_pb2

from tests.e2e.conftest import NewCache
from tests.gateway_process import GatewayProcess

PROMPT = [5, 9, 2, 40, 41, 7, 33]
WIDTH = 64
FORMATS = {
    types_pb2.DATA_TYPE_F32: torch.float32,
    types_pb2.DATA_TYPE_BF16: torch.bfloat16,
    types_pb2.DATA_TYPE_F16: torch.float16,
}


def test_number_formats(tiny_gateway: GatewayProcess, new_cache: NewCache) -> None:
    assert tiny_gateway.capabilities().executor.supports_hidden_states
    cache, exact = new_cache(PROMPT), None
    for dtype, rounded in FORMATS.items():
        asked = types_pb2.OutputOptions(hidden=types_pb2.HiddenStates(layers=[1], dtype=dtype))
        (tensor,) = tiny_gateway.decode(cache, 1, position=len(PROMPT), output=asked).output.hidden
        tiny_gateway.truncate(cache, len(PROMPT))
        row = torch.frombuffer(bytearray(tensor.data), dtype=rounded)
        assert tensor.dtype == dtype and list(tensor.shape) == [len(row)] == [WIDTH]
        exact = row if exact is None else exact
        assert torch.equal(row, exact.to(rounded))
