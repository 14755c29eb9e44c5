"""What an attack is, how it is made and measured beside bystanders, and a table of the outcomes."""

from __future__ import annotations

import contextlib
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from google.protobuf.message import Message

from tests.attacks.bystanders import Bystanders
from tests.error_details import reason_of
from tests.gateway_process import GatewayProcess

SERVICE = "/quire.v1.ModelExecutorService/"
TIMEOUT_S = 90.0
# How long bystanders are measured alone, how long after an attack, and what it holds open is held.
ALONE_S, AFTER_S, HELD_S = 4.0, 1.0, 4.0
# The same in the short form, with so much of a try, and with bystanders who pause for so long.
SHORT_S, SHORT_HELD_S, SHORT_SHARE, SHORT_PAUSE_S = 0.3, 1.0, 0.25, 0.02
# The longest time in which memory may fall to what the gateway may keep.
GIVEN_BACK_S = 20.0
# Attacks whose tries are short are tried for at least this long.
LEAST_S = 3.0
MIB = 1 << 20


@dataclass(slots=True)
class Scene:
    """The target of an attack, and what was answered and seen."""

    gateway: GatewayProcess
    held_s: float = HELD_S
    # Of the calls and connections of one try, how many are made.
    share: float = 1.0
    answers: Counter[str] = field(default_factory=Counter)
    # What an attack has seen besides answers.
    notes: dict[str, Any] = field(default_factory=dict)
    # From preparing to attacking.
    held: dict[str, Any] = field(default_factory=dict)

    def send(self, rpc: str, request: Message | bytes, **options: Any) -> Any:
        """Makes a unary call with a message, or any bytes; counts the answer. None if it failed."""
        call = self.start(rpc, request, **options)
        self.count(call)
        return call.result() if call.exception() is None else None

    def start(self, rpc: str, request: Message | bytes, **options: Any) -> Any:
        """The future of a unary call. Its result is bytes."""
        assert self.gateway.channel is not None
        data = request if isinstance(request, bytes) else request.SerializeToString()
        method: Any = self.gateway.channel.unary_unary(SERVICE + rpc)
        return method.future(data, **({"timeout": TIMEOUT_S} | options))

    def count(self, call: Any) -> None:
        """Counts the answer of a call, for which it waits."""
        error = call.exception()
        self.answers["OK" if error is None else said(error)] += 1


def said(error: Any) -> str:
    """A failed call's code and reason."""
    return f"{error.code().name} {reason_of(error)}".strip()


@dataclass(frozen=True, slots=True)
class Attack:
    """Something that is done to a gateway again and again. `run` is one try."""

    name: str
    what: str
    run: Callable[[Scene], None]
    tries: int = 10
    prepare: Callable[[Scene], None] | None = None
    flags: Sequence[str] = ()
    # Instead of a plain gateway.
    gateway: Callable[[], GatewayProcess] | None = None
    least_s: float = LEAST_S

    def serve(self) -> GatewayProcess:
        """The gateway that it is meant for."""
        if self.gateway is not None:
            return self.gateway()
        return GatewayProcess(model="paged-attention", workers=2, flags=["--kv-pages", "4096", *self.flags])


@dataclass(frozen=True, slots=True)
class Outcome:
    """What an attack cost. Times in ms; `*_mib` at the highest."""

    attack: str
    tries: int
    seconds: float
    alone_p50_ms: float
    alone_p99_ms: float
    p50_ms: float
    p99_ms: float
    longest_ms: float
    steps: int
    failed: list[str]
    gateway_mib: float
    workers_mib: float
    kept_mib: float
    stall_ms: int
    replaced: int
    answers: dict[str, int]
    notes: dict[str, Any]


def run(attack: Attack) -> Outcome:
    """Makes an attack on a gateway of its own."""
    with attack.serve() as gateway:
        first = gateway.status().workers[0].worker_id
        with Bystanders(gateway.address, first, gateway.log_path.parent) as bystanders:
            return measure(attack, Scene(gateway), bystanders)


def measure(
    attack: Attack, scene: Scene, bystanders: Bystanders, tries: int = 0, kept_mib: float = 0
) -> Outcome:
    """Bystanders alone, beside the attack's tries, and what is left. `tries`: instead of the attack's.

    `kept_mib`: waits until the gateway keeps no more than that, or a time has passed.
    """
    settle_s = SHORT_S if tries else AFTER_S
    if attack.prepare is not None:
        attack.prepare(scene)
        time.sleep(settle_s)
    alone_s = time.monotonic()
    time.sleep(SHORT_S if tries else ALONE_S)
    before = scene.gateway.status()
    pids = [worker.pid for worker in before.workers]
    gateway, workers = _Memory([scene.gateway.process.pid]), _Memory(pids)
    began_s, done = time.monotonic(), 0
    while done < (tries or attack.tries) or (not tries and time.monotonic() - began_s < attack.least_s):
        attack.run(scene)
        done += 1
    seconds = time.monotonic() - began_s
    alone = bystanders.waits(alone_s, began_s)
    # Steps that wait are answered before they are counted.
    time.sleep(settle_s)
    beside = bystanders.waits(began_s, began_s + seconds + settle_s)
    after = scene.gateway.status()
    give_up_s = time.monotonic() + GIVEN_BACK_S
    while kept_mib and gateway.kept_mib() > kept_mib and time.monotonic() < give_up_s:
        time.sleep(0.1)
    stall_ms = after.longest_stall.ToMilliseconds()
    return Outcome(
        attack=attack.name,
        tries=done,
        seconds=round(seconds, 1),
        alone_p50_ms=round(alone.p50_ms, 2),
        alone_p99_ms=round(alone.p99_ms, 2),
        p50_ms=round(beside.p50_ms, 2),
        p99_ms=round(beside.p99_ms, 2),
        longest_ms=round(beside.longest_ms, 1),
        steps=beside.steps,
        failed=sorted(set(beside.failed)),
        gateway_mib=round(gateway.growth_mib(), 1),
        workers_mib=round(workers.growth_mib(), 1),
        kept_mib=round(gateway.kept_mib(), 1),
        # 0: no longer than one at the start of the server.
        stall_ms=stall_ms if stall_ms > before.longest_stall.ToMilliseconds() else 0,
        replaced=len({worker.pid for worker in after.workers} - set(pids)),
        answers=dict(scene.answers.most_common(6)),
        notes=dict(scene.notes),
    )


_HEAD = (
    "attack", "tries", "p50 alone / beside, ms", "p99 alone / beside, ms", "ratio", "longest, ms",
    "bystanders failed", "gateway / workers grew, MiB", "stall, ms", "replaced", "answered, and seen",
)  # fmt: skip


def table(outcomes: Iterable[Outcome], attacks: Mapping[str, Attack]) -> str:
    """The outcomes in Markdown, a line for each."""
    lines = ["| " + " | ".join(_HEAD) + " |", "|---|" + "---:|" * 5 + "---|" + "---:|" * 3 + "---|"]
    for o in outcomes:
        answered = [f"{name} {count:,}" for name, count in o.answers.items()]
        cells = (
            attacks[o.attack].what,
            f"{o.tries:,}",
            f"{o.alone_p50_ms:.1f} / {o.p50_ms:.1f}",
            f"{o.alone_p99_ms:.1f} / {o.p99_ms:.1f}",
            f"{o.p99_ms / o.alone_p99_ms if o.alone_p99_ms else math.nan:.1f}",
            f"{o.longest_ms:,.0f}",
            ", ".join(o.failed),
            f"{o.gateway_mib:,.0f} / {o.workers_mib:,.0f}",
            f"{o.stall_ms or ''}",
            f"{o.replaced}",
            ", ".join(answered + [f"{name}: {value}" for name, value in o.notes.items()]),
        )
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


class _Memory:
    """The resident memory of some processes from now on, at the highest, as the kernel counts it."""

    def __init__(self, pids: Sequence[int]) -> None:
        self._begin = {pid: self._read(pid, "VmRSS") for pid in pids}
        for pid in pids:
            # Resets the peak, where there is such a file.
            with contextlib.suppress(OSError):
                Path(f"/proc/{pid}/clear_refs").write_text("5")

    def growth_mib(self) -> float:
        """Of those that still are, in all."""
        return sum(max(0.0, self._read(pid, "VmHWM") - rss) for pid, rss in self._begin.items())

    def kept_mib(self) -> float:
        """What is not given back now."""
        return sum(max(0.0, self._read(pid, "VmRSS") - rss) for pid, rss in self._begin.items())

    @staticmethod
    def _read(pid: int, name: str) -> float:
        try:
            lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        except OSError:
            return 0.0
        return next((int(line.split()[1]) / 1024 for line in lines if line.startswith(name + ":")), 0.0)
