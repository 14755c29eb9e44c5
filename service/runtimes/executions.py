"""All executions: begun once for each request, found again by its id, ended with the server."""

from __future__ import annotations

import functools
import hashlib
import secrets
import time
from collections.abc import Sequence
from typing import TypeAlias

from quire.v1 import runner_pb2

from service.api import validation
from service.api.appends import PRIORITIES
from service.api.budget import AnswerBudget, KeptBudget
from service.api.server_state import ServerState
from service.caches.tenants import Tenant
from service.errors import Draining, ExecutionLost, InvalidArgument
from service.runtimes.base import Batch
from service.runtimes.execution import Execution, State
from service.runtimes.items import check_cost, check_ids, num_samples, reused_request_id
from service.runtimes.places import Places
from service.runtimes.router import Router

_POLICIES = frozenset(runner_pb2.RoutingPolicy.values())
_Key: TypeAlias = tuple[Tenant | None, str]


class Executions:
    """Owner of the executions, by their tenants and request ids."""

    def __init__(self, router: Router, state: ServerState) -> None:
        self._router = router
        self._state = state
        self._all: set[Execution] = set()
        self._places = Places(state.config.max_executions)
        # Of those that are kept: what nobody has read, and what is kept beside.
        half_bytes = state.config.max_unread_bytes // 2
        self._unread, self._read = AnswerBudget(half_bytes), KeptBudget(half_bytes)
        # Those that can be asked for again, and of which request they are.
        self._kept: dict[_Key, tuple[bytes, Execution]] = {}
        self._draining = False

    def open(
        self, request: runner_pb2.ExecuteRequest, tenant: Tenant | None, timeout_s: float | None
    ) -> Execution:
        """The execution of a request: a new one, or that which it repeats. Its reader is to come at once.

        Raises InvalidArgument, RuntimeNotFound, NoWorker, TooManyExecutions, ExecutionLost or Draining.
        """
        self._check(request)
        _check_progress(request)
        self._router.named(request.runtime)
        return self._known(request, tenant) or self._begin(request, tenant, timeout_s)

    def needs_worker(self, request: runner_pb2.ExecuteRequest) -> bool:
        """Whether only the server's own workers may take it. Raises RuntimeNotFound."""
        local = self._router.named("")
        if self._router.named(request.runtime) is not local:
            return False
        is_resumed = any(at.position for at in request.resume_after)
        return bool(request.runtime) or self._router.runtimes == [local] or is_resumed

    def cancel(self, request_id: str, tenant: Tenant | None) -> bool:
        """Ends an execution that is kept. Returns whether there was one. Raises InvalidArgument."""
        if not request_id:
            raise InvalidArgument("BAD_REQUEST_ID", "request_id", "it is needed")
        validation.check_request_id(request_id)
        _, execution = self._kept.get((tenant, request_id), (None, None))
        if execution is None:
            return False
        execution.cancel()
        return True

    def check_items(self, items: Sequence[runner_pb2.ExecuteItem]) -> None:
        """A batch has items that can be told apart, and not too many samples. Raises InvalidArgument."""
        most = self._state.config.max_items_per_call
        validation.check_num_items(items, most)
        check_ids(items)
        samples = sum(num_samples(item) for item in items)
        if samples > most:
            raise InvalidArgument("TOO_MANY_SAMPLES", "items", f"at most {most} samples in a batch")

    # The end of the server.

    def drain(self) -> None:
        """Begins no further execution."""
        self._draining = True

    @property
    def num_unfinished(self) -> int:
        """Executions under way."""
        return sum(not execution.is_done for execution in self._all)

    def end_all(self) -> None:
        """Ends all executions. Those that are kept can go on with the next server."""
        for execution in list(self._all):
            execution.end()

    # One of them.

    def _check(self, request: runner_pb2.ExecuteRequest) -> None:
        self.check_items(request.items)
        validation.check_request_id(request.request_id)
        check_cost(request)
        if request.HasField("keep"):
            if not request.request_id:
                raise InvalidArgument("BAD_KEEP", "keep", "an execution is kept by its request_id")
            if request.keep.seconds + request.keep.nanos / 1e9 <= 0:
                raise InvalidArgument("BAD_KEEP", "keep", "the time must be longer than 0")
        if request.policy not in _POLICIES:
            raise InvalidArgument("BAD_POLICY", "policy", f"policy {request.policy} has no name")
        if request.priority not in PRIORITIES:
            raise InvalidArgument("BAD_PRIORITY", "priority", f"priority {request.priority} has no name")

    def _known(self, request: runner_pb2.ExecuteRequest, tenant: Tenant | None) -> Execution | None:
        """The execution that is asked for again. Raises InvalidArgument if it is of another request."""
        found = self._kept.get((tenant, request.request_id)) if request.request_id else None
        if found is None:
            return None
        digest, execution = found
        if digest != _digest(request):
            raise reused_request_id()
        execution.started.resumed = True
        return execution

    def _begin(
        self, request: runner_pb2.ExecuteRequest, tenant: Tenant | None, timeout_s: float | None
    ) -> Execution:
        if self._draining:
            raise Draining
        self._places.check(tenant)
        keep_s = 0.0
        if request.HasField("keep"):
            keep_s = min(validation.lease_seconds(request.keep), self._state.config.max_lease_s)
        request_id = request.request_id or secrets.token_hex(16)
        key = tenant, request_id
        resumed = self._resumed(request, keep_s)
        samples = [(item.item_id, sample) for item in request.items for sample in range(num_samples(item))]
        execution = Execution(
            request_id,
            samples,
            keep_s,
            lambda changed: self._changed(key, changed),
            self._unread if keep_s else self._state.answers,
            self._read,
        )
        self._all.add(execution)
        self._places.update(execution, tenant)
        if keep_s:
            self._kept[key] = _digest(request), execution
        batch = Batch(
            key=request_id,
            tenant=tenant,
            items=request.items,
            priority=PRIORITIES[request.priority],
            # What outlives its client outlives the client's deadline.
            deadline_s=None if timeout_s is None or keep_s else time.monotonic() + timeout_s,
            keep_s=keep_s,
            resumed=resumed,
        )
        execution.begin(functools.partial(self._router.execute, request, batch))
        return execution

    def _resumed(self, request: runner_pb2.ExecuteRequest, keep_s: float) -> frozenset[str]:
        """The items of an execution that is not known here, of which the client has a part all the same.

        Raises ExecutionLost if they cannot be gone on with, and NoWorker. Only the server's own workers write
        the same text again, and only where draws have a seed, as those of what is kept have.
        """
        resumed = frozenset(at.item_id for at in request.resume_after if at.position)
        local = self._router.named("")
        if resumed and not (keep_s and self._router.named(request.runtime) is local):
            raise ExecutionLost
        if self.needs_worker(request):
            # Raises NoWorker if none was ready yet.
            _ = self._state.limits
        is_certain = bool(request.runtime) or self._router.runtimes == [local]
        return frozenset() if is_certain else resumed

    def _changed(self, key: _Key, execution: Execution) -> None:
        """An execution is in another state."""
        self._places.update(execution, key[0])
        if execution.state is not State.GONE:
            return
        self._all.discard(execution)
        kept = self._kept.get(key)
        if kept is not None and kept[1] is execution:
            del self._kept[key]


def _check_progress(request: runner_pb2.ExecuteRequest) -> None:
    """It says only of its own samples what of them is there. Raises InvalidArgument."""
    samples = {item.item_id: num_samples(item) for item in request.items}
    if len(request.resume_after) > sum(samples.values()):
        text = "more is named than the batch has samples"
        raise InvalidArgument("BAD_RESUME_AFTER", "resume_after", text)
    for index, at in enumerate(request.resume_after):
        if at.sample >= samples.get(at.item_id, 0):
            text = "the batch has no such sample"
            raise InvalidArgument("BAD_RESUME_AFTER", f"resume_after[{index}]", text)


def _digest(request: runner_pb2.ExecuteRequest) -> bytes:
    """What makes a request the same when it comes again: all but where its client is."""
    asked = runner_pb2.ExecuteRequest()
    asked.CopyFrom(request)
    asked.ClearField("resume_after")
    asked.ClearField("keep")
    return hashlib.sha256(asked.SerializeToString(deterministic=True)).digest()
