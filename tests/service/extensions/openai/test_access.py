"""Who may use which route, however its path is written."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx2
import pytest

from service.auth.tokens import Role, new_token
from tests.chat_templates import byte_tokenizer
from tests.service.extensions.openai.served_front import (
    QUESTION,
    TIMEOUT_S,
    FakeRuntime,
    generate_yes,
    serving,
)

READ = ("/is_paused", "/get_world_size", "/weight_info")
OPERATORS = (
    *READ, "/pause", "/resume", "/update_weights", "/init_weight_transfer_engine", "/init_broadcaster",
    "/shutdown_weight_transfer_engine", "/start_weight_update", "/finish_weight_update",
    "/load_lora_adapter", "/v1/load_lora_adapter", "/v1/unload_lora_adapter",
)  # fmt: skip
METHODS = ("GET", "POST", "HEAD", "OPTIONS", "PUT")
BEHIND = (
    "", "?a=1", "#", "/", "//", "/.", "/..", "/../", ";", ";a", ".", "%0A", "%0a%0a", "%0D", "%0D%0A", "%00",
    "%20", "%09", "%0B", "%85", "%C2%85", "%E2%80%A8", "%2F", "%3F", "%23", "%FF", "%", "%0", "%250A", "\\",
)  # fmt: skip
BEFORE = (
    "", "/", "//", "/.", "/..", "/v1", "/v1/..", "/v1/models/..", "/v1/models/", "/health/..", "/page.css/..",
    "/health%0A", "/%2e%2e", "/%0A", "%2F", "/api", "http://localhost", "https://other.example:1", "HTTP://[::1]",
)  # fmt: skip


def spellings(path: str, *, is_thorough: bool) -> Iterator[str]:
    """Targets of requests that some server could take for a path: of one path all, of others some.

    All of what may stand around one that is itself escaped: with `is_thorough`.
    """
    yield from (path, f"{path}%0A", f"http://localhost{path}?a=1")
    if path != "/pause":
        return
    escaped = f"/%{ord(path[1]):02X}{path[2:]}", "/" + "".join(f"%{byte:02x}" for byte in path[1:].encode())
    yield from (*escaped, f"{escaped[0]}%0A", f"/v1/..{escaped[0]}", f"http://localhost{escaped[0]}?a=1")
    for each in (path, *escaped) if is_thorough else (path,):
        yield from (each + behind for behind in BEHIND)
        yield from (before + each for before in BEFORE)
        yield from (before + each + behind for before in BEFORE[-3:] for behind in ("%0A", "?a=1"))
    yield from (path.upper(), path.title(), path.replace("_", "%5F"), path.replace("/", "%2F"), path[1:])
    yield from (path.replace("/", "//"), path.replace("/", "\\"), "*", f"/?{path}", f"/health?{path}")


async def statuses(port: int, target: str, tokens: list[str]) -> list[tuple[str, list[int]]]:
    """For each method the status that the owner of each token gets. Pipelined."""
    heads = [
        f"{method} {target} HTTP/1.1\r\nhost: localhost\r\ncontent-length: 0\r\n"
        + (f"authorization: Bearer {token}\r\n" if token else "")
        for method in METHODS
        for token in tokens
    ]
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(("\r\n".join(heads) + "connection: close\r\n\r\n").encode())
        found = [int(part[:3]) for part in (await reader.read()).split(b"HTTP/1.1 ")[1:]]
    finally:
        writer.close()
    if found == [400]:
        # No target of HTTP.
        return []
    assert len(found) == len(heads), target
    count = len(tokens)
    return [(method, found[at * count :][:count]) for at, method in enumerate(METHODS)]


async def test_however_a_path_is_spelled_only_operators_reach_their_calls(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    is_thorough = request.config.getoption("--thorough")
    roles = Role.ADMINISTER, Role.CALL, Role.OBSERVE
    made = [new_token(role.value, [role]) for role in roles]
    (tmp_path / "tokens").write_text("\n".join(["[tokens]", *(line for _, line in made)]))
    tokens = [*(token for token, _ in made), ""]
    file, admin = str(tmp_path / "tokens"), SimpleNamespace()
    async with serving(
        FakeRuntime(generate_yes), admin=admin, tokens=file, openai_weight_transfer="nccl"
    ) as served:
        for path in OPERATORS:
            reached = set()
            for target in spellings(path, is_thorough=is_thorough):
                for method, (operator, *others, nobody) in await statuses(served.port, target, tokens):
                    # Of a page, a probe, or a list for others operators are told 200 or 403.
                    is_public = nobody == 200
                    if operator in (200, 400) and not is_public:
                        reached.add((method, target))
                        assert (others, nobody) == ([403, 403], 401), (method, target)
            own = "GET" if path in READ else "POST"
            assert {(own, path), (own, f"{path}%0A"), (own, f"http://localhost{path}?a=1")} <= reached
            assert {method for method, _ in reached} == ({"GET", "HEAD"} if own == "GET" else {"POST"})


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/tokenize", {"prompt": "a"}, 200),
        ("/detokenize", {"tokens": [65]}, 200),
        # What cannot be prepared has counted, too.
        ("/v1/messages/count_tokens", {"model": "local", "messages": QUESTION}, 400),
        ("/v1/chat/completions", {"model": "local", "messages": QUESTION, "return_token_ids": True}, 400),
        ("/v1/embeddings", {"model": "local", "input": ""}, 400),
    ],
)
async def test_text_becomes_tokens_within_the_quota(
    tmp_path: Path, path: str, body: dict[str, Any], status: int
) -> None:
    token, line = new_token("alice", [Role.CALL])
    (tmp_path / "tokens").write_text(
        f"[tokens]\n{line}\n[tenants.alice]\nmax_per_s = 0.001\nmax_in_flight = 1\n"
    )
    texts, file = {"tokenizer_json": byte_tokenizer().to_str().encode()}, str(tmp_path / "tokens")
    async with serving(FakeRuntime(generate_yes, "local"), texts=texts, tokens=file) as served:
        url = f"http://127.0.0.1:{served.port}"
        async with httpx2.AsyncClient(headers={"authorization": f"Bearer {token}"}) as client:
            found = [await client.post(url + path, json=body, timeout=TIMEOUT_S) for _ in range(2)]
    assert [answer.status_code for answer in found] == [status, 429]
    assert "max_per_s" in found[1].json()["error"]["message"]


@pytest.mark.parametrize("more", [{"prompt": ["a"] * 6}, {"prompt": ["a"] * 2, "n": 3}, {"n": 4}])
@pytest.mark.parametrize("stream", [False, True])
async def test_what_exceeds_the_rate_is_not_begun(tmp_path: Path, more: dict[str, Any], stream: bool) -> None:
    """Before, one sample ended the response, when the others had been computed; and it was to be retried.

    The prompt of several samples is a request, and so are the copies of it.
    """
    token, line = new_token("alice", [Role.CALL])
    (tmp_path / "tokens").write_text(f"[tokens]\n{line}\n[tenants.alice]\nmax_per_s = 5\n")
    texts, file = {"tokenizer_json": byte_tokenizer().to_str().encode()}, str(tmp_path / "tokens")
    body = {"model": "local", "max_tokens": 1, "stream": stream, "prompt": "aa", **more}
    async with serving(FakeRuntime(generate_yes, "local"), texts=texts, tokens=file) as served:
        url = f"http://127.0.0.1:{served.port}/v1/completions"
        async with httpx2.AsyncClient(headers={"authorization": f"Bearer {token}"}) as client:
            refused = await client.post(url, json=body, timeout=TIMEOUT_S)
            small = await client.post(url, json={**body, "prompt": "a", "n": 1}, timeout=TIMEOUT_S)
    assert refused.status_code == 429 and "max_per_s" in refused.json()["error"]["message"]
    assert refused.headers["x-should-retry"] == "false"
    assert small.status_code == 200


async def test_only_who_may_call_learns_which_paths_there_are(tmp_path: Path) -> None:
    token, line = new_token("alice", [Role.CALL])
    (tmp_path / "tokens").write_text(f"[tokens]\n{line}\n")
    async with serving(FakeRuntime(generate_yes), tokens=str(tmp_path / "tokens")) as served:
        for target in ("/nothing", "/v1/chat/completions/", "//", "/pause", "/%00", "/Health"):
            for _, found in await statuses(served.port, target, [token, ""]):
                assert found == [404, 401]
        for method, found in await statuses(served.port, "/v1/chat/completions", [token, ""]):
            assert found == [415 if method == "POST" else 405, 401]
        for method, found in await statuses(served.port, "/health", [token, ""]):
            assert found == [200 if method in ("GET", "HEAD") else 405] * 2
