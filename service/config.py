"""The gateway's settings: declared once in `Config`, parsed once, then passed explicitly and never changed.

A setting comes from the first of these that names it: a flag (`--max-batch-tokens`), the environment
(`QUIRE_MAX_BATCH_TOKENS`), the TOML file named by `--config` (`max_batch_tokens`), the default. A field's
declaration below drives all of them, and the help text. A bad setting is refused with `ConfigError` wherever
it comes from: also in the file or the environment when a flag overrides it, because it waits for another day.

This module does not know what the settings do, and it reads no model.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import ipaddress
import math
import os
import re
import tomllib
import types
import typing
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

ENV_PREFIX = "QUIRE_"
SHIPPED_MODEL = "adder"
WEIGHTLESS_MODEL = "paged-attention"

# Environment names with the prefix that are not settings: the file, the target of the other commands, and
# what workers read themselves (kernels/cpu/library.py).
_OTHER_ENV = (
    "QUIRE_CONFIG", "QUIRE_TARGET", "QUIRE_TOKEN", "QUIRE_CA", "QUIRE_CERT", "QUIRE_KEY", "QUIRE_CPU_ISA",
)  # fmt: skip
_AUTO = "auto"
_DTYPES = (_AUTO, "bfloat16", "float16", "float32")
_KIB, _MIB = 1 << 10, 1 << 20
# A gRPC message's size is a signed 32-bit number.
_MAX_MESSAGE_BYTES = (1 << 31) - 1
# Longest path of a Unix socket on Linux, without the final zero.
_MAX_SOCKET_PATH_BYTES = 107
# As the hub has them, and nothing that means another place in a path.
_HUB_ID = re.compile(r"(?!.*(?:--|\.\.|\.git$))[A-Za-z0-9][\w.-]*/[A-Za-z0-9](?:[\w.-]*\w)?", re.ASCII)
_REVISION = re.compile(r"(?!.*(?:\.\.|//|/\.))\w[\w./-]*[\w-]|\w", re.ASCII)
_MAX_HUB_ID = 96
_DAY_S = 86_400
_YEAR_S = 365 * _DAY_S


class ConfigError(Exception):
    """A setting that cannot be used: says which, where it came from, its value, and what is allowed."""

    def __init__(self, setting: str, source: str, value: object, allowed: str) -> None:
        super().__init__(f"{setting} = {value!r} (from {source}) is refused: {allowed}")
        self.setting = setting
        self.source = source
        self.value = value
        self.allowed = allowed


@dataclasses.dataclass(frozen=True, slots=True)
class _Rule:
    """What a field's declaration says beside its type and default."""

    help: str
    # Where the help lists it, and those that follow it up to the next with a group.
    group: str = ""
    # For numbers: both ends are allowed. A NaN lies outside.
    minimum: float = -math.inf
    maximum: float = math.inf
    choices: tuple[str, ...] = ()
    # For strings: whether a value can be used, and in words what can.
    accepts: Callable[[str], bool] | None = None
    allowed: str = ""
    # What is the matter with one that cannot, where more can be said than what can.
    why_not: Callable[[Any], str] | None = None


def _setting(default: Any, help_text: str, **rule: Any) -> Any:
    return dataclasses.field(default=default, metadata={"rule": _Rule(help_text, **rule)})


def is_hub_id(model: str) -> bool:
    """Whether it names a model of the Hugging Face hub, and not a directory here."""
    return len(model) <= _MAX_HUB_ID and bool(_HUB_ID.fullmatch(model)) and not _is_there(model)


def _is_model(value: str) -> bool:
    shipped = value in (SHIPPED_MODEL, WEIGHTLESS_MODEL)
    return shipped or _is_file(str(Path(value) / "config.json")) or is_hub_id(value)


def _why_no_model(value: str) -> str:
    matter = "it does not exist"
    try:
        if _is_there(value):
            path = Path(value)
            names = [file.name for file in path.iterdir()] if path.is_dir() else [value]
            matter = other_format(names) or "it has no config.json"
    except OSError as error:
        matter = f"it cannot be looked into ({error.strerror})"
    return f"{matter}; must be {_MODELS}"


def other_format(names: Collection[str]) -> str:
    """What files are that hold no model for us, and what to give instead; "" where they are not known."""
    if "adapter_config.json" in names:
        return (
            "it is a LoRA adapter (PEFT): merge it into its base model and give the directory of the result"
        )
    if any(name.lower().endswith(".gguf") for name in names):
        return "it is GGUF, for llama.cpp: give the model that it was made from, as safetensors"
    return ""


def _is_there(path: str) -> bool:
    """Whether something has that name, or may have: what cannot be looked at counts as there."""
    try:
        Path(path).stat()
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return False
    except OSError:
        return True
    return True


def _is_file(value: str) -> bool:
    # The method of Path raises where a directory on the way cannot be looked into.
    return not value or os.path.isfile(value)  # noqa: PTH113


def is_private(listen: str) -> bool:
    """Whether only this machine can reach the address. A name but localhost may be anywhere."""
    host = listen.rpartition(":")[0].strip("[]")
    try:
        return listen.startswith("unix:") or host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _is_listen_address(value: str) -> bool:
    if value.startswith("unix:"):
        path = value.removeprefix("unix:")
        return path.startswith("/") and len(path.encode()) <= _MAX_SOCKET_PATH_BYTES
    host, colon, port = value.rpartition(":")
    if not colon or not host or not (port.isascii() and port.isdigit()) or int(port) > 65_535:
        return False
    # A bare IPv6 address has colons of its own, so it needs brackets.
    return ":" not in host or (host.startswith("[") and host.endswith("]"))


def _is_http_address(value: str) -> bool:
    return not value or (_is_listen_address(value) and not value.startswith("unix:"))


def _is_revision(value: str) -> bool:
    return len(value) <= _MAX_HUB_ID and bool(_REVISION.fullmatch(value))


_FILE: Any = {"accepts": _is_file, "allowed": "must be a file"}
_MODELS = (
    f"{SHIPPED_MODEL}, {WEIGHTLESS_MODEL}, a directory that holds config.json,"
    " or ORG/NAME on the Hugging Face hub"
)
_SWITCH: Any = {"choices": ("off", "on")}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Every setting of `quire serve`. Build it with `load_config`, which checks; units are in the names."""

    model: str = _setting(
        SHIPPED_MODEL,
        "the model to serve: the shipped adder, the weightless paged-attention, a Hugging Face directory, or"
        " ORG/NAME on the Hugging Face hub, which is taken from the local cache or downloaded",
        accepts=_is_model,
        allowed=f"must be {_MODELS}",
        why_not=_why_no_model,
        group="model",
    )
    model_revision: str | None = _setting(
        None,
        "commit, branch or tag of a model of the hub; auto is its main branch",
        accepts=_is_revision,
        allowed=f"must be the name of a commit, branch or tag, or {_AUTO}",
    )
    model_download: str = _setting(
        "on", "whether a model of the hub that is not in the local cache is downloaded", **_SWITCH
    )
    dtype: str = _setting(_AUTO, "format of weights and KV; auto takes the model's", choices=_DTYPES)
    model_backend: str = _setting(
        _AUTO,
        "whose code computes the model: this server's own, or the transformers library's over the same pages;"
        " auto takes native where it understands all of the config",
        choices=(_AUTO, "native", "transformers"),
    )
    no_self_check: str = _setting(
        "off",
        "serve a model without comparing it with the transformers library's plain forward",
        **_SWITCH,
    )
    runtimes: str = _setting("", "TOML file of further runtimes, such as providers, and of routing", **_FILE)
    listen: str = _setting(
        "127.0.0.1:50051",
        "the address to serve on; port 0 takes a free port",
        accepts=_is_listen_address,
        allowed=f"must be host:port, [ipv6]:port, or unix:/path of at most {_MAX_SOCKET_PATH_BYTES} bytes",
        group="addresses and access",
    )
    openai_listen: str = _setting(
        "",
        "also serve OpenAI's API over HTTP on this address; port 0 takes a free port",
        accepts=_is_http_address,
        allowed="must be host:port or [ipv6]:port",
    )
    insecure: str = _setting(
        "off", "listen beyond this machine without TLS: whoever is on the way reads and writes all", **_SWITCH
    )
    tls_cert: str = _setting("", "PEM file of the server's certificate and its chain; turns TLS on", **_FILE)
    tls_key: str = _setting("", "PEM file of the certificate's key", **_FILE)
    tls_client_ca: str = _setting(
        "", "PEM file of CAs; only clients with a certificate of theirs may connect", **_FILE
    )
    tokens: str = _setting("", "TOML file of bearer tokens and tenants, see `quire token`", **_FILE)
    reflection: str = _setting("on", "whether the server describes its calls to clients", **_SWITCH)
    workers: int = _setting(
        1,
        "worker processes; sequences are spread over them, each holds the weights",
        minimum=1,
        maximum=256,
        group="workers and their memory",
    )
    threads_per_worker: int | None = _setting(
        None, "compute threads in each worker on the CPU; auto is cores / workers", minimum=1, maximum=4096
    )
    device: str = _setting(
        _AUTO, "where workers compute; auto takes a GPU if there is one", choices=(_AUTO, "cpu", "cuda")
    )
    kv_pages: int | None = _setting(
        None, "KV pages of 16 tokens in each worker; auto fits them to memory", minimum=1, maximum=1 << 30
    )
    gpu_memory_utilization: float = _setting(
        0.9,
        "share of a GPU's memory that may be taken in all, which sizes its KV pages",
        minimum=0.05,
        maximum=1,
    )
    cuda_graphs: str = _setting(
        _AUTO,
        "CUDA graphs for decode steps on a GPU; off launches every kernel, as where capturing failed",
        choices=(_AUTO, "off"),
    )
    max_batch_tokens: int = _setting(
        512,
        "most tokens in one step of a worker; longer prompts run in chunks",
        minimum=1,
        maximum=1 << 20,
        group="steps",
    )
    max_mixed_prefill_tokens: int | None = _setting(
        None,
        "most prompt tokens in a step that also decodes; by default, what makes it twice as long",
        minimum=1,
        maximum=1 << 20,
    )
    max_batch_items: int = _setting(256, "most items in one step of a worker", minimum=1, maximum=65_536)
    max_queued_operations: int = _setting(
        4096,
        "operations that may wait or run before calls are refused",
        minimum=1,
        maximum=1 << 24,
        group="limits",
    )
    max_wait_s: float = _setting(
        300.0,
        "a call that would wait longer for its turn, or has, is refused, whatever its deadline",
        minimum=0.01,
        maximum=_DAY_S,
    )
    default_lease_s: float = _setting(
        1800.0, "how long an unused cache lives if its caller does not say", minimum=1, maximum=_YEAR_S
    )
    max_lease_s: float = _setting(
        float(_DAY_S), "longest lease a caller may ask for", minimum=1, maximum=_YEAR_S
    )
    max_request_bytes: int = _setting(
        16 * _MIB, "largest request accepted", minimum=_KIB, maximum=_MAX_MESSAGE_BYTES
    )
    max_response_bytes: int = _setting(
        64 * _MIB, "largest response sent", minimum=_KIB, maximum=_MAX_MESSAGE_BYTES
    )
    max_session_calls: int = _setting(
        1024,
        "calls of one session that may be unanswered before it is not read further",
        minimum=1,
        maximum=1 << 20,
    )
    max_calls_per_message: int = _setting(
        4096, "calls in one message of a session", minimum=1, maximum=1 << 20
    )
    max_items_per_call: int = _setting(1024, "items in one batch", minimum=1, maximum=1 << 20)
    max_caches: int = _setting(65_536, "caches in all", minimum=1, maximum=1 << 24)
    max_journal_bytes: int = _setting(
        256 * _MIB,
        "what is remembered of all caches: 4 bytes a token, which forks share, and 664 a cache",
        minimum=_KIB,
        maximum=1 << 50,
    )
    max_unread_bytes: int = _setting(
        512 * _MIB,
        "answers of all calls that are computed, or not yet read",
        minimum=_KIB,
        maximum=1 << 50,
    )
    max_arriving_bytes: int = _setting(
        256 * _MIB,
        "requests that are slow to arrive, of all callers; each counts as max_request_bytes. Over HTTP also"
        " the bodies of all requests that are not answered, of which a tenant may have half",
        minimum=_KIB,
        maximum=1 << 50,
    )
    message_timeout_s: float = _setting(
        30.0,
        "how long a request may take to arrive; and how long a new connection may take to speak gRPC",
        minimum=0.1,
        maximum=_DAY_S,
    )
    max_sessions: int = _setting(
        1024, "sessions, and other streams of requests, that may be open at once", minimum=1, maximum=1 << 20
    )
    max_executions: int = _setting(
        4096,
        "executions under way or being read, of all callers; as many that have ended may be kept beside",
        minimum=1,
        maximum=1 << 20,
    )
    max_connections: int = _setting(
        4096,
        "connections at once, the newest beyond are hung up on; not bounded where there is no /proc",
        minimum=1,
        maximum=1 << 20,
    )
    session_stall_s: float = _setting(
        30.0, "a session whose caller reads no answer for longer is ended", minimum=0.1, maximum=_DAY_S
    )
    drain_grace_s: float = _setting(
        30.0,
        "how long a stopping server lets calls in flight finish",
        minimum=0,
        maximum=_DAY_S,
        group="stopping",
    )
    lame_duck_s: float = _setting(
        0.0,
        "how long a stopping server still takes calls after health says NOT_SERVING",
        minimum=0,
        maximum=_DAY_S,
    )
    worker_start_timeout_s: float = _setting(
        600.0,
        "how long a worker may take to load and run its first forward",
        minimum=1,
        maximum=_DAY_S,
        group="worker health",
    )
    suspect_after_s: float = _setting(
        0.5,
        "a worker that is silent for longer gets no new sequences while another is there",
        minimum=0.02,
        maximum=_DAY_S,
    )
    heartbeat_timeout_s: float = _setting(
        10.0, "a worker that is silent for longer is killed and replaced", minimum=0.1, maximum=_DAY_S
    )
    step_timeout_s: float = _setting(
        60.0,
        "a worker whose step takes longer, and 20 times what such a step should, is killed and replaced",
        minimum=0.1,
        maximum=_DAY_S,
    )
    journal: str = _setting(
        _AUTO,
        "where caches are written down; auto is sqlite, in the data directory, if there is one",
        choices=(_AUTO, "sqlite", "memory"),
        group="state on disk",
    )
    journal_sync: str = _setting(
        "normal",
        "what an answer waits for: normal outlives a crash of the gateway, full that of the machine",
        choices=("normal", "full"),
    )
    orphan_grace_s: float = _setting(
        60.0,
        "how long workers outlive a gateway that was killed, so that the next one with this data_dir and"
        " these settings has them as they are; 0 ends them with it",
        minimum=0,
        maximum=_DAY_S,
    )
    data_dir: str | None = _setting(
        None,
        "where caches are written down, and workers found again; auto is a directory for each address and"
        " model in the user's state directory, and none for a port that is chosen anew each time",
        accepts=bool,
        allowed=f"must be a directory, or {_AUTO}",
    )
    log_level: str = _setting(
        "info",
        "least severe record that is logged",
        choices=("debug", "info", "warning", "error"),
        group="log",
    )
    log_format: str = _setting(
        _AUTO, "form of the log; auto is pretty on a terminal", choices=(_AUTO, "json", "pretty")
    )


@dataclasses.dataclass(frozen=True, slots=True)
class _Setting:
    """One field of Config, ready to be parsed."""

    name: str
    kind: type
    optional: bool
    default: object
    rule: _Rule

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def env(self) -> str:
        return ENV_PREFIX + self.name.upper()

    @property
    def allowed(self) -> str:
        """In words, what values can be used."""
        if self.rule.choices:
            return "must be one of " + ", ".join(self.rule.choices)
        if self.kind is str:
            return self.rule.allowed
        number = "a whole number" if self.kind is int else "a number"
        or_auto = f", or {_AUTO}" if self.optional else ""
        return f"must be {number} from {self.rule.minimum:.12g} to {self.rule.maximum:.12g}{or_auto}"

    def parse(self, value: object, source: str, *, text: bool) -> Any:
        """Converts and checks one value; `text`: it is a string because its source has nothing else."""
        if self.optional and value == _AUTO:
            return None
        try:
            parsed = self._convert(value, text=text)
        except (TypeError, ValueError):
            raise ConfigError(self.name, source, value, self.allowed) from None
        if not self._accepts(parsed):
            why_not = self.rule.why_not
            allowed = why_not(parsed) if why_not is not None else self.allowed
            raise ConfigError(self.name, source, value, allowed)
        return parsed

    def _convert(self, value: object, *, text: bool) -> str | float:
        if text and self.kind is not str:
            return typing.cast(float, self.kind(value))
        accepted = (int, float) if self.kind is float else (self.kind,)
        # A bool is an int to Python, but `workers = true` is a mistake.
        if isinstance(value, bool) or not isinstance(value, accepted):
            raise TypeError
        return typing.cast(str | float, self.kind(value))

    def _accepts(self, value: str | float) -> bool:
        rule = self.rule
        if not isinstance(value, str):
            return rule.minimum <= value <= rule.maximum
        if rule.choices:
            return value in rule.choices
        return rule.accepts is None or rule.accepts(value)


def _settings() -> dict[str, _Setting]:
    hints = typing.get_type_hints(Config)
    found = {}
    for field in dataclasses.fields(Config):
        optional = isinstance(hints[field.name], types.UnionType)
        kind = typing.get_args(hints[field.name])[0] if optional else hints[field.name]
        found[field.name] = _Setting(field.name, kind, optional, field.default, field.metadata["rule"])
    return found


_SETTINGS: Mapping[str, _Setting] = _settings()


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds `--config` and a flag for each setting. Values stay strings: `load_config` checks them."""
    parser.add_argument("--config", metavar="FILE", help="TOML file of settings (env QUIRE_CONFIG)")
    add = parser.add_argument
    for setting in _SETTINGS.values():
        if setting.rule.group:
            add = parser.add_argument_group(setting.rule.group).add_argument
        default = _AUTO if setting.default is None else f"{setting.default}" or "none"
        # A switch without a value is switched on.
        bare: Any = {"nargs": "?", "const": "on"} if setting.rule.choices == _SWITCH["choices"] else {}
        add(
            setting.flag,
            **bare,
            metavar="|".join(setting.rule.choices) or setting.kind.__name__.upper(),
            help=f"{setting.rule.help} ({setting.allowed}; default {default}; env {setting.env})",
        )


def load_config(flags: Mapping[str, Any], environ: Mapping[str, str]) -> Config:
    """Merges flags over environment over file over defaults.

    `flags` maps field names to strings, as `vars()` of a namespace made by `add_flags` does (None: not given;
    names that are not settings are passed over). Raises ConfigError for the first bad setting.
    """
    path = flags.get("config") or environ.get("QUIRE_CONFIG")
    values: dict[str, tuple[Any, str]] = {}
    if path:
        values.update(_from_file(Path(path)))
    values.update(_from_environment(environ))
    for name, value in flags.items():
        setting = _SETTINGS.get(name)
        if setting is not None and value is not None:
            values[name] = setting.parse(value, setting.flag, text=True), setting.flag
    config = Config(**{name: value for name, (value, _) in values.items()})
    if config.default_lease_s > config.max_lease_s:
        _, source = values.get("default_lease_s", values.get("max_lease_s", (None, "default")))
        allowed = f"must be at most max_lease_s, which is {config.max_lease_s:.12g}"
        raise ConfigError("default_lease_s", source, config.default_lease_s, allowed)
    if config.model_revision is not None and not is_hub_id(config.model):
        _, source = values["model_revision"]
        raise ConfigError(
            "model_revision", source, config.model_revision, "goes with a model of the hub only"
        )
    _check_doors(config, {name: source for name, (_, source) in values.items()})
    return config


def _check_doors(config: Config, sources: Mapping[str, str]) -> None:
    """Raises ConfigError for TLS by halves, and for an address that all can reach and none is kept from."""
    for name, other in (("tls_cert", "tls_key"), ("tls_key", "tls_cert"), ("tls_client_ca", "tls_cert")):
        value = getattr(config, name)
        if value and not getattr(config, other):
            raise ConfigError(name, sources[name], value, f"needs {other} beside it")
    for name in ("listen", "openai_listen"):
        value = getattr(config, name)
        if value and not (is_private(value) or config.tls_cert or config.insecure == "on"):
            allowed = "beyond this machine TLS is needed (tls_cert and tls_key), or insecure = on"
            raise ConfigError(name, sources.get(name, "default"), value, allowed)


def _from_file(path: Path) -> dict[str, tuple[Any, str]]:
    source = str(path)
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError("config", "--config or QUIRE_CONFIG", source, f"{error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError("config", source, source, f"must be a TOML file: {error}") from None
    values = {}
    for name, value in content.items():
        setting = _SETTINGS.get(name)
        if setting is None:
            raise ConfigError(name, source, value, _unknown(name, list(_SETTINGS)))
        values[name] = setting.parse(value, source, text=False), source
    return values


def _from_environment(environ: Mapping[str, str]) -> dict[str, tuple[Any, str]]:
    by_env = {setting.env: setting for setting in _SETTINGS.values()}
    values = {}
    for name, value in environ.items():
        if not name.startswith(ENV_PREFIX) or name in _OTHER_ENV:
            continue
        setting = by_env.get(name)
        if setting is None:
            raise ConfigError(name, "the environment", value, _unknown(name, [*by_env, *_OTHER_ENV]))
        values[setting.name] = setting.parse(value, name, text=True), name
    return values


def _unknown(name: str, known: list[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {close[0]}?" if close else f"the settings are {', '.join(known)}"
    return f"there is no such setting; {hint}"
