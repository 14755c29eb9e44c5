"""The workloads on a CPU, and the goals of the design."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from benchmarks.plan import Comparison, Entry, Workload
from benchmarks.shapes import Shape

TRANSFORMERS = "transformers"
LLAMA_CPP = "llama.cpp"
EXECUTOR = "Quire, in process"
SERVICE = "Quire, service"
CALLERS = "Quire, 32 callers, unary"
SESSIONS = "Quire, 32 callers, Session"

_PEERS = {TRANSFORMERS: "transformers", LLAMA_CPP: "llama.cpp", EXECUTOR: "executor", SERVICE: "service"}
# Rows of the same names with these formats behind them: both serve one GGUF file.
QUANTISED = "quantised"
_FORMATS = ("q8_0", "q4_0", "q4_k_m")


def all_workloads(shape: Shape) -> list[Workload]:
    """Every workload, in the order of the report."""
    return [
        _decode(shape, 1, 128, steps=12, share=1.0),
        _decode(shape, 8, 128, steps=10, share=1.2),
        _decode_32(shape),
        _decode(shape, 1, 1024, steps=12, share=1.2),
        _decode(shape, 8, 1024, steps=8, share=2.0),
        _prefill(shape, 1, share=1.0),
        _prefill(shape, 8, share=3.0),
        _gateway(),
        *(workload for form in _FORMATS for workload in _quantised(shape, form)),
    ]


def _competitors(
    method: str, arguments: dict[str, Any], *, bytes_read: int = 0, flops: int = 0
) -> list[Entry]:
    return [
        Entry(
            label,
            peer,
            method,
            arguments,
            ours=label in (EXECUTOR, SERVICE),
            bytes_read=bytes_read,
            flops=flops,
        )
        for label, peer in _PEERS.items()
    ]


def _against_all(goals: dict[str, float]) -> list[Comparison]:
    """Compares the service with all others, and the executor with the other libraries."""
    goals = {LLAMA_CPP: 1.1} | goals
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
        entries=_competitors("decode", {"steps": steps}, bytes_read=shape.decode_bytes(batch, context)),
        comparisons=_against_all(goals or {}),
        share=share,
        prepare=("prepare_decode", {"batch": batch, "context_tokens": context}),
        warm={"steps": 2},
    )


def _decode_32(shape: Shape) -> Workload:
    """One BatchDecode, and independent callers."""
    base = _decode(shape, 32, 128, steps=8, share=2.5, goals={EXECUTOR: 0.98})
    service = base.entries[-1]
    callers = {CALLERS: "unary", SESSIONS: "session"}
    more = [
        replace(service, label=label, arguments=service.arguments | {"mode": mode})
        for label, mode in callers.items()
    ]
    comparisons = [Comparison(label, SERVICE, 0.95) for label in callers]
    return replace(base, entries=[*base.entries, *more], comparisons=[*base.comparisons, *comparisons])


def _quantised(shape: Shape, form: str) -> list[Workload]:
    """The rows of one format. What a decode reads is known by the file, which the peers have."""
    goals = {1: 1.0, 8: 1.5, 32: 1.5}
    rows = [
        (_decode(shape, batch, 128, steps=steps, share=share), goals[batch])
        for batch, steps, share in ((1, 16, 1.0), (8, 10, 1.2), (32, 8, 2.0))
    ]
    rows.append((_prefill(shape, 1, share=1.5), 1.2))
    return [
        replace(
            row,
            name=f"{row.name}-{form}",
            title=f"{row.title}, {form}",
            entries=[
                replace(entry, peer=f"{entry.peer} {form}", bytes_read=0)
                for entry in row.entries
                if entry.label in (LLAMA_CPP, SERVICE)
            ],
            comparisons=[Comparison(SERVICE, LLAMA_CPP, goal)],
            group=QUANTISED,
        )
        for row, goal in rows
    ]


def _prefill(shape: Shape, batch: int, *, share: float) -> Workload:
    arguments = {"batch": batch, "prompt_tokens": 512}
    return Workload(
        name=f"prefill-{batch}x512",
        title=f"prefill, {batch} x 512 tokens",
        unit="prefill",
        entries=_competitors("prefill", arguments, flops=shape.prefill_flops(batch, 512)),
        comparisons=_against_all({}),
        share=share,
        prepare=("prepare_prefill", arguments),
        warm={"batch": 1},
        turn_over_warm=batch,
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
        Entry(f"bare echo: {name}", "gateway", "calls", {"server": "echo"} | loads[name], ours=False)
        for name in echoed
    ]
    entries = [
        Entry(f"gateway: {name}", "gateway", "calls", {"server": "quire"} | load)
        for name, load in loads.items()
    ]
    unary = "gateway: unary, 32 callers"
    comparisons = [
        *(Comparison(f"gateway: {name}", f"bare echo: {name}", 0.5) for name in echoed if "unary" in name),
        Comparison("gateway: BatchDecode of 32", "bare echo: BatchDecode of 32"),
        Comparison("gateway: BatchDecode of 32", unary, 8.0),
        Comparison("gateway: Session, 1 caller", "gateway: unary, 1 caller"),
        Comparison("gateway: Session, 32 callers", unary, 3.0),
        Comparison("gateway: one Session of 32", unary, 3.0),
    ]
    return Workload(
        name="gateway",
        title="gateway alone (weightless executor)",
        unit="call",
        entries=[*echoes, *entries],
        comparisons=comparisons,
        share=2.0,
        warm={"steps": 5},
    )
