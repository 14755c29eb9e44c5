"""The traces and the log of a real server: a span for each call, and where the time of slow ones went."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import grpc
import pytest
from quire.v1 import executor_pb2 as pb
from quire.v1 import runner_pb2

from tests.collector import Collector
from tests.gateway_process import GatewayProcess
from tests.http_gateway import HttpGateway

PARENT = "00f067aa0ba902b7"
# Each call is slow, and each has a line.
FLAGS = ["--log-level", "debug"]


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with Collector() as collector:
        yield collector


@pytest.fixture(scope="module")
def gateway(collector: Collector) -> Iterator[HttpGateway]:
    flags = [*FLAGS, "--otlp-endpoint", collector.endpoint]
    with (
        mock.patch.dict(os.environ, {"OTEL_BSP_SCHEDULE_DELAY": "50"}),
        HttpGateway(model="adder", flags=flags) as gateway,
    ):
        yield gateway


def in_trace(trace_id: str, request_id: str) -> Any:
    """Metadata of a call in a trace of its own."""
    return [("traceparent", f"00-{trace_id}-{PARENT}-01"), ("x-request-id", request_id)]


def test_calls_of_a_trace(gateway: GatewayProcess, collector: Collector) -> None:
    trace_id = "a" * 32
    metadata = in_trace(trace_id, "r-decode")
    cache = gateway.stub.Prefill(pb.PrefillRequest(token_ids=[1, 2, 3]), metadata=metadata).kv_cache.cache_id
    gateway.stub.Decode(pb.DecodeRequest(cache_id=cache, token_id=3), metadata=metadata)
    with pytest.raises(grpc.RpcError):
        gateway.stub.Decode(pb.DecodeRequest(cache_id="kv_secret", token_id=3), metadata=metadata)
    collector.wait_for(2, "/Decode")
    spans = [one for one in collector.spans() if one.trace_id == trace_id]
    assert [one.attributes["rpc.method"] for one in spans] == ["Prefill", "Decode", "Decode"]
    assert {one.parent_id for one in spans} == {PARENT}
    assert [one.span.status.message for one in spans] == ["", "", "CACHE_NOT_FOUND"]
    assert cache.encode() not in collector.bytes and b"kv_secret" not in collector.bytes
    of_trace = [one for one in gateway.records() if one.get("trace_id") == trace_id]
    assert [(one["event"], one["rpc"], one["code"]) for one in of_trace] == [
        ("call done", "Prefill", "OK"),
        ("call done", "Decode", "OK"),
        ("call refused", "Decode", "NOT_FOUND"),
    ]


def test_an_execution_says_its_model_and_its_tokens(gateway: GatewayProcess, collector: Collector) -> None:
    item = runner_pb2.ExecuteItem(item_id="SECRETITEM", text="12+34=", max_tokens=3, n=2)
    responses = list(gateway.runner.Execute(runner_pb2.ExecuteRequest(items=[item])))
    usages = [chunk.usage for one in responses for chunk in one.chunks if chunk.HasField("usage")]
    (one,) = collector.wait_for(1, "/Execute")
    model = gateway.model().model_id
    assert one.attributes["gen_ai.request.model"] == one.attributes["gen_ai.response.model"] == model
    assert one.attributes["quire.runtime"] == "local"
    # Two samples of one prompt.
    assert one.attributes["gen_ai.usage.input_tokens"] == usages[0].input_tokens == len("12+34=")
    assert one.attributes["gen_ai.usage.output_tokens"] == sum(usage.output_tokens for usage in usages)
    assert [name for name, _ in one.events] == ["first token"]
    assert b"12+34" not in collector.bytes and b"SECRET" not in collector.bytes


def test_a_trace_goes_on_at_a_provider(gateway: HttpGateway, collector: Collector, tmp_path: Path) -> None:
    trace_id = "c" * 32
    (tmp_path / "runtimes.toml").write_text(
        f"""
        [runtimes.other]
        dialect = "openai-completions"
        base_url = "{gateway.url}"
        model = "adder"
        """
    )
    flags = ["--runtimes", str(tmp_path / "runtimes.toml"), "--otlp-endpoint", collector.endpoint]
    request = runner_pb2.ExecuteRequest(
        runtime="other", items=[runner_pb2.ExecuteItem(item_id="a", text="12+34=", max_tokens=3)]
    )
    with (
        mock.patch.dict(os.environ, {"OTEL_BSP_SCHEDULE_DELAY": "50"}),
        GatewayProcess(model="paged-attention", flags=flags) as asking,
    ):
        execute = asking.runner.Execute
        chunks = [c for one in execute(request, metadata=in_trace(trace_id, "r-1")) for c in one.chunks]
        assert "".join(chunk.text for chunk in chunks) == "46"
        (outer,) = collector.wait_for(1, "/Execute", trace_id)
    (inner,) = collector.wait_for(1, "/v1/completions", trace_id)
    assert outer.parent_id == PARENT and inner.parent_id == outer.span.span_id.hex()
    model = gateway.model().model_id
    assert inner.attributes.pop("quire.request_id")
    assert inner.attributes == {
        "http.request.method": "POST",
        "http.route": "/v1/completions",
        "http.response.status_code": 200,
        "gen_ai.operation.name": "text_completion",
        "gen_ai.request.model": model,
        "gen_ai.response.model": model,
        "gen_ai.usage.input_tokens": len("12+34="),
        "gen_ai.usage.output_tokens": outer.attributes["gen_ai.usage.output_tokens"],
        "quire.runtime": "local",
    }


def test_the_last_spans_arrive_when_the_server_stops() -> None:
    environ = {"OTEL_BSP_SCHEDULE_DELAY": "3600000"}
    with Collector() as collector, mock.patch.dict(os.environ, environ):
        with GatewayProcess(
            model="paged-attention", flags=["--otlp-endpoint", collector.endpoint]
        ) as gateway:
            gateway.prefill([1])
            assert not collector.spans()
            gateway.process.send_signal(signal.SIGTERM)
            assert gateway.process.wait(60) == 0
        assert "Prefill" in {one.attributes["rpc.method"] for one in collector.spans()}
