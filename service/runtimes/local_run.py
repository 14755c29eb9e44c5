"""One batch on this server's own workers: the decode loop that a client would run, inside the gateway.

All samples whose tokens arrived in one turn of the dispatcher take their next step together (`sample_steps`),
so a batch costs one step per token, as with BatchDecode. Every request goes through the caches' state
machine, like a client's: journal, replay, admission and fencing apply.

A batch that must survive its client or this server creates its caches under its own request ids. When it is
resumed, the tokens that the caches hold are pushed through new samples, and generation continues after them:
tokens are a pure function of the prompt, the options and the seeds in the journal.
"""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import Sequence

from quire.v1 import runner_pb2, types_pb2

from service.api.append_codec import MAX_KEPT_BYTES, done_of
from service.api.status import to_status
from service.api.time_slice import TimeSlice
from service.caches.requests import Append, Appended, AppendKind, CacheSnapshot, Fork, Handles, Truncate
from service.caches.tenants import Tenant, counted
from service.dispatcher import Dispatcher
from service.errors import DeadlinePassed, ExecutionLost, QuireError, WeightsChanged, reused_request_id
from service.logging import current_request_id
from service.runtimes.base import Batch, ChunkSink
from service.runtimes.batch_caches import PROMPT, SAMPLES, BatchCaches, sample_part
from service.runtimes.held_samples import HeldSamples
from service.runtimes.items import FORK_REQUESTS, num_samples
from service.runtimes.preparing import PreparedItem
from service.runtimes.sample import Sample
from service.runtimes.sample_steps import SampleSteps


class LocalRun:
    """One run of a batch. Call `run` at most once, and then `close` in any case."""

    def __init__(
        self, dispatcher: Dispatcher, batch: Batch, sink: ChunkSink, lease_s: float | None = None
    ) -> None:
        """`lease_s`: of new caches. None: that of calls that give none."""
        self._batch = batch
        self._request_id = current_request_id()
        self._caches = BatchCaches(dispatcher, batch)
        self._tenant = batch.tenant or Tenant()
        self._lease_s = lease_s
        if batch.keep_s:
            sink.on_release(self._caches.stop_keeping)
        self._steps = SampleSteps(dispatcher, sink, batch.tenant, self._caches.add)
        self._held = HeldSamples(self._steps.ask, self._caches)
        # Resumed samples take the tokens that they have one after another.
        self._resuming = asyncio.Lock()

    def close(self) -> None:
        """Releases caches, including those of an earlier run, unless the batch is kept."""
        self._caches.end()

    def earlier_adapter(self, item: runner_pb2.ExecuteItem) -> int:
        """The adapter of the caches that an earlier run has made for an item. 0: none."""
        if item.adapter_id:
            parts = (SAMPLES, *map(sample_part, range(num_samples(item))))
            return next(
                (adapter for part in parts if (adapter := self._caches.adapter(item.item_id, part))), 0
            )
        return 0

    async def run(self, items: Sequence[PreparedItem]) -> None:
        """Returns when all samples have ended. Cancelling it cancels their requests."""
        try:
            async with asyncio.TaskGroup() as helpers:
                driving = helpers.create_task(self._steps.drive(helpers))
                async with asyncio.TaskGroup() as tasks:
                    for item in items:
                        of_caller = item.in_place is not None
                        run = self._run_sample(item) if of_caller else self._run_item(item, tasks)
                        tasks.create_task(run)
                driving.cancel()
            self._steps.put_chunks()
        finally:
            self._steps.cancel()

    # Requests.

    async def _append(
        self,
        item: PreparedItem,
        kind: AppendKind,
        token_ids: Sequence[int],
        sample: Sample | None = None,
        options: bytes = b"",
        position: int | None = None,
        part: str = "",
    ) -> Appended:
        """`sample`: the one that needs the next token. `part`: names a new cache, see `BatchCaches.key`."""
        cache_id = "" if sample is None or part else sample.cache_id
        is_verify = kind is AppendKind.VERIFY
        rows = len(token_ids) if is_verify else int(sample is not None)
        timeout_s = None if item.deadline_s is None else item.deadline_s - time.monotonic()
        prelaunch = 0 if sample is None or is_verify else self._prelaunch(item, sample, position)
        kept_bytes = rows * item.answer_bytes + len(options)
        appended = await self._steps.ask(
            Append(
                kind,
                cache_id,
                token_ids,
                position=position,
                options=options,
                accept=types_pb2.VERIFY_ACCEPT_SAMPLED if is_verify else 0,
                rows=rows,
                lease_s=None if cache_id else self._lease_s,
                request_id=self._caches.key(item.spec.item_id, part) if part else "",
                timeout_s=timeout_s,
                priority=self._batch.priority,
                answer_bytes=(max(1, rows) + prelaunch) * item.answer_bytes,
                keeps_answer=not (item.has_hidden or item.is_large or kept_bytes > MAX_KEPT_BYTES),
                weights=item.weights,
                adapter=item.adapter,
                cache_salt=item.cache_salt,
                prelaunch=prelaunch,
            ),
        )
        assert isinstance(appended, Appended)
        return appended

    def _prelaunch(self, item: PreparedItem, sample: Sample, position: int | None) -> int:
        """How many of the next tokens a worker may append with this one, or at least compute."""
        most = sample.can_prelaunch if self._tenant.may_append_ahead else min(sample.can_prelaunch, 1)
        return most if item.in_place is None else self._held.most_prelaunched(sample, position or 0, most)

    # Prompts.

    async def _run_item(self, item: PreparedItem, tasks: asyncio.TaskGroup) -> None:
        """Starts a task for each sample of an item."""
        await self._steps.turn()
        item_id, indexes = item.spec.item_id, range(item.num_samples)
        forked = self._caches.recall(item_id, SAMPLES)
        parts = [sample_part(index) for index in indexes]
        caches = [next(iter(self._caches.recall(item_id, part)), None) for part in parts]
        cached_tokens: Sequence[int] = [0] * len(indexes)
        try:
            for cache in filter(None, forked):
                # If no run can use one, all are released.
                for each in filter(None, forked):
                    self._caches.add(each.cache_id)
                self._require_same(item, cache)
            if item_id in self._batch.resumed and not (forked or any(caches)):
                raise ExecutionLost
            if not forked:
                forked, cached_tokens = await self._fork(item)
        except QuireError as error:
            for index in indexes:
                self._fail(item, item.sample(index), error)
            return
        for index, copy in enumerate(forked[: len(indexes)]):
            # Some samples of a fork may be lost: each lease ends on its own.
            if copy is not None:
                caches[index], parts[index] = copy, ""
        for index in indexes:
            run = self._run_sample(item, index, caches[index], parts[index], cached_tokens[index])
            tasks.create_task(run)

    async def _fork(self, item: PreparedItem) -> tuple[list[CacheSnapshot | None], Sequence[int]]:
        """A cache with the prompt for each sample, and how many of its tokens did not have to be computed.

        No caches: each sample creates its own.
        """
        samples = item.num_samples
        if item.held is not None:
            return await self._held.fork(item, item.held), [0] * samples
        if samples == 1 or len(item.spec.prompt) == 1:
            return [], [0] * samples
        with counted(self._tenant, time.monotonic, samples + FORK_REQUESTS, give_back=True):
            # Otherwise the prompt would be computed, and then the last samples refused.
            pass
        forked, reused_tokens = await self._fork_prompt(item)
        # The first sample is charged for a shared prefix. The others found it computed.
        return forked, [reused_tokens] + [len(item.spec.prompt) - 1] * (samples - 1)

    async def _fork_prompt(self, item: PreparedItem) -> tuple[list[CacheSnapshot | None], int]:
        """Computes the prompt without its last token once. Each sample appends that token itself.

        Returns a cache for each sample, and how many tokens of the prompt were found computed.
        """
        prompt = item.spec.prompt[:-1]
        prefix = await self._append(item, AppendKind.PREFILL, prompt, part=PROMPT)
        parent = prefix.cache_id
        key = self._caches.key(item.spec.item_id, SAMPLES)
        try:
            forked = await self._steps.ask(Fork.of(parent, item.num_samples, (parent,), key))
        except QuireError:
            self._caches.finish(parent)
            raise
        assert isinstance(forked, Handles)
        self._caches.discard(parent)
        salt = self._tenant.salt(item.cache_salt)
        caches = [
            CacheSnapshot(handle.cache_id, prompt, item.weights, item.adapter, salt)
            for handle in forked.handles
        ]
        return [*caches], done_of(prefix).reused_tokens

    # Samples.

    async def _run_sample(
        self,
        item: PreparedItem,
        index: int = 0,
        cache: CacheSnapshot | None = None,
        part: str = "",
        cached_tokens: int = 0,
    ) -> None:
        """`cache`: its cache, if there is one. `part`: names the creation of its cache; empty: a fork."""
        await self._steps.turn()
        sample = item.sample(index)
        sample.cached_tokens = cached_tokens
        try:
            await self._generate(item, sample, cache, part)
        except QuireError as error:
            self._fail(item, sample, error)
        if sample.catching_up is not None:
            self._caches.release(sample.cache_id)
        elif sample.cache_id:
            self._caches.finish(sample.cache_id)

    async def _generate(
        self, item: PreparedItem, sample: Sample, cache: CacheSnapshot | None, part: str
    ) -> None:
        options = item.options(sample)
        if item.in_place is not None:
            await self._held.begin(item, item.in_place, sample)
            token_id, position = self._take(item, sample, await self._append_rest(item, sample, options))
        else:
            token_id, position = await self._begin(item, sample, options, cache, part)
        while not sample.is_finished:
            if item.is_late:
                raise DeadlinePassed
            self._held.go_on(sample, position)
            began_s, draft = time.monotonic(), sample.draft()
            masks: Sequence[bytes] = ()
            if sample.matcher is not None:
                draft, masks = await self._steps.masks(sample.matcher, draft, sample.most_drafts)
                if sample.matcher.is_complete:
                    self._put(item, sample.complete())
                    return
                options = item.options(sample, masks[0])
            elif sample.spec.rules is not None:
                options = item.options(sample)
            own, wanted = options, 0
            if sample.drafter is not None:
                draft, wanted = sample.before_end(draft), sample.wanted_drafts
                if draft or wanted:
                    rows = 1 + len(draft)
                    own = item.draft_options(sample, rows, masks[:rows], wanted)
            kind = AppendKind.VERIFY if draft else AppendKind.DECODE
            appended = await self._append(item, kind, (token_id, *draft), sample, own, position)
            if sample.drafter is not None:
                took_s, offered = time.monotonic() - began_s, done_of(appended).draft_token_ids
                sample.drafter.stepped(len(draft), appended.kept, took_s, wanted=wanted, offered=offered)
            token_id, position = self._take(item, sample, appended)

    async def _begin(
        self, item: PreparedItem, sample: Sample, options: bytes, cache: CacheSnapshot | None, part: str
    ) -> tuple[int, int]:
        """Takes the tokens of the cache, or computes the first one. Returns the last, and its position."""
        prompt = item.spec.prompt
        token_ids: Sequence[int] = ()
        if cache is not None:
            token_ids = cache.token_ids
            await self._resume(item, sample, cache)
        if len(token_ids) > len(prompt):
            last = len(token_ids) - 1
            if not sample.is_finished:
                # For the token chosen after it. The last append may have been of more tokens than this.
                await self._steps.ask(Truncate(sample.cache_id, last))
            return token_ids[-1], last
        if cache is None or (part and len(token_ids) == len(prompt)):
            appended = await self._append(item, AppendKind.PREFILL, prompt, sample, options, part=part)
            sample.cached_tokens = done_of(appended).reused_tokens
        else:
            sample.cache_id = cache.cache_id
            appended = await self._append_rest(item, sample, options)
        return self._take(item, sample, appended)

    async def _append_rest(self, item: PreparedItem, sample: Sample, options: bytes) -> Appended:
        """Appends what the sample's cache does not have of the prompt. May repeat that."""
        first = item.first
        return await self._append(item, item.first_kind, item.spec.prompt[first:], sample, options, first)

    def _take(self, item: PreparedItem, sample: Sample, appended: Appended) -> tuple[int, int]:
        """Takes the token that was chosen, or several. Returns the last one, and its position."""
        sample.cache_id = appended.cache_id
        # Outputs after the first wrong draft token are not kept.
        outputs = done_of(appended).outputs[: appended.kept]
        for position, output in enumerate(outputs, appended.seq_len - len(outputs) + 1):
            if sample.catching_up is not None:
                sample.catching_up.require_same(position, output.token_id)
            self._put(item, sample.take(output.token_id, output, appended.weights))
            if sample.is_finished:
                break
        return outputs[-1].token_id, appended.seq_len

    def _put(self, item: PreparedItem, chunk: runner_pb2.SampleChunk) -> None:
        """Sends a chunk. The last one of a caller's cache has its current handle."""
        if chunk.finish_reason and item.in_place is not None:
            self._held.write_handle(item.in_place, chunk)
        self._steps.chunks.append(chunk)

    async def _resume(self, item: PreparedItem, sample: Sample, cache: CacheSnapshot) -> None:
        """Takes the tokens that a sample's cache holds after the prompt. Raises QuireError."""
        prompt = item.spec.prompt
        self._caches.add(cache.cache_id)
        self._require_same(item, cache)
        if not _is_either_prefix(cache.token_ids, prompt):
            raise reused_request_id()
        sample.cache_id = cache.cache_id
        async with self._resuming:
            time_slice = TimeSlice()
            for token_id in cache.token_ids[len(prompt) :]:
                self._steps.chunks.append(sample.take(token_id))
                if sample.is_finished:
                    return
                if time_slice.due:
                    await time_slice.yield_to_others()

    def _require_same(self, item: PreparedItem, cache: CacheSnapshot) -> None:
        """Raises InvalidArgument, WeightsChanged or ExecutionLost if a cache cannot continue an item."""
        if item.held is not None:
            # A copy of the caller's cache has what that has.
            return
        if not self._tenant.has_salt(cache.salt, item.cache_salt):
            raise reused_request_id()
        if cache.weights != item.weights:
            raise WeightsChanged
        if cache.adapter != item.adapter:
            # It has another adapter, or a version that no longer exists.
            raise ExecutionLost

    def _fail(self, item: PreparedItem, sample: Sample, error: QuireError) -> None:
        if isinstance(error, DeadlinePassed):
            error = DeadlinePassed(has_begun=sample.has_begun)
        self._put(item, sample.fail(to_status(error.without_traceback(), self._request_id)))


def _is_either_prefix(token_ids: Sequence[int], prompt: Sequence[int]) -> bool:
    shorter = min(len(token_ids), len(prompt))
    return array("I", token_ids[:shorter]) == array("I", prompt[:shorter])
