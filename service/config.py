"""The gateway's settings: declared once, parsed once, then passed explicitly and never changed.

The value of a setting comes from the first of these that has it: a flag (`--max-batch-tokens`), the
environment (`QUIRE_MAX_BATCH_TOKENS`), the TOML file given by `--config` (`max_batch_tokens`), the default.
The declaration of a field below defines all of them, the help text and docs/settings.md. A bad setting is
refused with `ConfigError`, also in a file or the environment when a flag overrides it, because it would fail
later. An extension declares its own settings in the same way.

`config_sources` reads the sources. This module does not use the settings, and it reads no model.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.metadata
import traceback
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

from service import setting_rules as rules
from service.model_names import MODELS, SHIPPED_MODEL
from service.setting_rules import AUTO, MIB, SWITCH, Range, Text
from service.settings import Conflict, Port, Setting, declared, setting
from workers.common.addresses import MAX_SOCKET_PATH_BYTES
from workers.common.draft_models import MTP_HEAD

# The group of their entry points.
EXTENSIONS = "quire.extensions"

UNQUANTISED = "none"
KV_CACHE_DTYPES = (AUTO, "bfloat16", "int8")
QUANTIZATIONS = (UNQUANTISED, "q8_0", "q4_k_m", "q4_k", "q4_0")

_MOST_CACHES = 1 << 24
_Own = TypeVar("_Own", bound="ExtensionSettings")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ExtensionSettings:
    """The settings of an extension. Its entry point names a subclass."""

    def open_extension(self, config: Config) -> Any:
        """The `service.extension.Extension` of a gateway; None if these settings do not ask for it.

        Raises ConfigError. Called before any part of the gateway exists. What it needs should be imported
        only when it is asked for.
        """
        raise NotImplementedError

    def open_server(self, config: Config) -> Callable[[], int] | None:  # noqa: ARG002 - for subclasses
        """The server that runs instead of a gateway in this process, if these settings ask for one.

        It serves until a signal, and returns the exit status. Both raise ConfigError.
        """
        return None

    @property
    def starts_workers(self) -> bool:
        """Whether the extension starts the workers, and not this gateway."""
        return False

    @property
    def gateways_of_host(self) -> int:
        """How many gateways share the ports of this server."""
        return 1

    @property
    def has_other_hosts(self) -> bool:
        """Whether gateways of other hosts are of this server. Then nothing of it is in a data directory."""
        return False

    def conflicts(self, config: Config) -> Iterator[Conflict]:  # noqa: ARG002 - for subclasses
        """Which settings do not fit each other."""
        return iter(())


class ExtensionUnusable(ValueError):
    """An installed extension that fails, or does not fit another one. The message is for the operator."""


def failed_extension(name: str, error: Exception) -> ExtensionUnusable:
    """The message about an extension that raised an error, with the place, for its author."""
    points = importlib.metadata.entry_points(group=EXTENSIONS, name=name)
    packages = " and ".join(point.dist.name for point in points if point.dist is not None)
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    return ExtensionUnusable(
        f"the extension {name}, of the package {packages}, failed: {type(error).__name__}: {error}{place}"
    )


@functools.cache
def installed_extensions() -> Mapping[str, type[ExtensionSettings] | str]:
    """The settings of extensions by their names; or which module an extension lacks.

    It was removed from the installation then, maybe on purpose. Raises ExtensionUnusable.
    """
    found: dict[str, type[ExtensionSettings] | str] = {}
    for point in sorted(importlib.metadata.entry_points(group=EXTENSIONS), key=lambda point: point.name):
        try:
            found[point.name] = point.load()
        except ModuleNotFoundError as error:
            found[point.name] = error.name or ""
        except Exception as error:
            raise failed_extension(point.name, error) from error
    return found


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Every setting of `quire serve`. Units are in the names. `read_settings` builds and checks it."""

    model: str = setting(
        SHIPPED_MODEL,
        "the model to serve: adder and storyteller are shipped, paged-attention has no weights, and a model"
        " of the hub is downloaded unless it is cached",
        # Checked with the others: on other hosts it can be a directory that this one does not have.
        Text(lambda _: True, f"must be {MODELS}"),
        group="model",
    )
    model_revision: str | None = setting(
        None,
        "commit, branch or tag of a model on the hub; auto is its main branch",
        Text(rules.is_revision, f"must be the name of a commit, branch or tag, or {AUTO}"),
    )
    tool_call_parser: str = setting(
        AUTO,
        "how the model writes tool calls, by vLLM's names; auto: as its chat template shows; none: they are"
        " text",
        rules.TOOL_CALL_PARSERS,
    )
    reasoning_parser: str = setting(
        AUTO,
        "how the model marks its thoughts; auto: as its chat template shows; none: they are part of the"
        " answer",
        rules.REASONING_PARSERS,
    )
    dtype: str = setting(
        AUTO,
        "data type of weights and activations; auto is the model's, but on a CPU float32 for float16, and"
        " where all matrices are quantised",
        rules.DTYPES,
    )
    quantization: str = setting(
        UNQUANTISED,
        "quantise the weights while they are loaded, as llama.cpp does: q8_0 takes 8.5 bits for each, q4_k_m"
        " about 4.9 (q4_k, and q6_k where it matters most), q4_k and q4_0 4.5; none leaves them as they are",
        QUANTIZATIONS,
    )
    activation_quantization: str = setting(
        "int8",
        "rounding of activations before products with quantised integers, on the CPU: int8 is 8 bits in"
        " groups of 32; none leaves them in dtype, which is more exact, and slower",
        ("int8", UNQUANTISED),
    )
    head_dtype: str = setting(
        AUTO,
        "data type of the logits; with float32, as some trainers have it, the head takes 4 bytes a weight; on"
        " the CPU, with native models",
        (AUTO, "float32"),
    )
    kv_cache_dtype: str = setting(
        AUTO,
        "data type of the KV cache: auto is dtype, or bfloat16 for quantised weights whose dtype is auto;"
        " int8, with a scale for each key and value of a head, takes about half of bfloat16's memory, and is"
        " less exact; on the CPU",
        KV_CACHE_DTYPES,
    )
    model_backend: str = setting(
        AUTO,
        "implementation of the model: native, or the transformers library with this server's paged KV cache;"
        " auto is native if it supports everything in the model's config",
        (AUTO, "native", "transformers"),
    )
    draft_model: str = setting(
        "",
        "directory or GGUF file of a smaller model with the same tokenizer, which drafts for speculative"
        f" decoding; or {MTP_HEAD}: the model's own head for multi-token prediction",
        Text(
            lambda value: value == MTP_HEAD or rules.is_absolute_path(value),
            f"must be an absolute path, or {MTP_HEAD}",
        ),
    )
    no_self_check: str = setting(
        "off", "skip the comparison of the model with the transformers library at start", SWITCH
    )
    listen: str = setting(
        "127.0.0.1:50051",
        "the address to listen on; port 0 is a free port",
        Text(
            rules.is_listen_address,
            f"must be host:port, [ipv6]:port, or unix:/path of at most {MAX_SOCKET_PATH_BYTES} bytes",
        ),
        group="addresses and access",
        port=Port(needs_tls=True),
    )
    insecure: str = setting(
        "off", "allow remote clients without TLS: the network can read and change all traffic", SWITCH
    )
    tls_cert: str = setting("", "PEM file of the server's certificate and its chain; enables TLS", rules.FILE)
    tls_key: str = setting("", "PEM file of the certificate's key", rules.FILE)
    tls_client_ca: str = setting(
        "", "PEM file of CAs; clients must have a certificate that one of them signed", rules.FILE
    )
    tokens: str = setting("", "TOML file of bearer tokens and tenants, see `quire token`", rules.FILE)
    workers: int | None = setting(
        1,
        "number of workers; each loads the weights and serves a part of the sequences; auto is one per GPU,"
        " one on the CPU",
        Range(1, rules.MAX_WORKERS),
        group="workers and their memory",
    )
    pool_listen: str = setting(
        "",
        "listen here for workers of `quire worker --gateway`, instead of starting own ones; `workers` says"
        " how many are used",
        rules.HOST_PORT_ADDRESS,
        port=Port(of_each_gateway=True),
    )
    pool: str = setting(
        "",
        "directory of the certificates of gateways and workers on other hosts, made by `quire pool init`",
        Text(rules.is_directory, "must be a directory"),
    )
    tensor_parallel: int = setting(
        1,
        "ranks that split the model in each worker: processes, each with its own GPU or share of the cores",
        Range(1, 64),
    )
    threads_per_worker: int | None = setting(
        None, "compute threads in each worker on the CPU; auto is usable cores / workers", Range(1, 4096)
    )
    device: str = setting(AUTO, "device of the workers; auto is a GPU if there is one", (AUTO, "cpu", "cuda"))
    kv_pages: int | None = setting(
        None, "KV pages of 16 tokens in each worker; auto depends on memory", Range(1, 1 << 30)
    )
    gpu_memory_utilization: float = setting(
        0.9,
        "fraction of a GPU's memory to use in total; it determines the number of KV pages",
        Range(0.05, 1),
    )
    kv_disk: str = setting(
        "",
        "directory in which workers on the CPU store KV, and from which they read it instead of computing it"
        " again after an eviction or a restart; workers of a host share it",
        Text(rules.is_absolute_path, "must be an absolute path"),
    )
    kv_disk_gb: float = setting(
        16.0, "maximum size of all files in kv_disk, in 10^9 bytes", Range(0.001, 1_000_000)
    )
    batch_invariant: str = setting(
        "off",
        "results do not depend on the rest of the batch, bit by bit; models that cannot guarantee it are"
        " refused; on a GPU this takes slower kernels, on the CPU it always holds for native models",
        SWITCH,
    )
    cuda_graphs: str = setting(
        AUTO, "CUDA graphs for decode steps on a GPU; off launches every kernel separately", (AUTO, "off")
    )
    adapters: str = setting(
        "",
        "directory of LoRA adapters for all tenants: each subdirectory, in PEFT's layout, is one of its name",
        Text(rules.is_directory, "must be a directory"),
        group="LoRA adapters",
    )
    max_lora_adapters: int = setting(
        64,
        "maximum adapters in the memory of a worker; others are loaded when needed; 0: no adapters",
        Range(0, 4096),
    )
    max_lora_rank: int | None = setting(
        None,
        "maximum rank of an adapter; on a GPU each takes the memory of this rank; auto is 256, and 64 on a"
        " GPU",
        Range(1, 256),
    )
    max_lora_bytes: int = setting(
        2 << 30,
        "maximum memory of a worker for adapters, and maximum size of an adapter's file",
        rules.MEMORY_BYTES,
    )
    max_batch_tokens: int | None = setting(
        None,
        "maximum tokens in one step of a worker; longer prompts are split into chunks; auto is 512, and 4096"
        " on a GPU",
        rules.COUNT,
        group="steps",
    )
    max_batch_items: int = setting(256, "maximum items in one step of a worker", Range(1, 65_536))
    max_queued_operations: int = setting(
        4096,
        "maximum operations that wait or run, and executions that run or are being read; further calls are"
        " refused; as many finished executions are kept besides",
        Range(1, 1 << 24),
        group="limits",
    )
    max_request_bytes: int = setting(16 * MIB, "maximum size of a request", rules.MESSAGE_BYTES)
    max_response_bytes: int = setting(64 * MIB, "maximum size of a response", rules.MESSAGE_BYTES)
    max_journal_bytes: int = setting(
        256 * MIB,
        "maximum size of the journal's contents: 4 bytes per token, which forks share, and 664 per cache; at"
        " most one cache for each 4096 bytes",
        rules.MEMORY_BYTES,
    )
    max_unread_bytes: int = setting(
        512 * MIB,
        "maximum memory for all answers that are being computed or not yet read, of which a tenant can use"
        " half; an answer of more than 4 KiB is in memory three times, and counts so; half as much again is"
        " for requests that arrive slowly, each counted as max_request_bytes, and for HTTP bodies",
        rules.MEMORY_BYTES,
    )
    message_timeout_s: float = setting(
        30.0,
        "timeout for a request to arrive, for the handshake of a new connection, and for a client to read the"
        " answers of a Session, Execute or HTTP",
        rules.TIMEOUT_S,
    )
    max_connections: int = setting(
        4096,
        "maximum gRPC connections, and HTTP connections; further ones are closed; a quarter as many Sessions"
        " and other request streams may be open, and HTTP requests may run",
        rules.COUNT,
    )
    drain_grace_s: float = setting(
        30.0, "how long a stopping server waits for calls in flight", rules.GRACE_S, group="stopping"
    )
    lame_duck_s: float = setting(
        0.0,
        "how long a stopping server still accepts calls after health checks return NOT_SERVING",
        rules.GRACE_S,
    )
    heartbeat_timeout_s: float = setting(
        10.0,
        "a worker that sends nothing for this time is killed and replaced; so is one whose step takes longer"
        " than six times this and 20 times the expected time",
        rules.TIMEOUT_S,
        group="worker health",
    )
    journal: str = setting(
        AUTO,
        "storage of the journal of caches: disk, in data_dir, survives a crash of the gateway, disk-fsync"
        " also one of the machine, memory neither; auto is disk if there is a data_dir, else memory;"
        " postgresql://... is a PostgreSQL database, with peer_listen; other addresses are for extensions",
        Text(
            rules.is_journal,
            f"must be {AUTO}, disk, disk-fsync, memory, or an address without a password; that of"
            " postgresql://USER@HOST/DATABASE comes from PGPASSWORD or a password file (PGPASSFILE)",
        ),
        group="state on disk",
    )
    orphan_grace_s: float = setting(
        60.0,
        "how long workers keep running after the gateway was killed, so that the next one with the same"
        " data_dir and settings adopts them; with 0 they end with the gateway",
        rules.GRACE_S,
    )
    data_dir: str | None = setting(
        None,
        "directory for the journal and the adoption of workers; auto is one for each address and model in the"
        " user's state directory; none with port 0 or a journal in memory",
        Text(rules.is_path, f"must be a directory, or {AUTO}"),
    )
    log_level: str = setting(
        "info",
        "minimum level of log records; with debug each call has one",
        ("debug", "info", "warning", "error"),
        group="log",
    )

    # Limits that follow from the implementation, and which tests change.

    # How long a call without a deadline may be queued. A caller who waits for less says so by its deadline.
    max_wait_s: float = 300.0
    # The lease of a cache if its call gives none, and the longest one.
    default_lease_s: float = 1800.0
    max_lease_s: float = 7.0 * rules.DAY_S
    # Unanswered calls of one Session, beyond which the server reads no more from it.
    max_session_calls: int = 1024
    # Calls in one message of a Session.
    max_calls_per_message: int = 4096
    # The most items of a batch.
    max_items_per_call: int = 1024
    # Versions of adapters that are in use.
    max_adapters: int = 4096
    # For a worker to load its model, maybe from a slow disk, and to run its first forward.
    worker_start_timeout_s: float = 3600.0
    # A worker that sends nothing for this time gets no new sequences if there is another one.
    suspect_after_s: float = 0.5

    extensions: tuple[ExtensionSettings, ...] = ()

    def of(self, owner: type[_Own]) -> _Own:
        """The settings of an extension. Without its own in `extensions`, the defaults."""
        return next((one for one in self.extensions if isinstance(one, owner)), None) or owner()

    def with_values(self, values: Mapping[str, Any]) -> Config:
        """A copy with these values of settings, which may be those of extensions."""
        by_owner: dict[type[Any], dict[str, Any]] = {}
        for name, value in values.items():
            by_owner.setdefault(all_settings()[name].owner, {})[name] = value
        own = by_owner.pop(Config, {})
        extensions = [one for one in self.extensions if type(one) not in by_owner]
        extensions += (dataclasses.replace(self.of(owner), **its) for owner, its in by_owner.items())
        return dataclasses.replace(self, **own, extensions=tuple(extensions))

    def values(self) -> dict[str, Any]:
        return {
            name: getattr(self if one.owner is Config else self.of(one.owner), name)
            for name, one in all_settings().items()
        }

    def ports(self) -> Iterator[tuple[Setting, int, str]]:
        """The addresses that this server listens on: (setting, index of the gateway, address)."""
        values = self.values()
        for name, one in all_settings().items():
            if one.port is not None and (address := values[name]):
                for index in range(self.gateways if one.port.of_each_gateway else 1):
                    yield one, index, rules.with_port(address, index) if index else address

    def of_gateway(self, index: int) -> Config:
        """The configuration of one of several gateways of this host, with ports of its own."""
        own = {one.name: address for one, of, address in self.ports() if of == index and of}
        return self.with_values(own)

    @property
    def max_caches(self) -> int:
        """In total. One takes 2.4 kB of memory beside its tokens, of which the journal counts 664 bytes."""
        return min(max(1, self.max_journal_bytes // (4 << 10)), _MOST_CACHES)

    @property
    def step_timeout_s(self) -> float:
        """How long any step may take: a worker that computes still sends heartbeats."""
        return 6 * self.heartbeat_timeout_s

    @property
    def max_arriving_bytes(self) -> int:
        """The bytes of requests that arrive slowly, and of HTTP bodies: less comes in than goes out."""
        return self.max_unread_bytes // 2

    @property
    def max_sessions(self) -> int:
        """Open request streams, each of which may have a part of a message; and requests over HTTP."""
        return max(1, self.max_connections // 4)

    @property
    def max_executions(self) -> int:
        """Executions that run or are read: each has operations, or has had."""
        return self.max_queued_operations

    @property
    def worker_slots(self) -> int:
        """How many workers are used, at first."""
        return self.workers or 1

    @property
    def gateways(self) -> int:
        """How many gateways share the ports of this server."""
        return max((one.gateways_of_host for one in self.extensions), default=1)

    @property
    def has_other_hosts(self) -> bool:
        """Whether gateways of other hosts are of this server."""
        return any(one.has_other_hosts for one in self.extensions)

    @property
    def has_remote_workers(self) -> bool:
        """Whether others start the workers, on this or other hosts."""
        return bool(self.pool_listen) or any(one.starts_workers for one in self.extensions)


@functools.cache
def all_settings() -> Mapping[str, Setting]:
    """Every setting of this installation, by its name.

    Raises ExtensionUnusable: an extension fails, or two settings have the same name.
    """
    extensions = installed_extensions().values()
    owners: list[type[Any]] = [Config, *(owner for owner in extensions if not isinstance(owner, str))]
    found: dict[str, Setting] = {}
    for one in (one for owner in owners for one in declared(owner)):
        if one.name in found:
            # One of them would be without effect.
            raise ExtensionUnusable(
                f"{one.owner} declares {one.name}, which is a setting of {found[one.name].owner}"
            )
        found[one.name] = one
    return found
