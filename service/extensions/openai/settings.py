"""The settings of this extension."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any

from service.config import Config, ExtensionSettings
from service.setting_rules import HOST_PORT_ADDRESS
from service.settings import Conflict, Port, setting


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenAiSettings(ExtensionSettings):
    """Settings of OpenAI's and vLLM's APIs over HTTP."""

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
        " own, or those of the sampling distribution",
        ("raw_logprobs", "processed_logprobs"),
    )
    openai_routed_experts: str = setting(
        "none",
        "return the experts of all tokens with completions, chats and /inference/v1/generate; npy: as vLLM"
        " does with --enable-return-routed-experts; raw: as prime-rl's server does",
        ("none", "npy", "raw"),
    )
    openai_weight_transfer: str = setting(
        "none",
        "accept weights and adapters by the calls of vLLM and prime-rl, from callers with the role"
        " administer: from directories (filesystem), or also by broadcast, over gloo between CPUs, or nccl",
        ("none", "filesystem", "gloo", "nccl"),
    )

    def conflicts(self, config: Config) -> Iterator[Conflict]:  # noqa: ARG002
        """Conflicts: settings that need the port, without it."""
        for each in fields(self):
            if not self.openai_listen and getattr(self, each.name) != each.default:
                yield (each.name,), "needs openai_listen"

    def open_extension(self, config: Config) -> Any:  # noqa: ARG002
        """Returns the extension. None: no address to listen on is set."""
        if not self.openai_listen:
            return None
        from service.extensions.openai.front import OpenAiFront  # noqa: PLC0415 - its libraries take time

        return OpenAiFront(
            self.openai_listen,
            self.openai_logprobs_mode,
            self.openai_routed_experts,
            self.openai_weight_transfer,
        )
