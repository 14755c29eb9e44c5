"""A span of each call, exported to an OpenTelemetry collector.

The SDK's own thread exports batches. While the collector is slow or down, ended spans wait in the SDK's
bounded queue, and those that do not fit are dropped: nothing here blocks the event loop. Spans have no
contents of requests, and nothing that names a tenant or a cache.

The SDK reads further settings from its standard environment variables: OTEL_SERVICE_NAME,
OTEL_RESOURCE_ATTRIBUTES, OTEL_BSP_* and OTEL_EXPORTER_OTLP_*.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Any

import grpc
from google.rpc import status_pb2
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from quire.v1 import admin_pb2, executor_pb2, runner_pb2

from service.api.grpc_services import methods_of
from service.api.interceptor import Behaviour
from service.extensions.tracing.http import TracedHttp
from service.extensions.tracing.spans import Sampler, SpanExporter, set_error, template
from service.extensions.tracing.streams import STREAMS, reason_of
from service.logging import current_request_id

# What the collector gets of the last spans, when the server stops.
_CLOSE_S = 2.0
# Without these, a caller could name spans as it likes.
_METHODS = methods_of(admin_pb2, executor_pb2, runner_pb2)
# The places of attributes that are set at the end.
_CODE, _REQUEST_ID = 0, 1


class CallTracer:
    """Owner of the exporter and its thread."""

    def __init__(self, endpoint: str) -> None:
        """`endpoint`: the collector's URL. Connections are made, and made again, by the exporter's thread."""
        self._exporter = SpanExporter(endpoint)
        self._processor = BatchSpanProcessor(self._exporter)
        # Its own method is for spans of the SDK only.
        self._emit: Callable[[Any], None] = self._processor._batch_processor.emit  # noqa: SLF001
        self._sampler = Sampler()

    def observing(self, method: str, behaviour: Behaviour) -> Behaviour:
        """Returns a behaviour whose calls have spans. Health checks and reflection have none."""
        if method not in _METHODS:
            return behaviour
        service, name = _METHODS[method].containing_service.full_name, _METHODS[method].name
        attributes: dict[str, str | int] = {
            "rpc.grpc.status_code": 0,
            "quire.request_id": "",
            "rpc.system": "grpc",
            "rpc.service": service,
            "rpc.method": name,
        }
        start, emit, stream_type = self._sampler.begin, self._emit, STREAMS.get(name)
        new = template(f"{service}/{name}", attributes)

        async def handle(messages: Any, context: Any) -> Any:
            span = start(new, context.invocation_metadata() or ())
            if span is None:
                return await behaviour(messages, context)
            stream = None
            if stream_type is not None:
                context = stream = stream_type(context, span)
            try:
                return await behaviour(messages, context)
            except BaseException as error:
                if context.code() is grpc.StatusCode.UNAUTHENTICATED:
                    # Otherwise anybody could push out the spans of callers.
                    span = None
                else:
                    _end(span, error, context)
                raise
            finally:
                if span is not None:
                    if stream is not None:
                        stream.finish()
                    span.attributes[_REQUEST_ID].value.string_value = current_request_id()
                    span.end_time_unix_nano = time.time_ns()
                    emit(span.SerializeToString())

        return handle

    def http(self, app: Any) -> TracedHttp:
        """Returns an ASGI application whose requests have spans."""
        return TracedHttp(app, self._sampler, self._emit)

    def close(self) -> None:
        """Exports the last spans, for two seconds at most."""
        closing = threading.Thread(target=self._processor.shutdown, name="traces", daemon=True)
        closing.start()
        closing.join(_CLOSE_S)
        if closing.is_alive():
            self._exporter.shutdown()


def _end(span: Span, error: BaseException, context: Any) -> None:
    """Writes how a call ended that raised an error. Its status was sent already."""
    code = grpc.StatusCode.CANCELLED if isinstance(error, asyncio.CancelledError) else context.code()
    code = code if isinstance(code, grpc.StatusCode) else grpc.StatusCode.UNKNOWN
    span.attributes[_CODE].value.int_value = code.value[0]
    if code is not grpc.StatusCode.CANCELLED:
        details = dict(context.trailing_metadata() or ()).get("grpc-status-details-bin", b"")
        set_error(span, reason_of(status_pb2.Status.FromString(details)) or code.name)
