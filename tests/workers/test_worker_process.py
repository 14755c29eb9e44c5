"""`python -m workers` with a model, without a gateway: on a GPU if there is one.

Needs of a machine only what a worker itself does, and transformers to compare with.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from benchmarks.checkout import ROOT, environment
from tests.gpu.oracle import Oracle
from tests.model_factory import TinyModel, make_model
from tests.workers.gateway_end import LAST_ROW, forward_command
from workers.common import worker_pb2
from workers.common.message_stream import MessageStream

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# A width of heads that there are CUDA kernels for.
MODEL = TinyModel(head_dim=64)
PROMPTS = ([1, 2, 3], [5, 9, 2, 77, 31, 4, 4, 8])
TOKENS = 8
# Far more than anything takes; on a GPU kernels are compiled meanwhile.
PATIENCE_S = 120


def config(model: Path, **more: Any) -> worker_pb2.WorkerConfig:
    return worker_pb2.WorkerConfig(
        model=str(model),
        device=DEVICE,
        dtype="float32",
        kv_pages=64,
        threads=1,
        gpu_memory_utilization=0.9,
        max_batch_tokens=64,
        max_batch_items=8,
        max_request_bytes=1 << 20,
        max_response_bytes=1 << 20,
        max_lora_adapters=1,
        max_lora_bytes=1 << 20,
        log_level="info",
        log_format="json",
        no_self_check="on",
        batch_invariant="on",
        **more,
    )


class Stream:
    """The gateway's end of a worker's stream."""

    def __init__(self) -> None:
        self._stream = MessageStream(worker_pb2.ConnectResponse, 1 << 24)
        self.events: list[worker_pb2.WorkerEvent] = []

    async def lease(self, path: str, model: Path) -> None:
        """Waits until the worker has dialled, and has taken its lease."""
        server = await asyncio.get_running_loop().create_unix_server(lambda: self._stream, path)
        try:
            assert (await anext(self._stream)).HasField("hello")
        finally:
            # Not `async with`: from Python 3.12 on, that waits for the end of its connections.
            server.close()
        lease = worker_pb2.Lease(gateway_id="g", epoch=1, config=config(model))
        await self._stream.write(worker_pb2.ConnectRequest(lease=lease))
        await anext(self._stream)

    def close(self) -> None:
        self._stream.close()

    async def ask(self, *commands: worker_pb2.WorkerCommand) -> None:
        await self._stream.write(worker_pb2.ConnectRequest(commands=commands))

    async def next(self, kind: str) -> worker_pb2.WorkerEvent:
        while True:
            for event in self.events:
                if event.WhichOneof("event") == kind:
                    self.events.remove(event)
                    return event
                assert event.WhichOneof("event") != "error", event
            self.events = [*self.events, *(await anext(self._stream)).events]


async def greedy(stream: Stream) -> list[list[int]]:
    """The tokens after each prompt, chosen by prefills and then by decodes of all of them at once."""
    texts: list[list[int]] = []
    for number, prompt in enumerate(PROMPTS):
        await stream.ask(forward_command(number + 1, number, prompt))
        (output,) = (await stream.next("forward")).forward.outputs
        texts.append([output.token_id])
    while len(texts[0]) < TOKENS:
        rows = [
            # `prelaunch`: its next one is launched before the answer is read.
            (number + 1, number, 0, len(prompt) + len(text) - 1, text[-1], 0, 1, 0, 0)
            for number, (prompt, text) in enumerate(zip(PROMPTS, texts, strict=True))
        ]
        decodes = worker_pb2.DecodesCommand(
            rows=b"".join(struct.pack("<9Q", *row) for row in rows), options=[LAST_ROW]
        )
        await stream.ask(worker_pb2.WorkerCommand(decodes=decodes))
        left = len(PROMPTS)
        while left:
            done = (await stream.next("decodes")).decodes.rows
            numbers = struct.unpack(f"<{len(done) // 8}Q", done)
            for op_id, token in zip(numbers[::5], numbers[1::5], strict=True):
                texts[op_id - 1].append(token)
                left -= 1
    return texts


async def serve(directory: Path, log: Path, path: str) -> list[list[int]]:
    stream = Stream()
    command = [sys.executable, "-m", "workers", "--gateway", f"unix:{path}", "--log-format", "json"]
    with log.open("wb") as file:
        worker = await asyncio.create_subprocess_exec(
            *command, cwd=ROOT, env=environment(ROOT), stdin=subprocess.PIPE, stderr=file
        )
    try:
        async with asyncio.timeout(PATIENCE_S):
            await stream.lease(path, directory)
            await stream.next("ready")
            found = await greedy(stream)
            stream.close()
            # As it does without a grace period when its stream has ended.
            assert await worker.wait() == 0
            return found
    finally:
        stream.close()
        with contextlib.suppress(ProcessLookupError):
            worker.kill()
        await worker.wait()


def test_it_serves_a_model(tmp_path: Path) -> None:
    directory = make_model(tmp_path / "model", MODEL)
    log = tmp_path / "log"
    found = asyncio.run(serve(directory, log, str(tmp_path / "s")))
    oracle = Oracle(directory, torch.device(DEVICE))
    assert found == [oracle.greedy(prompt, TOKENS) for prompt in PROMPTS], log.read_text()
    said = [json.loads(line) for line in log.read_text().splitlines() if line.startswith("{")]
    assert any(line["event"] == "products in use" for line in said)
    assert not [line for line in said if line["level"] == "error"]
