"""The loader of adapters without a server: what it keeps for the next gateway, and what it leaves behind."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from quire.v1 import admin_pb2

from service.adapters.loader import AdapterLoader
from service.adapters.registry import Adapters
from service.adapters.store import FILES, AdapterStore
from service.config import Config
from service.errors import InvalidArgument

MAX_BYTES = 1 << 20


class Server:
    """A gateway's adapters, with no workers and no caches."""

    def __init__(self, data_dir: Path, **settings: Any) -> None:
        self.adapters = Adapters(10)
        data_dir.mkdir(exist_ok=True)
        pool = SimpleNamespace(send_adapters=lambda _: None)
        caches = SimpleNamespace(adapters_in_use=Counter)
        self.store = AdapterStore(data_dir, MAX_BYTES)
        self.loader = AdapterLoader(
            self.adapters, self.store, cast(Any, pool), cast(Any, caches), Config(**settings)
        )


def write_files(directory: Path) -> Path:
    directory.mkdir(parents=True)
    for name in FILES:
        (directory / name).write_bytes(b"content")
    return directory


def numbers_of(server: Server) -> dict[str, int]:
    return {version.adapter_id: version.number for version in server.adapters if not version.retired}


async def requests(*messages: admin_pb2.LoadAdapterRequest) -> AsyncIterator[admin_pb2.LoadAdapterRequest]:
    for message in messages:
        yield message


async def test_the_next_gateway_knows_the_operators_adapters_by_the_same_numbers(tmp_path: Path) -> None:
    """Caches, and workers that outlive the gateway, have these numbers."""
    directory = tmp_path / "adapters"
    for name in ("one", "two"):
        write_files(directory / name)
    numbers = numbers_of(Server(tmp_path / "data", adapters=str(directory)))
    (directory / "one" / FILES[0]).write_bytes(b"other content")
    later = numbers_of(Server(tmp_path / "data", adapters=str(directory)))
    assert later["two"] == numbers["two"]
    assert later["one"] > max(numbers.values()), "another version has a number of its own"


async def test_a_file_without_a_name_is_refused(tmp_path: Path) -> None:
    message = admin_pb2.LoadAdapterRequest(adapter_id="a", file=admin_pb2.AdapterFile(data=b"x"))
    with pytest.raises(InvalidArgument, match=r"adapter_config\.json"):
        await Server(tmp_path).loader.load(requests(message), "")


async def test_a_load_that_is_cancelled_while_it_copies_leaves_no_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, server = write_files(tmp_path / "source"), Server(tmp_path)
    begun, may_go_on, copy = threading.Event(), threading.Event(), server.store.copy

    def copy_later(path: Path, number: int) -> None:
        begun.set()
        may_go_on.wait()
        copy(path, number)

    monkeypatch.setattr(server.store, "copy", copy_later)
    message = admin_pb2.LoadAdapterRequest(adapter_id="a", source=str(source))
    load = asyncio.create_task(server.loader.load(requests(message), ""))
    await asyncio.to_thread(begun.wait)
    load.cancel()
    # The cancellation takes effect, as far as it does before the copy ends.
    for _ in range(10):
        await asyncio.sleep(0)
    may_go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await load
    await asyncio.get_running_loop().shutdown_default_executor()
    assert not list((tmp_path / "adapters").glob("*"))
