"""What is done to processes, and to the files they need, from outside."""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import signal
import statistics
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
from quire.v1 import executor_pb2 as pb

from benchmarks.checkout import environment, quire_command
from tests.attacks.frame import TIMEOUT_S, Attack, Scene, signal_all
from tests.gateway_process import GatewayProcess
from tests.model_factory import TinyModel, make_model

_PAUSE_S = 5.0
_HEARTBEAT = ("--heartbeat-timeout-s", "2")


def _replaced(scene: Scene, old_pid: int) -> None:
    """Waits until the victim's place is taken by another process that is ready, and notes for how long."""
    began_s = time.monotonic()
    while time.monotonic() < began_s + TIMEOUT_S:
        workers = {worker.worker_id: worker for worker in scene.gateway.status().workers}
        victim = workers[scene.victim]
        if victim.pid != old_pid and victim.state == pb.WORKER_STATE_READY:
            scene.notes["replaced after s"] = round(time.monotonic() - began_s, 1)
            return
        time.sleep(0.02)
    scene.notes["never replaced"] = True


def pause_gateway(scene: Scene) -> None:
    os.kill(scene.gateway.process.pid, signal.SIGSTOP)
    time.sleep(_PAUSE_S)
    os.kill(scene.gateway.process.pid, signal.SIGCONT)
    # A verdict would come with the next beats.
    time.sleep(3)


def no_descriptors(scene: Scene) -> None:
    process, victim = psutil.Process(scene.gateway.process.pid), scene.worker(scene.victim)
    limits = process.rlimit(resource.RLIMIT_NOFILE)
    process.rlimit(resource.RLIMIT_NOFILE, (process.num_fds() - 8, limits[1]))
    victim.kill()
    time.sleep(_PAUSE_S)
    process.rlimit(resource.RLIMIT_NOFILE, limits)
    _replaced(scene, victim.pid)


def no_socket_directory(scene: Scene) -> None:
    victim = scene.worker(scene.victim)
    sockets = {Path(str(c.laddr)) for c in victim.net_connections("unix") if str(c.laddr).startswith("/")}
    for path in {path.parent for path in sockets}:
        shutil.rmtree(path)
    scene.notes["removed"] = len(sockets)
    victim.kill()
    _replaced(scene, victim.pid)


def other_model(scene: Scene) -> None:
    model, victim = _Tiny.directory, scene.worker(scene.victim)
    model.rename(model.with_name("good"))
    make_model(model, TinyModel(seed=2))
    victim.kill()
    give_up_s, served = time.monotonic() + 20, False
    while time.monotonic() < give_up_s and not served and "holds another model" not in scene.gateway.log():
        worker = next(w for w in scene.gateway.status().workers if w.worker_id == scene.victim)
        served = worker.state == pb.WORKER_STATE_READY and worker.pid != victim.pid
        time.sleep(0.05)
    scene.notes["the other model was served"] = served
    shutil.rmtree(model)
    model.with_name("good").rename(model)
    _replaced(scene, victim.pid)


class _Tiny(GatewayProcess):
    """Serves a model whose directory can be replaced."""

    directory: Path

    def __init__(self, root: Path) -> None:
        _Tiny.directory = make_model(Path(tempfile.mkdtemp()) / "model", TinyModel(seed=1))
        super().__init__(model=str(self.directory), workers=2, flags=["--kv-pages", "128"], root=root)


def group_terminated(scene: Scene) -> None:
    """As a service manager does, in the worst order, with a long prefill in flight."""
    workers = [psutil.Process(worker.pid) for worker in scene.gateway.status().workers]
    request = pb.PrefillRequest(token_ids=[i % 1000 for i in range(20_000)])
    call = scene.start("Prefill", request)
    time.sleep(0.05)
    scene.notes["in flight"] = not call.done()
    signal_all([*workers, psutil.Process(scene.gateway.process.pid)], signal.SIGTERM)
    scene.count(call)
    scene.notes["status"] = scene.gateway.process.wait(60)
    _, alive = psutil.wait_procs(workers, timeout=10)
    scene.notes["orphans"] = len(alive)
    signal_all(alive, signal.SIGKILL)


def gateway_killed(scene: Scene) -> None:
    """With a worker that hangs."""
    workers = [psutil.Process(worker.pid) for worker in scene.gateway.status().workers]
    workers[-1].suspend()
    scene.gateway.process.kill()
    began_s = time.monotonic()
    _, alive = psutil.wait_procs(workers, timeout=10)
    scene.notes |= {"orphans": len(alive), "gone after s": round(time.monotonic() - began_s, 2)}
    signal_all(alive, signal.SIGKILL)


def hung_worker(scene: Scene) -> None:
    """Stopped for less than the heartbeat timeout: new work goes elsewhere, and nobody is killed."""
    victim = scene.worker(scene.victim)
    took_s: list[float] = scene.held.setdefault("took_s", [])
    calls: list[Any] = []
    until_s = time.monotonic() + _PAUSE_S
    victim.suspend()
    while (began_s := time.monotonic()) < until_s:
        request = pb.PrefillRequest(token_ids=[len(calls) % 900, *range(40)])
        # One that went to the victim waits with it.
        call = scene.start("Prefill", request)
        call.add_done_callback(lambda _, began_s=began_s: took_s.append(time.monotonic() - began_s))
        calls.append(call)
        time.sleep(0.02)
    victim.resume()
    for call in calls:
        scene.count(call)
        cache_id = pb.PrefillResponse.FromString(call.result()).kv_cache.cache_id
        scene.send("ReleaseCache", pb.ReleaseCacheRequest(cache_id=cache_id))
    scene.notes["new prefills, median ms"] = round(statistics.median(took_s) * 1000, 1)
    scene.notes["waited for it"] = f"{sum(wait > 1 for wait in took_s)} of {len(took_s)}"


class _Unread(GatewayProcess):
    """Its log is a pipe that is read until it listens, and then no more."""

    def __init__(self, root: Path) -> None:
        self.log_path = Path(tempfile.mkdtemp(prefix="quire-gateway-")) / "log"
        self._wanted_workers = 2
        self.channel = None
        self._read_end, write_end = os.pipe()
        self._log = b""
        command = quire_command(root, "serve", "--model", "paged-attention", "--listen", "127.0.0.1:0")
        command += ["--device", "cpu", "--workers", "2", "--log-format", "json", "--log-level", "debug"]
        state = {"XDG_STATE_HOME": str(self.log_path.parent)}
        self.process = subprocess.Popen(
            command, stderr=write_end, stdout=write_end, cwd="/", env=environment(root) | state
        )
        os.close(write_end)

    def log(self) -> str:
        return self._log.decode(errors="replace")

    def stop(self) -> int:
        with contextlib.suppress(RuntimeError):
            super().stop()
        os.close(self._read_end)
        return self.process.wait()

    def _wait_for_address(self) -> str:
        while b'"listening"' not in self._log or b"\n" not in self._log.partition(b'"listening"')[2]:
            self._log += os.read(self._read_end, 1 << 12)
        found: Any = next(record for record in self.records() if record["event"] == "listening")
        return str(found["listen"])


def unread_log(scene: Scene) -> None:
    """Each call is a line of the log."""
    for _ in range(500):
        scene.send("GetModelInfo", b"", timeout=5)


def unread_log_at_its_end(scene: Scene) -> None:
    unread_log(scene)
    scene.gateway.process.send_signal(signal.SIGTERM)
    try:
        scene.notes["status"] = scene.gateway.process.wait(45)
    except subprocess.TimeoutExpired:
        scene.notes["status"] = "SIGTERM was ignored"
        scene.gateway.process.kill()


ATTACKS = (
    Attack(
        "paused gateway",
        "SIGSTOP of the gateway for 5 s, with a heartbeat timeout of 2 s",
        pause_gateway,
        tries=2,
        flags=_HEARTBEAT,
    ),
    Attack("hung worker", "SIGSTOP of one of two workers for 5 s", hung_worker, tries=2),
    Attack("descriptors", "no descriptors left while a worker is killed", no_descriptors, tries=1, kills=1),
    Attack(
        "socket directory",
        "the directory of the sockets removed, and a worker killed",
        no_socket_directory,
        tries=1,
        kills=1,
    ),
    Attack(
        "other model",
        "another model in the same directory, and a worker killed",
        other_model,
        tries=1,
        kills=1,
        gateway=_Tiny,
    ),
    Attack(
        "unread log",
        "a log pipe that nobody reads, with a line for each call",
        unread_log,
        tries=8,
        gateway=_Unread,
    ),
    Attack(
        "unread log, end",
        "the same, and then SIGTERM",
        unread_log_at_its_end,
        tries=1,
        gateway=_Unread,
        ends_gateway=True,
        least_s=0,
    ),
    Attack(
        "group SIGTERM",
        "SIGTERM to all processes, the workers first",
        group_terminated,
        tries=1,
        ends_gateway=True,
        least_s=0,
    ),
    Attack(
        "killed gateway",
        "SIGKILL of the gateway, with a worker that is stopped",
        gateway_killed,
        tries=1,
        ends_gateway=True,
        least_s=0,
    ),
)
