"""A real gateway with real workers in processes of their own, for tests from end to end."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, BinaryIO

import psutil
from quire.v1 import admin_pb2_grpc, executor_pb2, runner_pb2_grpc, types_pb2

from benchmarks import checkout, gateway_process
from tests.conftest import AS_SHIPPED
from tests.forks import GATEWAYS, WORKERS, Forked, fork_server

ROOT = checkout.ROOT
# Far more than anything takes.
_PATIENCE_S = 60
_FORKED = ("-m", "tests.forks")


def _start(
    command: Sequence[str], *, cwd: str, env: dict[str, str], stdout: BinaryIO, stderr: BinaryIO
) -> subprocess.Popen[bytes] | Forked:
    if tuple(command[1:3]) != _FORKED:
        return subprocess.Popen(command, cwd=cwd, env=env, stdout=stdout, stderr=stderr)
    files = (0, stdout.fileno(), stderr.fileno())
    return Forked(fork_server(*GATEWAYS), command, cwd=cwd, env=env, files=files)


vars(gateway_process)["subprocess"] = SimpleNamespace(Popen=_start, TimeoutExpired=subprocess.TimeoutExpired)


class GatewayProcess(gateway_process.GatewayProcess):
    """A `quire serve` on a free port, and what tests ask of its pools."""

    def __init__(
        self,
        *,
        model: str,
        workers: int = 1,
        flags: Sequence[str] = (),
        root: Path = ROOT,
        self_check: bool = False,
        forks: bool = True,
    ) -> None:
        """Without `self_check`, which has tests of its own, workers start seconds earlier; also if forked.

        `python -m pytest --as-shipped` has neither.
        """
        as_shipped = AS_SHIPPED in os.environ
        self._forks = forks and root == ROOT and not as_shipped
        flags = [*flags] if self_check or as_shipped else [*flags, "--no-self-check"]
        super().__init__(model=model, workers=workers, flags=flags, root=root)

    def _command(self, root: Path, *arguments: str) -> list[str]:
        if not self._forks:
            return super()._command(root, *arguments)
        return [sys.executable, *_FORKED, fork_server(*WORKERS), *arguments]

    @property
    def runner(self) -> runner_pb2_grpc.ModelRunnerServiceStub:
        assert self.channel is not None
        return runner_pb2_grpc.ModelRunnerServiceStub(self.channel)

    @property
    def admin(self) -> admin_pb2_grpc.AdminServiceStub:
        assert self.channel is not None
        return admin_pb2_grpc.AdminServiceStub(self.channel)

    @property
    def http_port(self) -> int:
        """Of a server that has --openai-listen."""
        records = (record for record in self.records() if record.get("event") == "listening for HTTP")
        return int(str(next(records)["listen"]).rpartition(":")[2])

    # The calls of many tests. `fields` are those of the request.

    def prefill(self, token_ids: Sequence[int], **fields: Any) -> executor_pb2.PrefillResponse:
        request = executor_pb2.PrefillRequest(token_ids=token_ids, **fields)
        answer: executor_pb2.PrefillResponse = self.stub.Prefill(request, timeout=_PATIENCE_S)
        return answer

    def decode(self, cache_id: str, token_id: int, **fields: Any) -> executor_pb2.DecodeResponse:
        request = executor_pb2.DecodeRequest(cache_id=cache_id, token_id=token_id, **fields)
        answer: executor_pb2.DecodeResponse = self.stub.Decode(request, timeout=_PATIENCE_S)
        return answer

    def verify(
        self, cache_id: str, token_ids: Sequence[int], **fields: Any
    ) -> executor_pb2.ForwardVerifyResponse:
        request = executor_pb2.ForwardVerifyRequest(cache_id=cache_id, token_ids=token_ids, **fields)
        answer: executor_pb2.ForwardVerifyResponse = self.stub.ForwardVerify(request, timeout=_PATIENCE_S)
        return answer

    def forward(self, token_ids: Sequence[int], **fields: Any) -> executor_pb2.ForwardResponse:
        request = executor_pb2.ForwardRequest(token_ids=token_ids, **fields)
        answer: executor_pb2.ForwardResponse = self.stub.Forward(request, timeout=_PATIENCE_S)
        return answer

    def truncate(self, cache_id: str, new_len: int, **fields: Any) -> executor_pb2.TruncateKVResponse:
        request = executor_pb2.TruncateKVRequest(cache_id=cache_id, new_len=new_len, **fields)
        answer: executor_pb2.TruncateKVResponse = self.stub.TruncateKV(request, timeout=_PATIENCE_S)
        return answer

    def capabilities(self) -> executor_pb2.GetCapabilitiesResponse:
        request = executor_pb2.GetCapabilitiesRequest()
        answer: executor_pb2.GetCapabilitiesResponse = self.stub.GetCapabilities(request, timeout=_PATIENCE_S)
        return answer

    def model(self) -> types_pb2.ModelDescription:
        answer: executor_pb2.GetModelInfoResponse = self.stub.GetModelInfo(
            executor_pb2.GetModelInfoRequest(), timeout=_PATIENCE_S
        )
        return answer.model

    def fork(self, cache_id: str, count: int = 1, **fields: Any) -> Sequence[types_pb2.KvCacheHandle]:
        request = executor_pb2.ForkCacheRequest(cache_id=cache_id, count=count, **fields)
        answer: executor_pb2.ForkCacheResponse = self.stub.ForkCache(request, timeout=_PATIENCE_S)
        return answer.kv_caches

    def release(self, cache_id: str) -> bool:
        """Whether there was such a cache."""
        request = executor_pb2.ReleaseCacheRequest(cache_id=cache_id)
        return bool(self.stub.ReleaseCache(request, timeout=_PATIENCE_S).released)

    def kill(self) -> None:
        """The gateway alone: workers may outlive it."""
        self.process.kill()
        self.process.wait()

    def wait_until(self, condition: Callable[[], bool]) -> None:
        """Polls, more seldom after a while. Fails after a minute, with the log."""
        give_up_s, pause_s = time.monotonic() + _PATIENCE_S, 0.01
        while not condition():
            assert time.monotonic() < give_up_s, f"it never happened:\n{self.log()}"
            time.sleep(pause_s)
            pause_s = min(1.05 * pause_s, 0.1)

    def worker_processes(self) -> set[psutil.Process]:
        """Those of its workers that run. One that is being replaced has no process, or one that is gone."""
        running = set()
        for worker in self.status().workers:
            with contextlib.suppress(psutil.NoSuchProcess):
                running.add(psutil.Process(worker.pid))
        return running

    def wait_until_in_flight(self, count: int) -> None:
        """Until at least so many operations are."""
        self.wait_until(lambda: self.status().operations_in_flight >= count)

    def pools(self) -> list[executor_pb2.WorkerCacheMetrics]:
        """The workers' pools, with their invariants checked."""
        request = executor_pb2.GetCacheMetricsRequest(check_integrity=True)
        return list(self.stub.GetCacheMetrics(request, timeout=30).workers)

    def assert_pools_are_whole(self) -> None:
        """No sequence holds a page, and the accounting of every pool adds up."""
        for worker in self.pools():
            pool = worker.pool
            assert worker.pool_intact, worker
            assert pool.sequences == 0 and pool.pages_referenced == 0, pool
            assert pool.pages_free + pool.pages_cached == pool.pages_total > 0, pool
