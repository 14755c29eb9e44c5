"""Outcomes as a table in Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from tests.attacks.frame import Attack, Outcome

_HEAD = (
    "attack", "tries", "p50 alone / beside, ms", "p99 alone / beside, ms", "ratio", "longest, ms",
    "bystanders failed", "gateway / workers grew, MiB", "stall, ms", "replaced", "answered, and seen",
)  # fmt: skip


def table(outcomes: Iterable[Outcome], attacks: Mapping[str, Attack]) -> str:
    """One line for each."""
    lines = ["| " + " | ".join(_HEAD) + " |", "|---|" + "---:|" * 5 + "---|" + "---:|" * 3 + "---|"]
    lines += ["| " + " | ".join(_cells(outcome, attacks)) + " |" for outcome in outcomes]
    return "\n".join(lines)


def _cells(o: Outcome, attacks: Mapping[str, Attack]) -> Iterable[str]:
    yield attacks[o.attack].what
    yield f"{o.tries:,}"
    ends = attacks[o.attack].ends_gateway
    if ends:
        yield from ("", "", "", "")
    else:
        yield f"{o.alone_p50_ms:.1f} / {o.p50_ms:.1f}"
        yield f"{o.alone_p99_ms:.1f} / {o.p99_ms:.1f}"
        yield f"{o.ratio:.1f}"
        yield f"{o.longest_ms:,.0f}"
    yield "" if ends else ", ".join(o.failed)
    yield "" if ends else f"{o.gateway_mib:,.0f} / {o.workers_mib:,.0f}"
    # 0: no longer than one at the start of the server.
    yield f"{o.stall_ms}" if o.stall_ms else ""
    yield "" if ends else f"{o.replaced}"
    answered = [f"{name} {count:,}" for name, count in o.answers.items()]
    yield ", ".join(answered + [f"{name}: {value}" for name, value in o.notes.items()])
