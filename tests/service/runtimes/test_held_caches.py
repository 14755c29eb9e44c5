"""Items that continue a cache of the caller: as one Decode after another, whoever breaks off in between."""

from __future__ import annotations

import asyncio
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import FrameType
from typing import Any

import pytest
from quire.v1 import runner_pb2, types_pb2

from benchmarks.checkout import ROOT
from service.api.append_codec import done_of, last_row
from service.caches.records import TokensAppended
from service.caches.requests import Append, AppendKind, Truncate
from service.errors import PositionMismatch, QuireError
from service.runtimes.base import Batch
from service.runtimes.held_caches import HeldCache, held_cache
from service.runtimes.held_samples import HeldSamples
from service.runtimes.local_run import LocalRun
from service.runtimes.preparing import PreparedItem
from service.runtimes.sample import Sample
from service.runtimes.speculation import PromptLookup
from tests.error_details import status_reason
from tests.service.runtimes.test_kept_run import Reading
from tests.service.runtimes.test_local_run import SEEDS, prepared, run_to_end
from tests.sim.harness import Gateway
from tests.sim.model_worker import ModelWorker, Pool
from tests.sim.toy_model import VOCAB

SERVICE = f"{ROOT}/service/"
# With answers of up to 16 tokens. As in `tests/test_size.py`: whoever makes it smaller lowers it.
CALLS_PER_TOKEN = 16.5
# A draw of the toy model depends on the seed and on where the penalties begin.
DRAWN = types_pb2.OutputOptions(sampling=types_pb2.SamplingParams(temperature=1, seed=5))


class Caller:
    """One who generates on a cache, and whose streams break."""

    def __init__(
        self, gateway: Gateway, cache_id: str, token_ids: Sequence[int], max_tokens: int, **spec: Any
    ) -> None:
        """`spec`: settings of `SampleSpec`. Without an end token among them there is none."""
        self.gateway, self.cache_id = gateway, cache_id
        self.position = len(gateway.tokens(cache_id))
        self.token_ids, self.max_tokens = list(token_ids), max_tokens
        self.spec: dict[str, Any] = {"end_ids": frozenset(), **spec}
        self.received: list[int] = []
        self.reader = Reading()
        self._taken = 0

    @property
    def chunks(self) -> list[runner_pb2.SampleChunk]:
        return self.reader.chunks["x", 0]

    async def begin(self, n: int = 0, keep_s: float = 0.0) -> asyncio.Task[None]:
        """Calls with what is known: the last token that was received, at its position."""
        at = self.position, self.token_ids
        if self.received:
            at = self.position + len(self.token_ids) + len(self.received) - 1, self.received[-1:]
        prompt = runner_pb2.CachePrompt(cache_id=self.cache_id, position=at[0], token_ids=at[1])
        item = await self._item(prompt, n)
        asked = [runner_pb2.ExecuteItem(item_id="x", cache=prompt, n=n)]
        self.reader, self._taken = Reading(), 0
        run = LocalRun(self.gateway.dispatcher, Batch("key", None, asked, keep_s=keep_s), self.reader)
        return asyncio.create_task(run_to_end(run, [item]))

    async def _item(self, prompt: runner_pb2.CachePrompt, n: int) -> PreparedItem:
        held = await held_cache(self.gateway.dispatcher, prompt, None)
        whole = held.token_ids[: held.position] + type(held.token_ids)("I", prompt.token_ids)
        item = prepared("x", whole, self.max_tokens - len(self.received), max(1, n))
        spec = replace(item.spec, context_tokens=held.position, **self.spec)
        return replace(item, spec=spec, held=held, on_copies=n > 0, _output=DRAWN)

    def take(self, at_most: int) -> None:
        """Receives some of what was sent."""
        sent = self.reader.tokens("x", 0)
        taken = sent[self._taken : self._taken + at_most]
        self._taken += len(taken)
        self.received += taken

    async def finish(self, task: asyncio.Task[None]) -> None:
        for _ in range(1000):
            if task.done():
                break
            self.gateway.work()
            self.gateway.wait(0.1)
            for _ in range(5):
                await asyncio.sleep(0)
        await task
        self.take(1000)


def decodes(gateway: Gateway, prompt: Sequence[int], token_ids: Sequence[int], count: int) -> list[int]:
    """The oracle: a Prefill, and then one Decode after another on a cache of their own."""
    cache_id, chosen = gateway.create(*prompt), list[int]()
    while len(chosen) < count:
        kind = AppendKind.PREFILL if len(token_ids) > 1 else AppendKind.DECODE
        appended = gateway.append(Append(kind, cache_id, tuple(token_ids), options=last_row(DRAWN)))
        chosen.append(done_of(appended).outputs[0].token_id)
        token_ids = chosen[-1:]
    gateway.release(cache_id)
    return chosen


@SEEDS
async def test_broken_streams_go_on_as_one_decode_after_another(seeds: range) -> None:
    """Streams break and workers die at any point: each token comes once, and is in the cache once."""
    for seed in seeds:
        rng = random.Random(seed)
        gateway = Gateway(workers=2, pool=Pool(100))
        prompt = [rng.randrange(VOCAB) for _ in range(rng.choice([1, 20]))]
        first = [rng.randrange(VOCAB) for _ in range(rng.choice([1, 1, 3]))]
        count = rng.randint(1, 12)
        expected = decodes(gateway, prompt, first, count)
        drafts = rng.choice([0, 3])
        caller = Caller(gateway, gateway.create(*prompt), first, count, max_draft_tokens=drafts)
        for number in range(rng.randrange(5)):
            task = await caller.begin()
            for _ in range(rng.randrange(8)):
                gateway.work()
                for _ in range(rng.randrange(12)):
                    await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait([task])
            caller.take(rng.randrange(4))
            if len(caller.received) == count:
                break
            if rng.random() < 0.3:
                gateway.lose_worker(rng.choice(list(gateway.workers)), crashed=False)
                gateway.start_worker(f"worker-{number + 2}")
        if len(caller.received) < count:
            await caller.finish(await caller.begin())
            last = caller.chunks[-1]
            assert last.finish_reason == runner_pb2.FINISH_REASON_LENGTH
            assert last.kv_cache.seq_len == len(prompt) + len(first) + count - 1
        assert caller.received == expected, seed
        assert gateway.tokens(caller.cache_id) == [*prompt, *first, *expected[:-1]], seed
        gateway.work()
        assert len(gateway.machine) == 1 and not gateway.machine.operations_in_flight, "copies are gone"


class Letters:
    """A tokenizer of which each token is a letter."""

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return "".join(chr(ord("a") + token_id) for token_id in ids)


@SEEDS
@pytest.mark.parametrize("is_text", [False, True], ids=["stop token", "stop text"])
async def test_no_draft_is_appended_behind_the_end(
    seeds: range, monkeypatch: pytest.MonkeyPatch, *, is_text: bool
) -> None:
    """Not for a moment: a gateway may be killed between any two records. What is resumed ends there, too."""
    letters, accepted, before, text = Letters(), False, 4, list[int]()

    def right(lookup: PromptLookup, length: int) -> Sequence[int]:
        known = len(lookup.token_ids) - before
        return text[known : known + length]

    monkeypatch.setattr(PromptLookup, "draft", right)
    for seed in seeds:
        rng = random.Random(seed)
        gateway = Gateway(pool=Pool(100))
        prompt = [rng.randrange(VOCAB) for _ in range(3)]
        text = decodes(gateway, prompt, [4], 20)
        # The first draft is made behind the second token, and has four.
        end = rng.randint(3, 6)
        ends: dict[str, Any] = {"end_ids": frozenset(text[end : end + 1])}
        if is_text:
            ends = {"stops": (letters.decode(text[end - 1 : end + 1]),), "tokenizer": letters}
            end = letters.decode(text).index(ends["stops"][0]) + 1
        else:
            end = text.index(text[end])
        caller = Caller(gateway, gateway.create(*prompt), [4], 20, max_draft_tokens=8, **ends)
        whole, task = [*prompt, 4, *text[:end]], await caller.begin()
        for _ in range(rng.choice([3, 4, 5, 6, 1000])):
            if task.done():
                break
            gateway.work()
            held = gateway.tokens(caller.cache_id)
            assert held == whole[: len(held)], "nothing behind the end"
            for _ in range(12):
                await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        # A stop text is found if no part of it was received before.
        caller.take(rng.randrange(max(1, end)))
        await caller.finish(await caller.begin())
        appends = [each for each in gateway.disk.written if isinstance(each, TokensAppended)]
        accepted |= any(each.accept and len(each.token_ids) > 1 for each in appends)
        assert caller.received == text[: end + 1] and gateway.tokens(caller.cache_id) == whole
        last = caller.chunks[-1]
        assert last.finish_reason == runner_pb2.FINISH_REASON_STOP and last.kv_cache.seq_len == len(whole)
    assert accepted, "drafts that are right"


async def test_tokens_of_another_caller_are_not_taken_for_generated_ones() -> None:
    gateway = Gateway()
    caller = Caller(gateway, gateway.create(1, 2, 3), [4], 6)
    right = decodes(gateway, [1, 2, 3], [4], 2)
    other = [4, (right[0] + 1) % VOCAB, 0]
    for token in other:
        gateway.append(Append(AppendKind.DECODE, caller.cache_id, (token,)))
    await caller.finish(await caller.begin())
    assert status_reason(caller.chunks[-1].error) == "POSITION_MISMATCH" and not caller.received
    assert gateway.tokens(caller.cache_id) == [1, 2, 3, *other], "nothing was appended"
    assert caller.chunks[-1].kv_cache.seq_len == 6
    gateway.work()
    assert len(gateway.machine) == 1


@pytest.mark.parametrize("other", ["decode", "truncate"])
async def test_an_append_of_another_caller_ends_a_generation(other: str) -> None:
    """The two are fenced against each other as two Decodes are."""
    gateway = Gateway()
    caller = Caller(gateway, gateway.create(1, 2, 3), [4], 30)
    task = await caller.begin()
    while len(caller.reader.tokens("x", 0)) < 3:
        gateway.work()
        await asyncio.sleep(0)
    length = len(gateway.tokens(caller.cache_id))
    if other == "decode":
        wrong = Append(AppendKind.DECODE, caller.cache_id, (0,), position=1)
        assert gateway.refusal(wrong).reason == "POSITION_MISMATCH"
        gateway.append(Append(AppendKind.DECODE, caller.cache_id, (0,)))
    else:
        gateway.handles(Truncate(caller.cache_id, 2))
        length = 2
    await caller.finish(task)
    assert status_reason(caller.chunks[-1].error) == "POSITION_MISMATCH"
    held = gateway.tokens(caller.cache_id)
    assert caller.chunks[-1].kv_cache.seq_len == len(held) >= length


async def test_samples_on_copies_leave_the_cache_as_it_was() -> None:
    gateway = Gateway()
    cache_id = gateway.create(1, 2, 3)
    caller = Caller(gateway, cache_id, [4], 5)
    await caller.finish(await caller.begin(n=3, keep_s=1000.0))
    assert caller.received == decodes(gateway, [1, 2, 3], [4], 5), "sample 0 draws with the seed itself"
    assert all(len(caller.reader.tokens("x", sample)) == 5 for sample in range(3))
    assert gateway.tokens(cache_id) == [1, 2, 3]
    caller.reader.cancel()
    for _ in range(5):
        gateway.work()
        await asyncio.sleep(0)
    assert len(gateway.machine) == 1, "copies are gone"


async def test_a_cache_that_is_shorter_or_gone_is_refused() -> None:
    gateway = Gateway()
    cache_id = gateway.create(1, 2, 3)
    prompt = runner_pb2.CachePrompt(cache_id=cache_id, position=4, token_ids=[4])
    with pytest.raises(PositionMismatch):
        await held_cache(gateway.dispatcher, prompt, None)
    gateway.release(cache_id)
    with pytest.raises(QuireError, match="no such cache"):
        await held_cache(gateway.dispatcher, prompt, None)


async def test_an_item_waits_for_the_operations_before_it() -> None:
    gateway = Gateway()
    cache_id = gateway.create(1, 2, 3)
    gateway.ask(Append(AppendKind.DECODE, cache_id, (4,)))
    prompt = runner_pb2.CachePrompt(cache_id=cache_id, position=4, token_ids=[5])
    finding = asyncio.create_task(held_cache(gateway.dispatcher, prompt, None))
    for _ in range(3):
        await asyncio.sleep(0)
    assert not finding.done()
    gateway.work()
    assert list((await finding).token_ids) == [1, 2, 3, 4]


async def test_a_token_costs_few_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of Python functions in the gateway, if a worker is ahead of it by as much as it may be."""
    monkeypatch.setattr(ModelWorker, "_goes_on", lambda *_: True)
    gateway, count = Gateway(pool=Pool(1000)), 52
    caller = Caller(gateway, gateway.create(1, 2, 3), [4], count)
    task, calls = await caller.begin(), 0

    def profile(frame: FrameType, event: str, _: object) -> None:
        nonlocal calls
        calls += event == "call" and frame.f_code.co_filename.startswith(SERVICE)

    sys.setprofile(profile)
    try:
        await caller.finish(task)
    finally:
        sys.setprofile(None)
    assert len(caller.received) == count
    assert calls / count <= CALLS_PER_TOKEN, f"{calls / count:.1f}"


def tokens_ahead_are_trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HeldCache, "require_same", lambda *_: None)


def the_copy_is_left_too_early(monkeypatch: pytest.MonkeyPatch) -> None:
    right = HeldSamples.go_on
    monkeypatch.setattr(HeldSamples, "go_on", lambda held, sample, at: right(held, sample, at + 2))


def more_is_appended_than_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HeldSamples, "most_prelaunched", lambda *_: 16)


def a_draft_goes_on_behind_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Sample, "before_end", lambda _, draft: draft)


@pytest.mark.parametrize(
    "plant",
    [
        tokens_ahead_are_trusted,
        the_copy_is_left_too_early,
        more_is_appended_than_may_be,
        a_draft_goes_on_behind_the_end,
    ],
)
async def test_a_planted_bug_is_found(
    plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def both() -> None:
        await test_tokens_of_another_caller_are_not_taken_for_generated_ones()
        await test_broken_streams_go_on_as_one_decode_after_another(range(16))
        await test_no_draft_is_appended_behind_the_end(range(16), monkeypatch, is_text=True)

    plant(monkeypatch)
    with pytest.raises(AssertionError):
        await both()
