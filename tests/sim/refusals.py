"""When each error may be the answer. The other half of the oracle."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from service.caches.requests import Append, Request, TruncateRequest
from service.errors import QuireError
from tests.sim.model_worker import FAULT, KV_EXHAUSTED, KV_MISSING, TIMEOUT

if TYPE_CHECKING:
    from tests.sim.oracle import Cache, Oracle

_WORKER_REASONS = {"WORKER_FAULT": FAULT, "KV_EXHAUSTED": KV_EXHAUSTED, "STEP_TIMEOUT": TIMEOUT}


def check_refusal(oracle: Oracle, ticket: int, request: Request, error: QuireError) -> None:
    """Asserts that `error` is a true answer to `request` at this point."""
    cache, reason = oracle.cache_of(request), error.reason
    if reason in _WORKER_REASONS:
        assert oracle.worker_failures[ticket][0] == _WORKER_REASONS[reason], "the worker did not say so"
    elif reason in _OF_THE_SERVER:
        assert _OF_THE_SERVER[reason](oracle)
    elif reason == "CACHE_NOT_FOUND":
        assert cache is None
    elif reason == "WORKER_LOST":
        assert isinstance(request, Append) and (cache is None or cache.lost)
        assert oracle.cause[0] == "worker_lost"
    elif reason == "SEQUENCE_TOO_LONG":
        assert isinstance(request, Append)
        length = len(cache.tokens) if cache is not None else 0
        assert length + len(request.token_ids) > oracle.max_seq_len
    else:
        assert cache is not None, "only of a cache can one say that"
        _check_of_cache(oracle, ticket, request, cache, error)


_OF_THE_SERVER: dict[str, Callable[[Oracle], bool]] = {
    "NO_WORKER": lambda oracle: not oracle.ready_epochs,
    "DRAINING": lambda oracle: oracle.draining,
    "QUEUE_FULL": lambda oracle: len(oracle.outstanding) >= oracle.queue_limit,
}


def _check_of_cache(oracle: Oracle, ticket: int, request: Request, cache: Cache, error: QuireError) -> None:
    if error.reason == "CACHE_LOST":
        _check_lost(oracle, ticket, request, cache, error)
    elif isinstance(request, TruncateRequest):
        assert error.reason == "TRUNCATE_BEYOND_END"
        assert request.new_len > len(cache.tokens)
    else:
        assert isinstance(request, Append) and error.reason in {"POSITION_MISMATCH", "REQUEST_ID_REUSED"}
        _check_position(request, cache, error)


def _check_position(step: Append, cache: Cache, error: QuireError) -> None:
    position = step.position if step.cache_id else 0
    assert position is not None
    assert not cache.is_repeat(step, position), "a repetition is answered"
    if step.cache_id:
        assert position != len(cache.tokens), "a step at the length is applied"
    if error.reason == "REQUEST_ID_REUSED":
        assert not step.cache_id and cache.last is not None and cache.last.base == 0
    else:
        assert error.metadata == {"position": str(position), "seq_len": str(len(cache.tokens))}


def _check_lost(oracle: Oracle, ticket: int, request: Request, cache: Cache, error: QuireError) -> None:
    failure = oracle.worker_failures.get(ticket)
    if failure is not None:
        assert failure == (KV_MISSING, True), "KV that was never lost cannot be missing"
        cache.lost = True
    assert cache.lost
    assert error.metadata == {"seq_len": str(len(cache.tokens))}
    if isinstance(request, Append) and oracle.cause[0] != "worker_lost" and failure is None:
        position = request.position if request.cache_id else 0
        repeated = cache.is_repeat(request, position) and cache.is_remembered(request)
        assert not repeated, "an answer in memory needs no KV"
