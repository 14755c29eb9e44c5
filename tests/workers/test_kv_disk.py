"""KV on disk: what was evicted or lost is read back, with the same bits, or computed; never anything else."""

from __future__ import annotations

import time
from pathlib import Path

from tests.workers.stepping import Worker
from workers.executors.weightless import PagedAttentionExecutor
from workers.kv.page_files import IDENTITY_BYTES, PageFiles
from workers.kv_disk import KvDisk
from workers.operations import DiskReport, Forward, Kind, LogitsFormat, OutputSpec

IDENTITY = bytes(range(IDENTITY_BYTES))
PAGE = 16
LOGITS = OutputSpec(logits=LogitsFormat.F32)


class DiskWorker(Worker):
    """A worker with few pages, whose KV is stored in a directory."""

    def __init__(
        self,
        directory: Path | None,
        *,
        pages: int = 20,
        identity: bytes = IDENTITY,
        max_bytes: int = 1 << 30,
    ) -> None:
        engine = PagedAttentionExecutor.create(kv_pages=pages).engine
        self.disk: KvDisk | None = None
        if directory is not None:
            files = PageFiles(
                directory,
                identity,
                page_bytes=engine.kv.bytes_per_page,
                pieces=len(engine.kv.page_views(0)),
                max_bytes=max_bytes,
            )
            self.disk = KvDisk(
                engine.kv_table, engine.kv.page_views, files, max_bytes=max_bytes, write_bytes_per_s=1e12
            )
        super().__init__(engine, kv_disk=self.disk)
        self.computed: list[int] = []

    def append(self, sequence: int, tokens: list[int], position: int = 0, **more: object) -> Forward:
        """The answer to a forward, which wants the logits of its last row."""
        op_id = len(self.computed) + 1
        forward = Forward(op_id, sequence, position, tokens, rows=1, output=LOGITS, **more)  # type: ignore[arg-type]
        answer = self.answers(forward)[op_id]
        assert isinstance(answer, Forward)
        self.computed.append(len(tokens) - answer.reused)
        return answer

    def store(self) -> None:
        """Waits until everything that is to be stored is stored."""
        assert self.disk is not None
        while self.disk.has_writes:
            time.sleep(0.001)
            self.loop.submit([DiskReport()])
            self.loop.take()
            self.engine.kv_table.check_integrity()


def text(seed: int, tokens: int) -> list[int]:
    return [(seed * 7919 + i * i * 31 + i) % 997 for i in range(tokens)]


def undisturbed(tokens: list[int]) -> bytes:
    logits = DiskWorker(None, pages=64).append(1, tokens).outputs[-1].logits
    assert logits is not None
    return logits


def test_two_long_caches_evict_each_other_and_come_back_from_disk(tmp_path: Path) -> None:
    worker = DiskWorker(tmp_path)
    first, second = text(1, 15 * PAGE + 3), text(2, 15 * PAGE + 3)
    worker.append(1, first)
    worker.store()
    # As the gateway preempts a cache: its sequence is released, and its pages give way.
    worker.engine.release(1)
    worker.append(2, second)
    worker.store()
    worker.engine.release(2)
    assert worker.engine.kv_table.usage().evicted_pages > 0
    again = worker.append(1, [*first, 5], kind=Kind.REPLAY)
    assert worker.computed[-1] == 4
    assert again.outputs[-1].logits == undisturbed([*first, 5])
