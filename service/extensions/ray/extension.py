"""Workers on a Ray cluster, with `ray_address`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from service.config import Config
from service.extension import Extension
from service.extensions.ray.settings import RaySettings
from service.pool.launcher import Launcher


def open_extension(config: Config) -> Extension | None:
    """None without a cluster."""
    if not config.of(RaySettings).ray_address:
        return None
    extension = Extension()
    extension.launcher = _new_launcher
    return extension


def _new_launcher(config: Config, data_dir: Path | None, on_locked: Callable[[], None]) -> Launcher:
    """Raises ConfigError if Ray is not installed."""
    from service.extensions.ray.launcher import RayLauncher  # noqa: PLC0415 - only with this setting

    return RayLauncher(data_dir, config, on_locked)
