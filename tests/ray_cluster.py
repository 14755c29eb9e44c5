"""A Ray cluster of processes on this machine: `python -m tests.ray_cluster CPUS`, which are the head's.

Says its address, then one line for each line of standard input: `add` (the id of a node with one CPU),
`stop head`, `kill HEAD-OR-NODE-ID`, `drain NODE-ID`, or the end.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Self

import psutil

from benchmarks.checkout import ROOT, environment

_OBJECTS_BYTES = 80 << 20
_NOTICE_S = 60
# DRAIN_NODE_REASON_PREEMPTION. Idle nodes can refuse other reasons.
_PREEMPTION = 2


class RayCluster:
    """The process that owns the cluster's. Use as a context manager."""

    def __init__(self, *, cpus: int = 0) -> None:
        """`cpus`: of the head, which is a node as well if it has some."""
        settings = {
            "RAY_USAGE_STATS_ENABLED": "0",
            # By default a node starts a process for work that may come, and another for our actor's settings.
            "RAY_enable_worker_prestart": "0",
            # By default it takes Ray a quarter of a minute to miss a node. Of a process that is gone all
            # calls fail at once; one that is only slow has the whole timeout.
            "RAY_health_check_initial_delay_ms": "0",
            "RAY_health_check_period_ms": "300",
            "RAY_health_check_timeout_ms": "10000",
            "RAY_health_check_failure_threshold": "3",
        }
        self.has_head = True
        # Where workers dial their gateway, and the next one.
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.pool_address = f"127.0.0.1:{free.getsockname()[1]}"
        # Those that are neither lost nor leaving.
        self.nodes: set[str] = set()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.ray_cluster", str(cpus)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env=environment(ROOT) | settings,
        )
        try:
            self.address = self._answer()
        except AssertionError:
            # It has said why, and its pipes have to be closed.
            self._process.communicate()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with self._process:
            assert self._process.stdin is not None
            self._process.stdin.close()
            assert self._process.wait() == 0

    def add_node(self) -> str:
        """Returns its id."""
        node = self._ask("add")
        self.nodes.add(node)
        return node

    def stop_head(self) -> None:
        """SIGSTOP: what asks it has no answer. Of one that is killed Ray's drivers ask without a pause."""
        self.has_head = False
        self._ask("stop head")

    def kill(self, node: str = "head") -> None:
        """SIGKILL, as a machine that loses its power."""
        if node == "head":
            self.has_head = False
        self.nodes.discard(node)
        self._ask(f"kill {node}")

    def drain(self, node: str) -> None:
        """Says that a node will be gone in a minute, as the notice of a preemption does."""
        self.nodes.discard(node)
        self._ask(f"drain {node}")

    def _ask(self, line: str) -> str:
        assert self._process.stdin is not None
        print(line, file=self._process.stdin, flush=True)
        return self._answer()

    def _answer(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "the cluster has failed"
        return str(json.loads(line))


def processes_of(node: Any) -> list[int]:
    """Those that Ray has started for a node."""
    return [info.process.pid for infos in node.all_processes.values() for info in infos]


def kill(node: Any) -> None:
    """All processes of a node at once, which end one after the other by themselves."""
    processes = processes_of(node)
    children = [child for pid in processes for child in psutil.Process(pid).children(recursive=True)]
    node.kill_all_processes(check_alive=False, allow_graceful=False)
    for child in children:
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()


def drain(address: str, node_id: str) -> None:
    """As the command `ray drain-node`, which takes seconds to start."""
    raylet: Any = importlib.import_module("ray._raylet")
    deadline_ms = int(1e3 * (time.time() + _NOTICE_S))
    gcs = raylet.GcsClient(address=address)
    is_accepted, why = gcs.drain_node(node_id, _PREEMPTION, "a test", deadline_ms)
    assert is_accepted, why


def main() -> None:
    """Runs the cluster until standard input closes."""
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as directory:
        # For the file with the cluster's address. Ray reads this when it is imported.
        os.environ["RAY_TMPDIR"] = directory
        (Path(directory) / "ray").mkdir()
        # Only here: it warns, and tests end with warnings.
        from ray.cluster_utils import Cluster

        options: dict[str, Any] = {
            "object_store_memory": _OBJECTS_BYTES,
            "temp_dir": directory,
            "include_dashboard": False,
            # Programs that import Ray, for an autoscaler and for logs of drivers.
            "no_monitor": True,
            "include_log_monitor": False,
        }
        cluster = Cluster()
        nodes = {"head": cluster.add_node(num_cpus=int(sys.argv[1]), **options)}
        answer = cluster.address
        try:
            while True:
                os.write(answers, json.dumps(answer).encode() + b"\n")
                match sys.stdin.readline().split():
                    case ["add"]:
                        node = cluster.add_node(num_cpus=1, **options)
                        answer = node.node_id
                        nodes[answer] = node
                    case ["stop", answer]:
                        for pid in processes_of(nodes[answer]):
                            os.kill(pid, signal.SIGSTOP)
                    case ["kill", answer]:
                        # What has left Ray's processes is the test's.
                        kill(nodes.pop(answer))
                    case ["drain", node_id]:
                        drain(cluster.address, node_id)
                    case _:
                        break
        finally:
            for node in nodes.values():
                kill(node)


if __name__ == "__main__":
    # Ray prints to standard output.
    answers = os.dup(1)
    os.dup2(2, 1)
    main()
