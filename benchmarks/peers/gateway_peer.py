"""The gateway alone: with an executor that has no weights, against a bare gRPC server that echoes.

The same client code calls both, in turns, with the same messages: the echo server answers with what the
gateway has answered.
"""

from __future__ import annotations

import asyncio
import base64
import json
import subprocess
import sys
from collections.abc import Coroutine
from typing import Any, TypeVar

import grpc
import uvloop
from quire.v1 import executor_pb2, executor_pb2_grpc

from benchmarks import drivers
from benchmarks.gateway_process import ROOT, GatewayProcess, channel_options
from benchmarks.peers.base import Peer, PeerConfig, Sample, prompts

SEQUENCES = 32
_PROMPT_TOKENS = 64
_VOCAB_SIZE = 1024  # of the executor without weights
_KV_PAGES = 4096
_SERVICE = executor_pb2.DESCRIPTOR.services_by_name["ModelExecutorService"].full_name
_Result = TypeVar("_Result")


class GatewayPeer(Peer):
    """Two servers, and one set of callers for each."""

    def __init__(self, config: PeerConfig) -> None:
        self._gateway = GatewayProcess("paged-attention", threads=config.threads, kv_pages=_KV_PAGES)
        self._runner = asyncio.Runner(loop_factory=uvloop.new_event_loop)
        self._channels: list[grpc.aio.Channel] = []
        self._stubs = {"quire": self._run(self._connect(self._gateway.address))}
        own = prompts(_VOCAB_SIZE, SEQUENCES, _PROMPT_TOKENS)
        self._callers = self._run(drivers.open_callers(self._stubs["quire"], own))
        self._echo = self._start_echo(self._run(self._capture()))
        assert self._echo.stdout is not None
        port = int(self._echo.stdout.readline())
        self._stubs["echo"] = self._run(self._connect(f"127.0.0.1:{port}"))

    def calls(self, server: str, mode: str, steps: int, callers: int = SEQUENCES) -> Sample:
        """One turn: `steps` for each caller, on "quire" or "echo", in a mode of `drivers.MODES`.

        The sample's times are those of a call: of one token, or of a whole batch.
        """
        try:
            sample = self._run(drivers.run(mode, self._stubs[server], self._callers[:callers], steps))
            if mode == "batch":
                return sample
            return Sample([ns // callers for ns in sample.ns], 1, sample.latency_ns)
        finally:
            if server == "quire":
                self._run(drivers.rewind_callers(self._stubs[server], self._callers))
            for caller in self._callers:
                caller.rewind()

    def memory(self) -> dict[str, int]:
        return self._gateway.memory()

    def close(self) -> None:
        for channel in self._channels:
            self._run(channel.close())
        self._runner.close()
        self._echo.kill()
        self._echo.wait()
        self._gateway.close()

    async def _capture(self) -> dict[str, bytes]:
        """What the gateway answers to the calls that will be echoed."""
        stub, callers = self._stubs["quire"], self._callers
        one = await stub.Decode(callers[0].request())
        callers[0].took(one)
        items = [caller.request() for caller in callers]
        many = await stub.BatchDecode(executor_pb2.BatchDecodeRequest(items=items))
        await drivers.rewind_callers(stub, callers)
        return {"Decode": one.SerializeToString(), "BatchDecode": many.SerializeToString()}

    def _start_echo(self, answers: dict[str, bytes]) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.echo_server"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        assert process.stdin is not None
        encoded = {f"/{_SERVICE}/{name}": base64.b64encode(data).decode() for name, data in answers.items()}
        process.stdin.write(json.dumps(encoded) + "\n")
        process.stdin.flush()
        return process

    async def _connect(self, address: str) -> drivers.Stub:
        # Inside the loop that will use it.
        channel = grpc.aio.insecure_channel(address, options=channel_options())
        self._channels.append(channel)
        return executor_pb2_grpc.ModelExecutorServiceStub(channel)

    def _run(self, work: Coroutine[Any, Any, _Result]) -> _Result:
        return self._runner.run(work)
