"""All executions: started once per request, found again by request id, ended with the server."""

from __future__ import annotations

import functools
import hashlib
import secrets
import time
from collections import Counter
from collections.abc import Sequence

from quire.v1 import runner_pb2

from service.api import validation
from service.api.append_codec import PRIORITIES
from service.api.server_state import ServerState
from service.caches.idempotency import IdempotencyTable, Kind
from service.caches.tenants import Tenant
from service.completion import wait_until
from service.errors import Draining, ExecutionLost, InvalidArgument, reused_request_id
from service.runtimes.base import Batch
from service.runtimes.execution import Execution, State
from service.runtimes.items import check_cost, check_ids, num_samples
from service.runtimes.replay_buffer import ReplayBudget
from service.runtimes.router import Router

_POLICIES = frozenset(runner_pb2.RoutingPolicy.values())


class Executions:
    """Owner of the executions, by tenant and request id.

    `max_executions` may be running, and as many be finished unread.
    """

    def __init__(self, router: Router, state: ServerState, idempotency: IdempotencyTable) -> None:
        self._router = router
        self._state = state
        # All that are not closed, by state, with their tenants. Those that entered it first come first.
        self._open: dict[State, dict[Execution, Tenant | None]]
        self._open = {State.RUNNING: {}, State.FINISHED_UNREAD: {}}
        # For chunks of all kept executions that stay after they were read.
        self._read = ReplayBudget(state.config.max_unread_bytes // 2)
        # Also of those that can be resumed.
        self._idempotency = idempotency
        self._draining = False

    def open(
        self, request: runner_pb2.ExecuteRequest, tenant: Tenant | None, timeout_s: float | None
    ) -> Execution:
        """A new execution, or the one that this request resumes. The caller attaches a reader at once.

        Raises InvalidArgument, RuntimeNotFound, NoWorker, TooManyExecutions, QuotaExceeded, ExecutionLost or
        Draining.
        """
        self._check(request)
        _check_progress(request)
        self._router.named(request.runtime)
        return self._find(request, tenant) or self._start(request, tenant, timeout_s)

    def needs_worker(self, request: runner_pb2.ExecuteRequest) -> bool:
        """Whether only the server's own workers may run it. Raises RuntimeNotFound."""
        local = self._router.named("")
        if self._router.named(request.runtime) is not local:
            return False
        is_resumed = any(at.position for at in request.resume_after)
        has_caches = any(item.HasField("cache") for item in request.items)
        return bool(request.runtime) or self._router.runtimes == [local] or is_resumed or has_caches

    def cancel(self, request_id: str, tenant: Tenant | None) -> bool:
        """Ends a kept execution. Returns whether there was one. Raises InvalidArgument."""
        if not request_id:
            raise InvalidArgument("BAD_REQUEST_ID", "request_id", "it is needed")
        validation.check_request_id(request_id)
        kept = self._idempotency.find(request_id, tenant, Kind.EXECUTION)
        if kept is not None:
            kept.made[0].cancel()
        return kept is not None

    def check_items(self, items: Sequence[runner_pb2.ExecuteItem]) -> None:
        """Raises InvalidArgument: two items have one id, or there are too many samples."""
        most = self._state.config.max_items_per_call
        validation.check_num_items(items, most)
        check_ids(items)
        samples = sum(num_samples(item) for item in items)
        if samples > most:
            raise InvalidArgument("TOO_MANY_SAMPLES", "items", f"at most {most} samples in a batch")

    async def drain(self, grace_s: float) -> None:
        """Starts no new ones, waits so long for running ones, and then ends all."""
        self._draining = True
        await wait_until(lambda: not self.num_unfinished, grace_s)
        self.end_all()

    @property
    def num_unfinished(self) -> int:
        return sum(not execution.is_done for group in self._open.values() for execution in group)

    def end_all(self) -> None:
        """Ends all executions. The next server can resume kept ones."""
        for execution in [execution for group in self._open.values() for execution in group]:
            execution.end()

    def _cancel_an_unread_one(self, ended: Tenant | None) -> None:
        """If too many are finished unread: the oldest one of the tenant with the most.

        Of equal ones it is `ended`, whose execution is one too many: others lose nothing by it.
        """
        unread = self._open[State.FINISHED_UNREAD]
        if len(unread) > self._state.config.max_executions:
            counts = Counter(unread.values())
            largest = max(counts, key=lambda tenant: (counts[tenant], tenant is ended))
            next(execution for execution, tenant in unread.items() if tenant is largest).cancel()

    def _check(self, request: runner_pb2.ExecuteRequest) -> None:
        self.check_items(request.items)
        validation.check_request_id(request.request_id)
        check_cost(request)
        if request.HasField("keep"):
            if not request.request_id:
                raise InvalidArgument("BAD_KEEP", "keep", "an execution is kept by its request_id")
            if request.keep.seconds + request.keep.nanos / 1e9 <= 0:
                raise InvalidArgument("BAD_KEEP", "keep", "the time must be longer than 0")
            _check_positions(request)
        if request.policy not in _POLICIES:
            raise InvalidArgument("BAD_POLICY", "policy", f"policy {request.policy} has no name")
        if request.priority not in PRIORITIES:
            raise InvalidArgument("BAD_PRIORITY", "priority", f"priority {request.priority} has no name")

    def _find(self, request: runner_pb2.ExecuteRequest, tenant: Tenant | None) -> Execution | None:
        """The kept execution with this request id. Raises InvalidArgument if its request was another."""
        kept = self._idempotency.find(request.request_id, tenant, Kind.EXECUTION)
        if kept is None:
            return None
        if tenant is not None:
            tenant.admit_reader(time.monotonic())
        if kept.digest != _digest(request):
            raise reused_request_id()
        execution: Execution = kept.made[0]
        if execution.state is State.FINISHED_UNREAD:
            # It is about to be read, and then takes a place like one that runs.
            self._state.budgets.of(tenant).executions.require()
        execution.started.resumed = True
        return execution

    def _start(
        self, request: runner_pb2.ExecuteRequest, tenant: Tenant | None, timeout_s: float | None
    ) -> Execution:
        if self._draining:
            raise Draining
        budgets = self._state.budgets.of(tenant)
        budgets.executions.require()
        keep_s = 0.0
        if request.HasField("keep"):
            keep_s = min(validation.lease_seconds(request.keep), self._state.config.max_lease_s)
            self._idempotency.require_free(request.request_id, tenant)
        request_id = request.request_id or secrets.token_hex(16)
        resumed = self._resumed_items(request, keep_s)
        now_s = time.monotonic()
        preparation = (tenant or Tenant()).admit_external(now_s, len(request.items))
        samples = [(item.item_id, sample) for item in request.items for sample in range(num_samples(item))]
        execution = Execution(
            request_id,
            samples,
            keep_s,
            lambda changed: self._on_state(tenant, changed),
            budgets.chunks if keep_s else budgets.answers,
            self._read,
            tenant,
        )
        self._on_state(tenant, execution)
        if keep_s:
            self._idempotency.add(request_id, tenant, Kind.EXECUTION, execution, digest=_digest(request))
        batch = Batch(
            key=request_id,
            tenant=tenant,
            items=request.items,
            priority=PRIORITIES[request.priority],
            # A kept execution continues without its client, so the client's deadline does not end it.
            deadline_s=None if timeout_s is None or keep_s else now_s + timeout_s,
            keep_s=keep_s,
            resumed=resumed,
            prepared=lambda items: preparation.made(items, time.monotonic()),
        )
        running = execution.start(functools.partial(self._router.execute, request, batch))
        # Not in the task, which may end before it begins.
        running.add_done_callback(lambda _: preparation.end())
        return execution

    def _resumed_items(self, request: runner_pb2.ExecuteRequest, keep_s: float) -> frozenset[str]:
        """The items of which the client has a part, although this server does not know the execution.

        Raises ExecutionLost if they cannot be continued, and NoWorker. Only the server's own workers generate
        the same text again, and only with a seed, which every kept execution has.
        """
        resumed = frozenset(at.item_id for at in request.resume_after if at.position)
        local = self._router.named("")
        if resumed and not (keep_s and self._router.named(request.runtime) is local):
            raise ExecutionLost
        if self.needs_worker(request):
            # Raises NoWorker if no worker has been ready yet.
            _ = self._state.limits
        # Otherwise another runtime may have generated the client's part. See `Batch.resumed`.
        is_only_local = bool(request.runtime) or self._router.runtimes == [local]
        is_same_again = not resumed or self._state.first_ready.executor.batch_invariant
        return frozenset() if is_only_local and is_same_again else resumed

    def _on_state(self, tenant: Tenant | None, execution: Execution) -> None:
        executions = self._state.budgets.of(tenant).executions
        for state, group in self._open.items():
            if execution in group:
                del group[execution]
                if state is State.RUNNING:
                    executions.give_back()
        if execution.state is not State.CLOSED:
            self._open[execution.state][execution] = tenant
            if execution.state is State.RUNNING:
                executions.take()
            if execution.state is State.FINISHED_UNREAD:
                self._cancel_an_unread_one(tenant)
            return
        self._idempotency.remove(execution.started.request_id, tenant, Kind.EXECUTION, execution)


def _check_progress(request: runner_pb2.ExecuteRequest) -> None:
    """Raises InvalidArgument: `resume_after` names a sample that the batch does not have."""
    samples = {item.item_id: num_samples(item) for item in request.items}
    if len(request.resume_after) > sum(samples.values()):
        text = "more is named than the batch has samples"
        raise InvalidArgument("BAD_RESUME_AFTER", "resume_after", text)
    for index, at in enumerate(request.resume_after):
        if at.sample >= samples.get(at.item_id, 0):
            text = "the batch has no such sample"
            raise InvalidArgument("BAD_RESUME_AFTER", f"resume_after[{index}]", text)


def _check_positions(request: runner_pb2.ExecuteRequest) -> None:
    """Raises InvalidArgument: run again after a restart, an item would append to its cache once more."""
    for index, item in enumerate(request.items):
        if item.HasField("cache") and not item.cache.HasField("position"):
            field = f"items[{index}].cache.position"
            raise InvalidArgument("BAD_POSITION", field, "a kept execution needs it")


def _digest(request: runner_pb2.ExecuteRequest) -> bytes:
    """Identifies a request. A client may resume with other `resume_after` and `keep`."""
    identity = runner_pb2.ExecuteRequest()
    identity.CopyFrom(request)
    identity.ClearField("resume_after")
    identity.ClearField("keep")
    return hashlib.sha256(identity.SerializeToString(deterministic=True)).digest()
