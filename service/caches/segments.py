"""Sequences of tokens that share common prefixes, and their total size in bytes.

A sequence is a list of segments. All are full except the last. Forks share segments. A shared segment is not
changed: a sequence that appends to it or cuts it gets a copy (copy on write).
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence

# A fork costs a pointer for each segment of its parent, and one copied segment when it first differs.
SEGMENT_TOKENS = 256
# The size of a token, here and in the journal's budget.
TOKEN_BYTES = array("I").itemsize
# The size of a segment without its tokens, and of a pointer from a sequence to it.
_SEGMENT_BYTES = 144
_POINTER_BYTES = 8
NEW_SEGMENT_BYTES = _SEGMENT_BYTES + _POINTER_BYTES


class Segment:
    """Consecutive tokens, and how many sequences share them. Compared by identity."""

    __slots__ = ("ref_count", "token_ids")

    def __init__(self, token_ids: array[int]) -> None:
        self.token_ids = token_ids
        self.ref_count = 1


class SegmentStore:
    """Owns the segments, and is the only one to change them."""

    def __init__(self, segment_tokens: int = SEGMENT_TOKENS) -> None:
        self.size_bytes = 0
        self._segment_tokens = segment_tokens

    def fork(self, parent: SegmentedTokens) -> SegmentedTokens:
        """A sequence that shares all tokens of `parent`."""
        for segment in parent.segments:
            segment.ref_count += 1
        self.size_bytes += _POINTER_BYTES * len(parent.segments)
        return SegmentedTokens(parent.segments[:], parent.length)

    def extend(self, tokens: SegmentedTokens, token_ids: Sequence[int]) -> None:
        room = -tokens.length % self._segment_tokens
        if room and len(token_ids) == 1:
            # The usual case.
            last = tokens.segments[-1]
            (last.token_ids if last.ref_count == 1 else self._own_last(tokens)).append(token_ids[0])
            self.size_bytes += TOKEN_BYTES
            tokens.length += 1
            return
        rest = array("I", token_ids)
        if room:
            self._own_last(tokens).extend(rest[:room])
            self.size_bytes += TOKEN_BYTES * min(room, len(rest))
        for start in range(room, len(rest), self._segment_tokens):
            self._push(tokens, rest[start : start + self._segment_tokens])
        tokens.length += len(rest)

    def cut(self, tokens: SegmentedTokens, new_len: int) -> None:
        """Keeps only the first `new_len` tokens. There are at least as many."""
        while (len(tokens.segments) - 1) * self._segment_tokens >= new_len and tokens.segments:
            self._pop(tokens)
        keep = new_len - (len(tokens.segments) - 1) * self._segment_tokens
        if tokens.segments and keep < len(tokens.segments[-1].token_ids):
            last = self._own_last(tokens)
            self.size_bytes -= TOKEN_BYTES * (len(last) - keep)
            del last[keep:]
        tokens.length = new_len

    def drop(self, tokens: SegmentedTokens) -> None:
        """Drops all tokens. Faster than `cut`: thousands of sequences can end at once."""
        for segment in tokens.segments:
            segment.ref_count -= 1
            if not segment.ref_count:
                self.size_bytes -= _SEGMENT_BYTES + TOKEN_BYTES * len(segment.token_ids)
        self.size_bytes -= _POINTER_BYTES * len(tokens.segments)
        tokens.segments, tokens.length = [], 0

    def _own_last(self, tokens: SegmentedTokens) -> array[int]:
        """The tokens of the last segment, which is copied if it is shared."""
        if tokens.segments[-1].ref_count > 1:
            copy = tokens.segments[-1].token_ids[:]
            self._pop(tokens)
            self._push(tokens, copy)
        return tokens.segments[-1].token_ids

    def _push(self, tokens: SegmentedTokens, token_ids: array[int]) -> None:
        tokens.segments.append(Segment(token_ids))
        self.size_bytes += NEW_SEGMENT_BYTES + TOKEN_BYTES * len(token_ids)

    def _pop(self, tokens: SegmentedTokens) -> None:
        segment = tokens.segments.pop()
        self.size_bytes -= _POINTER_BYTES
        segment.ref_count -= 1
        if segment.ref_count == 0:
            self.size_bytes -= _SEGMENT_BYTES + TOKEN_BYTES * len(segment.token_ids)


class SegmentedTokens:
    """The tokens of one sequence. Changed only by the store."""

    __slots__ = ("length", "segments")

    def __init__(self, segments: list[Segment] | None = None, length: int = 0) -> None:
        self.segments = [] if segments is None else segments
        self.length = length

    def copy(self, start: int = 0) -> array[int]:
        return self.between(start, self.length)

    def between(self, start: int, end: int) -> array[int]:
        copied = array("I")
        at = 0
        for segment in self.segments:
            if at >= end:
                break
            if at + len(segment.token_ids) > start:
                copied.extend(segment.token_ids[max(start - at, 0) : end - at])
            at += len(segment.token_ids)
        return copied

    def digest(self, length: int, salt: bytes = b"") -> bytes:
        """blake2b (16 bytes) of the first `length` tokens as little-endian uint32, under a salt.

        As in workers.
        """
        key = hashlib.blake2b(salt, digest_size=16).digest() if salt else b""
        hashed = hashlib.blake2b(digest_size=16, key=key)
        for segment in self.segments:
            hashed.update(segment.token_ids[:length].tobytes())
            length -= min(length, len(segment.token_ids))
            if not length:
                break
        return hashed.digest()

    @property
    def is_shared(self) -> bool:
        """Whether another sequence shares the first segment."""
        return bool(self.segments) and self.segments[0].ref_count > 1

    def shared_len(self, other: SegmentedTokens) -> int:
        """How many of the first tokens are in shared segments."""
        shared = 0
        for own, theirs in zip(self.segments, other.segments, strict=False):
            if own is not theirs:
                break
            shared += len(own.token_ids)
        return shared
