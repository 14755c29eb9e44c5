"""The gateway's settings: declared once in `Config`, parsed once, then passed explicitly and never changed.

The value of a setting comes from the first of these that has it: a flag (`--max-batch-tokens`), the
environment (`QUIRE_MAX_BATCH_TOKENS`), the TOML file given by `--config` (`max_batch_tokens`), the default.
The declaration of a field below defines all of them, and the help text. A bad setting is refused with
`ConfigError`, also in a file or the environment when a flag overrides it, because it would fail later.

This module does not use the settings, and it reads no model.
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

# Environment variables with the prefix that are not settings: the file, those of the client commands, and
# those that workers read themselves (kernels/cpu/library.py).
_OTHER_ENV = (
    "QUIRE_CONFIG", "QUIRE_TARGET", "QUIRE_TOKEN", "QUIRE_CA", "QUIRE_CERT", "QUIRE_KEY", "QUIRE_CPU_ISA",
)  # fmt: skip
_AUTO = "auto"
_DTYPES = (_AUTO, "bfloat16", "float16", "float32")
_KIB, _MIB = 1 << 10, 1 << 20
# The size of a gRPC message is a signed 32-bit number.
_MAX_MESSAGE_BYTES = (1 << 31) - 1
# Longest path of a Unix socket on Linux, without the final zero.
_MAX_SOCKET_PATH_BYTES = 107
# The ids that the hub allows. None of them leads elsewhere when used in a path.
_HUB_ID = re.compile(r"(?!.*(?:--|\.\.|\.git$))[A-Za-z0-9][\w.-]*/[A-Za-z0-9](?:[\w.-]*\w)?", re.ASCII)
_REVISION = re.compile(r"(?!.*(?:\.\.|//|/\.))\w[\w./-]*[\w-]|\w", re.ASCII)
_MAX_HUB_ID = 96
_DAY_S = 86_400
_YEAR_S = 365 * _DAY_S


class ConfigError(Exception):
    """An invalid setting: its name, its source, its value, and the allowed values."""

    def __init__(self, setting: str, source: str, value: object, allowed: str) -> None:
        super().__init__(f"{setting} = {value!r} (from {source}) is refused: {allowed}")
        self.setting = setting
        self.source = source
        self.value = value
        self.allowed = allowed


@dataclasses.dataclass(frozen=True, slots=True)
class _Rule:
    """The parts of a field's declaration beside its type and default."""

    help: str
    # In the help: the group of this setting and of those after it, up to the next with a group.
    group: str = ""
    # The range of a number, inclusive. NaN is not in it.
    minimum: float = -math.inf
    maximum: float = math.inf
    choices: tuple[str, ...] = ()
    # For strings: whether a value is valid, and the valid values in words.
    accepts: Callable[[str], bool] | None = None
    allowed: str = ""
    # Describes the problem of an invalid value, if more can be said than `allowed`.
    problem: Callable[[Any], str] | None = None


def _setting(default: Any, help_text: str, **rule: Any) -> Any:
    return dataclasses.field(default=default, metadata={"rule": _Rule(help_text, **rule)})


def is_hub_id(model: str) -> bool:
    """Whether it names a model on the Hugging Face hub, not a local directory."""
    return len(model) <= _MAX_HUB_ID and bool(_HUB_ID.fullmatch(model)) and not _may_exist(model)


def _is_model(value: str) -> bool:
    shipped = value in (SHIPPED_MODEL, WEIGHTLESS_MODEL)
    return shipped or _is_file(str(Path(value) / "config.json")) or is_hub_id(value)


def _model_problem(value: str) -> str:
    problem = "it does not exist"
    try:
        if _may_exist(value):
            path = Path(value)
            names = [file.name for file in path.iterdir()] if path.is_dir() else [value]
            problem = other_format(names) or "it has no config.json"
    except OSError as error:
        problem = f"it cannot be read ({error.strerror})"
    return f"{problem}; must be {_MODELS}"


def other_format(names: Collection[str]) -> str:
    """Names the format of model files that cannot be served, and what to use instead; "" if it is unknown."""
    if "adapter_config.json" in names:
        return "it is a LoRA adapter (PEFT): merge it into its base model and use the directory of the result"
    if any(name.lower().endswith(".gguf") for name in names):
        return "it is in GGUF format, for llama.cpp: use the original model in safetensors format"
    return ""


def _may_exist(path: str) -> bool:
    """Whether the path exists. True if that cannot be determined."""
    try:
        Path(path).stat()
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return False
    except OSError:
        return True
    return True


def _is_file(value: str) -> bool:
    # Path.is_file raises if a directory of the path cannot be read.
    return not value or os.path.isfile(value)  # noqa: PTH113


def is_private(listen: str) -> bool:
    """Whether only this machine can reach the address. Any host name but localhost may be remote."""
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
    # An IPv6 address contains colons, so it needs brackets.
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
    """Every setting of `quire serve`. Units are in the names. `load_config` builds and checks it."""

    model: str = _setting(
        SHIPPED_MODEL,
        "the model to serve: adder (shipped), paged-attention (without weights), a Hugging Face model"
        " directory, or ORG/NAME on the Hugging Face hub, from the local cache or downloaded",
        accepts=_is_model,
        allowed=f"must be {_MODELS}",
        problem=_model_problem,
        group="model",
    )
    model_revision: str | None = _setting(
        None,
        "commit, branch or tag of a model on the hub; auto is its main branch",
        accepts=_is_revision,
        allowed=f"must be the name of a commit, branch or tag, or {_AUTO}",
    )
    model_download: str = _setting(
        "on", "download a model of the hub if it is not in the local cache", **_SWITCH
    )
    dtype: str = _setting(_AUTO, "data type of weights and KV cache; auto is the model's", choices=_DTYPES)
    model_backend: str = _setting(
        _AUTO,
        "implementation of the model: native, or the transformers library with this server's paged KV cache;"
        " auto is native if it supports everything in the model's config",
        choices=(_AUTO, "native", "transformers"),
    )
    no_self_check: str = _setting(
        "off",
        "skip the comparison of the model with the transformers library at start",
        **_SWITCH,
    )
    runtimes: str = _setting("", "TOML file of routing and further runtimes, such as providers", **_FILE)
    listen: str = _setting(
        "127.0.0.1:50051",
        "the address to listen on; port 0 is a free port",
        accepts=_is_listen_address,
        allowed=f"must be host:port, [ipv6]:port, or unix:/path of at most {_MAX_SOCKET_PATH_BYTES} bytes",
        group="addresses and access",
    )
    openai_listen: str = _setting(
        "",
        "also serve OpenAI's API over HTTP on this address; port 0 is a free port",
        accepts=_is_http_address,
        allowed="must be host:port or [ipv6]:port",
    )
    insecure: str = _setting(
        "off", "allow remote clients without TLS: the network can read and change all traffic", **_SWITCH
    )
    tls_cert: str = _setting("", "PEM file of the server's certificate and its chain; enables TLS", **_FILE)
    tls_key: str = _setting("", "PEM file of the certificate's key", **_FILE)
    tls_client_ca: str = _setting(
        "", "PEM file of CAs; clients must have a certificate that one of them signed", **_FILE
    )
    tokens: str = _setting("", "TOML file of bearer tokens and tenants, see `quire token`", **_FILE)
    reflection: str = _setting("on", "offer gRPC server reflection", **_SWITCH)
    workers: int = _setting(
        1,
        "number of worker processes; each loads the weights and serves a part of the sequences",
        minimum=1,
        maximum=256,
        group="workers and their memory",
    )
    threads_per_worker: int | None = _setting(
        None, "compute threads in each worker on the CPU; auto is cores / workers", minimum=1, maximum=4096
    )
    device: str = _setting(
        _AUTO, "device of the workers; auto is a GPU if there is one", choices=(_AUTO, "cpu", "cuda")
    )
    kv_pages: int | None = _setting(
        None, "KV pages of 16 tokens in each worker; auto depends on memory", minimum=1, maximum=1 << 30
    )
    gpu_memory_utilization: float = _setting(
        0.9,
        "fraction of a GPU's memory to use in total; it determines the number of KV pages",
        minimum=0.05,
        maximum=1,
    )
    cuda_graphs: str = _setting(
        _AUTO,
        "CUDA graphs for decode steps on a GPU; off launches every kernel separately",
        choices=(_AUTO, "off"),
    )
    max_batch_tokens: int = _setting(
        512,
        "maximum tokens in one step of a worker; longer prompts are split into chunks",
        minimum=1,
        maximum=1 << 20,
        group="steps",
    )
    max_mixed_prefill_tokens: int | None = _setting(
        None,
        "maximum prompt tokens in a step that also decodes; auto is as many as double the step's time",
        minimum=1,
        maximum=1 << 20,
    )
    max_batch_items: int = _setting(256, "maximum items in one step of a worker", minimum=1, maximum=65_536)
    max_queued_operations: int = _setting(
        4096,
        "maximum operations that wait or run; further calls are refused",
        minimum=1,
        maximum=1 << 24,
        group="limits",
    )
    max_wait_s: float = _setting(
        300.0,
        "maximum time in the queue; calls that would wait longer, or have, are refused",
        minimum=0.01,
        maximum=_DAY_S,
    )
    default_lease_s: float = _setting(
        1800.0, "lease of a cache if the call does not give one", minimum=1, maximum=_YEAR_S
    )
    max_lease_s: float = _setting(float(_DAY_S), "longest lease of a cache", minimum=1, maximum=_YEAR_S)
    max_request_bytes: int = _setting(
        16 * _MIB, "maximum size of a request", minimum=_KIB, maximum=_MAX_MESSAGE_BYTES
    )
    max_response_bytes: int = _setting(
        64 * _MIB, "maximum size of a response", minimum=_KIB, maximum=_MAX_MESSAGE_BYTES
    )
    max_session_calls: int = _setting(
        1024,
        "maximum unanswered calls of one Session; the server then stops reading from it",
        minimum=1,
        maximum=1 << 20,
    )
    max_calls_per_message: int = _setting(
        4096, "maximum calls in one message of a Session", minimum=1, maximum=1 << 20
    )
    max_items_per_call: int = _setting(1024, "maximum items in one batch", minimum=1, maximum=1 << 20)
    max_caches: int = _setting(65_536, "maximum caches in total", minimum=1, maximum=1 << 24)
    max_journal_bytes: int = _setting(
        256 * _MIB,
        "maximum size of the journal's contents: 4 bytes per token, which forks share, and 664 per cache",
        minimum=_KIB,
        maximum=1 << 50,
    )
    max_unread_bytes: int = _setting(
        512 * _MIB,
        "maximum size of all answers that are being computed or not yet read",
        minimum=_KIB,
        maximum=1 << 50,
    )
    max_arriving_bytes: int = _setting(
        256 * _MIB,
        "maximum size of all requests that are slow to arrive, where each counts as max_request_bytes; over"
        " HTTP also of the bodies of all unanswered requests, half of it per tenant",
        minimum=_KIB,
        maximum=1 << 50,
    )
    message_timeout_s: float = _setting(
        30.0,
        "timeout for a request to arrive, and for the handshake of a new connection",
        minimum=0.1,
        maximum=_DAY_S,
    )
    max_sessions: int = _setting(
        1024, "maximum open Sessions and other request streams", minimum=1, maximum=1 << 20
    )
    max_executions: int = _setting(
        4096,
        "maximum executions that run or are being read; as many finished ones may be stored besides",
        minimum=1,
        maximum=1 << 20,
    )
    max_connections: int = _setting(
        4096,
        "maximum gRPC connections, and as many over HTTP; further ones are closed",
        minimum=1,
        maximum=1 << 20,
    )
    session_stall_s: float = _setting(
        30.0, "end a Session whose client reads no answer for this time", minimum=0.1, maximum=_DAY_S
    )
    drain_grace_s: float = _setting(
        30.0,
        "how long a stopping server waits for calls in flight",
        minimum=0,
        maximum=_DAY_S,
        group="stopping",
    )
    lame_duck_s: float = _setting(
        0.0,
        "how long a stopping server still accepts calls after health checks return NOT_SERVING",
        minimum=0,
        maximum=_DAY_S,
    )
    worker_start_timeout_s: float = _setting(
        600.0,
        "timeout for a worker to load the model and run its first forward",
        minimum=1,
        maximum=_DAY_S,
        group="worker health",
    )
    suspect_after_s: float = _setting(
        0.5,
        "a worker that sends nothing for this time gets no new sequences if there is another one",
        minimum=0.02,
        maximum=_DAY_S,
    )
    heartbeat_timeout_s: float = _setting(
        10.0, "a worker that sends nothing for this time is killed and replaced", minimum=0.1, maximum=_DAY_S
    )
    step_timeout_s: float = _setting(
        60.0,
        "a worker is killed and replaced if a step takes longer than this and 20 times the expected time",
        minimum=0.1,
        maximum=_DAY_S,
    )
    journal: str = _setting(
        _AUTO,
        "storage of the journal of caches; auto is sqlite in data_dir if there is one, else memory",
        choices=(_AUTO, "sqlite", "memory"),
        group="state on disk",
    )
    journal_sync: str = _setting(
        "normal",
        "durability of an answer: normal survives a crash of the gateway, full also one of the machine",
        choices=("normal", "full"),
    )
    orphan_grace_s: float = _setting(
        60.0,
        "how long workers keep running after the gateway was killed, for the next one with the same data_dir"
        " and settings to adopt; with 0 they end with the gateway",
        minimum=0,
        maximum=_DAY_S,
    )
    data_dir: str | None = _setting(
        None,
        "directory for the journal and for the adoption of workers; auto is one for each address and model in"
        " the user's state directory, and none with port 0",
        accepts=bool,
        allowed=f"must be a directory, or {_AUTO}",
    )
    log_level: str = _setting(
        "info",
        "minimum level of log records",
        choices=("debug", "info", "warning", "error"),
        group="log",
    )
    log_format: str = _setting(
        _AUTO, "format of the log; auto is pretty on a terminal, else json", choices=(_AUTO, "json", "pretty")
    )


@dataclasses.dataclass(frozen=True, slots=True)
class _Setting:
    """One field of Config, with what is needed to parse it."""

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
        """The valid values, in words."""
        if self.rule.choices:
            return "must be one of " + ", ".join(self.rule.choices)
        if self.kind is str:
            return self.rule.allowed
        number = "a whole number" if self.kind is int else "a number"
        or_auto = f", or {_AUTO}" if self.optional else ""
        return f"must be {number} from {self.rule.minimum:.12g} to {self.rule.maximum:.12g}{or_auto}"

    def parse(self, value: object, source: str, *, text: bool) -> Any:
        """Converts and checks one value. `text`: the source has only strings, so numbers are parsed."""
        if self.optional and value == _AUTO:
            return None
        try:
            parsed = self._convert(value, text=text)
        except (TypeError, ValueError):
            raise ConfigError(self.name, source, value, self.allowed) from None
        if not self._accepts(parsed):
            problem = self.rule.problem
            allowed = problem(parsed) if problem is not None else self.allowed
            raise ConfigError(self.name, source, value, allowed)
        return parsed

    def _convert(self, value: object, *, text: bool) -> str | float:
        if text and self.kind is not str:
            return typing.cast(float, self.kind(value))
        accepted = (int, float) if self.kind is float else (self.kind,)
        # In Python a bool is an int, but `workers = true` is a mistake.
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
        # A switch without a value means on.
        optional_value: Any = (
            {"nargs": "?", "const": "on"} if setting.rule.choices == _SWITCH["choices"] else {}
        )
        add(
            setting.flag,
            **optional_value,
            metavar="|".join(setting.rule.choices) or setting.kind.__name__.upper(),
            help=f"{setting.rule.help} ({setting.allowed}; default {default}; env {setting.env})",
        )


def load_config(flags: Mapping[str, Any], environ: Mapping[str, str]) -> Config:
    """Merges flags over environment over file over defaults.

    `flags` maps field names to strings, like `vars()` of the namespace that `add_flags` fills (None: not
    given). Names that are not settings are ignored. Raises ConfigError for the first bad setting.
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
        raise ConfigError("model_revision", source, config.model_revision, "is only for a model of the hub")
    _check_authentication(config, {name: source for name, (_, source) in values.items()})
    return config


def _check_authentication(config: Config, sources: Mapping[str, str]) -> None:
    """Raises ConfigError for incomplete TLS settings, and for a public address without TLS."""
    for name, other in (("tls_cert", "tls_key"), ("tls_key", "tls_cert"), ("tls_client_ca", "tls_cert")):
        value = getattr(config, name)
        if value and not getattr(config, other):
            raise ConfigError(name, sources[name], value, f"needs {other} too")
    for name in ("listen", "openai_listen"):
        value = getattr(config, name)
        if value and not (is_private(value) or config.tls_cert or config.insecure == "on"):
            allowed = "remote clients need TLS (tls_cert and tls_key), or insecure = on"
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
