"""A worker whose KV is stored on disk, and what happens to it by chance."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.damaged_pages import FAULTS, Fault, files_in
from tests.workers.stepping import Worker
from workers.drafting import Drafts
from workers.executors.engine import Engine
from workers.executors.weightless import PagedAttentionExecutor
from workers.kv.page_directory import IDENTITY_BYTES, PageDirectory
from workers.kv.page_files import PageFiles
from workers.kv_disk import KvDisk
from workers.operations import Forward, Kind
from workers.outputs import DataType, OutputSpec

IDENTITY = bytes(range(IDENTITY_BYTES))
PAGE = 16
_LOGITS = OutputSpec(logits=DataType.F32)


class DiskWorker(Worker):
    """A worker with few pages, whose KV is stored in a directory. `engine`: other than one of no weights."""

    def __init__(
        self,
        directory: Path | None,
        *,
        pages: int = 20,
        engine: Engine | None = None,
        drafting: Drafts | None = None,
        identity: bytes = IDENTITY,
        max_bytes: int = 1 << 30,
    ) -> None:
        engine = engine or PagedAttentionExecutor.create(kv_pages=pages).engine
        self.disk: KvDisk | None = None
        if directory is not None:
            files = PageFiles(PageDirectory(directory, max_bytes), identity)
            self.disk = KvDisk(
                engine.kv_table, engine.kv.stored_views, files, max_bytes=max_bytes, write_bytes_per_s=1e12
            )
        super().__init__(engine, kv_disk=self.disk, drafting=drafting)
        self.computed: list[int] = []
        self._op_id = 0

    def forward(
        self, sequence: int, tokens: list[int], position: int = 0, salt: bytes = b"tenant"
    ) -> Forward:
        """Computes the logits of its last row."""
        self._op_id += 1
        return Forward(
            self._op_id, sequence, position, tokens, rows=1, output=_LOGITS, kind=Kind.REPLAY, salt=salt
        )

    def append(self, sequence: int, tokens: list[int], position: int = 0, salt: bytes = b"tenant") -> bytes:
        """The logits, once they are computed. `computed` gets the number of tokens that were."""
        answer = self.done(self.forward(sequence, tokens, position, salt))
        self.computed.append(len(tokens) - answer.reused)
        logits = answer.outputs[-1].logits
        assert logits is not None
        return logits

    def take_reports(self) -> None:
        """Lets the loop take what its threads have done."""
        self.loop.submit([])
        self.loop.take()
        self.engine.kv_table.check_integrity()

    def store(self) -> None:
        """Waits until everything that is to be stored is stored."""
        assert self.disk is not None
        self.loop.step()
        while self.disk.usage().unwritten_pages:
            time.sleep(0.001)
            self.take_reports()

    def evict(self, *sequences: int) -> None:
        """As the gateway preempts caches: their sequences are released, and their pages get other tokens."""
        for sequence in sequences:
            self.engine.release(sequence)
        table = self.engine.kv_table
        pages = table.held.allocate(table.pages_available)
        table.held.release(pages)
        table.check_integrity()


def text(seed: int, tokens: int, vocab: int = 997) -> list[int]:
    return [(seed * 7919 + i * i * 31 + i) % vocab for i in range(tokens)]


def random_trial(
    start: Callable[[], DiskWorker],
    directory: Path,
    seed: int,
    undisturbed: Callable[[list[int]], bytes],
    faults: Sequence[Fault] = FAULTS,
    vocab: int = 997,
) -> None:
    """Random appends, evictions, restarts and faults of files. Each answer is as if nothing had happened."""
    rng = random.Random(seed)
    # Some of them have prefixes in common.
    texts = {
        number: text(rng.randrange(2), 4 * PAGE, vocab) + text(number, 6 * PAGE, vocab) for number in range(4)
    }
    worker = start()
    for _ in range(12):
        match rng.randrange(5):
            case 0:
                worker = start()
            case 1:
                worker.store()
                worker.evict(*texts)
            case 2:
                worker.store()
                for path in files_in(directory):
                    if rng.random() < 0.3 and path.exists():
                        rng.choice(faults)(path, rng)
                worker.evict(*texts)
            case _:
                number = rng.choice(list(texts))
                tokens = texts[number][: rng.randrange(1, 10 * PAGE)]
                worker.evict(*texts)
                assert worker.append(number, tokens) == undisturbed(tokens)
