"""What an installed server adds to the command line: serve, also with --check, and token."""

from __future__ import annotations

import asyncio
import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
from quire.cli.main import main

from service.auth.tokens import read_token_store
from service.config import Config, all_settings
from service.extensions.gateways.one_host import places
from service.journal.base import Journal, JournalUnusable
from service.pool import pool_files
from service.shard import open_own_journal
from tests.certificates import Authority
from tests.quire_command import run


def none(*_: object) -> None:
    """There are no records."""


def refused(*flags: str) -> dict[str, Any]:
    """The line with which a server ends that cannot start."""
    with run("serve", *flags) as process:
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
        (["--config", str(file)], "", f"gateways = 1 (from {file}) is refused: "),
    ):
        with monkeypatch.context() as patch:
            if variable:
                patch.setenv("QUIRE_GATEWAYS", variable)
            assert main([*flags, *given]) == 2
        assert capsys.readouterr().err.startswith(f"quire: {said}")


def opened(directory: Path) -> Journal:
    return asyncio.run(open_own_journal(Config(), directory, none))


def test_a_data_directory_is_one_servers(tmp_path: Path) -> None:
    directory = tmp_path / "data"
    with contextlib.closing(opened(directory)):
        line = refused("--listen", "127.0.0.1:0", "--data-dir", str(directory))
    assert line["event"] == "cannot use the journal" and "in use by another gateway" in line["error"]
    with contextlib.closing(opened(directory)):
        pass


def test_a_lock_that_is_a_link_is_not_followed(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (tmp_path / "lock").symlink_to(victim)
    with pytest.raises(JournalUnusable, match="lock"):
        opened(tmp_path)
    assert victim.read_text() == "precious"


def test_a_token_and_its_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["token", "alice", "--roles", "call,observe"]) == 0
    token, line = capsys.readouterr().out.splitlines()
    (tmp_path / "tokens").write_text(f"[tokens]\n{line}\n")
    principal = read_token_store(tmp_path / "tokens").principal_of(token)
    assert principal is not None and principal.tenant == "alice" and len(principal.roles) == 2
    for roles, unknown in (("root", "root"), ("call,", ""), ("", "")):
        assert main(["token", "alice", "--roles", roles]) == 2
        said = f"no role {unknown!r}; roles are call, observe, administer"
        assert said in capsys.readouterr().err
    assert main(["token", "two words"]) == 2
    assert main(["status", "--ca", str(tmp_path / "nothing")]) == 2
    assert "No such file" in capsys.readouterr().err


@pytest.fixture(autouse=True)
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of whoever runs the tests is read or written."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)


# Checks: every problem of the settings at once, and where values are from.


def toml(text: str) -> None:
    Path("q.toml").write_text(text)


def make_directory(path: Path, config: str) -> Path:
    path.mkdir()
    (path / "config.json").write_text(config)
    return path


def problems(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[str]:
    status = main(["serve", "--check", *arguments])
    said = capsys.readouterr().err.splitlines()
    assert status == (2 if said else 0)
    return [line.removeprefix("quire: ") for line in said]


def test_all_problems_are_said_at_once_with_their_sources(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QUIRE_LOG_LEVEL", "loud")
    monkeypatch.setenv("QUIRE_API_TOKEN", "hunter2")
    toml('# of one server\nworkers = 0\n\nmodle = "adder"\ntls_cert = "nowhere.pem"\n')
    said = problems(capsys, "--config", "q.toml", "--listen", "0.0.0.0:0", "--device", "tpu")
    assert [line.partition(" is refused")[0] for line in said] == [
        "workers = 0 (from q.toml)",
        "modle = 'adder' (from q.toml)",
        "tls_cert = 'nowhere.pem' (from q.toml)",
        "log_level = 'loud' (from QUIRE_LOG_LEVEL)",
        "QUIRE_API_TOKEN = '***' (from the environment)",
        "device = 'tpu' (from --device)",
    ]
    # That TLS is missing is not said while its certificate is wrong.
    assert len(said) == 6 and "hunter2" not in "".join(said)


def test_a_file_that_is_no_toml_is_a_problem_beside_others(capsys: pytest.CaptureFixture[str]) -> None:
    toml("workers 2")
    said = problems(capsys, "--config", "q.toml", "--workers", "none")
    assert len(said) == 2 and "at line 1" in said[0] and said[1].startswith("workers = 'none'")


def test_nothing_is_made_by_a_check_without_problems(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    toml(f'listen = "unix:{tmp_path}/socket"\ndata_dir = "{tmp_path}/state/one"\n')
    before = sorted(tmp_path.rglob("*"))
    monkeypatch.setenv("QUIRE_KV_PAGES", "auto")
    assert main(["serve", "--check", "--config", "q.toml", "--workers", "2"]) == 0
    *given, last = capsys.readouterr().out.splitlines()
    assert given == [
        f'listen = "unix:{tmp_path}/socket"  # q.toml',
        f'data_dir = "{tmp_path}/state/one"  # q.toml',
        'kv_pages = "auto"  # QUIRE_KV_PAGES',
        "workers = 2  # --workers",
    ]
    assert last == f"no problems; {len(all_settings()) - 4} settings have their defaults"
    page = Path(__file__).parents[2] / "docs" / "serving.md"  # whose example gives five
    assert f"no problems; {len(all_settings()) - 5} settings have their defaults" in page.read_text()
    assert sorted(tmp_path.rglob("*")) == before


def test_what_only_a_start_reads_is_checked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    authority = Authority(tmp_path / "ca")
    one, other = authority.server(), authority.issue("other")
    (tmp_path / "tokens.toml").write_text("[token]\n")
    (tmp_path / "runtimes.toml").write_text('[runtimes.gpt]\ndialect = "dance"\n')
    quantised = make_directory(tmp_path / "quantised", '{"quantization_config": {"quant_method": "awq"}}')
    given = {
        "model": (str(quantised), "quantization_config (awq): bits: must be 4, got None"),
        "tokens": ("tokens.toml", "tokens"),
        "runtimes": ("runtimes.toml", "[runtimes.gpt]"),
        "tls_cert": (str(one.cert), "KEY_VALUES_MISMATCH"),
    }
    for name, (value, why) in given.items():
        key = f'tls_key = "{other.key}"\n' if name == "tls_cert" else ""
        toml(f'{name} = "{value}"\n{key}listen = "127.0.0.1:0"\n')
        (said,) = problems(capsys, "--config", "q.toml")
        assert said.startswith(f"{name} = ") and "(from q.toml)" in said and why in said


@pytest.mark.parametrize("flags", ["--gateways 2 --workers 2", "--model org/name", "--journal disk"])
def test_whatever_starts_a_server_can_be_checked(
    flags: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert problems(capsys, "--data-dir", str(tmp_path / "data"), *flags.split()) == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        ("--journal redis://host/0", "no extension that is installed has such a journal"),
        (
            "--journal postgresql://me@host/q",
            "no extension that is installed has such a journal without peer_listen",
        ),
        ("--journal disk --listen 127.0.0.1:0", "needs a data_dir if the port is chosen at each start"),
    ],
)
def test_a_journal_that_cannot_be_had_is_a_problem(
    flags: str, why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """As at a start, where nothing else is read from it."""
    (said,) = problems(capsys, *flags.split())
    assert said.startswith("journal = ") and said.endswith(f"(from --journal) is refused: {why}")


def test_a_database_is_not_asked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pool_files.write_certificates(tmp_path, 1)
    shared = ("--peer-listen", "host:1", "--pool", str(tmp_path), "--pool-listen", "host:2")
    assert problems(capsys, "--journal", "postgresql://quire@127.0.0.1:1/quire", *shared) == []


def test_values_are_said_as_toml_has_them(capsys: pytest.CaptureFixture[str]) -> None:
    toml("listen = '127.0.0.1:0'\ninsecure = true\nmax_journal_bytes = 1\n")
    first, second = problems(capsys, "--config", "q.toml")
    assert first == "insecure = true (from q.toml) is refused: must be one of off, on"
    assert second.endswith("must be a whole number from 1024 to 1125899906842624")
