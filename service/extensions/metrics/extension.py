"""Figures for Prometheus and probes, with `metrics_listen`."""

from __future__ import annotations

from service.config import Config
from service.extension import Extension
from service.extensions.metrics.settings import MetricsSettings


def open_extension(config: Config) -> Extension | None:
    """None without an address to listen on."""
    listen = config.of(MetricsSettings).metrics_listen
    if not listen:
        return None
    from service.extensions.metrics.exporter import Exporter  # noqa: PLC0415 - its libraries take time

    return Exporter(listen)
