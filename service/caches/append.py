"""Handles appends: fencing, repetitions, creation of caches, and which tokens are kept."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

from service.caches.answers import ForwardDone
from service.caches.attempts import failure_of
from service.caches.cache_index import CacheIndex
from service.caches.effects import TruncateSequence
from service.caches.entries import CacheEntry, Change, Operation, RequestHandler
from service.caches.handlers import Parts
from service.caches.ledger import NEW_CACHE_BYTES, CacheState, fingerprint
from service.caches.queues import touch
from service.caches.records import CacheCreated, TokensAppended
from service.caches.requests import PREFILL, Append, Appended, Result
from service.caches.segments import TOKEN_BYTES
from service.caches.tenants import Tenant
from service.caches.weights import Weights
from service.errors import NoWorker, PositionMismatch, WeightsChanged, reused_request_id

# The parts of an answer: the operation, the worker's answer, how many tokens were kept, a tree's kept path.
_Answer = tuple[Operation, ForwardDone, int, Sequence[int]]


class Appends(RequestHandler[Append]):
    """Prefills, decodes, verifies and scorings."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts

    def entries(self, request: Append, tenant: Tenant) -> tuple[Sequence[CacheEntry | None], int]:
        """The cache of the append, or a new one, which is not visible yet."""
        # Usually 0. The check here saves the call of a property for each token.
        ahead = request.most_appended if request.prelaunch else 0
        size_bytes = TOKEN_BYTES * (len(request.token_ids) + ahead)
        if request.cache_id:
            # `index.find`, inlined: this runs for each token.
            entry = self._parts.index.by_id.get(request.cache_id)
            return (entry if entry is not None and entry.tenant is tenant else None,), size_bytes
        if not request.is_scoring:
            size_bytes += NEW_CACHE_BYTES
        self._parts.admission.require_journal(size_bytes)
        entry = self._parts.index.created_by(request.request_id, tenant) or self._create(request, tenant)
        return (entry,), size_bytes

    def _create(self, append: Append, tenant: Tenant) -> CacheEntry:
        if not append.is_scoring:
            self._parts.index.idempotency.require_free(append.request_id, tenant)
            self._parts.admission.require_caches(1)
        tenant.require(caches=1, tokens=len(append.token_ids))
        if not self._parts.workers.were_ready:
            raise NoWorker
        weights = self._parts.weights.serving
        if append.weights is not None:
            weights = self._parts.weights.current(append.weights)
        if not self._parts.weights.can_use(weights):
            raise WeightsChanged(can_be_repeated=True)
        lease_s = self._parts.limits.default_lease_s if append.lease_s is None else append.lease_s
        created = CacheCreated(
            number=self._parts.context.number(),
            cache_id=self._parts.new_cache_id(),
            tenant=tenant.name,
            salt=tenant.salt(append.cache_salt, self._parts.context.digest_of(append.adapter)),
            seed=self._parts.new_seed(),
            lease_s=min(lease_s, self._parts.limits.max_lease_s),
            request_id="" if append.is_scoring else append.request_id,
            weights=weights,
            adapter=append.adapter,
        )
        state = CacheState.of(created)
        entry = self._parts.admission.new_cache(state, tenant, ephemeral=append.is_scoring)
        entry.creation = created
        self._parts.index.begin(entry)
        return entry

    def begin(self, operations: Sequence[Operation]) -> list[tuple[Operation, Change]]:
        """Fencing: an append is applied only at its position, and only once."""
        begun: list[tuple[Operation, Change]] = []
        admission, attempts = self._parts.admission, self._parts.attempts
        for operation in operations:
            request, state = operation.request, operation.entry.state
            assert isinstance(request, Append)
            length, position = state.tokens.length, request.position
            # Usually it fits. Without a position it is applied at any length.
            fits = request.cache_id and (position is None or position == length)
            try:
                if not fits and self._was_applied(operation, request):
                    answer = self._repeat(operation, request)
                    if answer is not None:
                        begun.append((operation, answer))
                    continue
                tokens = len(request.token_ids)
                ahead = request.most_appended if request.prelaunch else 0
                admission.reserve(operation, tokens + ahead)
                # After a prefill, all tokens count as prompt.
                prompt_len = length + tokens if request.kind is PREFILL else state.prompt_len
                attempts.begin(operation, length, prompt_len)
            except Exception as error:
                # Not even a bug may block the cache for ever.
                begun.append((operation, failure_of(error)))
        return begun

    def _was_applied(self, operation: Operation, request: Append) -> bool:
        """Whether it repeats the last append of its cache. False: it is the first one of a new cache.

        Raises PositionMismatch, WeightsChanged, or InvalidArgument if its request id is another request's.
        """
        entry, state, position = operation.entry, operation.entry.state, request.position
        if not request.cache_id:
            has_salt = entry.tenant.has_salt(state.salt, request.cache_salt)
            if not has_salt or request.adapter != state.adapter:
                raise reused_request_id()
            if request.weights is not None and self._parts.weights.current(request.weights) != state.weights:
                # It was checked before the weights were replaced. Since then another request created the
                # cache.
                raise WeightsChanged(can_be_repeated=True)
            if not entry.visible:
                return False
            position = 0
        assert position is not None, "without a position it repeats nothing"
        if position == state.last_base:
            if repeats_last(state, request):
                return True
            if not request.cache_id:
                raise reused_request_id()
        raise PositionMismatch(position, state.tokens.length)

    def _repeat(self, operation: Operation, request: Append) -> Result | None:
        """Answers a repeated append: from memory, or computed again on a temporary copy."""
        entry, state = operation.entry, operation.entry.state
        if entry.answer is not None and entry.answer_options == request.options:
            operation.weights = state.weights
            path = self._kept_path(entry, request)
            return _answers([(operation, entry.answer, state.last_kept, path)])[0]
        copy_number = self._parts.context.number()
        assert state.last_base is not None
        self._parts.attempts.begin(operation, state.last_base, state.prompt_len, copy_number)
        return None

    def computed(self, operations: Sequence[Operation]) -> list[Change]:
        changes: list[Change] = []
        for operation in operations:
            entry, request, done = operation.entry, operation.request, operation.done
            assert isinstance(request, Append) and done is not None
            operation.weights = entry.state.weights
            if operation.copy_number is not None or entry.ephemeral:
                changes.append(self._not_kept(operation, request, done))
                continue
            token_ids, requested = request.token_ids, b""
            if request.parents:
                requested = fingerprint(token_ids, request.parents)
                token_ids = [token_ids[index] for index in done.kept_path]
            elif done.kept > len(token_ids):
                # As if all had been requested: then a decode of only the first one is no repetition.
                token_ids = [*token_ids, *done.appended]
            elif done.kept != len(token_ids):
                requested = fingerprint(token_ids)
                token_ids = token_ids[: done.kept]
            appended = TokensAppended(
                entry.number,
                operation.base,
                token_ids,
                operation.prompt_len,
                entry.ownership,
                request.accept,
                requested,
            )
            changes.append([appended] if entry.creation is None else [entry.creation, appended])
        return changes

    def _not_kept(self, operation: Operation, request: Append, done: ForwardDone) -> Result:
        """The answer to a scoring, or to a repeated append that was computed again."""
        entry, state = operation.entry, operation.entry.state
        if entry.ephemeral:
            of_model = operation.weights, state.adapter
            return Appended("", 0, 0, "", 0.0, *of_model, done, done.kept, operation.replayed_tokens)
        touch((entry,), self._parts.context.now_s)
        return _answers([(operation, done, state.last_kept, self._kept_path(entry, request))])[0]

    def applied(self, operations: Sequence[Operation]) -> list[Result]:
        found: list[_Answer] = []
        for operation in operations:
            entry, request, done = operation.entry, operation.request, operation.done
            assert isinstance(request, Append) and done is not None
            if not entry.visible:
                self._show(entry)
            # Keep the answer for a repetition, unless the weights were replaced meanwhile, or it has several
            # tokens: only this process makes such requests.
            is_current = operation.weights == entry.state.weights
            if is_current and request.keeps_answer and not done.appended:
                entry.answer, entry.answer_options = done, request.options
            else:
                entry.answer = None
            found.append((operation, done, done.kept, tuple(done.kept_path) if request.parents else ()))
        return _answers(found)

    def _show(self, entry: CacheEntry) -> None:
        """Makes a new cache visible to callers: its creation is durable."""
        state = self._parts.ledger.get(entry.number)
        assert state is not None
        entry.state, entry.creation = state, None
        self._parts.index.add(entry)

    def write_failed(self, operation: Operation, request: Append) -> None:
        """Truncates the worker's copy, which has tokens that the cache does not have."""
        entry = operation.entry
        if entry.worker is not None and entry.visible:
            command = TruncateSequence(self._parts.context.number(), entry.number, operation.base)
            self._parts.context.send(entry.worker, command)

    def _kept_path(self, entry: CacheEntry, append: Append) -> Sequence[int]:
        """The accepted path of the last append, if it was a tree, according to the cache's tokens."""
        state = entry.state
        if not append.parents or state.last_base is None:
            return ()
        kept = state.tokens.between(state.last_base, state.last_base + state.last_kept)
        return path_of(append.token_ids, append.parents, kept)


def _answers(found: Sequence[_Answer]) -> list[Result]:
    answers: list[Result] = []
    for operation, done, kept, path in found:
        entry, worker = operation.entry, operation.entry.worker
        state = entry.state
        answers.append(
            Appended(
                state.cache_id,
                state.tokens.length,
                entry.ownership,
                "" if worker is None else worker.worker_id,
                entry.expires_at_s,
                operation.weights,
                state.adapter,
                done,
                kept,
                operation.replayed_tokens,
                path,
            )
        )
    return answers


def repeats_last(state: CacheState, append: Append) -> bool:
    """Whether an append at the position of the cache's last append repeats it."""
    last = state.last
    if last is None or append.accept != last.accept:
        return False
    return fingerprint(append.token_ids, append.parents) == last.fingerprint


def path_of(token_ids: Sequence[int], parents: Sequence[int], kept: Sequence[int]) -> list[int]:
    """The indexes of the path through a tree whose tokens are `kept`. Among equal siblings, the first.

    parents: for each token except the first, the index of its parent.
    """
    path = [0]
    for token in kept[1:]:
        path.append(
            next(
                index
                for index, parent in enumerate(parents, start=1)
                if parent == path[-1] and token_ids[index] == token
            )
        )
    return path


def continue_caches(index: CacheIndex, operations: Iterable[Operation], weights: Weights) -> None:
    """Lets caches, including those whose creation is not durable yet, continue with the served weights."""
    for entry in index:
        # So a repetition is computed again.
        entry.answer = None
    for operation in operations:
        entry = operation.entry
        if entry.creation is not None:
            entry.state.weights = weights.current(entry.state.weights)
            entry.creation = dataclasses.replace(entry.creation, weights=entry.state.weights)
