"""Routes batches to runtimes, with fallback.

A request that names a runtime gets only that one. For all others the policy sorts the runtimes, and the first
one runs the batch. If it has no capacity, the configuration decides whether the batch is rejected, queued, or
falls back to the next runtime.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from google.rpc import error_details_pb2, status_pb2
from quire.v1 import runner_pb2

from service.api.status import from_status
from service.api.time_slice import TimeSlice
from service.errors import ProviderFailure, QuireError
from service.runtimes.base import Batch, Runtime, SampleKey
from service.runtimes.execution import Execution
from service.runtimes.items import failures
from service.runtimes.router import Router

_POLICIES = {
    "order": runner_pb2.ROUTING_POLICY_ORDER,
    "local-first": runner_pb2.ROUTING_POLICY_LOCAL_FIRST,
    "cheapest": runner_pb2.ROUTING_POLICY_CHEAPEST,
}
# The bounds of the retry delay after BACKPRESSURE.
_LEAST_RETRY_S, _LONGEST_RETRY_S = 0.1, 60.0
# Codes of errors after which another runtime may have capacity.
_FALLBACK_CODES = {"RESOURCE_EXHAUSTED", "UNAVAILABLE"}
# Reasons after which another runtime may support the request.
_FALLBACK_REASONS = {
    "UNSUPPORTED",
    "UNSUPPORTED_BY_EXECUTOR",
    "NO_TOKENIZER",
    "NO_CHAT_TEMPLATE",
    "UNAUTHORIZED",
    "FORBIDDEN",
    "TOKEN_OUT_OF_VOCAB",
    "SEQUENCE_TOO_LONG",
    "CONTEXT_LENGTH_EXCEEDED",
}
# The longest list of other runtimes' failures, in characters.
_MAX_ELSEWHERE = 512
# (the name of a runtime that refused a sample, its error)
_Refusal: TypeAlias = tuple[str, status_pb2.Status]


@dataclass(frozen=True, slots=True)
class Routing:
    """The configuration of batches that name no runtime."""

    policy: Literal["order", "local-first", "cheapest"] = "order"
    # For `local-first`: when more seconds of work than this are queued locally, other runtimes come first.
    local_max_wait_s: float = 5.0
    # What happens to a batch for which the first runtime has no capacity.
    when_full: Literal["reject", "queue", "fallback"] = "fallback"


@dataclass(frozen=True, slots=True)
class Candidate:
    """A runtime that may run a batch, and the reason for its choice as shown to the client."""

    runtime: Runtime
    reason: str


class RoutingRouter(Router):
    """Chooses a runtime for each batch."""

    def __init__(self, runtimes: Sequence[Runtime], routing: Routing | None = None) -> None:
        super().__init__(runtimes)
        self._routing = routing or Routing()

    def replace(self, runtimes: Sequence[Runtime], routing: Routing) -> None:
        """Uses these runtimes for new batches. Running batches stay where they are."""
        self.runtimes, self._routing = list(runtimes), routing

    async def _execute(self, request: runner_pb2.ExecuteRequest, batch: Batch, execution: Execution) -> None:
        if request.runtime:
            candidates = [Candidate(self.named(request.runtime), "it was asked for")]
        elif batch.resumed:
            # Another runtime would generate another text.
            candidates = [Candidate(self.runtimes[0], "it goes on where it was begun")]
        elif any(item.HasField("cache") for item in batch.items):
            candidates = [Candidate(self.runtimes[0], "the caches are there")]
        else:
            candidates = await self._candidates(request.policy, batch)
        candidates = await _affordable(request, candidates, batch)
        when_full = self._routing.when_full
        if not request.runtime and not batch.resumed:
            if when_full == "reject" and _is_full(candidates[0].runtime, batch):
                raise _no_room(candidates[0].runtime.wait_s)
            if when_full != "fallback":
                candidates = candidates[:1]
        if len(candidates) > 1:
            await _Fallback(candidates, execution).execute(batch)
            return
        (candidate,) = candidates
        execution.set_runtime(candidate.runtime.describe(), candidate.reason)
        await candidate.runtime.execute(batch, execution)

    async def _candidates(self, policy: runner_pb2.RoutingPolicy, batch: Batch) -> list[Candidate]:
        """All runtimes in the order of the policy, but those with `trouble` last."""
        policy = policy or _POLICIES[self._routing.policy]
        if policy == runner_pb2.ROUTING_POLICY_CHEAPEST:
            candidates = await self._by_price(batch)
        elif policy == runner_pb2.ROUTING_POLICY_LOCAL_FIRST:
            candidates = self._local_first()
        else:
            candidates = [Candidate(runtime, "it is the first healthy runtime") for runtime in self.runtimes]
        return sorted(candidates, key=lambda candidate: bool(candidate.runtime.describe().trouble))

    def _local_first(self) -> list[Candidate]:
        local, *others = self.runtimes
        wait_s = local.wait_s
        if wait_s <= self._routing.local_max_wait_s or not others:
            first = Candidate(local, "the own workers have room")
            return [first, *(Candidate(other, "the own workers could not take it") for other in others)]
        reason = f"{wait_s:.1f} s of work wait for the own workers"
        return [
            *(Candidate(other, reason) for other in others),
            Candidate(local, "no other runtime could take it"),
        ]

    async def _by_price(self, batch: Batch) -> list[Candidate]:
        """Runtimes that can start in time first, each group by price; unknown prices last in their group."""
        priced: list[tuple[bool, float, Candidate]] = []
        for runtime in self.runtimes:
            is_full, (cost_usd, runs_all) = _is_full(runtime, batch), await _most_usd(runtime, batch.items)
            if not runs_all:
                # It cannot run one of the items, but maybe others.
                is_full, cost_usd, reason = True, 0.0, "no cheaper runtime could take it"
            elif math.isfinite(cost_usd):
                reason = f"it costs {cost_usd:.6f} USD at most"
            else:
                reason = "no runtime with a known price could take it"
            priced.append((is_full, cost_usd, Candidate(runtime, reason)))
        return [candidate for *_, candidate in sorted(priced, key=lambda found: found[:2])]


class _Fallback:
    """Runs a batch on several runtimes in turn: items that one refuses go to the next.

    It is a ChunkSink between the runtimes and the execution.
    """

    def __init__(self, candidates: Sequence[Candidate], execution: Execution) -> None:
        self._choices = candidates
        self._execution = execution
        # The current runtime's refusals, for items that it has not started.
        self._failed: dict[str, list[runner_pb2.SampleChunk]] = defaultdict(list)
        # All refusals of each sample, in order.
        self._refusals: dict[SampleKey, list[_Refusal]] = defaultdict(list)
        self._started: set[str] = set()
        self._is_last = False
        self._runtime = ""

    async def execute(self, batch: Batch) -> None:
        items = list(batch.items)
        for index, candidate in enumerate(self._choices):
            self._is_last = index == len(self._choices) - 1
            self._runtime = candidate.runtime.name
            self._execution.set_runtime(candidate.runtime.describe(), candidate.reason)
            self._failed.clear()
            try:
                await candidate.runtime.execute(replace(batch, items=items), self)
            except QuireError as error:
                has_started = self._started.intersection(item.item_id for item in items)
                if has_started or not _may_fall_back(error):
                    raise
                for item in items:
                    self._failed.pop(item.item_id, None)
                    self.put(failures(item, error.without_traceback()))
            items = [item for item in items if item.item_id in self._failed]
            if not items:
                return

    # A ChunkSink.

    def put(self, chunks: Sequence[runner_pb2.SampleChunk]) -> None:
        forwarded: list[runner_pb2.SampleChunk] = []
        for chunk in chunks:
            if self._runtime != self._execution.started.runtime:
                chunk.runtime = self._runtime
            if self._is_refusal(chunk):
                refusals = self._refusals[chunk.item_id, chunk.sample]
                refusals.append((self._runtime, chunk.error))
                if not self._is_last:
                    self._failed[chunk.item_id].append(chunk)
                    continue
                self._set_first_error(chunk, refusals)
            if chunk.item_id not in self._started:
                self._started.add(chunk.item_id)
                forwarded += self._failed.pop(chunk.item_id, ())
            forwarded.append(chunk)
        if forwarded:
            self._execution.put(forwarded)

    def _is_refusal(self, chunk: runner_pb2.SampleChunk) -> bool:
        """Whether a sample failed before its first token, with an error that permits a fallback."""
        return (
            (self._is_last or chunk.item_id not in self._started)
            and chunk.finish_reason == runner_pb2.FINISH_REASON_ERROR
            and not (chunk.position or chunk.text)
            and _may_fall_back(from_status(chunk.error))
        )

    def _set_first_error(self, chunk: runner_pb2.SampleChunk, refusals: Sequence[_Refusal]) -> None:
        """Gives a sample that all runtimes refused the first error, with a summary of the others."""
        (first, error), *others = refusals
        if others:
            chunk.error.CopyFrom(_with_others(error, others))
            chunk.runtime = "" if first == self._execution.started.runtime else first

    async def wait_for_room(self) -> None:
        await self._execution.wait_for_room()

    def on_release(self, callback: Callable[[], None]) -> None:
        self._execution.on_release(callback)


def _no_room(wait_s: float) -> ProviderFailure:
    retry_after_s = min(max(wait_s, _LEAST_RETRY_S), _LONGEST_RETRY_S)
    text = "the runtime has no room for it now"
    return ProviderFailure("BACKPRESSURE", text, retry_after_s=retry_after_s)


async def _affordable(
    request: runner_pb2.ExecuteRequest, candidates: Sequence[Candidate], batch: Batch
) -> list[Candidate]:
    """The candidates within the request's cost limit. Raises ProviderFailure if there are none."""
    if not request.HasField("max_cost_usd"):
        return list(candidates)
    # The server's own workers cost nothing.
    costs_usd = [
        0.0
        if candidate.runtime.describe().runtime_kind == runner_pb2.RUNTIME_KIND_LOCAL
        else (await _most_usd(candidate.runtime, batch.items))[0]
        for candidate in candidates
    ]
    found = [c for c, cost_usd in zip(candidates, costs_usd, strict=True) if cost_usd <= request.max_cost_usd]
    if not found:
        least_usd = min(costs_usd)
        might = f"{least_usd:.6f} US dollars" if math.isfinite(least_usd) else "an unknown amount"
        text = f"the batch could cost {might}, and may cost {request.max_cost_usd:.6f}"
        raise ProviderFailure("BUDGET_EXCEEDED", text)
    return found


async def _most_usd(runtime: Runtime, items: Sequence[runner_pb2.ExecuteItem]) -> tuple[float, bool]:
    """The maximum cost of a batch's items that can run (inf: unknown), and whether all of them can."""
    total_usd, runs_all, time_slice = 0.0, True, TimeSlice()
    for item in items:
        if time_slice.due:
            await time_slice.yield_to_others()
        try:
            estimate = await runtime.estimate([item])
        except QuireError:
            runs_all = False
        else:
            total_usd += estimate.max_cost_usd if estimate.HasField("max_cost_usd") else math.inf
    return total_usd, runs_all


def _is_full(runtime: Runtime, batch: Batch) -> bool:
    """Whether a batch is expected to start after its deadline; without a deadline, not at once."""
    left_s = 0.0 if batch.deadline_s is None else batch.deadline_s - time.monotonic()
    return runtime.wait_s > left_s


def _may_fall_back(error: QuireError) -> bool:
    # A tenant's quota applies to all runtimes.
    if error.reason == "QUOTA":
        return False
    return error.code in _FALLBACK_CODES or error.reason in _FALLBACK_REASONS


def _with_others(status: status_pb2.Status, others: Sequence[_Refusal]) -> status_pb2.Status:
    """An error whose metadata lists the other runtimes' reasons."""
    extended = status_pb2.Status()
    extended.CopyFrom(status)
    info = error_details_pb2.ErrorInfo()
    for detail in extended.details:
        if detail.Unpack(info):
            elsewhere = ", ".join(f"{runtime}: {from_status(error).reason}" for runtime, error in others)
            info.metadata["elsewhere"] = elsewhere[:_MAX_ELSEWHERE]
            detail.Pack(info)
            break
    return extended
