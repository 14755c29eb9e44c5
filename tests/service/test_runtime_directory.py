"""The directory of the workers' sockets: one for each gateway, which goes with it, or after it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from service.pool.directory import RuntimeDirectory, state_dir

MAKE_AND_DIE = """
import os, sys
from pathlib import Path
from service.pool.directory import RuntimeDirectory
path = RuntimeDirectory(Path(sys.argv[1])).socket_path("worker-0-1.sock")
path.touch()
print(path, flush=True)
if sys.argv[2] == "waits":
    sys.stdin.read()
os._exit(1)
"""


@pytest.fixture
def base() -> Iterator[Path]:
    """A directory whose path is short, as those of tests are not."""
    with tempfile.TemporaryDirectory() as path:
        yield Path(path)


@pytest.fixture
def temporary(base: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = base / "tmp"
    path.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(path))
    return path


def test_it_is_private_and_goes_with_its_gateway(base: Path) -> None:
    directory = RuntimeDirectory(base / "data")
    socket = directory.socket_path("worker-0-1.sock")
    assert socket.parent.parent == base / "data" / "run"
    assert socket.parent.stat().st_mode & 0o777 == 0o700
    assert directory.socket_path("worker-0-2.sock").parent == socket.parent
    directory.close()
    assert list((base / "data" / "run").iterdir()) == []


def test_what_a_dead_gateway_left_is_swept_and_what_others_use_is_not(base: Path) -> None:
    def start(how: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", MAKE_AND_DIE, str(base), how]
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    with start("waits") as living:
        assert living.stdout is not None and living.stdin is not None
        kept = Path(living.stdout.readline().strip())
        with start("dies") as dead:
            assert dead.stdout is not None
            left = Path(dead.stdout.readline().strip())
        others = [base / "run" / "quire-notes", base / "run" / "else"]
        for other in others:
            other.mkdir()
        assert left.exists()
        directory = RuntimeDirectory(base)
        directory.socket_path("worker-0-1.sock")
        assert kept.exists() and not left.parent.exists()
        assert all(other.exists() for other in others)
        directory.close()
        living.stdin.close()


def test_it_is_made_again_when_it_has_vanished(base: Path) -> None:
    directory = RuntimeDirectory(base)
    first = directory.socket_path("worker-0-1.sock")
    shutil.rmtree(base / "run")
    again = directory.socket_path("worker-0-2.sock")
    assert again.parent == first.parent and again.parent.is_dir()
    # It is locked again, so that others leave it alone.
    other = RuntimeDirectory(base)
    other._places = [base / "run" / "quire-1-1", *other._places]
    other.socket_path("worker-0-1.sock")
    assert again.parent.is_dir()
    other.close()
    directory.close()


@pytest.mark.parametrize("data_dir", ["a-file/data", "x" * 80])
def test_where_it_cannot_be_it_is_a_temporary_one(base: Path, temporary: Path, data_dir: str) -> None:
    (base / "a-file").touch()
    directory = RuntimeDirectory(base / data_dir)
    socket = directory.socket_path("worker-0-1.sock")
    assert socket.parent.parent == temporary
    directory.close()
    assert list(temporary.iterdir()) == []


def test_what_fails_leaves_nothing_and_is_tried_again(
    base: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = RuntimeDirectory(base / "data")
    with monkeypatch.context() as patch:

        def fails(*_: object) -> int:
            raise OSError(24, "Too many open files")

        patch.setattr(os, "open", fails)
        with pytest.raises(OSError, match="Too many open files"):
            directory.socket_path("worker-0-1.sock")
    assert list(temporary.iterdir()) == []
    assert directory.socket_path("worker-0-1.sock").parent.parent == base / "data" / "run"
    directory.close()


def test_state_is_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/reader")
    monkeypatch.setenv("XDG_STATE_HOME", "relative")
    assert state_dir() == Path("/home/reader/.local/state/quire")
    monkeypatch.setenv("XDG_STATE_HOME", "/state")
    assert state_dir() == Path("/state/quire")
    monkeypatch.delenv("XDG_STATE_HOME")
    monkeypatch.delenv("HOME")
    assert state_dir() == Path(tempfile.gettempdir()) / "quire"
