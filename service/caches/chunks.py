"""Sequences of tokens that share what they have in common, and how many bytes they all take.

A sequence is a list of chunks, all full but the last. Forks hold the same chunks; one that others hold too is
never written to: who appends to it or cuts it gets a copy.
"""

from __future__ import annotations

import hashlib
import sys
from array import array
from collections.abc import Sequence

# A fork costs a pointer for each chunk of its parent, and one copied chunk once it goes its own way.
CHUNK_TOKENS = 256
_TOKEN_BYTES = array("I").itemsize
# A chunk but for its tokens, and a sequence's pointer to it.
_CHUNK_BYTES = 144
_POINTER_BYTES = 8


class Chunk:
    """Some tokens that follow one another, and how many sequences hold them. Equal to itself only."""

    __slots__ = ("holders", "token_ids")

    def __init__(self, token_ids: array[int]) -> None:
        self.token_ids = token_ids
        self.holders = 1


class ChunkStore:
    """Owner of the chunks, and the only one who changes them."""

    def __init__(self, chunk_tokens: int = CHUNK_TOKENS) -> None:
        self.size_bytes = 0
        self._chunk_tokens = chunk_tokens

    def fork(self, parent: ChunkedTokens) -> ChunkedTokens:
        """The same tokens once more."""
        for chunk in parent.chunks:
            chunk.holders += 1
        self.size_bytes += _POINTER_BYTES * len(parent.chunks)
        return ChunkedTokens(parent.chunks[:], parent.length)

    def extend(self, tokens: ChunkedTokens, token_ids: Sequence[int]) -> None:
        """Appends tokens."""
        rest = array("I", token_ids)
        room = -tokens.length % self._chunk_tokens
        if 0 < len(rest) <= room:
            # As most do that append one.
            self._own_last(tokens).extend(rest)
            self.size_bytes += _TOKEN_BYTES * len(rest)
            tokens.length += len(rest)
            return
        if room:
            self._own_last(tokens).extend(rest[:room])
            self.size_bytes += _TOKEN_BYTES * min(room, len(rest))
        for start in range(room, len(rest), self._chunk_tokens):
            self._push(tokens, rest[start : start + self._chunk_tokens])
        tokens.length += len(rest)

    def cut(self, tokens: ChunkedTokens, new_len: int) -> None:
        """Drops all but the first `new_len` tokens, of which there are as many."""
        while (len(tokens.chunks) - 1) * self._chunk_tokens >= new_len and tokens.chunks:
            self._pop(tokens)
        keep = new_len - (len(tokens.chunks) - 1) * self._chunk_tokens
        if tokens.chunks and keep < len(tokens.chunks[-1].token_ids):
            last = self._own_last(tokens)
            self.size_bytes -= _TOKEN_BYTES * (len(last) - keep)
            del last[keep:]
        tokens.length = new_len

    def drop(self, tokens: ChunkedTokens) -> None:
        """Drops all tokens, faster than `cut`: thousands of sequences may end at once."""
        for chunk in tokens.chunks:
            chunk.holders -= 1
            if not chunk.holders:
                self.size_bytes -= _CHUNK_BYTES + _TOKEN_BYTES * len(chunk.token_ids)
        self.size_bytes -= _POINTER_BYTES * len(tokens.chunks)
        tokens.chunks, tokens.length = [], 0

    def _own_last(self, tokens: ChunkedTokens) -> array[int]:
        """The last chunk, which nobody else holds from now on."""
        if tokens.chunks[-1].holders > 1:
            copy = tokens.chunks[-1].token_ids[:]
            self._pop(tokens)
            self._push(tokens, copy)
        return tokens.chunks[-1].token_ids

    def _push(self, tokens: ChunkedTokens, token_ids: array[int]) -> None:
        tokens.chunks.append(Chunk(token_ids))
        self.size_bytes += _POINTER_BYTES + _CHUNK_BYTES + _TOKEN_BYTES * len(token_ids)

    def _pop(self, tokens: ChunkedTokens) -> None:
        chunk = tokens.chunks.pop()
        self.size_bytes -= _POINTER_BYTES
        chunk.holders -= 1
        if chunk.holders == 0:
            self.size_bytes -= _CHUNK_BYTES + _TOKEN_BYTES * len(chunk.token_ids)


class ChunkedTokens:
    """The tokens of one sequence. Changed by the store only."""

    __slots__ = ("chunks", "length")

    def __init__(self, chunks: list[Chunk] | None = None, length: int = 0) -> None:
        self.chunks = [] if chunks is None else chunks
        self.length = length

    def copy(self, start: int = 0) -> array[int]:
        """The tokens from `start` on, as a copy. `start` is the begin of a chunk, or none is left."""
        copied = array("I")
        for chunk in self.chunks:
            if start <= 0:
                copied.extend(chunk.token_ids)
            start -= len(chunk.token_ids)
        return copied

    def between(self, start: int, end: int) -> array[int]:
        """The tokens from `start` up to `end`, as a copy."""
        copied = array("I")
        at = 0
        for chunk in self.chunks:
            if at >= end:
                break
            if at + len(chunk.token_ids) > start:
                copied.extend(chunk.token_ids[max(start - at, 0) : end - at])
            at += len(chunk.token_ids)
        return copied

    def digest(self, length: int) -> bytes:
        """Of the first `length` tokens: blake2b of 16 bytes over little-endian uint32, as in workers."""
        hashed = hashlib.blake2b(digest_size=16)
        for chunk in self.chunks:
            hashed.update(_little_endian(chunk.token_ids[:length]))
            length -= min(length, len(chunk.token_ids))
            if not length:
                break
        return hashed.digest()

    @property
    def is_shared(self) -> bool:
        """Whether another sequence has the same first tokens."""
        return bool(self.chunks) and self.chunks[0].holders > 1

    def shared_len(self, other: ChunkedTokens) -> int:
        """How many of the first tokens are in chunks that are the other's, too."""
        shared = 0
        for own, theirs in zip(self.chunks, other.chunks, strict=False):
            if own is not theirs:
                break
            shared += len(own.token_ids)
        return shared


def _little_endian(token_ids: array[int]) -> bytes:
    if sys.byteorder == "big":
        token_ids = token_ids[:]
        token_ids.byteswap()
    return token_ids.tobytes()
