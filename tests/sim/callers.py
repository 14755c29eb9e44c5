"""Callers that do anything that is allowed, at any moment, and much that is wrong."""

from __future__ import annotations

import dataclasses
import random
from collections import deque
from collections.abc import Sequence

from quire.v1 import types_pb2

from service.caches.requests import Append, AppendKind, Fork, Release, Renew, Request, Source, Truncate
from service.caches.tenants import Tenant
from tests.sim.appends import append, options_of, with_options
from tests.sim.model_worker import POISON
from tests.sim.oracle import Oracle
from tests.sim.toy_model import VOCAB, line_to, next_token
from tests.sim.truth import Cache

PLAIN = (
    None,
    None,
    None,
    types_pb2.OutputOptions(top_logprobs=2),
    types_pb2.OutputOptions(logits=types_pb2.DATA_TYPE_F32),
)
SAMPLED = (
    types_pb2.OutputOptions(sampling=types_pb2.SamplingParams(temperature=1.0)),
    types_pb2.OutputOptions(sampling=types_pb2.SamplingParams(temperature=1.0), top_logprobs=1),
)

# The numbers of adapters that callers name. 0: none.
ADAPTERS = (0, 0, 1, 2)


class Callers:
    """Makes requests up. What they know of the caches is what the oracle knows."""

    def __init__(self, rng: random.Random, oracle: Oracle, tenants: Sequence[Tenant] = (Tenant(),)) -> None:
        self._rng = rng
        self._oracle = oracle
        self._tenants = tenants
        # Whether there are tokens of which workers die.
        self.may_poison = False
        # Requests to send again, as after an answer that was lost.
        self._history: deque[tuple[Request, Tenant]] = deque(maxlen=12)
        self._gone = ["never-existed"]
        self._last_request_id = 0
        # How much of what they ask takes tokens away.
        self._cuts = rng.choice((0.12, 0.12, 0.3))
        # How much of it forks; much where many wait for one another.
        self._forks = rng.choice((0.08, 0.08, 0.08, 0.3))

    def tenant(self) -> Tenant:
        """Who asks next."""
        return self._rng.choice(self._tenants)

    def request(self, tenant: Tenant) -> Request:
        """The next request of a tenant."""
        rng = self._rng
        choice = rng.random()
        if choice > 0.97:
            name = self._any_name(tenant)
            return Release(name) if rng.random() < 0.4 else Renew(name, rng.choice((None, 3.0, 5000.0)))
        cache = self._any_cache(tenant)
        if cache is None or choice < (0.03 if len(self._oracle.caches) >= 3 else 0.2):
            request: Request = self._creation()
        elif choice < 0.32:
            request = self._again(cache, tenant) or self._append(cache)
        elif choice > 0.97 - self._cuts:
            request = self._truncate(cache)
        elif choice > 0.97 - self._cuts - self._forks:
            request = self._fork(cache, tenant)
        else:
            request = self._append(cache)
        if is_repeatable(request):
            self._history.append((request, tenant))
        return request

    def not_answered(self, requests: Sequence[tuple[Request, Tenant]]) -> list[tuple[Request, Tenant]]:
        """The gateway crashed before these were answered: those that can be repeated will be."""
        return [(request, tenant) for request, tenant in requests if is_repeatable(request)]

    def _any_name(self, tenant: Tenant) -> str:
        """A cache to release or renew."""
        cache = self._any_cache(tenant)
        return self._gone[0] if cache is None else self._name(cache)

    def _any_cache(self, tenant: Tenant) -> Cache | None:
        caches = self._usable(tenant)
        return self._rng.choice(caches) if caches else None

    def _usable(self, tenant: Tenant) -> list[Cache]:
        """Seldom those that are another's, or of weights that are gone."""
        caches = list(self._oracle.caches.values())
        if len(self._tenants) > 1 and self._rng.random() < 0.97:
            caches = [cache for cache in caches if cache.tenant is tenant]
        if self._oracle.weights and self._rng.random() < 0.8:
            caches = [cache for cache in caches if self._oracle.can_use(cache.weights)]
        return caches

    def _name(self, cache: Cache) -> str:
        """Seldom that of a cache that is no more."""
        if self._rng.random() < 0.02:
            return self._rng.choice(self._gone)
        self._gone = [*self._gone[-3:], cache.cache_id]
        return cache.cache_id

    def _fork(self, cache: Cache, tenant: Tenant) -> Fork:
        rng = self._rng
        request_id = ""
        if rng.random() < 0.5:
            # Seldom one that another fork has.
            self._last_request_id += rng.random() < 0.9
            request_id = f"fork-{self._last_request_id}"
        caches = [cache]
        if rng.random() < 0.5:
            others = [other for other in self._usable(tenant) if other is not cache]
            caches += rng.sample(others, min(rng.choice((1, 1, 2, 3)), len(others)))
        names = dict.fromkeys(self._name(cache) for cache in caches)
        return Fork([self._source(name) for name in names], self._releases(cache, tenant), request_id)

    def _source(self, name: str) -> Source:
        """What a fork copies, often with the right length, seldom with a wrong one."""
        rng, cache = self._rng, self._oracle.caches.get(name)
        length = 0 if cache is None else len(cache.tokens)
        return Source(name, rng.randint(0, 3), rng.choice((None, None, None, length, length, length + 1)))

    def _truncate(self, cache: Cache) -> Truncate:
        rng, length = self._rng, len(cache.tokens)
        new_len = length + 1 if rng.random() < 0.1 else rng.choice((0, length, rng.randint(0, length)))
        position = rng.choice((None, length, length, max(0, length - 1)))
        return Truncate(self._name(cache), new_len, position)

    def _releases(self, cache: Cache, tenant: Tenant) -> tuple[str, ...]:
        """What a fork drops: often the parent, sometimes what is not there, or named twice."""
        rng = self._rng
        names = [cache.cache_id] if rng.random() < 0.35 else []
        others = (self._any_name(tenant) for _ in range(rng.choice((0, 0, 0, 1, 2))))
        return (*names, *others)

    def _creation(self) -> Append:
        rng = self._rng
        if rng.random() < 0.1:
            tokens = self._tokens(1, 8)
            adapter = rng.choice(ADAPTERS)
            return append(
                AppendKind.SCORE, "", tokens, rows=len(tokens), output=rng.choice(PLAIN), adapter=adapter
            )
        request_id = ""
        if rng.random() < 0.6:
            self._last_request_id += 1
            request_id = f"request-{self._last_request_id}"
        output = self._output()
        return append(
            AppendKind.PREFILL,
            "",
            self._tokens(1, 18),
            position=rng.choice((None, 0)),
            rows=rng.choice((1, 0)),
            output=output,
            lease_s=rng.choice((None, 5.0, 5000.0)),
            request_id=request_id,
            timeout_s=self._timeout_s(),
            adapter=rng.choice(ADAPTERS),
        )

    def _append(self, cache: Cache) -> Append:
        rng, kinds = self._rng, AppendKind
        kind = rng.choice(
            (kinds.DECODE, kinds.DECODE, kinds.DECODE, kinds.PREFILL, kinds.VERIFY, kinds.VERIFY)
        )
        output, accept = self._output(), types_pb2.VERIFY_ACCEPT_UNSPECIFIED
        parents: list[int] = []
        if kind is AppendKind.DECODE:
            tokens = self._tokens(1, 1)
        elif kind is AppendKind.PREFILL:
            tokens = self._tokens(1, 4)
        else:
            sampled = output in SAMPLED
            tokens, parents = self._drafts(cache, sampled=sampled)
            if parents or rng.random() < 0.7:
                accept = types_pb2.VERIFY_ACCEPT_SAMPLED if sampled else types_pb2.VERIFY_ACCEPT_GREEDY
        length = len(cache.tokens)
        wrong = max(0, length + rng.choice((-3, -1, 1)))
        return append(
            kind,
            self._name(cache),
            tokens,
            position=rng.choice((None, length, length, length, wrong if rng.random() < 0.3 else length)),
            rows=len(tokens) if kind is AppendKind.VERIFY else 1,
            output=output,
            accept=accept,
            parents=parents,
            timeout_s=self._timeout_s(),
            prelaunch=(0, 1, 3, 0)[len(cache.tokens) % 4] if kind is AppendKind.DECODE else 0,
        )

    def _drafts(self, cache: Cache, *, sampled: bool) -> tuple[list[int], list[int]]:
        """Drafts that are right for a while; half of them a tree, with the parents of all but the first."""
        rng, drafts, parents = self._rng, self._tokens(1, 1), list[int]()
        tokens, salt = list(cache.tokens), (cache.seed, cache.prompt_len) if sampled else None
        is_tree = rng.random() < 0.5
        for index in range(rng.randint(0, 7 if is_tree else 4)):
            if is_tree:
                parents.append(rng.randint(max(0, index - 2), index))
            line = line_to(drafts, parents, parents[-1]) if is_tree else drafts
            right = next_token(tokens + line, salt, cache.weights, cache.adapter)
            drafts.append(right if rng.random() < (0.5 if is_tree else 0.75) else (right + 1) % VOCAB)
        return drafts, parents

    def _again(self, cache: Cache, tenant: Tenant) -> Request | None:
        """A request once more: of those under way or long done, or the last append of a cache."""
        rng = self._rng
        if cache.last is not None and rng.random() < 0.6:
            last = cache.last.append
            if not (last.request_id and rng.random() < 0.5):
                last = dataclasses.replace(last, cache_id=cache.cache_id, position=cache.last.base)
            return self._changed(last)
        asked = [request for request, who in self._history if who is tenant]
        if not asked:
            return None
        request = rng.choice(asked)
        return self._changed(request) if isinstance(request, Append) else request

    def _changed(self, asked: Append) -> Append:
        """Often not quite what it was."""
        rng, change = self._rng, self._rng.random()
        if asked.parents and rng.random() < 0.5:
            parents = [rng.randint(0, index) for index in range(len(asked.parents))]
            asked = with_options(asked, parents=parents)
        elif change < 0.25:
            output, rows = rng.choice(PLAIN + SAMPLED), rng.choice((0, 1, len(asked.token_ids)))
            asked = with_options(asked, output=output, rows=rows)
        elif change < 0.35:
            tokens = self._tokens(1, 3)
            rows = min(options_of(asked).rows, len(tokens))
            asked = with_options(dataclasses.replace(asked, token_ids=tokens), rows=rows, parents=())
        elif change < 0.4 and asked.request_id:
            asked = dataclasses.replace(asked, adapter=rng.choice(ADAPTERS))
        if asked.accept:
            asked = with_options(asked, rows=len(asked.token_ids))
        return dataclasses.replace(asked, timeout_s=self._timeout_s())

    def _output(self) -> types_pb2.OutputOptions | None:
        return self._rng.choice(PLAIN + SAMPLED)

    def _timeout_s(self) -> float | None:
        return 1.0 if self._rng.random() < 0.2 else None

    def _tokens(self, least: int, most: int) -> list[int]:
        tokens = [self._rng.randrange(VOCAB) for _ in range(self._rng.randint(least, most))]
        if self.may_poison and self._rng.random() < 0.03:
            tokens[-1] = POISON
        return tokens


def is_repeatable(request: Request) -> bool:
    """Whether it does nothing if it is done already."""
    match request:
        case Append():
            return bool(request.request_id) or (bool(request.cache_id) and request.position is not None)
        case Fork():
            return bool(request.request_id)
        case Truncate():
            return request.position is not None
    return True
