"""When each error may be the answer. The other half of the oracle."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from service.caches.requests import Append, Fork, Release, Renew, Request, Truncate
from service.caches.tenants import Tenant
from service.errors import QuireError
from tests.sim.model_worker import FAULT, KV_EXHAUSTED, KV_MISSING, POISON, TIMEOUT
from tests.sim.truth import Asked, Cache

if TYPE_CHECKING:
    from tests.sim.oracle import Oracle

_MOST_TRIES = 8


def check_refusal(oracle: Oracle, asked: Asked, error: QuireError) -> None:
    """Asserts that `error` is a true answer to a request at this point."""
    request, reason = asked.request, error.reason
    if isinstance(request, Release | Renew):
        of_a_cache = {"CACHE_NOT_FOUND", "WEIGHTS_CHANGED"} if isinstance(request, Renew) else set()
        allowed = {"JOURNAL_UNAVAILABLE"} | of_a_cache
        assert reason in allowed, "to release is always possible, and to renew what is there"
    if reason in _OF_THE_SERVER:
        assert _OF_THE_SERVER[reason](oracle, asked), f"{asked}: not so at {oracle.now_s}"
    elif reason in _OF_WORKERS:
        assert isinstance(request, Append)
        assert _OF_WORKERS[reason](oracle, asked), (
            f"{asked}: no worker said so, and there is time left at {oracle.now_s}"
        )
    else:
        caches = oracle.caches_of(asked)
        index = int(error.metadata.get("index", 0))
        assert "index" not in error.metadata or len(caches) > 1
        _OF_THE_CACHE[reason](oracle, asked, caches[index], error)


def _made_by(request: Request) -> int:
    """How many caches a request makes, at most."""
    if isinstance(request, Fork):
        return request.count
    return int(isinstance(request, Append) and not request.cache_id)


def most_held(oracle: Oracle) -> int:
    """The caches there are and may be soon."""
    on_their_way = [*oracle.outstanding.values(), *oracle.abandoned.values(), *oracle.taken_back]
    return len(oracle.caches) + len(oracle.gone) + sum(_made_by(asked.request) for asked in on_their_way)


def _is_full(oracle: Oracle, asked: Asked) -> bool:
    return not oracle.budget.has_room(asked.number, [*oracle.outstanding, *oracle.abandoned])


def _asked_by(oracle: Oracle, tenant: Tenant) -> int:
    under_way = [*oracle.outstanding.values(), *oracle.abandoned.values()]
    return sum(asked.tenant is tenant for asked in under_way)


_OF_THE_SERVER: dict[str, Callable[[Oracle, Asked], bool]] = {
    "DRAINING": lambda oracle, _: oracle.draining,
    "QUEUE_FULL": lambda oracle, asked: (
        len(oracle.outstanding) + len(oracle.abandoned) + oracle.own_operations >= oracle.queue_limit
        or (bool(asked.tenant.name) and _asked_by(oracle, asked.tenant) >= oracle.queue_limit / 2)
    ),
    "JOURNAL_UNAVAILABLE": lambda oracle, asked: asked.failed or oracle.may_journal_be_refused,
    "JOURNAL_FULL": _is_full,
    "CACHE_LIMIT": lambda oracle, asked: most_held(oracle) + _made_by(asked.request) > oracle.cache_limit,
    "NO_WORKER": lambda oracle, asked: (
        (not oracle.was_ready and not isinstance(asked.request, Fork) and not asked.request.cache_id)
        or oracle.now_s >= asked.patience_s
    ),
}


def _is_exhausted(oracle: Oracle, asked: Asked) -> bool:
    """There was no room until its time was up; or there never is, as for a copy beside its cache."""
    copies = oracle.cache_of(asked) is not None and asked.sequence and is_repetition(oracle, asked)
    return KV_EXHAUSTED in asked.failures and bool(copies or oracle.now_s >= asked.patience_s)


def is_repetition(oracle: Oracle, asked: Asked) -> bool:
    cache = oracle.cache_of(asked)
    assert isinstance(asked.request, Append)
    return cache is not None and cache.is_repeat(asked.request, asked.position)


def _is_too_late(oracle: Oracle, asked: Asked) -> bool:
    assert isinstance(asked.request, Append)
    assert asked.request.timeout_s is not None, "who names no deadline cannot miss it"
    return TIMEOUT in asked.failures or oracle.now_s >= asked.patience_s


def _is_overloaded(oracle: Oracle, asked: Asked) -> bool:
    """The worker had no time for it, or the gateway saw that it would not: who is alone waits for nobody."""
    others = oracle.outstanding or oracle.abandoned or oracle.taken_back or oracle.own_operations
    return TIMEOUT in asked.failures or bool(others) or oracle.now_s >= asked.patience_s


def _is_guilty(oracle: Oracle, asked: Asked) -> bool:
    """Workers die of it; or it looked so, since they died under it for other reasons."""
    cache = oracle.cache_of(asked)
    assert isinstance(asked.request, Append)
    if POISON in asked.request.token_ids or (cache is not None and POISON in cache.tokens):
        return True
    if (asked.tenant, asked.request.request_id) in oracle.poisoned:
        # It stands for the one whose request it says it is.
        return True
    known = (
        cache.number if cache is not None else oracle.sequences.get((asked.tenant, asked.request.request_id))
    )
    deaths = oracle.deaths.get(asked.sequence or known or 0, [])
    return 0 in deaths or len(set(deaths)) > 1 or (cache is not None and cache.number in deaths)


def _tries(asked: Asked) -> int:
    """Attempts that came to nothing through no fault of the caller's."""
    return asked.deaths + sum(reason in (KV_MISSING, KV_EXHAUSTED) for reason in asked.failures)


_OF_WORKERS: dict[str, Callable[[Oracle, Asked], bool]] = {
    "WORKER_FAULT": lambda _, asked: FAULT in asked.failures or _tries(asked) > _MOST_TRIES,
    "WORKER_LOST": lambda _, asked: bool(asked.deaths) and _tries(asked) > _MOST_TRIES,
    "KV_EXHAUSTED": _is_exhausted,
    "DEADLINE_PASSED": _is_too_late,
    "OVERLOADED": _is_overloaded,
    "SEQUENCE_QUARANTINED": _is_guilty,
}


def _check_not_found(oracle: Oracle, asked: Asked, cache: Cache | None, error: QuireError) -> None:
    if isinstance(asked.request, Fork):
        forked = oracle.forked.get((asked.tenant, asked.request.request_id))
        if forked is not None:
            there = [child.cache_id in oracle.caches for child in forked.children]
            if _may_repeat(asked.request, forked.request, there):
                assert not all(there), "its children are there"
                return
        assert None in oracle.caches_of(asked)
    assert cache is None or (isinstance(asked.request, Fork) and "index" not in error.metadata)


def _may_repeat(fork: Fork, made: Fork, there: Sequence[bool]) -> bool:
    """Whether a fork can be the one that made children, by those that are there: they know their parent."""
    sources, before = _source_of_children(fork), _source_of_children(made)
    if len(sources) != len(before):
        return False
    known = {(old, new) for old, new, is_there in zip(before, sources, there, strict=True) if is_there}
    return all(old == new for old, new in known)


def _source_of_children(fork: Fork) -> list[str]:
    return [source.cache_id for source in fork.sources for _ in range(source.count)]


def _check_too_long(oracle: Oracle, asked: Asked, cache: Cache | None, error: QuireError) -> None:
    assert isinstance(asked.request, Append)
    length = len(cache.tokens) if cache is not None else 0
    assert length + len(asked.request.token_ids) > oracle.capacity_tokens
    assert error.retry_after_s is None and error.metadata["kv_capacity_tokens"] == str(oracle.capacity_tokens)


def _check_beyond(_: Oracle, asked: Asked, cache: Cache | None, error: QuireError) -> None:
    assert isinstance(asked.request, Truncate) and cache is not None
    assert asked.request.new_len > len(cache.tokens)
    assert error.metadata == {"new_len": str(asked.request.new_len), "seq_len": str(len(cache.tokens))}


def _check_position(_: Oracle, asked: Asked, cache: Cache | None, error: QuireError) -> None:
    assert cache is not None
    metadata = dict(error.metadata)
    index = metadata.pop("index", "0")
    if isinstance(asked.request, Fork):
        position = asked.request.sources[int(index)].position
    elif isinstance(asked.request, Truncate):
        position = asked.request.position
        assert asked.request.new_len != len(cache.tokens), "it is cut already"
    else:
        assert isinstance(asked.request, Append)
        position = asked.position
        assert not cache.is_repeat(asked.request, position), "a repetition is answered"
        first = cache.last is not None and cache.last.base == 0
        assert asked.request.cache_id or not first, "its request id is that of another creation"
    if isinstance(asked.request, Truncate | Fork) or asked.request.cache_id:
        assert position != len(cache.tokens), "what is asked at the length is done"
    assert metadata == {"position": str(position), "seq_len": str(len(cache.tokens))}


def _check_reused(oracle: Oracle, asked: Asked, cache: Cache | None, _: QuireError) -> None:
    if isinstance(asked.request, Fork):
        forked = oracle.forked.get((asked.tenant, asked.request.request_id))
        on_their_way = (a.request for a in [*oracle.outstanding.values(), *oracle.abandoned.values()])
        rivals = [r for r in on_their_way if isinstance(r, Fork) and r.request_id == asked.request.request_id]
        assert rivals or (forked is not None and not forked.is_repeated_by(asked.request))
        return
    assert isinstance(asked.request, Append) and not asked.request.cache_id
    if cache is None or cache.adapter != asked.request.adapter:
        # The cache that has the request id, or was about to, is of another adapter.
        assert len(oracle.asked_adapters[asked.tenant, asked.request.request_id]) > 1
        return
    assert cache.last is not None and cache.last.base == 0
    assert not cache.is_repeat(asked.request, 0), "a repetition is answered"


def _check_weights(oracle: Oracle, asked: Asked, cache: Cache | None, error: QuireError) -> None:
    request = asked.request
    creates = isinstance(request, Append) and not request.cache_id
    stated = request.weights if isinstance(request, Append) else None
    if creates and cache is not None and stated is not None and oracle.current(stated) != cache.weights:
        # Checked before the weights were replaced, and created by another one since.
        return
    creates = creates and cache is None
    assert creates or error.retry_after_s is None, "only whoever has no cache yet can ask again"
    if isinstance(request, Fork):
        forked = oracle.forked.get((asked.tenant, request.request_id))
        its = [*oracle.caches_of(asked), *(forked.children if forked is not None else ())]
        assert any(each is not None and not oracle.can_use(each.weights) for each in its), "all can be used"
    elif cache is not None:
        assert not oracle.can_use(cache.weights), "it can be used"
    else:
        assert isinstance(request, Append) and not request.cache_id
        assert request.request_id or error.retry_after_s is not None, "whoever has no cache yet can ask again"
        wanted = oracle.current(asked.weights if stated is None else stated)
        # A repetition may have met its original, which was asked for before.
        assert not oracle.can_use(wanted) or (request.request_id and oracle.weights)


_OF_THE_CACHE: dict[str, Callable[[Oracle, Asked, Cache | None, QuireError], None]] = {
    "CACHE_NOT_FOUND": _check_not_found,
    "SEQUENCE_TOO_LONG": _check_too_long,
    "TRUNCATE_BEYOND_END": _check_beyond,
    "POSITION_MISMATCH": _check_position,
    "REQUEST_ID_REUSED": _check_reused,
    "WEIGHTS_CHANGED": _check_weights,
}
