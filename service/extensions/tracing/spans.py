"""Spans in the form in which they are sent: a message of OTLP, which the call itself fills in.

The SDK's own spans took 19 us to make and 25 us to translate into this form, which its thread did under
Python's lock. What remains of the SDK is the queue, its thread, the connection, and the resource.
"""

from __future__ import annotations

import logging
import os
import random
import time
from collections.abc import Mapping, Sequence
from importlib import metadata
from typing import Any
from urllib.parse import urlsplit

import grpc
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse
from opentelemetry.proto.trace.v1.trace_pb2 import Span, SpanFlags, Status
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, TraceState

from service.api.parsing import to_varint
from service.api.trace_context import TRACEPARENT, TraceParent, bind_traceparent, trace_parent
from service.logging import bind_trace_id, get_logger
from service.outbound import is_this_machine
from workers.common.protocol import DIRECT

_log = get_logger(__name__)
_SAMPLER, _SAMPLER_ARG = "OTEL_TRACES_SAMPLER", "OTEL_TRACES_SAMPLER_ARG"
_FOLLOWING = "parentbased_"
# Of a trace and a span.
_ID_BYTES = 16 + 8
_EXPORT = "/opentelemetry.proto.collector.trace.v1.TraceService/Export"
# How long a collector may take to speak HTTP/2. By default 20 s, for which the end of the process would wait.
_CHANNEL_OPTIONS: Any = (("grpc.min_reconnect_backoff_ms", 2_000),)
# A span without a parent has the first only.
_FLAGS = SpanFlags.SPAN_FLAGS_CONTEXT_HAS_IS_REMOTE_MASK
_REMOTE_FLAGS = _FLAGS | SpanFlags.SPAN_FLAGS_CONTEXT_IS_REMOTE_MASK
# It warns of each invalid `tracestate`, with its text.
logging.getLogger("opentelemetry.trace.span").setLevel(logging.ERROR)


class Sampler:
    """What is recorded, as OTEL_TRACES_SAMPLER says: decides as the SDK's samplers, without their objects."""

    def __init__(self) -> None:
        """Warns of values that are not valid, and records as if there were none."""
        name = os.environ.get(_SAMPLER, "").strip().lower() or "parentbased_always_on"
        root = name.removeprefix(_FOLLOWING)
        if root not in ("always_on", "always_off", "traceidratio"):
            _log.warning("OTEL_TRACES_SAMPLER is not known: all traces are recorded that callers record")
            name, root = "parentbased_always_on", "always_on"
        self._follows_parent = name.startswith(_FOLLOWING)
        rate = _rate() if root == "traceidratio" else float(root == "always_on")
        # Of the last eight bytes of a trace's id.
        self._bound = round(rate * (1 << 64))

    def decide(self, parent: TraceParent | None, trace_id: bytes) -> bool:
        """Whether a call is recorded."""
        if parent is not None and self._follows_parent:
            return parent.is_sampled
        return int.from_bytes(trace_id[8:]) < self._bound

    def begin(self, template: bytes, pairs: Any) -> Span | None:
        """A new span of a call with these pairs of metadata, in its caller's trace. None: it is not recorded.

        `template`: a serialized span. Binds the trace for the log and for calls to others.
        """
        parent: TraceParent | None = None
        state = ""
        for key, value in pairs:
            if key == TRACEPARENT:
                parent = trace_parent(value)
            elif key == "tracestate":
                state = value
        ids = random.randbytes(_ID_BYTES)
        trace_id, span_id = ids[:16] if parent is None else bytes.fromhex(parent.trace_id), ids[16:]
        is_recorded = self.decide(parent, trace_id)
        trace = trace_id.hex()
        bind_trace_id(trace)
        bind_traceparent(f"00-{trace}-{span_id.hex()}-0{is_recorded:d}")
        if not is_recorded:
            return None
        span = Span.FromString(template)
        span.trace_id, span.span_id, span.start_time_unix_nano = trace_id, span_id, time.time_ns()
        if parent is not None:
            span.parent_span_id, span.flags = bytes.fromhex(parent.span_id), _REMOTE_FLAGS
            if state:
                span.trace_state = TraceState.from_header([state]).to_header()
        return span


def _rate() -> float:
    try:
        rate = float(os.environ.get(_SAMPLER_ARG, "1"))
    except ValueError:
        rate = -1.0
    if 0 <= rate <= 1:
        return rate
    _log.warning("OTEL_TRACES_SAMPLER_ARG is not a number from 0 to 1: it is taken for 1")
    return 1.0


class SpanExporter(OTLPSpanExporter):
    """The SDK's exporter, for serialized spans. To copy them as messages took its thread 2 us for each."""

    _stub: Any
    _client: Any
    _channel: Any

    def __init__(self, endpoint: str) -> None:
        """`endpoint`: the collector's URL. Connections are made, and made again, when it exports."""
        is_here = is_this_machine(urlsplit(endpoint).hostname or "")
        options = (*_CHANNEL_OPTIONS, DIRECT) if is_here else _CHANNEL_OPTIONS
        super().__init__(endpoint=endpoint, channel_options=options)
        own = Resource.create(
            {"service.name": "quire", "service.version": metadata.version("quire-llm-server")}
        )
        nothing = ReadableSpan(
            "",
            SpanContext(0, 0, is_remote=False),
            # The environment comes first.
            resource=own.merge(OTELResourceDetector().detect()),
            instrumentation_scope=InstrumentationScope("quire", ""),
        )
        (empty,) = encode_spans([nothing]).resource_spans
        self._scope = _field(1, empty.scope_spans[0].scope.SerializeToString())
        self._resource = _field(1, empty.resource.SerializeToString())
        self._stub = _Client
        self._client = _Client(self._channel)

    def _translate_data(self, data: Sequence[Any]) -> Any:
        """An ExportTraceServiceRequest: spans in a scope, in a resource."""
        spans = b"".join([self._scope, *(_field(2, span) for span in data)])
        return _field(1, self._resource + _field(2, spans))


class _Client:
    """The collector, for requests that are serialized already."""

    def __init__(self, channel: grpc.Channel) -> None:
        from_bytes = ExportTraceServiceResponse.FromString
        self.Export: Any = channel.unary_unary(_EXPORT, response_deserializer=from_bytes)


def _field(number: int, content: bytes) -> bytes:
    """A field of a message with a message, as protobuf has it."""
    return bytes((number << 3 | 2,)) + to_varint(len(content)) + content


def template(name: str, attributes: Mapping[str, str | int]) -> bytes:
    """A serialized span of a server, with attributes that all calls of a kind have."""
    span = Span(name=name, kind=Span.SPAN_KIND_SERVER, flags=_FLAGS)
    for key, value in attributes.items():
        set_attribute(span, key, value)
    return span.SerializeToString()


def set_attribute(span: Span | Span.Event, key: str, value: str | int) -> None:
    """Adds an attribute, which the span must not have yet."""
    added = span.attributes.add(key=key).value
    if isinstance(value, int):
        added.int_value = value
    else:
        added.string_value = value


def add_event(span: Span, name: str, attributes: Mapping[str, str | int] | None = None) -> None:
    """Adds an event that happens now."""
    event = span.events.add(name=name, time_unix_nano=time.time_ns())
    for key, value in (attributes or {}).items():
        set_attribute(event, key, value)


def set_error(span: Span, reason: str) -> None:
    """The call, or a part of it, has failed. The first reason is kept."""
    if not span.status.code:
        set_attribute(span, "error.type", reason)
        span.status.code, span.status.message = Status.STATUS_CODE_ERROR, reason
