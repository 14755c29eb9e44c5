"""The HTTP server over a runtime that tests control: errors, tools, shutdown, authentication, limits."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import http.client
import json
import socket
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import openai
import pytest
from quire.v1 import runner_pb2, types_pb2

from service.adapters.registry import Adapters
from service.api.interceptor import CallInterceptor
from service.api.request_receiver import RequestReceiver
from service.api.server_state import ServerState
from service.api.status import to_status
from service.auth.authenticator import Authenticator, current_tenant
from service.auth.tokens import Role, new_token
from service.budgets import Budgets
from service.caches.idempotency import IdempotencyTable
from service.config import Config
from service.errors import InvalidArgument, ProviderFailure, QuireError, RuntimeNotFound, SequenceTooLong
from service.extension import GatewayParts
from service.extensions.openai.bodies import BodyReader
from service.extensions.openai.errors import of_prompt
from service.extensions.openai.front import OpenAiFront
from service.extensions.openai.models import Models
from service.extensions.openai.settings import OpenAiSettings
from service.runtimes.base import Batch, ChunkSink
from service.runtimes.embedding import Embedder
from service.runtimes.executions import Executions
from service.runtimes.router import Router
from service.runtimes.servicer import RunnerApi
from service.text import tasks
from service.text.text_model import TextModel
from tests.certificates import Authority, Pair
from tests.chat_templates import byte_tokenizer
from tests.service.served import HttpPort, state_of, turns_of, until
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


def error_with_code(code: str) -> QuireError:
    error = QuireError("it failed", retry_after_s=1.5)
    error.code, error.reason = code, "SOME_REASON"
    return error


STATUS = {
    "INVALID_ARGUMENT": 400, "FAILED_PRECONDITION": 400, "OUT_OF_RANGE": 400, "UNAUTHENTICATED": 401,
    "PERMISSION_DENIED": 403, "NOT_FOUND": 404, "ABORTED": 409, "RESOURCE_EXHAUSTED": 429, "INTERNAL": 500,
    "UNIMPLEMENTED": 501, "UNAVAILABLE": 503, "DEADLINE_EXCEEDED": 504, "DATA_LOSS": 500,
}  # fmt: skip
# What a runtime raises, and the status, code and headers of the response.
ERRORS: list[tuple[BaseException, int, str, dict[str, str]]] = [
    *(
        (error_with_code(code), status, "some_reason", {"retry-after": "2", "retry-after-ms": "1500"})
        for code, status in STATUS.items()
    ),
    # A provider did not accept this server's credentials.
    *(
        (ProviderFailure(reason, "refused"), 502, reason.lower(), {"x-should-retry": "false"})
        for reason in ("UNAUTHORIZED", "FORBIDDEN")
    ),
    (RuntimeError("the secret"), 500, "internal", {}),
    # A panic of a Rust library.
    (BaseException("the secret"), 500, "internal", {}),
]


async def test_errors_have_their_status() -> None:
    async def generate(batch: Batch, sink: ChunkSink) -> None:
        raise ERRORS[int(batch.items[0].chat.messages[0].content)][0]

    async with serving(FakeRuntime(generate)) as served, served.client() as client:
        for index, (_, status, code, headers) in enumerate(ERRORS):
            messages = [{"role": "user", "content": str(index)}]
            with pytest.raises(openai.APIStatusError) as caught:
                await client.chat.completions.create(model="m", messages=messages, stream=index % 2 > 0)
            assert (caught.value.status_code, caught.value.code) == (status, code)
            assert "secret" not in caught.value.response.text
            assert headers.items() <= caught.value.response.headers.items()
            assert caught.value.response.headers["x-request-id"]


async def test_what_a_runtime_cannot_do_is_named_as_the_request_has_it() -> None:
    """By one of several fields that set it. Others: test_requests.py."""

    async def generate(_batch: Batch, sink: ChunkSink) -> None:
        field = "chat.variables_json"
        failure = ProviderFailure("UNSUPPORTED", f"{field}: the provider cannot do it", field=field)
        sink.put([chunk(finish_reason=runner_pb2.FINISH_REASON_ERROR, error=to_status(failure))])

    async with serving(FakeRuntime(generate)) as served, served.client() as client:
        with pytest.raises(openai.BadRequestError) as caught:
            await client.chat.completions.create(model="m", messages=QUESTION, reasoning_effort="low")
    assert (caught.value.code, caught.value.param) == ("unsupported", "reasoning_effort")
    assert caught.value.message.endswith(" reasoning_effort: the provider cannot do it")


@pytest.mark.parametrize(
    ("why", "said"),
    [
        (SequenceTooLong(9, 8), SequenceTooLong(9, 8).message),
        (InvalidArgument("BAD_FIELD", "sampling.top_k", "sampling.top_k: not here"), "top_k: not here"),
    ],
)
async def test_an_error_says_which_of_several_prompts_has_it(why: QuireError, said: str) -> None:
    async def generate(batch: Batch, sink: ChunkSink) -> None:
        failed = chunk(finish_reason=runner_pb2.FINISH_REASON_ERROR, error=to_status(why))
        failed.item_id = batch.items[-1].item_id
        sink.put([failed])

    async with serving(FakeRuntime(generate)) as served, served.client() as client:
        for prompts, prefix in ((["a"], ""), (["a", "b"], "prompt 1: ")):
            with pytest.raises(openai.BadRequestError) as caught:
                await client.completions.create(model="m", prompt=prompts)
            assert isinstance(caught.value.body, dict) and caught.value.body["message"] == prefix + said


def test_the_text_of_an_exception_says_which_of_several_prompts_has_it() -> None:
    with pytest.raises(SequenceTooLong, match=r"^prompt 1: the sequence"), of_prompt(1, 2, str):
        raise SequenceTooLong(9, 8)


async def test_too_many_samples_are_those_of_the_prompts() -> None:
    async with serving(FakeRuntime(generate_yes)) as served, served.client() as client:
        with pytest.raises(openai.BadRequestError) as caught:
            await client.completions.create(model="m", prompt=["a"] * 9, n=128)
    assert (caught.value.code, caught.value.param) == ("too_many_samples", "prompt")


@pytest.mark.parametrize("kind", [RuntimeError, BaseException])
async def test_the_text_of_an_exception_outside_of_a_batch_is_not_sent(
    monkeypatch: pytest.MonkeyPatch, kind: type[BaseException]
) -> None:
    def fail() -> runner_pb2.Runtime:
        raise kind("the secret")

    runtime = FakeRuntime(generate_yes)
    async with serving(runtime) as served, served.client() as client:
        monkeypatch.setattr(runtime, "describe", fail)
        with pytest.raises(openai.APIStatusError) as caught:
            await client.models.list()
    assert (caught.value.status_code, caught.value.code) == (500, "internal")
    assert "secret" not in caught.value.response.text


def test_the_owner_of_a_model_is_the_runtime_that_gets_its_requests() -> None:
    """Also if several runtimes serve it, or if it has the name of another runtime."""
    named = (("a", "m"), ("b", "m"), ("c", "d"), ("d", "x"))
    runtimes: Any = [FakeRuntime(generate_yes, name, model) for name, model in named]
    models = Models(Router(runtimes), state_of(Config()))
    listed = {entry["id"]: entry["owned_by"] for entry in models.listed()}
    assert list(listed) == ["a", "b", "c", "d", "m", "x"]
    for name, owner in listed.items():
        assert owner == f"owner of {models.resolve(name).runtime}" == models.entry(name)["owned_by"]
    assert [models.resolve(name).runtime for name in ("m", "d")] == ["a", "d"]
    with pytest.raises(RuntimeNotFound, match=r"no model 'gpt\\x1b-4': /v1/models lists the models"):
        models.resolve("gpt\x1b-4")


async def test_a_provider_needs_no_worker() -> None:
    """Also while other calls wait for the first worker, because caches were recovered."""
    async with serving(FakeRuntime(generate_yes), has_worker=False) as served, served.client() as client:
        served.state.has_recovered = True
        completion = await client.chat.completions.create(model="m", messages=QUESTION)
        assert completion.choices[0].message.content


async def test_a_shutdown_ends_running_requests_with_an_error() -> None:
    async def generate(_batch: Batch, sink: ChunkSink) -> None:
        sink.put([chunk("so far")])
        await asyncio.Event().wait()

    async with serving(FakeRuntime(generate)) as served, served.client() as client:
        stream = await client.chat.completions.create(model="m", messages=QUESTION, stream=True)
        whole = asyncio.create_task(client.chat.completions.create(model="m", messages=QUESTION))
        await anext(stream)
        await asyncio.sleep(0.05)
        await served.front.stop(1.0)
        with pytest.raises(openai.APIError, match="draining"):
            async for _ in stream:
                pass
        with pytest.raises(openai.InternalServerError) as caught:
            await whole
        assert caught.value.status_code == 503


@pytest.mark.parametrize("is_stream", [False, True])
async def test_a_client_that_does_not_read_is_disconnected(is_stream: bool) -> None:
    async def generate(_batch: Batch, sink: ChunkSink) -> None:
        for position in range(200):
            await sink.wait_for_room()
            sink.put([chunk("x" * 100_000, position=position)])
            await asyncio.sleep(0)
        if is_stream:
            await asyncio.Event().wait()
        sink.put([chunk(position=200, finish_reason=runner_pb2.FINISH_REASON_LENGTH)])

    runtime = FakeRuntime(generate)
    async with serving(runtime, message_timeout_s=0.5) as served:
        reader, writer = await served.connect()
        writer.write(raw_chat(stream=is_stream))
        await reader.readexactly(12)
        # The response is not read, so the connection is reset in the middle of it.
        await until(lambda: not served.front.server.connections)
        await until(lambda: not runtime.running)
        await until(lambda: served.state.budgets.answers.used == 0)
        writer.close()


async def test_limits_on_requests_and_connections() -> None:
    runtime = Waiting()
    async with serving(runtime, max_connections=3) as served, served.client() as client:
        first = asyncio.create_task(client.chat.completions.create(model="m", messages=QUESTION))
        await until(lambda: runtime.running == 1)
        with pytest.raises(openai.RateLimitError) as caught:
            await client.chat.completions.create(model="m", messages=QUESTION)
        assert caught.value.code == "session_limit"
        silent = [await served.connect() for _ in range(6)]
        await until(lambda: len(served.front.server.connections) <= 3)
        runtime.may_continue.set()
        assert (await first).choices[0].message.content == "yes", "earlier connections stay open"
        for _, writer in silent:
            writer.close()


async def test_a_response_too_large_for_one_piece() -> None:
    async def generate(_batch: Batch, sink: ChunkSink) -> None:
        for position in range(3):
            sink.put([chunk("x" * 500, position=position)])
        await generate_yes(_batch, sink)

    async with serving(FakeRuntime(generate), max_response_bytes=1024) as served, served.client() as client:
        with pytest.raises(openai.BadRequestError, match="use a stream"):
            await client.chat.completions.create(model="m", messages=QUESTION)
        assert served.state.budgets.answers.used == 0
        stream = await client.chat.completions.create(model="m", messages=QUESTION, stream=True)
        assert sum([len(part.choices[0].delta.content or "") async for part in stream]) == 1503


async def test_a_client_that_disconnects_ends_what_is_made_of_its_messages(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tasks, "RENDER", dataclasses.replace(tasks.RENDER, max_cpu_s=1000.0))
    endless = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    texts = {
        "tokenizer_json": byte_tokenizer().to_str().encode(),
        "chat_template": types_pb2.ChatTemplate(sources={"default": endless}),
    }
    async with serving(FakeRuntime(generate_yes, "local"), texts=texts) as served:
        running = served.state.budgets.http
        _, writer = await served.connect()
        writer.write(raw_request("/tokenize", messages=QUESTION))
        await until(lambda: running.used == 1)
        writer.close()
        await until(lambda: running.used == 0)


def tls_settings(pair: Pair, authority: Authority) -> dict[str, Any]:
    return {"tls_cert": str(pair.cert), "tls_key": str(pair.key), "tls_client_ca": str(authority.cert)}


async def statuses(port: int, trusted: Authority, certificate: Pair | None, requests: bytes) -> list[bytes]:
    """The status of each response; empty: the connection is refused."""
    context = ssl.create_default_context(cafile=str(trusted.cert))
    if certificate is not None:
        context.load_cert_chain(certificate.cert, certificate.key)
    try:
        found = await HttpPort(port, context).send(requests)
    except (OSError, ssl.SSLError):
        return []
    return [part[:3] for part in found.split(b"HTTP/1.1 ")[1:]]


LAST_REQUEST = raw_chat().replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n", 1)


async def test_tls_settings_are_the_gateways(tmp_path: Path) -> None:
    authority, other = Authority(tmp_path / "ca"), Authority(tmp_path / "other")
    pair, alice = Pair(tmp_path / "cert", tmp_path / "key"), authority.issue("alice")

    def install(server: Pair) -> None:
        pair.cert.write_bytes(server.cert.read_bytes())
        pair.key.write_bytes(server.key.read_bytes())

    install(authority.server())
    runtime = FakeRuntime(generate_yes)
    async with serving(runtime, **tls_settings(pair, authority)) as served:
        assert await statuses(served.port, authority, alice, LAST_REQUEST) == [b"200"]
        assert runtime.tenants == ["alice"]
        # As OpenAI's clients send it, who have no other way to leave it out.
        with_bearer = LAST_REQUEST.replace(b"connection:", b"authorization: Bearer unused\r\nconnection:", 1)
        assert await statuses(served.port, authority, alice, with_bearer) == [b"200"]
        assert runtime.tenants.pop() == "alice"
        assert await statuses(served.port, authority, None, LAST_REQUEST) == []
        assert await statuses(served.port, other, alice, LAST_REQUEST) == []
        install(other.server())
        assert await statuses(served.port, other, alice, LAST_REQUEST) == [b"200"]


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
async def test_a_resumed_session_does_not_outlive_its_ca(tmp_path: Path, version: ssl.TLSVersion) -> None:
    ours, theirs, used = Authority(tmp_path / "ca"), Authority(tmp_path / "other"), tmp_path / "used"
    server, alice = ours.server(), ours.issue("alice")
    used.write_bytes(ours.cert.read_bytes())
    context = ssl.create_default_context(cafile=str(ours.cert))
    context.load_cert_chain(alice.cert, alice.key)
    context.maximum_version = version

    def call(port: int, session: ssl.SSLSession | None) -> tuple[bytes, ssl.SSLSession | None]:
        with (
            socket.create_connection(("127.0.0.1", port)) as plain,
            context.wrap_socket(plain, server_hostname="localhost", session=session) as connection,
        ):
            connection.sendall(LAST_REQUEST)
            return connection.recv(12), connection.session

    settings = {**tls_settings(server, ours), "tls_client_ca": str(used)}
    async with serving(FakeRuntime(generate_yes), **settings) as served:
        answer, session = await asyncio.to_thread(call, served.port, None)
        assert answer == b"HTTP/1.1 200"
        assert (await asyncio.to_thread(call, served.port, session))[0] == answer
        used.write_bytes(theirs.cert.read_bytes())
        with contextlib.suppress(OSError):
            answer, _ = await asyncio.to_thread(call, served.port, session)
            assert answer == b"", "its certificate is verified again"


async def test_a_pipelined_request_does_not_inherit_authentication(tmp_path: Path) -> None:
    """A request for the models with a token for observers, and then a request for text without a token."""
    authority = Authority(tmp_path / "ca")
    pair, alice, anonymous = authority.server(), authority.issue("alice"), authority.issue("")
    token, line = new_token("ops", [Role.OBSERVE])
    (tmp_path / "tokens").write_text(f"[tokens]\n{line}\n")
    runtime = FakeRuntime(generate_yes)
    both = f"GET /v1/models HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {token}\r\n\r\n".encode()
    both += LAST_REQUEST
    settings = tls_settings(pair, authority)
    async with serving(runtime, tokens=str(tmp_path / "tokens"), **settings) as served:
        assert await statuses(served.port, authority, anonymous, both) == [b"200", b"401"]
        assert runtime.tenants == []
        assert await statuses(served.port, authority, alice, both) == [b"200", b"200"]
        assert runtime.tenants == ["alice"]


async def test_a_body_of_too_many_values_is_not_parsed() -> None:
    async def parse(data: bytes) -> Any:
        return await reader_of(1 << 24, 1 << 24).parse(bytearray(data))

    text = {"prompt": 'a,[{,"' * 400_000 + "\\"}
    assert await parse(json.dumps(text).encode()) == text, "commas and brackets in strings are no values"
    assert (await turns_of(parse(json.dumps(text).encode())))[1] > 30
    numbers = list(range((1 << 20) - 8))
    assert await parse(json.dumps(numbers).encode()) == numbers
    with pytest.raises(InvalidArgument) as caught:
        await parse(b"[" + b"1," * (1 << 20) + b"1]")
    assert caught.value.reason == "REQUEST_TOO_LARGE"


def reader_of(max_body_bytes: int, max_bytes: int) -> BodyReader:
    config = Config(max_unread_bytes=2 * max_bytes)
    budgets = Budgets.of_server(config)
    return BodyReader(RequestReceiver(config, budgets), max_body_bytes, budgets)


async def test_the_bytes_of_all_bodies_are_limited_until_the_response() -> None:
    runtime = Waiting()
    async with serving(runtime, max_unread_bytes=80_000, max_request_bytes=20_000) as served:
        bodies = served.state.budgets.bodies
        connections = [await served.connect() for _ in range(4)]
        try:
            for index, (_, writer) in enumerate(connections):
                writer.write(raw_chat(user="x" * 12_000))
                await until(lambda index=index: runtime.running == min(index + 1, 3))  # type: ignore[misc]
            reader, _ = connections[3]
            answer = await asyncio.wait_for(reader.readuntil(b"}}"), TIMEOUT_S)
            assert answer.startswith(b"HTTP/1.1 429") and b"arriving_full" in answer
            assert b"retry-after" in answer and 36_000 < bodies.used <= 40_000
            runtime.may_continue.set()
            for reader, _ in connections[:3]:
                assert (await reader.readline()).startswith(b"HTTP/1.1 200")
            await until(lambda: bodies.used == 0)
        finally:
            for _, writer in connections:
                writer.close()


def refused_status(port: int, path: str, size_bytes: int) -> int:
    """The status that a client gets which sends all of its body before it reads."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=TIMEOUT_S)
    try:
        connection.request("POST", path, b" " * size_bytes, {"content-type": "application/json"})
        return connection.getresponse().status
    finally:
        connection.close()


async def test_the_settings_of_prompts_count_for_each_until_the_response() -> None:
    held_bytes = []

    async def generate(batch: Batch, sink: ChunkSink) -> None:
        held_bytes.append(bodies.used)
        end: Any = {"text": "yes", "finish_reason": runner_pb2.FINISH_REASON_STOP}
        sink.put([runner_pb2.SampleChunk(item_id=item.item_id, **end) for item in batch.items])

    settings: Any = {"model": "m", "prompt": ["a"] * 100, "extra_body": {"guided_regex": "a" * 500}}
    async with serving(FakeRuntime(generate), max_unread_bytes=400_000) as served, served.client() as client:
        bodies = served.state.budgets.bodies
        assert len((await client.completions.create(**settings)).choices) == 100
        assert held_bytes[0] > 99 * 500
        await until(lambda: bodies.used == 0)
        with bodies.held(180_000), pytest.raises(openai.RateLimitError, match="arriv"):
            await client.completions.create(**settings)
        await until(lambda: bodies.used == 0)
        # More than the limit, with the body: such a request is admitted if it is the only one.
        settings |= {"prompt": ["a"] * 300, "extra_body": {"guided_regex": "a" * 800}}
        assert len((await client.completions.create(**settings)).choices) == 300


async def test_who_is_refused_while_it_still_sends_gets_the_response() -> None:
    """Its connection is not reset, whose buffers take less than this."""
    async with serving(FakeRuntime(generate_yes), max_request_bytes=16 << 20) as served:
        for path, status in (("/v1/chat/completions", 413), ("/nothing", 404)):
            assert await asyncio.to_thread(refused_status, served.port, path, 32 << 20) == status
        await until(lambda: not served.front.server.connections)


async def test_of_a_body_without_end_only_so_much_is_read() -> None:
    """Whoever sends it: here one whose path does not exist."""
    async with serving(FakeRuntime(generate_yes), max_request_bytes=20_000, message_timeout_s=600) as served:
        _, writer = await served.connect()
        writer.write(b"POST /nothing HTTP/1.1\r\nhost: localhost\r\ncontent-length: 999999999999\r\n\r\n")
        sent_bytes = 0
        with contextlib.suppress(ConnectionError):
            while sent_bytes < 64 << 20:
                writer.write(b" " * (1 << 20))
                await asyncio.wait_for(writer.drain(), TIMEOUT_S)
                sent_bytes += 1 << 20
        writer.close()
        assert sent_bytes < 64 << 20, "the buffers of a connection take less"


async def test_who_is_refused_and_never_ends_its_body_does_not_delay_a_shutdown() -> None:
    async with serving(FakeRuntime(generate_yes), message_timeout_s=600) as served:
        reader, writer = await served.connect()
        writer.write(b"POST /nothing HTTP/1.1\r\nhost: localhost\r\ncontent-length: 9\r\n\r\n")
        assert (await asyncio.wait_for(reader.readuntil(b"}}"), TIMEOUT_S)).startswith(b"HTTP/1.1 404")
        async with asyncio.timeout(TIMEOUT_S):
            await served.front.stop(600)
            assert await reader.read() == b""
        writer.close()


@pytest.mark.parametrize("is_announced", [True, False])
async def test_a_body_that_is_too_large_is_refused_before_it_has_arrived(is_announced: bool) -> None:
    """Who never sends the rest of it has a connection like one without a request."""
    async with serving(FakeRuntime(generate_yes), max_request_bytes=20_000, message_timeout_s=1) as served:
        reader, writer = await served.connect()
        try:
            head, _, body = raw_chat(user="x" * 30_000).partition(b"\r\n\r\n")
            if is_announced:
                writer.write(head + b"\r\nexpect: 100-continue\r\n\r\n")
            else:
                head = head[: head.index(b"content-length")] + b"transfer-encoding: chunked"
                writer.write(head + b"\r\n\r\n%x\r\n%b\r\n" % (len(body), body))
            answer = await asyncio.wait_for(reader.readuntil(b"}}"), TIMEOUT_S)
            assert answer.startswith(b"HTTP/1.1 413") and b"connection: close" in answer
            (connection,) = served.front.server.connections
            assert not connection.has_running_request() and served.state.budgets.bodies.used == 0
            with contextlib.suppress(ConnectionResetError):
                assert await asyncio.wait_for(reader.read(), TIMEOUT_S) == b""
        finally:
            writer.close()
