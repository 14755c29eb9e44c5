"""The soak with workers that Ray places: `python -m tests.soak.on_ray`. Nodes of the cluster are lost, too.

The cluster's nodes are processes of this machine (`tests.ray_cluster`), and each has room for one worker. One
that was killed or drained is replaced by another one. Prints JSON.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

import psutil

from benchmarks import machine
from tests.ray_cluster import RayCluster
from tests.soak.__main__ import soak
from tests.soak.faults import Injector
from tests.soak.options import parser
from tests.soak.server import Server, runs

_DRIVER = "service.extensions.ray.placement"
_LEAVE_TIMEOUT_S = 60.0
_POLL_S = 0.1


class RayServer(Server):
    """Its workers are no children of the gateway: their pids are in its log."""

    def __init__(self, cluster: RayCluster, *args: Any, flags: list[str], **settings: Any) -> None:
        flags = [*flags, "--ray-address", cluster.address, "--workers", "auto"]
        super().__init__(*args, flags=flags, **settings)
        # What holds each worker, by node, and how much of the log was read.
        self._holders: dict[int, tuple[psutil.Process, str]] = {}
        self._seen_bytes = 0

    def worker_pids(self) -> list[int]:
        """Those that run."""
        return [pid for node in {node for _, node in self._running()} for pid in self.pids_on(node)]

    def pids_on(self, node: str) -> list[int]:
        """The workers of a node."""
        found = []
        for holder, its in self._running():
            with contextlib.suppress(psutil.NoSuchProcess):
                found += [child.pid for child in holder.children() if its == node]
        return found

    def driver_pids(self) -> list[int]:
        """What speaks with Ray."""
        children = [] if self.has_ended else psutil.Process(self.pid).children()
        return [child.pid for child in children if _DRIVER in child.cmdline()]

    def _running(self) -> list[tuple[psutil.Process, str]]:
        with self.log_path.open("rb") as log:
            log.seek(self._seen_bytes)
            for line in log:
                if not line.endswith(b"\n"):
                    break
                self._seen_bytes += len(line)
                if b'"ray: worker placed"' in line:
                    self._note(json.loads(line))
        self._holders = {pid: found for pid, found in self._holders.items() if runs(found[0])}
        return list(self._holders.values())

    def _note(self, record: dict[str, Any]) -> None:
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(record["pid"])
            # A number may have been used again.
            if "service.extensions.ray.worker" in process.cmdline():
                self._holders[process.pid] = process, record["node"]


class RayInjector(Injector):
    """Also kills and drains nodes, and kills the process that speaks with Ray. At first, each kind once."""

    def __init__(self, cluster: RayCluster, nodes: list[str], server: RayServer, *args: Any) -> None:
        super().__init__(server, *args)
        self._cluster = cluster
        self._nodes = nodes
        self._ray_server = server
        kinds = {method.__name__: method for _, method in self._kinds}
        self._kinds = [
            (0.35, self._kill_node),
            (0.10, self._drain_node),
            (0.10, self._kill_driver),
            (0.20, kinds["_kill_worker"]),
            (0.05, kinds["_stop_worker"]),
            (0.05, kinds["_pause_worker"]),
            (0.10, kinds["_kill_gateway"]),
            (0.05, kinds["_kill_all"]),
        ]
        self._first = [method for _, method in self._kinds]

    async def _kill_node(self) -> None:
        """With its workers: as when a machine loses its power. Then another one joins."""
        node = self._rng.choice(self._nodes)
        pids = self._ray_server.pids_on(node)
        self._note("Ray node SIGKILL")
        for pid in pids:
            self._server.kill(pid, signal.SIGKILL)
        await asyncio.to_thread(self._cluster.kill, node)
        await self._replace(node)

    async def _drain_node(self) -> None:
        """As before a preemption. The node is to become empty before its deadline."""
        node = self._rng.choice(self._nodes)
        self._note("Ray node drained")
        await asyncio.to_thread(self._cluster.drain, node)
        loop = asyncio.get_running_loop()
        end_s = loop.time() + _LEAVE_TIMEOUT_S
        while self._ray_server.pids_on(node):
            if loop.time() > end_s:
                self._tally.lose("unexpected errors", "a drained node still has a worker")
                break
            await asyncio.sleep(_POLL_S)
        await asyncio.to_thread(self._cluster.kill, node)
        await self._replace(node)

    async def _replace(self, node: str) -> None:
        self._nodes.remove(node)
        self._nodes.append(await asyncio.to_thread(self._cluster.add_node))

    async def _kill_driver(self) -> None:
        if pids := self._ray_server.driver_pids():
            self._note("Ray driver SIGKILL")
            self._server.kill(pids[0], signal.SIGKILL)


def main() -> int:
    """Runs the command line."""
    command = parser("python -m tests.soak.on_ray", __doc__, faults=100, callers=6, texts=12)
    options = command.parse_args()
    with tempfile.TemporaryDirectory(prefix="quire-soak-") as scratch, RayCluster() as cluster:
        nodes = [cluster.add_node() for _ in range(options.workers)]
        parts = functools.partial(RayServer, cluster), functools.partial(RayInjector, cluster, nodes)
        tally = asyncio.run(soak(options, Path(scratch), *parts))
    found = {"seed": options.seed, "machine": machine.describe()}
    print(json.dumps(found | tally.summary(), indent=2))
    return 0 if tally.is_clean() and tally.num_faults >= min(options.faults, 1) else 1


if __name__ == "__main__":
    sys.exit(main())
