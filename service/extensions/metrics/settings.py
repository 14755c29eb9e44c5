"""The setting of this extension."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from service.config import ExtensionSettings
from service.setting_rules import HOST_PORT_ADDRESS
from service.settings import Port, setting


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricsSettings(ExtensionSettings):
    """Figures for Prometheus, and probes."""

    opened_by: ClassVar[str] = "service.extensions.metrics.extension:open_extension"

    metrics_listen: str = setting(
        "",
        "serve metrics and health checks over HTTP on this address, without TLS; of several gateways each has"
        " the port after that of the one before",
        HOST_PORT_ADDRESS,
        group="metrics",
        port=Port(of_each_gateway=True),
    )
