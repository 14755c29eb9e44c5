"""The setting of this extension."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from service.config import ExtensionSettings
from service.setting_rules import FILE
from service.settings import setting


@dataclass(frozen=True, slots=True, kw_only=True)
class ProvidersSettings(ExtensionSettings):
    """Runtimes beside this server's workers."""

    opened_by: ClassVar[str] = "service.extensions.providers.extension:open_extension"

    runtimes: str = setting(
        "", "TOML file of routing and further runtimes, such as providers", FILE, group="providers"
    )
