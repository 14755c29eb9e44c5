"""Workers on a Ray cluster, with `launcher = ray`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from service.config import Config
from service.extension import Extension
from service.pool.launcher import Launcher


def open_extension(config: Config) -> Extension | None:
    """None with another launcher."""
    if config.launcher != "ray":
        return None
    extension = Extension()
    extension.launcher = _new_launcher
    return extension


def _new_launcher(config: Config, data_dir: Path | None, on_locked: Callable[[], None]) -> Launcher:
    """Raises ConfigError if Ray is not installed."""
    from service.extensions.ray.launcher import RayLauncher  # noqa: PLC0415 - only with this setting

    return RayLauncher(data_dir, config, on_locked)
