"""Creates spans with OpenTelemetry's SDK, in the traces of their callers, and exports them.

OTEL_TRACES_SAMPLER decides which spans are recorded. The SDK's thread exports batches from a bounded queue.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Mapping
from importlib import metadata
from typing import Any
from urllib.parse import urlsplit

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, format_span_id, format_trace_id
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from service.api.trace_context import TRACEPARENT, bind_traceparent
from service.logging import bind_trace_id
from service.outbound import is_this_machine
from workers.common.protocol import DIRECT

# How long a connection attempt may take. The default of 20 s would delay the end of the process.
_CHANNEL_OPTIONS: Any = (("grpc.min_reconnect_backoff_ms", 2_000),)
# How long the export of the last spans may take when the server stops.
_CLOSE_S = 2.0
_CARRIED = (TRACEPARENT, "tracestate")
# It logs a warning for each invalid header, sometimes with its contents.
logging.getLogger("opentelemetry.trace").setLevel(logging.ERROR)


class Spans:
    """Creates spans. Owner of the SDK's provider, its thread and its connection."""

    def __init__(self, endpoint: str) -> None:
        """`endpoint`: the collector's URL. It is connected to, and reconnected, by exports."""
        is_here = is_this_machine(urlsplit(endpoint).hostname or "")
        options = (*_CHANNEL_OPTIONS, DIRECT) if is_here else _CHANNEL_OPTIONS
        self._exporter = OTLPSpanExporter(endpoint=endpoint, channel_options=options)
        own = {"service.name": "quire", "service.version": metadata.version("quire-llm-server")}
        # Variables of the environment override our own.
        resource = Resource.create(own).merge(OTELResourceDetector().detect())
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(self._exporter))
        self._tracer = self._provider.get_tracer("quire")
        self._propagator = TraceContextTextMapPropagator()

    def begin(
        self, name: str, attributes: Mapping[str, str | int], pairs: Iterable[tuple[str, Any]]
    ) -> Span | None:
        """Starts the span of a call, in the trace that its metadata `pairs` name. None: it is not recorded.

        Binds the trace for the log and for calls to other servers.
        """
        carried = {key: value for key, value in pairs if key in _CARRIED and isinstance(value, str)}
        # An empty context, since that of this task may have another span.
        parent = self._propagator.extract(carried, Context()) if carried else Context()
        span = self._tracer.start_span(name, parent, SpanKind.SERVER, attributes)
        found = span.get_span_context()
        # Not valid with OTEL_SDK_DISABLED.
        if found.is_valid:
            trace = format_trace_id(found.trace_id)
            bind_trace_id(trace)
            bind_traceparent(f"00-{trace}-{format_span_id(found.span_id)}-{found.trace_flags:02x}")
        return span if span.is_recording() else None

    def close(self) -> None:
        """Exports the last spans, for two seconds at most."""
        closing = threading.Thread(target=self._provider.shutdown, name="traces", daemon=True)
        closing.start()
        closing.join(_CLOSE_S)
        if closing.is_alive():
            self._exporter.shutdown()


def set_error(span: Span, reason: str) -> None:
    """Marks a span as failed. Of several reasons the last one is kept."""
    span.set_attribute("error.type", reason)
    span.set_status(Status(StatusCode.ERROR, reason))
