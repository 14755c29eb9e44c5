"""KV on disk: what was evicted or lost is read back, with the same bits, or computed; never anything else."""

from __future__ import annotations

import dataclasses
import os
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.commands import Abort
from tests.damaged_pages import FAULTS, Fault, files_in, flip, make_foreign, swap, tear
from tests.model_factory import TinyModel, make_model
from tests.workers.disk_worker import PAGE, DiskWorker, random_trial, text
from workers import kv_disk
from workers.executors.llm import LlmExecutor
from workers.given_experts import GivenExperts
from workers.kv import disk_threads, page_files
from workers.kv.disk_pages import DiskPages, PageWrite
from workers.kv.page_directory import IDENTITY_BYTES
from workers.kv.page_files import PageFiles
from workers.kv_disk import KvDisk
from workers.models.errors import ModelError
from workers.models.kv_identity import kv_identity, weights_digest
from workers.operations import Failed, FailureReason, Forward, Kind, Reset, Result


def undisturbed(tokens: list[int]) -> bytes:
    return DiskWorker(None, pages=64).append(1, tokens)


def trial(directory: Path, seed: int, faults: Sequence[Fault] = FAULTS) -> None:
    random_trial(lambda: DiskWorker(directory, pages=12), directory, seed, undisturbed, faults)


def test_two_long_caches_evict_each_other_and_come_back_from_disk(tmp_path: Path) -> None:
    """Before, the second touch of a cache computed all of its tokens."""
    worker = DiskWorker(tmp_path)
    texts = {number: text(number, 15 * PAGE + 3) for number in (1, 2)}
    for number, tokens in texts.items():
        assert worker.append(number, tokens) == undisturbed(tokens)
        worker.store()
        worker.engine.release(number)
    for _ in range(2):
        for number, tokens in texts.items():
            assert worker.append(number, [*tokens, 5]) == undisturbed([*tokens, 5])
            assert worker.computed[-1] == 4
            worker.engine.release(number)
    assert worker.disk is not None
    usage = worker.disk.usage()
    assert (usage.written_pages, usage.dropped_pages, usage.refused_pages) == (30, 0, 0)
    # Some of the pages of a text, its first ones, are still in memory when it comes again.
    # All pages were wanted once before they were there.
    assert 30 < usage.read_pages == usage.wanted_pages - 30
    assert usage.bytes == 30 * files_in(tmp_path)[0].stat().st_blocks * 512


def test_another_process_goes_on_with_the_files_and_only_their_owner_may_read_them(tmp_path: Path) -> None:
    first = DiskWorker(tmp_path)
    tokens = text(1, 10 * PAGE + 1)
    first.append(1, tokens)
    # One that runs already learns of them, too, and one of other weights does not.
    sibling, foreign = DiskWorker(tmp_path), DiskWorker(tmp_path, identity=bytes(IDENTITY_BYTES))
    first.store()
    assert {stat.S_IMODE(path.stat().st_mode) for path in files_in(tmp_path)} == {0o600}
    folders = [path for path in (tmp_path / "quire-kv").rglob("*") if path.is_dir()]
    assert {stat.S_IMODE(path.stat().st_mode) for path in folders} == {0o700}
    for worker, computed in ((sibling, 1), (DiskWorker(tmp_path), 1), (foreign, len(tokens))):
        assert worker.append(7, tokens) == undisturbed(tokens)
        while worker is sibling and worker.computed[-1] != computed:
            worker.take_reports()
            worker.evict(7)
            assert worker.append(7, tokens) == undisturbed(tokens)
        assert worker.computed[-1] == computed


def test_the_prefix_of_a_text_is_read_and_the_rest_computed(tmp_path: Path) -> None:
    worker = DiskWorker(tmp_path)
    tokens = text(1, 8 * PAGE)
    worker.append(1, tokens)
    worker.store()
    worker.evict(1)
    # What follows the fifth page is another text.
    other = [*tokens[: 5 * PAGE], *text(2, 3 * PAGE)]
    assert worker.append(2, other) == undisturbed(other)
    assert worker.computed[-1] == 3 * PAGE
    # A sequence that ends with a page goes on with the next ones from disk.
    worker.evict(2)
    worker.append(3, tokens[: 2 * PAGE])
    assert worker.append(3, tokens[2 * PAGE :], 2 * PAGE) == undisturbed(tokens)
    # As always, at least one token is computed.
    assert worker.computed[-1] == PAGE


def test_a_tenant_does_not_get_what_another_one_has_computed(tmp_path: Path) -> None:
    """Nor can it find out what others ask for, by how fast it is answered."""
    worker, tokens = DiskWorker(tmp_path), text(1, 8 * PAGE + 1)
    for number, (salt, computed) in enumerate(
        [(b"one", 129), (b"other", 129), (b"", 129), (b"one", 1), (b"other", 1)]
    ):
        assert worker.append(number, tokens, salt=salt) == undisturbed(tokens)
        assert worker.computed[-1] == computed
        worker.store()
        worker.evict(number)


def test_forwards_with_the_same_prefix_share_one_read(tmp_path: Path) -> None:
    worker = DiskWorker(tmp_path)
    tokens = text(1, 10 * PAGE + 1)
    worker.append(1, tokens)
    worker.store()
    worker.evict(1)
    both = [worker.forward(number, tokens) for number in (2, 3)]
    answers = worker.answers(*both)
    for one in both:
        answer = answers[one.op_id]
        assert isinstance(answer, Forward) and answer.reused == 10 * PAGE
        assert answer.outputs[-1].logits == undisturbed(tokens)
    assert worker.disk is not None and worker.disk.usage().read_pages == 10


@settings(max_examples=settings().max_examples // 3)
@given(st.integers(0, 1 << 32))
def test_no_fault_of_a_file_changes_an_answer(tmp_path_factory: pytest.TempPathFactory, seed: int) -> None:
    trial(tmp_path_factory.mktemp("kv"), seed)


def ignore_digest(patch: pytest.MonkeyPatch) -> None:
    header = PageFiles._header
    patch.setattr(PageFiles, "_header", lambda self, _digest, views: header(self, bytes(16), views))


def ignore_identity(patch: pytest.MonkeyPatch) -> None:
    header = PageFiles._header

    def of_any(self: PageFiles, digest: bytes, views: list[memoryview]) -> bytes:
        return AnyIdentity(header(self, digest, views))

    patch.setattr(PageFiles, "_header", of_any)


class AnyIdentity(bytes):
    """The beginning of a file, which is equal to that of other weights."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, bytes) and self[:8] + self[24:] == other[:8] + other[24:]

    __hash__ = None  # type: ignore[assignment]


def ignore_checksums(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("zlib.crc32", lambda _: 0)


def publish_what_was_refused(patch: pytest.MonkeyPatch) -> None:
    end_read = KvDisk._end_read

    def publish(self: KvDisk, digest: bytes, outcome: object) -> None:
        page = self._pages.being_read(digest)
        assert page is not None
        self._table.filled(page, digest)
        end_read(self, digest, outcome)  # type: ignore[arg-type]

    patch.setattr(KvDisk, "_end_read", publish)


# With the faults that are dangerous then.
PLANTED = (
    (ignore_digest, [swap]),
    (ignore_identity, [make_foreign]),
    (ignore_checksums, [tear, flip]),
    (publish_what_was_refused, FAULTS),
)


@pytest.mark.parametrize(("plant", "faults"), PLANTED)
def test_planted_bugs_are_found(
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
    plant: Callable[[pytest.MonkeyPatch], None],
    faults: Sequence[Fault],
) -> None:
    def trials() -> None:
        for seed in range(40):
            trial(tmp_path_factory.mktemp("kv"), seed, faults)

    plant(monkeypatch)
    with pytest.raises(AssertionError):
        trials()


# A disk that fails.


def test_a_full_disk_ends_writes_until_it_has_room_with_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(disk_threads, "_RETRY_S", 0.0)
    worker = DiskWorker(tmp_path)
    assert worker.disk is not None
    texts = [text(number, 10 * PAGE) for number in range(5)]
    worker.append(0, texts[0])
    worker.store()

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as full:
        full.setattr(page_files, "_write_all", fail)
        for number in (1, 2):
            assert worker.append(number, texts[number]) == undisturbed(texts[number])
            worker.store()
            worker.evict(number - 1)
        assert worker.disk.usage().stopped
        # What is there is still read.
        worker.evict(2)
        assert worker.append(3, texts[0]) == undisturbed(texts[0])
        assert worker.computed[-1] == PAGE
        worker.evict(3)
    (line,) = [record for record in caplog.records if record.levelname == "ERROR"]
    assert "No space left on device" in line.getMessage()
    # The thread that writes tries again by itself.
    while worker.computed[-1] != PAGE or worker.disk.usage().stopped:
        assert worker.append(4, texts[4]) == undisturbed(texts[4])
        worker.store()
        worker.evict(4)
    assert len(files_in(tmp_path)) == 20


# Forwards that wait.


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bool]]:
    """Reads do not end before the list has an item."""
    may_read: list[bool] = []
    read = PageFiles.read

    def wait(self: PageFiles, digest: bytes, parent: bytes, views: list[memoryview]) -> object:
        while not may_read:
            time.sleep(0.001)
        return read(self, digest, parent, views)

    monkeypatch.setattr(PageFiles, "read", wait)
    yield may_read
    may_read.append(True)


def waiting(directory: Path) -> tuple[DiskWorker, Forward, list[int]]:
    """A worker with a forward that waits for pages."""
    worker = DiskWorker(directory)
    tokens = text(1, 10 * PAGE + 1)
    worker.append(1, tokens)
    worker.store()
    worker.evict(1)
    asked = worker.forward(2, tokens)
    worker.round(asked)
    assert worker.loop.operations_in_flight == 1
    return worker, asked, tokens


def drain(worker: DiskWorker, slow: list[bool]) -> None:
    """Lets the reads end. Nothing is held then, and what was read is in the prefix cache."""
    slow.append(True)
    assert worker.disk is not None
    while worker.disk.usage().read_pages < 10:
        worker.take_reports()
    table = worker.engine.kv_table
    assert table.usage().pages_referenced == sum(len(sequence.pages) for sequence in table)


def test_others_run_while_a_forward_waits(tmp_path: Path, slow: list[bool]) -> None:
    worker, asked, tokens = waiting(tmp_path)
    assert worker.append(3, text(3, 5)) == undisturbed(text(3, 5))
    # A decode of the sequence comes after it.
    decode = Forward(99, 2, len(tokens), [7], kind=Kind.DECODE)
    worker.round(decode)
    assert worker.loop.operations_in_flight == 2
    slow.append(True)
    found: dict[int, Result] = {}
    while not {asked.op_id, 99} <= found.keys():
        found |= {result.op_id: result for result in worker.round()}  # type: ignore[union-attr]
    answer = found[asked.op_id]
    assert isinstance(answer, Forward) and answer.outputs[-1].logits == undisturbed(tokens)
    assert worker.lengths()[2] == len(tokens) + 1


def test_a_forward_that_waits_can_be_aborted_expire_or_be_dropped(tmp_path: Path, slow: list[bool]) -> None:
    worker, asked, tokens = waiting(tmp_path)
    late = dataclasses.replace(worker.forward(4, tokens), deadline_ns=1)
    (failed,) = worker.round(late)
    assert isinstance(failed, Failed) and failed.reason is FailureReason.TIMEOUT
    worker.round(Abort(1000, asked.op_id))
    assert not worker.loop.operations_in_flight
    worker.round(worker.forward(5, tokens))
    worker.round(Reset(1))
    assert not worker.loop.operations_in_flight
    drain(worker, slow)
    assert worker.append(6, tokens) == undisturbed(tokens)
    assert worker.computed[-1] == 1


def test_a_disk_that_does_not_answer_is_given_up(
    tmp_path: Path, slow: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    worker, asked, tokens = waiting(tmp_path)
    monkeypatch.setattr(kv_disk, "PATIENCE_S", 0.0)
    monkeypatch.setattr("workers.step_loop._DISK_POLL_S", 0.001)
    found: list[Result] = []
    # Its ten pages are held until the disk answers, and the other ten are too few.
    while not found:
        found = worker.round()
    (failed,) = found
    assert isinstance(failed, Failed) and failed.op_id == asked.op_id
    assert failed.reason is FailureReason.KV_EXHAUSTED
    drain(worker, slow)
    assert worker.append(6, tokens) == undisturbed(tokens)


def test_pages_of_other_weights_are_neither_read_nor_stored(tmp_path: Path) -> None:
    worker = DiskWorker(tmp_path)
    tokens = text(1, 10 * PAGE + 1)
    worker.append(1, tokens)
    worker.store()
    assert worker.disk is not None
    worker.engine.release_all()
    worker.engine.kv_table.forget_prefixes()
    worker.disk.stop()
    worker.append(2, tokens)
    worker.append(3, text(3, 5 * PAGE))
    worker.store()
    assert worker.computed[-2:] == [len(tokens), 5 * PAGE]
    assert len(files_in(tmp_path)) == 10


# The states, without I/O.


@given(st.lists(st.tuples(st.integers(0, 7), st.integers(0, 9)), max_size=60))
@example([(0, 0), (2, 0), (3, 0), (1, 0), (0, 0), (2, 0), (7, 0)])
def test_states_agree_with_the_pool_whatever_happens(moves: list[tuple[int, int]]) -> None:
    pages = DiskPages()
    in_pool: dict[bytes, int] = {}
    writes: list[PageWrite] = []
    # What the thread reports is taken later: a page that is stored may be evicted, and filled again, by then.
    reports: list[tuple[PageWrite, bool]] = []
    for move, number in moves:
        digest = bytes([number]) * 16
        match move:
            case 0 if digest not in in_pool:
                in_pool[digest] = number
                pages.published(number, digest, bytes(16))
            case 1 if digest in in_pool:
                del in_pool[digest]
                pages.discarded(digest)
            case 2 if (write := pages.next_write()) is not None:
                # What is written is in the pool.
                assert in_pool[write.digest] == write.number
                writes.append(write)
            case 3 | 4 if writes:
                write = writes.pop(number % len(writes))
                assert write.is_stale or write.digest in in_pool
                reports.append((write, move == 3 and not write.is_stale))
            case 5:
                pages.listed([digest], [bytes([9 - number]) * 16] if number > 4 else [])
            case 6 if number == 0:
                pages.stop_writes()
            case 7 if reports:
                write, is_stored = reports.pop(0)
                pages.written(write, is_stored=is_stored)
        pages.check_integrity(in_pool.get)


# What files are valid for.


def test_pages_under_an_adapter_of_unknown_content_are_not_stored(tmp_path: Path) -> None:
    """Its number can be another adapter's when the worker starts again."""
    worker = DiskWorker(tmp_path, pages=40)
    numbered, known, given = b"a7/5:alice", b"a7f00d/5:alice", GivenExperts(0, np.zeros((1, 1, 1)))
    salts = (numbered, known, b"5:alice", given.salted(numbered), given.salted(known))
    for number, salt in enumerate(salts):
        worker.answers(Forward(number + 1, number, 0, text(1, 2 * PAGE), salt=salt))
    worker.store()
    assert len(files_in(tmp_path)) == 2 * 3


def test_the_identity_is_that_of_every_byte_of_the_weights_and_of_their_layout(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", TinyModel())
    before = weights_digest(model)
    (file,) = model.glob("*.safetensors")
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    assert weights_digest(model) != before
    os.mkfifo(model / "other.safetensors")
    with pytest.raises(ModelError, match="is not a regular file"):
        weights_digest(model)
    (model / "other.safetensors").unlink()

    def identity(dtype: str, *, batch_invariant: bool = True) -> bytes:
        executor = LlmExecutor.load(model, dtype=dtype, kv_pages=4, self_check=False)
        pages, described = executor.engine.kv, executor.info()
        return kv_identity(pages, described, before, batch_invariant=batch_invariant, bytes_wanted=16)

    others = {identity("bfloat16"), identity("float32", batch_invariant=False)}
    assert identity("float32") == identity("float32") not in others and len(others) == 2
