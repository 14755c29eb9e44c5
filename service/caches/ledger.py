"""What is true of every cache: the state that its records leave. No I/O, no clock.

The one place where tokens and lengths are kept while the gateway runs. A record is applied once it is as
durable as the journal promises, and after a restart all of them are, in their order: so what is kept and what
is found again cannot differ. It does not know where KV is, who waits, or what time it is.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from service.caches.chunks import CHUNK_TOKENS, ChunkedTokens, ChunkStore
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
)

# A cache but for its tokens, about.
CACHE_BYTES = 512
# Of the tokens of an append at most so many are kept as they are, to recognise its repetition.
_SHORT_TOKENS = 32
_DIGEST_BYTES = 16


class RecordConflict(Exception):
    """A record does not fit what is there: its writer has a bug, or records before it are missing."""


@dataclass(slots=True, eq=False)
class CacheState:
    """One cache, as its records left it. Changed by the ledger only."""

    number: int
    cache_id: str
    # By name.
    tenant: str
    salt: bytes
    seed: int
    lease_s: float
    request_id: str = ""
    fork: ForkKey | None = None
    tokens: ChunkedTokens = field(default_factory=ChunkedTokens)
    # Tokens before this index are prompt to the frequency and presence penalties.
    prompt_len: int = 0
    # Of the KV that the last tokens were computed on.
    ownership: int = 0
    last: LastAppend | None = None
    # With which its tokens are computed, and with no others.
    weights: int = 0

    @property
    def length(self) -> int:
        """How many tokens it has."""
        return self.tokens.length


class Ledger:
    """Owner of all states, and of the tokens that they share."""

    def __init__(self, chunk_tokens: int = CHUNK_TOKENS) -> None:
        self._store = ChunkStore(chunk_tokens)
        self._states: dict[int, CacheState] = {}

    def __len__(self) -> int:
        return len(self._states)

    def __iter__(self) -> Iterator[CacheState]:
        return iter(self._states.values())

    def get(self, number: int) -> CacheState | None:
        """The cache of a number, if there is one."""
        return self._states.get(number)

    @property
    def size_bytes(self) -> int:
        """What the caches and their tokens take, about; what forks share is counted once."""
        return self._store.size_bytes + CACHE_BYTES * len(self._states)

    def apply(self, record: Record) -> None:
        """Applies a record, all of it or, raising RecordConflict, nothing."""
        match record:
            case TokensAppended():
                self._append(record)
            case CacheCreated():
                self._require_new(record.number)
                self._states[record.number] = CacheState(
                    record.number,
                    record.cache_id,
                    record.tenant,
                    record.salt,
                    record.seed,
                    record.lease_s,
                    record.request_id,
                    weights=record.weights,
                )
            case CacheTruncated():
                self._truncate(record)
            case CacheForked():
                self._fork(record)
            case LeaseRenewed():
                self._state(record.number).lease_s = record.lease_s
            case CacheReleased():
                self._store.drop(self._state(record.number).tokens)
                del self._states[record.number]
            case CacheRestated():
                self._restate(record)

    def apply_run(self, run: TokensAppended) -> None:
        """Applies appends of one token each that followed one another. Raises as `apply` does."""
        self._append(run)
        if len(run.token_ids) > 1:
            state = self._states[run.number]
            state.last = LastAppend(state.length - 1, 1, 0, fingerprint(run.token_ids[-1:]))

    def restate(self, number: int, shares_with: CacheState | None = None) -> CacheRestated:
        """The record that says all of a cache, sharing what it can with another. Raises RecordConflict."""
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
        )

    def _append(self, record: TokensAppended) -> None:
        state = self._state(record.number)
        if record.position != state.length:
            raise RecordConflict(f"append at {record.position} of {state.length} tokens")
        if record.ownership < state.ownership:
            raise RecordConflict(f"append by owner {record.ownership} after owner {state.ownership}")
        self._store.extend(state.tokens, record.token_ids)
        state.prompt_len, state.ownership = record.prompt_len, record.ownership
        asked = record.asked or fingerprint(record.token_ids)
        state.last = LastAppend(record.position, len(record.token_ids), record.accept, asked)

    def _truncate(self, record: CacheTruncated) -> None:
        state = self._state(record.number)
        if record.new_len > state.length:
            raise RecordConflict(f"truncate to {record.new_len} of {state.length} tokens")
        self._store.cut(state.tokens, record.new_len)
        state.prompt_len = min(state.prompt_len, record.new_len)
        state.last = None

    def _fork(self, record: CacheForked) -> None:
        parent = self._state(record.parent)
        for child in record.children:
            self._require_new(child.number)
        for index, child in enumerate(record.children):
            self._states[child.number] = self._child_of(parent, child, index, record)

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
            tokens=self._store.fork(parent.tokens),
            prompt_len=parent.prompt_len,
            weights=parent.weights,
        )

    def _restate(self, record: CacheRestated) -> None:
        tokens = ChunkedTokens()
        if record.shares_with:
            other = self._state(record.shares_with)
            if record.shared_len > other.length:
                raise RecordConflict(f"shares {record.shared_len} of {other.length} tokens")
            tokens = self._store.fork(other.tokens)
            self._store.cut(tokens, record.shared_len)
        self._store.extend(tokens, record.token_ids)
        before = self._states.get(record.number)
        if before is not None:
            self._store.drop(before.tokens)
        self._states[record.number] = CacheState(
            record.number,
            record.cache_id,
            record.tenant,
            record.salt,
            record.seed,
            record.lease_s,
            record.request_id,
            record.fork,
            tokens,
            record.prompt_len,
            record.ownership,
            record.last,
            record.weights,
        )

    def _require_new(self, number: int) -> None:
        if number in self._states:
            raise RecordConflict(f"cache {number} exists already")

    def _state(self, number: int) -> CacheState:
        state = self._states.get(number)
        if state is None:
            raise RecordConflict(f"cache {number} is unknown")
        return state


def fingerprint(token_ids: Sequence[int], parents: Sequence[int] = ()) -> bytes:
    """Equal for equal tokens in equal trees only, and small: long prompts are not kept for it."""
    packed = array("I", token_ids).tobytes()
    if parents:
        tree = packed + array("I", parents).tobytes()
        return b"/" + hashlib.blake2b(tree, digest_size=_DIGEST_BYTES).digest()
    if len(token_ids) <= _SHORT_TOKENS:
        return packed
    # Not of a length that packed tokens have.
    return b"#" + hashlib.blake2b(packed, digest_size=_DIGEST_BYTES).digest()
