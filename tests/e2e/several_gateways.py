"""A server with several gateways, and the callers that know which of them they reach."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import grpc
import psutil
from quire.v1 import executor_pb2, executor_pb2_grpc, runner_pb2, runner_pb2_grpc

from tests import undisturbed
from tests.gateway_process import GatewayProcess

Stub = executor_pb2_grpc.ModelExecutorServiceStub
_WAIT_S = 60


class SeveralGateways(GatewayProcess):
    """`quire serve --gateways N`, each with one worker, on the weightless model."""

    def __init__(self, count: int, data_dir: Path, flags: Sequence[str] = (), *, forks: bool = True) -> None:
        own = ("--gateways", str(count), "--data-dir", str(data_dir))
        super().__init__(model="paged-attention", workers=count, flags=[*own, *flags], forks=forks)
        self.count, self.data_dir = count, data_dir

    def wait_until_ready(self) -> executor_pb2.GetStatusResponse:
        """Waits until each gateway has its worker."""
        self.wait_until(lambda: len(self.having("ready")) == self.count)
        return self.status()

    def having(self, event: str) -> set[int]:
        """The gateways that have logged an event."""
        return {
            int(str(one["gateway"])) for one in self.records() if one["event"] == event and "gateway" in one
        }

    def gateways(self) -> list[psutil.Process]:
        """Their processes, which are forked from one that all tests share, by shard."""
        found: dict[int, psutil.Process] = {}
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                if "service.extensions.gateways.process" in process.cmdline():
                    for shard in range(self.count):
                        if has_open(process, self.data_dir / "shards" / str(shard)):
                            found[shard] = process
        assert len(found) == self.count
        return [found[shard] for shard in range(self.count)]

    def stubs(self) -> list[Stub]:
        """One for each of `channels`."""
        return [Stub(channel) for channel in self.channels()]

    def channels(self) -> list[grpc.Channel]:
        """A connection to each gateway, by shard. The kernel chooses the gateway of a connection."""
        found: dict[int, grpc.Channel] = {}
        give_up_s = time.monotonic() + _WAIT_S
        while len(found) < self.count:
            assert time.monotonic() < give_up_s
            channel = self.connect()
            (worker,) = Stub(channel).GetStatus(executor_pb2.GetStatusRequest(), timeout=10).workers
            found.setdefault(int(worker.worker_id.removeprefix("worker-")), channel)
        return [found[shard] for shard in range(self.count)]


def has_open(process: psutil.Process, directory: Path) -> bool:
    return any(Path(file.path).is_relative_to(directory) for file in process.open_files())


class Text:
    """A cache of one gateway, whose tokens are decoded by any, each with a call of its own."""

    def __init__(self, home: Stub, prompt: list[int]) -> None:
        self.prompt = prompt
        prefill = executor_pb2.PrefillRequest(token_ids=prompt)
        self.cache_id = retrying(home.Prefill, prefill).kv_cache.cache_id  # type: ignore[attr-defined]
        self.tokens: list[int] = []
        self.replayed = 0

    def decode(self, stub: Stub, count: int) -> None:
        for _ in range(count):
            last = self.tokens[-1] if self.tokens else self.prompt[-1]
            at = len(self.prompt) + len(self.tokens)
            request = executor_pb2.DecodeRequest(cache_id=self.cache_id, token_id=last, position=at)
            answer: executor_pb2.DecodeResponse = retrying(stub.Decode, request)  # type: ignore[assignment]
            assert answer.kv_cache.seq_len == at + 1, "applied once"
            self.replayed += answer.replayed_tokens
            self.tokens.append(answer.output.token_id)

    def decode_until(self, stub: Stub, event: threading.Event, further: int, pause_s: float = 0.0) -> None:
        while not event.wait(pause_s):
            self.decode(stub, 1)
        self.decode(stub, further)

    def generate(self, channel: grpc.Channel, count: int) -> None:
        """Decodes with one Execute."""
        item = self.item(count)
        call = runner_pb2_grpc.ModelRunnerServiceStub(channel).Execute(
            runner_pb2.ExecuteRequest(items=[item]), timeout=60
        )
        for chunk in [chunk for response in call for chunk in response.chunks]:
            assert not chunk.HasField("error"), chunk.error
            self.tokens += chunk.token_ids

    def item(self, count: int) -> runner_pb2.ExecuteItem:
        """Generates the next tokens on the cache."""
        so_far = [*self.prompt, *self.tokens]
        prompt = runner_pb2.CachePrompt(cache_id=self.cache_id, token_ids=so_far[-1:], position=len(so_far))
        return runner_pb2.ExecuteItem(item_id="x", cache=prompt, max_tokens=count, ignore_eos=True)

    def assert_as_undisturbed(self) -> None:
        # The first decode repeats the prompt's last token.
        repeated = [*self.prompt, self.prompt[-1]]
        assert self.tokens == undisturbed.greedy(repeated, len(self.tokens))


def retrying(call: grpc.UnaryUnaryMultiCallable, request: object) -> object:  # type: ignore[type-arg]
    """Repeats a call while a gateway is away. `position` keeps it from being applied twice."""
    give_up_s = time.monotonic() + _WAIT_S
    while True:
        try:
            return call(request, timeout=30)
        except grpc.RpcError as error:
            if error.code() is not grpc.StatusCode.UNAVAILABLE or time.monotonic() > give_up_s:
                raise
            time.sleep(0.05)
