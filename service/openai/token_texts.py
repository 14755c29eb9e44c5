"""Single tokens as text, for log-probabilities."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import Any

from quire.v1 import runner_pb2

from service.text.detokenizer import TokenDecoder

_MAX_CACHED_TOKENS = 4096
# OpenAI's value for minus infinity, which JSON does not have.
_MIN_LOGPROB = -9999.0


class TokenTexts:
    """The texts of one model's tokens. Without a tokenizer a token has the text of its chunk."""

    def __init__(self, tokenizer: TokenDecoder | None) -> None:
        self._tokenizer = tokenizer
        self._text = functools.lru_cache(_MAX_CACHED_TOKENS)(self._decode)

    def entries(self, chunk: runner_pb2.SampleChunk) -> Iterator[dict[str, Any]]:
        """Each token of a chunk with its log-probabilities, except an end token."""
        num_tokens = len(chunk.logprobs)
        if num_tokens and self._ends_with_end_token(chunk):
            num_tokens -= 1
        for index, entry in enumerate(chunk.logprobs[:num_tokens]):
            token_id = chunk.token_ids[index] if index < len(chunk.token_ids) else None
            yield {
                "token": chunk.text if token_id is None else self._text(token_id),
                "logprob": finite(entry.logprob),
                "top_logprobs": [
                    {"token": self._text(other), "logprob": finite(logprob)}
                    for other, logprob in zip(entry.top.token_ids, entry.top.logprobs, strict=True)
                ],
            }

    def _ends_with_end_token(self, chunk: runner_pb2.SampleChunk) -> bool:
        if chunk.finish_reason != runner_pb2.FINISH_REASON_STOP or chunk.stop or not chunk.token_ids:
            return False
        return self._tokenizer is not None and not self._tokenizer.decode(chunk.token_ids[-1:])

    def _decode(self, token_id: int) -> str:
        if self._tokenizer is None:
            return ""
        # The alternatives may include special tokens.
        return self._tokenizer.decode([token_id], skip_special_tokens=False)


def finite(logprob: float) -> float:
    """A log-probability that JSON can have."""
    return max(logprob, _MIN_LOGPROB) if math.isfinite(logprob) else _MIN_LOGPROB
