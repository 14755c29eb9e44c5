"""Workers that Ray has placed: on a cluster of several nodes, all of them on this machine."""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest

from tests import undisturbed
from tests.e2e.test_remote_workers import PROMPT, TIMEOUT_S, Text
from tests.gateway_process import GatewayProcess
from tests.ray_cluster import RayCluster

pytestmark = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="ray is not installed")


class Shared:
    """A cluster that tests share: each node, and each head, has processes that import Ray."""

    def __init__(self) -> None:
        self.stack = contextlib.ExitStack()
        self._cluster: RayCluster | None = None

    def with_nodes(self, count: int) -> RayCluster:
        """With just so many. In the order of this file each test uses what the one before leaves."""
        if self._cluster is None or not self._cluster.has_head or len(self._cluster.nodes) > count:
            self.stack.close()
            self._cluster = self.stack.enter_context(RayCluster())
        while len(self._cluster.nodes) < count:
            self._cluster.add_node()
        return self._cluster


@pytest.fixture(scope="module")
def shared() -> Iterator[Shared]:
    shared = Shared()
    with shared.stack:
        yield shared


@pytest.fixture(scope="module")
def expected() -> list[int]:
    return undisturbed.greedy(PROMPT, 31)


def serve(cluster: RayCluster, data: Path, *more: str, workers: int) -> GatewayProcess:
    flags = ["--ray-address", cluster.address, "--data-dir", str(data)]
    flags += ["--orphan-grace-s", "60", "--kv-pages", "256", *more]
    return GatewayProcess(model="paged-attention", workers=workers, flags=flags)


def said(gateway: GatewayProcess, event: str) -> list[dict[str, object]]:
    return [record for record in gateway.records() if record["event"] == event]


def wait_for(gateway: GatewayProcess, event: str, times: int = 1) -> None:
    gateway.wait_until(lambda: len(said(gateway, event)) >= times)


class Placed(NamedTuple):
    """A worker, and the process that holds it and ends with it."""

    worker_id: str
    node: str
    process: psutil.Process


def placed(gateway: GatewayProcess) -> list[Placed]:
    """Those that run."""
    found = []
    for record in said(gateway, "ray: worker placed"):
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(int(str(record["pid"])))
            found.append(Placed(str(record["worker_id"]), str(record["node"]), process))
    return found


# That Ray launches, places and finds workers again is in the last test. Nodes that are drained and lost are
# only here and in the next one: half a minute of a core each.
@pytest.mark.thorough
def test_nodes_join_and_are_drained(shared: Shared, tmp_path: Path, expected: list[int]) -> None:
    """With `auto` each node has a worker. Callers of a node that is drained continue on the others."""
    cluster = shared.with_nodes(1)
    (first,) = cluster.nodes
    environment = tmp_path / "env.json"
    environment.write_text('{"env_vars": {"QUIRE_TEST_OF_RAY": "given"}}')
    flags = ["--workers", "auto", "--ray-runtime-env", str(environment)]
    with serve(cluster, tmp_path / "data", *flags, workers=1) as gateway:
        second = cluster.add_node()
        wait_for(gateway, "worker ready", 2)
        before = placed(gateway)
        assert {worker.node for worker in before} == {first, second}
        (child,) = before[0].process.children()
        assert child.environ()["QUIRE_TEST_OF_RAY"] == "given"
        callers = [Text(gateway, expected) for _ in range(4)]
        for caller in callers:
            caller.decode(gateway)
        held = {pool.worker_id: pool.pool.sequences for pool in gateway.pools()}
        drained = max(before, key=lambda worker: held[worker.worker_id])
        cluster.drain(drained.node)
        wait_for(gateway, "worker's machine is leaving")
        for caller in callers:
            caller.decode(gateway)
        # The worker ends, so the node does, and has no room for another one.
        drained.process.wait(TIMEOUT_S)
        wait_for(gateway, "ray: node left")
        gateway.wait_until(lambda: len(gateway.pools()) == 1)
        for caller in callers:
            caller.decode(gateway)
        assert [pool.pool.sequences for pool in gateway.pools()] == [len(callers)]
        assert placed(gateway) == [worker for worker in before if worker is not drained]


@pytest.mark.thorough  # As above. A lost worker is one of any launcher's, as in test_worker_faults.py.
def test_lost_driver_and_lost_node(shared: Shared, tmp_path: Path, expected: list[int]) -> None:
    """Callers continue on the other node, and a worker is placed on the next node that joins.

    That another process than before speaks with Ray changes nothing.
    """
    cluster = shared.with_nodes(2)
    nodes = set(cluster.nodes)
    with serve(cluster, tmp_path, workers=2) as gateway:
        callers = [Text(gateway, expected) for _ in range(4)]
        for caller in callers:
            caller.decode(gateway)
        (driver,) = psutil.Process(gateway.process.pid).children()
        driver.kill()
        wait_for(gateway, "ray: connected", 2)
        assert said(gateway, "ray: connected")[1]["actors"] == 2
        before = placed(gateway)
        assert {worker.node for worker in before} == nodes
        held = {pool.worker_id: pool.pool.sequences for pool in gateway.pools()}
        lost = max(before, key=lambda worker: held[worker.worker_id])
        cluster.kill(lost.node)
        lost.process.kill()
        for caller in callers:
            caller.decode(gateway)
        wait_for(gateway, "worker is gone")
        for caller in callers:
            caller.decode(gateway)
        assert sum(caller.replayed for caller in callers) > 0
        joined = cluster.add_node()
        gateway.wait_until_ready()
        after = placed(gateway)
        assert joined in {worker.node for worker in after}
        for caller in callers:
            caller.decode(gateway)
    # Given back: none stays.
    _, alive = psutil.wait_procs([worker.process for worker in after], timeout=TIMEOUT_S)
    assert not alive


def test_lost_gateway_and_lost_head(tmp_path: Path, expected: list[int]) -> None:
    """The next gateway finds the workers by Ray, with their KV. Without Ray they go on."""
    with RayCluster(cpus=1) as cluster:
        with serve(cluster, tmp_path, workers=1) as gateway:
            caller = Text(gateway, expected)
            caller.decode(gateway)
            gateway.kill()
            (worker,) = placed(gateway)
        with serve(cluster, tmp_path, workers=1) as gateway:
            caller.decode(gateway)
            assert placed(gateway) == [worker]
            assert caller.replayed == 0
            cluster.stop_head()
            wait_for(gateway, "Ray is out of reach: workers run on, and none is placed")
            cluster.kill()
            caller.decode(gateway)
            assert worker.process.is_running() and caller.replayed == 0
    worker.process.wait(TIMEOUT_S)
