"""The gateway's settings: declared once in `Config`, parsed once, then passed explicitly and never changed.

The value of a setting comes from the first of these that has it: a flag (`--max-batch-tokens`), the
environment (`QUIRE_MAX_BATCH_TOKENS`), the TOML file given by `--config` (`max_batch_tokens`), the default.
The declaration of a field below defines all of them, and the help text. A bad setting is refused with
`ConfigError`, also in a file or the environment when a flag overrides it, because it would fail later.

`config_sources` reads the sources. This module does not use the settings, and it reads no model.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
import types
import typing
from collections.abc import Iterator
from typing import Any

from service.model_names import MODELS, SHIPPED_MODEL
from service.setting_rules import (
    AUTO,
    COUNT,
    DAY_S,
    DTYPES,
    FILE,
    GRACE_S,
    HOST_PORT,
    HTTP_ADDRESS,
    LOGGED_CALLS,
    MAX_SOCKET_PATH_BYTES,
    MAX_WORKERS,
    MEMORY_BYTES,
    MESSAGE_BYTES,
    MIB,
    SWITCH,
    TIMEOUT_S,
    YEAR_S,
    Range,
    Rule,
    Text,
    are_addresses,
    are_devices,
    are_resources,
    is_collector,
    is_directory,
    is_file,
    is_journal,
    is_listen_address,
    is_path,
    is_reachable,
    is_revision,
    with_port,
)

ENV_PREFIX = "QUIRE_"
# The settings that name an address to listen on.
ADDRESSES = ("listen", "openai_listen", "metrics_listen", "pool_listen", "peer_listen")

# Environment variables with the prefix that are not settings: the file, those of the client commands, and
# those that workers read themselves (kernels/cpu/library.py).
OTHER_ENV = (
    "QUIRE_CONFIG", "QUIRE_TARGET", "QUIRE_TOKEN", "QUIRE_CA", "QUIRE_CERT", "QUIRE_KEY", "QUIRE_CPU_ISA",
)  # fmt: skip


class ConfigError(Exception):
    """An invalid setting: its name, its source, its value, and the allowed values.

    Without a source, `Settings.said` finds it.
    """

    def __init__(self, setting: str, source: str, value: object, allowed: str) -> None:
        value = _without_password(value)
        # As TOML has it. Its texts can be quoted as Python quotes them.
        self.shown = f"{setting} = {str(value).lower() if isinstance(value, bool) else repr(value)}"
        super().__init__(f"{self.shown}{source and f' (from {source})'} is refused: {allowed}")
        self.setting = setting
        self.source = source
        self.value = value
        self.allowed = allowed


@contextlib.contextmanager
def needing_extra(extra: str, setting: str, value: str) -> Iterator[None]:
    """Raises ConfigError if a library is not installed that the setting needs, of an extra of the wheel."""
    try:
        yield
    except ModuleNotFoundError as error:
        allowed = f"needs {error.name}, of the extra {extra}: `make setup` installs it"
        raise ConfigError(setting, "", value, allowed) from None


def _setting(default: Any, help_text: str, rule: Rule, *, group: str = "") -> Any:
    """A field. `group`, in the help, is that of this setting and of those up to the next with a group."""
    return dataclasses.field(default=default, metadata={"help": help_text, "rule": rule, "group": group})


def _without_password(value: object) -> object:
    """The value as it may be shown: addresses without passwords."""
    if not isinstance(value, str) or "://" not in value:
        return value
    value = re.sub(r"://([^/?#@]*?):.*@", r"://\1:***@", value, flags=re.DOTALL)
    # Its name may be written in another way.
    return re.sub(r"(assword=)[^&#]*", r"\1***", value, flags=re.IGNORECASE)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Every setting of `quire serve`. Units are in the names. `read_settings` builds and checks it."""

    model: str = _setting(
        SHIPPED_MODEL,
        "the model to serve: adder (shipped), paged-attention (without weights), a Hugging Face model"
        " directory, or ORG/NAME on the Hugging Face hub, from the local cache or downloaded",
        # Checked with the others: on other hosts it can be a directory that this one does not have.
        Text(lambda _: True, f"must be {MODELS}"),
        group="model",
    )
    model_revision: str | None = _setting(
        None,
        "commit, branch or tag of a model on the hub; auto is its main branch",
        Text(is_revision, f"must be the name of a commit, branch or tag, or {AUTO}"),
    )
    model_download: str = _setting(
        "on", "download a model of the hub if it is not in the local cache", SWITCH
    )
    dtype: str = _setting(
        AUTO,
        "data type of weights and KV cache; auto is the model's, but float32 for float16 on a CPU",
        DTYPES,
    )
    model_backend: str = _setting(
        AUTO,
        "implementation of the model: native, or the transformers library with this server's paged KV cache;"
        " auto is native if it supports everything in the model's config",
        (AUTO, "native", "transformers"),
    )
    no_self_check: str = _setting(
        "off", "skip the comparison of the model with the transformers library at start", SWITCH
    )
    runtimes: str = _setting("", "TOML file of routing and further runtimes, such as providers", FILE)
    listen: str = _setting(
        "127.0.0.1:50051",
        "the address to listen on; port 0 is a free port",
        Text(
            is_listen_address,
            f"must be host:port, [ipv6]:port, or unix:/path of at most {MAX_SOCKET_PATH_BYTES} bytes",
            pattern=f"^(unix:/|{HOST_PORT}$)",
        ),
        group="addresses and access",
    )
    openai_listen: str = _setting(
        "",
        "also serve OpenAI's API over HTTP on this address; port 0 is a free port",
        HTTP_ADDRESS,
    )
    metrics_listen: str = _setting(
        "", "also serve metrics and health checks over HTTP on this address, without TLS", HTTP_ADDRESS
    )
    openai_logprobs_mode: str = _setting(
        "raw_logprobs",
        "which log-probabilities /inference/v1/generate returns, as vLLM's setting of this name: the model's"
        " own, or those that tokens were drawn with",
        ("raw_logprobs", "processed_logprobs"),
    )
    insecure: str = _setting(
        "off", "allow remote clients without TLS: the network can read and change all traffic", SWITCH
    )
    tls_cert: str = _setting("", "PEM file of the server's certificate and its chain; enables TLS", FILE)
    tls_key: str = _setting("", "PEM file of the certificate's key", FILE)
    tls_client_ca: str = _setting(
        "", "PEM file of CAs; clients must have a certificate that one of them signed", FILE
    )
    tokens: str = _setting("", "TOML file of bearer tokens and tenants, see `quire token`", FILE)
    reflection: str = _setting("on", "offer gRPC server reflection", SWITCH)
    gateways: int = _setting(
        1,
        "number of gateway processes behind one port, each with a part of the caches and of the workers; the"
        " caches of a data directory are of one number",
        Range(1, 64),
    )
    shards: int = _setting(
        1,
        "number of parts of the caches that gateways of several hosts share among them; fixed for a database",
        Range(1, 1024),
    )
    peer_listen: str = _setting(
        "",
        "be one of several gateways with one journal in PostgreSQL: the others call this one here, by TLS"
        " with the certificates of `pool`",
        HTTP_ADDRESS,
    )
    advertise: str = _setting(
        "",
        "the address at which clients reach this gateway and no other; answers name that of their cache's",
        Text(is_reachable, "must be host:port or [ipv6]:port, without port 0", pattern=HTTP_ADDRESS.pattern),
    )
    workers: int | None = _setting(
        1,
        "number of workers; each loads the weights and serves a part of the sequences; auto is one per GPU,"
        " one on the CPU, or as many as fit on the nodes of Ray",
        Range(1, MAX_WORKERS),
        group="workers and their memory",
    )
    workers_at: str = _setting(
        "",
        "use these workers, which `quire worker` has started, in place of own ones: host:port,host:port",
        Text(are_addresses, "must be host:port, or several different ones separated by commas"),
    )
    pool_listen: str = _setting(
        "",
        "let workers call this gateway here, in place of own ones: `quire worker --gateway`; as many as"
        " `workers` says are used",
        HTTP_ADDRESS,
    )
    pool: str = _setting(
        "",
        "directory of the certificates by which gateways and workers of other hosts know each other, made by"
        " `quire pool init`",
        Text(is_directory, "must be a directory"),
    )
    tensor_parallel: int = _setting(
        1,
        "ranks that split the model in each worker: processes, each with its own GPU or share of the cores",
        Range(1, 64),
    )
    launcher: str = _setting(
        "local",
        "what starts the workers: this gateway, or Ray on the nodes of a cluster, in the paths of which the"
        " model has to be",
        ("local", "ray"),
    )
    ray_address: str = _setting(
        AUTO,
        "the Ray cluster: host:port or auto on one of its nodes, ray://host:port elsewhere",
        Text(bool, "must be an address as ray.init has it"),
    )
    ray_resources: str = _setting(
        "",
        "what a worker takes of a Ray node, such as GPU=1,CPU=4; the default is GPU=1, or CPU=1 if the"
        " cluster has no GPU or device is cpu",
        Text(are_resources, "must be NAME=NUMBER, or several separated by commas"),
    )
    ray_runtime_env: str = _setting("", "JSON file of the runtime environment of workers on Ray", FILE)
    threads_per_worker: int | None = _setting(
        None, "compute threads in each worker on the CPU; auto is usable cores / workers", Range(1, 4096)
    )
    device: str = _setting(
        AUTO, "device of the workers; auto is a GPU if there is one", (AUTO, "cpu", "cuda")
    )
    devices: str = _setting(
        "",
        "GPUs for the workers, in this order: 0,2 or GPU-UUID,GPU-UUID; the default is all",
        Text(are_devices, "must be numbers or UUIDs as nvidia-smi lists them, separated by commas"),
    )
    kv_pages: int | None = _setting(
        None, "KV pages of 16 tokens in each worker; auto depends on memory", Range(1, 1 << 30)
    )
    gpu_memory_utilization: float = _setting(
        0.9,
        "fraction of a GPU's memory to use in total; it determines the number of KV pages",
        Range(0.05, 1),
    )
    batch_invariant: str = _setting(
        "off",
        "the bits of a result depend on its own text only, not on the rest of a batch; models that cannot are"
        " refused; on a GPU this takes slower kernels, on the CPU it is always so for native models",
        SWITCH,
    )
    cuda_graphs: str = _setting(
        AUTO, "CUDA graphs for decode steps on a GPU; off launches every kernel separately", (AUTO, "off")
    )
    adapters: str = _setting(
        "",
        "directory of LoRA adapters for all tenants: each subdirectory in PEFT's layout is one, by its name",
        Text(is_directory, "must be a directory"),
        group="LoRA adapters",
    )
    max_lora_adapters: int = _setting(
        64,
        "maximum adapters in the memory of a worker; others are loaded when needed; 0: the server takes none",
        Range(0, 4096),
    )
    max_lora_rank: int | None = _setting(
        None,
        "maximum rank of an adapter; on a GPU all take the memory of this one; auto is 256, and 64 on a GPU",
        Range(1, 256),
    )
    max_lora_bytes: int = _setting(
        2 << 30,
        "maximum memory of a worker for adapters, and maximum size of an adapter's file",
        MEMORY_BYTES,
    )
    max_adapters: int = _setting(4096, "maximum versions of adapters that are in use", COUNT)
    max_batch_tokens: int | None = _setting(
        None,
        "maximum tokens in one step of a worker; longer prompts are split into chunks; auto is 512, and 4096"
        " on a GPU",
        COUNT,
        group="steps",
    )
    max_mixed_prefill_tokens: int | None = _setting(
        None,
        "maximum prompt tokens in a step that also decodes; auto is as many as double the step's time",
        COUNT,
    )
    max_batch_items: int = _setting(256, "maximum items in one step of a worker", Range(1, 65_536))
    max_queued_operations: int = _setting(
        4096,
        "maximum operations that wait or run; further calls are refused",
        Range(1, 1 << 24),
        group="limits",
    )
    max_wait_s: float = _setting(
        300.0,
        "maximum time in the queue; calls that would wait longer, or have, are refused",
        Range(0.01, DAY_S),
    )
    default_lease_s: float = _setting(
        1800.0, "lease of a cache if the call does not give one", Range(1, YEAR_S)
    )
    max_lease_s: float = _setting(float(DAY_S), "longest lease of a cache", Range(1, YEAR_S))
    max_request_bytes: int = _setting(16 * MIB, "maximum size of a request", MESSAGE_BYTES)
    max_response_bytes: int = _setting(64 * MIB, "maximum size of a response", MESSAGE_BYTES)
    max_session_calls: int = _setting(
        1024, "maximum unanswered calls of one Session; the server then stops reading from it", COUNT
    )
    max_calls_per_message: int = _setting(4096, "maximum calls in one message of a Session", COUNT)
    max_items_per_call: int = _setting(1024, "maximum items in one batch", COUNT)
    max_caches: int = _setting(65_536, "maximum caches in total", Range(1, 1 << 24))
    max_journal_bytes: int = _setting(
        256 * MIB,
        "maximum size of the journal's contents: 4 bytes per token, which forks share, and 664 per cache",
        MEMORY_BYTES,
    )
    max_unread_bytes: int = _setting(
        512 * MIB,
        "maximum memory for all answers that are being computed or not yet read; one of more than 4 KiB"
        " counts three times, as often as it is in memory, and a tenant can use half",
        MEMORY_BYTES,
    )
    max_arriving_bytes: int = _setting(
        256 * MIB,
        "maximum size of all requests that are slow to arrive, where each counts as max_request_bytes; over"
        " HTTP also of the bodies of all unanswered requests, half of it per tenant",
        MEMORY_BYTES,
    )
    message_timeout_s: float = _setting(
        30.0, "timeout for a request to arrive, and for the handshake of a new connection", TIMEOUT_S
    )
    max_sessions: int = _setting(1024, "maximum open Sessions and other request streams", COUNT)
    max_executions: int = _setting(
        4096,
        "maximum executions that run or are being read; as many finished ones may be stored besides",
        COUNT,
    )
    max_connections: int = _setting(
        4096, "maximum gRPC connections, and as many over HTTP; further ones are closed", COUNT
    )
    session_stall_s: float = _setting(
        30.0, "end a Session whose client reads no answer for this time", TIMEOUT_S
    )
    drain_grace_s: float = _setting(
        30.0, "how long a stopping server waits for calls in flight", GRACE_S, group="stopping"
    )
    lame_duck_s: float = _setting(
        0.0, "how long a stopping server still accepts calls after health checks return NOT_SERVING", GRACE_S
    )
    worker_start_timeout_s: float = _setting(
        600.0,
        "timeout for a worker to load the model and run its first forward",
        Range(1, DAY_S),
        group="worker health",
    )
    suspect_after_s: float = _setting(
        0.5,
        "a worker that sends nothing for this time gets no new sequences if there is another one",
        Range(0.02, DAY_S),
    )
    heartbeat_timeout_s: float = _setting(
        10.0, "a worker that sends nothing for this time is killed and replaced", TIMEOUT_S
    )
    step_timeout_s: float = _setting(
        60.0,
        "a worker is killed and replaced if a step takes longer than this and 20 times the expected time",
        TIMEOUT_S,
    )
    journal: str = _setting(
        AUTO,
        "storage of the journal of caches; auto is disk, in data_dir, if there is one, else memory;"
        " postgresql://... is a database of PostgreSQL",
        Text(
            is_journal,
            f"must be {AUTO}, disk, memory, or postgresql://USER@HOST/DATABASE without a password, which"
            " PGPASSWORD or a password file (PGPASSFILE) has",
            pattern="^(auto|disk|memory|postgres(ql)?://.*)$",
        ),
        group="state on disk",
    )
    journal_sync: str = _setting(
        "normal",
        "durability of an answer with disk: normal survives a crash of the gateway, full also one of the"
        " machine; postgresql survives both",
        ("normal", "full"),
    )
    orphan_grace_s: float = _setting(
        60.0,
        "how long workers keep running after the gateway was killed, for the next one with the same data_dir"
        " and settings to adopt; with 0 they end with the gateway",
        GRACE_S,
    )
    data_dir: str | None = _setting(
        None,
        "directory for the journal and for the adoption of workers; auto is one for each address and model in"
        " the user's state directory, and none with port 0",
        Text(is_path, f"must be a directory, or {AUTO}"),
    )
    log_level: str = _setting(
        "info", "minimum level of log records", ("debug", "info", "warning", "error"), group="log"
    )
    log_format: str = _setting(
        AUTO, "format of the log; auto is pretty on a terminal, else json", (AUTO, "json", "pretty")
    )
    log_calls: str = _setting(
        "errors", "which calls have a line: off, those that fail or are cancelled, or all", LOGGED_CALLS
    )
    slow_call_ms: float = _setting(
        0.0, "log calls that take longer, and where their time went; 0: none", Range(0, 1000 * DAY_S)
    )
    otlp_endpoint: str = _setting(
        "",
        "send a span of each call to this OpenTelemetry collector, by OTLP over gRPC",
        Text(is_collector, "must be http://host:port, or https:// for TLS", pattern="^(https?://.+)?$"),
        group="traces",
    )

    def addresses(self) -> Iterator[tuple[str, int, str]]:
        """What this server listens on: the setting, the gateway's index, and the address.

        Each of several gateways has its own port for metrics.
        """
        for name in ADDRESSES:
            if address := getattr(self, name):
                for index in range(self.gateways if name == "metrics_listen" else 1):
                    yield name, index, self.metrics_address(index) if index else address

    def metrics_address(self, index: int) -> str:
        """That of `metrics_listen` of the gateway with this index."""
        return with_port(self.metrics_listen, index) if self.metrics_listen else ""

    @property
    def worker_addresses(self) -> list[str]:
        """The addresses of `workers_at`."""
        return self.workers_at.split(",") if self.workers_at else []

    @property
    def worker_slots(self) -> int:
        """How many workers are used, at first."""
        return len(self.worker_addresses) or self.workers or 1

    @property
    def has_remote_workers(self) -> bool:
        """Whether others start the workers, on this or other hosts."""
        return bool(self.workers_at or self.pool_listen or self.launcher == "ray")


def plain(number: float) -> str:
    """A number for messages, without an exponent."""
    return str(int(number)) if number == int(number) else str(number)


class Setting:
    """One field of Config, with what is needed to parse it."""

    def __init__(self, field: dataclasses.Field[Any], hint: Any) -> None:
        self.name = field.name
        self.flag = "--" + field.name.replace("_", "-")
        self.env = ENV_PREFIX + field.name.upper()
        self.is_optional = isinstance(hint, types.UnionType)
        self.kind: type = typing.get_args(hint)[0] if self.is_optional else hint
        self.default = field.default
        self.help: str = field.metadata["help"]
        self.group: str = field.metadata["group"]
        self._rule: Rule = field.metadata["rule"]
        self.choices = self._rule if isinstance(self._rule, tuple) else ()

    @property
    def allowed(self) -> str:
        """The valid values, in words."""
        match self._rule:
            case Range(minimum, maximum):
                number = "a whole number" if self.kind is int else "a number"
                or_auto = f", or {AUTO}" if self.is_optional else ""
                return f"must be {number} from {plain(minimum)} to {plain(maximum)}{or_auto}"
            case Text(allowed=allowed):
                return allowed
        return "must be one of " + ", ".join(self.choices)

    def parse(self, value: object, source: str, *, text: bool) -> Any:
        """Converts and checks one value. `text`: the source has only strings, so numbers are parsed."""
        if self.is_optional and value == AUTO:
            return None
        with contextlib.suppress(TypeError, ValueError, OverflowError):
            parsed = self._convert(value, text=text)
            match self._rule:
                case Range(minimum, maximum):
                    is_valid = minimum <= parsed <= maximum
                case Text(accepts=accepts):
                    is_valid = accepts(parsed)
                case choices:
                    is_valid = parsed in choices
            if is_valid:
                return parsed
        raise ConfigError(self.name, source, value, self.allowed)

    @property
    def default_text(self) -> str:
        """The default, in the help."""
        return AUTO if self.default is None else f"{self.default}" or "none"

    @property
    def is_switch(self) -> bool:
        """Whether it is off or on."""
        return self.choices == SWITCH

    @property
    def is_path(self) -> bool:
        """Whether it names a file or a directory of this machine."""
        return isinstance(self._rule, Text) and self._rule.accepts in (is_file, is_directory, is_path)

    @property
    def metavar(self) -> str:
        """What stands for the value in the help."""
        if isinstance(self._rule, Text) and self._rule.accepts in (is_file, is_directory):
            return "FILE" if self._rule.accepts is is_file else "DIRECTORY"
        return "|".join(self.choices) or self.kind.__name__.upper()

    @property
    def schema(self) -> dict[str, Any]:
        """A JSON schema of the value in a file. `parse` refuses more: it also looks at the machine."""
        match self._rule:
            case Range(minimum, maximum):
                number = "integer" if self.kind is int else "number"
                found: dict[str, Any] = {"type": number, "minimum": minimum, "maximum": maximum}
            case Text(pattern=pattern):
                found = {"type": "string"} | ({"pattern": pattern} if pattern else {})
            case choices:
                found = {"enum": [*choices]}
        if self.is_optional:
            found = {"anyOf": [{"const": AUTO}, found]}
        default = {"default": AUTO if self.default is None else self.default}
        return {"description": f"{self.help} ({self.allowed})"} | default | found

    def _convert(self, value: object, *, text: bool) -> Any:
        accepted = (int, float) if self.kind is float else (self.kind,)
        # In Python a bool is an int, but `workers = true` is a mistake.
        if not text and (isinstance(value, bool) or not isinstance(value, accepted)):
            raise TypeError
        if "\0" in str(value):
            raise ValueError
        return self.kind(value)


_HINTS = typing.get_type_hints(Config)
SETTINGS = {field.name: Setting(field, _HINTS[field.name]) for field in dataclasses.fields(Config)}
