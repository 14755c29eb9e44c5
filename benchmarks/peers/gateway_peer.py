"""The gateway with a weightless executor, compared with a bare gRPC echo server.

The same client code calls both, in turns, with the same messages: the echo server answers with what the
gateway has answered.
"""

from __future__ import annotations

import base64
import json
import subprocess
import sys

from quire.v1 import executor_pb2

from benchmarks import drivers
from benchmarks.peers.base import PeerConfig, Sample, prompts
from benchmarks.peers.grpc_peer import GrpcPeer

SEQUENCES = 32
_PROMPT_TOKENS = 64
_VOCAB_SIZE = 1024  # of the weightless executor
_SERVICE = executor_pb2.DESCRIPTOR.services_by_name["ModelExecutorService"].full_name


class GatewayPeer(GrpcPeer):
    """Two servers, and one set of callers for each."""

    def __init__(self, config: PeerConfig) -> None:
        flags = ["--threads-per-worker", str(config.threads), "--kv-pages", "4096"]
        super().__init__(config, "paged-attention", flags)
        own = prompts(_VOCAB_SIZE, SEQUENCES, _PROMPT_TOKENS)
        self._callers = self.run(drivers.open_callers(self.stub, own))
        self._echo = _start_echo(self.run(self._capture()))
        assert self._echo.stdout is not None
        port = int(self._echo.stdout.readline())
        self._stubs = {"quire": self.stub, "echo": self.connect(f"127.0.0.1:{port}")}

    def calls(self, server: str, mode: str, steps: int, callers: int = SEQUENCES) -> Sample:
        """One turn: `steps` for each caller, on "quire" or "echo", in a mode of `drivers.MODES`.

        The sample's times are those of a call: of one token, or of a whole batch.
        """
        try:
            sample = self.run(drivers.MODES[mode](self._stubs[server], self._callers[:callers], steps))
            if mode != "batch":
                sample.ns, sample.tokens = [ns // callers for ns in sample.ns], 1
            return sample
        finally:
            if server == "quire":
                self.run(drivers.rewind_callers(self.stub, self._callers))
            for caller in self._callers:
                caller.rewind()

    def close(self) -> None:
        self._echo.kill()
        self._echo.wait()
        super().close()

    async def _capture(self) -> dict[str, bytes]:
        """The gateway's responses, which the echo server returns."""
        one = await self.stub.Decode(self._callers[0].request())
        self._callers[0].took(one)
        items = [caller.request() for caller in self._callers]
        many = await self.stub.BatchDecode(executor_pb2.BatchDecodeRequest(items=items))
        await drivers.rewind_callers(self.stub, self._callers)
        return {"Decode": one.SerializeToString(), "BatchDecode": many.SerializeToString()}


def _start_echo(answers: dict[str, bytes]) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.echo_server"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    encoded = {f"/{_SERVICE}/{name}": base64.b64encode(data).decode() for name, data in answers.items()}
    process.stdin.write(json.dumps(encoded) + "\n")
    process.stdin.flush()
    return process
