"""One batch on this server's own workers: the loop that a client would drive, driven beside the caches.

All samples whose tokens came in one turn of the dispatcher are stepped on in the next one together, so a
batch costs a step for each token, as BatchDecode would. Everything goes through the state machine of the
caches, as a client's calls do: journal, replay, admission and fencing are theirs.

A batch that is to outlive its client, or this server, makes its caches under request ids of its own. When
it comes again, what the caches hold is pushed through new samples, and generation goes on behind it: tokens
are a pure function of the prompt, the options and the seeds that the journal has kept.
"""

from __future__ import annotations

import asyncio
import functools
import time
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from quire.v1 import runner_pb2, types_pb2

from service.api.answers import done_of
from service.api.breath import Breather
from service.api.status import to_status
from service.caches.requests import Append, Appended, Fork, Handles, Kind, Remembered, Request
from service.dispatcher import Dispatcher, Outcome, cache_ids
from service.errors import DeadlinePassed, Draining, ExecutionLost, InternalError, QuireError, WeightsChanged
from service.logging import current_request_id, get_logger
from service.runtimes.base import Batch, Outlet
from service.runtimes.batch_caches import PROMPT, SAMPLES, BatchCaches, sample_part
from service.runtimes.items import reused_request_id
from service.runtimes.preparing import Prepared
from service.runtimes.sample import Sample

_log = get_logger(__name__)
_Then = Callable[[Outcome], None]


@dataclass(eq=False, slots=True)
class _Stream:
    """A sample and its cache."""

    item: Prepared
    sample: Sample
    output: types_pb2.OutputOptions
    cache_id: str = ""
    length: int = 0
    # Chosen, and not yet appended.
    token_id: int = 0

    @property
    def goes_on(self) -> bool:
        """Whether what the next step asks for can be told from its token, if that does not end the sample."""
        return self.sample.matcher is None and self.sample.tokens_left > 1


class LocalRun:
    """One batch on its way. `run` once, and `close` it."""

    def __init__(
        self, dispatcher: Dispatcher, batch: Batch, outlet: Outlet, *, least_lease_s: float = 0.0
    ) -> None:
        """`least_lease_s`: caches live so long between two steps, which wait for whoever reads."""
        self._dispatcher = dispatcher
        self._batch = batch
        self._outlet = outlet
        # In a worker's queue the batch is one caller among others.
        self._caller = dispatcher.new_caller()
        self._request_id = current_request_id()
        self._unfinished = 0
        self._caches = BatchCaches(dispatcher, batch)
        self._lease_s = max(batch.keep_s, least_lease_s) if batch.keep_s else None
        if batch.keep_s:
            outlet.on_release(self._caches.let_go)
        # What came, and what is to be done with it; what to ask next; what to send.
        self._arrived: deque[tuple[int, Outcome]] = deque()
        self._asked: list[tuple[Request, _Then]] = []
        self._chunks: list[runner_pb2.SampleChunk] = []
        # Of what was asked and has not come: what to do then, and its ticket.
        self._then: dict[int, _Then] = {}
        self._tickets: dict[int, int] = {}
        self._asks = 0
        self._wake = asyncio.Event()
        self._to_mask: list[_Stream] = []
        self._masking: set[asyncio.Task[None]] = set()
        self._has_ended = False
        # A thousand samples take tens of milliseconds for each of their tokens.
        self._breather = Breather()

    def close(self) -> None:
        """What was not run, because it was cancelled before, has ended as well."""
        self._caches.end(())

    async def run(self, items: Sequence[Prepared]) -> None:
        """Returns when all samples have ended. Cancelling it ends and releases them."""
        self._breather.begin()
        try:
            for item in items:
                self._unfinished += item.num_samples
                await self._begin(item)
            while True:
                self._say()
                self._send()
                self._mask()
                if not self._unfinished:
                    return
                await self._wake.wait()
                self._wake.clear()
                self._breather.begin()
                if self._outlet.is_full:
                    await self._outlet.room()
                while self._arrived:
                    number, outcome = self._arrived.popleft()
                    self._tickets.pop(number, None)
                    self._then.pop(number)(outcome)
                    await self._breathe()
        finally:
            self._end()

    async def _breathe(self) -> None:
        if self._breather.due:
            await self._breather.breathe()

    def _say(self) -> None:
        if self._chunks:
            chunks, self._chunks = self._chunks, []
            self._outlet.put(chunks)

    # Asking.

    def _ask(self, request: Request, then: _Then) -> None:
        self._asked.append((request, then))

    def _send(self) -> None:
        if not self._asked:
            return
        asked, self._asked = self._asked, []
        first, self._asks = self._asks, self._asks + len(asked)
        for number, (_, then) in enumerate(asked, start=first):
            self._then[number] = then
        tickets = self._dispatcher.start(
            [request for request, _ in asked],
            lambda index, outcome: self._on_outcome(first + index, outcome),
            self._caller,
            self._batch.tenant,
        )
        self._tickets.update(enumerate(tickets, start=first))

    def _on_outcome(self, number: int, outcome: Outcome) -> None:
        self._arrived.append((number, outcome))
        self._wake.set()

    def _append(
        self,
        item: Prepared,
        kind: Kind,
        token_ids: Sequence[int],
        *,
        cache_id: str = "",
        position: int | None = None,
        output: types_pb2.OutputOptions | None = None,
        key: str = "",
        run_ahead: bool = False,
    ) -> Append:
        timeout_s = None if item.deadline_s is None else item.deadline_s - time.monotonic()
        return Append(
            kind,
            cache_id,
            token_ids,
            position=position,
            rows=int(output is not None),
            output=output,
            lease_s=None if cache_id else self._lease_s,
            request_id=self._caches.key(item.plan.item_id, key) if key else "",
            timeout_s=timeout_s,
            priority=self._batch.priority,
            answer_bytes=item.answer_bytes,
            is_large=item.is_large,
            weights=item.weights,
            run_ahead=run_ahead,
        )

    # Prompts.

    async def _begin(self, item: Prepared) -> None:
        made = self._caches.recall(item.plan.item_id, SAMPLES)
        if any(cache is not None and cache.weights != item.weights for cache in made):
            self._fail_all(item, WeightsChanged())
            # Nobody can use them, now or later.
            for cache in made:
                if cache is not None:
                    self._caches.add(cache.cache_id)
            return
        if item.plan.item_id in self._batch.resumed and not (made or self._has_own(item)):
            self._fail_all(item, ExecutionLost())
            return
        if item.num_samples > 1 and len(item.plan.prompt) > 1 and not made:
            self._begin_shared(item)
            return
        for index in range(item.num_samples):
            # Of samples that were begun together some may be gone: their leases end with their last use.
            cache = made[index] if made else None
            await self._begin_one(self._stream(item, index), cache)
            await self._breathe()

    def _own(self, item: Prepared, index: int) -> Remembered | None:
        """The cache that a sample was begun with by itself."""
        own = self._caches.recall(item.plan.item_id, sample_part(index))
        return own[0] if own else None

    def _has_own(self, item: Prepared) -> bool:
        return any(self._own(item, index) is not None for index in range(item.num_samples))

    async def _begin_one(self, stream: _Stream, forked: Remembered | None) -> None:
        key = "" if forked is not None else sample_part(stream.sample.index)
        cache = forked or self._own(stream.item, stream.sample.index)
        prompt = stream.item.plan.prompt
        if cache is None:
            self._create(stream, key)
        elif cache.weights != stream.item.weights:
            self._caches.add(cache.cache_id)
            self._fail(stream, WeightsChanged())
        elif not _has_begun_as(cache.token_ids, prompt):
            self._fail(stream, reused_request_id())
        else:
            await self._resume(stream, cache, key)

    def _stream(self, item: Prepared, index: int) -> _Stream:
        return _Stream(item, item.sample(index), item.output(index))

    def _create(self, stream: _Stream, key: str) -> None:
        prompt = stream.item.plan.prompt
        append = self._append(
            stream.item, Kind.PREFILL, prompt, output=stream.output, key=key, run_ahead=stream.goes_on
        )
        self._ask(append, functools.partial(self._took, stream))

    def _begin_shared(self, item: Prepared) -> None:
        """All of the prompt but its last token is computed once; each sample draws behind that by itself."""
        prefix = self._append(item, Kind.PREFILL, item.plan.prompt[:-1], key=PROMPT)
        self._ask(prefix, functools.partial(self._shared, item))

    def _shared(self, item: Prepared, outcome: Outcome) -> None:
        if not isinstance(outcome, Appended) or outcome.handle is None:
            self._fail_all(item, outcome)
            return
        parent = outcome.handle.cache_id
        self._caches.add(parent)
        key = self._caches.key(item.plan.item_id, SAMPLES)
        fork = Fork.of(parent, item.num_samples, (parent,), key)
        self._ask(fork, functools.partial(self._forked, item, parent, outcome))

    def _forked(self, item: Prepared, parent: str, shared: Appended, outcome: Outcome) -> None:
        if not isinstance(outcome, Handles):
            self._fail_all(item, outcome)
            self._caches.not_needed(parent)
            return
        self._caches.gone(parent)
        for index, handle in enumerate(outcome.handles):
            stream = self._stream(item, index)
            # Of the prompt they share everything, and none of them has computed it alone.
            stream.sample.cached_tokens = (
                done_of(shared).reused_tokens if index == 0 else len(item.plan.prompt) - 1
            )
            self._last_of_prompt(stream, handle.cache_id)

    def _last_of_prompt(self, stream: _Stream, cache_id: str) -> None:
        self._caches.add(cache_id)
        prompt = stream.item.plan.prompt
        append = self._append(
            stream.item,
            Kind.PREFILL,
            prompt[-1:],
            cache_id=cache_id,
            position=len(prompt) - 1,
            output=stream.output,
            run_ahead=stream.goes_on,
        )
        self._ask(append, functools.partial(self._took, stream))

    # What was begun before.

    async def _resume(self, stream: _Stream, cache: Remembered, key: str) -> None:
        """Goes on behind what a sample's cache has already. `key` made it; empty: a fork did."""
        prompt = stream.item.plan.prompt
        stream.cache_id, stream.length = cache.cache_id, len(cache.token_ids)
        if stream.length < len(prompt):
            self._last_of_prompt(stream, cache.cache_id)
            return
        self._caches.add(cache.cache_id)
        known = cache.token_ids[len(prompt) :]
        for token_id in known:
            self._chunks.append(stream.sample.take(token_id))
            if stream.sample.is_finished:
                self._ended(stream)
                return
            await self._breathe()
        # The last append is asked for again: its answer is what was chosen behind it.
        if known:
            stream.token_id, stream.length = known[-1], stream.length - 1
            self._go_on(stream)
        elif key:
            self._create(stream, key)
        else:
            self._last_of_prompt(stream, cache.cache_id)

    # Tokens.

    def _took(self, stream: _Stream, outcome: Outcome) -> None:
        if not isinstance(outcome, Appended) or outcome.handle is None:
            self._fail(stream, outcome)
            return
        if not stream.cache_id:
            stream.sample.cached_tokens = done_of(outcome).reused_tokens
        stream.cache_id, stream.length = outcome.handle.cache_id, outcome.handle.seq_len
        self._caches.add(stream.cache_id)
        output = done_of(outcome).outputs[0]
        stream.token_id = output.token_id
        self._chunks.append(stream.sample.take(output.token_id, output))
        if stream.sample.is_finished:
            self._ended(stream)
        elif stream.item.is_late:
            self._fail(stream, DeadlinePassed())
        else:
            self._go_on(stream)

    def _go_on(self, stream: _Stream) -> None:
        if stream.sample.matcher is None:
            self._step(stream)
        else:
            self._to_mask.append(stream)

    def _step(self, stream: _Stream) -> None:
        append = self._append(
            stream.item,
            Kind.DECODE,
            (stream.token_id,),
            cache_id=stream.cache_id,
            position=stream.length,
            output=stream.output,
            run_ahead=stream.goes_on,
        )
        self._ask(append, functools.partial(self._took, stream))

    # What a sample may say next is found out beside the steps: other samples do not wait for it.

    def _mask(self) -> None:
        if self._to_mask:
            streams, self._to_mask = self._to_mask, []
            task = asyncio.create_task(self._find_masks(streams))
            self._masking.add(task)
            task.add_done_callback(self._masking.discard)

    async def _find_masks(self, streams: Sequence[_Stream]) -> None:
        try:
            matcher = streams[0].sample.matcher
            assert matcher is not None
            # A batch is of one model, and so are the threads.
            asked = functools.partial(_masks, streams, lambda: self._has_ended)
            masks = await asyncio.get_running_loop().run_in_executor(matcher.threads, asked)
        except RuntimeError:
            # The server ends, and its threads with it.
            masks = [Draining() for _ in streams]
        for stream, mask in zip(streams, masks, strict=True):
            if isinstance(mask, QuireError):
                self._fail(stream, mask)
                continue
            if stream.sample.matcher is not None and stream.sample.matcher.is_complete:
                self._chunks.append(stream.sample.complete())
                self._ended(stream)
                continue
            stream.output = stream.item.output(stream.sample.index, mask)
            self._step(stream)
        self._wake.set()

    # The end.

    def _fail(self, stream: _Stream, outcome: object) -> None:
        if isinstance(outcome, DeadlinePassed):
            outcome = DeadlinePassed(has_begun=stream.sample.has_begun)
        self._chunks.append(stream.sample.fail(to_status(_error(outcome), self._request_id)))
        self._ended(stream)

    def _fail_all(self, item: Prepared, outcome: object) -> None:
        for index in range(item.num_samples):
            self._fail(self._stream(item, index), outcome)

    def _ended(self, stream: _Stream) -> None:
        self._unfinished -= 1
        if stream.cache_id:
            self._caches.not_needed(stream.cache_id)

    def _end(self) -> None:
        """Whatever is still under way is undone; what it has made is released."""
        self._has_ended = True
        for task in self._masking:
            task.cancel()
        self._dispatcher.cancel(self._tickets.values())
        # One that is kept may come again, also to the next server. If it does not, leases end what is left.
        self._caches.end(cache_id for _, outcome in self._arrived for cache_id in cache_ids(outcome))


def _has_begun_as(token_ids: Sequence[int], prompt: Sequence[int]) -> bool:
    """Whether one of both is the beginning of the other."""
    both = min(len(token_ids), len(prompt))
    return array("I", token_ids[:both]) == array("I", prompt[:both])


def _masks(streams: Sequence[_Stream], has_ended: Callable[[], bool]) -> list[bytes | QuireError]:
    """What each may say next, as long as somebody wants to know. Runs in a thread."""
    masks: list[bytes | QuireError] = []
    for stream in streams:
        assert stream.sample.matcher is not None
        if has_ended():
            break
        try:
            masks.append(stream.sample.matcher.allowed())
        except QuireError as error:
            masks.append(error.untraced())
        except BaseException:
            # A bug, ours or the library's. Whoever waits is told, whatever it is: this is a thread.
            _log.exception("a mask could not be made")
            masks.append(InternalError())
    return masks


def _error(outcome: object) -> QuireError:
    return outcome if isinstance(outcome, QuireError) else InternalError()
