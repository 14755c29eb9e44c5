"""Reads the settings: merges flags, the environment and the TOML file, and collects what is refused."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from service.config import Config, all_settings
from service.model_names import WEIGHTLESS_MODEL, is_directory_or_file, is_hub_model, is_model, model_problem
from service.setting_rules import AUTO, MAX_PORT, is_private, overlap
from service.settings import ENV_PREFIX, ConfigError, Conflict, Setting
from workers.common.draft_models import MTP_HEAD
from workers.common.trusted import require_trusted

# Environment variables with the prefix that are not settings: the file, those of the client commands, and
# those that workers read themselves (kernels/cpu/library.py).
_OTHER_ENV = (
    "QUIRE_CONFIG", "QUIRE_TARGET", "QUIRE_TOKEN", "QUIRE_CA", "QUIRE_CERT", "QUIRE_KEY", "QUIRE_CPU_ISA",
)  # fmt: skip
# Names of values that are not shown.
_SECRET = re.compile("token|secret|passw|key|credential")
# Many times what all settings take with comments. A device may have no end.
_MAX_FILE_BYTES = 1 << 16
# How like a setting a name has to be to be taken for it: `max_model_len` is not `model_backend`.
_LEAST_LIKENESS = 0.8


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds `--config` and a flag for each setting. Values stay strings: `read_settings` checks them.

    Raises ExtensionUnusable.
    """
    parser.add_argument("--config", metavar="FILE", help="TOML file of settings (env QUIRE_CONFIG)")
    add = parser.add_argument
    for setting in all_settings().values():
        if setting.group:
            add = parser.add_argument_group(setting.group).add_argument
        # A switch without a value means on.
        optional_value: Any = {"nargs": "?", "const": "on"} if setting.is_switch else {}
        # Choices that stand behind the flag are not repeated.
        allowed = "" if "|" in setting.metavar else f"{setting.allowed}; "
        add(
            setting.flag,
            **optional_value,
            metavar=setting.metavar,
            help=f"{setting.help} ({allowed}default {setting.default_text}; env {setting.env})",
        )


@dataclasses.dataclass(frozen=True, slots=True)
class Settings:
    """The settings of all sources. A setting that is refused has its default in `config`.

    `sources`: of each value that was taken, a flag, a variable or the path of the file.
    """

    config: Config
    sources: Mapping[str, str]
    errors: Sequence[ConfigError]

    def said(self, error: ConfigError) -> str:
        """The error, with where the setting is from."""
        source = error.source or self.sources.get(error.setting, "default")
        return str(ConfigError(error.setting, source, error.value, error.allowed))


def read_settings(flags: Mapping[str, Any], environ: Mapping[str, str]) -> Settings:
    """Merges flags over environment over file over defaults. Errors are in the order in which they are found.

    `flags` maps field names to strings, like `vars()` of the namespace that `add_flags` fills (None: not
    given). Names that are not settings are ignored.
    """
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    errors: list[ConfigError] = []
    path = flags.get("config") or environ.get("QUIRE_CONFIG") or ""
    for name, value, source, setting in _given(path, flags, environ, errors):
        if isinstance(setting, str):
            errors.append(ConfigError(name, source, _shown(name, value), setting))
            continue
        try:
            values[setting.name] = setting.parse(value, source, text=source != path)
            sources[setting.name] = source
        except ConfigError as error:
            errors.append(error)
    config = Config().with_values(values)
    given = config.values()
    refused = {error.setting for error in errors}
    for names, problem in _conflicts(config):
        # What does not fit a setting that is refused may fit it when it is corrected.
        if not refused.intersection(names):
            value = given[names[0]]
            # A default may not fit what is given.
            source = next((sources[name] for name in names if name in sources), "default")
            errors.append(ConfigError(names[0], source, AUTO if value is None else value, problem))
    return Settings(config, sources, errors)


def _given(
    path: str, flags: Mapping[str, Any], environ: Mapping[str, str], errors: list[ConfigError]
) -> Iterator[tuple[str, object, str, Setting | str]]:
    """Each given value: its name, the value, its source, and the setting, or why there is none.

    The later ones override. A file that cannot be read is added to `errors`.
    """
    known = all_settings()
    content: Mapping[str, object] = {}
    try:
        content = _read(path) if path else {}
    except ConfigError as error:
        errors.append(error)
    for name, value in content.items():
        yield name, value, path, known.get(name) or _unknown(name, [*known])
    by_env = {setting.env: setting for setting in known.values()}
    for name, value in environ.items():
        if name in by_env:
            yield name, value, name, by_env[name]
        elif name.startswith(ENV_PREFIX) and name not in _OTHER_ENV:
            yield name, value, "the environment", _unknown(name, [*by_env, *_OTHER_ENV], ENV_PREFIX)
    for name, value in flags.items():
        if name in known and value is not None:
            yield name, value, known[name].flag, known[name]


def _conflicts(config: Config) -> Iterator[Conflict]:
    """Settings that do not fit each other, such as a public address without TLS."""
    if config.adapters and not config.max_lora_adapters:
        yield ("adapters", "max_lora_adapters"), "needs max_lora_adapters to be at least 1"
    if config.data_dir is not None and config.journal == "memory":
        yield ("data_dir", "journal"), "a journal in memory has no data directory; leave one of the two out"
    if config.model_revision is not None and not is_hub_model(config.model):
        yield ("model_revision", "model"), "is only for a model of the hub"
    for name, other in (("tls_cert", "tls_key"), ("tls_key", "tls_cert"), ("tls_client_ca", "tls_cert")):
        if getattr(config, name) and not getattr(config, other):
            yield (name, other), f"needs {other} too"
    yield from _pool_conflicts(config)
    yield from _weight_conflicts(config)
    for extension in config.extensions:
        yield from extension.conflicts(config)
    yield from _port_conflicts(config)


def _port_conflicts(config: Config) -> Iterator[Conflict]:
    """As `_conflicts`, for ports, including those that follow from a setting and a gateway's number."""
    taken: list[tuple[str, str]] = []
    is_secure = bool(config.tls_cert) or config.insecure == "on"
    # Further ports that follow from a setting are refused, rather than those that are given.
    for setting, index, address in sorted(config.ports(), key=lambda port: port[1]):
        assert setting.port is not None
        name = setting.name
        if setting.port.needs_tls and not (is_secure or is_private(address)):
            problem = "remote clients need TLS (tls_cert and tls_key), or insecure = on"
            yield (name, "tls_cert", "insecure"), problem
        if not address.startswith("unix:") and int(address.rpartition(":")[2]) > MAX_PORT:
            problem = (
                f"needs a port for each of gateways = {config.gateways}, of which the last is {MAX_PORT}"
            )
            yield (name, "gateways"), problem
            continue
        of_gateways = ("gateways",) if index else ()
        where = f"with gateways = {config.gateways}, gateway {index} has {address}: " if index else ""
        for other, its_address in taken:
            if name != other and overlap(address, its_address):
                yield (name, other, *of_gateways), f"{where}{other} has this port already"
        taken.append((name, address))


def _pool_conflicts(config: Config) -> Iterator[Conflict]:
    # On other hosts the model can be where this one has nothing.
    if not config.has_remote_workers and not is_model(config.model):
        yield ("model",), model_problem(config.model)
    is_path = config.draft_model not in ("", MTP_HEAD) and not config.has_remote_workers
    if is_path and not is_directory_or_file(config.draft_model):
        yield ("draft_model",), model_problem(config.draft_model)
    starts_workers = any(one.starts_workers for one in config.extensions)
    if config.pool_listen and not (config.pool or starts_workers):
        yield ("pool_listen", "pool"), "needs pool too"
    if config.pool_listen and int(config.pool_listen.rpartition(":")[2]) == 0:
        yield ("pool_listen",), "needs a port that workers know, also after a restart"
    if config.workers is None and config.pool_listen and not starts_workers:
        problem = "must be a number with pool_listen: how many of the workers that dial are used"
        yield ("workers", "pool_listen"), problem


def _weight_conflicts(config: Config) -> Iterator[Conflict]:
    """As `_conflicts`, for what does not work yet with weights that are changed when they are loaded."""
    native = "needs a model that native code runs: model_backend = native"
    on_one_rank = "needs a model that is not split: tensor_parallel = 1"
    with_weights = "needs a model that has weights"
    of_cpu, of_weights = ("head_dtype", "kv_cache_dtype"), ("quantization", "head_dtype", "kv_cache_dtype")
    for other, is_so, problem, names in (
        ("device", config.device == "cuda", "needs device = cpu", of_cpu),
        ("model_backend", config.model_backend == "transformers", native, ("quantization",)),
        ("tensor_parallel", config.tensor_parallel > 1, on_one_rank, ("head_dtype", "draft_model")),
        ("model", config.model == WEIGHTLESS_MODEL, with_weights, (*of_weights, "draft_model")),
    ):
        for name in names:
            if is_so and getattr(config, name) != getattr(Config(), name):
                yield (name, other), problem


def _shown(name: str, value: object) -> object:
    """The value of an unknown setting, unless the name says that it is a secret. A table can be deep."""
    return "***" if _SECRET.search(name.lower()) else "{...}" if isinstance(value, dict) else value


def _read(path: str) -> dict[str, Any]:
    try:
        require_trusted(Path(path))
        with Path(path).open("rb") as file:
            content = file.read(_MAX_FILE_BYTES + 1)
        if len(content) > _MAX_FILE_BYTES:
            raise ConfigError("config", path, path, f"must have at most {_MAX_FILE_BYTES} bytes")
        # Some editors put a byte order mark before it.
        return tomllib.loads(content.decode("utf-8-sig"))
    except OSError as error:
        # The error may be about a directory above the file.
        elsewhere = "" if error.filename in (None, path) else f"{error.filename}: "
        why = f"{elsewhere}{error.strerror}"
        raise ConfigError("config", "--config or QUIRE_CONFIG", path, why) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError("config", path, path, f"must be a TOML file: {error}") from None


def _unknown(name: str, known: list[str], prefix: str = "") -> str:
    """`prefix`: of all names, which says nothing of how alike they are."""
    names = [each.removeprefix(prefix) for each in known]
    close = difflib.get_close_matches(name.removeprefix(prefix), names, n=1, cutoff=_LEAST_LIKENESS)
    hint = f"did you mean {prefix}{close[0]}?" if close else "`quire serve --help` lists them all"
    return f"there is no such setting; {hint}"
