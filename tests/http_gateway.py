"""A gateway that also serves OpenAI's API."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import openai

from tests.gateway_process import GatewayProcess

TIMEOUT_S = 60.0


class HttpGateway(GatewayProcess):
    """A gateway that serves OpenAI's API on a free port."""

    def __init__(self, *, model: str, workers: int = 1, flags: Sequence[str] = ()) -> None:
        super().__init__(model=model, workers=workers, flags=[*flags, "--openai-listen", "127.0.0.1:0"])

    @property
    def url(self) -> str:
        """Of the API, as its clients have it."""
        return url_of(self)

    def client(self) -> Any:
        return openai_client(self)


def url_of(gateway: GatewayProcess) -> str:
    return f"http://127.0.0.1:{gateway.http_port}/v1"


def openai_client(gateway: GatewayProcess, key: str = "none") -> Any:
    """OpenAI's own client, which tries once."""
    return openai.OpenAI(base_url=url_of(gateway), api_key=key, timeout=TIMEOUT_S, max_retries=0)
