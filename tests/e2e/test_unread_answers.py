"""How much memory answers take that nobody reads: no more than the limit, all copies of them together."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import grpc
from quire.v1 import executor_pb2 as pb
from quire.v1 import types_pb2

from tests.error_details import reason_of
from tests.gateway_process import GatewayProcess

MIB = 1 << 20
LIMIT_MIB = 192
TOKENS = 4000
CALLERS = 12
# What a message needs while it arrives, beside others that were not read, and the allocator.
SLACK_MIB = 64
PATIENCE_S = 60
# Nothing is read beyond what HTTP/2 lets the server send at first.
OPTIONS = [("grpc.http2.bdp_probe", 0)]
REQUEST = pb.ForwardRequest(
    token_ids=[index % 1000 for index in range(TOKENS)],
    output=types_pb2.OutputOptions(logits=types_pb2.DATA_TYPE_F32),
)


def memory_mib(gateway: GatewayProcess, name: str) -> float:
    lines = Path(f"/proc/{gateway.process.pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(name + ":"))


def ask_alone(channel: grpc.Channel) -> Any:
    """As a stream, which receives nothing until it is read."""
    method: Any = channel.unary_stream("/quire.v1.ModelExecutorService/Forward")
    return method(REQUEST.SerializeToString(), timeout=PATIENCE_S)


# Of a Session: test_session.py.
def test_unread_answers_take_no_more_than_the_limit() -> None:
    flags = ["--kv-pages", "4096", "--max-unread-bytes", str(LIMIT_MIB * MIB)]
    with GatewayProcess(model="paged-attention", flags=flags) as gateway:
        assert gateway.stub.Forward(REQUEST, timeout=PATIENCE_S).outputs
        before_mib = memory_mib(gateway, "VmRSS")
        # Resets the peak, where there is such a file.
        with contextlib.suppress(OSError):
            Path(f"/proc/{gateway.process.pid}/clear_refs").write_text("5")
        channels = [grpc.insecure_channel(gateway.address, options=OPTIONS) for _ in range(CALLERS)]
        calls = [ask_alone(channel) for channel in channels]
        # Those for which there is room are computed. The others are refused.
        gateway.wait_until(lambda: gateway.status().unread_bytes > LIMIT_MIB * MIB / 2)
        gateway.wait_until(lambda: gateway.status().operations_in_flight == 0)
        held = 0
        for _ in range(20):
            held = gateway.status().unread_bytes
        grown_mib = memory_mib(gateway, "VmHWM") - before_mib
        assert LIMIT_MIB / 2 < held / MIB <= LIMIT_MIB and grown_mib < LIMIT_MIB + SLACK_MIB
        assert "ANSWERS_FULL" in {reason_of(call) for call in calls if call.done()}
        for call, channel in zip(calls, channels, strict=True):
            call.cancel()
            channel.close()
        gateway.wait_until(lambda: gateway.status().unread_bytes == 0)
