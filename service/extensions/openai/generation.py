"""Handles a request for text or tokens: runs it as an execution, and sends the response.

The execution ends at once if the client disconnects or does not read for too long.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

import grpc
from quire.v1 import executor_pb2, runner_pb2, types_pb2
from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from service.api.server_state import ServerState
from service.api.time_slice import TimeSlice
from service.auth.authenticator import current_tenant
from service.budgets import SMALL_BYTES
from service.errors import InvalidArgument, QuireError
from service.extensions.openai.bodies import Body, BodyReader
from service.extensions.openai.errors import of_prompt, of_request
from service.extensions.openai.models import Models, ResolvedModel
from service.extensions.openai.prompts import Prompt, prompts_of
from service.extensions.openai.requests import CompletionRequest
from service.extensions.openai.responses import CompletionResponse
from service.extensions.openai.token_texts import TokenTexts
from service.runtimes.answer_parts import formats_of_model
from service.runtimes.execution import Execution
from service.runtimes.executions import Executions
from service.runtimes.items import FORK_REQUESTS, num_samples
from service.text.text_model import TextModel

# The method Forward of the API.
Forward: TypeAlias = Callable[
    [executor_pb2.ForwardRequest, "grpc.aio.ServicerContext[Any, Any]"],
    Awaitable[executor_pb2.ForwardResponse],
]
# The approximate size of the parts that a response is sent in.
_PART_BYTES = 1 << 16
JSON = (b"content-type", b"application/json")
_EVENT_STREAM = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    # Proxies must not buffer the stream.
    (b"x-accel-buffering", b"no"),
]


@dataclass(frozen=True, eq=False)
class CompletionHandler:
    """The ASGI application for completions or chats, depending on `parse`.

    `parse` makes a request of a body and `resolve`; and of the messages that it continues, if there are any,
    as the argument `earlier`.
    """

    parse: Callable[..., CompletionRequest]
    executions: Executions
    models: Models
    state: ServerState
    text: TextModel
    body_reader: BodyReader
    # Scores prompts.
    forward: Forward
    response: Callable[[CompletionRequest, TokenTexts, Sequence[Prompt]], CompletionResponse] = (
        CompletionResponse
    )
    needs_text: bool = True
    # The messages that a request continues, as JSON. Empty: none.
    earlier: Callable[[object], bytes] = lambda _: b""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Raises QuireError."""
        request = Request(scope, receive)
        async with self.body_reader.read(request) as (value, body):
            parsed = [value]
            del value
            await until_disconnected(receive, self._handle(parsed, body, scope, send))

    async def _handle(self, parsed: list[object], body: Body, scope: Scope, send: Send) -> None:
        """`parsed`: the value; it is emptied here to free memory, since parsed numbers take much of it."""
        (value,) = parsed
        going_on = {}
        if data := self.earlier(value):
            body.hold(len(data))
            going_on["earlier"] = await self.body_reader.parse(bytearray(data))
        if not (isinstance(value, dict) and self.models.is_remote(value.get("model"))):
            await self.state.first_worker(None)
        completion_request = self.parse(value, self._resolve, **going_on)
        parsed.clear()
        del value, going_on
        body.hold(completion_request.copied_bytes)
        try:
            await self._answer(completion_request, scope, send)
        except QuireError as error:
            raise of_request(error, completion_request.param_of) from None

    async def _answer(self, completion_request: CompletionRequest, scope: Scope, send: Send) -> None:
        """Runs a request as an execution, and sends its response. Raises QuireError."""
        tenant, items = current_tenant(), completion_request.items
        if tenant is not None:
            # Otherwise the first sample above the quota would end the response, and waste the others.
            is_local = completion_request.model.is_local
            samples = [num_samples(item) if is_local else 1 for item in items]
            tenant.require_at_once(sum(samples) + FORK_REQUESTS * sum(number > 1 for number in samples))
        async with self._response(completion_request) as response:
            # Built here because `_response` may have tokenized prompts.
            request = runner_pb2.ExecuteRequest(
                runtime=completion_request.model.runtime,
                items=items,
                priority=completion_request.priority,
            )
            execution = self.executions.open(request, tenant, None)
            reader = execution.attach({})
            send_response = self._send_stream if completion_request.is_stream else self._send_whole
            try:
                await send_response(execution, reader, response, send)
            finally:
                execution.detach(reader)
                scope["quire.answer"] = _described(execution.started, response)

    def _resolve(self, model: str) -> ResolvedModel:
        return self.models.resolve(model, needs_text=self.needs_text)

    @asynccontextmanager
    async def _response(self, request: CompletionRequest) -> AsyncIterator[CompletionResponse]:
        """Prepares the response. The context ends when it is sent."""
        prompts, tokenizer = list[Prompt](), None
        if request.model.is_local:
            prompts = await prompts_of(request, self.text, formats_of_model(self.state))
            if self.needs_text and (request.has_logprobs or request.num_scored is not None):
                tokenizer = await self.text.tokenizer()
        if request.experts is not None:
            request.experts.model = self.state.first_ready.model
        with ForwardContext() as context:
            for index, (item, prompt) in enumerate(zip(request.items, prompts, strict=False)):
                with of_prompt(index, len(request.items), request.param_of):
                    await self._score(request, item, prompt, context)
            yield self.response(request, TokenTexts(tokenizer), prompts)

    async def _score(
        self,
        request: CompletionRequest,
        item: runner_pb2.ExecuteItem,
        prompt: Prompt,
        context: ForwardContext,
    ) -> None:
        """Scores the part of a prompt that is returned: all of it, the tokens with experts, or nothing."""
        wanted = request.experts
        if wanted is not None:
            wanted.check(len(prompt.token_ids))
        if request.num_scored is None:
            # The execution returns the experts of the last token.
            if wanted is None or wanted.start >= len(prompt.token_ids) - 1:
                return
            prompt.scored_from = wanted.start
        prompt.scored = await self.forward(
            executor_pb2.ForwardRequest(
                token_ids=prompt.token_ids,
                score_from=prompt.scored_from + 1 if prompt.scored_from else None,
                output=types_pb2.OutputOptions(
                    top_logprobs=request.num_scored or 0, experts=wanted is not None
                ),
                priority=request.priority,
                adapter_id=request.model.adapter_id,
                cache_salt=item.cache_salt,
            ),
            cast("Any", context),
        )

    async def _send_whole(
        self, execution: Execution, reader: int, response: CompletionResponse, send: Send
    ) -> None:
        """Sends the response in one piece. Its chunks count as unread answers until it is sent."""
        held_bytes = large_bytes = 0
        answers = self.state.budgets.of(current_tenant()).answers
        time_slice = TimeSlice()
        try:
            while chunks := await execution.read(reader):
                time_slice.begin()
                response.begin(execution.started)
                for chunk in chunks:
                    size_bytes = response.add(chunk)
                    answers.take(size_bytes)
                    held_bytes += size_bytes
                    if size_bytes > SMALL_BYTES:
                        large_bytes += size_bytes
                    if time_slice.due:
                        await time_slice.yield_to_others()
                if held_bytes > self.state.config.max_response_bytes:
                    text = "the response is too large for one piece: use a stream"
                    raise InvalidArgument("OUTPUT_TOO_LARGE", "max_tokens", text)
            body = ResponseBody(send, [JSON])
            await body.write(response.pieces())
            await body.end()
        finally:
            answers.adjust(-large_bytes, is_large=True)
            answers.adjust(large_bytes - held_bytes)

    async def _send_stream(
        self, execution: Execution, reader: int, response: CompletionResponse, send: Send
    ) -> None:
        """Sends the response as a stream. The first event starts it: an error before has its own status."""
        body = ResponseBody(send, _EVENT_STREAM)
        held_bytes = 0
        answers = self.state.budgets.of(current_tenant()).answers
        try:
            while chunks := await execution.read(reader):
                # Experts are kept until a choice ends.
                for experts in (each for chunk in chunks for each in chunk.experts):
                    answers.take(len(experts))
                    held_bytes += len(experts)
                response.begin(execution.started)
                try:
                    await body.write(
                        response.frame(each) for chunk in chunks for each in response.events(chunk)
                    )
                except QuireError:
                    # Send the events before a failed sample.
                    await body.flush()
                    raise
                await body.flush()
            await body.write(map(response.frame, response.last_events()))
            await body.write([response.last_frame])
            await body.end()
        finally:
            answers.adjust(-held_bytes)


class ForwardContext(ExitStack):
    """Stands in for the gRPC context of a Forward. The answer counts until the response is sent."""

    def time_remaining(self) -> None:
        """Returns None: there is no deadline."""

    def add_done_callback(self, callback: Callable[[object], None]) -> None:
        self.callback(callback, self)


class ResponseBody:
    """Sends a response in parts, as fast as the client reads. The first part starts the response."""

    def __init__(self, send: Send, headers: Sequence[tuple[bytes, bytes]]) -> None:
        self._send = send
        self._headers = headers
        self._has_begun = False
        self._parts: list[str] = []
        self._num_characters = 0

    async def write(self, texts: Iterable[str]) -> None:
        """Adds texts, and sends full parts. Other tasks run between the texts."""
        time_slice = TimeSlice()
        for text in texts:
            self._parts.append(text)
            self._num_characters += len(text)
            if self._num_characters >= _PART_BYTES:
                await self.flush()
            if time_slice.due:
                await time_slice.yield_to_others()

    async def flush(self) -> None:
        if self._parts:
            await self._begin(self._headers)
            await self._send({"type": "http.response.body", "body": self._take(), "more_body": True})

    async def end(self) -> None:
        """Ends the response. A response that fits into one part has a content-length."""
        last = self._take()
        await self._begin([*self._headers, (b"content-length", str(len(last)).encode())])
        await self._send({"type": "http.response.body", "body": last})

    async def _begin(self, headers: Sequence[tuple[bytes, bytes]]) -> None:
        if not self._has_begun:
            self._has_begun = True
            await self._send({"type": "http.response.start", "status": 200, "headers": headers})

    def _take(self) -> bytes:
        taken = "".join(self._parts).encode()
        self._parts, self._num_characters = [], 0
        return taken


def _described(started: runner_pb2.ExecutionStarted, response: CompletionResponse) -> dict[str, str | int]:
    """The attributes of an answer for traces."""
    model, usage = started.model_id, response.usage()
    models = {"gen_ai.request.model": model, "gen_ai.response.model": model} if model else {}
    return {
        "quire.runtime": started.runtime,
        **models,
        "gen_ai.usage.input_tokens": usage["prompt_tokens"],
        "gen_ai.usage.output_tokens": usage["completion_tokens"],
    }


async def until_disconnected(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Runs `work` for a request whose body has been received.

    Raises what `work` raises; CancelledError if the client disconnects.
    """
    tasks = working, _ = asyncio.create_task(work), asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
    working.result()


async def _disconnected(receive: Receive) -> None:
    """Returns when the client disconnects, or the response is complete."""
    while (await receive())["type"] != "http.disconnect":
        pass
