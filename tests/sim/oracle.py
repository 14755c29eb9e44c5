"""What is true: the tokens of every cache, derived from the effects alone.

The oracle sees requests as they are submitted and effects as they come out; it never asks the state machine.
It knows a cache's tokens from the records, checks that each record belongs to the reply behind it, and that
each reply, success or error, is the one that the promises allow at this point.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from quire.v1 import types_pb2

from service.caches.requests import (
    Append,
    AppendResult,
    ForkRequest,
    Handle,
    HandlesResult,
    Kind,
    Request,
    Result,
    Rows,
    TruncateRequest,
)
from service.errors import QuireError
from service.journal.base import Appended, Created, Forked, Record, Released, Truncated
from tests.sim.model_worker import accepted_length, next_token, output_of
from tests.sim.refusals import check_refusal


@dataclass(slots=True)
class Applied:
    """The last step of a cache, if nothing came after it."""

    base: int
    step: Append
    kept: int


@dataclass(slots=True)
class Cache:
    """The truth about one cache."""

    cache_id: str
    seed: int
    lease_s: float
    tokens: list[int] = field(default_factory=list)
    prompt_len: int = 0
    epoch: int = 0
    request_id: str = ""
    last: Applied | None = None
    # Its KV is gone, and the gateway knows.
    lost: bool = False
    # Until when the last handle that a caller got promises that the cache lives.
    promised_s: float = 0.0

    def is_repeat(self, step: Append, position: int | None) -> bool:
        """Whether a step says what the last one said."""
        last = self.last
        return (
            last is not None
            and position == last.base
            and list(step.token_ids) == list(last.step.token_ids)
            and step.accept == last.step.accept
        )

    def is_remembered(self, step: Append) -> bool:
        """Whether the last step's answer must have been kept for a step that repeats it."""
        last = self.last
        return (
            last is not None
            and step.rows == last.step.rows
            and step.output == last.step.output
            and not (step.output is not None and step.output.logits)
        )


class Oracle:
    """Checks every effect. The simulator keeps the public fields up to `caches`."""

    def __init__(self, max_seq_len: int, seen: Counter[str]) -> None:
        self.max_seq_len = max_seq_len
        self.seen = seen
        self.now_s = 0.0
        self.ready_epochs: set[int] = set()
        self.draining: bool = False
        self.queue_limit: int = 0
        # What the simulator did last: ("release", cache_id), ("expire", ""), ("worker_lost", "") ...
        self.cause: tuple[str, str] = ("", "")
        # op id -> (reason, whether the worker had forgotten the copy)
        self.worker_failures: dict[int, tuple[int, bool]] = {}
        self.caches: dict[str, Cache] = {}
        self.by_request_id: dict[str, str] = {}
        self.outstanding: dict[int, Request] = {}
        self._written: list[Record] = []
        self._may_release: list[str] = []

    # What the simulator tells.

    def submitted(self, ticket: int, request: Request) -> None:
        assert ticket not in self.outstanding, "a ticket is new"
        self.outstanding[ticket] = request

    def cancelled(self, ticket: int) -> Request:
        return self.outstanding.pop(ticket)

    def worker_lost(self, epoch: int) -> None:
        for cache in self.caches.values():
            if cache.epoch == epoch:
                cache.lost = True

    def cache_of(self, request: Request) -> Cache | None:
        """The cache that a request is about now."""
        if isinstance(request, Append) and not request.cache_id:
            return self.caches.get(self.by_request_id.get(request.request_id, ""))
        return self.caches.get(request.cache_id)

    # Effects.

    def written(self, record: Record) -> None:
        """A record: it changes the truth, and must belong to the next reply or to what caused it."""
        match record:
            case Created():
                assert record.cache_id not in self.caches
                self.caches[record.cache_id] = Cache(record.cache_id, record.seed, record.lease_s)
            case Appended():
                cache = self.caches[record.cache_id]
                assert record.position == len(cache.tokens), "an append at the end"
                cache.tokens.extend(record.token_ids)
            case Truncated():
                self._truncate(self.caches[record.cache_id], record.new_len)
                if self.cause[0] == "cancel truncation":
                    return
            case Forked():
                parent = self.caches[record.parent]
                assert record.lease_s == parent.lease_s
                self.caches[record.cache_id] = Cache(
                    record.cache_id, record.seed, record.lease_s, list(parent.tokens), parent.prompt_len
                )
            case Released():
                self._release(record.cache_id)
                return
        self._written.append(record)

    def replied(self, ticket: int, outcome: Result | QuireError) -> None:
        """A reply: exactly one for each ticket that was not cancelled, and the right one."""
        assert ticket in self.outstanding, "a reply to nobody, or a second one"
        request = self.outstanding.pop(ticket)
        written, self._written = self._written, []
        if isinstance(outcome, QuireError):
            assert not written, "a failed operation leaves the cache as it was"
            self.seen[outcome.reason] += 1
            check_refusal(self, ticket, request, outcome)
            return
        self._check_order(ticket, request)
        if isinstance(request, Append):
            assert isinstance(outcome, AppendResult)
            if request.is_scoring:
                assert outcome.handle is None and not written
                self._check_outputs(request, outcome, list(request.token_ids), None)
            elif written:
                self._check_applied(request, outcome, written)
            else:
                self._check_repeated(request, outcome)
        else:
            assert isinstance(outcome, HandlesResult)
            if isinstance(request, ForkRequest):
                self._check_fork(request, outcome, written)
            else:
                self._check_truncate(request, outcome, written)

    def batch_done(self) -> None:
        """After all effects of one input."""
        assert not self._written, "a record without the reply it belongs to"
        assert not self._may_release, "a fork releases what it was asked to"

    # Records.

    def _truncate(self, cache: Cache, new_len: int) -> None:
        assert new_len < len(cache.tokens)
        del cache.tokens[new_len:]
        cache.prompt_len = min(cache.prompt_len, new_len)
        cache.last = None

    def _release(self, cache_id: str) -> None:
        kind, name = self.cause
        cache = self.caches.pop(cache_id)
        if kind == "expire":
            assert cache.promised_s <= self.now_s, "a cache lives as long as its handle says"
            assert not any(self.cache_of(r) is cache for r in self.outstanding.values()), "used"
            self.seen["lease ran out"] += 1
        elif not (kind == "release" and name == cache_id):
            self._may_release.remove(cache_id)

    # Replies.

    def _check_order(self, ticket: int, request: Request) -> None:
        cache = self.cache_of(request)
        # A creation that finds its first cache lost makes another one: it need not wait for that.
        if cache is not None and not cache.lost:
            earlier = (other for number, other in self.outstanding.items() if number < ticket)
            assert all(self.cache_of(other) is not cache for other in earlier), "one after the other"

    def _check_applied(self, step: Append, result: AppendResult, written: Sequence[Record]) -> None:
        appended = written[-1]
        assert isinstance(appended, Appended)
        cache, tokens = self.caches[appended.cache_id], list(step.token_ids)
        base = appended.position
        assert step.position in (None, base), "a step is applied where it says"
        assert base + len(tokens) <= self.max_seq_len
        if step.cache_id:
            assert cache.cache_id == step.cache_id and len(written) == 1
        else:
            assert base == 0 and isinstance(written[0], Created) and len(written) == 2
            assert written[0].cache_id == cache.cache_id
            self._check_created(step, cache)
        if step.kind is Kind.PREFILL:
            cache.prompt_len = base + len(tokens)
        assert appended.prompt_len == cache.prompt_len, "what a prefill leaves is prompt, and only that"
        cache.last = Applied(base, step, result.kept)
        assert list(appended.token_ids) == tokens[: result.kept] and result.done.kept == result.kept
        chosen = self._check_outputs(step, result, cache.tokens[:base] + tokens, cache)
        assert result.kept == (accepted_length(tokens, chosen) if step.accept else len(tokens))
        self._check_handle(result.handle, cache, self.now_s + cache.lease_s)
        assert cache.epoch == appended.epoch
        self.seen[f"applied {step.kind.name.lower()}"] += 1

    def _check_created(self, step: Append, cache: Cache) -> None:
        if step.request_id:
            before = self.caches.get(self.by_request_id.get(step.request_id, ""))
            assert before is None or before.lost, "one request_id, one cache"
            self.by_request_id[step.request_id] = cache.cache_id
            cache.request_id = step.request_id

    def _check_repeated(self, step: Append, result: AppendResult) -> None:
        cache = self.cache_of(step)
        assert cache is not None and cache.last is not None, "a success that was not written"
        position = step.position if step.cache_id else 0
        assert cache.is_repeat(step, position), "only a repetition is answered without being applied"
        assert result.kept == cache.last.kept
        base_tokens = cache.tokens[: cache.last.base]
        self._check_outputs(step, result, base_tokens + list(step.token_ids), cache)
        self._check_handle(result.handle, cache, None)
        where = "from memory" if cache.is_remembered(step) else "computed again"
        self.seen[f"repetition answered {where}"] += 1
        self.seen["repetition answered after a loss"] += cache.lost

    def _check_outputs(
        self, step: Append, result: AppendResult, tokens: Sequence[int], cache: Cache | None
    ) -> list[int]:
        """Asserts that the answer has the wanted rows; returns what the model chooses in every row."""
        options = step.output or types_pb2.OutputOptions()
        salt = None
        if options.HasField("sampling"):
            assert cache is not None
            salt = (cache.seed, cache.prompt_len)
        first = len(tokens) - len(step.token_ids) + 1
        chosen = [next_token(tokens[:end], salt) for end in range(first, len(tokens) + 1)]
        wanted = {Rows.NONE: [], Rows.LAST: chosen[-1:], Rows.ALL: chosen}[step.rows]
        assert list(result.done.outputs) == [output_of(token, options) for token in wanted]
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

    def _check_fork(self, fork: ForkRequest, result: HandlesResult, written: Sequence[Record]) -> None:
        parent = self.caches[fork.cache_id]
        assert len(result.handles) == len(written) == fork.count
        for handle, record in zip(result.handles, written, strict=True):
            assert isinstance(record, Forked) and record.parent == fork.cache_id
            assert record.cache_id == handle.cache_id
            child = self.caches[handle.cache_id]
            assert child.tokens == parent.tokens
            self._check_handle(handle, child, self.now_s + child.lease_s if child.tokens else None)
            assert child.epoch == parent.epoch
        self._may_release.extend(dict.fromkeys(name for name in fork.release if name in self.caches))
        self.seen["fork"] += 1

    def _check_truncate(
        self, request: TruncateRequest, result: HandlesResult, written: Sequence[Record]
    ) -> None:
        cache = self.caches[request.cache_id]
        assert len(written) <= 1 and all(record.cache_id == cache.cache_id for record in written)
        assert len(cache.tokens) == request.new_len
        (handle,) = result.handles
        self._check_handle(handle, cache, self.now_s + cache.lease_s if written else None)
        self.seen["truncation"] += 1
