"""The gateway's end of a worker's stream, in this process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, NoReturn, cast

import grpc
from quire.v1 import worker_pb2

from workers.server import SECRET_KEY, WorkerServer

# Far more than anything takes.
_PATIENCE_S = 30
SECRET = "opensesame"
# Of a forward: the last token's output, and nothing special of it.
LAST_ROW = worker_pb2.ForwardOptions(rows=1).SerializeToString()


class Refused(Exception):
    """The worker does not let this gateway in."""


class Gateway:
    """The other end of the stream: messages in, messages out."""

    def __init__(self, secret: str = SECRET) -> None:
        self.secret = secret
        self.requests: asyncio.Queue[worker_pb2.ConnectRequest] = asyncio.Queue()
        self.events: asyncio.Queue[worker_pb2.WorkerEvent] = asyncio.Queue()
        # All that ever came, with what it answers.
        self.received: list[tuple[int, str]] = []

    def ask(self, **command: Any) -> None:
        message = worker_pb2.WorkerCommand(**command)
        self.requests.put_nowait(worker_pb2.ConnectRequest(commands=[message]))

    def invocation_metadata(self) -> list[tuple[str, str]]:
        return [(SECRET_KEY, self.secret)]

    async def connect(self, worker: WorkerServer) -> None:
        """Until the stream ends. Raises Refused."""
        await worker.Connect(self.sent(), cast("grpc.aio.ServicerContext[Any, Any]", self))

    async def abort(self, code: grpc.StatusCode, details: str) -> NoReturn:
        raise Refused(code, details)

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
