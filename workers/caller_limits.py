"""How much of a step a caller may use beside other callers, learned from measured step times (ADR 10).

All callers of a step wait until it ends. So a caller with hundreds of short forwards delays all others, and a
prompt delays those that decode. There are two limits. Neither applies to a caller that is alone:

- The short forwards of a caller in a step get at most as much as those of all callers that want less get
  together, or the *free cost* if that is more: the cost that makes an empty step half as long again. A caller
  that wants up to a quarter more than its share gets all that it wants.
- In steps with decodes of other callers, and shortly after, prompts get about as much time as the decodes.

If reading the weights takes longer than computing, even hundreds of decodes do not delay the others, and no
caller is limited. There is no clock here: times are arguments. Costs are those of `forward_queues.cost_of`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping

# A caller counts as present for this many steps after its last forward.
_REMEMBERED_STEPS = 8
# Bounds of the free cost, whatever the measured times say. The lower one is sixteen decodes.
MIN_FREE_COST = 32
_MAX_FREE_COST = 1 << 20
# The shares are halved in one of this many steps: if all steps cost the same, the time of a unit of cost
# cannot be measured.
_PROBE_INTERVAL = 8
# A caller that wants at most 1 / _TOLERANCE more than its share gets all of it in one step.
_TOLERANCE = 4
# Prompts always get a page, so that they make progress.
_MIN_PROMPT_TOKENS = 16
# They also get at least 1 / _LEAST_SHARE of the largest step: on a GPU a step with a chunk can take twice as
# long as one of decodes, whatever the chunk's size.
_LEAST_SHARE = 32
# Until step times are known, 1 / _UNKNOWN_SHARE of a step is for prompts.
_UNKNOWN_SHARE = 8
# The weight of older measurements decreases by this factor with each step.
_STEP_DECAY = 0.995
_PROMPT_DECAY = 0.95


class StepTimes:
    """Estimates how long steps take. Recent steps count more than older ones.

    By a linear regression of time over cost, from steps without long prompts; and the time that each prompt
    token adds.
    """

    def __init__(self) -> None:
        # Half of the time of an empty step, in units of cost.
        self.free_cost = MIN_FREE_COST
        self._unit_ns = 0.0
        # Decayed sums: x is the cost of a step, y its time.
        self._weight = self._sum_x = self._sum_y = self._sum_xx = self._sum_xy = 0.0
        self._prompt_tokens = self._prompt_ns = 0.0

    def add(self, cost: int, took_ns: int) -> None:
        """Learn from a step without long prompts."""
        self._weight = self._weight * _STEP_DECAY + 1
        self._sum_x = self._sum_x * _STEP_DECAY + cost
        self._sum_y = self._sum_y * _STEP_DECAY + took_ns
        self._sum_xx = self._sum_xx * _STEP_DECAY + cost * cost
        self._sum_xy = self._sum_xy * _STEP_DECAY + cost * took_ns
        spread = self._weight * self._sum_xx - self._sum_x * self._sum_x
        if spread <= self._sum_x * self._sum_x / 256:
            return
        unit_ns = (self._weight * self._sum_xy - self._sum_x * self._sum_y) / spread
        base_ns = (self._sum_y - unit_ns * self._sum_x) / self._weight
        free_cost = base_ns / unit_ns / 2 if unit_ns > 0 else _MAX_FREE_COST
        self.free_cost = int(min(max(free_cost, MIN_FREE_COST), _MAX_FREE_COST))
        self._unit_ns = max(unit_ns, 0.0)

    def add_prompts(self, tokens: int, decodes_cost: int, took_ns: int) -> None:
        """Learn from a step with `tokens` tokens of prompts, and decodes of this cost."""
        if tokens < _MIN_PROMPT_TOKENS:
            return
        # At least a quarter of the time is attributed to the prompts.
        added_ns = max(took_ns - self._expected_ns(decodes_cost), took_ns / 4)
        self._prompt_tokens = self._prompt_tokens * _PROMPT_DECAY + tokens
        self._prompt_ns = self._prompt_ns * _PROMPT_DECAY + added_ns

    def prompt_tokens(self, cost: int) -> float | None:
        """How many prompt tokens take as long as a step of this cost. None: not known yet."""
        if not (self._weight and self._prompt_ns):
            return None
        return self._expected_ns(cost) * self._prompt_tokens / self._prompt_ns

    def _expected_ns(self, cost: int) -> float:
        if not self._weight:
            return 0.0
        return max(0.0, (self._sum_y + self._unit_ns * (cost * self._weight - self._sum_x)) / self._weight)


class CallerLimits:
    """The limits of each step. Owned by the scheduler."""

    def __init__(self, max_batch_tokens: int) -> None:
        self.times = StepTimes()
        self._max_batch_tokens = max_batch_tokens
        # For each of the last steps, the cost that each caller below the free cost wanted.
        self._undemanding: deque[Mapping[int, int]] = deque(maxlen=_REMEMBERED_STEPS)
        # For each of the last steps, the cost of each caller's decodes.
        self._decoded: deque[Mapping[int, int]] = deque(maxlen=_REMEMBERED_STEPS)
        self._steps = 0

    def shares(self, wanted: Mapping[int, int]) -> dict[int, int]:
        """The cost that each limited caller may have of the next step's short forwards.

        `wanted`: the cost of these, by caller. Kept.
        """
        if not wanted:
            return {}
        self._steps += 1
        free = self.times.free_cost
        greedy: dict[int, int] = {}
        if max(wanted.values()) > free:
            greedy = {caller: cost for caller, cost in wanted.items() if cost > free}
        # A caller that is alone delays nobody, not even itself when it comes back with another number.
        undemanding = wanted
        if greedy or len(wanted) == 1:
            undemanding = {caller: wanted[caller] for caller in wanted.keys() - greedy if len(wanted) > 1}
        self._undemanding.append(undemanding)
        return self._shares_of(greedy, free) if greedy else {}

    def _shares_of(self, greedy: dict[int, int], free: int) -> dict[int, int]:
        # Callers that just had requests count, too: their next ones would arrive during this step.
        steps = filter(None, self._undemanding)
        wanted = (sum(cost for caller, cost in step.items() if caller not in greedy) for step in steps)
        others = max(wanted, default=0)
        shares = {}
        for cost, caller in sorted((cost, caller) for caller, cost in greedy.items()):
            share = max(free, others) if others else cost
            # A separate step for a small rest would cost all callers more than a slightly longer step.
            if share + share // _TOLERANCE < cost:
                shares[caller] = share >> (self._steps % _PROBE_INTERVAL == 0)
            others += min(cost, share)
        return shares

    def record_decodes(self, costs: Mapping[int, int]) -> None:
        """Note the cost of the next step's decodes, by caller. Called before `max_prompt_tokens`."""
        self._decoded.append(costs)

    def limits_prompts(self, prefilling: Collection[int]) -> bool:
        """Whether prompts of these callers are limited, because another caller decodes."""
        return any({caller}.symmetric_difference(prefilling) for costs in self._decoded for caller in costs)

    def max_prompt_tokens(self, prefilling: Collection[int]) -> int:
        """The most prompt tokens in the step, if these callers have prompts queued."""
        if not self.limits_prompts(prefilling):
            return self._max_batch_tokens
        tokens = self.times.prompt_tokens(max(sum(costs.values()) for costs in self._decoded))
        if tokens is None:
            tokens = self._max_batch_tokens // _UNKNOWN_SHARE
        least = max(_MIN_PROMPT_TOKENS, self._max_batch_tokens // _LEAST_SHARE)
        return int(min(max(tokens, least), self._max_batch_tokens))
