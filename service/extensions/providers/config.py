"""The configuration of one provider."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Literal
from urllib.parse import urlsplit

from service.extensions.providers.prices import Prices
from service.outbound import is_this_machine

DialectName = Literal["openai-chat", "openai-completions", "anthropic-messages"]
# Names of the server's own workers.
_TAKEN_NAMES = ("", "local")
_MAY_BE_0 = ("max_retries",)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProviderConfig:
    """One provider, one model, one dialect. Raises ValueError, which names the setting and has no secrets."""

    # The runtime's name in requests.
    name: str
    # The provider's usual name, such as "openai". Empty: the same as `name`.
    provider: str = ""
    dialect: DialectName
    # The URL without the dialect's path, such as https://api.openai.com/v1.
    base_url: str
    model: str
    # The source of the credentials: an environment variable, or a file. Neither: none are sent.
    api_key_env: str = ""
    api_key_file: str = ""
    # Whether credentials and prompts may be sent to other machines without TLS.
    insecure: bool = False
    # Whether the provider takes fields that OpenAI's own API lacks: stop_token_ids, ignore_eos, and the other
    # settings of SamplingParams, such as top_k and min_p.
    extensions: bool = False
    # The chat dialect's field for the token limit. Some models take max_completion_tokens only.
    max_tokens_field: Literal["max_tokens", "max_completion_tokens"] = "max_tokens"
    # The token limit of an item without max_tokens.
    max_output_tokens: int = 4096
    # The prices of each model.
    prices: Mapping[str, Prices] = field(default_factory=dict)

    requests_per_minute: float | None = None
    tokens_per_minute: float | None = None
    max_concurrent: int = 64
    # The most requests that may wait for these limits.
    max_waiting: int = 4096
    budget_usd_per_hour: float | None = None

    max_retries: int = 3
    breaker_failures: int = 10
    breaker_open_s: float = 30.0

    connect_timeout_s: float = 10.0
    # The time limit for the head of the response, and between two pieces of its body.
    read_timeout_s: float = 30.0
    # The time limit for the whole response.
    answer_timeout_s: float = 900.0
    max_event_bytes: int = 1 << 20
    max_answer_bytes: int = 16 << 20

    def __post_init__(self) -> None:
        """Checks what the settings' types do not."""
        self._check_address()
        if self.name in _TAKEN_NAMES:
            raise ValueError("the name is that of the server's own workers")
        if not self.model:
            raise ValueError("model: must not be empty")
        if self.api_key_env and self.api_key_file:
            raise ValueError("api_key_env and api_key_file: only one of them can be given")
        for setting in fields(self):
            value = getattr(self, setting.name)
            if type(value) in (int, float):
                # Infinity, or an integer that is too large for a float.
                if value > sys.float_info.max:
                    raise ValueError(f"{setting.name}: must be finite")
                if not value and setting.name not in _MAY_BE_0:
                    raise ValueError(f"{setting.name}: must be more than 0")
        if self.budget_usd_per_hour is not None and self.model not in self.prices:
            raise ValueError("budget_usd_per_hour: needs a price of the model")

    def _check_address(self) -> None:
        form = "base_url: must be http(s)://HOST[:PORT][/PATH], without credentials or a query"
        try:
            url = urlsplit(self.base_url)
            host, has_port = url.hostname or "", url.port != 0
        except ValueError:
            raise ValueError(form) from None
        if url.scheme not in ("http", "https") or not host or not has_port:
            raise ValueError(form)
        if url.username is not None or url.query or url.fragment:
            raise ValueError(form)
        if url.scheme == "http" and not self.insecure and not is_this_machine(host):
            raise ValueError("base_url: must be https for another machine, or `insecure` be true")

    @property
    def is_on_this_machine(self) -> bool:
        """Whether the provider is on this machine: no proxy is used then, and TLS is not required."""
        return is_this_machine(urlsplit(self.base_url).hostname or "")

    @property
    def price(self) -> Prices | None:
        """The price of the model. None: unknown."""
        return self.prices.get(self.model)
