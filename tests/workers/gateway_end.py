"""The gateway's end of a worker's stream, in this process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

from workers.common import worker_pb2
from workers.server import WorkerServer

# Far more than anything takes.
_PATIENCE_S = 30
# Of a forward: the last token's output, and nothing special of it.
LAST_ROW = worker_pb2.ForwardOptions(rows=1).SerializeToString()


def forward_command(
    op_id: int, sequence: int, token_ids: Sequence[int], kind: str = "PREFILL", **more: Any
) -> worker_pb2.WorkerCommand:
    """A forward as a gateway sends it. `more`: of a ForwardCommand."""
    settings = {"options": LAST_ROW, "kind": f"OPERATION_KIND_{kind}", **more}
    forward = worker_pb2.ForwardCommand(sequence=sequence, token_ids=token_ids, **settings)
    return worker_pb2.WorkerCommand(op_id=op_id, forward=forward)


class Gateway:
    """The other end of the stream: messages in, messages out."""

    def __init__(self) -> None:
        self.requests: asyncio.Queue[worker_pb2.ConnectRequest] = asyncio.Queue()
        self.events: asyncio.Queue[worker_pb2.WorkerEvent] = asyncio.Queue()
        # All that ever came, with what it answers.
        self.received: list[tuple[int, str]] = []

    def ask(self, **command: Any) -> None:
        self.send(worker_pb2.WorkerCommand(**command))

    def send(self, *commands: worker_pb2.WorkerCommand) -> None:
        self.requests.put_nowait(worker_pb2.ConnectRequest(commands=commands))

    async def connect(self, worker: WorkerServer) -> None:
        """Until the stream ends."""
        await worker.serve_stream(self.sent(), self.write)

    async def sent(self) -> AsyncIterator[worker_pb2.ConnectRequest]:
        while True:
            yield await self.requests.get()

    async def write(self, response: worker_pb2.ConnectResponse) -> None:
        for event in response.events:
            self.received.append((event.op_id, str(event.WhichOneof("event"))))
            self.events.put_nowait(event)

    async def next(self, kind: str) -> worker_pb2.WorkerEvent:
        while (event := await asyncio.wait_for(self.events.get(), _PATIENCE_S)).WhichOneof("event") != kind:
            pass
        return event
