"""The data directory that a gateway shares with the one before it."""

from __future__ import annotations

import contextlib
import errno
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from service import durable_file
from service.config import Config
from service.data_directory import StateUnusable, check_gateways, count_file, data_directory, state_dir
from service.extensions.gateways.one_host import places
from service.journal.base import JournalUnusable
from service.settings import ConfigError
from service.temporary_directory import TemporaryDirectory
from service.uploads import UploadDirectory


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    return tmp_path


def test_each_address_and_model_has_its_own(home: Path) -> None:
    first = data_directory(Config(listen="127.0.0.1:50051"))
    assert first is not None and first.parent == home / "quire"
    assert data_directory(Config(listen="127.0.0.1:50051")) == first
    assert data_directory(Config(listen="127.0.0.1:50052")) != first
    assert data_directory(Config(listen="127.0.0.1:50051", model="paged-attention")) != first


def test_the_state_directory_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/reader")
    monkeypatch.setenv("XDG_STATE_HOME", "relative")
    assert state_dir() == Path("/home/reader/.local/state/quire")
    monkeypatch.setenv("XDG_STATE_HOME", "/state")
    assert state_dir() == Path("/state/quire")
    monkeypatch.delenv("XDG_STATE_HOME")
    monkeypatch.delenv("HOME")
    assert state_dir() == Path(tempfile.gettempdir()) / "quire"


def test_that_of_several_gateways_has_one_server_at_a_time(tmp_path: Path) -> None:
    """The refusal says who has it, as that of a single gateway."""
    with places(tmp_path / "data", 2) as (first, second):
        assert [first.directory, second.directory] == [
            tmp_path / f"data/shards/{index}" for index in range(2)
        ]
        refused = pytest.raises(JournalUnusable, match=f"process {os.getpid()}")
        with refused, places(tmp_path / "data", 2):
            pass
    with places(tmp_path / "data", 2):
        pass


def test_that_of_several_gateways_can_be_used_while_the_disk_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As that of one: what is known already is not written again."""

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with places(tmp_path / "data", 2):
        pass
    monkeypatch.setattr(durable_file, "write", full)
    with places(tmp_path / "data", 2) as found:
        assert len(found) == 2


def _write(content: bytes) -> Callable[[Path], object]:
    return lambda path: path.write_bytes(content)


@pytest.mark.parametrize("gateways", [1, 2])
@pytest.mark.parametrize(
    ("make", "says"),
    [
        (_write(b"\xff\xfe"), "count is damaged"),
        (_write(b""), "count is damaged"),
        (Path.mkdir, "cannot be used: it is not a regular file"),
        (os.mkfifo, "cannot be used: it is not a regular file"),
    ],
)
def test_a_damaged_number_of_gateways_is_refused(
    tmp_path: Path, make: Callable[[Path], object], says: str, gateways: int
) -> None:
    """Before, with a traceback; and a pipe was waited for for ever."""
    count = count_file(tmp_path)
    count.parent.mkdir()
    make(count)
    with pytest.raises((ConfigError, StateUnusable), match=says):
        check_gateways(tmp_path, gateways)


def test_what_a_killed_server_kept_for_itself_is_removed_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before, uploads stayed: gigabytes in what may be memory."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    killed = subprocess.Popen([sys.executable, "-c", UPLOADS], stdout=subprocess.PIPE, text=True)
    with killed:
        assert killed.stdout is not None
        left = Path(killed.stdout.readline().strip())
        with contextlib.closing(UploadDirectory(None, "weight-uploads")) as mine:
            assert mine.path.parent == left.parent.parent == tmp_path and left.exists(), "it is in use"
            killed.kill()
            killed.wait()
            with contextlib.closing(TemporaryDirectory()) as next_one:
                assert set(tmp_path.iterdir()) == {mine.path, next_one.path}
    assert not any(tmp_path.iterdir())


# Says where an upload is, and waits to be killed.
UPLOADS = """
import signal
from service.uploads import UploadDirectory
file = UploadDirectory(None, "weight-uploads").path / "model.safetensors"
file.write_bytes(bytes(1000))
print(file, flush=True)
signal.pause()
"""
