"""An OpenTelemetry collector: it receives spans by OTLP over gRPC, and keeps them."""

from __future__ import annotations

import threading
import time
from concurrent import futures
from dataclasses import dataclass
from typing import Any, Self

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

# Far more than anything takes.
_PATIENCE_S = 60.0


@dataclass(frozen=True, slots=True)
class Received:
    """A span as it arrived."""

    span: Any
    attributes: dict[str, Any]
    resource: dict[str, Any]

    @property
    def trace_id(self) -> str:
        return str(self.span.trace_id.hex())

    @property
    def parent_id(self) -> str:
        return str(self.span.parent_span_id.hex())

    @property
    def events(self) -> list[tuple[str, dict[str, Any]]]:
        return [(event.name, values(event.attributes)) for event in self.span.events]


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """Use as a context manager. While `stuck` is set it answers no export."""

    def __init__(self) -> None:
        self._requests: list[trace_service_pb2.ExportTraceServiceRequest] = []
        self.arrived = threading.Event()
        self._answers = threading.Event()
        self._answers.set()
        self._server = grpc.server(futures.ThreadPoolExecutor(4))
        add_to_server: Any = trace_service_pb2_grpc.add_TraceServiceServicer_to_server
        add_to_server(self, self._server)
        port = self._server.add_insecure_port("127.0.0.1:0")
        self.endpoint = f"http://127.0.0.1:{port}"

    def __enter__(self) -> Self:
        self._server.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.release()
        self._server.stop(None).wait()

    def hold(self) -> None:
        """From now on exports are received, but not answered."""
        self._answers.clear()

    def release(self) -> None:
        self._answers.set()

    def Export(self, request: Any, context: Any) -> Any:
        self._requests.append(request)
        self.arrived.set()
        self._answers.wait()
        return trace_service_pb2.ExportTraceServiceResponse()

    @property
    def bytes(self) -> bytes:
        """Everything that arrived."""
        return b"".join(request.SerializeToString() for request in self._requests)

    def spans(self) -> list[Received]:
        return [
            Received(span, values(span.attributes), values(of.resource.attributes))
            for request in self._requests[:]
            for of in request.resource_spans
            for scope in of.scope_spans
            for span in scope.spans
        ]

    def wait_for(self, count: int, name: str = "", trace_id: str = "") -> list[Received]:
        """Waits for so many spans of a trace whose name ends in `name`, and returns all of these."""
        give_up_s = time.monotonic() + _PATIENCE_S
        while True:
            found = [
                one
                for one in self.spans()
                if one.span.name.endswith(name) and one.trace_id.startswith(trace_id)
            ]
            if len(found) >= count:
                return found
            assert time.monotonic() < give_up_s, [one.span.name for one in self.spans()]
            time.sleep(0.01)


def values(attributes: Any) -> dict[str, Any]:
    """Attributes as they were set."""
    return {one.key: _value(one.value) for one in attributes}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(one) for one in value.array_value.values]
    return getattr(value, kind)
