"""Interprets the figures of a run: whether client or server was the limit, and how reliable they are."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

Who: TypeAlias = Literal["client", "server", "note"]

# CPU share of one core, above which an event loop sends late.
BUSY_CPU = 0.9
BUSY_MACHINE = 0.95
# The accepted growth of requests in flight: a share of the started ones, and a minimum.
_GROWTH = 0.1
_MIN_GROWTH = 5


@dataclass(frozen=True, slots=True)
class Remark:
    """One sentence, and its subject."""

    who: Who
    text: str


def remarks(run: dict[str, Any], *, max_lateness_ms: float, is_open: bool, is_local: bool) -> list[Remark]:
    """The remarks on the figures of a run, the most important first."""
    found = list(_client_remarks(run["client"], max_lateness_ms))
    if is_open:
        found += _overload_remarks(run)
    found += _count_remarks(run)
    server = run["server"]
    if is_local and server is not None and server["machine_cpu"] > BUSY_MACHINE:
        busy = f"{server['machine_cpu']:.0%}"
        text = f"Client and server share this machine, whose cores were {busy} busy: they slow each other."
        found.append(Remark("note", text))
    return found


def _client_remarks(client: dict[str, Any], bound_ms: float) -> Iterator[Remark]:
    found = []
    late_ms = client["lateness_ms"].get("p99", 0.0)
    if late_ms > bound_ms:
        found.append(
            f"requests were sent late: 1 in 100 by more than {late_ms:.3g} ms (bound: {bound_ms:g} ms)"
        )
    lag_ms = max((process["lag_ms"].get("p99", 0.0) for process in client["processes"]), default=0.0)
    if lag_ms > bound_ms:
        found.append(f"a client process was late by itself: p99 {lag_ms:.3g} ms (bound: {bound_ms:g} ms)")
    cpu = max((process["cpu"] for process in client["processes"]), default=0.0)
    if cpu > BUSY_CPU:
        found.append(f"a client process used {cpu:.0%} of a core")
    if found:
        yield Remark("client", f"The client was the limit: {'; '.join(found)}.")


def _overload_remarks(run: dict[str, Any]) -> Iterator[Remark]:
    middle, end = run["in_flight"]["middle"], run["in_flight"]["end"]
    begun = run["requests"]["begun"] / 2
    if end - middle >= max(_MIN_GROWTH, _GROWTH * begun):
        text = (
            f"The server did not keep up: {middle} requests were under way in the middle of the window and "
            f"{end} at its end. With more time latencies would be longer still."
        )
        yield Remark("server", text)


def _count_remarks(run: dict[str, Any]) -> Iterator[Remark]:
    requests, measured = run["requests"], run["ttft_ms"]["count"]
    if count := requests["failed"]:
        text = f"{count} of {requests['begun']} requests failed; latencies are of the others."
        yield Remark("server", text)
    if count := requests["unfinished"]:
        text = f"{count} requests had not ended when the run gave up; latencies are too low by that."
        yield Remark("server", text)
    if count := requests["cut_off"]:
        yield Remark("note", f"{count} requests were cut off when the run was ended.")
    if 0 < measured < 100:
        yield Remark("note", f"With {measured} requests, p99 is hardly more than the longest one.")
    if run["server"] is None:
        yield Remark("note", "The server did not tell its status: nothing is known of its batches.")
    elif run["server"]["workers_replaced"]:
        yield Remark("server", "A worker was replaced during the run.")
