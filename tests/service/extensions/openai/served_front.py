"""The HTTP server over a runtime that a test controls."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import openai
from quire.v1 import runner_pb2, types_pb2

from service.adapters.registry import Adapters
from service.api.interceptor import CallInterceptor
from service.api.server_state import ServerState
from service.auth.authenticator import Authenticator, current_tenant
from service.caches.idempotency import IdempotencyTable
from service.config import Config
from service.extension import GatewayParts
from service.extensions.openai.front import OpenAiFront
from service.extensions.openai.settings import OpenAiSettings
from service.runtimes.base import Batch, ChunkSink
from service.runtimes.embedding import Embedder
from service.runtimes.executions import Executions
from service.runtimes.router import Router
from service.runtimes.servicer import RunnerApi
from service.text.text_model import TextModel
from tests.service.served import HttpPort, state_of
from workers.common import worker_pb2

QUESTION: Any = [{"role": "user", "content": "What is 2 < 3?"}]
TIMEOUT_S = 30.0


class FakeRuntime:
    """A provider that runs `generate` for each batch, which puts chunks into the sink."""

    wait_s = 0.0

    def __init__(
        self, generate: Callable[[Batch, ChunkSink], Any], name: str = "fake", model_id: str = "m"
    ) -> None:
        self._generate = generate
        self.name = name
        self._model_id = model_id
        self.tenants: list[str] = []
        self.running = 0

    def describe(self) -> runner_pb2.Runtime:
        if self.name == "local":
            return runner_pb2.Runtime(name=self.name, runtime_kind=runner_pb2.RUNTIME_KIND_LOCAL)
        return runner_pb2.Runtime(
            name=self.name,
            model_id=self._model_id,
            provider=f"owner of {self.name}",
            runtime_kind=runner_pb2.RUNTIME_KIND_OPENAI_CHAT,
        )

    async def execute(self, batch: Batch, sink: ChunkSink) -> None:
        tenant = current_tenant()
        self.tenants.append("" if tenant is None else tenant.name)
        self.running += 1
        try:
            await self._generate(batch, sink)
        finally:
            self.running -= 1


class Waiting(FakeRuntime):
    """Says yes when it may go on."""

    def __init__(self) -> None:
        super().__init__(self._say_yes)
        self.may_continue = asyncio.Event()

    async def _say_yes(self, batch: Batch, sink: ChunkSink) -> None:
        await self.may_continue.wait()
        await generate_yes(batch, sink)


class Server(HttpPort):
    """A running HTTP server, and clients of it."""

    def __init__(self, front: OpenAiFront, state: ServerState, text: TextModel, port: int) -> None:
        super().__init__(port)
        self.front = front
        self.state = state
        self.text = text

    def client(self, key: str = "none") -> Any:
        url = f"http://127.0.0.1:{self.port}/v1"
        return openai.AsyncOpenAI(base_url=url, api_key=key, timeout=TIMEOUT_S, max_retries=0)


def unexpected(*_: object, **__: object) -> Any:
    raise AssertionError("the front has called what it does not need")


@asynccontextmanager
async def serving(
    runtime: FakeRuntime,
    *,
    has_worker: bool = True,
    forward: Any = None,
    texts: dict[str, Any] | None = None,
    admin: Any = None,
    **settings: Any,
) -> AsyncIterator[Server]:
    """`forward`: answers requests for the log-probabilities of prompts. `texts`: of what a worker says.

    `admin`: of the calls of operators.
    """
    config = Config().with_values({"openai_listen": "127.0.0.1:0", **settings})
    model = types_pb2.ModelDescription(vocab_size=100)
    able = types_pb2.ExecutorCapabilities(kv_capacity_tokens=1000)
    ready = worker_pb2.WorkerReady(**{"model": model, "executor": able, **(texts or {})})
    state = state_of(config, ready if has_worker else None)
    runtimes: Any = [runtime] if has_worker else [FakeRuntime(generate_yes, "local"), runtime]
    router = Router(runtimes)
    text = TextModel(lambda: state.first_ready, lambda: "")
    executions = Executions(router, state, IdempotencyTable())
    embedder = Embedder(state, text, unexpected)
    front = config.of(OpenAiSettings).open_extension(config)
    front.attach(
        GatewayParts(
            state=state,
            api=SimpleNamespace(Forward=forward, BatchForward=None),  # type: ignore[arg-type]
            runner=RunnerApi(executions, router, state, embedder),
            admin=admin,
            interceptor=CallInterceptor(state),
            authenticator=Authenticator.of(config),
            text=text,
            adapters=Adapters(1),
            shards=list,
            open_core=unexpected,
            stop=unexpected,
            http=[],
            num_http_connections=lambda: front.num_connections,
        )
    )
    port = front.bind()
    tasks = [asyncio.create_task(front.run()), asyncio.create_task(state.receiver.run())]
    try:
        yield Server(front, state, text, port)
    finally:
        await front.stop(0.2)
        tasks[1].cancel()
        await asyncio.wait(tasks)
        text.close()
        assert runtime.running == 0


def raw_request(path: str, method: str = "POST", **fields: Any) -> bytes:
    """A request as HTTP bytes."""
    body = json.dumps(fields)
    head = f"{method} {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {len(body)}\r\n\r\n{body}".encode()


def raw_chat(**settings: Any) -> bytes:
    return raw_request("/v1/chat/completions", model="m", messages=QUESTION, **settings)


def chunk(text: str = "", **fields: Any) -> runner_pb2.SampleChunk:
    return runner_pb2.SampleChunk(item_id="0", text=text, **fields)


async def generate_yes(_batch: Batch, sink: ChunkSink) -> None:
    sink.put([chunk("yes", finish_reason=runner_pb2.FINISH_REASON_STOP)])
