"""What model workers compute: a next token that depends on all tokens before it."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

from quire.v1 import types_pb2

VOCAB = 16


def next_token(
    tokens: Sequence[int], salt: tuple[int, int] | None, weights: int = 0, adapter: int = 0
) -> int:
    """The model: a token that depends on all before it, and for a draw on (seed, prompt_len) as well."""
    digest = zlib.crc32(bytes(tokens), weights + (adapter << 16))
    if salt is not None:
        digest = zlib.crc32(repr(salt).encode(), digest)
    return digest % VOCAB


def line_to(tokens: Sequence[int], parents: Sequence[int], index: int) -> list[int]:
    """The tokens of a request up to one of them: all before it, or in a tree those of its path."""
    if not parents:
        return list(tokens[: index + 1])
    return [*(line_to(tokens, parents, parents[index - 1]) if index else ()), tokens[index]]


def accepted_path(tokens: Sequence[int], parents: Sequence[int], chosen: Sequence[int]) -> list[int]:
    """Which tokens of a verify are kept, by index: the first, and drafts while they are what was chosen."""
    path = [0]
    for index in range(1, len(tokens)):
        parent = parents[index - 1] if parents else index - 1
        if parent == path[-1] and tokens[index] == chosen[parent]:
            path.append(index)
    return path


def output_of(token: int, options: types_pb2.OutputOptions) -> types_pb2.StepOutput:
    """A row's output in which one can see the options it was made with."""
    output = types_pb2.StepOutput(token_id=token)
    if options.logits:
        output.logits.data = bytes([token])
    if options.logprob:
        output.logprob = -float(token)
    if options.top_logprobs:
        output.top.token_ids.extend([token] * options.top_logprobs)
    return output
