"""`quire config`: every problem at once, with its line; where values are from; a schema that agrees."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from quire.cli.main import main

from service.config import ADDRESSES, SETTINGS, Config, ConfigError
from service.config_sources import json_schema, read_settings
from service.data_directory import data_directory
from service.journal.sqlite import open_journal
from service.pool.model_versions import ServedModel, to_model_tag, write_served_model
from service.pool.pool_files import write_certificates
from tests.certificates import Authority
from tests.load_config import load_config
from tests.service.journal_traffic import commit, created

ROOT = Path(__file__).resolve().parents[2]
VALIDATOR = jsonschema.Draft202012Validator(json_schema())


@pytest.fixture(autouse=True)
def _alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)


def toml(text: str) -> None:
    Path("q.toml").write_text(text)


def problems(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[str]:
    status = main(["config", "check", *arguments])
    said = capsys.readouterr().err.splitlines()
    assert status == bool(said)
    return [line.removeprefix("quire: ") for line in said]


def test_all_problems_are_said_at_once_with_their_lines(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QUIRE_LOG_LEVEL", "loud")
    monkeypatch.setenv("QUIRE_API_TOKEN", "hunter2")
    toml('# of one server\nworkers = 0\n\nmodle = "adder"\nmax_lease_s = 60\ntls_cert = "nowhere.pem"\n')
    said = problems(capsys, "q.toml", "--listen", "0.0.0.0:0", "--device", "tpu")
    assert [line.partition(" is refused")[0] for line in said] == [
        "q.toml:2: workers = 0",
        "q.toml:4: modle = 'adder'",
        "q.toml:6: tls_cert = 'nowhere.pem'",
        "log_level = 'loud' (from QUIRE_LOG_LEVEL)",
        "QUIRE_API_TOKEN = '***' (from the environment)",
        "device = 'tpu' (from --device)",
        "q.toml: default_lease_s = 1800.0",
    ]
    # That TLS is missing is not said while its certificate is wrong.
    assert len(said) == 7 and "hunter2" not in "".join(said)


def test_a_file_that_is_no_toml_is_a_problem_beside_others(capsys: pytest.CaptureFixture[str]) -> None:
    toml("workers 2")
    said = problems(capsys, "q.toml", "--workers", "none")
    assert len(said) == 2 and "at line 1" in said[0] and said[1].startswith("workers = 'none'")


@pytest.mark.parametrize("text", ["workers 2", "x = ["])
def test_after_a_file_that_cannot_be_read_nothing_is_said_of_the_defaults(
    text: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    toml(text)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        assert "cannot listen" in "".join(problems(capsys, "--listen", address))
        (said,) = problems(capsys, "q.toml", "--listen", address)
        assert "must be a TOML file" in said
        (said,) = problems(capsys, "none.toml", "--listen", address)
        assert "No such file" in said


@pytest.mark.skipif(sys.platform != "linux", reason="there is no /proc")
@pytest.mark.parametrize("directory", ["/proc/nope", "/proc/self/nope/more", "/sys/nope"])
def test_a_data_directory_that_cannot_be_made_is_told(
    directory: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also to root, whom permissions do not stop."""
    (said,) = problems(capsys, "--listen", "127.0.0.1:0", "--data-dir", directory)
    assert said.startswith("data_dir = ") and "cannot be written to (" in said
    # A start says nothing of it then, either.
    assert not problems(capsys, "--listen", "127.0.0.1:0", "--data-dir", directory, "--journal", "memory")


def test_nothing_is_made_by_a_check_without_problems(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    toml(f'listen = "unix:{tmp_path}/socket"\ndata_dir = "{tmp_path}/state/one"\n')
    before = sorted(tmp_path.rglob("*"))
    assert main(["config", "check", "q.toml"]) == 0
    assert capsys.readouterr().out == "q.toml: 2 of 60 settings are given, no problems\n".replace(
        "60", str(len(SETTINGS))
    )
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("name", ADDRESSES)
def test_each_address_is_tried(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    free = dict.fromkeys(["listen", name], "127.0.0.1:0")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        free[name] = f"127.0.0.1:{taken.getsockname()[1]}"
        flags = [part for key, value in free.items() for part in (f"--{key.replace('_', '-')}", value)]
        write_certificates(tmp_path, days=1)
        if name == "peer_listen":
            flags += ["--journal", "postgresql://127.0.0.1:1/none", "--workers-at", "127.0.0.1:1"]
        said = problems(capsys, "--pool", str(tmp_path), *flags)
    (said_of_it,) = [line for line in said if "cannot listen" in line]
    assert said_of_it.startswith(f"{name} = ")


def test_what_only_a_start_shows_is_checked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """All of it in one file."""
    authority = Authority(tmp_path / "ca")
    one, other = authority.server(), authority.issue("other")
    (tmp_path / "tokens.toml").write_text("[token]\n")
    (tmp_path / "runtimes.toml").write_text('[runtimes.gpt]\ndialect = "dance"\n')
    (tmp_path / "data").write_text("")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        toml(
            f'listen = "{address}"\ntls_cert = "{one.cert}"\ntls_key = "{other.key}"\n'
            'tokens = "tokens.toml"\nruntimes = "runtimes.toml"\ndata_dir = "data/one"\n'
        )
        said = problems(capsys, "q.toml")
        assert [line.partition(" = ")[0] for line in said] == [
            "q.toml:2: tls_cert",
            "q.toml:4: tokens",
            "q.toml:5: runtimes",
            "q.toml:6: data_dir",
            "q.toml:1: listen",
        ]
        assert "KEY_VALUES_MISMATCH" in said[0] and "[runtimes.gpt]" in said[2]
        assert (
            said[3].endswith(f"{tmp_path / 'data'} is a file")
            and "another process has this address" in said[4]
        )
        assert not [line for line in problems(capsys, "q.toml", "--running") if "listen" in line]


def test_a_running_servers_directory_is_in_use_and_a_damaged_journal_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = tmp_path / "data"
    flags = ["--listen", "127.0.0.1:0", "--data-dir", str(directory)]
    with contextlib.closing(open_journal(directory)):
        (said,) = problems(capsys, *flags)
        assert "a server uses it" in said
        assert problems(capsys, *flags, "--running") == []
    assert problems(capsys, *flags) == []
    (directory / "journal.db").write_bytes(b"no database")
    (said,) = problems(capsys, *flags)
    assert f"{directory}/journal.db is not a database" in said and "quire-journal" not in said


def test_the_directory_of_a_model_of_the_hub_is_that_of_its_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before, another one was checked than the server uses, by the model's name on the hub."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setattr("service.cli.hub.find_model", lambda *_, **__: tmp_path / "snapshot")
    used = data_directory(Config(model=str(tmp_path / "snapshot")))
    assert used is not None
    with contextlib.closing(open_journal(used)):
        (said,) = [line for line in problems(capsys, "--model", "a/model") if "data_dir" in line]
    assert "a server uses it" in said


def test_weights_that_were_loaded_last_and_are_gone_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Unless the settings name other ones by now, or the journal has caches of later ones."""
    directory, configured, loaded = (tmp_path / name for name in ("data", "configured", "loaded"))
    for path in (configured, loaded):
        path.mkdir()
        (path / "config.json").write_text("{}")
    write_served_model(directory, ServedModel(str(configured), str(loaded), 1))
    flags = ["--listen", "127.0.0.1:0", "--data-dir", str(directory), "--model", str(configured)]
    assert problems(capsys, *flags) == []
    shutil.rmtree(loaded)
    (said,) = problems(capsys, *flags)
    assert f"{loaded} was loaded last, and is gone" in said
    assert problems(capsys, *flags, "--journal", "memory") == [said]
    assert problems(capsys, *flags[:-1], "adder") == []

    async def make_cache_of_later_weights() -> None:
        with contextlib.closing(open_journal(directory)) as journal:
            journal.bind_model(to_model_tag("fingerprint", 2))
            assert await commit(journal, created(1))

    asyncio.run(make_cache_of_later_weights())
    assert problems(capsys, *flags) == []


def test_show_says_where_each_value_is_from(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    toml("workers = 2\nmax_batch_items = 7\nmax_batch_tokens = 9\n")
    monkeypatch.setenv("QUIRE_MAX_BATCH_ITEMS", "8")
    assert main(["config", "show", "q.toml", "--max-batch-tokens", "10"]) == 0
    rows = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert rows.keys() == SETTINGS.keys()
    assert rows["workers"].split() == ["2", "file", "q.toml:1"]
    assert rows["max_batch_items"].split() == ["8", "environment", "QUIRE_MAX_BATCH_ITEMS"]
    assert rows["max_batch_tokens"].split() == ["10", "flag", "--max-batch-tokens"]
    assert rows["kv_pages"].split() == rows["device"].split() == ['"auto"', "default"], "as TOML has them"
    assert main(["config", "show", "--config", "q.toml", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["workers"] == {"value": 2, "source": "q.toml"}
    assert {name: one["value"] for name, one in found.items() if one["source"] == "default"} == {
        name: getattr(Config(), name)
        for name in found
        if name not in ("workers", "max_batch_items", "max_batch_tokens")
    }


def test_show_marks_what_is_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    toml('workers = 0\nmax_batch_items = 7\ndevice = "cpu"\n')
    monkeypatch.setenv("QUIRE_DEVICE", "tpu")
    assert main(["config", "show", "q.toml"]) == 1
    rows = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert rows["workers"].split(maxsplit=1) == ["1", "default; a given value is refused"]
    assert rows["device"].split(maxsplit=1) == ['"cpu"', "file q.toml:3; a given value is refused"]
    assert "refused" not in rows["max_batch_items"]
    assert main(["config", "show", "q.toml", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["workers"] == {"value": 1, "source": "default", "refused": True}


def test_values_are_said_as_toml_has_them(capsys: pytest.CaptureFixture[str]) -> None:
    toml("listen = '127.0.0.1:0'\nreflection = true\nmax_journal_bytes = 1\n")
    first, second = problems(capsys, "q.toml")
    assert first == "q.toml:2: reflection = true is refused: must be one of off, on"
    assert second.endswith("must be a whole number from 1024 to 1125899906842624")


def test_a_start_says_all_problems_with_their_lines(capsys: pytest.CaptureFixture[str]) -> None:
    toml('workers = 0\ndevice = "tpu"\n')
    assert main(["serve", "--config", "q.toml"]) == 2
    said = capsys.readouterr().err.splitlines()
    assert [line.partition(" is refused")[0] for line in said] == [
        "quire: q.toml:1: workers = 0",
        "quire: q.toml:2: device = 'tpu'",
    ]


@pytest.mark.parametrize(
    ("addresses", "refused"),
    [
        ({"listen": "127.0.0.1:7001", "metrics_listen": "127.0.0.1:7001"}, ["metrics_listen"]),
        ({"listen": "localhost:7001", "openai_listen": "127.0.0.1:7001"}, ["openai_listen"]),
        ({"openai_listen": "127.0.0.1:7001", "metrics_listen": "0.0.0.0:7001"}, ["metrics_listen"]),
        ({"openai_listen": "[::1]:7001", "metrics_listen": "[::]:7001"}, ["metrics_listen"]),
        ({"openai_listen": "[::1]:7001", "metrics_listen": "0.0.0.0:7001"}, []),
        ({"openai_listen": "127.0.0.1:7001", "metrics_listen": "127.0.0.2:7001"}, []),
        ({"openai_listen": "127.0.0.1:0", "metrics_listen": "127.0.0.1:0"}, []),
        ({"listen": "unix:/one", "openai_listen": "127.0.0.1:7001"}, []),
    ],
)
def test_two_ports_have_two_addresses(addresses: dict[str, str], refused: list[str]) -> None:
    """Whether they are in use now is another question."""
    settings = read_settings({"listen": "127.0.0.1:0"} | addresses, {})
    assert [error.setting for error in settings.errors] == refused
    assert all("already" in error.allowed for error in settings.errors)


def test_editors_know_what_an_address_looks_like() -> None:
    samples = [
        "", "127.0.0.1:50051", "localhost:0", "[::1]:80", "unix:/run/quire.sock", "unix:relative", "9464",
        "localhost", "::1:80", "host:port", "http://h:1", "https://h:1/", "http://h:1/path", "ftp://h:1",
    ]  # fmt: skip
    refused_by_both = set()
    for name in (*ADDRESSES, "otlp_endpoint"):
        for text in samples:
            try:
                accepted = SETTINGS[name].parse(text, "", text=False) == text
            except ConfigError:
                accepted = False
            fits = VALIDATOR.is_valid({name: text})
            assert fits or not accepted, f"{name} = {text!r} is fine"
            if not fits:
                refused_by_both.add((name, text))
    assert {(name, "9464") for name in (*ADDRESSES, "otlp_endpoint")} <= refused_by_both
    assert {
        ("listen", ""),
        ("listen", "unix:relative"),
        ("metrics_listen", "unix:/run/quire.sock"),
    } <= refused_by_both


def test_the_schema_is_one_and_has_every_setting(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "schema"]) == 0
    schema = json.loads(capsys.readouterr().out)
    jsonschema.Draft202012Validator.check_schema(schema)
    assert schema["properties"].keys() == SETTINGS.keys()
    defaults = {name: setting["default"] for name, setting in schema["properties"].items()}
    jsonschema.validate(defaults, schema)


# Texts are left out: whether a file exists is not for a schema to say.
@pytest.mark.parametrize(
    "name", [n for n, setting in SETTINGS.items() if setting.kind is not str or setting.choices]
)
def test_the_schema_accepts_what_the_server_accepts(name: str, tmp_path: Path) -> None:
    setting = SETTINGS[name]
    found = setting.schema.get("anyOf", [setting.schema])[-1]
    edges: list[Any] = [found[edge] for edge in ("minimum", "maximum") if edge in found]
    values = [*edges, *(edge + step for edge in edges for step in (-1, 1)), *setting.choices]
    values += ["auto", "other", True, [1]]
    whole = [int(value) if type(value) is float and value.is_integer() else value for value in values]
    for value in whole:
        file = tmp_path / "one.toml"
        file.write_text(f"{name} = {json.dumps(value)}\n")
        try:
            load_config({"config": str(file)}, {})
            accepted = True
        except ConfigError as error:
            # What does not fit other settings is none of the schema's business.
            accepted = error.setting != name or "must be at most max_lease_s" in error.allowed
        assert VALIDATOR.is_valid({name: value}) == accepted, value


def test_it_loads_no_torch() -> None:
    modules = "service.cli.config, service.cli.journal, service.cli.doctor"
    code = f"import sys, {modules}; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
