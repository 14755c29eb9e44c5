"""Gateways that share shards are restarted one after the other, and no call of their callers fails."""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import grpc
import pytest
from quire import Cache, Client
from quire.errors import QuireError, from_rpc_error
from quire.v1 import executor_pb2 as pb
from quire.v1 import executor_pb2_grpc

from tests import undisturbed
from tests.e2e.several_gateways import retrying
from tests.e2e.test_remote_workers import Pool, process_of
from tests.gateway_process import GatewayProcess
from tests.ports import free_address
from tests.postgres_server import PostgresServer

FLAGS = ("--kv-pages", "256", "--orphan-grace-s", "60")
SHARDS = 3
# Between two calls: what is looked for is no effect of load.
PAUSE_S = 0.05
# Of each caller, with each set of gateways.
TOKENS = 10
LENGTH = 40
TIMEOUT_S = 60
ROUND_ROBIN = '{"loadBalancingConfig": [{"round_robin": {}}]}'


class Upgraded:
    """Some gateways at fixed addresses. Restarts one at a time."""

    def __init__(self, stack: contextlib.ExitStack, count: int, directory: Path) -> None:
        self.pool = pool = Pool(directory)
        stack.callback(pool.stop)
        database = stack.enter_context(PostgresServer())
        self._own = ["--pool", str(pool.certificates), "--journal", database.url]
        self._own += ["--shards", str(SHARDS), "--workers", str(SHARDS)]
        self._ports = [free_address() for _ in range(count)]
        for _ in range(SHARDS):
            pool.start_worker("--gateway", ",".join(self._ports))
        self._peers = [free_address() for _ in range(count)]
        self.addresses = [free_address() for _ in range(count)]
        self.gateways: list[GatewayProcess] = []
        stack.callback(lambda: [gateway.stop() for gateway in self.gateways])
        for index in range(count):
            self.gateways.append(self._start(index))

    def _start(self, index: int) -> GatewayProcess:
        address = self.addresses[index]
        own = ["--listen", address, "--advertise", address, "--peer-listen", self._peers[index]]
        own += ["--pool-listen", self._ports[index]]
        gateway = GatewayProcess(model="paged-attention", flags=[*FLAGS, *self._own, *own])
        gateway.address = gateway._wait_for_address()
        gateway.channel = gateway.connect()
        return gateway

    def restart(self, index: int) -> None:
        assert self.gateways[index].stop() == 0
        self.gateways[index] = self._start(index)


class Caller(threading.Thread):
    """Decodes one text after the other, and notes what fails."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self._rng = random.Random(number)
        self._stopping = threading.Event()
        self.failures: list[str] = []
        self.tokens = 0
        # Prompts, and what followed them.
        self.texts: list[tuple[list[int], list[int]]] = []

    def run(self) -> None:
        while not self._stopping.is_set():
            prompt = [self._rng.randrange(1, 200) for _ in range(self._rng.randint(3, 40))]
            try:
                self._decode(prompt)
            except (QuireError, grpc.RpcError, AssertionError) as error:
                self.failures.append(repr(error))

    def stop(self) -> None:
        self._stopping.set()
        self.join()

    def _decode(self, prompt: list[int]) -> None:
        raise NotImplementedError

    def _came_on(self, count: int = 1) -> None:
        self.tokens += count
        time.sleep(PAUSE_S)


class OurCaller(Caller):
    """With our client, and all that can be repeated."""

    def __init__(self, number: int, client: Client) -> None:
        super().__init__(number)
        self._client = client

    def _decode(self, prompt: list[int]) -> None:
        cache = self._client.prefill(prompt)
        text = [cache.output.token_id]
        self.texts.append((prompt, text))
        while len(text) < LENGTH and not self._stopping.is_set():
            cache = self._rng.choice((self._one, self._one, self._batch, self._cut, self._copy))(cache, text)
            assert cache.seq_len == len(prompt) + len(text) - 1
            self._came_on()
        cache.release()

    def _one(self, cache: Cache, text: list[int]) -> Cache:
        text.append(cache.decode(text[-1]).token_id)
        return cache

    def _batch(self, cache: Cache, text: list[int]) -> Cache:
        """Beside a cache that is probably another gateway's."""
        (other,) = self._client.batch_prefill([text])
        assert isinstance(other, Cache), other
        results = self._client.batch_decode([(cache, text[-1]), (other, 1)])
        for result in results:
            assert not isinstance(result, QuireError), result
        text.append(results[0].token_id)  # type: ignore[union-attr]
        other.release()
        return cache

    def _cut(self, cache: Cache, text: list[int]) -> Cache:
        cache = self._one(cache, text)
        cache.truncate(cache.seq_len - 1)
        text.pop()
        return cache

    def _copy(self, cache: Cache, text: list[int]) -> Cache:
        (copy,) = cache.fork(1, release=[cache])
        return self._one(copy, text)


class PlainCaller(Caller):
    """That of a gRPC library: one name for all gateways. Repeats what docs/clients.md says."""

    def __init__(self, number: int, addresses: Sequence[str]) -> None:
        super().__init__(number)
        options = [("grpc.service_config", ROUND_ROBIN), ("grpc.enable_retries", 0)]
        self._channel = grpc.insecure_channel("ipv4:" + ",".join(addresses), options)
        self._stub = executor_pb2_grpc.ModelExecutorServiceStub(self._channel)

    def stop(self) -> None:
        super().stop()
        self._channel.close()

    def _decode(self, prompt: list[int]) -> None:
        request_id = f"{self.name}-{len(self.texts)}"
        made = self._answer(self._stub.Prefill, pb.PrefillRequest(token_ids=prompt, request_id=request_id))
        text, cache_id = [made.output.token_id], made.kv_cache.cache_id
        self.texts.append((prompt, text))
        while len(text) < LENGTH and not self._stopping.is_set():
            position = len(prompt) + len(text) - 1
            decode = pb.DecodeRequest(cache_id=cache_id, token_id=text[-1], position=position)
            text.append(self._answer(self._stub.Decode, decode).output.token_id)
            self._came_on()
        self._answer(self._stub.ReleaseCache, pb.ReleaseCacheRequest(cache_id=cache_id))

    def _answer(self, call: Callable[..., Any], request: Any) -> Any:
        give_up_s = time.monotonic() + TIMEOUT_S
        while True:
            try:
                return call(request, timeout=TIMEOUT_S)
            except grpc.RpcError as error:
                failure = from_rpc_error(error)
                # What reaches a server while it stops, gRPC drops with CANCELLED, which has no reason.
                is_dropped = failure.code is grpc.StatusCode.CANCELLED and not failure.reason
                is_repeated = is_dropped or failure.code is grpc.StatusCode.UNAVAILABLE
                if not is_repeated or time.monotonic() > give_up_s:
                    raise
                delay_s = max(0.1, failure.retry_delay_s or 0)
            time.sleep(delay_s)


# The third is one more that neither stops nor forwards.
@pytest.fixture(params=[2, pytest.param(3, marks=pytest.mark.thorough)])
def upgraded(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Upgraded]:
    with contextlib.ExitStack() as stack:
        yield Upgraded(stack, request.param, tmp_path)


def test_no_call_fails_while_gateways_are_restarted_one_after_the_other(upgraded: Upgraded) -> None:
    client = Client(upgraded.addresses, timeout_s=TIMEOUT_S)
    callers: list[Caller] = [OurCaller(number, client) for number in range(2)]
    callers += [PlainCaller(number, upgraded.addresses) for number in range(2, 5)]

    def wait_until_all_came_on() -> None:
        before = [one.tokens for one in callers]
        give_up_s = time.monotonic() + TIMEOUT_S
        while any(now.tokens - then < TOKENS for now, then in zip(callers, before, strict=True)):
            assert time.monotonic() < give_up_s, [one.failures for one in callers]
            time.sleep(PAUSE_S)

    for caller in callers:
        caller.start()
    try:
        wait_until_all_came_on()
        for index in range(len(upgraded.gateways)):
            upgraded.restart(index)
            wait_until_all_came_on()
    finally:
        for caller in callers:
            caller.stop()
    assert not [failure for one in callers for failure in one.failures]
    for caller in callers:
        for prompt, text in caller.texts:
            assert text == undisturbed.greedy(prompt, len(text))
    client.close()


def test_a_gateway_that_stops_waits_for_calls_that_it_has_forwarded(tmp_path: Path) -> None:
    """Before, it did not, and they failed."""
    with contextlib.ExitStack() as stack:
        upgraded = Upgraded(stack, 2, tmp_path)
        stopping, other = upgraded.gateways
        prefill = pb.PrefillRequest(token_ids=[1, 2, 3])
        cache_id = retrying(other.stub.Prefill, prefill).kv_cache.cache_id  # type: ignore[attr-defined]
        # Until it knows who has that shard.
        retrying(stopping.stub.Decode, pb.DecodeRequest(cache_id=cache_id, token_id=4, position=3))
        workers = [process_of(worker) for worker in upgraded.pool.workers]
        for worker in workers:
            worker.suspend()
        try:
            call: Any = stopping.stub.Decode.future(
                pb.DecodeRequest(cache_id=cache_id, token_id=5), timeout=60
            )
            other.wait_until_in_flight(1)
            stopping.process.send_signal(signal.SIGTERM)
            stopping.wait_until(lambda: "a shard is given back" in stopping.log())
            # Longer than anything else that it waits for.
            time.sleep(1)
        finally:
            for worker in workers:
                worker.resume()
        assert call.result().kv_cache.seq_len == 5
        assert stopping.process.wait(TIMEOUT_S) == 0


def test_a_gateway_that_stops_drops_no_call_that_waits(tmp_path: Path) -> None:
    """Before, nearly each of so many calls got CANCELLED, and not from the gateway."""
    with GatewayProcess(model="paged-attention", flags=["--data-dir", str(tmp_path)]) as gateway:
        codes = asyncio.run(codes_of_calls_that_wait(gateway))
    assert set(codes) <= {"OK", "UNAVAILABLE"} and codes["UNAVAILABLE"], codes


async def codes_of_calls_that_wait(gateway: GatewayProcess) -> Counter[str]:
    """They have been sent to a gateway that stands still, and that is then told to end."""
    asked: list[tuple[grpc.aio.Channel, pb.DecodeRequest]] = []
    async with contextlib.AsyncExitStack() as stack:
        for number in range(64):
            options = [("grpc.use_local_subchannel_pool", 1)]
            channel = await stack.enter_async_context(grpc.aio.insecure_channel(gateway.address, options))
            prefill = pb.PrefillRequest(token_ids=[1, 2, number])
            made = await executor_pb2_grpc.ModelExecutorServiceStub(channel).Prefill(prefill)
            asked.append((channel, pb.DecodeRequest(cache_id=made.kv_cache.cache_id, token_id=5)))
        gateway.process.send_signal(signal.SIGSTOP)
        calls = []
        for channel, request in asked:
            # As a stream of one request, whose sender knows when it has been sent.
            decode: Any = channel.stream_unary(
                "/quire.v1.ModelExecutorService/Decode", pb.DecodeRequest.SerializeToString
            )
            calls.append(decode(timeout=TIMEOUT_S))
            await calls[-1].write(request)
            await calls[-1].done_writing()
        gateway.process.terminate()
        gateway.process.send_signal(signal.SIGCONT)
        return Counter([(await call.code()).name for call in calls])
