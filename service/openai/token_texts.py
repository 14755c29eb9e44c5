"""Single tokens as text, for those who ask for log-probabilities."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import Any, Protocol, cast

from quire.v1 import runner_pb2

from service.text.detokenizer import Decodes

_MAX_KEPT_TOKENS = 4096
# As OpenAI writes what is all but impossible: JSON has no infinity.
_LEAST_LOGPROB = -9999.0


class _DecodesAll(Protocol):
    """What a tokenizer of the library offers beside `Decodes`."""

    def decode(self, ids: list[int], *, skip_special_tokens: bool) -> str:
        """The text of `ids`."""


class TokenTexts:
    """The tokens of one model. Without its tokenizer each token has the text that came with it."""

    def __init__(self, tokenizer: Decodes | None) -> None:
        self._tokenizer = tokenizer
        self._text = functools.lru_cache(_MAX_KEPT_TOKENS)(self._decoded)

    def entries(self, chunk: runner_pb2.SampleChunk) -> Iterator[dict[str, Any]]:
        """Each token of a chunk with its log-probability; not the one that only says that it ends."""
        shown = len(chunk.logprobs)
        if shown and self._is_end(chunk):
            shown -= 1
        for index, told in enumerate(chunk.logprobs[:shown]):
            token_id = chunk.token_ids[index] if index < len(chunk.token_ids) else None
            yield {
                "token": chunk.text if token_id is None else self._text(token_id),
                "logprob": _number(told.logprob),
                "top_logprobs": [
                    {"token": self._text(other), "logprob": _number(logprob)}
                    for other, logprob in zip(told.top.token_ids, told.top.logprobs, strict=True)
                ],
            }

    def _is_end(self, chunk: runner_pb2.SampleChunk) -> bool:
        if chunk.finish_reason != runner_pb2.FINISH_REASON_STOP or chunk.stop or not chunk.token_ids:
            return False
        return self._tokenizer is not None and not self._tokenizer.decode(chunk.token_ids[-1:])

    def _decoded(self, token_id: int) -> str:
        if self._tokenizer is None:
            return ""
        # A special token, too, is one that could have been chosen.
        return cast(_DecodesAll, self._tokenizer).decode([token_id], skip_special_tokens=False)


def _number(logprob: float) -> float:
    return max(logprob, _LEAST_LOGPROB) if math.isfinite(logprob) else _LEAST_LOGPROB
