"""What a journal has to take for the caches there are, counted anew each time; and who is let in for it.

Sequences are lists of pieces that never change: whoever writes makes a new one, and what nobody holds any
more is gone. So nothing can be forgotten, or given back twice.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from service.caches.records import (
    CacheCreated,
    CacheForked,
    CacheReleased,
    CacheTruncated,
    Record,
    TokensAppended,
)
from service.caches.requests import Append, Fork, Request

# As the journal's own: a cache, a chunk but for its tokens, a pointer to one, a token.
CACHE_BYTES, CHUNK_BYTES, POINTER_BYTES, TOKEN_BYTES = 512, 144, 8, 4
# A cache and its first chunk.
NEW_BYTES = CACHE_BYTES + CHUNK_BYTES + POINTER_BYTES


class _Piece:
    """Some tokens in a row, of which only the number matters."""

    __slots__ = ("length",)

    def __init__(self, length: int) -> None:
        self.length = length


class NeededBytes:
    """Owner of the pieces of every cache."""

    def __init__(self, segment_tokens: int) -> None:
        self._segment_tokens = segment_tokens
        self._caches: dict[int, list[_Piece]] = {}

    def written(self, record: Record) -> None:
        """Follows a record."""
        match record:
            case CacheCreated():
                self._caches[record.number] = []
            case CacheForked():
                for child in record.children:
                    self._caches[child.number] = list(self._caches[record.parent])
            case CacheReleased():
                del self._caches[record.number]
            case CacheTruncated():
                self._cut(self._caches[record.number], record.new_len)
            case TokensAppended():
                self._extend(self._caches[record.number], len(record.token_ids))

    def of(self, numbers: Iterable[int]) -> int:
        """What these take together."""
        sequences = [self._caches[number] for number in numbers]
        pieces = {id(piece): piece.length for sequence in sequences for piece in sequence}
        return (
            CACHE_BYTES * len(sequences)
            + POINTER_BYTES * sum(map(len, sequences))
            + CHUNK_BYTES * len(pieces)
            + TOKEN_BYTES * sum(pieces.values())
        )

    def _extend(self, pieces: list[_Piece], count: int) -> None:
        if pieces and pieces[-1].length < self._segment_tokens:
            count += pieces.pop().length
        starts = range(0, count, self._segment_tokens)
        pieces.extend(_Piece(min(self._segment_tokens, count - start)) for start in starts)

    def _cut(self, pieces: list[_Piece], new_len: int) -> None:
        whole, rest = divmod(new_len, self._segment_tokens)
        del pieces[whole:]
        if rest:
            pieces.append(_Piece(rest))


class JournalBudget:
    """Knows what each request that is under way was counted with."""

    def __init__(self) -> None:
        self.limit_bytes = 0
        # What the journal took when the last requests came.
        self.taken_bytes = 0
        self._counted: dict[int, int] = {}

    def submitted(self, number: int, request: Request, lengths: Sequence[int | None]) -> None:
        """A request comes, after those with smaller numbers, about caches of so many tokens; None: gone."""
        self._counted[number] = counted_bytes(request, lengths)

    def has_room(self, number: int, outstanding: Iterable[int]) -> bool:
        """Whether a request takes nothing, or fits beside what was outstanding when it came."""
        own, before = self._counted[number], self.under_way(number, outstanding)
        return not own or self.taken_bytes + before + own <= self.limit_bytes

    def under_way(self, number: int, outstanding: Iterable[int]) -> int:
        """What those are counted with that came before a request."""
        return sum(self._counted[other] for other in outstanding if other < number)

    def admitted(self, outstanding: Iterable[int], numbers: Iterable[int]) -> None:
        """Asserts that of the last requests only those are under way for which there was room."""
        for number in numbers:
            if number in outstanding:
                assert self.has_room(number, outstanding), "more than the journal may take is under way"


def counted_bytes(request: Request, lengths: Sequence[int | None]) -> int:
    """What the gateway reckons that a request will take, about caches of so many tokens."""
    match request:
        case Append():
            creates = not request.cache_id and not request.is_scoring
            tokens = len(request.token_ids) + max(0, request.prelaunch - 1)
            return TOKEN_BYTES * tokens + NEW_BYTES * creates
        case Fork():
            sources = zip(request.sources, lengths, strict=True)
            return sum(s.count * (NEW_BYTES + length // 32) for s, length in sources if length is not None)
    return 0
