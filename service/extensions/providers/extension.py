"""Providers that run whole texts, and fallbacks between them and the workers, with `runtimes`."""

from __future__ import annotations

from pathlib import Path

from service.config import Config, ConfigError
from service.errors import BadRuntimes
from service.extension import Extension


def open_extension(config: Config) -> Extension | None:
    """Raises ConfigError for a file that cannot be used."""
    if not config.runtimes:
        return None
    from service.extensions.providers.runtimes_file import RuntimesFile  # noqa: PLC0415 - takes time

    try:
        return RuntimesFile(Path(config.runtimes))
    except BadRuntimes as error:
        raise ConfigError("runtimes", "", config.runtimes, error.message) from None
