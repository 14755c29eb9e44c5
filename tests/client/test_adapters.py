"""LoRA adapters by the clients, against a fake server: how they are sent, and which calls name one."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from quire import (
    AsyncClient,
    Client,
    PrefillItem,
    ResourceExhausted,
    ScoreItem,
    Unavailable,
    item,
)
from quire.v1 import admin_pb2

from tests.fake_executor import FakeExecutor, rich_status

PATIENCE_S = 20.0
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PART_BYTES = 1 << 18
# Two whole parts and a bit.
FILES = {CONFIG: b'{"r": 8}', WEIGHTS: bytes(range(256)) * (2 * PART_BYTES // 256) + b"end"}

Load = Callable[..., admin_pb2.Adapter]


@pytest.fixture(params=["blocking", "asyncio"])
def load(request: pytest.FixtureRequest, target: str) -> Load:
    """`load_adapter` of a client of each kind."""

    def blocking(*arguments: Any, **settings: Any) -> admin_pb2.Adapter:
        with Client(target, timeout_s=PATIENCE_S) as client:
            return client.load_adapter(*arguments, **settings)

    async def with_await(*arguments: Any, **settings: Any) -> admin_pb2.Adapter:
        async with AsyncClient(target, timeout_s=PATIENCE_S) as client:
            return await client.load_adapter(*arguments, **settings)

    if request.param == "blocking":
        return blocking
    return lambda *arguments, **settings: asyncio.run(with_await(*arguments, **settings))


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    for name, content in FILES.items():
        (tmp_path / name).write_bytes(content)
    return tmp_path


def received(executor: FakeExecutor) -> dict[str, bytes]:
    """The uploaded files. Fails unless the parts of a file follow each other."""
    by_name = [
        (name, b"".join(part.data for part in parts))
        for name, parts in itertools.groupby(executor.uploaded, lambda part: part.name)
    ]
    assert len(dict(by_name)) == len(by_name)
    return dict(by_name)


def test_an_adapter_of_the_server_or_the_hub(load: Load, executor: FakeExecutor) -> None:
    made = load("sql", "org/name", pinned=True, shared=True)
    assert (made.adapter_id, made.version, made.rank) == ("sql", 1, 8)
    (request,) = executor.calls["LoadAdapter"]
    assert request == admin_pb2.LoadAdapterRequest(
        adapter_id="sql", source="org/name", pinned=True, shared=True
    )
    load("sql", "/models/sql")
    assert executor.calls["LoadAdapter"][1] == admin_pb2.LoadAdapterRequest(
        adapter_id="sql", source="/models/sql"
    )
    assert executor.uploaded == []


def test_files_are_sent_in_parts(load: Load, executor: FakeExecutor, directory: Path) -> None:
    load("sql", files=directory)
    assert received(executor) == FILES
    assert max(len(part.data) for part in executor.uploaded) == PART_BYTES
    executor.uploaded.clear()
    load("sql", files=FILES)
    assert received(executor) == FILES
    first, second = executor.calls["LoadAdapter"]
    assert first == second == admin_pb2.LoadAdapterRequest(adapter_id="sql")


def test_parts_fit_into_small_requests(target: str, executor: FakeExecutor) -> None:
    with Client(target, timeout_s=PATIENCE_S, max_request_bytes=PART_BYTES) as client:
        client.load_adapter("sql", files={CONFIG: b"", WEIGHTS: FILES[WEIGHTS]})
    assert received(executor) == {CONFIG: b"", WEIGHTS: FILES[WEIGHTS]}, "an empty file is one, too"


def test_an_adapter_comes_from_one_place(load: Load, executor: FakeExecutor) -> None:
    for arguments in ({}, {"source": "org/name", "files": FILES}):
        with pytest.raises(ValueError, match="either a source or files"):
            load("sql", **arguments)
    assert executor.calls["LoadAdapter"] == []


def test_a_missing_file_is_missed_before_the_call(
    load: Load, executor: FakeExecutor, directory: Path
) -> None:
    (directory / WEIGHTS).unlink()
    with pytest.raises(FileNotFoundError, match=WEIGHTS):
        load("sql", files=directory)
    assert executor.calls["LoadAdapter"] == []


def test_a_file_that_cannot_be_read_to_its_end(load: Load, directory: Path) -> None:
    (directory / WEIGHTS).unlink()
    # It can be opened, and nothing is at its beginning.
    (directory / WEIGHTS).symlink_to("/proc/self/mem")
    with pytest.raises(OSError, match=f"Input/output error: '{directory}"):
        load("sql", files=directory)


def test_a_refusal_while_files_are_sent_says_why(load: Load, executor: FakeExecutor) -> None:
    full = rich_status(grpc.StatusCode.RESOURCE_EXHAUSTED, "ADAPTER_LIMIT", "the server has 9 adapters")
    executor.fail("LoadAdapter", full)
    with pytest.raises(ResourceExhausted, match="ADAPTER_LIMIT"):
        load("sql", files={CONFIG: b"{}", WEIGHTS: bytes(20 * PART_BYTES)})
    assert executor.adapters == {}


class ReplacedStatus:
    """A call that the server ends with UNAVAILABLE, where grpcio replaces that, as it sometimes does."""

    async def code(self) -> grpc.StatusCode:
        return grpc.StatusCode.UNAVAILABLE

    async def details(self) -> str:
        return "the server is shutting down"

    async def trailing_metadata(self) -> grpc.aio.Metadata:
        return grpc.aio.Metadata()

    def add_done_callback(self, callback: Callable[[object], None]) -> None:
        self._callback = callback

    def __await__(self) -> Iterator[None]:
        yield
        self._callback(self)
        nothing = grpc.aio.Metadata()
        raise grpc.aio.AioRpcError(grpc.StatusCode.INTERNAL, nothing, nothing, "Internal error from Core")


async def test_the_servers_status_is_told_although_grpc_replaces_it(
    target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with AsyncClient(target, timeout_s=PATIENCE_S) as client:
        monkeypatch.setattr(client.admin_stub, "LoadAdapter", lambda *_, **__: ReplacedStatus())
        with pytest.raises(Unavailable, match="the server is shutting down"):
            await client.load_adapter("sql", files=FILES)


def test_a_load_is_never_repeated(load: Load, executor: FakeExecutor) -> None:
    lost = rich_status(grpc.StatusCode.UNAVAILABLE, "", "the connection was lost")
    executor.fail("LoadAdapter", lost, applied=True)
    with pytest.raises(Unavailable):
        load("sql", "org/name")
    assert len(executor.calls["LoadAdapter"]) == 1


def test_adapters_are_listed_and_unloaded(target: str, executor: FakeExecutor) -> None:
    with Client(target, timeout_s=PATIENCE_S) as client:
        made = [client.load_adapter(name, "org/name") for name in ("a", "b")]
        assert client.list_adapters() == made
        assert client.unload_adapter("a", shared=True) is True
        assert executor.calls["UnloadAdapter"][0].shared
        assert client.unload_adapter("a") is False
        assert client.list_adapters() == made[1:]


def test_calls_name_an_adapter(target: str, executor: FakeExecutor) -> None:
    with Client(target, timeout_s=PATIENCE_S) as client:
        client.prefill([1], adapter_id="sql")
        client.batch_prefill([PrefillItem([1], adapter_id="sql"), [2]])
        client.forward([1, 2], adapter_id="sql")
        client.score([1, 2], adapter_id="sql")
        client.score_batch([ScoreItem([1, 2], adapter_id="sql"), [1, 2]])
        list(client.execute([1], max_tokens=1, adapter_id="sql"))
        list(client.execute([item([1], max_tokens=1, adapter_id="sql")]))
    assert [request.adapter_id for request in executor.calls["Prefill"]] == ["sql"]
    (batch,) = executor.calls["BatchPrefill"]
    assert [one.adapter_id for one in batch.items] == ["sql", ""]
    assert [request.adapter_id for request in executor.calls["Forward"]] == ["sql", "sql"]
    (batch,) = executor.calls["BatchForward"]
    assert [one.adapter_id for one in batch.items] == ["sql", ""]
    assert [[one.adapter_id for one in request.items] for request in executor.calls["Execute"]] == [
        ["sql"]
    ] * 2
