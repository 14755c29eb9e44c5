"""What is true: the tokens of every cache, derived from durable records alone, and who may be told what.

The oracle sees requests as they are submitted, what goes to the journal, what of it becomes durable, and the
answers; it never asks the state machine. It checks that each record is what its request asked for at that
point, that nobody is answered before his records are durable, and that every answer, success or error, is the
one that the promises allow.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Sequence

from service.api.append_codec import done_of
from service.caches.effects import Write
from service.caches.records import (
    CacheCreated,
    CacheForked,
    CacheReleased,
    CacheTruncated,
    LeaseRenewed,
    Record,
    TokensAppended,
)
from service.caches.requests import (
    Append,
    Appended,
    AppendKind,
    Fork,
    Handle,
    Handles,
    Release,
    Released,
    Renew,
    Request,
    Result,
    Truncate,
)
from service.caches.tenants import Tenant
from service.errors import QuireError
from tests.sim.appends import options_of, run_of
from tests.sim.journal_bytes import JournalBudget
from tests.sim.model_worker import POISON
from tests.sim.refusals import check_refusal
from tests.sim.toy_model import accepted_path, line_to, next_token, output_of
from tests.sim.truth import Applied, Asked, Cache, Done, Forked, copied, is_remembered

# While a commit takes longer, calls are refused.
_STALL_S = 5.0


class Oracle:
    """Owner of the truth. The simulator keeps the public fields up to `caches`.

    Requests have numbers in the order in which they were submitted.
    """

    def __init__(self, capacity_tokens: int, max_lease_s: float, seen: Counter[str]) -> None:
        self.capacity_tokens = capacity_tokens
        self.max_lease_s = max_lease_s
        self.seen = seen
        # Who is nobody in particular.
        self.anonymous = Tenant()
        self.now_s: float = 0.0
        self.default_lease_s = 20.0
        self.was_ready: bool = False
        self.draining: bool = False
        self.journal_works: bool = True
        # The weights that are served.
        self.weights = 0
        # The first weights whose caches continue with those that are served.
        self.continued = 0
        # Each time others were served: the first that continued with them, and they.
        self._continuations: list[tuple[int, int]] = []
        self.queue_limit: int = 0
        self.cache_limit: int = 0
        self.budget = JournalBudget()
        # What the gateway does besides, for nobody: that takes turns and places, too.
        self.own_operations: int = 0
        # Grows when the gateway crashes. Of one incarnation of it: the request of each ticket.
        self.gateway_epoch = 0
        self.tickets: dict[int, Asked] = {}
        # By id and by number.
        self.caches: dict[str, Cache] = {}
        self.numbered: dict[int, Cache] = {}
        self.made: dict[tuple[Tenant, str], Cache] = {}
        self.forked: dict[tuple[Tenant, str], Forked] = {}
        # Who is to be answered, and whose operation ends without that.
        self.outstanding: dict[int, Asked] = {}
        self.abandoned: dict[int, Asked] = {}
        # What was cancelled or released in this turn: some of it may be there still.
        self.taken_back: list[Asked] = []
        self.gone: set[str] = set()
        # Changed in this turn: who is answered in it may have been just before.
        self._changed: set[str] = set()
        self._forks_gone: list[tuple[Tenant, str]] = []
        # The last sequence that was computed under a request id; and those under which there was poison.
        self.sequences: dict[tuple[Tenant, str], int] = {}
        self.poisoned: set[tuple[Tenant, str]] = set()
        # Whether anything could ever not be written.
        self.has_failed = False
        # Why workers died that computed a sequence: the numbers of the guilty, 0 for no fault of theirs.
        self.deaths: dict[int, list[int]] = {}
        self._submitted = 0
        # The adapters that were asked for with a request id, by tenant.
        self.asked_adapters: defaultdict[tuple[Tenant, str], set[int]] = defaultdict(set)
        # With the journal, the oldest first: when, and what was given to it together.
        self._groups: deque[tuple[float, list[tuple[Asked | None, Sequence[Record]]]]] = deque()

    # What the simulator tells.

    def submitted(self, request: Request, tenant: Tenant) -> Asked:
        self._submitted += 1
        asked = Asked(self._submitted, request, tenant, self.now_s)
        asked.weights = self.weights
        caches = self.caches_of(asked)
        asked.could_be_used = all(cache is None or self.can_use(cache.weights) for cache in caches)
        self.outstanding[asked.number] = asked
        if isinstance(request, Append) and request.request_id:
            self.asked_adapters[tenant, request.request_id].add(request.adapter)
        if isinstance(request, Append) and request.request_id and POISON in request.token_ids:
            self.poisoned.add((tenant, request.request_id))
        lengths = [len(cache.tokens) if cache is not None else None for cache in caches]
        self.budget.submitted(asked.number, request, lengths)
        return asked

    def cancelled(self, asked: Asked) -> None:
        del self.outstanding[asked.number]
        asked.abandoned = True
        if asked.records is not None or isinstance(asked.request, Release):
            self.abandoned[asked.number] = asked
        else:
            self.taken_back.append(asked)

    def given_to_journal(self, writes: Sequence[Write]) -> None:
        """Records of several operations, to become durable together."""
        group: list[tuple[Asked | None, Sequence[Record]]] = []
        for ticket, records in writes:
            asked = self.tickets.get(ticket)
            group.append((asked, records))
            if asked is None:
                self._check_own_release(records)
                continue
            assert asked.records is None, "written twice"
            assert asked.number in self.outstanding or asked.number in self.abandoned, "of one who has gone"
            asked.records = records
        self._groups.append((self.now_s, group))

    def commit_ended(self, durable: bool) -> None:
        """The oldest of what is with the journal has ended: if it is durable, it is true from now on."""
        self.journal_works = durable
        _, group = self._groups.popleft()
        for asked, records in group:
            if asked is not None:
                asked.durable, asked.failed = durable, not durable
            if durable:
                for record in records:
                    self._apply(record, asked)
                if asked is not None and isinstance(asked.request, Fork):
                    self._check_whole(asked, asked.request)
            self.has_failed |= not durable

    @property
    def may_journal_be_refused(self) -> bool:
        """The last commit has failed, or the oldest one takes long."""
        is_slow = bool(self._groups) and self.now_s - self._groups[0][0] > _STALL_S
        return not self.journal_works or is_slow

    def gateway_crashed(self) -> list[tuple[Request, Tenant]]:
        """Whoever waited does not know what became of it. Returns what they had asked."""
        asked = [(a.request, a.tenant) for a in self.outstanding.values()]
        self.tickets, self.outstanding, self.abandoned, self.deaths = {}, {}, {}, {}
        self._groups.clear()
        self.gateway_epoch += 1
        self.journal_works, self.was_ready, self.draining = True, False, False
        for cache in self.caches.values():
            cache.epoch, cache.worker_id = 0, ""
            # Uses that nobody wrote down are forgotten.
            cache.promised_s = min(cache.promised_s, cache.recorded_s + cache.lease_s)
        return asked

    def cache_of(self, asked: Asked) -> Cache | None:
        """The cache that a request is about now; of a fork, the first."""
        return self.caches_of(asked)[0]

    def caches_of(self, asked: Asked) -> list[Cache | None]:
        """The caches that a request is about now."""
        request = asked.request
        if isinstance(request, Append) and not request.cache_id:
            return [self.made.get((asked.tenant, request.request_id)) if request.request_id else None]
        sources = request.sources if isinstance(request, Fork) else (request,)
        return [self.named(source.cache_id, asked.tenant) for source in sources]

    def named(self, cache_id: str, tenant: Tenant) -> Cache | None:
        """A tenant's cache, if there is one of that name."""
        cache = self.caches.get(cache_id)
        return cache if cache is not None and cache.tenant is tenant else None

    def continue_with(self, weights: int, continued: int) -> None:
        """Other weights are served, with which caches of `continued` and later ones go on."""
        self.weights, self.continued = weights, continued
        self._continuations.append((continued, weights))
        for cache in self.caches.values():
            cache.weights = self.current(cache.weights)

    def current(self, weights: int) -> int:
        """With which weights that is computed now what was for these."""
        for first, last in self._continuations:
            weights = last if first <= weights <= last else weights
        return weights

    def can_use(self, weights: int) -> bool:
        """Whether anything but a release may be asked of caches of these weights."""
        return weights == self.weights

    def replied(self, asked: Asked, outcome: Result | QuireError) -> None:
        """A reply: exactly one for each request that was not cancelled, and the right one."""
        assert self.outstanding.pop(asked.number, None) is asked, "a reply to nobody, or a second one"
        if isinstance(outcome, QuireError):
            self.seen[outcome.reason] += 1
            assert asked.done is None, "what is durable was done"
            assert asked.records is None or asked.failed, "what is with the journal may be done"
            check_refusal(self, asked, outcome)
            return
        assert not asked.failed
        assert asked.records is None or asked.durable, "answered before it is durable"
        self._check_order(asked)
        assert asked.could_be_used or isinstance(asked.request, Release), "of weights that are gone"
        match asked.request:
            case Append():
                assert isinstance(outcome, Appended)
                self._check_append(asked, asked.request, outcome)
            case Release():
                assert isinstance(outcome, Released)
                assert asked.request.cache_id not in self.caches or self.cache_of(asked) is None, "it is gone"
                assert outcome.released is (asked.done is not None), "who asks too late releases nothing"
                self.seen["release" if outcome.released else "release of nothing"] += 1
            case Fork():
                assert isinstance(outcome, Handles)
                self._check_fork(asked, asked.request, outcome)
            case Truncate():
                assert isinstance(outcome, Handles)
                self._check_truncate(asked, asked.request, outcome)
            case Renew():
                assert isinstance(outcome, Handles) and asked.done is not None
                (handle,) = outcome.handles
                self._check_handle(handle, asked.done.cache, asked.done.seq_len, fresh=True)

    def turn_ended(self) -> None:
        """After all effects of one input."""
        self.taken_back.clear()
        self.gone.clear()
        self._changed.clear()
        for key in self._forks_gone:
            del self.forked[key]
        self._forks_gone.clear()
        for asked in [a for a in self.abandoned.values() if a.durable or a.failed or self._is_moot(a)]:
            del self.abandoned[asked.number]
            self.seen["done for one who has gone"] += 1

    def _is_moot(self, asked: Asked) -> bool:
        """A release of what was released by another."""
        return asked.records is None and self.cache_of(asked) is None

    # Records.

    def _check_own_release(self, records: Sequence[Record]) -> None:
        (record,) = records
        assert isinstance(record, CacheReleased), "the gateway does nothing else by itself"
        assert self.numbered[record.number].promised_s <= self.now_s, (
            "a cache lives as long as its handle says"
        )
        self.seen["lease ran out"] += 1

    def _apply(self, record: Record, asked: Asked | None) -> None:
        """A record is durable: it changes the truth, and has to be what was asked for."""
        match record:
            case CacheCreated():
                self._create(record, asked)
            case TokensAppended():
                assert asked is not None
                self._append(record, asked)
            case CacheTruncated():
                cache = self.numbered[record.number]
                assert asked is not None and self.cache_of(asked) is cache
                self._truncate(cache, record.new_len, asked)
            case CacheForked():
                assert asked is not None
                self._fork(record, asked)
            case LeaseRenewed():
                self._renew(self.numbered[record.number], record.lease_s, asked)
            case CacheReleased():
                self._release(self.numbered[record.number], asked)
            case _:
                raise AssertionError("nobody asked for it")

    def _create(self, record: CacheCreated, asked: Asked | None) -> None:
        assert asked is not None and isinstance(asked.request, Append)
        append = asked.request
        assert record.cache_id not in self.caches and record.number not in self.numbered
        assert not append.cache_id and not append.is_scoring and asked.done is None
        lease_s = self.default_lease_s if append.lease_s is None else append.lease_s
        key = (asked.tenant, append.request_id)
        assert record.request_id == append.request_id and record.tenant == asked.tenant.name
        assert not append.request_id or key not in self.made, "one request_id, one cache"
        # A repetition that finds its original undone is that of its first asker, whose lease that is.
        cache = Cache(record.cache_id, record.number, asked.tenant, record.seed, record.lease_s)
        assert append.request_id or cache.lease_s == min(lease_s, self.max_lease_s)
        cache.request_id, cache.weights = append.request_id, self.current(record.weights)
        cache.adapter = record.adapter
        assert record.adapter == append.adapter, "of the adapter that was asked for"
        wanted = asked.weights if append.weights is None else append.weights
        # A repetition may meet its original, which was asked for before.
        wanted = self.current(wanted)
        assert cache.weights == wanted or (append.request_id and cache.weights < wanted)
        self._add(cache)
        if append.request_id:
            self.made[key] = cache

    def _append(self, record: TokensAppended, asked: Asked) -> None:
        cache, append = self.numbered[record.number], asked.request
        assert isinstance(append, Append) and not append.is_scoring and asked.done is None, "applied twice"
        base, tokens, kept = record.position, list(append.token_ids), len(record.token_ids)
        assert base == len(cache.tokens), "an append at the end"
        assert append.position in (None, base), "an append is applied where it says"
        self._check_stated(append, cache)
        if kept > len(tokens):
            # What it was answered says whether the model chooses these.
            assert append.kind is AppendKind.DECODE and kept < len(tokens) + append.prelaunch
            tokens += record.token_ids[len(tokens) :]
            append = run_of(append, tokens)
        assert base + len(tokens) <= self.capacity_tokens
        if not append.parents:
            assert list(record.token_ids) == tokens[:kept]
        if append.cache_id:
            assert self.cache_of(asked) is cache
        else:
            assert base == 0
        prompt_len = base + len(tokens) if append.kind is AppendKind.PREFILL else cache.prompt_len
        assert record.prompt_len == prompt_len, "what a prefill leaves is prompt, and only that"
        before = cache.tokens[:]
        cache.tokens += record.token_ids
        cache.prompt_len, cache.last = prompt_len, Applied(base, append, kept, self.gateway_epoch)
        self._recorded(cache)
        asked.done = Done(cache, len(cache.tokens), before + tokens, prompt_len, list(record.token_ids))
        self.seen[f"applied {append.kind.name.lower()}"] += 1

    def _truncate(self, cache: Cache, new_len: int, asked: Asked) -> None:
        request = asked.request
        assert isinstance(request, Truncate) and asked.done is None
        assert new_len == request.new_len < len(cache.tokens)
        assert request.position in (None, len(cache.tokens)), "cut as it was believed to be"
        del cache.tokens[new_len:]
        cache.prompt_len = min(cache.prompt_len, new_len)
        cache.last = None
        self._recorded(cache)
        asked.done = Done(cache, new_len)

    def _fork(self, record: CacheForked, asked: Asked) -> None:
        fork, parent = asked.request, self.numbered[record.parent]
        assert isinstance(fork, Fork) and record.request_id == fork.request_id
        key = (asked.tenant, fork.request_id)
        if asked.forked is None:
            assert asked.done is None
            asked.forked = Forked(fork)
            assert not fork.request_id or key not in self.forked, "one request_id, one fork"
            if fork.request_id:
                self.forked[key] = asked.forked
        forked = asked.forked
        source = [source for source in fork.sources if source.count][forked.sources]
        assert self.named(source.cache_id, asked.tenant) is parent and len(record.children) == source.count
        assert source.position in (None, len(parent.tokens)), "copied as it was believed to be"
        for child in record.children:
            cache = Cache(child.cache_id, child.number, parent.tenant, child.seed, parent.lease_s)
            cache.tokens, cache.prompt_len = parent.tokens[:], parent.prompt_len
            cache.weights, cache.adapter = parent.weights, parent.adapter
            if fork.request_id:
                cache.fork = (forked, len(forked.children))
            forked.children.append(cache)
            forked.seq_lens.append(len(parent.tokens))
            self._add(cache)
        forked.sources += 1
        asked.done = Done(parent, len(parent.tokens))

    def _check_whole(self, asked: Asked, fork: Fork) -> None:
        """All that was asked for is done together."""
        made = 0 if asked.forked is None else len(asked.forked.children)
        assert made == fork.count, "all copies, or none"
        # What another was releasing at the time, and then could not, is there.
        left = [name for name in fork.release if self.named(name, asked.tenant) is not None]
        assert not left or self.has_failed, "and what it releases is gone with that"

    def _renew(self, cache: Cache, lease_s: float, asked: Asked | None) -> None:
        assert asked is not None and isinstance(asked.request, Renew) and self.cache_of(asked) is cache
        wanted_s = asked.request.lease_s
        assert lease_s == (cache.lease_s if wanted_s is None else min(wanted_s, self.max_lease_s))
        cache.lease_s = lease_s
        # A shorter lease counts, whoever had another in his hands.
        cache.promised_s = min(cache.promised_s, self.now_s + lease_s)
        self._recorded(cache)
        asked.done = Done(cache, len(cache.tokens))

    def _release(self, cache: Cache, asked: Asked | None) -> None:
        if asked is not None and isinstance(asked.request, Fork):
            assert cache.cache_id in asked.request.release and cache.tenant is asked.tenant
            # One that makes none has no other cache to speak of.
            asked.done = asked.done or Done(cache, 0)
        elif asked is not None:
            assert isinstance(asked.request, Release) and self.cache_of(asked) is cache
            earlier = (a for a in self._asked_of(cache) if a.number < asked.number)
            assert next(earlier, None) is None, "not before what was asked of the cache earlier"
            asked.done = Done(cache, 0)
        del self.caches[cache.cache_id]
        del self.numbered[cache.number]
        self.gone.add(cache.cache_id)
        if cache.request_id:
            del self.made[cache.tenant, cache.request_id]
        if cache.fork is not None:
            forked, _ = cache.fork
            if not any(child.cache_id in self.caches for child in forked.children):
                self._forks_gone.append((cache.tenant, forked.request.request_id))

    def _add(self, cache: Cache) -> None:
        self.caches[cache.cache_id] = self.numbered[cache.number] = cache
        self._recorded(cache)

    def _recorded(self, cache: Cache) -> None:
        cache.recorded_s = self.now_s
        self._changed.add(cache.cache_id)

    # Replies.

    def _asked_of(self, cache: Cache) -> Iterator[Asked]:
        """What is outstanding of a cache, in order."""
        return (
            asked for asked in self.outstanding.values() if any(its is cache for its in self.caches_of(asked))
        )

    def _check_order(self, asked: Asked) -> None:
        if isinstance(asked.request, Fork) and asked.done is None and not asked.durable:
            # One of its caches has gone, and it finds that it was done before.
            return
        for cache in self.caches_of(asked):
            if cache is not None:
                later = all(other.number > asked.number for other in self._asked_of(cache))
                assert later, "one after the other"

    def _check_append(self, asked: Asked, append: Append, result: Appended) -> None:
        if append.is_scoring:
            assert not result.cache_id and asked.records is None
            of_model = asked.weights, append.adapter
            self._check_outputs(append, result, list(append.token_ids), None, 0, of_model)
        elif asked.done is not None:
            done = asked.done
            of_model = done.cache.weights, done.cache.adapter
            ahead = len(done.kept) - len(append.token_ids)
            if ahead > 0:
                append = run_of(append, done.kept)
            chosen = self._check_outputs(append, result, done.tokens, done.cache, done.prompt_len, of_model)
            if ahead > 0:
                assert list(append.token_ids[-ahead:]) == chosen[-ahead - 1 : -1], "each was chosen before"
            base, path = len(done.tokens) - len(append.token_ids), list(range(len(append.token_ids)))
            if append.accept:
                path = accepted_path(append.token_ids, append.parents, chosen)
            assert result.kept == len(path) == done_of(result).kept
            assert list(result.path) == (path if append.parents else [])
            assert done.seq_len == base + len(path)
            assert done.kept == [append.token_ids[index] for index in path], "what it was told is there"
            self.seen["a path of a tree"] += len(path) > 1 and path != list(range(len(path)))
            self._check_handle(result, done.cache, done.seq_len, fresh=True)
        else:
            self._check_repeated(asked, append, result)
        self.seen["answered after a replay"] += result.replayed_tokens > 0

    def _check_repeated(self, asked: Asked, append: Append, result: Appended) -> None:
        cache = self.cache_of(asked)
        assert cache is not None and cache.last is not None, "a success that was not written"
        last = cache.last
        self._check_stated(append, cache)
        assert append.cache_id or append.adapter == cache.adapter, "of the adapter that was asked for"
        assert cache.is_repeat(append, asked.position), "only a repetition is answered without being applied"
        assert result.kept == last.kept
        tokens = cache.tokens[: last.base] + list(append.token_ids)
        of_model = cache.weights, cache.adapter
        self._check_outputs(append, result, tokens, cache, cache.prompt_len, of_model)
        if append.parents:
            kept = list(result.path)
            assert line_to(append.token_ids, append.parents, kept[-1]) == cache.tokens[last.base :]
            assert kept == sorted(kept) and len(kept) == last.kept
            self.seen["repeated tree"] += 1
        self._check_handle(result, cache, len(cache.tokens), fresh=False)
        where = "from memory" if not asked.sequence and is_remembered(append, last) else "computed again"
        self.seen[f"repetition answered {where}"] += 1
        self.seen["repetition answered after a gateway crash"] += last.epoch < self.gateway_epoch

    def _check_stated(self, append: Append, cache: Cache) -> None:
        stated = append.weights
        is_right = stated is None or append.cache_id or self.current(stated) == cache.weights
        assert is_right, "with the weights it was checked for"

    def _check_outputs(
        self,
        append: Append,
        result: Appended,
        tokens: Sequence[int],
        cache: Cache | None,
        prompt_len: int,
        of_model: tuple[int, int],
    ) -> list[int]:
        """Asserts that the answer has the wanted rows; returns what the model chooses in every row.

        `of_model`: the weights and the adapter. It may have been computed before the weights were replaced.
        """
        weights, adapter = of_model
        assert self.current(result.weights) == self.current(weights), "of other weights"
        options, salt = options_of(append), None
        if options.output.HasField("sampling"):
            assert cache is not None
            salt = (cache.seed, prompt_len)
        own = list(append.token_ids)
        before = list(tokens[: len(tokens) - len(own)])
        lines = (
            line_to(own, append.parents, index)
            for index in range(0 if append.accept else len(own) - options.rows, len(own))
        )
        chosen = [next_token(before + line, salt, result.weights, adapter) for line in lines]
        wanted = chosen[len(chosen) - options.rows :]
        expected = [output_of(token, options.output) for token in wanted]
        assert list(done_of(result).outputs) == expected, "what the model says of the tokens"
        return chosen

    def _check_handle(self, handle: Handle | None, cache: Cache, seq_len: int, *, fresh: bool) -> None:
        """`fresh`: it was used just now, so that its lease starts now."""
        assert handle is not None and handle.cache_id == cache.cache_id and handle.seq_len == seq_len
        ends_s = self.now_s + cache.lease_s
        assert handle.expires_at_s == ends_s if fresh else handle.expires_at_s <= ends_s
        moved = "" not in (handle.worker_id, cache.worker_id) and handle.worker_id != cache.worker_id
        assert handle.epoch > cache.epoch if moved else handle.epoch >= cache.epoch, "it grows when KV moves"
        cache.epoch, cache.worker_id = handle.epoch, handle.worker_id
        cache.promised_s = handle.expires_at_s

    def _check_fork(self, asked: Asked, fork: Fork, result: Handles) -> None:
        assert len(result.handles) == fork.count
        several = "s of several" if len(fork.sources) > 1 else ""
        seq_lens: Sequence[int] = ()
        children: Sequence[Cache] = ()
        fresh = asked.durable
        if asked.forked is not None:
            children, seq_lens = asked.forked.children, asked.forked.seq_lens
        elif asked.durable:
            assert not fork.count
        else:
            forked = self.forked.get((asked.tenant, fork.request_id))
            assert fork.request_id and forked is not None, "a fork that was not written"
            pairs = list(zip(copied(forked.request), copied(fork), strict=True))
            gone = [now for (before, _), (now, _) in pairs if now != before]
            assert all(count == before for (_, before), (_, count) in pairs)
            assert all(self.named(name, asked.tenant) is None for name in gone), "another fork's request id"
            children = forked.children
            seq_lens = [len(child.tokens) for child in children]
            self.seen[f"fork{several} repeated"] += 1
        for handle, child, seq_len in zip(result.handles, children, seq_lens, strict=True):
            assert child.cache_id in self.caches or child.cache_id in self.gone
            if fresh or child.cache_id not in self._changed | self.gone:
                self._check_handle(handle, child, seq_len, fresh=fresh)
        self.seen[f"fork{several}"] += 1

    def _check_truncate(self, asked: Asked, request: Truncate, result: Handles) -> None:
        cache = asked.done.cache if asked.done is not None else self.cache_of(asked)
        assert cache is not None
        assert asked.done is not None or len(cache.tokens) == request.new_len
        (handle,) = result.handles
        self._check_handle(handle, cache, request.new_len, fresh=asked.done is not None)
        self.seen["truncation"] += asked.done is not None
