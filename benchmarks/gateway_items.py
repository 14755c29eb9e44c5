"""What an item of a BatchDecode costs the gateway's own code: `python -m benchmarks.gateway_items`.

In one process and without gRPC, sockets and disk: the request is parsed and checked, begins in the state
machine, becomes a message to a worker; the worker's message is taken, encoded for the journal, committed,
and the answers are written. So it depends on little but this code and the speed of a core: the least of
many calls hardly differs between runs. With `--pause-ms` the process sleeps before each part, as a gateway
does that waits for its clients and workers, and loses what the caches of its core held.

Prints microseconds of the clock for an item: the least and the median of the calls, and of which parts.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import statistics
import struct
import time
from collections.abc import Callable, Sequence

import uvloop
from quire.v1 import executor_pb2

from service.api.append_codec import held_bytes
from service.api.calls import CALLS
from service.api.request_limits import RequestLimits
from service.caches.admission import Limits
from service.caches.entries import WorkerView
from service.caches.machine import CacheMachine
from service.caches.records import Record
from service.dispatcher import Dispatcher
from service.journal import encoding
from service.journal.base import Journal
from service.pool import wire
from workers.common import worker_pb2

_PARTS = ("check", "begin", "answered", "write")
_LIMITS = RequestLimits(vocab_size=32_000, max_response_bytes=1 << 26)
_PAGES = 1 << 20
_PROMPT_TOKENS = 32
_SETTLING_CALLS = 16
# The rows of DecodesCommand and DecodesDone.
_DECODE, _DONE = struct.Struct("<9Q"), struct.Struct("<5Q")


class _Journal(Journal):
    """Encodes commits and drops them."""

    def commit(self, records: Sequence[Record], on_committed: Callable[[bool], None]) -> None:
        encoding.encode(records)
        on_committed(True)


class _Worker:
    """A link whose worker answers all it was sent, with one message."""

    def __init__(self) -> None:
        self._sent: list[bytes] = []

    def send(self, request: worker_pb2.ConnectRequest) -> None:
        self._sent.append(request.SerializeToString())

    def answer(self) -> bytes:
        response = worker_pb2.ConnectResponse(pages_available=_PAGES)
        for data in self._sent:
            for command in worker_pb2.ConnectRequest.FromString(data).commands:
                event = response.events.add(op_id=command.op_id)
                if command.HasField("decodes"):
                    rows = _DECODE.iter_unpack(command.decodes.rows)
                    event.decodes.rows = b"".join(_DONE.pack(row[0], 7, 1000, 2000, 32) for row in rows)
                else:
                    event.forward.kept = len(command.forward.token_ids)
                    event.forward.outputs.add(token_id=7)
        self._sent.clear()
        return response.SerializeToString()


class _Bench:
    def __init__(self, items: int, pause_s: float) -> None:
        self._worker, self._pause_s = _Worker(), pause_s
        links = {("worker", 1): self._worker}
        self._dispatcher = Dispatcher(
            CacheMachine(Limits()),
            _Journal(),
            lambda commands: wire.send(links, commands),  # type: ignore[arg-type]
        )
        self._dispatcher.worker_ready(WorkerView("worker", 1, 16, _PAGES, _PAGES, _PAGES))
        self._cache_ids: list[str] = []
        self._length, self._items = _PROMPT_TOKENS, items

    async def open(self) -> None:
        """Creates the caches."""
        prefill = CALLS["Prefill"]
        prompts = ([index] * _PROMPT_TOKENS for index in range(self._items))
        prefills = [executor_pb2.PrefillRequest(token_ids=prompt) for prompt in prompts]
        running = asyncio.ensure_future(
            self._dispatcher.run([prefill.check(request, _LIMITS, None) for request in prefills])
        )
        await asyncio.sleep(0)
        self._take_answer()
        self._cache_ids = [outcome.cache_id for outcome in await running]  # type: ignore[union-attr]

    async def call(self) -> list[int]:
        """Runs a BatchDecode. Returns the nanoseconds of each part."""
        batch, dispatcher = CALLS["BatchDecode"], self._dispatcher
        decodes = [
            executor_pb2.DecodeRequest(cache_id=cache_id, position=self._length, token_id=7)
            for cache_id in self._cache_ids
        ]
        self._length += 1
        data = executor_pb2.BatchDecodeRequest(items=decodes).SerializeToString()
        times_ns = [self._paused_ns()]
        request = executor_pb2.BatchDecodeRequest.FromString(data)
        checked = await batch.check_items(request, _LIMITS, None)
        held_bytes(checked)
        times_ns.append(time.perf_counter_ns())
        running = asyncio.ensure_future(dispatcher.run(checked))  # type: ignore[arg-type]
        await asyncio.sleep(0)
        times_ns.append(time.perf_counter_ns())
        answered_ns = self._take_answer()
        outcomes = await running
        times_ns.append(time.perf_counter_ns())
        response = batch.response()
        batch.write_items(checked, outcomes, "request", response)
        response.SerializeToString()
        times_ns.append(time.perf_counter_ns())
        assert all(result.HasField("response") for result in response.results)
        check, begin, answered, write = (b - a for a, b in itertools.pairwise(times_ns))
        return [check, begin, answered - answered_ns, write]

    def _take_answer(self) -> int:
        """Takes the worker's message. Returns the nanoseconds that making it took."""
        began_ns = time.perf_counter_ns()
        data = self._worker.answer()
        took_ns = self._paused_ns() - began_ns
        response = worker_pb2.ConnectResponse.FromString(data)
        self._dispatcher.worker_answered("worker", 1, wire.to_events(response), response.pages_available)
        return took_ns

    def _paused_ns(self) -> int:
        if self._pause_s:
            time.sleep(self._pause_s)
        return time.perf_counter_ns()


async def _measure(items: int, calls: int, pause_s: float) -> list[list[int]]:
    bench = _Bench(items, pause_s)
    await bench.open()
    for _ in range(_SETTLING_CALLS):
        await bench.call()
    return [await bench.call() for _ in range(calls)]


def main() -> None:
    """Runs the command line and prints the results."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--items", type=int, default=32, metavar="N", help="of a call")
    parser.add_argument("--calls", type=int, default=1000, metavar="N")
    parser.add_argument("--pause-ms", type=float, default=0.0, help="sleep before each part")
    options = parser.parse_args()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        found = runner.run(_measure(options.items, options.calls, options.pause_ms / 1e3))
    totals = sorted(map(sum, found))
    parts = [min(of_one) / options.items / 1e3 for of_one in zip(*found, strict=True)]
    least, median = totals[0], statistics.median(totals)
    print(f"us an item: {least / options.items / 1e3:.1f} least, {median / options.items / 1e3:.1f} median")
    print(", ".join(f"{name} {us:.1f}" for name, us in zip(_PARTS, parts, strict=True)))


if __name__ == "__main__":
    main()
