"""The cost of requests: estimated before they are sent, and from the provider's count of tokens. Pure."""

from __future__ import annotations

import sys
from dataclasses import dataclass

from quire.v1 import runner_pb2

# The largest number that a protobuf uint32 holds.
MAX_TOKENS = (1 << 32) - 1
# Average of English text with common tokenizers.
_BYTES_PER_TOKEN = 4
# The role and separators of a message: an upper estimate.
_TOKENS_PER_MESSAGE = 8


@dataclass(frozen=True, slots=True)
class Prices:
    """US dollars per million tokens. `cached_input_usd` None: the same as input."""

    input_usd: float
    output_usd: float
    cached_input_usd: float | None = None

    def __post_init__(self) -> None:
        """Raises ValueError."""
        if max(self.input_usd, self.output_usd, self.cached_input_usd or 0.0) > sys.float_info.max:
            raise ValueError("must be finite")

    def cost_usd(self, usage: runner_pb2.Usage) -> float:
        cached_usd = self.input_usd if self.cached_input_usd is None else self.cached_input_usd
        cached = min(usage.cached_tokens, usage.input_tokens)
        new = usage.input_tokens - cached
        return (new * self.input_usd + cached * cached_usd + usage.output_tokens * self.output_usd) / 1e6

    def message(self) -> runner_pb2.TokenPrices:
        return runner_pb2.TokenPrices(
            input_usd=self.input_usd, output_usd=self.output_usd, cached_input_usd=self.cached_input_usd
        )


def tokens_of(text: str) -> int:
    """An estimate of the number of tokens of a text."""
    return -(-len(text.encode(errors="replace")) // _BYTES_PER_TOKEN)


def input_tokens(item: runner_pb2.ExecuteItem) -> int:
    """An estimate of the number of tokens of an item's prompt, with its tools and schema."""
    tokens = len(item.tokens.token_ids) + tokens_of(item.text) + tokens_of(item.constraint.json_schema)
    tokens += tokens_of(item.chat.tools_json)
    for message in item.chat.messages:
        tokens += _TOKENS_PER_MESSAGE + tokens_of(message.content)
        tokens += sum(tokens_of(call.name) + tokens_of(call.arguments_json) for call in message.tool_calls)
    return tokens


def expected(item: runner_pb2.ExecuteItem, samples: int, max_output_tokens: int) -> runner_pb2.Usage:
    """The estimated maximum usage of a request for `samples` samples of an item, without its cost."""
    output = (item.max_tokens or max_output_tokens) * samples
    return runner_pb2.Usage(input_tokens=input_tokens(item), output_tokens=min(output, MAX_TOKENS))
