"""Batches on model workers that crash, drop caches and are slow, with clients that leave and resume.

Every sample that ends must have the tokens of the toy model, and nothing is left of anything.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import sys
from collections import defaultdict
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import structlog
from quire.v1 import runner_pb2, types_pb2

from service.api.request_limits import RequestLimits
from service.caches.requests import Append, Appended, Fork, Handle, Handles, Release, Request
from service.caches.tenants import Quota, Tenant
from service.dispatcher import Dispatcher, OnOutcomes, Outcome
from service.errors import QuotaExceeded
from service.runtimes import local_run, sample_steps
from service.runtimes.base import Batch
from service.runtimes.local_run import LocalRun
from service.runtimes.preparing import PreparedItem
from service.runtimes.sample import SampleSpec
from service.runtimes.speculation import PromptLookup
from service.text import tasks
from service.text.constraints import Constraints, Grammar, Matcher
from service.text.task_process import TaskProcess
from tests.error_details import status_reason
from tests.sim.harness import MAX_SEQ_LEN, Gateway
from tests.sim.model_worker import Pool
from tests.sim.toy_model import VOCAB, next_token
from workers.common import worker_pb2

END = 3
# Those of one test.
SEEDS = pytest.mark.parametrize(
    "seeds", [range(16), pytest.param(range(16, 160), marks=pytest.mark.thorough)]
)


class Reader:
    """A ChunkSink that keeps all chunks, and is full at random."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self.chunks: dict[tuple[str, int], list[runner_pb2.SampleChunk]] = defaultdict(list)
        self.release_callbacks: list[Callable[[], None]] = []

    def put(self, chunks: Sequence[runner_pb2.SampleChunk]) -> None:
        for chunk in chunks:
            own = self.chunks[chunk.item_id, chunk.sample]
            assert not (own and own[-1].finish_reason), "nothing follows the end"
            assert chunk.position == sum(len(c.token_ids) for c in own)
            own.append(chunk)

    async def wait_for_room(self) -> None:
        if self._rng.random() < 0.1:
            for _ in range(self._rng.randrange(3)):
                await asyncio.sleep(0)

    def on_release(self, callback: Callable[[], None]) -> None:
        self.release_callbacks.append(callback)

    def cancel(self) -> None:
        """The batch will not be resumed."""
        for callback in self.release_callbacks:
            callback()

    def tokens(self, item_id: str, sample: int) -> list[int]:
        return [token for chunk in self.chunks[item_id, sample] for token in chunk.token_ids]


def prepared(
    item_id: str,
    prompt: Sequence[int],
    max_tokens: int,
    samples: int,
    max_draft_tokens: int = 0,
    *,
    has_draft_model: bool = False,
    min_logprob: float | None = None,
) -> PreparedItem:
    spec = SampleSpec(
        item_id,
        prompt,
        max_tokens,
        frozenset([END]),
        (),
        None,
        with_logprobs=False,
        max_draft_tokens=max_draft_tokens,
        has_draft_model=has_draft_model,
        min_logprob=min_logprob,
    )
    return PreparedItem(
        spec,
        samples,
        weights=0,
        adapter=0,
        cache_salt="",
        answer_bytes=100,
        is_large=False,
        deadline_s=None,
        new_matcher=None,
        _output=types_pb2.OutputOptions(logprob=min_logprob is not None),
        _first_mask=None,
        _limits=RequestLimits(vocab_size=0, max_response_bytes=0),
    )


def whole_text(item: PreparedItem) -> list[int]:
    """The expected tokens of each sample of an item."""
    tokens, least = list(item.spec.prompt), item.spec.min_logprob
    found: list[int] = []
    while len(found) < item.spec.max_tokens and END not in found:
        if found and least is not None and -found[-1] < least:
            break
        found.append(next_token(tokens, None))
        tokens.append(found[-1])
    return found


async def run_to_end(run: LocalRun, items: Sequence[PreparedItem]) -> None:
    with contextlib.closing(run):
        await run.run(items)


class World:
    """A gateway with two model workers, and batches on it."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.gateway = Gateway(workers=2, pool=Pool(self.rng.choice([24, 100])))
        self.items: dict[str, list[PreparedItem]] = {}
        self.readers: list[tuple[str, Reader]] = []
        self.tasks: dict[str, asyncio.Task[None]] = {}
        self.keeps: set[str] = set()
        self._next_worker = 2

    def begin(self) -> None:
        key = f"batch {len(self.items)}"
        self.items[key] = [
            prepared(
                f"{key} item {n}",
                [self.rng.randrange(VOCAB) for _ in range(self.rng.choice([1, 2, 20]))],
                self.rng.randint(1, 20),
                self.rng.choice([1, 1, 3]),
                self.rng.choice([0, 1, 5]),
                has_draft_model=self.rng.random() < 0.5,
                # As the toy model has it, the two last tokens of its vocabulary end a text.
                min_logprob=self.rng.choice([None, 2.5 - VOCAB]),
            )
            for n in range(self.rng.randint(1, 4))
        ]
        if self.rng.random() < 0.5:
            self.keeps.add(key)
        self.run(key)

    def run(self, key: str) -> None:
        reader = Reader(self.rng)
        self.readers.append((key, reader))
        keep_s = 1000.0 if key in self.keeps else 0.0
        asked = [
            runner_pb2.ExecuteItem(item_id=item.spec.item_id, n=item.num_samples) for item in self.items[key]
        ]
        run = LocalRun(self.gateway.dispatcher, Batch(key, None, asked, keep_s=keep_s), reader)
        self.tasks[key] = asyncio.create_task(run_to_end(run, self.items[key]))

    async def leave(self, key: str) -> None:
        """Ends a run as a server that stops: a kept batch can be resumed."""
        self.tasks[key].cancel()
        await asyncio.wait([self.tasks[key]])

    def resume_kept(self) -> None:
        """Resumes the kept batches that were ended, on the same server."""
        for key in self.keeps:
            if self.tasks[key].cancelled():
                self.run(key)

    async def cancel_kept(self) -> None:
        """Cancels all kept batches, wherever they are."""
        for key, reader in dict(self.readers).items():
            reader.cancel()
            if not self.tasks[key].done():
                await self.leave(key)

    async def something(self) -> None:
        workers = self.gateway.workers
        choice = self.rng.random()
        running = [key for key, task in self.tasks.items() if not task.done()]
        if choice < 0.06 and len(self.items) < 6:
            self.begin()
        elif choice < 0.09 and running:
            await self.leave(self.rng.choice(running))
        elif choice < 0.11 and workers:
            self.gateway.lose_worker(self.rng.choice(list(workers)), crashed=False)
            self.gateway.start_worker(f"worker-{self._next_worker}")
            self._next_worker += 1
        elif choice < 0.15:
            self.gateway.wait(0.1)
        elif workers:
            worker = self.rng.choice(list(workers.values()))
            worker.take(self.rng.randint(0, len(worker.inbox)))
            if worker.has_jobs:
                worker.step(all_jobs=self.rng.random() < 0.5)
            if self.rng.random() < 0.7:
                self.gateway.deliver(worker)
        for _ in range(self.rng.randrange(4)):
            await asyncio.sleep(0)

    async def finish(self) -> None:
        for _ in range(10_000):
            if all(task.done() for task in self.tasks.values()):
                break
            self.gateway.work()
            self.gateway.wait(0.1)
            for _ in range(3):
                await asyncio.sleep(0)
        for task in self.tasks.values():
            if not task.cancelled():
                await task

    def check(self) -> None:
        for key, reader in self.readers:
            for item in self.items[key]:
                text = whole_text(item)
                for sample in range(item.num_samples):
                    chunks = reader.chunks[item.spec.item_id, sample]
                    tokens = reader.tokens(item.spec.item_id, sample)
                    assert tokens == text[: len(tokens)]
                    if not chunks or not chunks[-1].finish_reason:
                        continue
                    if chunks[-1].HasField("error"):
                        # Workers crashed while they computed it.
                        assert status_reason(chunks[-1].error) == "SEQUENCE_QUARANTINED"
                        continue
                    assert tokens == text


@pytest.fixture(autouse=True)
def drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts are often right, which they rarely are where a text is looked up that the toy model writes."""
    rng = random.Random(0)

    def draft(lookup: PromptLookup, length: int) -> Sequence[int]:
        token_ids = list(lookup.token_ids)
        for _ in range(rng.randint(0, length)):
            token_ids.append(next_token(token_ids, None) if rng.random() < 0.8 else rng.randrange(VOCAB))
        return token_ids[len(lookup.token_ids) :]

    monkeypatch.setattr(PromptLookup, "draft", draft)


@SEEDS
async def test_samples_are_complete_and_nothing_leaks_under_faults(seeds: range) -> None:
    assert MAX_SEQ_LEN >= 41
    for seed in seeds:
        world = World(seed)
        world.begin()
        for _ in range(150):
            await world.something()
        world.resume_kept()
        await world.finish()
        world.check()
        last = dict(world.readers)
        for key, reader in last.items():
            if not world.tasks[key].cancelled():
                assert all(chunks[-1].finish_reason for chunks in reader.chunks.values())
        # Kept caches stay until their lease ends.
        for _ in range(3):
            world.gateway.wait(2000)
            world.gateway.dispatcher.expire(list(world.gateway.machine.index))
            world.gateway.work()
        machine = world.gateway.machine
        assert not len(machine) and not machine.operations_in_flight and not machine.num_parked, seed
        assert not world.gateway.held()


@SEEDS
async def test_a_cancelled_batch_releases_its_caches_at_any_point(seeds: range) -> None:
    for seed in seeds:
        world = World(seed)
        world.begin()
        for _ in range(world.rng.randrange(100)):
            await world.something()
        world.resume_kept()
        world.gateway.disk.is_slow = world.rng.random() < 0.7
        await asyncio.sleep(0)
        for _ in range(world.rng.randrange(6)):
            await world.something()
        # A run that has ended like this needs a new one before its batch can be cancelled.
        world.resume_kept()
        await asyncio.sleep(0)
        await world.cancel_kept()
        world.gateway.disk.is_slow = False
        world.gateway.disk.settle()
        await world.finish()
        for _ in range(9):
            # Releases by request ids are a task of their own.
            await asyncio.sleep(0)
            world.gateway.work()
        machine = world.gateway.machine
        assert not len(machine) and not machine.operations_in_flight, seed


class FakeDispatcher:
    """Answers every request at once, but may refuse forks."""

    def __init__(self, reused: Sequence[int] = ()) -> None:
        """`reused`: the reused_tokens of the prefills, in order. Without any, forks are refused."""
        self.requests: list[Request] = []
        self._reused = list(reused)
        self._can_fork = bool(reused)

    def new_caller(self) -> int:
        return 1

    def start(self, requests: Sequence[Request], on_outcomes: OnOutcomes, *_: object) -> list[int]:
        self.requests += requests
        on_outcomes([(index, self._outcome(index, request)) for index, request in enumerate(requests)])
        return [0] * len(requests)

    def release(self, cache_ids: Sequence[str], *_: object) -> None:
        self.requests += [Release(cache_id) for cache_id in cache_ids]

    def cancel(self, _tickets: object) -> None:
        """No request is in flight."""

    def _outcome(self, index: int, request: Request) -> Outcome:
        if isinstance(request, Fork):
            if not self._can_fork:
                return QuotaExceeded("max_caches", 1)
            return Handles([Handle(f"fork {n}", 0, 1, "worker-0", 1e9, 0, 0) for n in range(request.count)])
        length = len(request.token_ids) if isinstance(request, Append) else 0
        answer = worker_pb2.ForwardDone(outputs=[types_pb2.StepOutput(token_id=5)])
        if self._reused:
            answer.reused_tokens = self._reused.pop(0)
        return Appended(f"cache {index}", length, 1, "worker-0", 1e9, 0, 0, answer, length)


def run_on(dispatcher: FakeDispatcher, reader: Reader) -> LocalRun:
    return LocalRun(cast(Dispatcher, dispatcher), Batch("key", None, []), reader)


async def test_a_prefix_that_cannot_be_forked_is_released_at_once() -> None:
    dispatcher = FakeDispatcher()
    run = run_on(dispatcher, Reader(random.Random(1)))
    await run.run([prepared("shared", [1, 2, 3], 3, 2), prepared("other", [4], 40, 1)])
    fork = next(at for at, request in enumerate(dispatcher.requests) if isinstance(request, Fork))
    releases = [at for at, request in enumerate(dispatcher.requests) if isinstance(request, Release)]
    assert fork < releases[0] < len(dispatcher.requests) // 2, "others have tokens to come"


@pytest.mark.parametrize(("max_per_s", "used"), [(5, 0), (7, 2)])
async def test_samples_beyond_the_rate_are_refused_before_their_prompt_is_computed(
    monkeypatch: pytest.MonkeyPatch, max_per_s: int, used: int
) -> None:
    """It is a request, and so are its copies. Before, some of four samples were refused after them."""
    monkeypatch.setattr(local_run, "time", SimpleNamespace(monotonic=lambda: 0.0))
    gateway, reader, alice = Gateway(), Reader(random.Random(1)), Tenant("alice", Quota(max_per_s=max_per_s))
    alice.admit(0.0, used)
    run = LocalRun(gateway.dispatcher, Batch("key", alice, []), reader)
    running = asyncio.create_task(run_to_end(run, [prepared("x", [1, 2, 3], 1, 4)]))
    while not running.done():
        gateway.work()
        await asyncio.sleep(0)
    ends = [reader.chunks["x", sample][-1].error for sample in range(4)]
    assert [status_reason(error) for error in ends] == ["QUOTA"] * 4 and not gateway.sent


class FullReader(Reader):
    """It is full from its first chunk on, until `has_room` is set."""

    def __init__(self) -> None:
        super().__init__(random.Random(1))
        self.has_room = asyncio.Event()

    async def wait_for_room(self) -> None:
        if self.chunks:
            await self.has_room.wait()


async def test_no_step_begins_while_the_reader_is_full() -> None:
    dispatcher, reader = FakeDispatcher(), FullReader()
    run = run_on(dispatcher, reader)
    running = asyncio.create_task(run.run([prepared("x", [1], 40, 1)]))
    for _ in range(100):
        await asyncio.sleep(0)
    # The step after the first chunk may have begun.
    assert len(reader.tokens("x", 0)) == 1 and len(dispatcher.requests) <= 2
    reader.has_room.set()
    await running
    assert len(reader.tokens("x", 0)) == 40


class SlowMatcher:
    """A matcher whose masks wait until `may_continue` is set."""

    is_complete = False

    def __init__(self) -> None:
        self.num_calls = self.num_turns = 0
        self.may_continue = asyncio.Event()
        # Works that have begun; each goes on if its caller leaves.
        self.works: list[asyncio.Future[Any]] = []

    async def in_turn(self, work: Callable[[Any], Coroutine[Any, Any, Any]]) -> Any:
        self.num_turns += 1
        self.works.append(asyncio.ensure_future(work(TaskProcess(tasks.MASK))))
        return await asyncio.shield(self.works[-1])

    def take(self, token_id: int) -> None:
        """Allows every token."""

    async def allowed_along(
        self, _process: object, _draft: Sequence[int], most: int
    ) -> tuple[Sequence[int], Sequence[bytes]]:
        assert not most
        self.num_calls += 1
        await self.may_continue.wait()
        return (), (bytes(1),)


@pytest.mark.parametrize("turns", [*range(6), None])
async def test_masks_of_a_run_that_is_cancelled_are_no_failure_and_the_last(turns: int | None) -> None:
    """They are ready so many turns of the loop later, or when it has ended."""
    matcher = SlowMatcher()
    item = replace(prepared("x", [1], 10, 8), new_matcher=lambda: cast(Matcher, matcher))
    run = run_on(FakeDispatcher(), Reader(random.Random(1)))
    running = asyncio.create_task(run.run([item]))
    while not matcher.num_calls:
        await asyncio.sleep(0)
    running.cancel()
    for _ in range(turns or 0):
        await asyncio.sleep(0)
    if turns is None:
        await asyncio.wait({running})
    matcher.may_continue.set()
    await asyncio.wait({running, *matcher.works})
    assert running.cancelled() and matcher.num_calls == 1


@pytest.mark.parametrize(("turn_s", "turns"), [(0.0, 16), (60.0, 2)])
async def test_masks_that_take_long_are_computed_in_several_turns(
    turn_s: float, turns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So others' masks are computed between those of one batch with many samples."""
    monkeypatch.setattr(sample_steps, "_MASKS_TURN_S", turn_s)
    matcher = SlowMatcher()
    matcher.may_continue.set()
    item = replace(prepared("x", [1], 2, 8), new_matcher=lambda: cast(Matcher, matcher))
    reader = Reader(random.Random(1))
    run = run_on(FakeDispatcher([0] * 9), reader)
    await run.run([item])
    assert matcher.num_calls == 8 and matcher.num_turns == turns // 2
    assert all(len(reader.tokens("x", sample)) == 2 for sample in range(8))


async def test_masks_are_not_asked_for_again_and_again_where_no_process_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As while the system has no process left: each sample fails, and others can run."""
    monkeypatch.setattr(sys, "executable", "/dev/null/python")
    monkeypatch.setattr(sample_steps, "_MASKS_TURN_S", 60.0)
    constraints = Constraints([b"a", b"b"], [])
    grammar = Grammar("regex", "a*")
    item = replace(
        prepared("x", [1], 2, 8), new_matcher=lambda: Matcher(constraints, grammar, frozenset(), 2)
    )
    reader = Reader(random.Random(1))
    run = run_on(FakeDispatcher([0] * 9), reader)
    with structlog.testing.capture_logs() as lines:
        await run.run([item])
    assert [status_reason(chunks[-1].error) for chunks in reader.chunks.values()] == ["HELPER_FAILED"] * 8
    assert len(lines) == 8
