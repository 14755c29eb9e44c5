"""Callers who ask for much at once, or for what takes long."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable

from quire.v1 import executor_pb2 as pb

from benchmarks.checkout import ROOT, environment
from tests.attacks.frame import TIMEOUT_S, Attack, Scene

_GREEDY_S = 5.0


def _beside(kind: str) -> Callable[[Scene], None]:
    """For some seconds, a caller of `greedy.py`."""

    def run(scene: Scene) -> None:
        caller = subprocess.Popen(
            [sys.executable, "-m", "tests.attacks.greedy", kind, scene.gateway.address],
            cwd=ROOT, env=environment(ROOT), stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip
        assert caller.stdout is not None
        caller.stdout.readline()
        time.sleep(_GREEDY_S)
        told, _ = caller.communicate()
        scene.notes["it made"] = told.decode().strip()

    return run


def many_forks(scene: Scene) -> None:
    """8,000 caches of 100 tokens."""
    _fork(scene, 8_000)


def _fork(scene: Scene, count: int) -> None:
    stub = scene.gateway.stub
    while count > 0:
        answer = stub.Prefill(pb.PrefillRequest(token_ids=range(100)), timeout=TIMEOUT_S)
        request = pb.ForkCacheRequest(cache_id=answer.kv_cache.cache_id, count=min(1024, count))
        stub.ForkCache(request, timeout=TIMEOUT_S)
        count -= 1024


def very_many_forks(scene: Scene) -> None:
    _fork(scene, 60_000)


def check_integrity(scene: Scene) -> None:
    scene.send("GetCacheMetrics", pb.GetCacheMetricsRequest(check_integrity=True))


def list_past_the_end(scene: Scene) -> None:
    scene.send("ListCaches", pb.ListCachesRequest(page_size=1000, page_token=str(10**12)))
    scene.send("ListCaches", pb.ListCachesRequest(page_size=1000))


def long_prefills(scene: Scene) -> None:
    """Each begins with another token, so that nothing is found computed."""
    first = scene.held["first"] = scene.held.get("first", 0) + 12
    prompts = [[(first + k) % 1000, *range(first % 900, first % 900 + 99)] * 40 for k in range(12)]
    calls = [scene.start("Prefill", pb.PrefillRequest(token_ids=prompt)) for prompt in prompts]
    for call in calls:
        scene.count(call)
    for call in calls:
        if call.exception() is None:
            cache_id = pb.PrefillResponse.FromString(call.result()).kv_cache.cache_id
            scene.gateway.stub.ReleaseCache(pb.ReleaseCacheRequest(cache_id=cache_id), timeout=TIMEOUT_S)


ATTACKS = (
    Attack("company", "nothing: a process computes beside them", _beside("spin"), tries=1),
    Attack("256 in flight", "a Session with 256 calls in flight", _beside("pipeline"), tries=1),
    Attack("flood", "Sessions that send as fast as they can and read nothing", _beside("flood"), tries=1),
    Attack("prefills", "12 prompts of 4,000 tokens at once", long_prefills, tries=3),
    Attack(
        "check_integrity", "a check of pools with 8,000 forks", check_integrity, tries=5, prepare=many_forks
    ),
    Attack(
        "ListCaches",
        "a page past the end of 60,000 caches, and the first",
        list_past_the_end,
        tries=100,
        prepare=very_many_forks,
    ),
)
