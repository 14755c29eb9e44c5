"""A span for each call. Spans have no contents of requests, and nothing that names a tenant or a cache."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
from google.rpc import status_pb2
from opentelemetry.trace import Span
from quire.v1 import admin_pb2, executor_pb2, runner_pb2

from service.api.grpc_services import methods_of
from service.api.interceptor import Behaviour
from service.extension import Extension
from service.extensions.tracing.http import TracedHttp
from service.extensions.tracing.spans import Spans, set_error
from service.extensions.tracing.streams import STREAMS, reason_of
from service.logging import current_request_id

# Only these get spans: otherwise a caller could give spans any name.
_METHODS = methods_of(admin_pb2, executor_pb2, runner_pb2)
_CODE = "rpc.grpc.status_code"


class Tracing(Extension):
    """The extension: spans of calls and of HTTP requests."""

    def __init__(self, endpoint: str) -> None:
        """`endpoint`: the collector's URL."""
        self._spans = Spans(endpoint)
        self.calls, self.http = self._traced, lambda app: TracedHttp(app, self._spans)

    def close(self) -> None:
        """Exports the last spans."""
        self._spans.close()

    def _traced(self, method: str, behaviour: Behaviour) -> Behaviour:
        """Returns a wrapper of a behaviour that makes spans; none for health checks and reflection."""
        if method not in _METHODS:
            return behaviour
        service, name = _METHODS[method].containing_service.full_name, _METHODS[method].name
        attributes = {"rpc.system": "grpc", "rpc.service": service, "rpc.method": name}
        begin, span_name, stream_type = self._spans.begin, f"{service}/{name}", STREAMS.get(name)

        async def handle(messages: Any, context: Any) -> Any:
            span = begin(span_name, attributes, context.invocation_metadata() or ())
            if span is None:
                return await behaviour(messages, context)
            stream = None
            if stream_type is not None:
                context = stream = stream_type(context, span)
            code = grpc.StatusCode.OK
            try:
                return await behaviour(messages, context)
            except BaseException as error:
                code = _describe(span, error, context)
                raise
            finally:
                # Otherwise unauthenticated calls could push the spans of others out of the queue.
                if code is not grpc.StatusCode.UNAUTHENTICATED:
                    if stream is not None:
                        stream.finish()
                    span.set_attributes({"quire.request_id": current_request_id(), _CODE: code.value[0]})
                    span.end()

        return handle


def _describe(span: Span, error: BaseException, context: Any) -> grpc.StatusCode:
    """Sets the attributes of a failed call. Returns its status code, which was sent already."""
    code = grpc.StatusCode.CANCELLED if isinstance(error, asyncio.CancelledError) else context.code()
    code = code if isinstance(code, grpc.StatusCode) else grpc.StatusCode.UNKNOWN
    if code is not grpc.StatusCode.CANCELLED:
        details = dict(context.trailing_metadata() or ()).get("grpc-status-details-bin", b"")
        set_error(span, reason_of(status_pb2.Status.FromString(details)) or code.name)
    return code
