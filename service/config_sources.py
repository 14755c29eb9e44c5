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

from service.config import ENV_PREFIX, OTHER_ENV, SETTINGS, Config, ConfigError, Setting, conflicts

# Names of values that are not shown.
_SECRET = re.compile("token|secret|passw|key|credential")


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds `--config` and a flag for each setting. Values stay strings: `load_config` checks them."""
    parser.add_argument("--config", metavar="FILE", help="TOML file of settings (env QUIRE_CONFIG)")
    add = parser.add_argument
    for setting in SETTINGS.values():
        if setting.group:
            add = parser.add_argument_group(setting.group).add_argument
        # A switch without a value means on.
        optional_value: Any = {"nargs": "?", "const": "on"} if setting.is_switch else {}
        add(
            setting.flag,
            **optional_value,
            metavar=setting.metavar,
            help=f"{setting.help} ({setting.allowed}; default {setting.default_text}; env {setting.env})",
        )


def load_config(flags: Mapping[str, Any], environ: Mapping[str, str]) -> Config:
    """Merges flags over environment over file over defaults.

    `flags` maps field names to strings, like `vars()` of the namespace that `add_flags` fills (None: not
    given). Names that are not settings are ignored. Raises ConfigError for the first bad setting.
    """
    settings = read_settings(flags, environ)
    if settings.errors:
        raise settings.errors[0]
    return settings.config


@dataclasses.dataclass(frozen=True, slots=True)
class Settings:
    """What all sources say. A setting that is refused has its default in `config`.

    `sources`: a flag, a variable or the file, of each setting that has one. `file`: its path, "" without one.
    """

    config: Config
    sources: Mapping[str, str]
    errors: Sequence[ConfigError]
    file: str


def read_settings(flags: Mapping[str, Any], environ: Mapping[str, str]) -> Settings:
    """As `load_config`, but returns all errors, in the order in which they are found."""
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    errors: list[ConfigError] = []
    path = flags.get("config") or environ.get("QUIRE_CONFIG") or ""
    for name, value, source, setting in _given(path, flags, environ, errors):
        if isinstance(setting, str):
            errors.append(ConfigError(name, source, _shown(name, value), setting))
            continue
        sources[setting.name] = source
        try:
            values[setting.name] = setting.parse(value, source, text=source != path)
        except ConfigError as error:
            errors.append(error)
    config = Config(**values)
    refused = {error.setting for error in errors}
    # What does not fit a setting that is refused may fit it when it is corrected.
    errors += [error for names, error in conflicts(config, sources) if not refused.intersection(names)]
    return Settings(config, sources, errors, path)


def _given(
    path: str, flags: Mapping[str, Any], environ: Mapping[str, str], errors: list[ConfigError]
) -> Iterator[tuple[str, object, str, Setting | str]]:
    """Each given value: its name, the value, its source, and the setting, or why there is none.

    The later ones override. A file that cannot be read is added to `errors`.
    """
    content: Mapping[str, object] = {}
    try:
        content = _read(path) if path else {}
    except ConfigError as error:
        errors.append(error)
    for name, value in content.items():
        yield name, value, path, SETTINGS.get(name) or _unknown(name, [*SETTINGS])
    by_env = {setting.env: setting for setting in SETTINGS.values()}
    for name, value in environ.items():
        if name in by_env:
            yield name, value, name, by_env[name]
        elif name.startswith(ENV_PREFIX) and name not in OTHER_ENV:
            yield name, value, "the environment", _unknown(name, [*by_env, *OTHER_ENV])
    for name, value in flags.items():
        if name in SETTINGS and value is not None:
            yield name, value, SETTINGS[name].flag, SETTINGS[name]


def json_schema() -> dict[str, Any]:
    """The JSON schema of the configuration file, for editors."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "The configuration file of quire serve",
        "type": "object",
        "additionalProperties": False,
        "properties": {setting.name: setting.schema for setting in SETTINGS.values()},
    }


def _shown(name: str, value: object) -> object:
    """The value of an unknown setting, unless the name says that it is a secret."""
    return "***" if _SECRET.search(name.lower()) else value


def _read(path: str) -> dict[str, Any]:
    try:
        return tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError("config", "--config or QUIRE_CONFIG", path, f"{error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError("config", path, path, f"must be a TOML file: {error}") from None


def _unknown(name: str, known: list[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {close[0]}?" if close else f"the settings are {', '.join(known)}"
    return f"there is no such setting; {hint}"
