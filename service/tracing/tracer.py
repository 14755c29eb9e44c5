"""A span of each call, exported to an OpenTelemetry collector.

The SDK's own thread exports batches. While the collector is slow or down, ended spans wait in the SDK's
bounded queue, and those that do not fit are dropped: nothing here blocks the event loop. Spans have no
contents of requests, and nothing that names a tenant or a cache.

The SDK reads further settings from its standard environment variables: OTEL_SERVICE_NAME,
OTEL_RESOURCE_ATTRIBUTES, OTEL_TRACES_SAMPLER, OTEL_BSP_* and OTEL_EXPORTER_OTLP_*.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from importlib import metadata
from typing import Any

import grpc
from google.rpc import status_pb2
from opentelemetry.context import Context as TraceContext
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import (
    INVALID_SPAN,
    NonRecordingSpan,
    Span,
    SpanContext,
    SpanKind,
    TraceFlags,
    TraceState,
    format_trace_id,
    set_span_in_context,
)
from quire.v1 import admin_pb2, executor_pb2, runner_pb2

from service.api.interceptor import Behaviour
from service.api.trace_context import TRACEPARENT, TraceParent, trace_parent
from service.logging import bind_trace_id, current_request_id
from service.tracing.streams import STREAMS, reason_of, set_error

# What the collector gets of the last spans, when the server stops.
_CLOSE_S = 2.0
_ROOT = TraceContext()
# It warns of each invalid `tracestate`, with its text.
logging.getLogger("opentelemetry.trace.span").setLevel(logging.ERROR)
# Without these, a caller could name spans as it likes.
_METHODS = {
    f"/{service.full_name}/{method.name}": (service.full_name, method.name)
    for file in (admin_pb2, executor_pb2, runner_pb2)
    for service in file.DESCRIPTOR.services_by_name.values()
    for method in service.methods
}


class CallTracer:
    """Owner of the exporter and its thread."""

    def __init__(self, endpoint: str) -> None:
        """`endpoint`: the collector's URL. Connections are made, and made again, by the exporter's thread."""
        own = Resource.create(
            {"service.name": "quire", "service.version": metadata.version("quire-llm-server")}
        )
        self._exporter = OTLPSpanExporter(endpoint=endpoint)
        self._processor = BatchSpanProcessor(self._exporter)
        # The environment comes first.
        provider = TracerProvider(resource=own.merge(OTELResourceDetector().detect()), shutdown_on_exit=False)
        provider.add_span_processor(self._processor)
        self._tracer = provider.get_tracer("quire")

    def observing(self, method: str, behaviour: Behaviour) -> Behaviour:
        """Returns a behaviour whose calls have spans. Health checks and reflection have none."""
        if method not in _METHODS:
            return behaviour
        service, name = _METHODS[method]
        attributes = {
            "rpc.system": "grpc",
            "rpc.service": service,
            "rpc.method": name,
            "rpc.grpc.status_code": 0,
        }
        start, stream_type = self._tracer.start_span, STREAMS.get(name)

        async def handle(messages: Any, context: Any) -> Any:
            parent = _parent(context.invocation_metadata() or ())
            span = start(f"{service}/{name}", parent, SpanKind.SERVER, attributes)
            bind_trace_id(format_trace_id(span.get_span_context().trace_id))
            stream = None
            if stream_type is not None and span.is_recording():
                context = stream = stream_type(context, span)
            try:
                return await behaviour(messages, context)
            except BaseException as error:
                if context.code() is grpc.StatusCode.UNAUTHENTICATED:
                    # A span that does not end is not exported: anybody could push out those of callers.
                    span = INVALID_SPAN
                _end(span, error, context)
                raise
            finally:
                span.set_attribute("quire.request_id", current_request_id())
                if stream is not None:
                    stream.finish()
                span.end()

        return handle

    def close(self) -> None:
        """Exports the last spans, for two seconds at most."""
        closing = threading.Thread(target=self._processor.shutdown, name="traces", daemon=True)
        closing.start()
        closing.join(_CLOSE_S)
        if closing.is_alive():
            self._exporter.shutdown()


def _parent(pairs: Any) -> TraceContext:
    """The caller's span, or nothing if the metadata has none that is valid."""
    parent: TraceParent | None = None
    state = ""
    for key, value in pairs:
        if key == TRACEPARENT:
            parent = trace_parent(value)
        elif key == "tracestate":
            state = value
    if parent is None:
        return _ROOT
    ids, flags = (int(parent.trace_id, 16), int(parent.span_id, 16)), TraceFlags(parent.is_sampled)
    span_context = SpanContext(*ids, True, flags, TraceState.from_header([state]) if state else None)
    return set_span_in_context(NonRecordingSpan(span_context), _ROOT)


def _end(span: Span, error: BaseException, context: Any) -> None:
    """Writes how a call ended that raised an error. Its status was sent already."""
    code = grpc.StatusCode.CANCELLED if isinstance(error, asyncio.CancelledError) else context.code()
    code = code if isinstance(code, grpc.StatusCode) else grpc.StatusCode.UNKNOWN
    span.set_attribute("rpc.grpc.status_code", code.value[0])
    if code is not grpc.StatusCode.CANCELLED:
        details = dict(context.trailing_metadata() or ()).get("grpc-status-details-bin", b"")
        set_error(span, reason_of(status_pb2.Status.FromString(details)) or code.name)
