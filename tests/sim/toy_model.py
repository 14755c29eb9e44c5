"""What model workers compute: a next token that depends on all tokens before it."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

from quire.v1 import types_pb2

VOCAB = 16


def next_token(tokens: Sequence[int], salt: tuple[int, int] | None, weights: int = 0) -> int:
    """The model: a token that depends on all before it, and for a draw on (seed, prompt_len) as well."""
    digest = zlib.crc32(bytes(tokens), weights)
    if salt is not None:
        digest = zlib.crc32(repr(salt).encode(), digest)
    return digest % VOCAB


def accepted_length(tokens: Sequence[int], chosen: Sequence[int]) -> int:
    """How many tokens of a verify are kept: the first, and drafts while they are what was chosen."""
    kept = 1
    while kept < len(tokens) and tokens[kept] == chosen[kept - 1]:
        kept += 1
    return kept


def output_of(token: int, options: types_pb2.OutputOptions) -> types_pb2.StepOutput:
    """A row's output in which one can see the options it was made with."""
    output = types_pb2.StepOutput(token_id=token)
    if options.logits:
        output.logits.data = bytes([token])
    output.top.token_ids.extend([token] * options.top_logprobs)
    return output
