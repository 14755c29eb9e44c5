"""`quire adapters`, and `quire generate --adapter`, against a fake server."""

from __future__ import annotations

from pathlib import Path

import grpc
import pytest
from quire.v1 import admin_pb2

from tests.client.conftest import Quire
from tests.fake_executor import FakeExecutor, rich_status

FILES = {"adapter_config.json": b"{}", "adapter_model.safetensors": b"weights"}
BAD = rich_status(grpc.StatusCode.INVALID_ARGUMENT, "BAD_ADAPTER", "adapter_config.json cannot be read")


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    for name, content in FILES.items():
        (tmp_path / name).write_bytes(content)
    return tmp_path


def test_adapters_are_listed(quire: Quire, executor: FakeExecutor) -> None:
    assert quire("adapters", "list").out.split() == ["adapter", "version", "rank", "size", "caches"]
    executor.adapters = {
        "team/sql-v2": admin_pb2.Adapter(
            adapter_id="team/sql-v2",
            version=12,
            rank=16,
            size_bytes=3 << 19,
            caches=4,
            pinned=True,
            shared=True,
        ),
        "x": admin_pb2.Adapter(adapter_id="x\x1b", version=3, shared=True),
        "happy": admin_pb2.Adapter(adapter_id="happy", version=4, size_bytes=768),  # a steering vector
    }
    header, *rows = quire("adapters", "list").out.splitlines()
    assert [row.split() for row in rows] == [
        ["team/sql-v2", "12", "16", "1.5", "MiB", "4", "pinned", "shared"],
        ["x\\x1b", "3", "-", "-", "0", "shared"],
        ["happy", "4", "-", "768", "B", "0"],
    ]
    ends = {name: header.index(name) + len(name) for name in ("version", "rank", "size", "caches")}
    places = [(f"{row} ", end) for row in rows for end in ends.values()]
    assert all(row[end - 1] != " " and row[end] == " " for row, end in places), "aligned"


def test_an_adapter_of_the_hub_is_loaded(quire: Quire, executor: FakeExecutor) -> None:
    assert quire("adapters", "load", "sql", "org/name", "--pin", "--shared") == (
        0,
        "loaded sql as version 1: rank 8, 1.5 MiB\n",
        "",
    )
    (request,) = executor.calls["LoadAdapter"]
    assert request == admin_pb2.LoadAdapterRequest(
        adapter_id="sql", source="org/name", pinned=True, shared=True
    )


def test_a_directory_is_named_or_uploaded(
    quire: Quire, executor: FakeExecutor, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(directory.parent)
    assert quire("adapters", "load", "sql", directory.name).status == 0
    assert executor.calls["LoadAdapter"][0].source == str(directory), "the server is elsewhere"
    assert quire("adapters", "load", "sql", directory.name, "--upload").status == 0
    assert executor.calls["LoadAdapter"][1] == admin_pb2.LoadAdapterRequest(adapter_id="sql")
    assert {part.name: part.data for part in executor.uploaded} == FILES


def test_what_cannot_be_uploaded_is_told(quire: Quire, executor: FakeExecutor, tmp_path: Path) -> None:
    said = f"quire: {tmp_path}/adapter_config.json: No such file or directory\n"
    assert quire("adapters", "load", "sql", str(tmp_path), "--upload") == (2, "", said)
    assert executor.calls["LoadAdapter"] == []


def test_a_refusal_is_told_and_a_directory_can_be_uploaded(
    quire: Quire, executor: FakeExecutor, directory: Path
) -> None:
    said = "quire: INVALID_ARGUMENT BAD_ADAPTER adapter_config.json cannot be read\n"
    hint = "quire: --upload sends the directory of this machine, if the server runs on another one\n"
    for arguments, error in (
        ([str(directory)], said + hint),
        ([str(directory), "--upload"], said),
        (["org/name"], said),
    ):
        executor.fail("LoadAdapter", BAD)
        assert quire("adapters", "load", "sql", *arguments) == (1, "", error)


def test_an_adapter_is_unloaded(quire: Quire, executor: FakeExecutor) -> None:
    executor.adapters = {"sql": admin_pb2.Adapter(adapter_id="sql")}
    assert quire("adapters", "unload", "sql", "--shared", "--token", "secret") == (0, "unloaded sql\n", "")
    assert executor.calls["UnloadAdapter"][0].shared and executor.authorizations == {"Bearer secret"}
    hint = "quire: --shared unloads one that is for all tenants\n"
    for flags, said in (["--shared"], ""), ([], hint):
        assert quire("adapters", "unload", "sql", *flags) == (1, "", f"quire: not known: sql\n{said}")


def test_generate_names_an_adapter(quire: Quire, executor: FakeExecutor) -> None:
    assert quire("generate", "--tokens", "1", "--max-tokens", "1", "--adapter", "sql").status == 0
    assert quire("generate", "--tokens", "1", "--max-tokens", "1").status == 0
    assert [request.items[0].adapter_id for request in executor.calls["Execute"]] == ["sql", ""]
