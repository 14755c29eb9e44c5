"""Adapters without a server: what the loader keeps and leaves behind, and what operators are told."""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import threading
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from quire.v1 import admin_pb2, types_pb2

from service import uploads
from service.adapters import loader, store
from service.adapters.loader import AdapterLoader
from service.adapters.registry import Adapters, AdapterVersion
from service.adapters.store import AdapterStore, identity
from service.admin import AdminApi
from service.config import Config
from service.errors import AdapterLimit, AdapterNotFound, InvalidArgument, MessageTimeout, StorageUnavailable
from service.journal.values import StoredValues
from service.uploads import RESERVE_BYTES, UploadedFile
from tests.service.served import state_of
from tests.sim.harness import FailingJournal
from workers.adapters.adapter import identity as worker_identity
from workers.common import worker_pb2
from workers.common.adapter_files import FILES, content_digest

MAX_BYTES = 1 << 20


class Server:
    """A gateway's adapters, with a worker that loads anything, and caches of adapters.

    `contents`: by the numbers of adapters that caches have, the digests of their files.
    """

    def __init__(
        self,
        data_dir: Path | None,
        values: StoredValues | None = None,
        contents: Mapping[int, int | str] | None = None,
        **settings: Any,
    ) -> None:
        self.adapters = Adapters(10)
        self.values = StoredValues() if values is None else values
        if data_dir is not None:
            data_dir.mkdir(exist_ok=True)
        # What workers were told of: the digests of numbers.
        self.told: dict[int, str] = {}
        known = {} if contents is None else contents
        pool = SimpleNamespace(send_adapters=self._tell, load_adapter=self._load)
        caches = SimpleNamespace(adapters_in_use=lambda: Counter([*known]), adapter_contents=lambda: known)
        self.store = AdapterStore(data_dir, MAX_BYTES, self.values)
        self.is_made = False
        self.loader = AdapterLoader(
            self.adapters, self.store, cast(Any, pool), cast(Any, caches), Config(**settings)
        )
        # Before, there are no workers.
        self.is_made = True

    def _tell(self, command: worker_pb2.AdapterCommand) -> None:
        added = {source.adapter: source.digest for source in command.added}
        assert not self.is_made or added.keys() <= {*self.stored}, "too early"
        self.told |= added

    async def _load(self, source: worker_pb2.AdapterSource) -> worker_pb2.WorkerEvent:
        self.told[source.adapter] = source.digest
        return worker_pb2.WorkerEvent(adapter_loaded=worker_pb2.AdapterLoaded(rank=1))

    async def load(self, adapter_id: str, source: Path) -> AdapterVersion:
        message = admin_pb2.LoadAdapterRequest(adapter_id=adapter_id, source=str(source))
        return await self.loader.load(requests(message), "")

    @property
    def stored(self) -> list[int]:
        return [int(name) for name in self.values.all("adapters/") if name != "last"]

    @property
    def numbers(self) -> dict[str, int]:
        return {version.adapter_id: version.number for version in self.adapters if not version.retired}


def write_files(directory: Path, content: bytes = b"content") -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    for name in FILES:
        (directory / name).write_bytes(content)
    return directory


async def requests(*messages: admin_pb2.LoadAdapterRequest) -> AsyncIterator[admin_pb2.LoadAdapterRequest]:
    for message in messages:
        yield message


async def test_workers_and_callers_learn_of_a_version_when_it_is_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the next gateway may give its number, and KV that adopted workers have of it, to another one."""
    monkeypatch.setattr(loader, "_INTERVAL_S", 0.0)
    directory = tmp_path / "adapters"
    write_files(directory / "one")
    journal = FailingJournal()
    server = Server(tmp_path / "data", StoredValues(journal), adapters=str(directory))
    write_files(directory / "two")
    journal.fails = True
    running = asyncio.create_task(server.loader.run())
    for _ in range(100):
        assert server.numbers.keys() == {"one"} and len(server.told) == 1 and not running.done()
        await asyncio.sleep(0.001)
    journal.fails = False
    while len(server.told) < 2:
        assert not running.done()
        await asyncio.sleep(0)
    running.cancel()
    assert set(server.told) == set(server.stored) == set(server.numbers.values())
    later = Server(tmp_path / "data", server.values, adapters=str(directory)).numbers
    assert later == server.numbers


async def test_an_adapter_has_the_same_identity_for_workers(tmp_path: Path) -> None:
    """The gateway finds it, and a worker compares it."""
    dice = random.Random(1)
    for number in range(30):
        directory = tmp_path / f"{number}"
        write_files(directory)
        for name in FILES:
            (directory / name).write_bytes(dice.randbytes(dice.randrange(1000)))
            os.utime(directory / name, ns=(dice.getrandbits(60), dice.getrandbits(60)))
        linked = tmp_path / f"linked-{number}"
        linked.mkdir()
        for name in FILES:
            (linked / name).symlink_to(directory / name)
        assert (
            identity(directory) == worker_identity(directory) == worker_identity(linked) == identity(linked)
        )


async def test_a_file_without_a_name_is_refused(tmp_path: Path) -> None:
    message = admin_pb2.LoadAdapterRequest(adapter_id="a", file=admin_pb2.AdapterFile(data=b"x"))
    with pytest.raises(InvalidArgument, match=r"adapter_config\.json"):
        await Server(tmp_path).loader.load(requests(message), "")


async def test_a_load_leaves_room_for_the_journal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, server = write_files(tmp_path / "source"), Server(tmp_path)
    almost_full = SimpleNamespace(free=RESERVE_BYTES + len(b"content") - 1)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: almost_full)
    with pytest.raises(StorageUnavailable, match="No space left"):
        await server.load("a", source)
    assert not list((tmp_path / "adapter-versions").glob("*"))
    with pytest.raises(AdapterNotFound, match=r"no such adapter: 'a\\x1b'; ListAdapters"):
        server.adapters.resolve("a\x1b", "")


def test_a_file_that_changes_while_it_is_copied_is_refused(tmp_path: Path) -> None:
    """A part of the one content and a part of the other would be served without an error."""
    source = tmp_path / "source"
    source.write_bytes(bytes(3 << 20))

    class BesideAWriter(UploadedFile):
        def write(self, part: bytes) -> None:
            super().write(part)
            with source.open("r+b") as file:
                file.seek(2 << 20)
                file.write(b"other")

    with (
        BesideAWriter(tmp_path / "copy", 4 << 20, store.bad_adapter) as copy,
        pytest.raises(InvalidArgument, match="source has changed while it was copied"),
    ):
        copy.copy(source)


async def test_an_unload_that_is_cancelled_while_it_is_stored_has_happened(tmp_path: Path) -> None:
    """Otherwise this gateway still serves what the next one does not know, and stores it again later."""
    adapters, journal = Adapters(10), FailingJournal()
    adapters.update([AdapterVersion(1, "a", "", str(tmp_path / "a"))])
    values = StoredValues(journal)
    await AdapterStore(tmp_path, MAX_BYTES, values).store(adapters)
    server = Server(tmp_path, values)
    journal.is_slow = True
    unload = asyncio.create_task(server.loader.unload("a", ""))
    while not journal._waiting:
        await asyncio.sleep(0)
    unload.cancel()
    await asyncio.sleep(0)
    journal.settle()
    with pytest.raises(asyncio.CancelledError):
        await unload
    assert Server(tmp_path, values).numbers == server.numbers == {}


async def test_an_adapter_of_the_directory_has_a_rank_once_a_worker_has_loaded_it() -> None:
    adapters = Adapters(9)
    for number, name in enumerate(("used", "not used yet", "steering"), start=1):
        adapters.update([AdapterVersion(number, name, None, "/directory", identity="files")])
    state, none = state_of(Config(), worker_pb2.WorkerReady()), cast(Any, None)
    of_worker = types_pb2.LoraAdapterMetrics(version=1, rank=8, size_bytes=1 << 20)
    state.slots[0].snapshot = worker_pb2.WorkerSnapshot(
        lora_adapters=[
            of_worker,
            types_pb2.LoraAdapterMetrics(version=2, operations=1, waiting=1),
            types_pb2.LoraAdapterMetrics(version=3, size_bytes=512),
        ]
    )
    api = AdminApi(state, none, adapters, lambda: Counter({1: 3}), none, none, none, None, none)
    listed = (await api.ListAdapters(admin_pb2.ListAdaptersRequest(), none)).adapters
    found = {one.adapter_id: (one.rank, one.size_bytes, one.caches) for one in listed}
    assert found == {"used": (8, 1 << 20, 3), "not used yet": (0, 0, 0), "steering": (0, 512, 0)}


async def endless(
    first: admin_pb2.LoadAdapterRequest, message: admin_pb2.LoadAdapterRequest
) -> AsyncIterator[admin_pb2.LoadAdapterRequest]:
    yield first
    while True:
        await asyncio.sleep(0)
        yield message


@pytest.mark.parametrize("data", [b"", b"x"])
async def test_an_upload_that_hardly_gets_on_ends(tmp_path: Path, data: bytes) -> None:
    """Before, each message had its time, and a stream of empty ones held its place for ever."""
    server = Server(tmp_path, message_timeout_s=0.05)
    name = FILES[1] if data else ""
    message = admin_pb2.LoadAdapterRequest(file=admin_pb2.AdapterFile(name=name, data=data) if data else None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(uploads, "LEAST_BYTES_PER_S", 1 << 40)
        with pytest.raises(MessageTimeout):
            await server.loader.load(endless(admin_pb2.LoadAdapterRequest(adapter_id="a"), message), "")
    assert not list((tmp_path / "adapter-versions").glob("*"))


async def test_what_has_arrived_gives_an_upload_more_time() -> None:
    """So that a large file over a slow line is taken."""
    message = admin_pb2.LoadAdapterRequest(file=admin_pb2.AdapterFile(data=bytes(uploads.LEAST_BYTES_PER_S)))
    arriving = uploads.Arriving(requests(*[message] * 20), 600.0)
    left_s = arriving._left_s
    while await arriving.next() is not None:
        pass
    assert 19 < arriving._left_s - left_s < 21


async def test_a_slow_disk_is_not_the_fault_of_an_upload(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before, what the server did between two messages counted as if it had waited for the client."""
    now_s = 0.0
    monkeypatch.setattr(uploads, "time", SimpleNamespace(monotonic=lambda: now_s))
    message = admin_pb2.LoadAdapterRequest(file=admin_pb2.AdapterFile(data=b"x"))

    async def messages() -> AsyncIterator[admin_pb2.LoadAdapterRequest]:
        for _ in range(20):
            # As gRPC does, even if the message is there.
            await asyncio.sleep(0)
            yield message

    arriving = uploads.Arriving(messages(), 60.0)
    while await arriving.next() is not None:
        now_s += 30.0


async def test_the_loads_of_one_tenant_leave_room_for_those_of_others(tmp_path: Path) -> None:
    """Before, four streams of one tenant held all places."""
    server = Server(tmp_path)
    never = asyncio.Event()

    async def waits() -> AsyncIterator[admin_pb2.LoadAdapterRequest]:
        await never.wait()
        yield admin_pb2.LoadAdapterRequest()

    async with asyncio.TaskGroup() as group:
        loads = [group.create_task(server.loader.load(waits(), "a")) for _ in range(4)]
        await asyncio.sleep(0)
        with pytest.raises(AdapterLimit, match="of this tenant"):
            await server.loader.load(waits(), "a")
        with pytest.raises(InvalidArgument):
            await server.loader.load(requests(), "b")
        for load in loads:
            load.cancel()
    with pytest.raises(InvalidArgument):
        await server.loader.load(requests(), "a")


async def test_a_file_that_is_too_large_is_refused_before_it_is_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before, as much as the limit was copied first. A sparse file needs no disk of its own."""
    source, server = write_files(tmp_path / "source"), Server(tmp_path)
    os.truncate(source / FILES[1], 10 << 30)
    written: list[int] = []
    write = uploads.UploadedFile.write

    def note(file: uploads.UploadedFile, part: bytes) -> None:
        written.append(len(part))
        write(file, part)

    monkeypatch.setattr(uploads.UploadedFile, "write", note)
    with pytest.raises(InvalidArgument, match=f"more than {MAX_BYTES} bytes"):
        await server.load("a", source)
    assert sum(written) == len(b"content"), "the config only"
    # Nor is one of the operator's directory read.
    monkeypatch.setattr(store, "content_digest", lambda _: pytest.fail("it is read"))
    scanned = store.scan(tmp_path, {}, MAX_BYTES)
    assert scanned is not None and scanned[0] == {"source": (identity(source), "")}


async def test_adapters_that_cannot_be_used_are_read_once_and_never_on_the_event_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before, all their weights were read every five seconds, and the event loop looked at each directory."""
    monkeypatch.setattr(loader, "_INTERVAL_S", 0.0)
    directory = tmp_path / "adapters"
    write_files(directory / "not a name")
    for number in range(12):
        write_files(directory / f"a{number}")
    read: Counter[str] = Counter()
    digest_of = content_digest

    def count(path: Path) -> str:
        read[path.name] += 1
        return digest_of(path)

    monkeypatch.setattr(store, "content_digest", count)
    server = Server(tmp_path / "data", adapters=str(directory))
    assert len(server.numbers) == 10, "of 12, the limit"
    looks: list[threading.Thread] = []
    iterdir = Path.iterdir

    def look(path: Path) -> Iterator[Path]:
        looks.append(threading.current_thread())
        return iterdir(path)

    monkeypatch.setattr(Path, "iterdir", look)
    running = asyncio.create_task(server.loader.run())
    while len(looks) < 5:
        await asyncio.sleep(0)
    running.cancel()
    assert threading.main_thread() not in looks
    assert set(read.values()) == {1} and "not a name" not in read


def test_an_adapter_that_is_being_written_to_stays_what_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A look at it may fall into the time that this takes, and its id must not go away until the next one."""
    write_files(tmp_path / "one")
    scanned = store.scan(tmp_path, {}, MAX_BYTES)
    assert scanned is not None
    before, _ = scanned

    def digest(directory: Path) -> str:
        """Of files that somebody writes to meanwhile."""
        (directory / FILES[1]).write_bytes(os.urandom(64))
        return "of some half"

    monkeypatch.setattr(store, "content_digest", digest)
    (tmp_path / "one" / FILES[1]).write_bytes(b"half")
    assert store.scan(tmp_path, before, MAX_BYTES) == (before, {})
    monkeypatch.undo()
    after = store.scan(tmp_path, before, MAX_BYTES)
    assert after is not None and after[0]["one"].digest != before["one"].digest
