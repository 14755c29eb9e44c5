"""What a soak counts, and what it prints at its end."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

_SHARES = {"p50": 0.5, "p99": 0.99, "longest": 1.0}
# What must not happen.
LOSSES = (
    "lost tokens",
    "duplicated tokens",
    "gaps",
    "differing tokens",
    "lost caches",
    "pools not whole",
    "unexpected errors",
)


@dataclass
class Tally:
    """Owner of the counts. Times are of `time.time()`, which all processes share."""

    began_s: float = field(default_factory=time.time)
    # By class and phase, such as "worker SIGKILL, anywhere".
    faults: Counter[str] = field(default_factory=Counter)
    losses: Counter[str] = field(default_factory=Counter)
    details: list[str] = field(default_factory=list)
    calls: int = 0
    retries: int = 0
    tokens: int = 0
    replayed_tokens: int = 0
    sequences: int = 0
    # Calls that have generated many tokens on a cache.
    generated: int = 0
    # Sequences with an adapter, and how often one was replaced.
    adapted: int = 0
    replaced_adapters: int = 0
    # Of each worker that stored KV on disk, when it was last asked.
    disks: dict[Any, Any] = field(default_factory=dict)
    # By class: how long each caller whose call was under way waited beyond the fault.
    answered_s: dict[str, list[float]] = field(default_factory=dict)
    # Faults whose callers have not all been answered: when it was, its class, and who waits.
    _open: list[tuple[float, str, set[int]]] = field(default_factory=list)
    _under_way: dict[int, float] = field(default_factory=dict)

    @property
    def had_adapters(self) -> bool:
        """Whether a sequence has used an adapter, and one was replaced meanwhile."""
        return bool(self.adapted and self.replaced_adapters)

    def lose(self, what: str, detail: str, count: int = 1) -> None:
        """Something must not have happened."""
        assert what in LOSSES
        self.losses[what] += count
        print(f"{what}: {detail[:500]}", file=sys.stderr, flush=True)
        if len(self.details) < 50:
            self.details.append(f"{what}: {detail}")

    def fault(self, kind: str, phase: str, at_s: float) -> None:
        """A fault was made; calls under way are watched until they are answered."""
        self.faults[f"{kind}, {phase}"] += 1
        waiting = {caller for caller, since_s in self._under_way.items() if since_s <= at_s}
        if waiting:
            self._open.append((at_s, kind, waiting))

    def note_disk(self, worker: Any, usage: Any) -> None:
        """What a worker says of its KV on disk, or an empty message."""
        if usage.max_bytes:
            self.disks[worker] = usage

    def disk_pages(self, what: str) -> int:
        """Pages that were `written`, `read` or `refused`, at least."""
        return sum(getattr(usage, f"{what}_pages") for usage in self.disks.values())

    def call_began(self, caller: int) -> None:
        """A caller asks, and asks again until it is answered. It has one call at a time."""
        self._under_way[caller] = time.time()

    def call_ended(self, caller: int) -> None:
        """It has been answered."""
        now_s = time.time()
        self._under_way.pop(caller, None)
        still_open = []
        for at_s, kind, waiting in self._open:
            if caller in waiting:
                waiting.remove(caller)
                self.answered_s.setdefault(kind, []).append(now_s - at_s)
            if waiting:
                still_open.append((at_s, kind, waiting))
        self._open = still_open

    @property
    def num_faults(self) -> int:
        """Faults of all kinds."""
        return sum(self.faults.values())

    @property
    def num_gateway_faults(self) -> int:
        """Those that hit the gateway."""
        return sum(count for name, count in self.faults.items() if name.startswith(("gateway", "all")))

    def is_clean(self) -> bool:
        """Whether nothing happened that must not."""
        return not sum(self.losses.values())

    def progress(self) -> str:
        """One line."""
        took_s, losses = time.time() - self.began_s, sum(self.losses.values())
        return (
            f"{took_s:6.0f} s  {self.num_faults} faults ({self.num_gateway_faults} gateway)"
            f"  {self.tokens} tokens  {self.sequences} sequences  {self.retries} retries  {losses} losses"
        )

    def summary(self) -> dict[str, Any]:
        """For JSON. Times in seconds, from a fault until a caller whose call was under way was answered."""
        everything = [wait for waits in self.answered_s.values() for wait in waits]
        waits = {**self.answered_s, "all": everything}
        return {
            "faults": dict(sorted(self.faults.items())),
            "must_not_happen": {what: self.losses[what] for what in LOSSES},
            "details": self.details,
            "calls": self.calls,
            "retries": self.retries,
            "tokens": self.tokens,
            "replayed_tokens": self.replayed_tokens,
            "sequences": self.sequences,
            "adapted": self.adapted,
            "replaced_adapters": self.replaced_adapters,
            "disk_pages": {what: self.disk_pages(what) for what in ("written", "read", "refused")},
            "took_s": round(time.time() - self.began_s, 1),
            "answered_s": {
                kind: {"callers": len(found)} | quantiles(found, 3)
                for kind, found in sorted(waits.items())
                if found
            },
        }


def quantiles(values: Sequence[float], digits: int) -> dict[str, float]:
    """Some, by their names in JSON."""
    return {name: round(at(values, share), digits) for name, share in _SHARES.items()}


def at(values: Sequence[float], share: float) -> float:
    """A quantile."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
