"""Callers that decode greedily through faults, and compare each token with an undisturbed run.

Each knows what was acknowledged to it. A call without an answer is asked again, with the same position or the
same request id, until there is one: then the cache is as long as it must be, or something was lost or done
twice.
"""

from __future__ import annotations

import asyncio
import random
from typing import Any

import grpc
from quire.v1 import executor_pb2 as pb
from quire.v1 import executor_pb2_grpc, runner_pb2, types_pb2

from tests.error_details import info_of
from tests.soak.tally import Tally

_CALL_TIMEOUT_S = 60.0
# Of prompts of the model without weights.
_VOCAB = 256
_RETRIED = {
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.CANCELLED,
}
_RETRY_S = 0.05


class Lost(Exception):
    """The sequence cannot go on; the tally knows why."""


class Stuck(Exception):
    """A call was not answered for longer than anything takes to heal."""


class ItemFailed(grpc.RpcError):
    """An item of a batch has failed."""

    def __init__(self, status: Any) -> None:
        self._status = status

    def code(self) -> grpc.StatusCode:
        """As of a call."""
        return next(code for code in grpc.StatusCode if code.value[0] == self._status.code)

    def details(self) -> str:
        """As of a call."""
        return str(self._status.message)

    def trailing_metadata(self) -> Any:
        """As of a call."""
        return (("grpc-status-details-bin", self._status.SerializeToString()),)


class Texts:
    """Prompts, and what follows each with each adapter if nobody disturbs it. "" is the model itself."""

    def __init__(self, prompts: list[tuple[int, ...]]) -> None:
        self.prompts = prompts
        self._texts: dict[tuple[str, tuple[int, ...]], list[int]] = {}

    @classmethod
    def of(cls, count: int, vocab: int, seed: int) -> Texts:
        """Random prompts, without what follows."""
        rng = random.Random(seed)
        return cls([tuple(rng.randrange(1, vocab) for _ in range(rng.randint(3, 90))) for _ in range(count)])

    @classmethod
    def of_weightless(cls, count: int, seed: int, most: int) -> Texts:
        """Random prompts, with what the model without weights says after them, computed in this process."""
        # It takes seconds to import.
        from tests.undisturbed import greedy

        texts = cls.of(count, _VOCAB, seed)
        for prompt in texts.prompts:
            texts.add("", prompt, [*prompt, *greedy(prompt, most - len(prompt))])
        return texts

    async def decode(self, stub: Any, adapter: str, most: int) -> None:
        """Decodes all with an adapter, which has its name as its id, undisturbed and side by side."""
        texts = await asyncio.gather(*(_text_of(stub, adapter, prompt, most) for prompt in self.prompts))
        for prompt, text in zip(self.prompts, texts, strict=True):
            self.add(adapter, prompt, text)

    def add(self, adapter: str, prompt: tuple[int, ...], text: list[int]) -> None:
        """A prompt and what follows."""
        self._texts[adapter, prompt] = text

    def whole(self, adapter: str, prompt: tuple[int, ...]) -> list[int]:
        """A prompt and what follows."""
        return self._texts[adapter, prompt]


async def _text_of(stub: Any, adapter: str, prompt: tuple[int, ...], most: int) -> list[int]:
    request = pb.PrefillRequest(token_ids=prompt, adapter_id=adapter)
    answer = await stub.Prefill(request, timeout=_CALL_TIMEOUT_S)
    text = [*prompt, answer.output.token_id]
    cache_id = answer.kv_cache.cache_id
    while len(text) < most:
        decode = pb.DecodeRequest(cache_id=cache_id, token_id=text[-1])
        text.append((await stub.Decode(decode, timeout=_CALL_TIMEOUT_S)).output.token_id)
    await stub.ReleaseCache(pb.ReleaseCacheRequest(cache_id=cache_id), timeout=_CALL_TIMEOUT_S)
    return text


class Caller:
    """One loop over sequences."""

    # Far more than healing takes: who waits longer hangs.
    patience_s = 120.0

    def __init__(
        self,
        number: int,
        stub: Any,
        texts: Texts,
        adapters: Any,
        tally: Tally,
        seed: int,
        *,
        runner: Any = None,
    ) -> None:
        """`runner`: the stub of a ModelRunnerService. None: nothing is generated in one call."""
        self._number = number
        self._runner = runner
        self._adapters = adapters
        self._stub: executor_pb2_grpc.ModelExecutorServiceAsyncStub = stub
        self._texts = texts
        self._tally = tally
        self._rng = random.Random(f"{seed} {number}")
        self._requests = 0

    async def run(self, stop: asyncio.Event) -> None:
        """Until told to stop, between two sequences."""
        while not stop.is_set():
            try:
                await self._sequence(stop)
                self._tally.sequences += 1
            except Lost:
                pass

    async def _sequence(self, stop: asyncio.Event) -> None:
        prompt = self._rng.choice(self._texts.prompts)
        request = pb.PrefillRequest(token_ids=prompt, request_id=self._request_id(), position=0)
        request.adapter_id = self._rng.choice(["", *self._adapters.ids])
        answer = await self._ask(self._stub.Prefill, request, 0)
        cache_id = answer.kv_cache.cache_id
        self._tally.adapted += request.adapter_id != ""
        adapter = await self._adapters.of_version(answer.kv_cache.adapter_version)
        text = self._texts.whole(adapter, prompt)
        length = self._check(answer, text, 0, len(prompt), answer.output)
        while length < len(text) - 5 and not (stop.is_set() and self._rng.random() < 0.1):
            choice = self._rng.random()
            if self._runner is not None and self._rng.random() < 0.1:
                length = await self._generate(cache_id, text, length)
            elif choice < 0.85:
                length = await self._decode(cache_id, text, length)
            elif choice < 0.93:
                length = await self._verify(cache_id, text, length)
            elif choice < 0.945:
                length = await self._batch(cache_id, text, length)
            elif choice < 0.965:
                length = await self._truncate(cache_id, length, self._rng.randint(len(prompt), length))
            else:
                cache_id = await self._fork(cache_id, length)
        await self._ask(self._stub.ReleaseCache, pb.ReleaseCacheRequest(cache_id=cache_id), length)

    async def _decode(self, cache_id: str, text: list[int], length: int) -> int:
        request = pb.DecodeRequest(cache_id=cache_id, token_id=text[length], position=length)
        answer = await self._ask(self._stub.Decode, request, length)
        return self._check(answer, text, length, length + 1, answer.output)

    async def _generate(self, cache_id: str, text: list[int], length: int) -> int:
        """Many tokens by one call, often with drafts. A stream that breaks is resumed by position."""
        wanted = min(length + self._rng.randint(2, 30), len(text) - 1)
        has_drafts = self._rng.random() < 0.5

        async def stream(_: Any, **settings: Any) -> Any:
            nonlocal length
            chunk = runner_pb2.SampleChunk()
            if length == wanted:
                # All had come but the end of the stream. No number of tokens would be as many as may come.
                chunk.kv_cache.seq_len = length
                return chunk
            item = runner_pb2.ExecuteItem(
                item_id="it", max_tokens=wanted - length, ignore_eos=True, tokens_only=True
            )
            item.cache.cache_id, item.cache.position = cache_id, length
            item.cache.token_ids.append(text[length])
            if has_drafts:
                item.speculation.method = runner_pb2.SPECULATION_METHOD_PROMPT_LOOKUP
            async for answer in self._runner.Execute(runner_pb2.ExecuteRequest(items=[item]), **settings):
                for chunk in answer.chunks:
                    if chunk.HasField("error"):
                        raise ItemFailed(chunk.error)
                    for token in chunk.token_ids:
                        if token != text[length + 1]:
                            self._tally.lose("differing tokens", f"{token} generated at {length + 1}")
                            raise Lost
                        length += 1
                        self._tally.tokens += 1
            return chunk

        last = await self._ask(stream, runner_pb2.ExecuteRequest(), length)
        self._check_length(length, wanted, wanted)
        self._check_length(last.kv_cache.seq_len, wanted, wanted)
        self._tally.generated += 1
        return length

    async def _batch(self, cache_id: str, text: list[int], length: int) -> int:
        """A BatchDecode of the cache and of a copy of it."""
        fork = pb.ForkCacheRequest(cache_id=cache_id, count=1, request_id=self._request_id())
        (copy,) = (await self._ask(self._stub.ForkCache, fork, length)).kv_caches
        self._check_length(copy.seq_len, length, length)
        request = pb.BatchDecodeRequest()
        for one in (cache_id, copy.cache_id):
            request.items.add(cache_id=one, token_id=text[length], position=length)
        for result in (await self._ask(self._batch_decode, request, length)).results:
            self._check(result.response, text, length, length + 1, result.response.output)
        await self._ask(self._stub.ReleaseCache, pb.ReleaseCacheRequest(cache_id=copy.cache_id), length)
        return length + 1

    async def _batch_decode(self, request: Any, **settings: Any) -> Any:
        """As BatchDecode, but an item's error is raised. Then all are asked again, as with unary calls."""
        answer = await self._stub.BatchDecode(request, **settings)
        for result in answer.results:
            if result.HasField("error"):
                raise ItemFailed(result.error)
        return answer

    async def _verify(self, cache_id: str, text: list[int], length: int) -> int:
        """Some drafts that are right, and sometimes one that is not."""
        right = self._rng.randint(0, 3)
        tokens = text[length : length + 1 + right]
        if self._rng.random() < 0.5:
            wrong = text[length + 1 + right]
            tokens = [*tokens, wrong - 1 if wrong else 1]
        request = pb.ForwardVerifyRequest(
            cache_id=cache_id, token_ids=tokens, position=length, accept=types_pb2.VERIFY_ACCEPT_GREEDY
        )
        answer = await self._ask(self._stub.ForwardVerify, request, length)
        if answer.accepted != right:
            self._tally.lose("differing tokens", f"{answer.accepted} drafts were kept of {right} right ones")
            raise Lost
        return self._check(answer, text, length, length + 1 + right, answer.outputs[right])

    async def _truncate(self, cache_id: str, length: int, new_len: int) -> int:
        request = pb.TruncateKVRequest(cache_id=cache_id, new_len=new_len)
        answer = await self._ask(self._stub.TruncateKV, request, length)
        self._check_length(answer.kv_cache.seq_len, length, new_len)
        return new_len

    async def _fork(self, cache_id: str, length: int) -> str:
        """A beam step: goes on with a copy, and releases what it was made of in the same call."""
        request = pb.ForkCacheRequest(cache_id=cache_id, count=2, release=[cache_id])
        request.request_id = self._request_id()
        answer = await self._ask(self._stub.ForkCache, request, length)
        kept, dropped = answer.kv_caches
        self._check_length(kept.seq_len, length, length)
        await self._ask(self._stub.ReleaseCache, pb.ReleaseCacheRequest(cache_id=dropped.cache_id), length)
        return str(kept.cache_id)

    def _check(self, answer: Any, text: list[int], before: int, wanted: int, output: Any) -> int:
        """Compares an answer with the undisturbed run; returns the new length."""
        self._check_length(answer.kv_cache.seq_len, before, wanted)
        if output.token_id != text[wanted]:
            self._tally.lose("differing tokens", f"{output.token_id} for {text[wanted]} at {wanted}")
            raise Lost
        self._tally.tokens += wanted - before
        self._tally.replayed_tokens += answer.replayed_tokens
        return wanted

    def _check_length(self, length: int, before: int, wanted: int) -> None:
        if length != wanted:
            what = "lost tokens" if length < wanted else "duplicated tokens"
            self._tally.lose(what, f"{length} tokens for {wanted}, {before} before", abs(wanted - length))
            raise Lost

    async def _ask(self, method: Any, request: Any, length: int) -> Any:
        """The answer to a request, which is sent until there is one."""
        self._tally.call_began(self._number)
        try:
            async with asyncio.timeout(self.patience_s):
                while True:
                    self._tally.calls += 1
                    try:
                        return await method(request, timeout=_CALL_TIMEOUT_S)
                    except grpc.RpcError as error:
                        self._judge(error, length)
                    self._tally.retries += 1
                    await asyncio.sleep(_RETRY_S)
        except TimeoutError:
            raise Stuck(
                f"{type(request).__name__} at {length} was not answered in {self.patience_s} s"
            ) from None
        finally:
            self._tally.call_ended(self._number)

    def _judge(self, error: Any, length: int) -> None:
        """Whether to ask again. Raises Lost if that cannot help."""
        if error.code() in _RETRIED:
            return
        info = info_of(error)
        if info.reason in ("ADAPTER_NOT_FOUND", "REQUEST_ID_REUSED"):
            # Its id was unloaded, or names another version than when the call was made first.
            raise Lost
        if info.reason == "POSITION_MISMATCH":
            actual = int(info.metadata["seq_len"])
            what = "lost tokens" if actual < length else "gaps"
            self._tally.lose(what, f"the cache has {actual} tokens, {length} were acknowledged")
        elif info.reason == "CACHE_NOT_FOUND":
            self._tally.lose("lost caches", f"of {length} tokens")
        else:
            self._tally.lose("unexpected errors", f"{error.code().name} {info.reason} {error.details()}")
        raise Lost

    def _request_id(self) -> str:
        self._requests += 1
        return f"soak-{self._number}-{self._requests}"
