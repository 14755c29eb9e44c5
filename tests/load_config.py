"""Settings as `quire serve` reads them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from service.config import Config
from service.config_sources import read_settings


def load_config(flags: Mapping[str, Any], environ: Mapping[str, str]) -> Config:
    """The settings. Raises ConfigError for the first bad one."""
    settings = read_settings(flags, environ)
    if settings.errors:
        raise settings.errors[0]
    return settings.config
