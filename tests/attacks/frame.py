"""What an attack is, and how one is run and measured beside bystanders."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from google.protobuf.message import Message

from benchmarks.checkout import ROOT
from tests.attacks.bystanders import Bystanders
from tests.error_details import reason_of
from tests.gateway_process import GatewayProcess

SERVICE = "/quire.v1.ModelExecutorService/"
TIMEOUT_S = 90.0
# Bystanders alone, and how long is looked at what an attack leaves behind.
ALONE_S = 4.0
AFTER_S = 1.0
# In the short form both.
SHORT_S = 0.3
# How long at most for what is kept to fall to what it may be.
GIVEN_BACK_S = 20.0
# Of some attacks a try is over before a bystander has noticed: they are tried for at least so long.
LEAST_S = 3.0
MIB = 1 << 20


@dataclass(slots=True)
class Scene:
    """What an attack acts on, and where it writes what it met."""

    gateway: GatewayProcess
    # Bystanders are in the first worker; what is done to workers is done to the last.
    victim: str
    answers: Counter[str] = field(default_factory=Counter)
    # What an attack has seen beside answers.
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
        """Counts what a call was answered, once it is."""
        error = call.exception()
        self.answers["OK" if error is None else said(error)] += 1

    def worker(self, worker_id: str) -> psutil.Process:
        """Its process."""
        return psutil.Process(next(w.pid for w in self.gateway.status().workers if w.worker_id == worker_id))


def said(error: Any) -> str:
    """A failed call's code and reason."""
    return f"{error.code().name} {reason_of(error)}".strip()


@dataclass(frozen=True, slots=True)
class Attack:
    """Something done to a gateway, again and again. `run` is one try."""

    name: str
    what: str
    run: Callable[[Scene], None]
    tries: int = 10
    prepare: Callable[[Scene], None] | None = None
    flags: Sequence[str] = ()
    # Ends a worker, and with it one process that is replaced. Or the gateway: then nothing is asked after.
    kills: int = 0
    ends_gateway: bool = False
    # By how much gateway and workers together may grow, from the settings.
    budget_mib: int = 256
    # Instead of a plain gateway. Given the checkout.
    gateway: Callable[[Path], GatewayProcess] | None = None
    # A setting without which there is nothing to try.
    needs: str = ""
    least_s: float = LEAST_S

    def serve(self, root: Path = ROOT) -> GatewayProcess:
        """The gateway that it is meant for."""
        if self.gateway is not None:
            return self.gateway(root)
        flags = ["--kv-pages", "4096", *self.flags]
        return GatewayProcess(model="paged-attention", workers=2, flags=flags, root=root)


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

    @property
    def ratio(self) -> float:
        """p99 beside the attack over p99 alone."""
        return self.p99_ms / self.alone_p99_ms if self.alone_p99_ms else math.nan


def run(attack: Attack, root: Path = ROOT) -> Outcome:
    """Against a gateway of its own."""
    with attack.serve(root) as gateway:
        workers = [worker.worker_id for worker in gateway.status().workers]
        token = getattr(gateway, "bystander_token", "")
        with Bystanders(gateway.address, workers[0], gateway.log_path.parent, token) as bystanders:
            return measure(attack, Scene(gateway, workers[-1]), bystanders)


def measure(
    attack: Attack, scene: Scene, bystanders: Bystanders, tries: int = 0, kept_mib: float = 0
) -> Outcome:
    """Bystanders alone, beside the attack's tries, and what is left. `tries`: instead of the attack's.

    `kept_mib`: what the gateway keeps is looked at once it is no more than that, or does not become so.
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
    # Whoever still waits is answered before it is looked at.
    time.sleep(settle_s)
    beside = bystanders.waits(began_s, began_s + seconds + settle_s)
    after = before if attack.ends_gateway else scene.gateway.status()
    give_up_s = time.monotonic() + GIVEN_BACK_S
    while kept_mib and gateway.kept_mib() > kept_mib and time.monotonic() < give_up_s:
        time.sleep(0.1)
    stall_ms = after.longest_stall_ms if after.longest_stall_ms > before.longest_stall_ms else 0
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
        stall_ms=stall_ms,
        replaced=len({worker.pid for worker in after.workers} - set(pids)) - attack.kills,
        answers=dict(scene.answers.most_common(6)),
        notes=dict(scene.notes),
    )


def as_dict(outcome: Outcome) -> dict[str, Any]:
    """For a file."""
    return dataclasses.asdict(outcome)


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


def signal_all(processes: Sequence[psutil.Process], number: int) -> None:
    """Sends a signal to those that still are."""
    for process in processes:
        try:
            os.kill(process.pid, number)
        except ProcessLookupError:
            continue
