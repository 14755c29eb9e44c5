"""One batch on this server's own workers: the decode loop that a client would run, inside the gateway.

All samples whose tokens arrived in one turn of the dispatcher take their next step together, so a batch
costs one step per token, as with BatchDecode. Every request goes through the caches' state machine, like a
client's: journal, replay, admission and fencing apply.

A batch that must survive its client or this server creates its caches under its own request ids. When it is
resumed, the tokens that the caches hold are pushed through new samples, and generation continues after them:
tokens are a pure function of the prompt, the options and the seeds in the journal.
"""

from __future__ import annotations

import asyncio
import functools
import time
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from quire.v1 import runner_pb2

from service.api.append_codec import done_of
from service.api.status import to_status
from service.api.time_slice import TimeSlice
from service.caches.requests import (
    Append,
    Appended,
    AppendKind,
    Fork,
    Handles,
    Remembered,
    Request,
    cache_ids,
)
from service.dispatcher import Dispatcher, Outcome
from service.errors import (
    DeadlinePassed,
    Draining,
    ExecutionLost,
    InternalError,
    QuireError,
    WeightsChanged,
    reused_request_id,
)
from service.logging import current_request_id, get_logger
from service.runtimes.base import Batch, ChunkSink
from service.runtimes.batch_caches import PROMPT, SAMPLES, BatchCaches, sample_part
from service.runtimes.preparing import PreparedItem
from service.runtimes.sample import Sample

_log = get_logger(__name__)


@dataclass(eq=False, slots=True)
class _PendingRequest:
    """A request to the caches, and the callback for its outcome."""

    request: Request
    on_outcome: Callable[[Outcome], None]


@dataclass(eq=False, slots=True)
class _RunningSample:
    """A sample and its cache."""

    item: PreparedItem
    sample: Sample
    options: bytes
    cache_id: str = ""
    length: int = 0
    # Chosen, and not yet appended.
    token_id: int = 0

    @property
    def can_prelaunch(self) -> bool:
        """Whether the next token alone determines the request after it, unless that token ends the sample."""
        return self.sample.matcher is None and self.sample.tokens_left > 1


class LocalRun:
    """One run of a batch. Call `run` once, and `close` in any case."""

    def __init__(
        self, dispatcher: Dispatcher, batch: Batch, sink: ChunkSink, *, least_lease_s: float = 0.0
    ) -> None:
        """`least_lease_s`: the least lease of a kept batch's caches. A slow reader delays their next use."""
        self._dispatcher = dispatcher
        self._batch = batch
        self._sink = sink
        # In a worker's queue the batch is one caller among others.
        self._caller = dispatcher.new_caller()
        self._request_id = current_request_id()
        self._unfinished = 0
        self._caches = BatchCaches(dispatcher, batch)
        self._lease_s = max(batch.keep_s, least_lease_s) if batch.keep_s else None
        if batch.keep_s:
            sink.on_release(self._caches.stop_keeping)
        # Outcomes to process, requests to send, chunks to put into the sink.
        self._outcomes: deque[tuple[_PendingRequest, Outcome]] = deque()
        self._unsent: list[_PendingRequest] = []
        self._chunks: list[runner_pb2.SampleChunk] = []
        # The dispatcher's tickets of requests in flight.
        self._tickets: dict[_PendingRequest, int] = {}
        self._wake = asyncio.Event()
        self._to_mask: list[_RunningSample] = []
        self._mask_tasks: set[asyncio.Task[None]] = set()
        self._has_ended = False
        # A step of a thousand samples takes tens of milliseconds of the event loop.
        self._time_slice = TimeSlice()

    def close(self) -> None:
        """Releases caches also where `run` was never called. Can be repeated."""
        self._caches.end(())

    async def run(self, items: Sequence[PreparedItem]) -> None:
        """Returns when all samples have ended. Cancelling it cancels their requests."""
        self._time_slice.begin()
        try:
            for item in items:
                self._unfinished += item.num_samples
                await self._start_item(item)
            while True:
                if self._chunks:
                    chunks, self._chunks = self._chunks, []
                    self._sink.put(chunks)
                self._send()
                self._start_masking()
                if not self._unfinished:
                    return
                await self._wake.wait()
                self._wake.clear()
                self._time_slice.begin()
                if self._sink.is_full:
                    await self._sink.wait_for_room()
                while self._outcomes:
                    pending, outcome = self._outcomes.popleft()
                    del self._tickets[pending]
                    pending.on_outcome(outcome)
                    if self._time_slice.due:
                        await self._time_slice.yield_to_others()
        finally:
            self._clean_up()

    async def _yield_to_others(self) -> None:
        if self._time_slice.due:
            await self._time_slice.yield_to_others()

    # Requests.

    def _send(self) -> None:
        if not self._unsent:
            return
        sent, self._unsent = self._unsent, []

        def on_outcome(index: int, outcome: Outcome) -> None:
            self._outcomes.append((sent[index], outcome))
            self._wake.set()

        requests = [pending.request for pending in sent]
        tickets = self._dispatcher.start(requests, on_outcome, self._caller, self._batch.tenant)
        self._tickets.update(zip(sent, tickets, strict=True))

    def _append(
        self,
        item: PreparedItem,
        kind: AppendKind,
        token_ids: Sequence[int],
        running: _RunningSample | None = None,
        position: int | None = None,
        part: str = "",
    ) -> Append:
        """`running`: the sample that needs a token. `part`: names a new cache, see `BatchCaches.key`."""
        cache_id = "" if running is None else running.cache_id
        timeout_s = None if item.deadline_s is None else item.deadline_s - time.monotonic()
        return Append(
            kind,
            cache_id,
            token_ids,
            position=position,
            options=b"" if running is None else running.options,
            rows=0 if running is None else 1,
            lease_s=None if cache_id else self._lease_s,
            request_id=self._caches.key(item.spec.item_id, part) if part else "",
            timeout_s=timeout_s,
            priority=self._batch.priority,
            answer_bytes=item.answer_bytes,
            is_large=item.is_large,
            weights=item.weights,
            prelaunch=running is not None and running.can_prelaunch,
        )

    def _request_token(
        self,
        running: _RunningSample,
        kind: AppendKind,
        token_ids: Sequence[int],
        position: int | None = None,
        part: str = "",
    ) -> None:
        """Appends `token_ids` to a sample's cache, and asks for the token after them."""
        append = self._append(running.item, kind, token_ids, running, position, part)
        self._unsent.append(_PendingRequest(append, functools.partial(self._on_token, running)))

    # Prompts.

    async def _start_item(self, item: PreparedItem) -> None:
        forked = self._caches.recall(item.spec.item_id, SAMPLES)
        if any(cache is not None and cache.weights != item.weights for cache in forked):
            self._fail_all(item, WeightsChanged())
            # No run can use these caches.
            for cache in forked:
                if cache is not None:
                    self._caches.add(cache.cache_id)
            return
        if item.spec.item_id in self._batch.resumed and not (forked or self._has_own(item)):
            self._fail_all(item, ExecutionLost())
            return
        if item.num_samples > 1 and len(item.spec.prompt) > 1 and not forked:
            # Computes the prompt without its last token once. Each sample appends that token itself.
            prefix = self._append(item, AppendKind.PREFILL, item.spec.prompt[:-1], part=PROMPT)
            self._unsent.append(_PendingRequest(prefix, functools.partial(self._on_prefix, item)))
            return
        for index in range(item.num_samples):
            # Some samples of a fork may be lost: each lease ends on its own.
            await self._start_sample(_new_running(item, index), forked[index] if forked else None)
            await self._yield_to_others()

    def _recall_own(self, item: PreparedItem, index: int) -> Remembered | None:
        """The cache that a sample created without a fork."""
        own = self._caches.recall(item.spec.item_id, sample_part(index))
        return own[0] if own else None

    def _has_own(self, item: PreparedItem) -> bool:
        return any(self._recall_own(item, index) is not None for index in range(item.num_samples))

    async def _start_sample(self, running: _RunningSample, forked: Remembered | None) -> None:
        part = "" if forked is not None else sample_part(running.sample.index)
        cache = forked or self._recall_own(running.item, running.sample.index)
        prompt = running.item.spec.prompt
        if cache is None:
            self._request_token(running, AppendKind.PREFILL, prompt, part=part)
        elif cache.weights != running.item.weights:
            self._caches.add(cache.cache_id)
            self._fail(running, WeightsChanged())
        elif not _is_either_prefix(cache.token_ids, prompt):
            self._fail(running, reused_request_id())
        else:
            await self._resume(running, cache, part)

    def _on_prefix(self, item: PreparedItem, outcome: Outcome) -> None:
        if not isinstance(outcome, Appended) or not outcome.cache_id:
            self._fail_all(item, outcome)
            return
        parent = outcome.cache_id
        self._caches.add(parent)
        key = self._caches.key(item.spec.item_id, SAMPLES)
        fork = Fork.of(parent, item.num_samples, (parent,), key)
        self._unsent.append(_PendingRequest(fork, functools.partial(self._on_fork, item, parent, outcome)))

    def _on_fork(self, item: PreparedItem, parent: str, prefix: Appended, outcome: Outcome) -> None:
        if not isinstance(outcome, Handles):
            self._fail_all(item, outcome)
            self._caches.finish(parent)
            return
        self._caches.discard(parent)
        for index, handle in enumerate(outcome.handles):
            running = _new_running(item, index)
            # The first sample is charged for the shared prefix. The others found it computed.
            running.sample.cached_tokens = (
                done_of(prefix).reused_tokens if index == 0 else len(item.spec.prompt) - 1
            )
            self._append_last_of_prompt(running, handle.cache_id)

    def _append_last_of_prompt(self, running: _RunningSample, cache_id: str) -> None:
        """Requests a sample's first token. The cache holds at least the prompt without its last token."""
        self._caches.add(cache_id)
        running.cache_id = cache_id
        prompt = running.item.spec.prompt
        self._request_token(running, AppendKind.PREFILL, prompt[-1:], position=len(prompt) - 1)

    async def _resume(self, running: _RunningSample, cache: Remembered, part: str) -> None:
        """Continues after the tokens in a sample's cache. `part`: as it was created; empty: by a fork."""
        prompt = running.item.spec.prompt
        running.cache_id, running.length = cache.cache_id, len(cache.token_ids)
        if running.length < len(prompt):
            self._append_last_of_prompt(running, cache.cache_id)
            return
        self._caches.add(cache.cache_id)
        generated = cache.token_ids[len(prompt) :]
        for token_id in generated:
            self._chunks.append(running.sample.take(token_id))
            if running.sample.is_finished:
                self._finish(running)
                return
            await self._yield_to_others()
        # Repeats the last append: its stored answer holds the token chosen after it.
        if generated:
            running.token_id, running.length = generated[-1], running.length - 1
            self._request_next_token(running)
        elif part:
            # The last append was the one that created the cache.
            running.cache_id = ""
            self._request_token(running, AppendKind.PREFILL, prompt, part=part)
        else:
            self._append_last_of_prompt(running, cache.cache_id)

    # Tokens.

    def _on_token(self, running: _RunningSample, outcome: Outcome) -> None:
        if not isinstance(outcome, Appended) or not outcome.cache_id:
            self._fail(running, outcome)
            return
        if not running.cache_id:
            running.sample.cached_tokens = done_of(outcome).reused_tokens
        running.cache_id, running.length = outcome.cache_id, outcome.seq_len
        self._caches.add(running.cache_id)
        output = done_of(outcome).outputs[0]
        running.token_id = output.token_id
        self._chunks.append(running.sample.take(output.token_id, output))
        if running.sample.is_finished:
            self._finish(running)
        elif running.item.is_late:
            self._fail(running, DeadlinePassed())
        else:
            self._request_next_token(running)

    def _request_next_token(self, running: _RunningSample) -> None:
        if running.sample.matcher is None:
            self._request_token(running, AppendKind.DECODE, (running.token_id,), running.length)
        else:
            self._to_mask.append(running)

    # Masks are computed in a thread: other samples do not wait for them.

    def _start_masking(self) -> None:
        if self._to_mask:
            batch, self._to_mask = self._to_mask, []
            task = asyncio.create_task(self._mask(batch))
            self._mask_tasks.add(task)
            task.add_done_callback(self._mask_tasks.discard)

    async def _mask(self, batch: Sequence[_RunningSample]) -> None:
        try:
            matcher = batch[0].sample.matcher
            assert matcher is not None
            # All items of a batch are for one model, so all matchers have the same threads.
            compute = functools.partial(_compute_masks, batch, lambda: self._has_ended)
            masks = await asyncio.get_running_loop().run_in_executor(matcher.threads, compute)
        except RuntimeError:
            # The server is stopping, and its threads have stopped.
            masks = [Draining() for _ in batch]
        for running, mask in zip(batch, masks, strict=True):
            if isinstance(mask, QuireError):
                self._fail(running, mask)
                continue
            if running.sample.matcher is not None and running.sample.matcher.is_complete:
                self._chunks.append(running.sample.complete())
                self._finish(running)
                continue
            running.options = running.item.options(running.sample.index, mask)
            self._request_token(running, AppendKind.DECODE, (running.token_id,), running.length)
        self._wake.set()

    # The end.

    def _fail(self, running: _RunningSample, outcome: object) -> None:
        if isinstance(outcome, DeadlinePassed):
            outcome = DeadlinePassed(has_begun=running.sample.has_begun)
        error = outcome if isinstance(outcome, QuireError) else InternalError()
        self._chunks.append(running.sample.fail(to_status(error, self._request_id)))
        self._finish(running)

    def _fail_all(self, item: PreparedItem, outcome: object) -> None:
        for index in range(item.num_samples):
            self._fail(_new_running(item, index), outcome)

    def _finish(self, running: _RunningSample) -> None:
        self._unfinished -= 1
        if running.cache_id:
            self._caches.finish(running.cache_id)

    def _clean_up(self) -> None:
        """Cancels requests in flight, and releases the caches unless the batch is kept."""
        self._has_ended = True
        for task in self._mask_tasks:
            task.cancel()
        self._dispatcher.cancel(self._tickets.values())
        self._caches.end(cache_id for _, outcome in self._outcomes for cache_id in cache_ids(outcome))


def _new_running(item: PreparedItem, index: int) -> _RunningSample:
    return _RunningSample(item, item.sample(index), item.options(index))


def _is_either_prefix(token_ids: Sequence[int], prompt: Sequence[int]) -> bool:
    """Whether one of the two is a prefix of the other."""
    shorter = min(len(token_ids), len(prompt))
    return array("I", token_ids[:shorter]) == array("I", prompt[:shorter])


def _compute_masks(
    batch: Sequence[_RunningSample], has_ended: Callable[[], bool]
) -> list[bytes | QuireError]:
    """The allowed next tokens of each sample. Stops early once the run has ended. Runs in a thread."""
    masks: list[bytes | QuireError] = []
    for running in batch:
        assert running.sample.matcher is not None
        if has_ended():
            break
        try:
            masks.append(running.sample.matcher.allowed())
        except QuireError as error:
            masks.append(error.without_traceback())
        except BaseException:
            # A bug of ours or of the library. In a thread every exception must become an answer.
            _log.exception("a mask could not be made")
            masks.append(InternalError())
    return masks
