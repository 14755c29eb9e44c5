"""The durable state of all caches, which follows from the records. No I/O, no clock.

Tokens and lengths are kept only here. A record is applied when it is durable. After a restart all records are
applied again in the same order, so the recovered state is the same.

Not here: placement, queues and leases.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from service.caches.records import (
    CacheCreated,
    CacheForked,
    CacheReleased,
    CacheRestated,
    CacheTruncated,
    Child,
    ForkKey,
    LastAppend,
    LeaseRenewed,
    Record,
    TokensAppended,
    ValueStored,
)
from service.caches.segments import NEW_SEGMENT_BYTES, SEGMENT_TOKENS, SegmentedTokens, SegmentStore

# The approximate size of a cache without its tokens; and with the first segment of them.
_CACHE_BYTES = 512
NEW_CACHE_BYTES = _CACHE_BYTES + NEW_SEGMENT_BYTES
# The fingerprint of up to this many tokens is the tokens themselves. More are hashed.
_SHORT_TOKENS = 32
_DIGEST_BYTES = 16


class RecordConflict(Exception):
    """A record does not fit the state: its writer has a bug, or earlier records are missing."""


@dataclass(slots=True, eq=False)
class CacheState:
    """The durable state of one cache. Changed only by the ledger."""

    number: int
    cache_id: str
    # The tenant's name.
    tenant: str
    salt: bytes
    seed: int
    lease_s: float
    request_id: str = ""
    fork: ForkKey | None = None
    tokens: SegmentedTokens = field(default_factory=SegmentedTokens)
    # Tokens before this index are prompt to the frequency and presence penalties.
    prompt_len: int = 0
    # The placement of the KV on which the last tokens were computed.
    ownership: int = 0
    # The numbers of the only weights that compute it, and of its adapter (0: none).
    weights: int = 0
    adapter: int = 0
    # The last append, to recognise its repetition: see `LastAppend`. None: there is none.
    last_base: int | None = None
    last_kept: int = 0
    last_accept: int = 0
    # Empty: all its tokens were kept, so that it follows from them.
    last_fingerprint: bytes = b""

    @classmethod
    def of(cls, record: CacheCreated | CacheRestated) -> CacheState:
        """The state of a cache according to a record, without its tokens."""
        return cls(
            record.number,
            record.cache_id,
            record.tenant,
            record.salt,
            record.seed,
            record.lease_s,
            record.request_id,
            weights=record.weights,
            adapter=record.adapter,
        )

    @property
    def length(self) -> int:
        return self.tokens.length

    @property
    def last(self) -> LastAppend | None:
        """The append that set its current length."""
        if self.last_base is None:
            return None
        kept = self.tokens.between(self.last_base, self.last_base + self.last_kept)
        requested = self.last_fingerprint or fingerprint(kept)
        return LastAppend(self.last_base, self.last_kept, self.last_accept, requested)


class Ledger:
    """Owns all states and their shared tokens."""

    def __init__(self, segment_tokens: int = SEGMENT_TOKENS) -> None:
        # Its size includes that of the states. Changed only here.
        self.store = SegmentStore(segment_tokens)
        self._states: dict[int, CacheState] = {}
        # The last value of each name. Changed only by `apply`.
        self.values: dict[str, bytes] = {}
        # The number of caches of each adapter.
        self.adapters: Counter[int] = Counter()
        # (range of older weights, the weights with which their caches continue): see `continue_weights`.
        self._continued: tuple[range, int] = range(0), 0

    def __len__(self) -> int:
        return len(self._states)

    def __iter__(self) -> Iterator[CacheState]:
        return iter(self._states.values())

    def get(self, number: int) -> CacheState | None:
        return self._states.get(number)

    def continue_weights(self, first: int, weights: int) -> None:
        """Lets all caches of the weights `first` to `weights - 1` continue with `weights`.

        This includes records that are applied later, since they may have been written before.
        """
        self._continued = range(first, weights), weights
        for state in self:
            self._continue(state)

    def _add(self, state: CacheState) -> None:
        self._continue(state)
        self._states[state.number] = state
        self.store.size_bytes += _CACHE_BYTES
        if state.adapter:
            self.adapters[state.adapter] += 1

    def _remove(self, state: CacheState) -> None:
        self.store.drop(state.tokens)
        del self._states[state.number]
        self.store.size_bytes -= _CACHE_BYTES
        if state.adapter:
            self.adapters[state.adapter] -= 1
            if not self.adapters[state.adapter]:
                del self.adapters[state.adapter]

    def _continue(self, state: CacheState) -> None:
        older, weights = self._continued
        if state.weights in older:
            state.weights = weights

    @property
    def size_bytes(self) -> int:
        """The approximate size of all caches, tokens and values. Shared tokens count once."""
        return self.store.size_bytes

    def apply(self, record: Record) -> None:  # noqa: C901 - a case for each kind
        """Applies a record. Raises RecordConflict, and then changes nothing."""
        match record:
            case TokensAppended():
                # Inline: this runs for each token.
                state = self._states.get(record.number) or self._state(record.number)
                position, token_ids = record.position, record.token_ids
                if position != state.tokens.length:
                    raise RecordConflict(f"append at {position} of {state.tokens.length} tokens")
                if record.ownership < state.ownership:
                    raise RecordConflict(f"append by owner {record.ownership} after owner {state.ownership}")
                self.store.extend(state.tokens, token_ids)
                state.prompt_len, state.ownership = record.prompt_len, record.ownership
                state.last_base, state.last_kept, state.last_accept = position, len(token_ids), record.accept
                state.last_fingerprint = record.fingerprint
            case CacheCreated():
                self._require_new(record.number)
                self._add(CacheState.of(record))
            case CacheTruncated():
                self._truncate(record)
            case CacheForked():
                self._fork(record)
            case LeaseRenewed():
                self._state(record.number).lease_s = record.lease_s
            case CacheReleased():
                self._remove(self._state(record.number))
            case CacheRestated():
                self._restate(record)
            case ValueStored():
                self._set_value(record)

    def restate(self, number: int, shares_with: CacheState | None = None) -> CacheRestated:
        """A record of the whole state of a cache. Tokens that it shares with `shares_with` are not repeated.

        Raises RecordConflict.
        """
        state = self._state(number)
        shared_len = 0 if shares_with is None else state.tokens.shared_len(shares_with.tokens)
        return CacheRestated(
            number=number,
            cache_id=state.cache_id,
            tenant=state.tenant,
            salt=state.salt,
            seed=state.seed,
            lease_s=state.lease_s,
            request_id=state.request_id,
            prompt_len=state.prompt_len,
            ownership=state.ownership,
            last=state.last,
            fork=state.fork,
            shares_with=shares_with.number if shares_with is not None and shared_len else 0,
            shared_len=shared_len,
            token_ids=state.tokens.copy(shared_len),
            weights=state.weights,
            adapter=state.adapter,
        )

    def _set_value(self, record: ValueStored) -> None:
        before = self.values.pop(record.name, b"")
        self.store.size_bytes += len(record.value) - len(before)
        if record.value:
            self.values[record.name] = record.value

    def _truncate(self, record: CacheTruncated) -> None:
        state = self._state(record.number)
        if record.new_len > state.length:
            raise RecordConflict(f"truncate to {record.new_len} of {state.length} tokens")
        self.store.cut(state.tokens, record.new_len)
        state.prompt_len = min(state.prompt_len, record.new_len)
        state.last_base = None

    def _fork(self, record: CacheForked) -> None:
        parent = self._state(record.parent)
        for child in record.children:
            self._require_new(child.number)
        for index, child in enumerate(record.children):
            self._add(self._child_of(parent, child, index, record))

    def _child_of(self, parent: CacheState, child: Child, index: int, record: CacheForked) -> CacheState:
        key = None
        if record.request_id:
            count = record.total or len(record.children)
            key = ForkKey(record.request_id, record.parent, record.first + index, count)
        return CacheState(
            child.number,
            child.cache_id,
            parent.tenant,
            parent.salt,
            child.seed,
            parent.lease_s,
            fork=key,
            tokens=self.store.fork(parent.tokens),
            prompt_len=parent.prompt_len,
            weights=parent.weights,
            adapter=parent.adapter,
        )

    def _restate(self, record: CacheRestated) -> None:
        tokens = SegmentedTokens()
        if record.shares_with:
            other = self._state(record.shares_with)
            if record.shared_len > other.length:
                raise RecordConflict(f"shares {record.shared_len} of {other.length} tokens")
            tokens = self.store.fork(other.tokens)
            self.store.cut(tokens, record.shared_len)
        self.store.extend(tokens, record.token_ids)
        before = self._states.get(record.number)
        if before is not None:
            self._remove(before)
        state = CacheState.of(record)
        self._add(state)
        state.fork, state.tokens = record.fork, tokens
        state.prompt_len, state.ownership = record.prompt_len, record.ownership
        last = record.last
        if last is not None:
            state.last_base, state.last_kept = last.base, last.kept
            state.last_accept, state.last_fingerprint = last.accept, last.fingerprint

    def _require_new(self, number: int) -> None:
        if number in self._states:
            raise RecordConflict(f"cache {number} exists already")

    def _state(self, number: int) -> CacheState:
        state = self._states.get(number)
        if state is None:
            raise RecordConflict(f"cache {number} is unknown")
        return state


def fingerprint(token_ids: Sequence[int], parents: Sequence[int] = ()) -> bytes:
    """A short value that is equal only for equal tokens in equal trees. Long prompts are hashed."""
    packed = array("I", token_ids).tobytes()
    if parents:
        tree = packed + array("I", parents).tobytes()
        return b"/" + hashlib.blake2b(tree, digest_size=_DIGEST_BYTES).digest()
    if len(token_ids) <= _SHORT_TOKENS:
        return packed
    # The prefix makes the length differ from that of packed tokens.
    return b"#" + hashlib.blake2b(packed, digest_size=_DIGEST_BYTES).digest()
