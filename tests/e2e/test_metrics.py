"""The metrics of a real server: what callers did is what they say, over kills of workers and a drain."""

from __future__ import annotations

import contextlib
import http.client
import time
from collections.abc import Iterator

import grpc
import psutil
import pytest
from prometheus_client.openmetrics import parser as openmetrics
from prometheus_client.parser import text_string_to_metric_families
from quire.v1 import executor_pb2 as pb
from quire.v1 import runner_pb2, types_pb2

from tests.gateway_process import GatewayProcess

FLAGS = ["--metrics-listen", "127.0.0.1:0"]
EXECUTOR = "quire.v1.ModelExecutorService"
# By name and labels.
Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


class Scraped:
    """A server's port for metrics."""

    def __init__(self, gateway: GatewayProcess) -> None:
        (listening,) = [one for one in gateway.records() if one["event"] == "listening for metrics"]
        self._port = int(str(listening["listen"]).rpartition(":")[2])

    def get(self, path: str, accept: str = "*/*") -> tuple[int, str]:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=30)
        with contextlib.closing(connection):
            connection.request("GET", path, headers={"Accept": accept})
            response = connection.getresponse()
            return response.status, response.read().decode()

    def samples(self) -> Samples:
        # Requests within 0.2 s get the same text.
        time.sleep(0.25)
        status, text = self.get("/metrics")
        assert status == 200
        families = list(text_string_to_metric_families(text))
        return {
            (s.name, tuple(sorted(s.labels.items()))): s.value for family in families for s in family.samples
        }


def value(samples: Samples, name: str, **labels: str) -> float:
    """The sum over all series with these labels."""
    wanted = set(labels.items())
    return sum(number for (of, its), number in samples.items() if of == name and wanted <= set(its))


def decode(gateway: GatewayProcess, cache_id: str, times: int) -> None:
    for _ in range(times):
        gateway.decode(cache_id, 3)


@pytest.fixture(scope="module")
def gateway() -> Iterator[GatewayProcess]:
    with GatewayProcess(model="adder", workers=2, flags=FLAGS) as gateway:
        yield gateway


def prefill(gateway: GatewayProcess, tokens: int = 4) -> str:
    return str(gateway.prefill([1] * tokens).kv_cache.cache_id)


def test_counts_are_what_callers_did(gateway: GatewayProcess) -> None:
    port = Scraped(gateway)
    before = port.samples()
    caches = [prefill(gateway, tokens=7) for _ in range(3)]
    for cache_id in caches:
        decode(gateway, cache_id, 5)
    items = [pb.DecodeRequest(cache_id=cache_id, token_id=3) for cache_id in caches]
    gateway.stub.BatchDecode(pb.BatchDecodeRequest(items=items))
    calls = [pb.SessionCall(tag=index, decode=item) for index, item in enumerate(items)]
    answers = gateway.stub.Session(iter([pb.SessionRequest(calls=calls)]))
    assert sum(len(message.results) for message in answers) == 3
    gateway.verify(caches[0], [1, 2, 3, 4], accept=types_pb2.VERIFY_ACCEPT_ALL)
    for _ in range(4):
        with pytest.raises(grpc.RpcError):
            gateway.decode("kv_unknown", 1)
    with pytest.raises(grpc.RpcError):
        gateway.stub.Prefill(pb.PrefillRequest())
    after = port.samples()

    def grown(name: str, **labels: str) -> float:
        return value(after, name, **labels) - value(before, name, **labels)

    decodes = 3 * 5 + 3 + 3
    assert grown("quire_appends_total", kind="prefill") == 3
    assert grown("quire_appends_total", kind="decode") == decodes
    assert grown("quire_appends_total", kind="verify") == 1
    assert grown("quire_prompt_tokens_total") == 3 * 7
    # Without `accept` a verify keeps all of its tokens.
    assert grown("quire_generation_tokens_total") == 3 + decodes + 4
    assert grown("quire_time_to_first_token_seconds_count") == 3
    assert grown("quire_inter_token_latency_seconds_count") == decodes + 1
    assert grown("quire_appends_failed_total", reason="CACHE_NOT_FOUND") == 4
    assert grown("quire_refusals_total", reason="CACHE_NOT_FOUND") == 4
    assert grown("quire_refusals_total") == 5
    assert value(after, "quire_caches") == value(before, "quire_caches") + 3
    of_decode = {"grpc_service": EXECUTOR, "grpc_method": "Decode", "grpc_type": "unary"}
    assert grown("grpc_server_started_total", **of_decode) == 15 + 4
    assert grown("grpc_server_handled_total", **of_decode, grpc_code="OK") == 15
    assert grown("grpc_server_handled_total", **of_decode, grpc_code="NotFound") == 4
    assert grown("grpc_server_handling_seconds_count", **of_decode) == 15 + 4
    assert grown("grpc_server_handled_total", grpc_method="Prefill", grpc_code="InvalidArgument") == 1
    assert grown("grpc_server_handled_total", grpc_method="Session", grpc_type="bidi_stream") == 1
    # Workers tell theirs once a second.
    queries = value(before, "quire_prefix_cache_queries_total") + 21
    gateway.wait_until(lambda: value(port.samples(), "quire_prefix_cache_queries_total") == queries)
    settled = port.samples()
    assert value(settled, "quire_worker_sequences") == value(settled, "quire_caches")
    pages = [value(settled, "quire_kv_pages", state=state) for state in ("free", "cached", "referenced")]
    assert value(settled, "quire_kv_cache_usage_perc") == pytest.approx(pages[2] / sum(pages))
    assert ("quire_model_info", "adder") in {
        (name, dict(labels).get("model_name")) for name, labels in settled
    }
    for cache_id in caches:
        gateway.release(cache_id)


def test_executions_are_timed(gateway: GatewayProcess) -> None:
    port = Scraped(gateway)
    before = port.samples()
    item = runner_pb2.ExecuteItem(item_id="one", text="12+34=", max_tokens=3)
    assert list(gateway.runner.Execute(runner_pb2.ExecuteRequest(items=[item])))
    after = port.samples()
    timed = "quire_e2e_request_latency_seconds_count"
    assert value(after, timed, runtime="local") == value(before, timed, runtime="local") + 1
    tokens = "quire_generation_tokens_total"
    # The prefill gives one token, and each decode another.
    assert 1 <= value(after, tokens) - value(before, tokens) <= 3


def counters(samples: Samples) -> Samples:
    return {
        (name, labels): number
        for (name, labels), number in samples.items()
        if name.endswith(("_total", "_count", "_sum", "_bucket"))
    }


def test_no_counter_becomes_smaller_when_workers_are_killed(gateway: GatewayProcess) -> None:
    port = Scraped(gateway)
    caches = [prefill(gateway, 40) for _ in range(4)]
    starts = value(port.samples(), "quire_worker_starts_total")
    last = port.samples()
    # Some figures of workers are there.
    gateway.wait_until(lambda: value(port.samples(), "quire_steps_total") > 0)
    for _ in range(2):
        victims = gateway.worker_processes()
        for worker in victims:
            worker.kill()
        psutil.wait_procs(victims)
        for cache_id in caches:
            decode(gateway, cache_id, 2)
        now = port.samples()
        for series, number in counters(last).items():
            assert now.get(series, -1) >= number, series
        last = now
    gateway.wait_until_ready()
    after = port.samples()
    assert value(after, "quire_worker_starts_total") == starts + 4
    # Of equal texts on a worker the first is computed.
    assert value(after, "quire_replayed_tokens_total") >= 2 * 40
    assert value(after, "quire_worker_ready") == 2
    assert value(after, "quire_worker_epoch", worker="0") > 1


def test_every_family_is_valid_openmetrics(gateway: GatewayProcess) -> None:
    _, text = Scraped(gateway).get("/metrics", "application/openmetrics-text")
    families = list(openmetrics.text_string_to_metric_families(text))  # type: ignore[no-untyped-call]
    assert len({family.name for family in families}) == len(families) > 50
