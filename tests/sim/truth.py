"""What the oracle knows of a cache, and of a request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from service.caches.records import Record
from service.caches.requests import Append, Fork, Request
from service.caches.tenants import Tenant
from tests.sim.appends import options_of


@dataclass(slots=True)
class Applied:
    """The last append of a cache, if nothing came after it."""

    base: int
    append: Append
    kept: int
    # When the gateway had crashed so often.
    epoch: int


@dataclass(slots=True)
class Cache:
    """The truth about one cache: what its durable records say, and what callers were promised."""

    cache_id: str
    number: int
    tenant: Tenant
    seed: int
    lease_s: float
    tokens: list[int] = field(default_factory=list)
    prompt_len: int = 0
    request_id: str = ""
    # The fork that made it, if that can be repeated, and which of its children it is.
    fork: tuple[Forked, int] | None = None
    last: Applied | None = None
    # As the last handle said.
    epoch: int = 0
    worker_id: str = ""
    # Until when the last handle that a caller got promises that the cache lives.
    promised_s: float = 0.0
    # When the last record of it was written.
    recorded_s: float = 0.0
    # Those that were served when its creation was asked for.
    weights: int = 0
    adapter: int = 0

    def is_repeat(self, append: Append, position: int | None) -> bool:
        """Whether an append says what the last one said."""
        last = self.last
        return (
            last is not None
            and position == last.base
            and list(append.token_ids) == list(last.append.token_ids)
            and list(append.parents) == list(last.append.parents)
            and append.accept == last.append.accept
        )


@dataclass(slots=True, eq=False)
class Forked:
    """A fork that was applied, or is just being."""

    request: Fork
    children: list[Cache] = field(default_factory=list)
    # As long as they were made.
    seq_lens: list[int] = field(default_factory=list)
    # How many of the sources that have copies have them already.
    sources: int = 0

    def is_repeated_by(self, request: Fork) -> bool:
        """Whether a fork asks for the very same copies."""
        return copied(request) == copied(self.request)


@dataclass(slots=True, eq=False)
class Done:
    """What a request's records made of its caches, the moment they were durable: what it is answered."""

    cache: Cache
    seq_len: int
    # Of an append: the tokens it was computed on, all of its own, and the prompt's boundary.
    tokens: Sequence[int] = ()
    prompt_len: int = 0
    # Of an append: those of its own that stay.
    kept: Sequence[int] = ()


@dataclass(slots=True, eq=False)
class Asked:
    """A request that has not ended."""

    number: int
    request: Request
    tenant: Tenant
    at_s: float
    # Nobody waits for its answer any more.
    abandoned: bool = False
    # Given to the journal; None: not yet.
    records: Sequence[Record] | None = None
    # What became of them.
    durable: bool = False
    failed: bool = False
    done: Done | None = None
    # Of a fork, the copies that its records made.
    forked: Forked | None = None
    # The sequence that workers compute for it, and what they said of it that did not succeed.
    sequence: int = 0
    failures: list[int] = field(default_factory=list)
    deaths: int = 0
    # Those that were served when it was asked, and whether its cache could be used then.
    weights: int = 0
    could_be_used: bool = True

    @property
    def position(self) -> int | None:
        """Where an append says that it belongs; a creation that is repeated, at the beginning."""
        append = self.request
        assert isinstance(append, Append)
        return append.position if append.cache_id else 0

    @property
    def patience_s(self) -> float:
        """Before this nobody may be told that his time is up."""
        timeout_s = self.request.timeout_s if isinstance(self.request, Append) else None
        patience_s = MAX_WAIT_S if timeout_s is None else timeout_s - min(0.1, timeout_s / 10)
        # The gateway adds in another order.
        return self.at_s + patience_s - 1e-9


def copied(fork: Fork) -> list[tuple[str, int]]:
    """The caches that a fork makes copies of, and how many."""
    return [(source.cache_id, source.count) for source in fork.sources if source.count]


# As long as an operation may wait for its turn.
MAX_WAIT_S = 30.0


def is_remembered(append: Append, last: Applied) -> bool:
    """Whether the last append's answer was kept for one that repeats it."""
    return append.options == last.append.options and not options_of(append).output.logits
