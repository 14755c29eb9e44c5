"""What /v1/responses keeps: its bounds, and what a request costs that goes on from it."""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any

from service.budgets import Budget
from service.extensions.openai.responses_api import responses
from service.extensions.openai.stored_responses import KEPT_S, TENANT_SHARE, StoredResponses
from tests.service.extensions.openai.served_front import (
    TIMEOUT_S,
    FakeRuntime,
    Server,
    Waiting,
    generate_yes,
    raw_request,
    serving,
)
from tests.service.extensions.openai.test_requests import resolve
from tests.service.served import until


def test_what_is_kept_has_bounds() -> None:
    """Each finds its own only, for an hour. The least recently used give way, first a large tenant's."""
    now_s, rng, most = 0.0, random.Random(1), 200_000
    stored = StoredResponses(lambda: now_s, most)
    kept: dict[tuple[str, str], tuple[float, str]] = {}
    for number in range(2000):
        now_s += rng.choice([0, 5, 400])
        tenant, text = rng.choice(["", "a", "b"]), "x" * rng.randrange(15_000)
        own_id = f"r{rng.randrange(50)}"
        response = {"id": own_id, "output": [number], "text": text}
        stored.keep(tenant, ["before"], response)
        kept[tenant, own_id] = now_s, json.dumps(response)
        owner, response_id = rng.choice([*kept])
        found = stored.find(owner, response_id)
        if found is None:
            assert (owner, response_id) != (tenant, own_id)
        else:
            made_s, expected = kept[owner, response_id]
            assert found.response.decode() == expected and now_s < made_s + KEPT_S
            assert found.messages == b'["before"]'
        sizes = dict.fromkeys(("", "a", "b"), 0)
        for (owner, _), each in stored._stored.items():
            sizes[owner] += each.size_bytes
        assert max(sizes.values()) <= most // TENANT_SHARE and sum(sizes.values()) <= most
        assert stored._bytes == {owner: size for owner, size in sizes.items() if size}
        assert stored._all_bytes == sum(sizes.values())
    stored.keep("", [], {"id": "large", "output": [], "text": "x" * most})
    assert stored.find("", "large") is None


def test_only_what_is_read_is_kept() -> None:
    """Otherwise a short request could have the server parse any amount of what was never looked at."""
    stored = StoredResponses()
    unread: Any = [0] * 1000
    told = [
        {
            "role": "user",
            "content": [{"type": "input_text", "text": "Go.", "annotations": unread}],
            "id": unread,
        },
        {"type": "reasoning", "summary": unread, "encrypted_content": unread, "status": unread},
    ]
    request = responses({"model": "m", "input": told}, resolve, stored)
    said = {"type": "message", "role": "assistant", "content": "Sun.", "id": "msg_1"}
    request.keep({"id": "resp_1", "output": [said]})
    kept = stored.find("", "resp_1")
    assert kept is not None and json.loads(kept.messages) == [
        {"role": "user", "content": "Go."},
        {"role": "assistant", "reasoning_content": "", "content": "Sun."},
    ]


async def begin(served: Server, request: bytes, reads: int) -> Any:
    """A connection whose request is sent, and the first so many bytes of the answer read."""
    reader, writer = await served.connect()
    writer.write(request)
    await asyncio.wait_for(reader.readexactly(reads), TIMEOUT_S)
    return reader, writer


async def test_what_a_request_goes_on_from_counts_like_its_body() -> None:
    runtime = Waiting()
    runtime.may_continue.set()
    async with serving(runtime, max_unread_bytes=100_000, max_request_bytes=40_000) as served:
        bodies = served.state.budgets.bodies
        async with served.client() as client:
            first = await client.responses.create(model="m", input="x" * 12_000)
        await until(lambda: not bodies.used)
        runtime.may_continue.clear()
        asked = raw_request("/v1/responses", model="m", input="y", previous_response_id=first.id)
        connections = []
        for index in range(4):
            connections.append(await begin(served, asked, 0))
            await until(lambda index=index: runtime.running == index + 1)  # type: ignore[misc]
        assert 48_000 < bodies.used <= 50_000
        connections.append(await begin(served, asked, 0))
        answer = await asyncio.wait_for(connections[4][0].readuntil(b"}}"), TIMEOUT_S)
        assert answer.startswith(b"HTTP/1.1 429") and b"arriving_full" in answer
        runtime.may_continue.set()
        for reader, _ in connections[:4]:
            assert (await reader.readline()).startswith(b"HTTP/1.1 200")
        await until(lambda: not bodies.used)
        for _, writer in connections:
            writer.close()


async def test_a_single_request_goes_on_from_what_is_larger_than_the_budget() -> None:
    """As a single body always fits."""
    settings: Any = {"max_unread_bytes": 20_000, "max_request_bytes": 40_000}
    async with serving(FakeRuntime(generate_yes), **settings) as served, served.client() as client:
        first = await client.responses.create(model="m", input="x" * 12_000)
        asked: Any = {"model": "m", "input": "y", "previous_response_id": first.id}
        assert (await client.responses.create(**asked)).output_text == "yes"


async def test_one_that_is_not_read_counts_as_an_answer() -> None:
    """It may be deleted, and others kept in its place."""
    async with serving(FakeRuntime(generate_yes)) as served, served.client() as client:
        answers: Budget = served.state.budgets.answers
        size = 12 << 20  # more than the sockets take
        kept = await client.responses.create(model="m", input="Go.", instructions="x" * size)
        await until(lambda: not answers.used)
        _, writer = await begin(served, raw_request(f"/v1/responses/{kept.id}", "GET"), 12)
        await client.responses.delete(kept.id)
        await asyncio.sleep(0.1)
        assert answers.used > size
        writer.close()
        await until(lambda: not answers.used)
