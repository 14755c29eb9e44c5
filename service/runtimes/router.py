"""Which runtime takes a batch, and why; and who takes what it could not begin.

Who names a runtime gets that one and no other. For all others the policy puts the runtimes in an order; the
first takes the batch. What it has no room for is refused, waits there, or goes to the next, as is configured.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from quire.v1 import runner_pb2

from service.errors import ProviderFailure, QuireError, RuntimeNotFound
from service.runtimes.base import Batch, Runtime
from service.runtimes.execution import Execution
from service.runtimes.second_choice import SecondChoice

_POLICIES = {
    "order": runner_pb2.ROUTING_POLICY_ORDER,
    "local-first": runner_pb2.ROUTING_POLICY_LOCAL_FIRST,
    "cheapest": runner_pb2.ROUTING_POLICY_CHEAPEST,
}
# When those had better come again for whom there is no room.
_LEAST_RETRY_S, _LONGEST_RETRY_S = 0.1, 60.0
PolicyName = Literal["order", "local-first", "cheapest"]
WhenFull = Literal["reject", "queue", "fallback"]


@dataclass(frozen=True, slots=True)
class Routing:
    """What the configuration says of batches that name no runtime."""

    policy: PolicyName = "order"
    # Of `local-first`: with more seconds' worth of work waiting for the own workers, others come first.
    local_max_wait_s: float = 5.0
    # What becomes of a batch for which the first runtime has no room.
    when_full: WhenFull = "fallback"


@dataclass(frozen=True, slots=True)
class Choice:
    """A runtime that may take a batch, and why, for people."""

    runtime: Runtime
    reason: str


class Router:
    """Owner of the runtimes, the server's own first."""

    def __init__(self, runtimes: Sequence[Runtime], routing: Routing | None = None) -> None:
        self.runtimes = list(runtimes)
        self._routing = routing or Routing()

    def replace(self, runtimes: Sequence[Runtime], routing: Routing) -> None:
        """From now on these take batches. Those that run are not touched."""
        self.runtimes, self._routing = list(runtimes), routing

    async def close(self) -> None:
        """Lets go of connections."""
        for runtime in self.runtimes:
            await runtime.close()

    def named(self, name: str) -> Runtime:
        """A runtime by its name; empty: the server's own. Raises RuntimeNotFound."""
        for runtime in self.runtimes:
            if name in ("", runtime.name):
                return runtime
        raise RuntimeNotFound

    async def execute(self, request: runner_pb2.ExecuteRequest, batch: Batch, execution: Execution) -> None:
        """Runs a batch where it belongs. Raises ProviderFailure, and as `Runtime.execute`."""
        if request.runtime:
            (choice,) = await _affordable(
                request, [Choice(self.named(request.runtime), "it was asked for")], batch
            )
            execution.runs_on(choice.runtime.describe(), choice.reason)
            await choice.runtime.execute(batch, execution)
            return
        if batch.resumed:
            # Others would write another text.
            local = self.runtimes[0]
            execution.runs_on(local.describe(), "it goes on where it was begun")
            await local.execute(batch, execution)
            return
        choices = await _affordable(request, await self._choices(request.policy, batch), batch)
        if self._routing.when_full == "reject" and _is_full(choices[0].runtime, batch):
            raise _no_room(choices[0].runtime.wait_s)
        if self._routing.when_full != "fallback":
            choices = choices[:1]
        await SecondChoice(choices, execution).execute(batch)

    async def _choices(self, policy: runner_pb2.RoutingPolicy, batch: Batch) -> list[Choice]:
        """All runtimes, the best first; those in trouble last."""
        policy = policy or _POLICIES[self._routing.policy]
        if policy == runner_pb2.ROUTING_POLICY_CHEAPEST:
            choices = await self._by_price(batch)
        elif policy == runner_pb2.ROUTING_POLICY_LOCAL_FIRST:
            choices = self._local_first()
        else:
            choices = [Choice(runtime, "it is the first that is well") for runtime in self.runtimes]
        return sorted(choices, key=lambda choice: bool(choice.runtime.describe().trouble))

    def _local_first(self) -> list[Choice]:
        local, *others = self.runtimes
        wait_s = local.wait_s
        if wait_s <= self._routing.local_max_wait_s or not others:
            first = Choice(local, "the own workers have room")
            return [first, *(Choice(other, "the own workers could not take it") for other in others)]
        reason = f"{wait_s:.1f} s of work wait for the own workers"
        return [*(Choice(other, reason) for other in others), Choice(local, "nobody else could take it")]

    async def _by_price(self, batch: Batch) -> list[Choice]:
        """The cheapest first of those who can be expected to begin in time; then those without a price."""
        priced: list[tuple[bool, float, Choice]] = []
        for runtime in self.runtimes:
            try:
                estimate = await runtime.estimate(batch.items)
            except QuireError:
                # Of some item; what else there is in the batch it may do.
                priced.append((True, 0.0, Choice(runtime, "nobody cheaper could take it")))
                continue
            if estimate.HasField("max_cost_usd"):
                cost_usd, reason = estimate.max_cost_usd, f"it costs {estimate.max_cost_usd:.6f} USD at most"
            else:
                cost_usd, reason = float("inf"), "nobody with a known price could take it"
            priced.append((_is_full(runtime, batch), cost_usd, Choice(runtime, reason)))
        return [choice for *_, choice in sorted(priced, key=lambda found: found[:2])]


def _no_room(wait_s: float) -> ProviderFailure:
    retry_after_s = min(max(wait_s, _LEAST_RETRY_S), _LONGEST_RETRY_S)
    text = "the runtime has no room for it now"
    return ProviderFailure("BACKPRESSURE", text, retry_after_s=retry_after_s)


async def _affordable(
    request: runner_pb2.ExecuteRequest, choices: Sequence[Choice], batch: Batch
) -> list[Choice]:
    """Those that cannot go beyond what the batch may cost. Raises ProviderFailure if none is left."""
    if not request.HasField("max_cost_usd"):
        return list(choices)
    costs_usd = [await _most_usd(choice.runtime, batch.items) for choice in choices]
    found = [c for c, cost_usd in zip(choices, costs_usd, strict=True) if cost_usd <= request.max_cost_usd]
    if not found:
        least_usd = min(costs_usd)
        might = f"{least_usd:.6f} US dollars" if math.isfinite(least_usd) else "nobody knows how much"
        text = f"the batch could cost {might}, and may cost {request.max_cost_usd:.6f}"
        raise ProviderFailure("BUDGET_EXCEEDED", text)
    return found


async def _most_usd(runtime: Runtime, items: Sequence[runner_pb2.ExecuteItem]) -> float:
    """What a batch can cost; inf: not known. An item that cannot be run costs nothing."""
    if runtime.describe().runtime_kind == runner_pb2.RUNTIME_KIND_LOCAL:
        return 0.0
    total_usd = 0.0
    for item in items:
        try:
            estimate = await runtime.estimate([item])
        except QuireError:
            continue
        if not estimate.HasField("max_cost_usd"):
            return math.inf
        total_usd += estimate.max_cost_usd
    return total_usd


def _is_full(runtime: Runtime, batch: Batch) -> bool:
    """Whether it could not be expected to begin in time; without a deadline: at once."""
    left_s = 0.0 if batch.deadline_s is None else batch.deadline_s - time.monotonic()
    return runtime.wait_s > left_s
