"""How fast a gateway starts, detects a killed worker, and replaces it."""

from __future__ import annotations

import os
import signal
import time

import grpc
from quire.v1 import executor_pb2

from benchmarks.gateway_process import GatewayProcess
from benchmarks.peers.base import Peer, PeerConfig, Sample

_MODEL = "adder"
_CALLS = 16
_TIMEOUT_S = 30


class RecoveryPeer(Peer):
    """A gateway with two workers of the shipped model, one of which is killed, and others that only start."""

    def __init__(self, config: PeerConfig) -> None:
        self._root = config.root
        self._gateway = GatewayProcess(model=_MODEL, workers=2, root=self._root)
        self._gateway.__enter__()

    def start(self) -> Sample:
        """From the start of a gateway with one worker until both serve."""
        began_ns = time.perf_counter_ns()
        with GatewayProcess(model=_MODEL, root=self._root) as gateway:
            took_ns = time.perf_counter_ns() - began_ns
            return Sample([took_ns], more={"gateway MB": gateway.status().memory_bytes / 1e6})

    def kill(self) -> dict[str, Sample]:
        """Pauses a worker, so that calls are in flight, and kills it. Measures until a new one serves."""
        gateway, stub = self._gateway, self._gateway.stub
        prefill = executor_pb2.PrefillRequest(token_ids=[1, 10, 3, 11])
        cache = stub.Prefill(prefill, timeout=_TIMEOUT_S).kv_cache
        victim = next(w for w in gateway.status().workers if w.worker_id == cache.worker_id)
        os.kill(victim.pid, signal.SIGSTOP)
        ended_ns: list[int] = []
        calls = []
        for token in range(_CALLS):
            request = executor_pb2.DecodeRequest(cache_id=cache.cache_id, token_id=token % 10)
            call = stub.Decode.future(request, timeout=_TIMEOUT_S)
            call.add_done_callback(lambda _: ended_ns.append(time.perf_counter_ns()))
            calls.append(call)
        while gateway.status().operations_in_flight < _CALLS:
            time.sleep(0.005)
        killed_ns = time.perf_counter_ns()
        os.kill(victim.pid, signal.SIGKILL)
        codes = {call.code() for call in calls}
        if codes != {grpc.StatusCode.OK}:
            raise RuntimeError(f"calls ended with {codes}")
        while not self._has_heir(victim):
            time.sleep(0.005)
        gateway.wait_until_ready()
        whole_ns = time.perf_counter_ns()
        stub.ReleaseCache(executor_pb2.ReleaseCacheRequest(cache_id=cache.cache_id), timeout=_TIMEOUT_S)
        answers = Sample([at_ns - killed_ns for at_ns in ended_ns])
        return {"to each answer": answers, "to a new worker": Sample([whole_ns - killed_ns])}

    def close(self) -> None:
        self._gateway.stop()

    def _has_heir(self, victim: executor_pb2.WorkerStatus) -> bool:
        workers = self._gateway.status().workers
        return any(w.worker_id == victim.worker_id and w.epoch > victim.epoch for w in workers)
