"""How near one caller comes to the worker's own rate: `python -m benchmarks.generate`.

The worker's own rate is that of its step loop in this process, which decodes one sequence: each token is
requested in the moment in which the one before is told, with the next one prelaunched, as the gateway wants
it. Beside it, in turns: Execute on a held cache, of a caller on this machine, and of one that is 10 ms away
in each direction. All are of the same tokens, which have to be the same. Prints JSON: tokens a second, and
the ratio of the rates of each round.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import json
import queue
import random
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self, TypeAlias

import grpc
from quire.v1 import executor_pb2, executor_pb2_grpc, runner_pb2, runner_pb2_grpc

from benchmarks import machine
from benchmarks.gateway_process import CHANNEL_OPTIONS, GatewayProcess
from benchmarks.in_process import LlmExecutor
from benchmarks.shapes import SHAPES
from benchmarks.weights import make_model
from workers.common.machine_limits import threads_of
from workers.common.switching import switch_often
from workers.common.worker_pb2 import ReleaseCommand, WorkerCommand
from workers.decodes import Column, Decodes
from workers.operations import Forward, Kind, Result
from workers.process import LEAST_PARAMETERS_PER_THREAD
from workers.scheduler import Scheduler
from workers.step_loop import StepLoop

_STORYTELLER = Path(__file__).resolve().parents[1] / "workers/models/storyteller"
_PROMPT_TOKENS = 64
_FAR_S = 0.01
_KV_PAGES = 512
_TIMEOUT_S = 600.0

# Takes a prompt and how many tokens are wanted. Seconds from the first to the last of them, and all.
Way: TypeAlias = Callable[[Sequence[int], int], tuple[float, list[int]]]


class SlowNetwork:
    """A network to a server, in which everything arrives this late, in each direction."""

    def __init__(self, target: str, delay_s: float) -> None:
        self._target, self._delay_s = target.rsplit(":", 1), delay_s
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        self.address = asyncio.run_coroutine_threadsafe(self._listen(), self._loop).result()

    async def _listen(self) -> str:
        server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        return f"127.0.0.1:{server.sockets[0].getsockname()[1]}"

    async def _connected(self, near: asyncio.StreamReader, near_out: asyncio.StreamWriter) -> None:
        host, port = self._target
        far, far_out = await asyncio.open_connection(host, int(port))
        await asyncio.gather(self._carry(near, far_out), self._carry(far, near_out))

    async def _carry(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        while data := await source.read(1 << 16):
            self._loop.call_later(self._delay_s, sink.write, data)
        self._loop.call_later(self._delay_s, sink.close)


class StepLoopAlone:
    """The worker's step loop, without a gateway. In a process of its own, which `main` starts."""

    def __init__(self, model: Path) -> None:
        switch_often()
        executor = LlmExecutor.load(model, kv_pages=_KV_PAGES)
        executor.warmup()
        # As a worker's.
        most = executor.info().num_parameters // LEAST_PARAMETERS_PER_THREAD
        self._threads = min(threads_of(1), max(1, most))
        self._executor = executor
        self._loop = StepLoop(executor.engine, Scheduler(2048, 256, 256), self._told, 1 << 20)
        self._ended: queue.SimpleQueue[float] = queue.SimpleQueue()
        self._tokens: list[int] = []
        self._prompt_tokens = self._count = self._sequence = 0
        self._began_s = 0.0
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        # Each thread has its own number.
        self._executor.set_threads(self._threads)
        self._loop.run()

    def decode(self, prompt: Sequence[int], count: int) -> tuple[float, list[int]]:
        """Seconds from the first token to the last, and all of them."""
        self._tokens, self._prompt_tokens, self._count = [], len(prompt), count
        self._sequence += 1
        self._request(Kind.PREFILL, 0, prompt)
        ended_s = self._ended.get()
        release = ReleaseCommand(sequences=[self._sequence])
        self._loop.submit([WorkerCommand(op_id=1, release=release)])
        return ended_s - self._began_s, self._tokens

    def _request(self, kind: Kind, position: int, token_ids: Sequence[int]) -> None:
        is_last = len(self._tokens) + 1 == self._count
        forward = Forward(
            2 + position,
            self._sequence,
            position,
            token_ids,
            kind=kind,
            prompt_len=self._prompt_tokens,
            prelaunch=not is_last,
        )
        self._loop.submit([forward])

    def _told(self, results: Sequence[Result | Decodes]) -> None:
        """Called by the loop, on its thread."""
        for result in results:
            if isinstance(result, Decodes):
                self._tokens += result.column(Column.CHOSEN)
            elif isinstance(result, Forward):
                self._tokens.append(result.outputs[-1].token_id)
                self._began_s = time.perf_counter()
            else:
                continue
            if len(self._tokens) == self._count:
                self._ended.put(time.perf_counter())
            else:
                position = self._prompt_tokens + len(self._tokens) - 1
                self._request(Kind.DECODE, position, self._tokens[-1:])

    @classmethod
    def serve(cls, model: Path) -> None:
        """Answers what `OwnRate` asks, until that closes the pipe."""
        own = cls(model)
        for line in sys.stdin:
            sys.stdout.write(json.dumps(own.decode(*json.loads(line))) + "\n")
            sys.stdout.flush()


class OwnRate:
    """The process of a `StepLoopAlone`. Use as a context manager."""

    def __init__(self, model: Path) -> None:
        command = [sys.executable, "-m", "benchmarks.generate", "--serve-step-loop", str(model)]
        # A session of its own, as a worker has: Linux shares cores among sessions.
        self._process = subprocess.Popen(  # noqa: S603 - this program
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate(timeout=_TIMEOUT_S)

    def __call__(self, prompt: Sequence[int], count: int) -> tuple[float, list[int]]:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps([prompt, count]) + "\n")
        self._process.stdin.flush()
        took_s, tokens = json.loads(self._process.stdout.readline())
        return took_s, tokens


def _generate(channel: grpc.Channel, prompt: Sequence[int], count: int) -> tuple[float, list[int]]:
    """The same as `OwnRate`, by an Execute on a held cache."""
    caches = executor_pb2_grpc.ModelExecutorServiceStub(channel)
    made = caches.Prefill(executor_pb2.PrefillRequest(token_ids=prompt[:-1]), timeout=_TIMEOUT_S).kv_cache
    cache = runner_pb2.CachePrompt(cache_id=made.cache_id, token_ids=prompt[-1:], position=len(prompt) - 1)
    item = runner_pb2.ExecuteItem(
        item_id="text", cache=cache, max_tokens=count, ignore_eos=True, tokens_only=True
    )
    tokens: list[int] = []
    began_s = 0.0
    stub = runner_pb2_grpc.ModelRunnerServiceStub(channel)
    for response in stub.Execute(runner_pb2.ExecuteRequest(items=[item]), timeout=_TIMEOUT_S):
        for chunk in response.chunks:
            assert not chunk.HasField("error"), chunk.error
            tokens += chunk.token_ids
        if not began_s and tokens:
            began_s = time.perf_counter()
    took_s = time.perf_counter() - began_s
    caches.ReleaseCache(executor_pb2.ReleaseCacheRequest(cache_id=made.cache_id), timeout=_TIMEOUT_S)
    return took_s, tokens


def _spread(ratios: Sequence[float]) -> dict[str, float]:
    found = {"median": statistics.median(ratios), "least": min(ratios), "most": max(ratios)}
    return {name: round(value, 3) for name, value in found.items()}


def _compare(
    ways: dict[str, Way],
    rounds: int,
    count: int,
    vocab_size: int,
) -> dict[str, Any]:
    rng, rates = random.Random(1), {name: list[float]() for name in ways}
    for number in range(rounds + 1):
        prompt = [rng.randrange(vocab_size) for _ in range(_PROMPT_TOKENS)]
        texts = set()
        for name in sorted(ways, reverse=number % 2 == 0):
            took_s, tokens = ways[name](prompt, count)
            texts.add(tuple(tokens))
            # The first round warms up.
            if number:
                rates[name].append((count - 1) / took_s)
        assert len(texts) == 1, "a way has other tokens"
    found: dict[str, Any] = {
        "tokens_per_s": {name: round(statistics.median(of_one), 1) for name, of_one in rates.items()}
    }
    pairs = {"local_to_worker": ("local", "worker"), "far_to_local": ("far", "local")}
    for name, (one, other) in pairs.items():
        found[name] = _spread([a / b for a, b in zip(rates[one], rates[other], strict=True)])
    return found


def main() -> None:
    """Runs the command line and prints the results."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--shape", choices=sorted(SHAPES), help="default: the model that Quire comes with")
    parser.add_argument("--tokens", type=int, default=256, metavar="N", help="of each text")
    parser.add_argument("--rounds", type=int, default=5, metavar="N")
    parser.add_argument(
        "--cache", type=Path, default=Path("build/benchmarks/models"), help="where models are kept"
    )
    parser.add_argument("--serve-step-loop", type=Path, metavar="MODEL", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve_step_loop:
        StepLoopAlone.serve(options.serve_step_loop)
        return
    model = _STORYTELLER
    if options.shape:
        options.cache.mkdir(parents=True, exist_ok=True)
        model = make_model(SHAPES[options.shape], options.cache.resolve())
    vocab_size = json.loads((model / "config.json").read_text())["vocab_size"]
    with machine.report() as found, GatewayProcess(model=str(model)) as server, OwnRate(model) as own:
        assert server.channel is not None
        network = SlowNetwork(server.address, _FAR_S)
        near, far = server.channel, grpc.insecure_channel(network.address, options=CHANNEL_OPTIONS)
        ways: dict[str, Way] = {
            "worker": own,
            "local": functools.partial(_generate, near),
            "far": functools.partial(_generate, far),
        }
        found.update(_compare(ways, options.rounds, options.tokens, vocab_size))
        far.close()


if __name__ == "__main__":
    main()
