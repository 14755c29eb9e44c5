"""The setting of this extension."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from service.config import Config, ExtensionSettings
from service.errors import BadRuntimes
from service.setting_rules import FILE
from service.settings import ConfigError, setting


@dataclass(frozen=True, slots=True, kw_only=True)
class ProvidersSettings(ExtensionSettings):
    """The setting for runtimes other than this server's workers."""

    runtimes: str = setting(
        "", "TOML file of providers and of the routing between runtimes", FILE, group="providers"
    )

    def open_extension(self, config: Config) -> Any:  # noqa: ARG002
        """Returns the extension. Raises ConfigError for a file that cannot be used."""
        if not self.runtimes:
            return None
        from service.extensions.providers.runtimes_file import RuntimesFile  # noqa: PLC0415 - takes time

        try:
            return RuntimesFile(Path(self.runtimes))
        except BadRuntimes as error:
            raise ConfigError("runtimes", "", self.runtimes, error.message) from None
