"""Uploads of weights without a server: what is copied, and what is kept by this gateway and the next."""

from __future__ import annotations

import asyncio
import errno
import hashlib
import os
import shutil
import tempfile
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
from quire.v1 import admin_pb2, types_pb2

from service.adapters.store import AdapterStore
from service.config import Config
from service.errors import InvalidArgument, LoadFailed, NoMemory, QuireError, StorageUnavailable
from service.journal.values import StoredValues
from service.pool.model_versions import ModelVersions
from service.runtimes.weight_uploads import DIRECTORY, WeightUploads
from service.uploads import RESERVE_BYTES, UploadDirectory

MODEL = "model.safetensors"
DATA = b"contents"


class Server:
    """The uploads of a gateway that serves a model directory."""

    def __init__(self, data_dir: Path | None, configured: Path, values: StoredValues | None = None) -> None:
        self.values = StoredValues() if values is None else values
        uploads = data_dir and data_dir / DIRECTORY
        self.versions = ModelVersions(str(configured), 1, self.values, uploads=uploads)
        self.uploads = WeightUploads(data_dir, self.versions, Config())
        self.new_threads()

    async def upload(self) -> str:
        return await self.uploads.receive(messages())

    def find(self, source: str) -> Path:
        found = self.uploads.find(source)
        assert found is not None
        return found

    def serve(self, model: Path) -> None:
        """As LoadWeights does."""
        self.versions.serve(self.versions.next_version(str(model)), types_pb2.ModelDescription())

    def new_threads(self) -> None:
        self.threads = ThreadPoolExecutor()
        asyncio.get_running_loop().set_default_executor(self.threads)

    def kept(self) -> list[str]:
        """The sources of what is on the disk, when all removals are done."""
        self.threads.shutdown()
        self.new_threads()
        return [f"upload:{path.name}" for path in self.uploads.directory.path.glob("*")]


async def messages(data: bytes = DATA) -> AsyncIterator[admin_pb2.UploadWeightsRequest]:
    digest = hashlib.sha256(data).digest()
    yield admin_pb2.UploadWeightsRequest(name=MODEL, size_bytes=len(data), data=data, sha256=digest)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    directory = tmp_path / "models--Org--Name" / "snapshots" / "0123"
    directory.mkdir(parents=True)
    (directory / "config.json").write_text("{}")
    return directory


@pytest.fixture
async def server(tmp_path: Path, model: Path) -> Server:
    return Server(tmp_path / "data", model)


async def test_other_files_of_the_served_model_are_copied(
    tmp_path: Path, model: Path, server: Server
) -> None:
    """Not linked to: a trainer may write to them. No weights, and nothing that would block."""
    blob = tmp_path / "blob"
    blob.write_text("tokenizer")
    (model / "tokenizer.json").symlink_to(blob)
    (model / "additional_chat_templates").mkdir()
    (model / "additional_chat_templates" / "tools.jinja").write_text("template")
    (model / "1_Pooling").mkdir()
    (model / "1_Pooling" / "config.json").write_text("pooling")
    (model / "checkpoints").mkdir()
    (model / "checkpoints" / "step.txt").touch()
    for name in ("model-1.safetensors", "model.safetensors.index.json", "pytorch_model.bin"):
        (model / name).touch()
    os.mkfifo(model / "fifo")
    with (model / "large.txt").open("wb") as large:
        large.truncate((64 << 20) + 1)
    directory = server.find(await server.upload())
    blob.write_text("other")
    files = {
        str(path.relative_to(directory)): path.read_text() for path in directory.rglob("*") if path.is_file()
    }
    assert files == {
        MODEL: DATA.decode(),
        "config.json": "{}",
        "tokenizer.json": "tokenizer",
        "additional_chat_templates/tools.jinja": "template",
        "1_Pooling/config.json": "pooling",
    }
    assert directory.parts[-3:] == model.parts[-3:], "workers name a model of the hub by these"
    assert not any(path.is_symlink() for path in directory.rglob("*"))


async def test_float32_may_replace_bfloat16(model: Path, server: Server) -> None:
    """Twice the bytes of all files, and 1 MiB for names."""
    for name in ("a", "b"):
        (model / f"{name}.safetensors").write_bytes(bytes(1 << 20))
    await server.uploads.receive(messages(bytes(5 << 20)))
    with pytest.raises(InvalidArgument, match="from 1 to 5242880"):
        await server.uploads.receive(messages(bytes((5 << 20) + 1)))


async def test_a_full_disk_leaves_nothing(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether that is known before or while it is written."""

    def full(_descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    # The journal needs the same disk.
    almost_full = SimpleNamespace(free=RESERVE_BYTES + len(DATA) - 1)
    for module, name, disk in ((os, "fsync", full), (shutil, "disk_usage", lambda _: almost_full)):
        with monkeypatch.context() as patch:
            patch.setattr(module, name, disk)
            with pytest.raises(StorageUnavailable, match="No space left"):
                await server.upload()
        assert server.kept() == []
    source = await server.upload()
    assert server.kept() == [source]


async def test_the_next_gateway_keeps_what_it_may_serve(tmp_path: Path, model: Path, server: Server) -> None:
    """Also with other settings, which may be a mistake."""
    source = await server.upload()
    server.serve(server.find(source))
    await server.upload()
    later = Server(tmp_path / "data", tmp_path / "another", server.values)
    assert later.versions.serving.model == str(tmp_path / "another")
    assert later.kept() == [source]
    restored = Server(tmp_path / "data", model, server.values)
    assert restored.versions.serving.model == str(restored.find(source))
    restored.serve(model)
    assert restored.kept() == []


async def test_without_a_data_directory_what_is_served_is_kept(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the temporary directory is a link."""
    (tmp_path / "link").symlink_to(tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "link"))
    server = Server(None, model)
    source = await server.upload()
    server.serve(server.find(source))
    await server.upload()
    assert server.uploads.find(source) is not None and source in server.kept()
    server.uploads.directory.close()


async def test_without_a_temporary_directory_an_upload_can_be_repeated(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    server = Server(None, model)
    with pytest.raises(StorageUnavailable, match="No such file"):
        await server.upload()
    (tmp_path / "temporary").mkdir()
    assert server.find(await server.upload()).is_dir()
    server.uploads.directory.close()


def test_without_a_data_directory_all_threads_write_to_one_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first adapters may arrive at the same time."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    mkdir = os.mkdir

    def slow(path: str, mode: int) -> None:
        time.sleep(0.2)
        mkdir(path, mode)

    monkeypatch.setattr(os, "mkdir", slow)
    directory = UploadDirectory(None, "uploads")
    with ThreadPoolExecutor(2) as threads:
        paths = [threads.submit(lambda: directory.path) for _ in range(2)]
    assert [found.result() for found in paths] == [directory.path] * 2 and directory.path.is_dir()
    directory.close()


def test_without_a_temporary_directory_there_is_no_adapter_to_discard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a load is answered with an unknown error, instead of that of the disk."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    AdapterStore(None, 1, StoredValues()).discard(1)


async def test_what_outlives_nothing_does_not_wait_for_the_disk(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before, uploads failed if the system's temporary directory cannot be read, and so not synced."""

    def unreadable(_: object) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(os, "fsync", unreadable)
    server = Server(None, model)
    assert (server.find(await server.upload()) / MODEL).read_bytes() == DATA
    server.uploads.directory.close()


@pytest.mark.parametrize(("error", "is_kept"), [(LoadFailed("it is broken"), False), (NoMemory(2, 1), True)])
async def test_only_a_broken_upload_has_to_be_sent_again(
    server: Server, error: QuireError, is_kept: bool
) -> None:
    source = await server.upload()
    with pytest.raises(type(error)), server.uploads.loading(source):
        raise error
    assert (server.uploads.find(source) is not None) == is_kept
    assert server.kept() == [source] * is_kept


async def test_an_upload_that_is_being_loaded_is_not_replaced(server: Server) -> None:
    first = await server.upload()
    with server.uploads.loading(first):
        second = await server.upload()
        assert sorted(server.kept()) == sorted([first, second])
        server.serve(server.find(first))
    assert sorted(server.kept()) == sorted([first, second])
    server.serve(server.find(second))
    assert server.kept() == [second]


async def test_all_of_an_upload_is_on_the_disk_before_it_can_be_served(
    tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: set[str] = set()
    monkeypatch.setattr(os, "fsync", lambda file: synced.add(str(Path(f"/proc/self/fd/{file}").readlink())))
    directory = server.find(await server.upload())
    uploads = tmp_path / "data" / "weight-uploads"
    above = [path for path in directory.parents if path.is_relative_to(uploads.parent)]
    assert synced >= {str(path) for path in (*directory.iterdir(), directory, *above)}


async def test_a_copy_of_the_data_directory_has_the_weights_of_its_own(
    tmp_path: Path, model: Path, server: Server
) -> None:
    """Before, the next gateway served those of the original, and removed the copy's."""
    original, backup = tmp_path / "data", tmp_path / "backup"
    source = await server.upload()
    server.serve(server.find(source))
    shutil.copytree(original, backup)
    restored = Server(backup, model, server.values)
    assert Path(restored.versions.serving.model).is_relative_to(backup)
    assert restored.kept() == [source]
    assert (restored.find(source) / MODEL).read_bytes() == DATA


async def test_empty_parts_do_not_keep_the_slot(server: Server) -> None:
    async def stalled() -> AsyncIterator[admin_pb2.UploadWeightsRequest]:
        yield admin_pb2.UploadWeightsRequest(name=MODEL, size_bytes=len(DATA))
        while True:
            yield admin_pb2.UploadWeightsRequest()

    with pytest.raises(InvalidArgument, match="is empty"):
        await server.uploads.receive(stalled())
    assert server.kept() == []
