"""Providers that run whole texts, and fallbacks between them and the workers, with `runtimes`."""

from __future__ import annotations

from pathlib import Path

from service.config import Config
from service.errors import BadRuntimes
from service.extension import Extension
from service.extensions.providers.settings import ProvidersSettings
from service.settings import ConfigError


def open_extension(config: Config) -> Extension | None:
    """Raises ConfigError for a file that cannot be used."""
    file = config.of(ProvidersSettings).runtimes
    if not file:
        return None
    from service.extensions.providers.runtimes_file import RuntimesFile  # noqa: PLC0415 - takes time

    try:
        return RuntimesFile(Path(file))
    except BadRuntimes as error:
        raise ConfigError("runtimes", "", file, error.message) from None
