"""The HTTP routes of OpenAI's API and of vLLM's, with `openai_listen`."""

from __future__ import annotations

from service.config import Config, needing_extra
from service.extension import Extension


def open_extension(config: Config) -> Extension | None:
    """Raises ConfigError if its libraries are not installed."""
    if not config.openai_listen:
        return None
    with needing_extra("openai", "openai_listen", config.openai_listen):
        from service.extensions.openai.front import OpenAiFront  # noqa: PLC0415
    return OpenAiFront(config.openai_listen)
