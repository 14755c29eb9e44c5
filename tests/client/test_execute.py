"""Whole texts through the Python client."""

from __future__ import annotations

import asyncio
import datetime as dt
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import grpc
import pytest
import quire
from quire.v1 import runner_pb2, types_pb2

from tests.forks import for_others
from tests.gateway_process import GatewayProcess
from tests.model_factory import TinyModel, make_model
from tests.soak.server import Server


@pytest.fixture
def gateway(shipped_gateway: GatewayProcess) -> GatewayProcess:
    return shipped_gateway


def text_of(chunks: list[quire.Chunk]) -> str:
    return "".join(chunk.text for chunk in chunks)


def test_items(gateway: GatewayProcess) -> None:
    items = [quire.item(f"{n}+{n}=", item_id=str(n), max_tokens=8) for n in range(5)]
    with quire.Client(gateway.address) as client:
        chunks = list(client.execute(items))
        assert {n: text_of([c for c in chunks if c.item_id == n]) for n in "01234"} == {
            str(n): str(2 * n) for n in range(5)
        }
        with pytest.raises(TypeError):
            client.execute(items, max_tokens=1)
        with pytest.raises(quire.InvalidRequest) as raised:
            list(client.execute(items[:1] * 2))
        assert raised.value.reason == "DUPLICATE_ITEM_ID"


def test_a_failed_sample_is_raised_or_ends_alone(gateway: GatewayProcess) -> None:
    items = [quire.item("1+1=", item_id="good"), quire.item("1+1=", item_id="bad", stop=["x"] * 99)]
    with quire.Client(gateway.address) as client:
        with pytest.raises(quire.QuireError) as raised:
            client.execute(items).texts()
        ended = {c.item_id: c for c in client.execute(items, raise_on_error=False) if c.finish_reason}
    assert ended["good"].finish_reason == "stop" and ended["good"].error is None
    assert ended["good"].usage is not None and ended["good"].usage.output_tokens
    assert ended["bad"].error is not None and ended["bad"].error.reason == raised.value.reason
    gateway.wait_until(lambda: gateway.status().caches == 0)


def test_settings_are_those_of_the_api() -> None:
    named = set(quire.TextSettings.__annotations__) | {"item_id", "max_cost_usd"}
    named |= {"tokens", "text", "chat", "cache"}
    sampling = set(types_pb2.SamplingParams.DESCRIPTOR.fields_by_name)
    # These are fields of its chat, and of `answer_parts`.
    named -= {"tools", "tool_choice", "parallel_tool_calls", "template_variables"}
    assert named - sampling == set(runner_pb2.ExecuteItem.DESCRIPTOR.fields_by_name)
    assert named >= sampling
    both = quire.item("x", sampling={"temperature": 1.0, "seed": 3}, temperature=0.5, logit_bias={4: 2.0})
    assert (both.sampling.temperature, both.sampling.seed) == (0.5, 3)
    assert dict(both.sampling.logit_bias) == {4: 2.0}
    assert not quire.item("x", temperature=None, max_tokens=None).HasField("sampling")
    asks_nothing = quire.item("x", tools=None, tool_choice=None, parallel_tool_calls=True, answer_parts=False)
    assert asks_nothing == quire.item("x"), "its text is divided"


def test_several_prompts_are_items_by_their_numbers(gateway: GatewayProcess) -> None:
    with quire.Client(gateway.address) as client:
        for prompts in (["1+1=", "2+2="], [[1, 10, 1, 11], [2, 10, 2, 11]]):
            chunks = list(client.execute(prompts, max_tokens=8))
            texts = {n: text_of([c for c in chunks if c.item_id == n]) for n in "01"}
            assert texts == {"0": "2", "1": "4"}


def test_what_a_batch_may_cost_and_who_takes_it(gateway: GatewayProcess) -> None:
    with quire.Client(gateway.address) as client:
        execution = client.execute("1+1=", max_tokens=2, policy="cheapest", max_cost_usd=0.5)
        assert execution.texts() == ["2"]
        with pytest.raises(ValueError, match="policy is one of order, local_first, cheapest"):
            client.execute("1+1=", policy="dearest")  # type: ignore[arg-type]
        with pytest.raises(quire.InvalidRequest) as raised:
            list(client.execute("1+1=", max_cost_usd=-1))
        assert raised.value.reason == "BAD_MAX_COST"


def test_seconds_and_schemas_are_taken_as_they_are(gateway: GatewayProcess) -> None:
    with quire.Client(gateway.address) as client:
        schema = {"type": "integer"}
        chunks = client.execute("1+1=", max_tokens=8, timeout=60.5, constraint={"json_schema": schema})
        assert text_of(list(chunks)) == "2"
    made = quire.item("x", speculation="prompt_lookup")
    assert made == quire.item("x", speculation={"method": "prompt_lookup"})
    assert made.speculation.method == runner_pb2.SPECULATION_METHOD_PROMPT_LOOKUP
    made = quire.item("x", timeout=dt.timedelta(seconds=2), constraint={"json_schema": '{"type": "null"}'})
    assert made.timeout.seconds == 2 and made.constraint.json_schema == '{"type": "null"}'


CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}


def test_messages_are_carried_over_whole() -> None:
    answer: dict[str, Any] = {"role": "assistant", "content": None, "tool_calls": [CALL]}
    result = {"role": "tool", "content": "2", "tool_call_id": "c1"}
    first, second = quire.item([answer, result]).chat.messages
    assert (first.tool_calls[0].name, first.tool_calls[0].arguments_json) == ("add", '{"a": 1}')
    assert first.tool_calls[0].id == second.tool_call_id == "c1"


@pytest.mark.parametrize(
    ("prompt", "settings", "says"),
    [
        ([{"role": "boss", "content": "x"}], {}, "system, user, assistant, tool"),
        ([{"role": "developer", "content": "x"}], {}, "system, user, assistant, tool"),
        ([{"role": "user"}], {}, "content"),
        ([{"content": "x"}], {}, "role"),
        ([{"role": "user", "content": "x", "nickname": "Ann"}], {}, "not nickname"),
        ([{"role": "assistant", "content": "", "tool_calls": [{"name": "add"}]}], {}, "function"),
        ({"role": "user", "content": "x"}, {}, "put the message into one"),
        ([1, "x"], {}, "token ids"),
        ("x", {"timeout": "soon"}, "timeout"),
        ("x", {"constraint": {"regex": 5}}, "constraint"),
        ("x", {"max_tokens": "many"}, "max_tokens"),
        ("x", {"max_token": 5}, "max_tokens"),
        ("x", {"text": "y"}, "no setting text"),
    ],
)
def test_what_can_be_no_item_is_said(prompt: Any, settings: dict[str, Any], says: str) -> None:
    with pytest.raises((TypeError, ValueError), match=says):
        quire.item(prompt, **settings)
    with quire.Client() as client, pytest.raises((TypeError, ValueError), match=says):
        client.execute(prompt, **settings)


@pytest.mark.parametrize(
    ("prompt", "settings"),
    [
        ("x", {"n": 2}),
        (["x", "y"], {}),
        ([[1], [2]], {}),
        ([quire.item("x"), quire.item("y", item_id="1")], {}),
        ([quire.item("x", n=2)], {}),
    ],
    ids=["samples", "texts", "tokens", "items", "samples of an item"],
)
def test_a_generation_is_one_text(prompt: Any, settings: dict[str, Any]) -> None:
    """It was all texts, one behind the other."""
    with quire.Client() as client, pytest.raises(TypeError, match=r"execute\(\.\.\.\)\.texts\(\)"):
        client.generate(prompt, **settings)


class Breaking:
    """A server's stream that breaks off before the first chunk, each time."""

    def __init__(
        self,
        *,
        after_s: float = 0.0,
        is_accepted: bool = False,
        code: grpc.StatusCode = grpc.StatusCode.UNAVAILABLE,
    ) -> None:
        self.begun = 0
        self.timeouts: list[float | None] = []
        self.has_broken = threading.Event()
        self.after_s = after_s
        self.is_accepted = is_accepted
        self.code = code

    def __call__(self, _request: runner_pb2.ExecuteRequest, *, timeout: float | None = None) -> Self:
        self.begun += 1
        self.timeouts.append(timeout)
        return self

    def __iter__(self) -> Iterator[runner_pb2.ExecuteResponse]:
        time.sleep(self.after_s)
        self.has_broken.set()
        if self.is_accepted:
            yield runner_pb2.ExecuteResponse(started=runner_pb2.ExecutionStarted(request_id="r"))
        raise grpc.aio.AioRpcError(self.code, grpc.aio.Metadata(), grpc.aio.Metadata())

    def cancel(self) -> None:
        pass


def kept(breaking: Breaking, keep_s: float, cancelled: list[str], **settings: Any) -> quire.Execution:
    request = runner_pb2.ExecuteRequest(items=[quire.item("x")], request_id="r")
    request.keep.FromNanoseconds(int(keep_s * 1e9))

    def cancel(request_id: str) -> bool:
        cancelled.append(request_id)
        return True

    return quire.Execution(breaking, request, cancel, **settings)


def test_what_is_cancelled_while_it_pauses_is_not_begun_anew() -> None:
    breaking = Breaking()
    cancelled: list[str] = []
    execution = kept(breaking, 60, cancelled)
    ended: list[quire.QuireError] = []

    def read() -> None:
        try:
            list(execution)
        except quire.QuireError as error:
            ended.append(error)

    reader = threading.Thread(target=read)
    reader.start()
    breaking.has_broken.wait(30)
    execution.cancel()
    begun = breaking.begun
    reader.join(30)
    assert len(ended) == 1 and cancelled == ["r"] and breaking.begun == begun


def test_a_long_silence_before_the_first_break_is_none_of_the_time_it_may_be_broken() -> None:
    breaking = Breaking(after_s=0.3)
    execution = kept(breaking, 0.25, [])
    with pytest.raises(quire.Unavailable):
        list(execution)
    assert breaking.begun > 1


@pytest.mark.parametrize("name", ["CANCELLED", "INTERNAL", "UNKNOWN", "RESOURCE_EXHAUSTED", "UNIMPLEMENTED"])
def test_a_stream_that_a_proxy_breaks_off_goes_on(name: str) -> None:
    """By an RST_STREAM of HTTP/2, or an end without a status; not one at a server without Execute."""
    breaking = Breaking(code=grpc.StatusCode[name])
    with pytest.raises(quire.QuireError):
        list(kept(breaking, 0.25, []))
    assert (breaking.begun > 1) == (name not in ("RESOURCE_EXHAUSTED", "UNIMPLEMENTED"))


async def test_a_client_that_is_closed_while_a_stream_is_broken_says_so() -> None:
    """Before, it was an error of gRPC."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        target = f"127.0.0.1:{silent.getsockname()[1]}"
    asynchronous = quire.AsyncClient(target)
    execution = asynchronous.execute([1], keep_s=60)
    reading = asyncio.create_task(execution.texts())
    await asyncio.sleep(0.2)
    await asynchronous.close()
    with pytest.raises(quire.Cancelled):
        await reading
    blocking = quire.Client(target)
    texts = blocking.execute([1], keep_s=60).texts
    waiting = asyncio.create_task(asyncio.to_thread(texts))
    await asyncio.sleep(0.2)
    blocking.close()
    with pytest.raises(quire.Cancelled):
        await waiting


def test_what_breaks_off_before_the_first_chunk_each_time_is_given_up() -> None:
    execution = kept(Breaking(is_accepted=True), 0.25, [])
    with pytest.raises(quire.Unavailable):
        list(execution)
    assert execution.started is not None and execution.started.request_id == "r"


def test_without_retries_it_does_not_resume() -> None:
    breaking = Breaking()
    with pytest.raises(quire.Unavailable):
        list(kept(breaking, 60, [], retries=False))
    assert breaking.begun == 1


def test_all_that_resume_have_one_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before, each began it anew."""
    now_s = 100.0

    class TimedBreaking(Breaking):
        def __iter__(self) -> Iterator[runner_pb2.ExecuteResponse]:
            nonlocal now_s
            now_s += 4
            yield from super().__iter__()

    monkeypatch.setattr("quire.executions.time.monotonic", lambda: now_s)
    breaking = TimedBreaking()
    with pytest.raises(quire.Unavailable):
        list(kept(breaking, 60, [], timeout_s=10))
    assert breaking.timeouts == [10, 6, 2]


async def test_with_await(gateway: GatewayProcess) -> None:
    async with quire.AsyncClient(gateway.address) as client:
        async with client.execute([1, 10, 2, 11], max_tokens=8) as execution:
            assert [chunk.token_ids[0] async for chunk in execution] == [3, 12]
        messages = [{"role": "user", "content": "1+1"}]
        (chunk,) = [chunk async for chunk in client.execute(messages, raise_on_error=False)]
        assert chunk.finish_reason == "error" and isinstance(chunk.error, quire.QuireError)
        with pytest.raises(type(chunk.error)) as raised:
            await client.generate(messages)
        assert raised.value.reason == chunk.error.reason
        assert await client.generate("12+30=", temperature=0.5, top_k=1) == "42"
        assert await client.execute(["1+1=", "2+2="], n=2).texts() == ["2", "2", "4", "4"]


def test_what_is_kept_ends_when_it_is_cancelled(gateway: GatewayProcess) -> None:
    with quire.Client(gateway.address) as client:
        with client.execute("12+30=", max_tokens=1, keep_s=60) as left:
            list(left)
        cancelled = client.execute("12+30=", max_tokens=1, keep_s=60)
        list(cancelled)
        cancelled.cancel()
        assert client.cancel_execution(left.request_id) and not client.cancel_execution(left.request_id)
    gateway.wait_until(lambda: gateway.status().caches == 0)


def test_what_is_kept_ends_when_it_is_cancelled_at_once(gateway: GatewayProcess) -> None:
    with quire.Client(gateway.address) as client:
        begun = [client.execute("12+30=", n=4, ignore_eos=True, keep_s=60) for _ in range(20)]
        for execution in begun:
            execution.cancel()
        for _ in range(20):
            execution = client.execute("12+30=", n=4, ignore_eos=True, keep_s=60)
            execution.cancel()
            begun.append(execution)
        assert not any(client.cancel_execution(execution.request_id) for execution in begun)
    gateway.wait_until(lambda: gateway.status().caches == 0)


def test_it_goes_on_by_itself_when_the_server_is_killed_and_starts_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in for_others().items():
        monkeypatch.setenv(name, value)
    model = make_model(tmp_path / "model", TinyModel())
    server = Server(model, tmp_path, workers=1, flags=[], seed=0)
    server.start()
    try:
        with quire.Client(server.address) as client:
            asked: dict[str, Any] = {"max_tokens": 200, "ignore_eos": True, "tokens_only": True}
            whole: list[int] = []
            while not whole:
                try:
                    whole = [
                        token for chunk in client.execute([1, 2, 3], **asked) for token in chunk.token_ids
                    ]
                except quire.Unavailable:
                    time.sleep(0.1)
            found: list[int] = []
            for chunk in client.execute([1, 2, 3], keep_s=60, **asked):
                found += chunk.token_ids
                if len(found) == 20:
                    server.worker_pids()
                    server.kill(server.pid, signal.SIGKILL)
                    while not server.has_ended:
                        time.sleep(0.01)
                    server.start()
            assert found == whole
    finally:
        server.stop()
