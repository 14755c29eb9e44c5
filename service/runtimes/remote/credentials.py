"""Reads a provider's credentials, and keeps them out of everything that is shown."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

from service.errors import ProviderFailure
from service.logging import get_logger
from service.runtimes.remote.config import ProviderConfig

_log = get_logger(__name__)
_MAX_FILE_BYTES = 1 << 16


class Secret:
    """Text that shows itself to nobody who does not ask for it."""

    __slots__ = ("_text",)

    def __init__(self, text: str) -> None:
        self._text = text

    def __repr__(self) -> str:
        return "Secret(...)"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Secret) and other._text == self._text

    __hash__ = None  # type: ignore[assignment]  # nothing is looked up by a secret

    def reveal(self) -> str:
        """For the header of a request, and nothing else."""
        return self._text


async def read(config: ProviderConfig) -> Secret | None:
    """The credentials as they are now. None: the provider wants none. Raises ProviderFailure."""
    if not config.api_key_env and not config.api_key_file:
        return None
    text = await asyncio.to_thread(_text, config)
    # Anything else breaks a header, and libraries put the whole header into what they say of that.
    if not text or not text.isascii() or not text.isprintable() or " " in text:
        place = config.api_key_env or config.api_key_file
        _log.error("a provider's credentials cannot be used", runtime=config.name, place=place)
        raise ProviderFailure("UNAUTHORIZED", "this server has no usable credentials for the provider")
    return Secret(text)


def _text(config: ProviderConfig) -> str:
    if config.api_key_env:
        return os.environ.get(config.api_key_env, "").strip()
    try:
        with Path(config.api_key_file).open("rb") as file:
            return file.read(_MAX_FILE_BYTES).decode("ascii", errors="replace").strip()
    except OSError:
        return ""
