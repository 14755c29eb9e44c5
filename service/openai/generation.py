"""One request for text: its body becomes a batch, and what comes of that its answer.

A client who leaves, or reads nothing for too long, ends its batch at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from quire.v1 import runner_pb2
from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from service.api.breath import Breather
from service.api.server_state import ServerState
from service.doors.doors import current_tenant
from service.errors import InvalidArgument, QuireError
from service.openai.answers import Answer, to_json
from service.openai.bodies import Bodies, Body
from service.openai.models import Models
from service.openai.requests import Asked, Find
from service.openai.token_texts import TokenTexts
from service.openai.wanted import Wanted
from service.runtimes.execution import Execution
from service.runtimes.executions import Executions
from service.text.text_model import TextModel

# So much of a whole answer is sent at once.
_SENT_BYTES = 1 << 16
_JSON = (b"content-type", b"application/json")
_EVENT_STREAM = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    # Proxies are to pass on each token as it comes.
    (b"x-accel-buffering", b"no"),
]


class Generation:
    """Answers requests of one form: completions, or chats. An ASGI application."""

    def __init__(
        self,
        parse: Callable[[object, Find], Asked],
        executions: Executions,
        models: Models,
        state: ServerState,
        text: TextModel,
        wanted: Wanted,
        bodies: Bodies,
    ) -> None:
        self._parse = parse
        self._executions = executions
        self._models = models
        self._state = state
        self._wanted = wanted
        self._bodies = bodies
        self._text = text

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Raises QuireError."""
        request = Request(scope, receive)
        async with self._bodies.received(request) as body:
            await self._wanted.run(receive, self._answer(body, send))

    async def _answer(self, body: Body, send: Send) -> None:
        value = await self._bodies.parsed(body)
        if not (isinstance(value, dict) and self._models.is_remote(value.get("model"))):
            await self._state.first_worker(None)
        asked = self._parse(value, self._models.find)
        answer = Answer(asked, await self._token_texts(asked))
        request = runner_pb2.ExecuteRequest(runtime=asked.served.runtime, items=asked.items)
        execution = self._executions.open(request, current_tenant(), None)
        reader = execution.attach({})
        try:
            if asked.is_stream:
                await _stream(execution, reader, answer, send)
            else:
                await self._whole(execution, reader, answer, send)
        finally:
            execution.detach(reader)

    async def _token_texts(self, asked: Asked) -> TokenTexts:
        wants_texts = asked.has_logprobs and asked.served.is_local
        return TokenTexts(await self._text.tokenizer() if wants_texts else None)

    async def _whole(self, execution: Execution, reader: int, answer: Answer, send: Send) -> None:
        """The answer in one piece. What is gathered for it counts as not read, until it was sent."""
        held_bytes = 0
        breather = Breather()
        try:
            while chunks := await execution.read(reader):
                breather.begin()
                answer.begin(execution.started)
                for chunk in chunks:
                    size_bytes = answer.take(chunk)
                    self._state.answers.take(size_bytes)
                    held_bytes += size_bytes
                    if breather.due:
                        await breather.breathe()
                if held_bytes > self._state.config.max_response_bytes:
                    text = "the answer is too large for one piece: ask for a stream"
                    raise InvalidArgument("OUTPUT_TOO_LARGE", "max_tokens", text)
            await _write(answer, send)
        finally:
            self._state.answers.exchange(held_bytes, 0)


async def _write(answer: Answer, send: Send) -> None:
    """Sends a whole answer as its client reads it; a short one with its length."""
    breather = Breather()
    parts: list[str] = []
    num_characters = 0
    has_begun = False
    for part in answer.pieces():
        parts.append(part)
        num_characters += len(part)
        if num_characters >= _SENT_BYTES:
            if not has_begun:
                await send({"type": "http.response.start", "status": 200, "headers": [_JSON]})
                has_begun = True
            await _send(send, "".join(parts).encode())
            parts, num_characters = [], 0
        if breather.due:
            await breather.breathe()
    last = "".join(parts).encode()
    if not has_begun:
        headers = [_JSON, (b"content-length", str(len(last)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": last})


async def _stream(execution: Execution, reader: int, answer: Answer, send: Send) -> None:
    """The answer as it comes. Nothing is sent until there is something to say: it may be a failure."""
    chunks = await execution.read(reader)
    answer.begin(execution.started)
    events, failure = await _events(answer, chunks)
    if failure is not None and not events:
        raise failure
    await send({"type": "http.response.start", "status": 200, "headers": _EVENT_STREAM})
    events[:0] = map(event, answer.roles())
    while True:
        await _send(send, b"".join(events))
        if failure is not None:
            raise failure
        chunks = await execution.read(reader)
        if not chunks:
            break
        events, failure = await _events(answer, chunks)
    end = b"".join(map(event, answer.last())) + b"data: [DONE]\n\n"
    await send({"type": "http.response.body", "body": end})


async def _events(
    answer: Answer, chunks: Sequence[runner_pb2.SampleChunk]
) -> tuple[list[bytes], QuireError | None]:
    """What is said of chunks, up to the failure of a sample if there is one."""
    events: list[bytes] = []
    breather = Breather()
    try:
        for chunk in chunks:
            events.extend(map(event, answer.events(chunk)))
            if breather.due:
                await breather.breathe()
    except QuireError as error:
        return events, error.untraced()
    return events, None


async def _send(send: Send, body: bytes) -> None:
    if body:
        await send({"type": "http.response.body", "body": body, "more_body": True})


def event(value: object) -> bytes:
    """A server-sent event."""
    return f"data: {to_json(value)}\n\n".encode()
