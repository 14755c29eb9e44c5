"""When each error may be the answer. The other half of the oracle."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from service.caches.requests import Append, Fork, Release, Renew, Request, Truncate
from service.errors import QuireError
from tests.sim.model_worker import FAULT, KV_EXHAUSTED, KV_MISSING, TIMEOUT
from tests.sim.truth import Cache

if TYPE_CHECKING:
    from tests.sim.oracle import Oracle

_WORKER_REASONS = {"WORKER_FAULT": FAULT, "KV_EXHAUSTED": KV_EXHAUSTED}
_TOO_LATE = ("DEADLINE_PASSED", "OVERLOADED")


def check_refusal(oracle: Oracle, number: int, request: Request, error: QuireError) -> None:
    """Asserts that `error` is a true answer to `request` at this point."""
    cache, reason = oracle.cache_of(request), error.reason
    assert not isinstance(request, Release), "to release is always possible"
    assert not isinstance(request, Renew) or reason == "CACHE_NOT_FOUND", "and to renew what is there"
    if reason in _WORKER_REASONS:
        failure = oracle.failure_of(number)
        assert failure is not None and failure[0] == _WORKER_REASONS[reason], "the worker did not say so"
    elif reason in _TOO_LATE:
        _check_too_late(oracle, number, request, reason)
    elif reason in _OF_THE_SERVER:
        assert _OF_THE_SERVER[reason](oracle)
    elif reason == "JOURNAL_FULL":
        assert isinstance(request, Append | Fork), "what takes nothing is let in"
        assert not oracle.budget.has_room(number, oracle.outstanding), "there was room"
    elif reason == "CACHE_LIMIT":
        assert most_held(oracle) + _made_by(request) > oracle.cache_limit
    elif reason == "CACHE_NOT_FOUND":
        assert cache is None
    elif reason == "WORKER_LOST":
        assert isinstance(request, Append) and (cache is None or cache.lost)
        assert oracle.cause == "worker lost"
    elif reason == "SEQUENCE_TOO_LONG":
        assert isinstance(request, Append)
        length = len(cache.tokens) if cache is not None else 0
        assert length + len(request.token_ids) > oracle.capacity_tokens
    else:
        assert cache is not None, "only of a cache can one say that"
        _check_of_cache(oracle, number, request, cache, error)


_OF_THE_SERVER: dict[str, Callable[[Oracle], bool]] = {
    "NO_WORKER": lambda oracle: not oracle.ready_epochs,
    "DRAINING": lambda oracle: oracle.draining,
    "QUEUE_FULL": lambda oracle: len(oracle.outstanding) >= oracle.queue_limit,
}


def _check_too_late(oracle: Oracle, number: int, request: Request, reason: str) -> None:
    """The worker had no time for it, or the gateway saw that it would not."""
    failure = oracle.failure_of(number)
    assert isinstance(request, Append) and (failure is None or failure[0] == TIMEOUT)
    if reason == "DEADLINE_PASSED":
        assert request.timeout_s is not None, "who names no deadline cannot miss it"
    elif failure is None:
        others = [r for n, r in oracle.outstanding.items() if n != number and isinstance(r, Append)]
        # Of what is cancelled together, one after the other goes.
        assert others or oracle.cause == "cancel", "who is alone waits for nobody"


def _made_by(request: Request) -> int:
    """How many caches a request makes, at most."""
    if isinstance(request, Fork):
        return request.count
    return int(isinstance(request, Append) and not request.cache_id)


def most_held(oracle: Oracle) -> int:
    """The caches there are and may be soon."""
    on_their_way = [*oracle.outstanding.values(), *oracle.taken_back]
    return len(oracle.caches) + sum(map(_made_by, on_their_way))


def _check_of_cache(oracle: Oracle, number: int, request: Request, cache: Cache, error: QuireError) -> None:
    if error.reason == "CACHE_LOST":
        _check_lost(oracle, number, request, cache, error)
    elif isinstance(request, Truncate):
        assert error.reason == "TRUNCATE_BEYOND_END"
        assert request.new_len > len(cache.tokens)
    else:
        assert isinstance(request, Append) and error.reason in {"POSITION_MISMATCH", "REQUEST_ID_REUSED"}
        _check_position(request, cache, error)


def _check_position(append: Append, cache: Cache, error: QuireError) -> None:
    position = append.position if append.cache_id else 0
    assert position is not None
    assert not cache.is_repeat(append, position), "a repetition is answered"
    if append.cache_id:
        assert position != len(cache.tokens), "an append at the length is applied"
    if error.reason == "REQUEST_ID_REUSED":
        assert not append.cache_id and cache.last is not None and cache.last.base == 0
    else:
        assert error.metadata == {"position": str(position), "seq_len": str(len(cache.tokens))}


def _check_lost(oracle: Oracle, number: int, request: Request, cache: Cache, error: QuireError) -> None:
    failure = oracle.failure_of(number)
    if failure is not None:
        assert failure == (KV_MISSING, True), "KV that was never lost cannot be missing"
        cache.lost = True
    assert cache.lost
    assert error.metadata == {"seq_len": str(len(cache.tokens))}
    if isinstance(request, Append) and failure is None:
        position = request.position if request.cache_id else 0
        repeated = cache.is_repeat(request, position) and cache.is_remembered(request)
        assert not repeated, "an answer in memory needs no KV"
