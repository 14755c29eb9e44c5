"""Handles a request for text: runs its body as a batch, and sends the response.

The batch ends at once if the client disconnects or does not read for too long.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from quire.v1 import runner_pb2
from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from service.api.server_state import ServerState
from service.api.time_slice import TimeSlice
from service.auth.authenticator import current_tenant
from service.errors import Draining, InvalidArgument, QuireError
from service.openai.bodies import Body, BodyReader
from service.openai.models import Models
from service.openai.requests import CompletionRequest, ResolveModel
from service.openai.responses import CompletionResponse, to_json
from service.openai.token_texts import TokenTexts
from service.runtimes.execution import Execution
from service.runtimes.executions import Executions
from service.text.text_model import TextModel

# A response in one piece is sent in parts of about this size.
_PART_BYTES = 1 << 16
# How often a shutdown checks whether requests are running.
_POLL_S = 0.02
_JSON = (b"content-type", b"application/json")
_EVENT_STREAM = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    # Proxies must not buffer the stream.
    (b"x-accel-buffering", b"no"),
]


class CompletionHandler:
    """Handles completions or chats, depending on `parse`. An ASGI application."""

    def __init__(
        self,
        parse: Callable[[object, ResolveModel], CompletionRequest],
        executions: Executions,
        models: Models,
        state: ServerState,
        text: TextModel,
        running: RunningRequests,
        body_reader: BodyReader,
    ) -> None:
        self._parse = parse
        self._executions = executions
        self._models = models
        self._state = state
        self._running = running
        self._body_reader = body_reader
        self._text = text

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Raises QuireError."""
        request = Request(scope, receive)
        async with self._body_reader.receive(request) as body:
            await self._running.run(receive, self._handle(body, send))

    async def _handle(self, body: Body, send: Send) -> None:
        value = await self._body_reader.parse(body)
        if not (isinstance(value, dict) and self._models.is_remote(value.get("model"))):
            await self._state.first_worker(None)
        completion_request = self._parse(value, self._models.resolve)
        wants_texts = completion_request.has_logprobs and completion_request.model.is_local
        token_texts = TokenTexts(await self._text.tokenizer() if wants_texts else None)
        response = CompletionResponse(completion_request, token_texts)
        request = runner_pb2.ExecuteRequest(
            runtime=completion_request.model.runtime, items=completion_request.items
        )
        execution = self._executions.open(request, current_tenant(), None)
        reader = execution.attach({})
        try:
            if completion_request.is_stream:
                await _send_stream(execution, reader, response, send)
            else:
                await self._send_whole(execution, reader, response, send)
        finally:
            execution.detach(reader)

    async def _send_whole(
        self, execution: Execution, reader: int, response: CompletionResponse, send: Send
    ) -> None:
        """Sends the response in one piece. Its chunks count as unread until it is sent."""
        held_bytes = 0
        time_slice = TimeSlice()
        try:
            while chunks := await execution.read(reader):
                time_slice.begin()
                response.begin(execution.started)
                for chunk in chunks:
                    size_bytes = response.add(chunk)
                    self._state.answers.take(size_bytes)
                    held_bytes += size_bytes
                    if time_slice.due:
                        await time_slice.yield_to_others()
                if held_bytes > self._state.config.max_response_bytes:
                    text = "the response is too large for one piece: use a stream"
                    raise InvalidArgument("OUTPUT_TOO_LARGE", "max_tokens", text)
            await _write(response, send)
        finally:
            self._state.answers.adjust(-held_bytes)


async def _write(response: CompletionResponse, send: Send) -> None:
    """Sends a response in one piece as fast as the client reads; a short one with its length."""
    time_slice = TimeSlice()
    parts: list[str] = []
    num_characters = 0
    has_begun = False
    for part in response.pieces():
        parts.append(part)
        num_characters += len(part)
        if num_characters >= _PART_BYTES:
            if not has_begun:
                await send({"type": "http.response.start", "status": 200, "headers": [_JSON]})
                has_begun = True
            await _send(send, "".join(parts).encode())
            parts, num_characters = [], 0
        if time_slice.due:
            await time_slice.yield_to_others()
    last = "".join(parts).encode()
    if not has_begun:
        headers = [_JSON, (b"content-length", str(len(last)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": last})


async def _send_stream(execution: Execution, reader: int, response: CompletionResponse, send: Send) -> None:
    """Sends the response as a stream, from the first event on: an error before it has its own status."""
    chunks = await execution.read(reader)
    response.begin(execution.started)
    events, failure = await _events(response, chunks)
    if failure is not None and not events:
        raise failure
    await send({"type": "http.response.start", "status": 200, "headers": _EVENT_STREAM})
    events[:0] = map(event, response.first_events())
    while True:
        await _send(send, b"".join(events))
        if failure is not None:
            raise failure
        chunks = await execution.read(reader)
        if not chunks:
            break
        events, failure = await _events(response, chunks)
    end = b"".join(map(event, response.last_events())) + b"data: [DONE]\n\n"
    await send({"type": "http.response.body", "body": end})


async def _events(
    response: CompletionResponse, chunks: Sequence[runner_pb2.SampleChunk]
) -> tuple[list[bytes], QuireError | None]:
    """The events of chunks up to the first failed sample, and its error."""
    events: list[bytes] = []
    time_slice = TimeSlice()
    try:
        for chunk in chunks:
            events.extend(map(event, response.events(chunk)))
            if time_slice.due:
                await time_slice.yield_to_others()
    except QuireError as error:
        return events, error.without_traceback()
    return events, None


async def _send(send: Send, body: bytes) -> None:
    if body:
        await send({"type": "http.response.body", "body": body, "more_body": True})


def event(value: object) -> bytes:
    """A server-sent event."""
    return f"data: {to_json(value)}\n\n".encode()


class RunningRequests:
    """Runs requests. Each ends when its client disconnects, and all when the server stops."""

    def __init__(self) -> None:
        self._stopping = asyncio.Event()
        self._running = 0

    async def stop(self, grace_s: float) -> None:
        """Waits `grace_s` for running requests, then ends them and all later ones."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                # Polled, since it happens once.
                while self._running:  # noqa: ASYNC110
                    await asyncio.sleep(_POLL_S)
        self._stopping.set()

    async def run(self, receive: Receive, work: Coroutine[Any, Any, None]) -> None:
        """Runs `work` for a request whose body has been received.

        Raises what `work` raises; Draining if the server stops; CancelledError if the client disconnects.
        """
        working = asyncio.create_task(work)
        disconnecting = asyncio.create_task(_disconnected(receive))
        stopping = asyncio.create_task(self._stopping.wait())
        tasks = working, disconnecting, stopping
        self._running += 1
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            is_stopping = stopping.done()
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            self._running -= 1
        if not working.cancelled():
            working.result()
        elif is_stopping:
            raise Draining
        else:
            raise asyncio.CancelledError


async def _disconnected(receive: Receive) -> None:
    """Returns when the client disconnects, or the response is complete."""
    while (await receive())["type"] != "http.disconnect":
        pass
