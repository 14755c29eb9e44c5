"""Where a server keeps its state: who cannot have it to itself, or cannot write it, ends with one line."""

from __future__ import annotations

import contextlib
import errno
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from quire.cli.main import main

from service import durable_file
from service.auth.authenticator import Authenticator
from service.auth.tls import server_credentials
from service.cli import serve
from service.config import Config
from service.config_sources import read_settings
from service.data_directory import (
    StateUnusable,
    check_gateways,
    count_file,
    data_directory,
    prepare,
    state_dir,
)
from service.errors import BadRuntimes
from service.extensions.gateways.one_host import places
from service.extensions.providers.runtimes_file import load
from service.journal.base import JournalUnusable
from service.pool import pool_files
from service.settings import ConfigError
from service.temporary_directory import TemporaryDirectory
from service.uploads import UploadDirectory
from tests.certificates import Authority
from tests.quire_command import run
from workers.common.protocol import EXIT_CONFIG

SERVE = ("serve", "--model", "paged-attention", "--listen", "127.0.0.1:1")


@pytest.fixture
def everybodys(tmp_path: Path) -> Path:
    """A directory that all users can write to."""
    path = tmp_path / "everybodys"
    path.mkdir()
    path.chmod(0o777)
    return path


def start(*flags: str, **environ: str) -> tuple[int, str]:
    with run(*SERVE, *flags, **environ) as server:
        said = server.communicate(timeout=60)[1]
    return server.returncode, said


@pytest.mark.parametrize(
    ("home", "why", "flags"),
    [
        ("/dev/null", "/dev/null: Not a directory", ()),
        ("/proc/nope", "No such file or directory", ("--gateways", "2", "--workers", "2")),
    ],
)
def test_a_home_that_is_no_directory(home: str, why: str, flags: tuple[str, ...]) -> None:
    status, said = start(*flags, HOME=home, XDG_STATE_HOME="")
    assert status == EXIT_CONFIG
    assert said.startswith(f"quire: the data directory {home}/.local/state/quire/") and said.count("\n") == 1
    assert why in said


def test_without_a_home_another_users_directory_is_not_used(everybodys: Path) -> None:
    """Of the system's temporary directory, in which anybody can make one first."""
    (everybodys / "quire").mkdir()
    (everybodys / "quire").chmod(0o777)
    everybodys.chmod(0o1777)
    status, said = start(HOME="", XDG_STATE_HOME="", TMPDIR=str(everybodys))
    assert status == EXIT_CONFIG and f"{everybodys}/quire: other users can write to it" in said


def test_a_file_and_a_directory_that_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StateUnusable, match="Not a directory"):
        prepare(Config(data_dir=str(tmp_path / "file")))

    def fail(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number), str(tmp_path / "tmpxyz"))

    monkeypatch.setattr(tempfile, "TemporaryFile", fail)
    for number, may_pass in ((errno.EROFS, False), (errno.EACCES, False), (errno.ENOSPC, True)):
        with pytest.raises(StateUnusable, match=os.strerror(number)) as refused:
            prepare(Config(data_dir=str(tmp_path)))
        assert refused.value.may_pass == may_pass and "tmpxyz" not in str(refused.value)
        # Then there is none.
        prepare(Config(data_dir=str(tmp_path), journal="memory"))


def test_without_a_directory_nothing_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    prepare(Config(listen="127.0.0.1:0"))
    prepare(Config().with_values({"peer_listen": "127.0.0.1:1"}))
    assert list(tmp_path.iterdir()) == []


def test_a_start_says_it(everybodys: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--data-dir", str(everybodys), "--listen", "127.0.0.1:0"]) == EXIT_CONFIG
    assert "other users can write to it" in capsys.readouterr().err


def test_files_that_all_can_write_are_not_read(everybodys: Path) -> None:
    files = {name: everybodys / name for name in ("tokens", "runtimes", "quire.toml", "cert", "key")}
    for path in files.values():
        path.touch()
    with pytest.raises(ConfigError, match="other users can write to it"):
        Authenticator.of(Config(tokens=str(files["tokens"])))
    with pytest.raises(BadRuntimes, match="other users can write to it"):
        load(files["runtimes"])
    (error,) = read_settings({"config": str(files["quire.toml"])}, {}).errors
    assert error.allowed == f"{everybodys}: other users can write to it"
    pair = Authority(everybodys / "ca").server()
    with pytest.raises(ConfigError, match="other users can write to it"):
        server_credentials(Config(tls_cert=str(pair.cert), tls_key=str(pair.key)))


def test_the_keys_of_a_pool_are_this_users(everybodys: Path) -> None:
    pool_files.write_certificates(everybodys, 1)
    with pytest.raises(ConfigError, match="other users can write to it"):
        pool_files.secret(everybodys)


@pytest.fixture
def lets_all_write() -> Iterator[None]:
    """The umask, as of some container runtimes."""
    before = os.umask(0)
    yield
    os.umask(before)


@pytest.mark.usefixtures("lets_all_write")
def test_what_a_server_has_made_is_its_own_at_the_next_start(tmp_path: Path) -> None:
    """Before, it refused the directories above that it had made itself, and so its caches."""
    config = Config(data_dir=str(tmp_path / "state" / "quire" / "data"))
    for _ in range(2):
        prepare(config)
    assert main(["pool", "init", str(tmp_path / "pools" / "mine")]) == 0
    assert pool_files.secret(tmp_path / "pools" / "mine")


def test_the_directory_that_is_prepared_is_the_one_that_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before, that of the model's name on the hub was made, and never used."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    found = tmp_path / "snapshot"
    found.mkdir()
    monkeypatch.setattr("service.cli.hub.find_model", lambda *_, **__: found)
    used: list[Path | None] = []

    def run_gateway(config: Config) -> int:
        used.append(data_directory(config))
        return 0

    monkeypatch.setattr(serve, "run_gateway", run_gateway)
    assert serve._run(Config(model="someone/some-model")) == 0
    assert [*(tmp_path / "quire").iterdir()] == used


def test_each_address_and_model_has_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    first = data_directory(Config(listen="127.0.0.1:50051"))
    assert first is not None and first.parent == tmp_path / "quire"
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


def test_a_directory_of_several_gateways_can_be_used_while_the_disk_is_full(
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
