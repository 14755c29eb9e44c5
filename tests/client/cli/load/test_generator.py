"""Who is sent when, and from when latencies count, in virtual time and against a server of our own making."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any

import pytest
from quire.cli.load.figures import Measured, figures
from quire.cli.load.generator import Generator, Pace, Plan
from quire.cli.load.measuring import CUT_OFF, UNFINISHED, Probe, ProcessLoad, Record
from quire.cli.load.run_spec import Bounds
from quire.cli.load.verdict import remarks
from quire.cli.load.workload import Lengths, Request, Workload

from tests.sim.virtual_loop import VirtualLoop

WORKLOAD = Workload(0, Lengths(4, 4), Lengths(2, 2))
TEN_EVENLY = Plan(WORKLOAD, Pace(rate=10, arrivals="constant"), 0, 2, grace_s=5, vocab_size=10)


class FakeServer:
    """Answers each sequence by what `serve` does."""

    def __init__(self, serve: Callable[[Probe], Awaitable[None]]) -> None:
        self._serve = serve

    async def run(self, probes: Sequence[Probe]) -> None:
        for probe in probes:
            probe.sent()
        await asyncio.gather(*(self._serve(probe) for probe in probes))


async def quick(probe: Probe) -> None:
    """A tenth of a second to each token."""
    for _ in range(probe.request.output_tokens):
        await asyncio.sleep(0.1)
        probe.received(1)
    probe.done()


def after(
    wait_s: Callable[[Probe], float], lock: asyncio.Lock | None = None
) -> Callable[[Probe], Awaitable[None]]:
    """Both tokens at once, after a time; with a lock one request after the other."""

    async def serve(probe: Probe) -> None:
        async with lock or contextlib.nullcontext():
            await asyncio.sleep(wait_s(probe))
            probe.received(2)
            probe.done()

    return serve


def run(
    plan: Plan,
    serve: Callable[[Probe], Awaitable[None]] = quick,
    *,
    process: int = 0,
    meanwhile: Callable[[VirtualLoop, Generator], Coroutine[Any, Any, None]] | None = None,
) -> list[Record]:
    """The records of one process of a plan, in virtual time."""
    loop = VirtualLoop()
    records: list[Record] = []

    async def main() -> None:
        generator = Generator(plan, process, FakeServer(serve), loop.time)
        other = asyncio.create_task(meanwhile(loop, generator)) if meanwhile else None
        await generator.run()
        records.extend(generator.records)
        if other:
            await other

    loop.run_to_end(main())
    return records


def measured(plan: Plan, records: Sequence[Record]) -> Measured:
    return Measured(plan.warm_up_s, plan.end_s, records, [ProcessLoad()])


def test_an_open_loop_sends_on_time_whatever_became_of_earlier_requests() -> None:
    records = run(TEN_EVENLY, after(lambda _: 1.5))
    assert [record.intended_s for record in records] == pytest.approx([i / 10 for i in range(20)])
    assert [record.sent_s for record in records] == pytest.approx([i / 10 for i in range(20)])
    assert all(record.is_done for record in records)


def test_a_server_that_stalls_is_charged_for_all_who_waited_meanwhile() -> None:
    """One worker that takes one request at a time and stalls once: as a queue computed by hand."""
    stalls_once = after(lambda probe: 1.0 if probe.request.index == 5 else 0.05, asyncio.Lock())
    records = run(TEN_EVENLY, stalls_once)
    free_s, expected = 0.0, []
    for i in range(20):
        free_s = max(free_s, i / 10) + (1.0 if i == 5 else 0.05)
        expected.append(free_s - i / 10)
    latencies = [(record.end_s or 0) - record.intended_s for record in records]
    assert latencies == pytest.approx(expected)
    # A client that waits for answers before it sends would have seen one slow request.
    assert sum(latency > 0.3 for latency in latencies) > 10


def test_latencies_count_from_the_intended_start_when_the_client_itself_is_late() -> None:
    """Its process is stopped for a second: what it then sends late is as slow as its callers saw it."""

    async def stop_the_client(loop: VirtualLoop, _: Generator) -> None:
        await asyncio.sleep(0.55)
        loop.pause(1.0)

    records = run(TEN_EVENLY, meanwhile=stop_the_client)
    assert len(records) == 20
    late = [record for record in records if (record.sent_s or 0) - record.intended_s > 0.01]
    assert [record.index for record in late] == list(range(6, 16))
    for record in late:
        assert record.sent_s == pytest.approx(1.55)
        assert record.times_s[0] - record.intended_s == pytest.approx(1.65 - record.index / 10)
    found = figures(measured(TEN_EVENLY, records), Bounds())
    assert found["client"]["lateness_ms"]["max"] == pytest.approx(950)
    said = remarks(found, max_lateness_ms=10, is_open=True, is_local=False)
    assert any(remark.who == "client" and "sent late" in remark.text for remark in said)


def test_a_rate_beyond_the_client_is_sent_as_fast_as_it_can_and_ends_in_time() -> None:
    """Each look at the clock takes a while, as making a prompt does."""
    loop, sent_s = VirtualLoop(), list[float]()

    def clock() -> float:
        loop.pause(0.01)
        return loop.time()

    async def serve(probe: Probe) -> None:
        sent_s.append(loop.time())
        probe.done()

    too_fast = dataclasses.replace(TEN_EVENLY, pace=Pace(rate=1000, arrivals="constant"))
    generator = Generator(too_fast, 0, FakeServer(serve), clock)
    loop.run_to_end(generator.run())
    assert sent_s[0] < 0.1, "it does not wait until all requests are made"
    assert loop.time() < too_fast.end_s + too_fast.grace_s + 1


def test_a_server_that_falls_behind_is_named() -> None:
    records = run(TEN_EVENLY, after(lambda _: 0.3, asyncio.Lock()))
    found = figures(measured(TEN_EVENLY, records), Bounds())
    said = remarks(found, max_lateness_ms=10, is_open=True, is_local=False)
    assert any(remark.who == "server" and "did not keep up" in remark.text for remark in said)
    assert not any(remark.who == "client" for remark in said)


def test_callers_of_a_closed_loop_begin_when_their_last_request_has_ended() -> None:
    plan = dataclasses.replace(TEN_EVENLY, pace=Pace(callers=3))
    records = run(plan)
    # Two tokens of a tenth of a second each.
    by_caller = [[r.intended_s for r in records if r.index % 3 == caller] for caller in range(3)]
    for times in by_caller:
        assert times == pytest.approx([0.2 * i for i in range(10)])
    assert sorted(record.index for record in records) == list(range(30))


@pytest.mark.parametrize("pace", [Pace(rate=40), Pace(rate=40, arrivals="constant"), Pace(callers=5), Pace()])
def test_processes_share_the_requests_of_a_plan(pace: Pace) -> None:
    trace = tuple(Request(i / 10, 4, 2) for i in range(20))
    workload = dataclasses.replace(WORKLOAD, trace=trace if pace == Pace() else ())
    alone = dataclasses.replace(TEN_EVENLY, pace=pace, workload=workload)
    together = dataclasses.replace(alone, processes=3)
    one = {(record.index, round(record.intended_s, 9)) for record in run(alone)}
    parts = [{(r.index, round(r.intended_s, 9)) for r in run(together, process=i)} for i in range(3)]
    assert set.union(*parts) == one
    assert all(not a & b for a, b in itertools.combinations(parts, 2))


def test_a_batch_begins_as_a_whole_and_the_rate_is_that_of_its_sequences() -> None:
    plan = dataclasses.replace(TEN_EVENLY, batch=5)
    records = run(plan)
    assert len(records) == 20
    assert [record.intended_s for record in records] == pytest.approx([0.5 * (i // 5) for i in range(20)])


def test_what_does_not_end_in_time_is_unfinished_and_no_longer_waited_for() -> None:
    async def never(probe: Probe) -> None:
        probe.received(1)
        await asyncio.Event().wait()

    # Somebody has to let time pass.
    async def clock(_: VirtualLoop, __: Generator) -> None:
        await asyncio.sleep(20)

    records = run(TEN_EVENLY, never, meanwhile=clock)
    assert {record.error for record in records} == {UNFINISHED}
    found = figures(measured(TEN_EVENLY, records), Bounds(ttft_ms=1000))
    assert found["requests"] == {"begun": 20, "done": 0, "failed": 0, "unfinished": 20, "cut_off": 0}
    assert found["goodput"]["share"] == 0
    assert found["ttft_ms"]["count"] == 20 and found["e2e_ms"]["count"] == 0


def test_a_run_that_is_ended_keeps_what_there_is() -> None:
    async def stop(_: VirtualLoop, generator: Generator) -> None:
        await asyncio.sleep(1.05)
        generator.stop()

    records = run(TEN_EVENLY, meanwhile=stop)
    assert [record.index for record in records if record.error == CUT_OFF] == [9, 10]
    assert [record.index for record in records if record.is_done] == list(range(9))


def test_requests_that_fail_do_not_end_the_run() -> None:
    async def fails_now_and_then(probe: Probe) -> None:
        if probe.request.index % 4 == 0:
            probe.failed("OVERLOADED")
        else:
            await quick(probe)

    found = figures(measured(TEN_EVENLY, run(TEN_EVENLY, fails_now_and_then)), Bounds())
    assert found["errors"] == {"OVERLOADED": 5}
    assert found["requests"]["done"] == 15
    said = remarks(found, max_lateness_ms=10, is_open=True, is_local=False)
    assert any("5 of 20 requests failed" in remark.text for remark in said)
