"""Adapters when a gateway starts: numbers mean what caches know them for, whatever list there is."""

from __future__ import annotations

import asyncio
import os
import shutil
from pathlib import Path

import pytest

from service.adapters import loader
from service.caches.tenants import Tenant, adapter_digest
from service.journal.values import StoredValues
from tests.service.test_adapter_loader import Server, write_files
from workers.common.adapter_files import FILES, content_digest


async def test_owners_without_a_list_agree_by_the_content(tmp_path: Path) -> None:
    """As several hosts. Before, each numbered anew, and caches of the one before had lost theirs."""
    here, there = tmp_path / "here", tmp_path / "there"
    for name in ("one", "two"):
        write_files(here / name, name.encode())
    first = Server(None, adapters=str(here))
    contents = {number: first.adapters.digest_of(number) for number in first.numbers.values()}
    # On another host there are other files, with the same content, and a further adapter.
    for name in ("zero", "two", "one"):
        write_files(there / name, name.encode())
    second = Server(None, contents=contents, adapters=str(there))
    assert {name: second.numbers[name] for name in ("one", "two")} == first.numbers
    assert second.numbers["zero"] not in contents
    # What owners of an earlier version have left behind: several numbers of the same content.
    both = {**contents, 7: contents[first.numbers["one"]], 8: "f" * 32}
    third = Server(None, contents=both, adapters=str(there))
    one = [version for version in third.adapters if version.adapter_id == "one"]
    assert {version.number for version in one} == {first.numbers["one"], 7}
    assert third.numbers["one"] == 7 and third.adapters.get(8) is None
    assert third.numbers["zero"] == 9, "no number of any cache is given to something else"


async def test_a_file_that_is_rewritten_in_place_is_another_version_whatever_its_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before, inode, size and time of the content were all that was looked at."""
    monkeypatch.setattr(loader, "_INTERVAL_S", 0.0)
    directory = tmp_path / "adapters"
    file = write_files(directory / "one", b"content") / FILES[1]
    gateway = Server(tmp_path, adapters=str(directory))
    before, status = gateway.numbers["one"], file.stat()
    running = asyncio.create_task(gateway.loader.run())
    file.chmod(0o640)
    os.utime(file)
    # Some rounds of it.
    await asyncio.sleep(0.05)
    assert gateway.numbers["one"] == before, "the same content"
    with file.open("r+b") as opened:
        opened.write(b"CONTENT")
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert (file.stat().st_ino, file.stat().st_size) == (status.st_ino, status.st_size)
    # A look while it is being written finds no adapter.
    while gateway.numbers.get("one", before) == before:
        assert not running.done()
        await asyncio.sleep(0.01)
    running.cancel()
    assert gateway.told[gateway.numbers["one"]] == content_digest(directory / "one")


async def test_an_older_journal_gives_no_number_to_other_content(tmp_path: Path) -> None:
    """Neither one of a copy, nor one of a cache. Before, workers that kept pages of it used them again."""
    data, sources = (
        tmp_path / "data",
        [write_files(tmp_path / name, name.encode()) for name in ("a", "b", "c")],
    )
    first = Server(data)
    await first.load("a", sources[0])
    older = first.values.all("")
    known = await first.load("b", sources[1])
    restored = StoredValues()
    await restored.set(older)
    second = Server(data, values=restored)
    assert (await second.load("c", sources[2])).number > known.number

    number = second.numbers["c"]
    third = Server(data, restored, {number: "f" * 32})
    assert third.adapters.get(number) is None, "these caches have lost their adapter"
    renamed = third.numbers["c"]
    assert renamed > number
    # It stays so.
    digest = content_digest(sources[2])
    fourth = Server(data, restored, {number: "f" * 32, renamed: digest})
    assert fourth.numbers["c"] == renamed and fourth.adapters.digest_of(renamed) == digest
    assert content_digest(Path(next(v for v in fourth.adapters if v.number == renamed).directory)) == digest


async def test_a_copy_of_the_data_directory_has_the_adapters_of_its_own(tmp_path: Path) -> None:
    """Before, they were those of the original, and with it they were gone."""
    data, backup = tmp_path / "data", tmp_path / "backup"
    first = Server(data)
    loaded = await first.load("a", write_files(tmp_path / "a", b"a"))
    shutil.copytree(data, backup)
    restored = Server(backup, values=first.values)
    version = restored.adapters.resolve("a", "")
    assert Path(version.directory).is_relative_to(backup)
    assert content_digest(Path(version.directory)) == loaded.digest


async def test_a_copy_whose_version_was_not_stored_is_removed_by_the_next_gateway(tmp_path: Path) -> None:
    """A crash came between the file and the record."""
    data, source = tmp_path / "data", write_files(tmp_path / "a", b"a")
    first = Server(data)
    kept = await first.load("a", source)
    first.store.copy(source, kept.number + 1)
    second = Server(data, values=first.values)
    assert second.numbers == {"a": kept.number}
    assert [path.name for path in (data / "adapter-versions").iterdir()] == [str(kept.number)]


async def test_caches_keep_adapters_of_which_nothing_is_stored(tmp_path: Path) -> None:
    """As with a journal in memory before. Before, a load failed with "File exists"."""
    data, source = tmp_path / "data", write_files(tmp_path / "a", b"a")
    first = await Server(data).load("a", source)
    second = Server(data, contents={first.number: first.digest})
    assert second.numbers == {} and second.adapters.digest_of(first.number) == first.digest
    assert (await second.load("a", write_files(source, b"other"))).number > first.number
    assert content_digest(second.store.path(first.number)) == first.digest


def test_the_salt_of_a_cache_has_the_content_of_its_adapter() -> None:
    digest = "0123456789abcdef" * 2
    tenants = [Tenant(name) for name in ("", "a", "a0123456789abcdef0123456789abcdef/")]
    salts = [tenant.salt(salt, of) for tenant in tenants for salt in ("", "s") for of in (0, 3, digest)]
    assert len(set(salts)) == len(salts)
    assert [adapter_digest(salt) for salt in salts] == ["", "", digest] * 6
