"""The HTTP server over a runtime that tests control: errors, models, shutdown, limits."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

import openai
import pytest
from quire.v1 import runner_pb2, types_pb2

from service.api.status import to_status
from service.config import Config
from service.errors import InvalidArgument, ProviderFailure, QuireError, RuntimeNotFound, SequenceTooLong
from service.extensions.openai.errors import of_prompt
from service.extensions.openai.models import Models
from service.runtimes.base import Batch, ChunkSink
from service.runtimes.router import Router
from service.text import tasks
from tests.chat_templates import byte_tokenizer
from tests.service.extensions.openai.served_front import (
    QUESTION,
    FakeRuntime,
    Waiting,
    chunk,
    generate_yes,
    raw_chat,
    raw_request,
    serving,
)
from tests.service.served import state_of, until


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
