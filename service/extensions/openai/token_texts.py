"""The texts of single tokens, for log-probabilities."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from quire.detokenizer import Detokenizer, decoder_types, has_no_text
from quire.v1 import executor_pb2, runner_pb2, types_pb2

from service.text.token_bytes import spelled_bytes

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_MAX_CACHED_TOKENS = 4096
# OpenAI's value for minus infinity, which JSON lacks.
_MIN_LOGPROB = -9999.0


class TokenTexts:
    """The texts of a model's tokens. Without a tokenizer a token has the text of its chunk."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._decoders = set() if tokenizer is None else decoder_types(tokenizer.decoder)
        self._bytes = functools.lru_cache(_MAX_CACHED_TOKENS)(self._find_bytes)

    def entries(
        self, chunk: runner_pb2.SampleChunk, num_before: int, begin: int = 0
    ) -> Iterator[dict[str, Any]]:
        """The tokens of a chunk with their log-probabilities, except an end token.

        `begin`, `num_before`: the number of characters before the sample and before the chunk. The `offset`
        of an entry is where its text begins, which may be after the text that was sent so far.
        """
        num_tokens = len(chunk.logprobs)
        if num_tokens and self._ends_with_end_token(chunk):
            num_tokens -= 1
        for index, entry in enumerate(chunk.logprobs[:num_tokens]):
            token_id = chunk.token_ids[index] if index < len(chunk.token_ids) else None
            token = _named(chunk.text.encode()) if token_id is None else self._token(token_id)
            yield {
                **token,
                "logprob": finite(entry.logprob),
                "top_logprobs": self._alternatives(entry.top),
                "offset": begin + entry.text_offset if entry.HasField("text_offset") else num_before,
            }

    def of_prompt(
        self, token_ids: Sequence[int], scored: executor_pb2.ForwardResponse
    ) -> Iterator[dict[str, Any]]:
        """The tokens of a prompt, as in `entries`. The first one has no log-probability."""
        assert self._tokenizer is not None
        detokenizer = Detokenizer(self._tokenizer)
        num_characters = 0
        for index, token_id in enumerate(token_ids):
            offset = num_characters + len(detokenizer.unsettled)
            num_characters += len(detokenizer.push(token_id))
            entry = {**self._token(token_id), "logprob": None, "top_logprobs": None, "offset": offset}
            if index:
                top = scored.outputs[index - 1].top
                entry["logprob"] = finite(scored.token_logprobs[index - 1])
                entry["top_logprobs"] = self._alternatives(top)
            yield entry

    def name(self, token_id: int) -> str | None:
        """The text or name of a token. None: unknown."""
        return None if self._tokenizer is None else str(self._token(token_id)["token"])

    def _alternatives(self, top: types_pb2.TopLogprobs) -> list[dict[str, Any]]:
        return [
            {**self._token(other), "logprob": finite(logprob)}
            for other, logprob in zip(top.token_ids, top.logprobs, strict=True)
        ]

    def _ends_with_end_token(self, chunk: runner_pb2.SampleChunk) -> bool:
        if chunk.finish_reason != runner_pb2.FINISH_REASON_STOP or not chunk.token_ids:
            return False
        return self._tokenizer is not None and has_no_text(self._tokenizer, chunk.token_ids[-1])

    def _token(self, token_id: int) -> dict[str, Any]:
        token_bytes = self._bytes(token_id)
        if token_bytes is None:
            return {"id": token_id, "token": f"token_id:{token_id}", "bytes": None, "is_byte": False}
        return {"id": token_id, **_named(token_bytes), "is_byte": self._is_byte(token_id)}

    def _find_bytes(self, token_id: int) -> bytes | None:
        """The bytes that a token adds to a nonempty text, or a special token's name. None: unknown."""
        tokenizer = self._tokenizer
        token = None if tokenizer is None else tokenizer.id_to_token(token_id)
        if tokenizer is None or token is None:
            return None
        if has_no_text(tokenizer, token_id):
            # The alternatives may include special tokens.
            return token.encode()
        spelled = spelled_bytes(token, self._decoders)
        if spelled is not None:
            return spelled
        # A decoder may render it differently at the beginning of a text.
        once, twice = tokenizer.decode([token_id]), tokenizer.decode([token_id] * 2)
        return (twice[len(once) :] if twice.startswith(once) and twice != once else once).encode()

    def _is_byte(self, token_id: int) -> bool:
        """Whether a token is a byte of byte fallback."""
        token = None if self._tokenizer is None else self._tokenizer.id_to_token(token_id)
        return token is not None and spelled_bytes(token, self._decoders & {"ByteFallback"}) is not None


def by_text(entry: Mapping[str, Any], name: str) -> dict[str, Any] | None:
    """The value `name` (`logprob`, `id`) of a token and its alternatives, by their texts.

    Keys are unique. None: the first token of a prompt.
    """
    if entry["top_logprobs"] is None:
        return None
    others = [top for top in entry["top_logprobs"] if top["id"] != entry.get("id")]
    # Two tokens can have the same text: a letter, and its byte.
    texts = [entry["token"], *(top["token"] for top in others if not top["is_byte"])]
    found = {entry["token"]: entry.get(name)}
    for top in others:
        keys = (top["token"], _bytes_name(top["bytes"] or ()), f"token_id:{top['id']}")
        is_other_text = top["is_byte"] and top["token"] in texts
        found[next(key for key in keys[is_other_text:] if key not in found)] = top[name]
    return found


def finite(logprob: float) -> float:
    """A log-probability as a finite number, for JSON."""
    return max(logprob, _MIN_LOGPROB) if math.isfinite(logprob) else _MIN_LOGPROB


def _named(token_bytes: bytes) -> dict[str, Any]:
    """A token's text; or a name made of its bytes if these are only a part of a character."""
    try:
        name = token_bytes.decode()
    except UnicodeDecodeError:
        name = _bytes_name(token_bytes)
    return {"token": name, "bytes": list(token_bytes)}


def _bytes_name(token_bytes: Iterable[int]) -> str:
    """The name of bytes in OpenAI's API."""
    return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token_bytes)
