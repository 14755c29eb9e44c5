"""The figures of the metrics: sums over restarts, histograms, calls, and what runs."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.metrics_core import HistogramMetricFamily
from prometheus_client.parser import text_string_to_metric_families
from quire.v1 import types_pb2

from service.adapters.registry import AdapterVersion
from service.caches.requests import Append, Appended, AppendKind, Request
from service.errors import QueueFull
from service.extensions.gateways.member import Member
from service.extensions.gateways.one_host import Place
from service.extensions.metrics.figures import TIMES_S, Appends, Calls, Distribution, Totals
from service.runtimes.execution import State
from service.shard import Shard, open_own_journal, open_shard
from tests.service.metrics_server import MetricsServer, serving
from tests.service.served import become_ready
from tests.sim.harness import Gateway as Caller
from tests.sim.harness import decode
from tests.sim.model_worker import Pool
from workers.common import worker_pb2


def test_counts_go_on_when_a_worker_starts_anew() -> None:
    totals = Totals()
    totals.update({1: ("0", {"steps": 5}), 2: ("1", {"steps": 7})})
    totals.update({3: ("0", {"steps": 2}), 2: ("1", {"steps": 8})})
    assert totals.by_label() == {"0": {"steps": 7}, "1": {"steps": 8}}
    # Its slot is gone, as after other weights were loaded.
    totals.update({3: ("0", {"steps": 3})})
    assert totals.by_label() == {"0": {"steps": 8}, "1": {"steps": 8}}


@given(st.lists(st.one_of(st.sampled_from(TIMES_S), st.floats(0, 1e4)), max_size=30))
def test_a_distribution_is_a_histogram_of_prometheus(values: list[float]) -> None:
    ours, theirs = Distribution(TIMES_S), Histogram("x", "x", buckets=TIMES_S, registry=CollectorRegistry())
    for value in values:
        ours.add(value)
        theirs.observe(value)
    family = HistogramMetricFamily("x", "x", labels=())
    ours.write(family, ())
    (expected,) = theirs.collect()
    wanted = {(one.name, one.labels.get("le")): one.value for one in expected.samples}
    for sample in family.samples:
        value = wanted[sample.name, sample.labels.get("le")]
        # Both add the same numbers in the same order.
        assert math.isclose(sample.value, value, rel_tol=0, abs_tol=0), sample


def appended(kept: int) -> Appended:
    done = worker_pb2.ForwardDone(timing=types_pb2.StepTiming(queue_ns=2_000_000))
    return Appended("c", 1, 1, "worker-0", 0.0, 0, 0, done, kept)


def test_appends_are_counted_by_what_they_answer() -> None:
    appends = Appends()
    told: list[tuple[int, Any]] = []
    requests: list[Request] = [
        Append(AppendKind.PREFILL, "", [1, 2, 3]),
        Append(AppendKind.PREFILL, "", [1, 2], rows=0),
        Append(AppendKind.DECODE, "c", [1]),
        Append(AppendKind.DECODE, "c", [1], prelaunch=4),
        Append(AppendKind.VERIFY, "c", [1, 2, 3, 4], accept=1),
        Append(AppendKind.SCORE, "", [1, 2, 3, 4, 5]),
        Append(AppendKind.DECODE, "c", [1]),
    ]
    observe = appends.observing(requests, told.extend)
    outcomes: list[Any] = [*(appended(kept) for kept in (3, 2, 1, 3, 2, 5)), QueueFull(1, 1.0)]
    observe(list(enumerate(outcomes)))
    assert told == list(enumerate(outcomes)), "the caller learns everything"
    assert [appends.answered[kind] for kind in AppendKind] == [2, 2, 1, 1]
    assert appends.prompt_tokens == 3 + 2 + 5
    # The first prefill, the decodes, of which one kept what its worker appended, and the accepted tokens.
    assert appends.generated_tokens == 1 + 1 + 3 + 2
    assert (appends.draft_tokens, appends.accepted_tokens) == (3, 1)
    assert appends.failed == {"QUEUE_FULL": 1}
    assert [sum(one._counts) for one in (appends.first_token, appends.token, appends.queue)] == [1, 3, 1]


class Context:
    def __init__(self, code: grpc.StatusCode | None = None) -> None:
        self._code = code

    def code(self) -> grpc.StatusCode | None:
        return self._code


@pytest.mark.parametrize(
    ("error", "code", "name"),
    [
        (None, None, "OK"),
        (RuntimeError(), grpc.StatusCode.INVALID_ARGUMENT, "InvalidArgument"),
        (RuntimeError(), grpc.StatusCode.UNAVAILABLE, "Unavailable"),
        (RuntimeError(), None, "Unknown"),
        (asyncio.CancelledError(), None, "Canceled"),
    ],
)
async def test_calls_are_counted_by_their_status(
    error: BaseException | None, code: grpc.StatusCode | None, name: str
) -> None:
    async def behave(_messages: object, _context: object) -> str:
        if error is not None:
            raise error
        return "answer"

    calls = Calls()
    handle = calls.observing("/quire.v1.ModelExecutorService/Decode", behave)
    if error is None:
        assert await handle(None, Context()) == "answer"
    else:
        with pytest.raises(type(error)):
            await handle(None, Context(code))
    labels = "unary", "quire.v1.ModelExecutorService", "Decode"
    assert calls.started == {labels: 1} and calls.handled == {(*labels, name): 1}
    assert sum(calls.seconds[labels]._counts) == 1


async def test_names_of_callers_make_no_labels() -> None:
    async def behave(_messages: object, _context: object) -> None: ...

    calls = Calls()
    for index in range(1000):
        await calls.observing(f"/quire.v1.Made/Up{index}", behave)(None, Context())
    assert calls.started == {("unknown",) * 3: 1000} and len(calls.seconds) == 1


async def scraped(server: MetricsServer) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    server.exporter._texts.clear()
    families = text_string_to_metric_families((await server.get("/metrics")).body)
    return {(one.name, frozenset(one.labels.items())): one.value for of in families for one in of.samples}


async def test_only_adapters_of_all_tenants_are_named(tmp_path: Path) -> None:
    async with serving(tmp_path, max_lora_adapters=3) as server:
        versions = server.gateway.core.pool.versions
        (slot,) = versions.slots
        executor = types_pb2.ExecutorCapabilities(supports_lora=True)
        become_ready(versions, slot, worker_pb2.WorkerReady(executor=executor))
        known = {1: ("shared", None), 2: ("other", None), 3: ("secret", "tenant"), 4: ("waiting", None)}
        for number, (adapter_id, tenant) in known.items():
            server.gateway.core.api._adapters.update(
                [AdapterVersion(number, adapter_id, tenant, "/somewhere")]
            )
            slot.snapshot.lora_adapters.add(
                version=number, resident=number < 4, loads=2, waiting=int(number == 4)
            )
        samples = await scraped(server)
        lists = {"running_lora_adapters": "other,shared", "waiting_lora_adapters": "waiting", "max_lora": "3"}
        assert samples["quire_lora_requests_info", frozenset(lists.items())] > 0
        worker = frozenset([("worker", "0")])
        assert (
            samples["quire_adapters_resident", worker] == 3
            and samples["quire_adapter_loads_total", worker] == 8
        )
        assert samples["quire_worker_ready", worker] == 1


async def test_a_first_internal_error_is_a_difference(tmp_path: Path) -> None:
    """rate() sees no first value of a series."""
    async with serving(tmp_path) as server:
        calls = server.exporter.figures.calls
        labels = "unary", "quire.v1.ModelExecutorService", "Decode"
        calls.started[labels], calls.handled[*labels, "OK"] = 2, 1
        samples = await scraped(server)
    named = dict(zip(("grpc_type", "grpc_service", "grpc_method"), labels, strict=True))
    counts = {
        code: samples["grpc_server_handled_total", frozenset({**named, "grpc_code": code}.items())]
        for code in ("OK", "Internal", "Unknown")
    }
    assert counts == {"OK": 1, "Internal": 0, "Unknown": 0}


async def test_all_shards_are_counted_also_one_that_was_given_back(tmp_path: Path) -> None:
    place = Place(Shard(0, 2), None, ["unix:0", "unix:1"], "secret")
    async with serving(tmp_path, place, workers=2) as server:
        gateway = server.gateway
        (member,) = (one for one in gateway.extensions if isinstance(one, Member))
        opened = await open_shard(gateway.config, open_own_journal, None, Shard(1, 2))
        running = member._open_core(opened)
        (further,) = member.further_shards()
        for shard in (gateway.core, further):
            caller = Caller(pool=Pool(3, page_tokens=4), machine=shard.caches)
            caches = []
            for token in range(4):
                caches.append(caller.create(token))
                caller.now_s += 1.0
            # The fourth has taken the room of the first, which takes that of the second.
            caller.append(decode(caches[0], 7))
            (slot,) = shard.versions.slots
            shard.versions.starts[slot.index] += 1
            slot.snapshot.counts.steps = 5
            shard.runner.executions._open[State.RUNNING][Mock(is_done=False)] = None
            shard.runner.router.on_end("local", 1.0)
            shard.versions.changed()
        expected = {"num_preemptions": 4.0, "replayed_tokens": 2.0, "worker_starts": 2.0, "steps": 10.0}
        for shards in (2, 1):
            samples = await scraped(server)
            found = {
                name: sum(number for (of, _), number in samples.items() if of == f"quire_{name}_total")
                for name in expected
            }
            assert found == expected, shards
            assert samples["quire_executions_running", frozenset()] == shards
            ended = "quire_e2e_request_latency_seconds_count", frozenset({("runtime", "local")})
            assert samples[ended] == 2
            member.shards.cores.clear()
        running.close()
        gateway.core.runner.executions._open[State.RUNNING].clear()
        assert not further.caches.index.anonymous.caches, "its tenants do not hold them here"
