"""How this extension is found."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from service.config import ExtensionSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewaysSettings(ExtensionSettings):
    """Several gateways, and the journal in PostgreSQL."""

    opened_by: ClassVar[str] = "service.extensions.gateways.extension:open_extension"
    served_by: ClassVar[str] = "service.extensions.gateways.extension:open_server"
