"""From the readings of a server's counters to figures."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from service.cli.load.server_watch import Reading


def server_figures(begin_s: float, end_s: float, readings: Sequence[Reading]) -> dict[str, Any] | None:
    """From the counters of the server. None: it was not asked, or said nothing."""
    inside = [
        (before, after)
        for before, after in itertools.pairwise(readings)
        if after.at_s > begin_s and before.at_s < end_s
    ]
    if not inside:
        return None
    # A worker that was replaced counts from 0 again.
    same = [(before, after) for before, after in inside if before.epochs == after.epochs]
    grown = {
        name: sum(getattr(after, name) - getattr(before, name) for before, after in same)
        for name in ("steps", "batch_items", "step_tokens", "prefix_hit_tokens", "prefix_query_tokens")
    }
    after_all = [after for _, after in inside]
    occupancy = [r.pages_used / r.pages_total for r in after_all if r.pages_total]
    first, last = inside[0][0], inside[-1][1]
    refused = {
        reason: count - first.refusals.get(reason, 0)
        for reason, count in last.refusals.items()
        if count > first.refusals.get(reason, 0)
    }
    return {
        "steps": grown["steps"],
        "mean_batch": share(grown["batch_items"], grown["steps"]),
        "largest_batch": max((b for pair in same if (b := batch(*pair)) is not None), default=None),
        "tokens_per_step": share(grown["step_tokens"], grown["steps"]),
        "prefix_hit_share": share(grown["prefix_hit_tokens"], grown["prefix_query_tokens"]),
        "occupancy_mean": sum(occupancy) / len(occupancy) if occupancy else None,
        "occupancy_max": max(occupancy, default=None),
        "in_flight_mean": sum(r.in_flight for r in after_all) / len(after_all),
        "in_flight_max": max(r.in_flight for r in after_all),
        "refusals": refused,
        "workers_replaced": len(inside) - len(same),
        "machine_cpu": sum(r.machine_cpu for r in after_all) / len(after_all),
    }


def share(part: float, whole: float) -> float | None:
    """A part of a whole; None of nothing."""
    return part / whole if whole else None


def batch(before: Reading, after: Reading) -> float | None:
    """Items in a step, in the mean between two readings."""
    return share(after.batch_items - before.batch_items, after.steps - before.steps)
