"""The base class of peers that start a gateway."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Coroutine, Sequence
from importlib.metadata import version
from typing import Any, TypeVar

import grpc
import uvloop
from quire.v1 import executor_pb2_grpc

from benchmarks import drivers
from benchmarks.gateway_process import CHANNEL_OPTIONS, GatewayProcess
from benchmarks.peers.base import Peer, PeerConfig, peak_memory_bytes

_Result = TypeVar("_Result")


class GrpcPeer(Peer):
    """A gateway with one worker, and an event loop with its callers in this process."""

    def __init__(self, config: PeerConfig, model: str, flags: Sequence[str]) -> None:
        self.gateway = GatewayProcess(model=model, flags=flags, root=config.root)
        self.gateway.__enter__()
        self._worker_pid = self.gateway.status().workers[0].pid
        self._runner = asyncio.Runner(loop_factory=uvloop.new_event_loop)
        self._channels: list[grpc.aio.Channel] = []
        self.stub = self.connect(self.gateway.address)

    def versions(self) -> dict[str, str]:
        return {name: version(name) for name in ("quire-llm-server", "grpcio", "protobuf", "uvloop")}

    def memory(self) -> dict[str, int]:
        pids = {"gateway": self.gateway.process.pid, "worker": self._worker_pid}
        return {name: peak_memory_bytes(pid) for name, pid in pids.items()}

    def close(self) -> None:
        for channel in self._channels:
            self.run(channel.close())
        self._runner.close()
        self.gateway.stop()
        shutil.rmtree(self.gateway.log_path.parent)

    def run(self, work: Coroutine[Any, Any, _Result]) -> _Result:
        """Runs a coroutine and returns its result."""
        return self._runner.run(work)

    def connect(self, address: str) -> drivers.Stub:
        """A stub for the event loop. Its channel is closed with the peer."""

        async def open_channel() -> grpc.aio.Channel:
            # Create the channel in the event loop that uses it.
            return grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)

        self._channels.append(self.run(open_channel()))
        return executor_pb2_grpc.ModelExecutorServiceStub(self._channels[-1])
