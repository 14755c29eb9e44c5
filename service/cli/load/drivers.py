"""The ways to run requests: a decoding loop over one kind of call each.

A driver is given probes, one for each sequence, and writes down in them when it sent and what came. It raises
nothing but cancellation: what fails is said in the probe. A cache that it made is released, however it ends.

A new way to call is a new driver here, and a line in `make_driver`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import grpc
from google.protobuf import duration_pb2
from quire.v1 import executor_pb2, executor_pb2_grpc, runner_pb2, runner_pb2_grpc

from service.cli.channel import status_reason
from service.cli.load.connecting import Metadata, RunnerStub, Server, Stub
from service.cli.load.measuring import Probe
from service.cli.load.session_calls import CallFailed, SessionCalls, failure_reason, grpc_code_name

MODES = ("unary", "batch", "session", "execute")
# A cache that nobody can release, as the answer with its name was lost, is not there for long.
_LEASE = duration_pb2.Duration(seconds=60)
_RELEASE_TIMEOUT_S = 5.0
NO_TOKENS = "NO_TOKENS"


class Driver(Protocol):
    """Runs sequences that begin together."""

    async def run(self, probes: Sequence[Probe]) -> None:
        """Until all have ended."""

    async def close(self) -> None:
        """Ends what is open."""


class _Calls(Protocol):
    """The three calls of a decoding loop. Each raises CallFailed or grpc.RpcError."""

    async def prefill(self, request: executor_pb2.PrefillRequest) -> executor_pb2.PrefillResponse: ...

    async def decode(self, request: executor_pb2.DecodeRequest) -> executor_pb2.DecodeResponse: ...

    async def release(self, cache_id: str) -> None: ...

    async def close(self) -> None: ...


class _UnaryCalls:
    def __init__(self, stub: Stub, metadata: Metadata, timeout_s: float | None) -> None:
        self._stub = stub
        self._settings: dict[str, Any] = {"metadata": metadata, "timeout": timeout_s}

    async def prefill(self, request: executor_pb2.PrefillRequest) -> executor_pb2.PrefillResponse:
        return await self._stub.Prefill(request, **self._settings)

    async def decode(self, request: executor_pb2.DecodeRequest) -> executor_pb2.DecodeResponse:
        return await self._stub.Decode(request, **self._settings)

    async def release(self, cache_id: str) -> None:
        request = executor_pb2.ReleaseCacheRequest(cache_id=cache_id)
        await self._stub.ReleaseCache(request, **self._settings)

    async def close(self) -> None:
        return None


class LoopDriver:
    """Prefill, Decode after Decode, ReleaseCache: each sequence by itself."""

    def __init__(self, calls: _Calls) -> None:
        self._calls = calls

    async def run(self, probes: Sequence[Probe]) -> None:
        await asyncio.gather(*(_failing_in(probe, self._run(probe)) for probe in probes))

    async def _run(self, probe: Probe) -> None:
        calls = self._calls
        request = _prefill_request(probe)
        probe.sent()
        first = await calls.prefill(request)
        cache_id, position = first.kv_cache.cache_id, first.kv_cache.seq_len
        try:
            probe.took(1, first.reused_tokens)
            token_id = first.output.token_id
            for _ in range(probe.request.output_tokens - 1):
                answer = await calls.decode(
                    executor_pb2.DecodeRequest(cache_id=cache_id, token_id=token_id, position=position)
                )
                token_id, position = answer.output.token_id, answer.kv_cache.seq_len
                probe.took(1)
            probe.done()
        finally:
            await _in_any_case(calls.release(cache_id))

    async def close(self) -> None:
        await self._calls.close()


@dataclass(slots=True)
class _Row:
    """One sequence of a batch."""

    probe: Probe
    cache_id: str
    seq_len: int
    token_id: int

    def request(self) -> executor_pb2.DecodeRequest:
        return executor_pb2.DecodeRequest(
            cache_id=self.cache_id, token_id=self.token_id, position=self.seq_len
        )


class BatchDriver:
    """One caller with several sequences: BatchPrefill, then BatchDecode of those not at their end."""

    def __init__(self, stub: Stub, metadata: Metadata, timeout_s: float | None) -> None:
        self._stub = stub
        self._settings: dict[str, Any] = {"metadata": metadata, "timeout": timeout_s}

    async def run(self, probes: Sequence[Probe]) -> None:
        made: list[_Row] = []
        try:
            rows = await self._prefill(probes, made)
            while rows := [row for row in rows if self._goes_on(row)]:
                rows = await self._decode(rows)
        except grpc.RpcError as error:
            for probe in probes:
                probe.failed(failure_reason(error))
        finally:
            if made:
                await _in_any_case(asyncio.gather(*(self._release(row) for row in made)))

    async def close(self) -> None:
        return None

    async def _prefill(self, probes: Sequence[Probe], made: list[_Row]) -> list[_Row]:
        request = executor_pb2.BatchPrefillRequest(items=[_prefill_request(probe) for probe in probes])
        for probe in probes:
            probe.sent()
        answer = await self._stub.BatchPrefill(request, **self._settings)
        for probe, result in zip(probes, answer.results, strict=True):
            if result.HasField("error"):
                probe.failed(_status_word(result.error))
            else:
                first = result.response
                probe.took(1, first.reused_tokens)
                handle = first.kv_cache
                made.append(_Row(probe, handle.cache_id, handle.seq_len, first.output.token_id))
        return list(made)

    async def _decode(self, rows: list[_Row]) -> list[_Row]:
        request = executor_pb2.BatchDecodeRequest(items=[row.request() for row in rows])
        answer = await self._stub.BatchDecode(request, **self._settings)
        left = []
        for row, result in zip(rows, answer.results, strict=True):
            if result.HasField("error"):
                row.probe.failed(_status_word(result.error))
                continue
            row.seq_len += 1
            row.token_id = result.response.output.token_id
            row.probe.took(1)
            left.append(row)
        return left

    @staticmethod
    def _goes_on(row: _Row) -> bool:
        goes_on = len(row.probe.record.counts) < row.probe.request.output_tokens
        if not goes_on:
            row.probe.done()
        return goes_on

    async def _release(self, row: _Row) -> None:
        request = executor_pb2.ReleaseCacheRequest(cache_id=row.cache_id)
        await self._stub.ReleaseCache(request, **self._settings)


class ExecuteDriver:
    """Execute: the server drives the tokens, and they come as a stream."""

    def __init__(self, stub: RunnerStub, metadata: Metadata, timeout_s: float | None) -> None:
        self._stub = stub
        self._settings: dict[str, Any] = {"metadata": metadata, "timeout": timeout_s}

    async def run(self, probes: Sequence[Probe]) -> None:
        await asyncio.gather(*(_failing_in(probe, self._run(probe)) for probe in probes))

    async def close(self) -> None:
        return None

    async def _run(self, probe: Probe) -> None:
        item = runner_pb2.ExecuteItem(
            item_id="0",
            tokens=runner_pb2.TokenPrompt(token_ids=probe.prompt),
            max_tokens=probe.request.output_tokens,
            ignore_eos=True,
            tokens_only=True,
        )
        request = runner_pb2.ExecuteRequest(items=[item])
        probe.sent()
        call: Any = self._stub.Execute(request, **self._settings)
        try:
            async for response in call:
                for chunk in response.chunks:
                    if chunk.token_ids:
                        probe.took(len(chunk.token_ids))
                    if chunk.finish_reason == runner_pb2.FINISH_REASON_ERROR:
                        raise CallFailed(_status_word(chunk.error))
        finally:
            # Nothing happens to one that has ended.
            call.cancel()
        if not probe.record.counts:
            raise CallFailed(NO_TOKENS)
        probe.done()


def make_driver(
    mode: str, channel: grpc.aio.Channel, server: Server, timeout_s: float | None, max_calls: int
) -> Driver:
    """The driver of a mode. `max_calls`: how many calls a message of a Session may hold."""
    stub: Stub = executor_pb2_grpc.ModelExecutorServiceStub(channel)
    if mode == "unary":
        return LoopDriver(_UnaryCalls(stub, server.metadata, timeout_s))
    if mode == "session":
        return LoopDriver(SessionCalls(stub, server.metadata, timeout_s, max_calls))
    if mode == "batch":
        return BatchDriver(stub, server.metadata, timeout_s)
    runner_stub: RunnerStub = runner_pb2_grpc.ModelRunnerServiceStub(channel)
    return ExecuteDriver(runner_stub, server.metadata, timeout_s)


def _prefill_request(probe: Probe) -> executor_pb2.PrefillRequest:
    return executor_pb2.PrefillRequest(token_ids=probe.prompt, lease=_LEASE)


async def _failing_in(probe: Probe, work: Coroutine[Any, Any, None]) -> None:
    """Waits for `work`; what it raises is said in the probe."""
    try:
        await work
    except CallFailed as error:
        probe.failed(error.reason)
    except grpc.RpcError as error:
        probe.failed(failure_reason(error))


async def _in_any_case(work: Awaitable[object]) -> None:
    """Waits for `work`, also while being cancelled, but not for long. What it raises does not matter."""
    with contextlib.suppress(CallFailed, grpc.RpcError, TimeoutError):
        async with asyncio.timeout(_RELEASE_TIMEOUT_S):
            await work


def _status_word(status: Any) -> str:
    return status_reason(status) or grpc_code_name(status.code)
