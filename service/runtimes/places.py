"""How many executions there may be, and how many of one tenant.

Those that are under way have places, or are refused. Those that have ended and lie there for whoever comes
again have as many others, and the oldest make way: of the tenant that has the most.
"""

from __future__ import annotations

from typing import TypeAlias

from service.caches.tenants import Tenant
from service.errors import TooManyExecutions
from service.runtimes.execution import Execution, State

# When to come again if there are as many as may be.
_RETRY_S = 1.0
_Of: TypeAlias = "dict[Tenant | None, dict[Execution, None]]"


class Places:
    """Owner of which execution has which place. Their states are their own."""

    def __init__(self, most: int) -> None:
        """`most` may be under way, and as many lie there."""
        self._most = most
        # The oldest first.
        self._of: dict[State, _Of] = {State.UNDER_WAY: {}, State.LIES: {}}
        self._count = dict.fromkeys(self._of, 0)
        self._place: dict[Execution, State] = {}

    def check(self, tenant: Tenant | None) -> None:
        """Whether a tenant may have one more. Raises TooManyExecutions.

        Where callers have tokens, no tenant has more than half of the places.
        """
        if self._count[State.UNDER_WAY] >= self._most:
            raise TooManyExecutions(self._most, _RETRY_S)
        share = (self._most + 1) // 2
        if tenant is not None and len(self._of[State.UNDER_WAY].get(tenant, ())) >= share:
            raise TooManyExecutions(share, _RETRY_S, of_tenant=True)

    def update(self, execution: Execution, tenant: Tenant | None) -> None:
        """An execution is there, or is in another state now. Some that lie there may be cancelled."""
        before = self._place.pop(execution, None)
        if before is not None:
            self._count[before] -= 1
            own = self._of[before][tenant]
            del own[execution]
            if not own:
                del self._of[before][tenant]
        if execution.state is State.GONE:
            return
        self._place[execution] = execution.state
        self._count[execution.state] += 1
        self._of[execution.state].setdefault(tenant, {})[execution] = None
        if self._count[State.LIES] > self._most:
            most = max(self._of[State.LIES].values(), key=len)
            next(iter(most)).cancel()
