"""The setting of this extension."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from service.config import Config, ExtensionSettings
from service.setting_rules import HOST_PORT_ADDRESS
from service.settings import Port, setting


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricsSettings(ExtensionSettings):
    """Settings of metrics for Prometheus, and of probes."""

    metrics_listen: str = setting(
        "",
        "serve metrics and health checks over HTTP on this address, without TLS; further gateways have the"
        " next ports",
        HOST_PORT_ADDRESS,
        group="metrics",
        port=Port(of_each_gateway=True),
    )

    def open_extension(self, config: Config) -> Any:  # noqa: ARG002
        """Returns the extension. None: no address to listen on is set."""
        if not self.metrics_listen:
            return None
        from service.extensions.metrics.exporter import Exporter  # noqa: PLC0415 - its libraries take time

        return Exporter(self.metrics_listen)
