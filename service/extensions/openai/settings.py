"""The settings of this extension."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from service.config import ExtensionSettings
from service.setting_rules import HOST_PORT_ADDRESS
from service.settings import Port, setting


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenAiSettings(ExtensionSettings):
    """OpenAI's API, and vLLM's, over HTTP."""

    opened_by: ClassVar[str] = "service.extensions.openai.extension:open_extension"

    openai_listen: str = setting(
        "",
        "serve OpenAI's API over HTTP on this address; port 0 is a free port",
        HOST_PORT_ADDRESS,
        group="OpenAI's API",
        port=Port(needs_tls=True),
    )
    openai_logprobs_mode: str = setting(
        "raw_logprobs",
        "which log-probabilities /inference/v1/generate returns, as vLLM's setting of this name: the model's"
        " own, or those that tokens were drawn with",
        ("raw_logprobs", "processed_logprobs"),
    )
