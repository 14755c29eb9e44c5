"""KV on disk survives all processes: what was computed before a crash of everything is read, not computed."""

from __future__ import annotations

import os
from pathlib import Path

from quire.v1 import executor_pb2 as pb

from service.model_names import SHIPPED_MODEL
from tests.e2e.test_adoption import TIMEOUT_S, TOP, Home, home, top_logprobs_after

__all__ = ["home"]

PAGE = 16
# Of the shipped model's vocabulary; six full pages each.
TEXTS = [[(7 * i + i * i * step) % 11 for i in range(1, 101)] for step in (1, 3)]


def test_kv_comes_back_after_a_crash_of_the_gateway_and_all_workers(home: Home, tmp_path: Path) -> None:
    flags = ("--kv-disk", str(tmp_path), "--kv-disk-gb", "0.1")
    with home.start(*flags, model=SHIPPED_MODEL) as first:
        home.note_workers(first)
        caches = [
            first.stub.Prefill(pb.PrefillRequest(token_ids=text), timeout=TIMEOUT_S).kv_cache
            for text in TEXTS
        ]
        first.wait_until(lambda: sum(worker.kv_disk.written_pages for worker in first.status().workers) >= 12)
        first.kill()
        for worker in home.workers:
            worker.kill()
            worker.wait()
    # The machine went down with the others: one page was not written to its end.
    torn = max((path for path in tmp_path.rglob("*") if len(path.name) == 64), key=os.path.getsize)
    os.truncate(torn, torn.stat().st_size // 2)
    with home.start(*flags, model=SHIPPED_MODEL) as second:
        home.note_workers(second)
        for text, cache in zip(TEXTS, caches, strict=True):
            decode = pb.DecodeRequest(cache_id=cache.cache_id, token_id=7, position=len(text), output=TOP)
            answer = second.stub.Decode(decode, timeout=TIMEOUT_S)
            assert answer.replayed_tokens == len(text)
            assert list(answer.output.top.logprobs) == top_logprobs_after([*text, 7])
        used = [worker.kv_disk for worker in second.status().workers]
        read, refused = (sum(getattr(one, f"{name}_pages") for one in used) for name in ("read", "refused"))
        assert (read, refused) == (11, 1)
        # Of the text with the torn page all that comes after the page before it.
        computed = sum(worker.counts.step_tokens for worker in second.status().workers)
        whole = len(TEXTS[0]) + 1
        assert computed in [(whole - 6 * PAGE) + (whole - before * PAGE) for before in range(6)]
        assert all(not one.stopped and 0 < one.bytes <= one.max_bytes == 10**8 for one in used)
        for cache in caches:
            second.stub.ReleaseCache(pb.ReleaseCacheRequest(cache_id=cache.cache_id), timeout=TIMEOUT_S)
        second.assert_pools_are_whole()
