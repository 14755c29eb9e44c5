"""Settings: which source wins, and how a bad one is refused."""

from __future__ import annotations

import argparse
import dataclasses
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from quire.v1 import executor_pb2 as pb

from service.config import Config, all_settings
from service.config_sources import add_flags
from service.model_names import is_hub_id
from service.settings import ConfigError
from tests.load_config import load_config
from workers.common import worker_pb2

MODELS = (
    "must be adder, storyteller, paged-attention, a directory with config.json or one GGUF model, a GGUF"
    " file, or ORG/NAME on the Hugging Face hub (GGUF: ORG/NAME:Q4_K_M)"
)


def parse(*arguments: str) -> dict[str, str | None]:
    parser = argparse.ArgumentParser()
    add_flags(parser)
    return vars(parser.parse_args(arguments))


def toml(path: Path, content: str) -> str:
    file = path / "quire.toml"
    file.write_text(content)
    return str(file)


@pytest.mark.parametrize("max_journal_bytes", [1024, 1 << 50])
def test_how_many_caches_there_may_be_can_be_told(max_journal_bytes: int) -> None:
    limits = pb.GatewayLimits(max_caches=Config(max_journal_bytes=max_journal_bytes).max_caches)
    assert 1 <= limits.max_caches <= 1 << 24


def test_flags_over_environment_over_file_over_defaults(tmp_path: Path) -> None:
    file = toml(tmp_path, "workers = 2\nmax_batch_tokens = 3\nmax_batch_items = 4\ndrain_grace_s = 5\n")
    environ = {"QUIRE_MAX_BATCH_TOKENS": "30", "QUIRE_MAX_BATCH_ITEMS": "40", "PATH": "/bin"}
    config = load_config(parse("--config", file, "--max-batch-items", "400"), environ)
    assert config.workers == 2
    assert config.max_batch_tokens == 30
    assert config.max_batch_items == 400
    assert config.drain_grace_s == 5.0 and isinstance(config.drain_grace_s, float)
    assert config.max_request_bytes == Config().max_request_bytes


@pytest.mark.parametrize(
    ("flag", "value", "allowed"),
    [
        ("--workers", "0", "must be a whole number from 1 to 256, or auto"),
        ("--workers", "two", "must be a whole number from 1 to 256, or auto"),
        ("--workers", "1.5", "must be a whole number from 1 to 256, or auto"),
        ("--kv-pages", "-1", "must be a whole number from 1 to 1073741824, or auto"),
        ("--device", "tpu", "must be one of auto, cpu, cuda"),
        ("--dtype", "int8", "must be one of auto, bfloat16, float16, float32"),
        ("--drain-grace-s", "nan", "must be a number from 0 to 86400"),
        ("--drain-grace-s", "inf", "must be a number from 0 to 86400"),
        ("--max-request-bytes", "2147483648", "must be a whole number from 1024 to 2147483647"),
        ("--log-level", "INFO", "must be one of debug, info, warning, error"),
        ("--model", "/nowhere", f"it does not exist; {MODELS}"),
        ("--model", "/", f"it has no config.json; {MODELS}"),
        ("--model", "", f"it has no config.json; {MODELS}"),
        ("--model", "n" * 300, f"it cannot be read (File name too long); {MODELS}"),
        ("--tokens", "n" * 300, "must be a file"),
        ("--insecure", "maybe", "must be one of off, on"),
    ],
)
def test_a_bad_flag_is_refused_with_what_is_allowed(flag: str, value: str, allowed: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(parse(flag, value), {})
    error = caught.value
    assert (error.setting, error.source) == (flag[2:].replace("-", "_"), flag)
    assert (error.value, error.allowed) == (value, allowed)
    assert all(part in str(error) for part in (error.setting, flag, repr(value), allowed))


@pytest.mark.parametrize(
    "model",
    ["a", "a/", "/b", "a/b/c", "a/..", "../b", "./b", "a/b..c", "a--b/c", "a/b--c", "-a/b", "a/-b", "a/b-",
     "a/b.", "a/b.git", "a/b\n", "a/b c", "a\\b",
     "ä/b", "a/٣", "a/b?c", "a/b#c", "a/%2e", "~/b", "0/" + "n" * 95],
)  # fmt: skip
def test_what_might_mean_another_place_is_no_id(model: str) -> None:
    with pytest.raises(ConfigError, match=r"must be adder, storyteller, paged-attention, a directory"):
        load_config({"model": model}, {})


def test_a_directory_wins_over_an_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert is_hub_id("org/name")
    (tmp_path / "org" / "name").mkdir(parents=True)
    assert not is_hub_id("org/name")
    with pytest.raises(ConfigError, match=r"it has no config\.json"):
        load_config({"model": "org/name"}, {})
    (tmp_path / "org" / "name" / "config.json").touch()
    assert load_config({"model": "org/name"}, {}).model == "org/name"
    with pytest.raises(ConfigError, match=r"model_revision = 'main' .* is only for a model of the hub"):
        load_config({"model": "org/name", "model_revision": "main"}, {})


OF_OPENAIS_PORT = {
    "openai_logprobs_mode": "processed_logprobs",
    "openai_routed_experts": "npy",
    "openai_weight_transfer": "gloo",
}
# The setting that is refused is the first one of each.
UNFIT: list[tuple[dict[str, str], str]] = [
    ({"data_dir": "/x", "journal": "memory"}, "a journal in memory has no data directory"),
    ({"quantization": "q8_0", "model_backend": "transformers"}, "needs a model that native code runs"),
    ({"quantization": "q8_0", "model": "paged-attention"}, "needs a model that has weights"),
    ({"kv_cache_dtype": "int8", "device": "cuda"}, "needs device = cpu"),
    ({"kv_cache_dtype": "int8", "model": "paged-attention"}, "needs a model that has weights"),
    ({"kv_cache_dtype": "fp8"}, "must be one of auto, bfloat16, int8"),
    ({"tls_cert": "FILE"}, "needs tls_key too"),
    ({"tls_key": "FILE"}, "needs tls_cert too"),
    ({"tls_client_ca": "FILE"}, "needs tls_cert too"),
    *(({name: value}, "needs openai_listen$") for name, value in OF_OPENAIS_PORT.items()),
]


@pytest.mark.parametrize(("settings", "says"), UNFIT)
def test_settings_that_do_not_fit_together(tmp_path: Path, settings: dict[str, str], says: str) -> None:
    (tmp_path / "pem").touch()
    given = {name: value.replace("FILE", str(tmp_path / "pem")) for name, value in settings.items()}
    with pytest.raises(ConfigError, match=f"^{next(iter(given))} = .*{says}"):
        load_config(given, {})


def test_settings_that_fit_together() -> None:
    assert load_config({"journal": "memory", "data_dir": "auto"}, {}).data_dir is None
    load_config({"quantization": "q4_0"}, {})
    for other in ({"model_backend": "transformers"}, {"model": "paged-attention"}):
        load_config({"quantization": "none", **other}, {})
    load_config({"openai_listen": "127.0.0.1:0", **OF_OPENAIS_PORT}, {})


@pytest.mark.parametrize(
    "revision",
    ["", "..", "a/../b", "/a", "a/", "-a", "a//b", ".a", "a/.b", "a.", "a b", "a\n", "ä", "a" * 97],
)
def test_what_might_mean_another_place_is_no_revision(revision: str) -> None:
    with pytest.raises(ConfigError, match="must be the name of a commit, branch or tag"):
        load_config({"model": "a/b", "model_revision": revision}, {})


@pytest.mark.parametrize("value", ["'2'", "2.0", "true", "[1]", "{a = 1}", "2020-01-01"])
def test_a_wrong_type_in_the_file_is_refused(tmp_path: Path, value: str) -> None:
    file = toml(tmp_path, f"workers = {value}")
    with pytest.raises(ConfigError, match="a whole number from 1 to 256") as caught:
        load_config({"config": file}, {})
    assert (caught.value.setting, caught.value.source) == ("workers", file)


def test_unknown_names_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"did you mean workers\?$") as caught:
        load_config({"config": toml(tmp_path, "worker = 2")}, {})
    assert caught.value.setting == "worker"
    with pytest.raises(ConfigError, match="did you mean QUIRE_WORKERS") as caught:
        load_config({}, {"QUIRE_WORKER": "2"})
    assert caught.value.source == "the environment"
    for removed in ("max_model_len", "max_caches", "lease_s"):
        with pytest.raises(ConfigError, match="no such setting; `quire serve --help` lists them all"):
            load_config({"config": toml(tmp_path, f"{removed} = 1")}, {})
    with pytest.raises(ConfigError, match="`quire serve --help` lists them all"):
        load_config({}, {"QUIRE_PORT": "1"})
    with pytest.raises(ConfigError, match="no such setting"):
        load_config({"config": toml(tmp_path, "[server]\nworkers = 2")}, {})
    with pytest.raises(ConfigError, match="must be a number from 0 to 86400"):
        load_config({"config": toml(tmp_path, f"drain_grace_s = {10**400}")}, {})


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        load_config({"config": str(tmp_path / "missing.toml")}, {})
    with pytest.raises(ConfigError, match="must be a TOML file"):
        load_config({"config": toml(tmp_path, "workers 2")}, {})
    (tmp_path / "latin.toml").write_bytes(b'model = "\xe9"')
    with pytest.raises(ConfigError, match="must be a TOML file"):
        load_config({"config": str(tmp_path / "latin.toml")}, {})
    with pytest.raises(ConfigError, match="must be a TOML file"):
        load_config({"config": toml(tmp_path, f"workers = {'[' * 10_000}")}, {})
    with pytest.raises(ConfigError, match=r"a = '\{...\}' .* no such setting"):
        load_config({"config": toml(tmp_path, f"{'.'.join('a' * 2_000)} = 1")}, {})


@pytest.mark.parametrize("name", ["model", "data_dir", "tls_cert", "pool"])
def test_no_text_has_a_zero_byte(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config({"config": toml(tmp_path, f'{name} = "a\\u0000b"')}, {})
    assert caught.value.setting == name


@pytest.mark.parametrize(
    "address",
    ["", "localhost", ":50051", "localhost:", "localhost:65536", "localhost:-1", "::1:50051", "unix:relative",
     "unix:/" + "a" * 107, "localhost:٣", "..:1", "\u202e127.0.0.1:1"],
)  # fmt: skip
def test_bad_listen_addresses(address: str) -> None:
    with pytest.raises(ConfigError, match=r"host:port"):
        load_config(parse("--listen", address), {})


def test_an_adapter_is_told_what_to_do_with_it_instead(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").touch()
    said = "it is a LoRA adapter (PEFT): serve its base model, and load it with `quire adapters load`"
    with pytest.raises(ConfigError, match=re.escape(f"refused: {said}; must be adder")):
        load_config(parse("--model", str(tmp_path)), {})


def test_a_gguf_model_is_a_file_or_the_only_one_of_a_directory(tmp_path: Path) -> None:
    for name in ("model-Q4_K_M.gguf", "mmproj-model.gguf", "config.json"):
        (tmp_path / name).touch()
    for path in (tmp_path, tmp_path / "model-Q4_K_M.gguf"):
        assert load_config(parse("--model", str(path)), {}).model == str(path)
    (tmp_path / "model-Q8_0.gguf").touch()
    said = (
        "it must have one GGUF model, or be named with the file, and has model-Q4_K_M.gguf, model-Q8_0.gguf"
    )
    with pytest.raises(ConfigError, match=re.escape(said)):
        load_config(parse("--model", str(tmp_path)), {})
    second = tmp_path / "model-00002-of-00003.gguf"
    second.touch()
    with pytest.raises(ConfigError, match="is not the first file of a model"):
        load_config(parse("--model", str(second)), {})


@pytest.mark.parametrize("model", ["a/b:Q4_K_M", "a/b:UD-IQ2.x"])
def test_a_gguf_file_of_the_hub_has_a_name_behind_a_colon(model: str) -> None:
    assert load_config({"model": model, "model_revision": "main"}, {}).model == model
    for wrong in ("", "Q4 K", "../x", "a:b", "-x"):
        with pytest.raises(ConfigError, match="must be adder"):
            load_config({"model": f"a/b:{wrong}"}, {})


def test_help_tells_all_of_every_setting_in_groups() -> None:
    parser = argparse.ArgumentParser()
    add_flags(parser)
    text = parser.format_help()
    for name in all_settings():
        assert f"--{name.replace('_', '-')} " in text
        assert f"env QUIRE_{name.upper()})" in " ".join(text.split())
    _, options, *groups = text.split("\n\n")
    assert "--config" in options and "--model" not in options
    flags = {group.partition(":")[0]: re.findall(r"^  (--[\w-]+)", group, re.MULTILINE) for group in groups}
    assert flags["model"][:2] == ["--model", "--model-revision"] and "--dtype" in flags["model"]
    assert "--listen" in flags["addresses and access"] and "--data-dir" in flags["state on disk"]


@given(st.sampled_from([*all_settings()]), st.text(max_size=20))
def test_any_text_is_taken_or_refused_by_name(name: str, value: str) -> None:
    refused = None
    try:
        load_config({name: value}, {})
    except ConfigError as error:
        refused = error.setting
    assert refused in (None, name)


def test_a_workers_settings_are_the_gateways() -> None:
    """Each field of what it is started with is one of that name, but for what the pool or its host knows."""
    names = {field.name for field in worker_pb2.WorkerConfig.DESCRIPTOR.fields}
    others = {"worker_id", "device_index", "model_was_proved", "threads", "log_format"}
    assert names - others <= {field.name for field in dataclasses.fields(Config)}


@pytest.mark.parametrize("name", ["listen", "openai_listen"])
@pytest.mark.parametrize("address", ["0.0.0.0:1", "[::]:1", "10.0.0.1:1", "[2001:db8::1]:1", "example.org:1"])
def test_what_others_can_reach_needs_tls_or_a_word(name: str, address: str, tmp_path: Path) -> None:
    flag = f"--{name.replace('_', '-')}"
    with pytest.raises(ConfigError, match="clients need TLS") as caught:
        load_config(parse(flag, address), {})
    assert (caught.value.setting, caught.value.source) == (name, flag)
    file = tmp_path / "pem"
    file.touch()
    certificate = ("--tls-cert", str(file), "--tls-key", str(file))
    for word in (("--insecure",), ("--insecure", "on"), certificate):
        assert load_config(parse(flag, address, *word), {}).values()[name] == address
    assert load_config(parse(flag, address), {"QUIRE_INSECURE": "on"}).insecure == "on"


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://me:secret@host/quire",
        "postgres://me:se@cret/?#@host/quire",
        "postgresql://me@host/quire?sslmode=require&password=secret",
        "postgresql://me@host/quire?PASSWORD=x&%70assword=secret",
    ],
)
def test_a_password_in_the_address_of_the_journal_is_refused_and_never_shown(url: str) -> None:
    with pytest.raises(ConfigError, match="without a password") as refused:
        load_config(parse("--journal", url), {})
    assert "cret" not in str(refused.value) + str(refused.value.value)
