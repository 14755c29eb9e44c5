"""What a caller may have of a step of short forwards while others have some in it too.

A step is over for all at once, so who has hundreds of forwards in it makes everyone else wait for them. He
may, as long as nobody else is there. Beside others he gets as much as all who want less have together; or,
where they want little, so much as makes a step that does nothing half as long again; a quarter more if that
is all he has. Then nobody waits for much more than twice the step that those before him would have, and a
step in which all want alike is as full as ever.

What that is is learnt from how long steps took: where reading the weights takes longer than what is
computed with them, hundreds of decodes cost no one anything, and nobody is bounded.

Costs are those of `forward_queue.cost_of`. No clock: times are given.
"""

from __future__ import annotations

from collections import deque

from workers.forward_queue import Lane, QueuedForward

# For so many steps someone who was in one is expected back.
_REMEMBERED_STEPS = 8
# Nobody is bounded to less, whatever steps seem to take: sixteen decodes.
LEAST_FREE_COST = 32
_MOST_FREE_COST = 1 << 20
# One step in so many has shares of half the size: steps that are all alike do not tell what they cost.
_TRIED_EVERY = 8
# A caller whose forwards are at most such a part more than his share has them all in one step.
_TOLERATED = 4
# How much of what was learnt an older step still counts for, at the next.
_MEMORY = 0.995


class StepShares:
    """The bounds of one step after the other. Owned by the scheduler."""

    def __init__(self) -> None:
        # What those who want little wanted in each of the last steps.
        self._modest: deque[dict[int, int]] = deque(maxlen=_REMEMBERED_STEPS)
        # What is left of this step to each caller who is bounded.
        self._left: dict[int, int] = {}
        self._times = _StepTimes()
        self._steps = 0

    def next_step(self, lane: Lane) -> None:
        """Set bounds for the callers of `lane`."""
        self._left.clear()
        if not lane.cost:
            return
        self._steps += 1
        free = self._times.free_cost
        wanted = {caller: backlog.cost for caller, backlog in lane.callers.items() if backlog.held}
        greedy: dict[int, int] = {}
        if lane.cost > free:
            greedy = {caller: cost for caller, cost in wanted.items() if cost > free}
        # Who is alone is nobody's other: not even his own, if he comes back as another call.
        self._modest.append(
            {caller: wanted[caller] for caller in wanted.keys() - greedy} if len(wanted) > 1 else {}
        )
        if greedy:
            self._bound(greedy, free)

    def _bound(self, greedy: dict[int, int], free: int) -> None:
        # Who is away for a moment still counts: he would come back into the middle of a full step.
        others = max(
            sum(cost for caller, cost in modest.items() if caller not in greedy) for modest in self._modest
        )
        for cost, caller in sorted((cost, caller) for caller, cost in greedy.items()):
            bound = max(free, others) if others else cost
            # What is left for a step of its own costs everybody more than a step that is a little longer.
            if bound + bound // _TOLERATED < cost:
                self._left[caller] = bound >> (self._steps % _TRIED_EVERY == 0)
            others += min(cost, bound)

    def is_spent(self, entry: QueuedForward) -> bool:
        """Whether the caller of `entry` has had his share of this step."""
        return self._left.get(entry.caller, 1) <= 0

    def spend(self, entry: QueuedForward) -> None:
        """Count a forward that has come into the step."""
        if entry.caller in self._left:
            self._left[entry.caller] -= entry.cost

    def learn(self, cost: int, took_ns: int) -> None:
        """Note how long a step of short forwards took."""
        self._times.add(cost, took_ns)


class _StepTimes:
    """A line through the times of steps: what one costs anyway, and for each unit. Older ones count less."""

    def __init__(self) -> None:
        self.free_cost = LEAST_FREE_COST
        self._weight = self._x = self._y = self._xx = self._xy = 0.0

    def add(self, cost: int, took_ns: int) -> None:
        self._weight = self._weight * _MEMORY + 1
        self._x = self._x * _MEMORY + cost
        self._y = self._y * _MEMORY + took_ns
        self._xx = self._xx * _MEMORY + cost * cost
        self._xy = self._xy * _MEMORY + cost * took_ns
        spread = self._weight * self._xx - self._x * self._x
        if spread <= self._x * self._x / 256:
            return
        slope_ns = (self._weight * self._xy - self._x * self._y) / spread
        base_ns = (self._y - slope_ns * self._x) / self._weight
        free_cost = base_ns / slope_ns / 2 if slope_ns > 0 else _MOST_FREE_COST
        self.free_cost = int(min(max(free_cost, LEAST_FREE_COST), _MOST_FREE_COST))
