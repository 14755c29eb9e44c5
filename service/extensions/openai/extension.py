"""The HTTP routes of OpenAI's API and of vLLM's, with `openai_listen`."""

from __future__ import annotations

from service.config import Config
from service.extension import Extension
from service.extensions.openai.settings import OpenAiSettings


def open_extension(config: Config) -> Extension | None:
    """None without an address to listen on."""
    settings = config.of(OpenAiSettings)
    if not settings.openai_listen:
        return None
    from service.extensions.openai.front import OpenAiFront  # noqa: PLC0415 - its libraries take time

    return OpenAiFront(settings)
