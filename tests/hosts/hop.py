"""What the way to a worker costs: `python -m tests.hosts.hop` (needs root; two minutes). Prints JSON.

Decodes of the weightless model through a worker on the gateway's Unix socket, on TCP with mutual TLS, and on
other hosts, which are network namespaces, with links of different quality. Then decodes of a model of 27
million parameters on one host and on two, with a full batch for each worker. The rows take turns. CPU times
are of the gateway and of the busiest worker, since all "hosts" share the cores of this machine.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from benchmarks import machine
from benchmarks.checkout import ROOT, environment, quire_command
from benchmarks.shapes import Shape
from benchmarks.weights import make_model
from tests.hosts.network import GATEWAY, Network, missing, worker_hosts

_HOSTS = worker_hosts(2)
_PORT = 50052
_BATCH = 32
_PROMPT_TOKENS = 64
# Then caches are truncated to their prompts.
_STEPS = 64
_TIMEOUT_S = 60.0
_WEIGHTLESS = "paged-attention"
_SHAPE = Shape("hop", 8192, 512, 1536, 8, 8, 4, 64)


@dataclass
class Place:
    """A gateway and where its workers are. `link`: how good the link to them is."""

    gateway: Any
    # Of the gateway, and of the workers.
    pids: list[int]
    link: dict[str, float] | None = None
    has_model: bool = False


@dataclass
class Row:
    """What was measured in one place with one workload. Times in seconds."""

    latency: list[float] = field(default_factory=list)
    tokens: int = 0
    took: float = 0.0
    cpu: dict[int, float] = field(default_factory=lambda: defaultdict(float))

    def summary(self) -> dict[str, float]:
        """Per token, and per call."""
        ordered = sorted(self.latency)
        gateway, *workers = self.cpu.values()
        return {
            "tokens_per_s": round(self.tokens / self.took, 1),
            "p50_ms": round(1e3 * ordered[len(ordered) // 2], 3),
            "p99_ms": round(1e3 * ordered[int(0.99 * len(ordered))], 3),
            "calls": len(ordered),
            "gateway_cpu_us_per_token": round(1e6 * gateway / self.tokens, 1),
            "busiest_worker_cpu_us_per_token": round(1e6 * max(workers) / self.tokens, 1),
            "tokens_per_cpu_s_of_the_busiest_worker": round(self.tokens / max(workers), 1),
        }


class Sequences:
    """Caches of one gateway that are decoded together."""

    def __init__(self, stub: Any, count: int) -> None:
        from quire.v1 import executor_pb2 as pb

        self._pb, self._stub = pb, stub
        prefills = [pb.PrefillRequest(token_ids=[n + 1] * _PROMPT_TOKENS) for n in range(count)]
        answers = [stub.Prefill(prefill, timeout=_TIMEOUT_S) for prefill in prefills]
        self._ids = [answer.kv_cache.cache_id for answer in answers]

    def reset(self) -> None:
        """Truncates all to their prompts."""
        for cache_id in self._ids:
            request = self._pb.TruncateKVRequest(cache_id=cache_id, new_len=_PROMPT_TOKENS)
            self._stub.TruncateKV(request, timeout=_TIMEOUT_S)

    def step(self, position: int) -> None:
        """Decodes one token of each, in one call."""
        decodes = [
            self._pb.DecodeRequest(cache_id=cache_id, token_id=1, position=position) for cache_id in self._ids
        ]
        if len(decodes) == 1:
            self._stub.Decode(decodes[0], timeout=_TIMEOUT_S)
            return
        answer = self._stub.BatchDecode(self._pb.BatchDecodeRequest(items=decodes), timeout=_TIMEOUT_S)
        assert not any(result.HasField("error") for result in answer.results), answer

    def release(self) -> None:
        """Gives all back."""
        for cache_id in self._ids:
            self._stub.ReleaseCache(self._pb.ReleaseCacheRequest(cache_id=cache_id), timeout=_TIMEOUT_S)


def measure(place: Place, count: int, seconds: float, row: Row) -> None:
    """Decodes so many sequences in one call, for so long, after some steps that do not count."""
    sequences = Sequences(place.gateway.stub, count)
    for position in range(_STEPS // 4):
        sequences.step(_PROMPT_TOKENS + position)
    end_s = time.monotonic() + seconds
    while time.monotonic() < end_s:
        sequences.reset()
        before, began_s = _cpu_s(place.pids), time.monotonic()
        for position in range(_STEPS):
            call_s = time.monotonic()
            sequences.step(_PROMPT_TOKENS + position)
            row.latency.append(time.monotonic() - call_s)
            if time.monotonic() > end_s:
                break
        row.took += time.monotonic() - began_s
        row.tokens += count * (position + 1)
        for pid, cpu_s in _cpu_s(place.pids).items():
            row.cpu[pid] += cpu_s - before[pid]
    sequences.release()


def _cpu_s(pids: Sequence[int]) -> dict[int, float]:
    times = {pid: psutil.Process(pid).cpu_times() for pid in pids}
    return {pid: found.user + found.system for pid, found in times.items()}


@contextlib.contextmanager
def places(network: Network, scratch: Path) -> Iterator[dict[str, Place]]:
    """All gateways and workers."""
    from benchmarks.gateway_process import GatewayProcess

    pool, model = scratch / "pool", str(make_model(_SHAPE, scratch))
    quiet: dict[str, Any] = {"env": environment(ROOT), "stdout": subprocess.DEVNULL, "cwd": "/"}
    subprocess.run(quire_command(ROOT, "pool", "init", str(pool)), check=True, **quiet)
    ports = itertools.count(_PORT)
    with contextlib.ExitStack() as stack:

        def worker(host: str, address: str) -> psutil.Process:
            command = ["worker", "--pool", str(pool), "--threads", "1", "--gateway", address]
            command = [*network.command(host), *quire_command(ROOT, *command)]
            started = subprocess.Popen(command, stderr=subprocess.DEVNULL, **quiet)
            stack.callback(started.wait, _TIMEOUT_S)
            stack.callback(started.terminate)
            return psutil.Process(started.pid)

        def gateway(name: str, *hosts: str, model: str = _WEIGHTLESS) -> Place:
            flags = ["--kv-pages", "1024", "--threads-per-worker", "1", "--no-self-check"]
            flags += ["--data-dir", str(scratch / name)]
            address = ""
            if hosts:
                own = "127.0.0.1" if GATEWAY in hosts else network.address(GATEWAY)
                address = f"{own}:{next(ports)}"
                flags += ["--pool", str(pool), "--pool-listen", address]
            commands = [worker(host, address) for host in hosts]
            count = len(hosts) or 1
            found = stack.enter_context(GatewayProcess(model=model, workers=count, flags=flags))
            remote = [command.children()[0].pid for command in commands]
            local = [worker.pid for worker in found.status().workers]
            return Place(found, [found.process.pid, *(remote or local)], has_model=model != _WEIGHTLESS)

        local, loopback = gateway("local"), gateway("loopback", GATEWAY)
        one, two = gateway("one", _HOSTS[0]), gateway("two", *_HOSTS)

        def at(**link: float) -> Place:
            return Place(one.gateway, one.pids, link)

        yield {
            "this host, Unix socket": local,
            "this host, TCP and mTLS": loopback,
            "another host": at(),
            "another host, 1 ms each way": at(delay_s=0.001),
            "another host, 10 ms each way": at(delay_s=0.01),
            "another host, 1 % of packets lost": at(loss=0.01),
            "two other hosts": Place(two.gateway, two.pids, {}),
            "one other host, a model": gateway("model-one", _HOSTS[0], model=model),
            "two other hosts, a model": gateway("model-two", *_HOSTS, model=model),
        }


def _all_rows(
    network: Network, found: dict[str, Place], rounds: int, seconds: float
) -> dict[str, dict[str, Row]]:
    workloads = {"Decode": 1, f"BatchDecode of {_BATCH}": _BATCH}
    full = f"BatchDecode of {_BATCH} for each worker"
    rows: dict[str, dict[str, Row]] = defaultdict(lambda: defaultdict(Row))
    for number in range(rounds):
        for name, place in found.items():
            for host in _HOSTS:
                network.set_link(GATEWAY, host, **(place.link or {}))
            chosen = {full: _BATCH * (len(place.pids) - 1)} if place.has_model else workloads
            for workload, count in chosen.items():
                measure(place, count, seconds, rows[workload][name])
        print(f"round {number + 1} of {rounds}", file=sys.stderr, flush=True)
    return rows


def main() -> int:
    """Runs the command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.hosts.hop", description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=2.0, help="of each row in each round")
    parser.add_argument("--places", default="", help="only those with this in their names")
    options = parser.parse_args()
    if lacks := missing():
        print(f"tests.hosts.hop: {lacks}", file=sys.stderr)
        return 2
    with (
        tempfile.TemporaryDirectory(prefix="quire-hop-") as scratch,
        Network([GATEWAY, *_HOSTS]) as network,
    ):
        network.enter(GATEWAY)
        before = machine.times_s()
        with places(network, Path(scratch)) as found:
            chosen = {name: place for name, place in found.items() if options.places in name}
            rows = _all_rows(network, chosen, options.rounds, options.seconds)
        disturbance = machine.disturbance(before, machine.times_s())
    tables = {workload: {name: row.summary() for name, row in of.items()} for workload, of in rows.items()}
    print(json.dumps({"machine": machine.describe(), "disturbance": disturbance} | tables, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
