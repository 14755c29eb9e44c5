"""What is true: the tokens of every cache, derived from the effects alone.

The oracle sees requests as they are submitted and effects as they come out; it never asks the state machine.
It knows a cache's tokens from the records, checks that each record belongs to the reply behind it, and that
each reply, success or error, is the one that the promises allow at this point.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from quire.v1 import types_pb2, worker_pb2

from service.caches.records import (
    CacheCreated,
    CacheForked,
    CacheReleased,
    CacheTruncated,
    Record,
    TokensAppended,
)
from service.caches.requests import (
    Append,
    Appended,
    Fork,
    Handle,
    Handles,
    Kind,
    Release,
    Released,
    Renew,
    Request,
    Result,
    Truncate,
)
from service.errors import QuireError
from tests.sim.journal_bytes import JournalBudget
from tests.sim.refusals import check_refusal
from tests.sim.toy_model import accepted_length, next_token, output_of
from tests.sim.truth import Applied, Cache


class Oracle:
    """Checks every effect. The simulator keeps the public fields up to `caches`.

    Requests have numbers in the order in which they were submitted.
    """

    def __init__(self, capacity_tokens: int, seen: Counter[str]) -> None:
        self.capacity_tokens = capacity_tokens
        self.seen = seen
        self.now_s = 0.0
        self.ready_epochs: set[int] = set()
        self.draining: bool = False
        self.queue_limit: int = 0
        self.cache_limit: int = 0
        self.budget = JournalBudget()
        # What the simulator does just now: "submit", "expire", "worker lost" ...
        self.cause = ""
        # number -> ticket
        self.tickets: dict[int, int] = {}
        # ticket -> (reason, whether the worker had forgotten the copy)
        self.worker_failures: dict[int, tuple[int, bool]] = {}
        self.caches: dict[str, Cache] = {}
        self.by_request_id: dict[str, str] = {}
        self.outstanding: dict[int, Request] = {}
        # Releases among them whose caller has gone: they are carried out, and not answered.
        self.abandoned: set[int] = set()
        # What is cancelled in this turn, one after the other: some of it may be there still.
        self.taken_back: list[Request] = []
        self._submitted = 0
        self._written: list[Record] = []
        self._may_release: list[str] = []
        self._may_truncate: list[str] = []

    # What the simulator tells.

    def submitted(self, request: Request) -> int:
        self._submitted += 1
        cache = self.cache_of(request)
        if cache is not None and isinstance(request, Release | Renew):
            behind = any(self._asked_of(cache))
            self.seen[f"{type(request).__name__.lower()} {'behind others' if behind else 'alone'}"] += 1
        self.outstanding[self._submitted] = request
        self.budget.submitted(self._submitted, request, len(cache.tokens) if cache is not None else 0)
        return self._submitted

    def cancelled(self, number: int) -> None:
        if isinstance(self.outstanding[number], Release):
            self.abandoned.add(number)
            return
        request = self.outstanding.pop(number)
        self.taken_back.append(request)
        if isinstance(request, Truncate):
            # One that has started is carried out.
            self._may_truncate.append(request.cache_id)

    def worker_lost(self, epoch: int) -> None:
        for cache in self.caches.values():
            if cache.epoch == epoch:
                cache.lost = True

    def cache_of(self, request: Request) -> Cache | None:
        """The cache that a request is about now."""
        if isinstance(request, Append) and not request.cache_id:
            return self.caches.get(self.by_request_id.get(request.request_id, ""))
        return self.caches.get(request.cache_id)

    def failure_of(self, number: int) -> tuple[int, bool] | None:
        """What a worker said of a request that it has failed."""
        return self.worker_failures.get(self.tickets.get(number, 0))

    # Effects.

    def written(self, record: Record) -> None:
        """A record: it changes the truth, and must belong to the next reply or to what caused it."""
        match record:
            case CacheCreated():
                assert record.cache_id not in self.caches
                self.caches[record.cache_id] = Cache(record.cache_id, record.seed, record.lease_s)
            case TokensAppended():
                cache = self.caches[record.cache_id]
                assert record.position == len(cache.tokens), "an append at the end"
                cache.tokens.extend(record.token_ids)
            case CacheTruncated():
                self._truncate(self.caches[record.cache_id], record.new_len)
                if self.cause == "cancel":
                    self._may_truncate.remove(record.cache_id)
                    return
            case CacheForked():
                parent = self.caches[record.parent]
                assert record.lease_s == parent.lease_s
                self.caches[record.cache_id] = Cache(
                    record.cache_id, record.seed, record.lease_s, list(parent.tokens), parent.prompt_len
                )
            case CacheReleased():
                if not self._is_asked_for(record.cache_id):
                    return
        self._written.append(record)

    def replied(self, number: int, outcome: Result | QuireError) -> None:
        """A reply: exactly one for each request that was not cancelled, and the right one."""
        assert number in self.outstanding, "a reply to nobody, or a second one"
        request = self.outstanding.pop(number)
        written, self._written = self._written, []
        if isinstance(outcome, QuireError):
            assert not written, "a failed operation leaves the cache as it was"
            self.seen[outcome.reason] += 1
            check_refusal(self, number, request, outcome)
            return
        self._check_order(number, request)
        match request:
            case Append():
                assert isinstance(outcome, Appended)
                self._check_append(request, outcome, written)
            case Release():
                assert isinstance(outcome, Released)
                self._check_release(request, outcome, written)
            case Fork():
                assert isinstance(outcome, Handles)
                self._check_fork(request, outcome, written)
            case Truncate():
                assert isinstance(outcome, Handles)
                self._check_truncate(request, outcome, written)
            case Renew():
                assert isinstance(outcome, Handles) and not written
                self._check_renew(request, outcome)

    def batch_done(self) -> None:
        """After all effects of one input."""
        assert not self._written, "a record without the reply it belongs to"
        assert not self._may_release, "a fork releases what it was asked to"
        self._may_truncate.clear()
        self.taken_back.clear()

    # Records.

    def _truncate(self, cache: Cache, new_len: int) -> None:
        assert new_len < len(cache.tokens)
        del cache.tokens[new_len:]
        cache.prompt_len = min(cache.prompt_len, new_len)
        cache.last = None

    def _is_asked_for(self, cache_id: str) -> bool:
        """Takes out a cache that was released. Whether a Release asked for it, which is answered next."""
        cache = self.caches[cache_id]
        number, first = next(self._asked_of(cache), (0, None))
        del self.caches[cache_id]
        is_answered = number not in self.abandoned
        for other in [n for n in self.abandoned if self.outstanding[n].cache_id == cache_id]:
            self.abandoned.remove(other)
            del self.outstanding[other]
            self.seen["release of one who has gone"] += 1
        if self.cause == "expire":
            assert cache.promised_s <= self.now_s, "a cache lives as long as its handle says"
            assert first is None, "used"
            self.seen["lease ran out"] += 1
        elif cache_id in self._may_release:
            self._may_release.remove(cache_id)
        else:
            assert isinstance(first, Release), "not before what was asked of the cache earlier"
            return is_answered
        return False

    # Replies.

    def _asked_of(self, cache: Cache) -> Iterator[tuple[int, Request]]:
        """What is outstanding of a cache, by number, in order."""
        for number, request in self.outstanding.items():
            # A creation that finds its first cache lost makes another one: it has nothing to do with that.
            if self.cache_of(request) is cache and (request.cache_id or not cache.lost):
                yield number, request

    def _check_order(self, number: int, request: Request) -> None:
        cache = self.cache_of(request)
        if cache is not None and not cache.lost:
            assert all(other > number for other, _ in self._asked_of(cache)), "one after the other"

    def _check_append(self, append: Append, result: Appended, written: Sequence[Record]) -> None:
        if append.is_scoring:
            assert result.handle is None and not written
            self._check_outputs(append, result, list(append.token_ids), None)
        elif written:
            self._check_applied(append, result, written)
        else:
            self._check_repeated(append, result)

    def _check_applied(self, append: Append, result: Appended, written: Sequence[Record]) -> None:
        appended = written[-1]
        assert isinstance(appended, TokensAppended)
        cache, tokens = self.caches[appended.cache_id], list(append.token_ids)
        base = appended.position
        assert append.position in (None, base), "an append is applied where it says"
        assert base + len(tokens) <= self.capacity_tokens
        if append.cache_id:
            assert cache.cache_id == append.cache_id and len(written) == 1
        else:
            assert base == 0 and isinstance(written[0], CacheCreated) and len(written) == 2
            assert written[0].cache_id == cache.cache_id
            self._check_created(append, cache)
        if append.kind is Kind.PREFILL:
            cache.prompt_len = base + len(tokens)
        assert appended.prompt_len == cache.prompt_len, "what a prefill leaves is prompt, and only that"
        cache.last = Applied(base, append, result.kept)
        assert list(appended.token_ids) == tokens[: result.kept] and _done(result).kept == result.kept
        chosen = self._check_outputs(append, result, cache.tokens[:base] + tokens, cache)
        assert result.kept == (accepted_length(tokens, chosen) if append.accept else len(tokens))
        self._check_handle(result.handle, cache, self.now_s + cache.lease_s)
        assert cache.epoch == appended.epoch
        self.seen[f"applied {append.kind.name.lower()}"] += 1

    def _check_created(self, append: Append, cache: Cache) -> None:
        if append.request_id:
            before = self.caches.get(self.by_request_id.get(append.request_id, ""))
            assert before is None or before.lost, "one request_id, one cache"
            self.by_request_id[append.request_id] = cache.cache_id
            cache.request_id = append.request_id

    def _check_repeated(self, append: Append, result: Appended) -> None:
        cache = self.cache_of(append)
        assert cache is not None and cache.last is not None, "a success that was not written"
        position = append.position if append.cache_id else 0
        assert cache.is_repeat(append, position), "only a repetition is answered without being applied"
        assert result.kept == cache.last.kept
        base_tokens = cache.tokens[: cache.last.base]
        self._check_outputs(append, result, base_tokens + list(append.token_ids), cache)
        self._check_handle(result.handle, cache, None)
        where = "from memory" if cache.is_remembered(append) else "computed again"
        self.seen[f"repetition answered {where}"] += 1
        self.seen["repetition answered after a loss"] += cache.lost

    def _check_outputs(
        self, append: Append, result: Appended, tokens: Sequence[int], cache: Cache | None
    ) -> list[int]:
        """Asserts that the answer has the wanted rows; returns what the model chooses in every row."""
        options = append.output or types_pb2.OutputOptions()
        assert isinstance(options, types_pb2.OutputOptions)
        salt = None
        if options.HasField("sampling"):
            assert cache is not None
            salt = (cache.seed, cache.prompt_len)
        first = len(tokens) - len(append.token_ids) + 1
        chosen = [next_token(tokens[:end], salt) for end in range(first, len(tokens) + 1)]
        wanted = chosen[len(chosen) - append.rows :]
        assert list(_done(result).outputs) == [output_of(token, options) for token in wanted]
        return chosen

    def _check_handle(self, handle: Handle | None, cache: Cache, expires_at_s: float | None) -> None:
        assert handle is not None and handle.cache_id == cache.cache_id
        assert handle.seq_len == len(cache.tokens)
        if expires_at_s is None:
            # It waited since then, perhaps.
            assert handle.expires_at_s <= self.now_s + cache.lease_s
        else:
            assert handle.expires_at_s == expires_at_s, "used now: the lease starts now"
        assert cache.epoch in (0, handle.epoch)
        cache.epoch = handle.epoch
        cache.promised_s = handle.expires_at_s

    def _check_fork(self, fork: Fork, result: Handles, written: Sequence[Record]) -> None:
        parent = self.caches[fork.cache_id]
        assert len(result.handles) == len(written) == fork.count
        for handle, record in zip(result.handles, written, strict=True):
            assert isinstance(record, CacheForked) and record.parent == fork.cache_id
            assert record.cache_id == handle.cache_id
            child = self.caches[handle.cache_id]
            assert child.tokens == parent.tokens
            self._check_handle(handle, child, self.now_s + child.lease_s if child.tokens else None)
            assert child.epoch == parent.epoch
        self._may_release.extend(dict.fromkeys(name for name in fork.release if name in self.caches))
        self.seen["fork"] += 1

    def _check_truncate(self, request: Truncate, result: Handles, written: Sequence[Record]) -> None:
        cache = self.caches[request.cache_id]
        assert len(written) <= 1 and all(record.cache_id == cache.cache_id for record in written)
        assert len(cache.tokens) == request.new_len
        (handle,) = result.handles
        self._check_handle(handle, cache, self.now_s + cache.lease_s if written else None)
        self.seen["truncation"] += 1

    def _check_release(self, request: Release, result: Released, written: Sequence[Record]) -> None:
        assert request.cache_id not in self.caches, "it is gone"
        assert result.released == bool(written), "to one who asks too late there was nothing to release"
        assert all(record == CacheReleased(request.cache_id) for record in written)
        self.seen["release of nothing"] += not written

    def _check_renew(self, request: Renew, result: Handles) -> None:
        cache = self.caches[request.cache_id]
        cache.lease_s = request.lease_s or cache.lease_s
        (handle,) = result.handles
        self._check_handle(handle, cache, self.now_s + cache.lease_s)


def _done(result: Appended) -> worker_pb2.ForwardDone:
    assert isinstance(result.answer, worker_pb2.ForwardDone)
    return result.answer
