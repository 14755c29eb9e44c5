"""What a server has, on the command line: its status as JSON, its caches, and the directories it leaves."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest

from service.cli.main import main
from service.config import Config
from service.data_directory import data_directory
from service.journal.sqlite import open_journal
from tests.fake_executor import FakeExecutor, rich_status, serving

DAY_S = 86_400


@pytest.fixture
def executor() -> FakeExecutor:
    executor = FakeExecutor()
    executor.caches = {f"kv_{number}": [1] * number for number in range(1, 6)}
    return executor


@pytest.fixture
def quire(executor: FakeExecutor) -> Iterator[Callable[..., int]]:
    with serving(executor) as target:
        yield lambda *arguments: main([*arguments, "--target", target])


def test_status_as_json(quire: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    assert quire("status", "--json") == 0
    (line,) = capsys.readouterr().out.splitlines()
    status = json.loads(line)
    assert (status["version"], status["state"], status["caches"]) == ("9.9.9", "SERVER_STATE_SERVING", 0)
    assert [worker["state"] for worker in status["workers"]] == [
        "WORKER_STATE_READY",
        "WORKER_STATE_STARTING",
    ]


def test_caches_are_listed_page_by_page(
    quire: Callable[..., int], executor: FakeExecutor, capsys: pytest.CaptureFixture[str]
) -> None:
    assert quire("caches", "list") == 0
    header, *rows = capsys.readouterr().out.splitlines()
    assert header.split() == ["cache", "tokens", "worker", "expires"]
    assert [row.split() for row in rows[:2]] == [
        ["kv_1", "1", "worker-0", "2033-05-18T03:33:20+00:00"],
        ["kv_2", "2", "worker-0", "2033-05-18T03:33:20+00:00"],
    ]
    assert [row.split()[0] for row in rows] == list(executor.caches)
    assert len(executor.calls["ListCaches"]) == 3


def test_caches_are_released_by_id(
    quire: Callable[..., int], executor: FakeExecutor, capsys: pytest.CaptureFixture[str]
) -> None:
    assert quire("caches", "release", "kv_2", "kv_4") == 0
    assert capsys.readouterr() == ("released 2 of 2 caches\n", "")
    assert list(executor.caches) == ["kv_1", "kv_3", "kv_5"]
    assert quire("caches", "release", "kv_2", "kv_3") == 1
    assert capsys.readouterr() == ("released 1 of 2 caches\n", "quire: not known: kv_2\n")


def test_all_caches_are_released_once_that_is_confirmed(
    quire: Callable[..., int], executor: FakeExecutor, capsys: pytest.CaptureFixture[str]
) -> None:
    assert quire("caches", "release", "--all") == 2
    assert capsys.readouterr() == ("", "quire: --all would release 5 caches: say --yes, too\n")
    assert len(executor.caches) == 5
    assert quire("caches", "release", "--all", "--yes") == 0
    assert capsys.readouterr().out == "released 5 of 5 caches\n"
    assert executor.caches == {}
    assert quire("caches", "release", "--all") == 0, "there is nothing to confirm"


def test_a_refused_call_is_told_in_a_line(
    quire: Callable[..., int], executor: FakeExecutor, capsys: pytest.CaptureFixture[str]
) -> None:
    for method, action in (("ListCaches", ["list"]), ("ReleaseCache", ["release", "kv_1"])):
        executor.fail(method, rich_status(grpc.StatusCode.PERMISSION_DENIED, "ROLE_MISSING", "call"))
        assert quire("caches", *action) == 1
        assert capsys.readouterr().err == "quire: PERMISSION_DENIED ROLE_MISSING call\n"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("", "required: serve|status|generate|load|caches|state|token"),
        ("caches", "required: list|release"),
        ("caches release", "one of the arguments CACHE_ID --all is required"),
        ("caches release kv_1 --all", "not allowed with argument"),
        ("state", "required: list|remove"),
        ("state remove", "one of the arguments NAME --older-than is required"),
    ],
)
def test_what_is_to_be_done_has_to_be_said(
    arguments: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments.split())
    error = capsys.readouterr().err
    assert caught.value.code == 2 and "usage: quire" in error and said in error


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    return tmp_path / "quire"


def left_behind(port: int, *, days: int, more_bytes: int = 0) -> Path:
    """The directory of a server that has ended."""
    directory = data_directory(Config(listen=f"127.0.0.1:{port}"))
    assert directory is not None
    with contextlib.closing(open_journal(directory, "normal")):
        (directory / "workers").mkdir()
        (directory / "workers" / "epoch").write_bytes(bytes(more_bytes))
    then_s = time.time() - days * DAY_S
    for path in (directory, *directory.rglob("*")):
        os.utime(path, (then_s, then_s))
    return directory


def test_directories_are_listed_with_size_and_age(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["state", "list"]) == 0
    assert capsys.readouterr().out == f"in {home}:\n"
    old = left_behind(1, days=40, more_bytes=3 << 20)
    new = left_behind(2, days=2)
    (home / "run" / "quire-1-2").mkdir(parents=True)
    with contextlib.closing(open_journal(new, "normal")):
        assert main(["state", "list"]) == 0
    _, *rows = capsys.readouterr().out.splitlines()
    assert [row.split() for row in rows] == [
        ["3.0", "MiB", "40.0", "days", "ago", old.name],
        ["0.0", "MiB", "in", "use", new.name],
    ]


def test_directories_are_removed_by_name(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old, new = left_behind(1, days=40), left_behind(2, days=2)
    assert main(["state", "remove", old.name]) == 0
    assert capsys.readouterr().out == f"removed {old.name}: 0.0 MiB, written to 40.0 days ago\n"
    assert list(home.iterdir()) == [new]
    (home / "run").mkdir()
    for name in (old.name, "run", "..", ""):
        assert main(["state", "remove", name]) == 1
        assert capsys.readouterr() == ("", f"quire: {name} is not in {home}\n")
    assert sorted(home.iterdir()) == [new, home / "run"]


def test_old_directories_are_removed_and_others_kept(home: Path) -> None:
    old, new = left_behind(1, days=40), left_behind(2, days=2)
    # As a removal leaves it that was interrupted; a server has come to the same address since.
    old.rename(old.with_name(old.name + ".removed"))
    left_behind(1, days=35)
    assert main(["state", "remove", "--older-than", "30"]) == 0
    assert list(home.iterdir()) == [new]
    assert main(["state", "remove", "--older-than", "0"]) == 0
    assert list(home.iterdir()) == []


@pytest.mark.parametrize("locked", ["lock", "workers", "run/quire-1-2"])
def test_what_a_server_uses_is_never_removed(
    home: Path, capsys: pytest.CaptureFixture[str], locked: str
) -> None:
    """Which of them it locks depends on where caches are written down, and whether workers outlive it."""
    used = left_behind(1, days=40)
    (used / "run" / "quire-1-2").mkdir(parents=True)
    lock = os.open(used / locked, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        before = sorted(used.rglob("*"))
        assert main(["state", "remove", "--older-than", "0"]) == 0
        assert main(["state", "remove", used.name]) == 1
        assert capsys.readouterr() == ("", f"quire: {used.name} is in use by a server\n")
        assert sorted(used.rglob("*")) == before
    finally:
        os.close(lock)
    assert main(["state", "remove", used.name]) == 0
