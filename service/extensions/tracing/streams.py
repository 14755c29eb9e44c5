"""Span attributes of Session and Execute: sums over their answers, and a bounded number of events.

Each class wraps the call's context and reads the messages written to it. Nothing is stored per token.
"""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Any

from google.rpc import error_details_pb2, status_pb2
from opentelemetry.trace import Span
from quire.v1 import executor_pb2, runner_pb2

from service.extensions.tracing.spans import set_error

# The most failures that become events. All are counted.
_MAX_EVENTS = 32


class TracedStream:
    """Wraps the context of a stream of answers: its `write` also updates the span."""

    def __init__(self, context: Any, span: Span) -> None:
        self._context, self._span, self._write = context, span, context.write
        # Used with each call on a Session.
        self.time_remaining = context.time_remaining
        self._has_begun = False
        self._failures = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)

    def finish(self) -> None:
        self._span.set_attribute("quire.failures", self._failures)

    def _begin(self, event: str) -> None:
        self._has_begun = True
        self._span.add_event(event)

    def _fail(self, status: status_pb2.Status) -> str:
        """Counts a failure. Returns its reason."""
        reason = reason_of(status)
        self._failures += 1
        if self._failures <= _MAX_EVENTS:
            self._span.add_event("failure", {"error.type": reason})
        return reason


class TracedSession(TracedStream):
    """The span of a Session: the number of answered calls, when the first was answered, and failures."""

    _answers = 0

    def write(self, message: executor_pb2.SessionResponse) -> Awaitable[None]:
        if not self._has_begun:
            self._begin("first answer")
        self._answers += len(message.results)
        for result in message.results:
            if result.HasField("error"):
                self._fail(result.error)
        written: Awaitable[None] = self._write(message)
        return written

    def finish(self) -> None:
        super().finish()
        self._span.set_attribute("quire.answers", self._answers)


class TracedExecute(TracedStream):
    """The span of an Execute: model, runtime, numbers of tokens, when the first came, and failed samples."""

    _input_tokens = _output_tokens = 0

    def write(self, message: runner_pb2.ExecuteResponse) -> Awaitable[None]:
        if message.started.runtime:
            self._span.set_attribute("quire.runtime", message.started.runtime)
            if model := message.started.model_id:
                self._span.set_attribute("gen_ai.request.model", model)
                self._span.set_attribute("gen_ai.response.model", model)
        for chunk in message.chunks:
            if not self._has_begun and (chunk.token_ids or chunk.text):
                self._begin("first token")
            if chunk.finish_reason:
                self._end(chunk)
        written: Awaitable[None] = self._write(message)
        return written

    def _end(self, chunk: runner_pb2.SampleChunk) -> None:
        self._output_tokens += chunk.usage.output_tokens
        if not chunk.sample:
            # The samples of an item share its prompt, so it is counted once.
            self._input_tokens += chunk.usage.input_tokens
        if chunk.HasField("error"):
            set_error(self._span, self._fail(chunk.error))

    def finish(self) -> None:
        super().finish()
        self._span.set_attribute("gen_ai.operation.name", "generate_content")
        self._span.set_attribute("gen_ai.usage.input_tokens", self._input_tokens)
        self._span.set_attribute("gen_ai.usage.output_tokens", self._output_tokens)


# The class for each method with a stream.
STREAMS: dict[str, type[TracedSession | TracedExecute]] = {"Session": TracedSession, "Execute": TracedExecute}


def reason_of(status: status_pb2.Status) -> str:
    """The reason in a status's details. Empty if there is none."""
    info = error_details_pb2.ErrorInfo()
    return next((info.reason for detail in status.details if detail.Unpack(info)), "")
