"""What is measured: workloads, who takes part in each, and the goals of DESIGN.md, section 7."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from benchmarks.shapes import Shape


@dataclass(frozen=True, slots=True)
class Entry:
    """One competitor in one workload, measured by one call of its peer."""

    label: str
    peer: str
    method: str
    arguments: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Comparison:
    """Tokens/s of one entry over another's, by their labels. `goal`: the least it should be, if any."""

    ours: str
    theirs: str
    goal: float | None = None


@dataclass(frozen=True, slots=True)
class Workload:
    """What all entries do in turns.

    Attributes:
        unit: What a sample is the time of.
        share: How much of the run's time it gets, compared with the others.
        prepare: A method of the peers and its arguments, called before the first turn.
        warm: Arguments of the first turn, which does not count, that differ from the others'.
        bytes_read: What a step has to read; 0 where that is not the limit.
        flops: What a step has to compute; 0 where that is not the limit.
    """

    name: str
    title: str
    unit: str
    share: float
    entries: Sequence[Entry]
    comparisons: Sequence[Comparison]
    prepare: tuple[str, dict[str, Any]] | None = None
    warm: dict[str, Any] = field(default_factory=dict)
    bytes_read: int = 0
    flops: int = 0


TRANSFORMERS = "transformers"
LLAMA_CPP = "llama.cpp"
EXECUTOR = "Quire, in process"
SERVICE = "Quire, service"
CALLERS = "Quire, 32 callers, unary"
SESSIONS = "Quire, 32 callers, Session"

_PEERS = {TRANSFORMERS: "transformers", LLAMA_CPP: "llama.cpp", EXECUTOR: "executor", SERVICE: "service"}


def all_workloads(shape: Shape) -> list[Workload]:
    """Every workload, in the order of the report."""
    return [
        _decode(shape, 1, 128, steps=12, share=1.0, goals={TRANSFORMERS: 1.4, LLAMA_CPP: 0.95}),
        _decode(shape, 8, 128, steps=10, share=1.2),
        _decode_32(shape),
        _decode(shape, 1, 1024, steps=12, share=1.2),
        _decode(shape, 8, 1024, steps=8, share=2.0),
        _prefill(shape, 1, share=1.0),
        _prefill(shape, 8, share=3.0, goals={TRANSFORMERS: 2.0}),
        _gateway(),
    ]


def select(workloads: Sequence[Workload], patterns: Sequence[str]) -> list[Workload]:
    """Those whose names match a pattern; all, without patterns. Raises ValueError if one matches none."""
    for pattern in patterns:
        if not any(fnmatchcase(workload.name, pattern) for workload in workloads):
            names = ", ".join(workload.name for workload in workloads)
            raise ValueError(f"no row is called {pattern}: there are {names}")
    if not patterns:
        return list(workloads)
    return [w for w in workloads if any(fnmatchcase(w.name, pattern) for pattern in patterns)]


def _competitors(method: str, arguments: dict[str, Any]) -> list[Entry]:
    return [Entry(label, peer, method, arguments) for label, peer in _PEERS.items()]


def _against_all(goals: dict[str, float]) -> list[Comparison]:
    """The service against everything, and the executor against the others' libraries."""
    service = [
        Comparison(SERVICE, theirs, goals.get(theirs)) for theirs in (TRANSFORMERS, LLAMA_CPP, EXECUTOR)
    ]
    return service + [Comparison(EXECUTOR, theirs) for theirs in (TRANSFORMERS, LLAMA_CPP)]


def _decode(
    shape: Shape, batch: int, context: int, *, steps: int, share: float, goals: dict[str, float] | None = None
) -> Workload:
    sequences = "1 sequence" if batch == 1 else f"{batch} sequences"
    return Workload(
        name=f"decode-{batch}" if context == 128 else f"decode-{batch}-context-{context}",
        title=f"decode, {sequences}, context {context}",
        unit="step",
        share=share,
        entries=_competitors("decode", {"steps": steps}),
        comparisons=_against_all(goals or {}),
        prepare=("prepare_decode", {"batch": batch, "context_tokens": context}),
        warm={"steps": 2},
        bytes_read=shape.decode_bytes(batch, context),
    )


def _decode_32(shape: Shape) -> Workload:
    """As one BatchDecode, and as callers who know nothing of each other."""
    goals = {TRANSFORMERS: 2.2, LLAMA_CPP: 4.0}
    base = _decode(shape, 32, 128, steps=8, share=2.5, goals=goals | {EXECUTOR: 0.97})
    callers = {CALLERS: "unary", SESSIONS: "session"}
    return Workload(
        name=base.name,
        title=base.title,
        unit=base.unit,
        share=base.share,
        entries=[
            *base.entries,
            *(
                Entry(label, "service", "decode", {"steps": 8, "mode": mode})
                for label, mode in callers.items()
            ),
        ],
        comparisons=[
            *base.comparisons,
            *(Comparison(label, theirs, goal) for label in callers for theirs, goal in goals.items()),
            *(Comparison(label, SERVICE, 0.9) for label in callers),
        ],
        prepare=base.prepare,
        warm=base.warm,
        bytes_read=base.bytes_read,
    )


def _prefill(shape: Shape, batch: int, *, share: float, goals: dict[str, float] | None = None) -> Workload:
    arguments = {"batch": batch, "prompt_tokens": 512}
    return Workload(
        name=f"prefill-{batch}x512",
        title=f"prefill, {batch} x 512 tokens",
        unit="prefill",
        share=share,
        entries=_competitors("prefill", arguments),
        comparisons=_against_all(goals or {}),
        prepare=("prepare_prefill", arguments),
        warm={"batch": 1},
        flops=shape.prefill_flops(batch, 512),
    )


def _gateway() -> Workload:
    """Loads of about a second each. One caller has one sequence; the others have 32."""
    loads: dict[str, dict[str, Any]] = {
        "unary, 1 caller": {"mode": "unary", "steps": 800, "callers": 1},
        "unary, 32 callers": {"mode": "unary", "steps": 60},
        "BatchDecode of 32": {"mode": "batch", "steps": 80},
        "Session, 1 caller": {"mode": "session", "steps": 800, "callers": 1},
        "Session, 32 callers": {"mode": "session", "steps": 80},
        "one Session of 32": {"mode": "multiplexed", "steps": 120},
    }
    # The echo server has no streams.
    echoed = [name for name, load in loads.items() if load["mode"] in ("unary", "batch")]
    echoes = [
        Entry(f"bare echo: {name}", "gateway", "calls", {"server": "echo"} | loads[name]) for name in echoed
    ]
    entries = [
        Entry(f"gateway: {name}", "gateway", "calls", {"server": "quire"} | load)
        for name, load in loads.items()
    ]
    unary = "gateway: unary, 32 callers"
    return Workload(
        name="gateway",
        title="gateway alone (weightless executor)",
        unit="call",
        share=2.0,
        entries=[*echoes, *entries],
        comparisons=[
            *(
                Comparison(f"gateway: {name}", f"bare echo: {name}", 0.5)
                for name in echoed
                if "unary" in name
            ),
            Comparison("gateway: BatchDecode of 32", "bare echo: BatchDecode of 32"),
            Comparison("gateway: BatchDecode of 32", unary, 8.0),
            Comparison("gateway: Session, 1 caller", "gateway: unary, 1 caller"),
            Comparison("gateway: Session, 32 callers", unary, 3.0),
            Comparison("gateway: one Session of 32", unary, 3.0),
        ],
    )
