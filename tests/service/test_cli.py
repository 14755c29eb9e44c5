"""What an installed server adds to the command line: serve, token, and the directories that it leaves."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
from quire.cli.main import main

from service.auth.tokens import read_token_store
from service.config import Config
from service.data_directory import data_directory
from service.extensions.gateways.one_host import places
from service.journal.base import JournalUnusable
from service.journal.opening import open_configured
from tests.quire_command import run
from tests.service.journal_traffic import open_journal

DAY_S = 86_400


def none(*_: object) -> None:
    """There are no records."""


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    return tmp_path / "quire"


def left_behind(port: int, *, days: float, more_bytes: int = 0) -> Path:
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


@pytest.mark.parametrize("locked", ["lock", "workers"])
def test_what_a_server_uses_is_never_removed(
    home: Path, capsys: pytest.CaptureFixture[str], locked: str
) -> None:
    """Which of them it locks depends on where caches are written down, and whether workers outlive it."""
    used = left_behind(1, days=40)
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


def refused(*flags: str) -> dict[str, Any]:
    """The line with which a server ends that cannot start."""
    with run("serve", *flags, "--log-format", "json") as process:
        _, error = process.communicate(timeout=60)
    assert process.returncode == 1
    (line,) = map(json.loads, error.splitlines())
    return dict(line)


def test_a_setting_that_is_refused_late_is_named_with_where_it_is_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    data = tmp_path / "data"
    with places(data, 2):
        pass
    flags = ["serve", "--listen", "127.0.0.1:0", "--data-dir", str(data)]
    file = tmp_path / "quire.toml"
    file.write_text("workers = 3\ngateways = 1\n")
    for given, variable, said in (
        ([], "", "gateways = 1 (from default) is refused: the caches in "),
        (["--gateways", "1"], "", "gateways = 1 (from --gateways) is refused: "),
        ([], "1", "gateways = 1 (from QUIRE_GATEWAYS) is refused: "),
        (["--config", str(file)], "", f"{file}:2: gateways = 1 is refused: "),
    ):
        with monkeypatch.context() as patch:
            if variable:
                patch.setenv("QUIRE_GATEWAYS", variable)
            assert main([*flags, *given]) == 2
        assert capsys.readouterr().err.startswith(f"quire: {said}")


@pytest.mark.parametrize("kind", ["memory", "disk"])
def test_a_data_directory_is_one_servers_whatever_its_journal(tmp_path: Path, kind: str) -> None:
    """Adapters and loaded weights are in it, too."""
    directory = tmp_path / "data"
    with contextlib.closing(open_configured("memory", "normal", directory, none, none)):
        line = refused("--listen", "127.0.0.1:0", "--data-dir", str(directory), "--journal", kind)
    assert line["event"] == "cannot use the journal" and "in use by another gateway" in line["error"]
    with contextlib.closing(open_configured(kind, "normal", directory, none, none)):
        pass


def test_a_lock_that_is_a_link_is_not_followed(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (tmp_path / "lock").symlink_to(victim)
    with pytest.raises(JournalUnusable, match="lock"):
        open_configured("disk", "normal", tmp_path, none, none)
    assert victim.read_text() == "precious"


def test_a_token_and_its_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["token", "alice", "--roles", "call,observe"]) == 0
    token, line = capsys.readouterr().out.splitlines()
    (tmp_path / "tokens").write_text(f"[tokens]\n{line}\n")
    principal = read_token_store(tmp_path / "tokens").principal_of(token)
    assert principal is not None and principal.tenant == "alice" and len(principal.roles) == 2
    assert main(["token", "alice", "--roles", "root"]) == 2
    assert "no role 'root'; roles are call, observe, administer" in capsys.readouterr().err
    assert main(["token", "two words"]) == 2
    assert main(["status", "--ca", str(tmp_path / "nothing")]) == 2
    assert "No such file" in capsys.readouterr().err
