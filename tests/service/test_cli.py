"""What an installed server adds to the command line: serve, token, and the directories that it leaves."""

from __future__ import annotations

import asyncio
import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
from quire.cli.main import main

from service.auth.tokens import read_token_store
from service.config import Config
from service.extensions.gateways.one_host import places
from service.journal.base import Journal, JournalUnusable
from service.shard import open_own_journal
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
