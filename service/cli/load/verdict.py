"""What the figures of a run mean: who was the limit, and what a reader has to know before believing them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

Who: TypeAlias = Literal["client", "server", "note"]

# Of one core: an event loop that is busy all the time sends late.
BUSY_CPU = 0.9
BUSY_MACHINE = 0.95
# Of the requests that begin, so many may stay under way more than before.
_GROWTH = 0.1
_LEAST_GROWTH = 5


@dataclass(frozen=True, slots=True)
class Remark:
    """One sentence, and whom it is about."""

    who: Who
    text: str


def remarks(run: dict[str, Any], *, max_lateness_ms: float, is_open: bool, is_local: bool) -> list[Remark]:
    """What is to be said of the figures of a run; the most important first."""
    return [
        *_of_client(run["client"], max_lateness_ms),
        *(_of_keeping_up(run) if is_open else ()),
        *_of_counts(run),
        *(_of_machine(run) if is_local else ()),
    ]


def _of_client(client: dict[str, Any], bound_ms: float) -> list[Remark]:
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
    return [Remark("client", f"The client was the limit: {'; '.join(found)}.")] if found else []


def _of_keeping_up(run: dict[str, Any]) -> list[Remark]:
    middle, end = run["in_flight"]["middle"], run["in_flight"]["end"]
    begun = run["requests"]["begun"] / 2
    if end - middle < max(_LEAST_GROWTH, _GROWTH * begun):
        return []
    return [
        Remark(
            "server",
            f"The server did not keep up: {middle} requests were under way in the middle of the window and "
            f"{end} at its end. With more time latencies would be longer still.",
        )
    ]


def _of_counts(run: dict[str, Any]) -> list[Remark]:
    found, requests = [], run["requests"]
    if count := requests["failed"]:
        found.append(
            Remark("server", f"{count} of {requests['begun']} requests failed; latencies are of the others.")
        )
    if count := requests["unfinished"]:
        found.append(
            Remark(
                "server",
                f"{count} requests had not ended when the run gave up; latencies are too low by that.",
            )
        )
    if count := requests["cut_off"]:
        found.append(Remark("note", f"{count} requests were cut off when the run was ended."))
    if 0 < run["ttft_ms"]["count"] < 100:
        count = run["ttft_ms"]["count"]
        found.append(Remark("note", f"With {count} requests, p99 is hardly more than the longest one."))
    if run["server"] is None:
        found.append(Remark("note", "The server did not tell its status: nothing is known of its batches."))
    elif run["server"]["workers_replaced"]:
        found.append(Remark("server", "A worker was replaced during the run."))
    return found


def _of_machine(run: dict[str, Any]) -> list[Remark]:
    if run["server"] is None or run["server"]["machine_cpu"] <= BUSY_MACHINE:
        return []
    busy = f"{run['server']['machine_cpu']:.0%}"
    return [
        Remark(
            "note",
            f"Client and server share this machine, whose cores were {busy} busy: they slow each other.",
        )
    ]
