"""The table of request ids, and of what was made with them: caches, by creations and forks, and executions.

A request with an id is carried out once. A repetition finds here what the first one has made, or is making,
and is answered with it.

- An id belongs to one request of a tenant. Other requests with the same id are refused, whatever their kind.
- An id is known as long as anything exists that was made with it. So there are at most as many ids as caches
  and executions, which are limited.
- The journal stores the ids of caches. It does not store those of executions: after a restart of the gateway
  an execution is made again from its caches, whose ids follow from its own.

Not here: whether a request is the same as the first one with its id. Each kind of request checks that itself.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Any

from service.caches.tenants import Tenant
from service.errors import reused_request_id


class Kind(enum.Enum):
    """What a request makes."""

    CREATION = enum.auto()
    FORK = enum.auto()
    EXECUTION = enum.auto()


@dataclass(slots=True, eq=False)
class IdempotencyEntry:
    """What one request has made."""

    kind: Kind
    # By index: a fork has several children, other requests one result at 0. Without what no longer exists.
    made: dict[int, Any] = field(default_factory=dict)
    # Identifies the request, if `made` does not.
    digest: bytes = b""
    # Whether the request is still running.
    in_progress: bool = False


class IdempotencyTable:
    """Owns the table. Requests with an empty id are not in it."""

    def __init__(self) -> None:
        self._answers: dict[tuple[Tenant, str], IdempotencyEntry] = {}
        # The tenant of callers without a name.
        self.anonymous = Tenant()

    def find(self, request_id: str, tenant: Tenant | None, kind: Kind) -> IdempotencyEntry | None:
        """What a request of this kind has made, or is making."""
        answer = self._answers.get((tenant or self.anonymous, request_id)) if request_id else None
        return answer if answer is not None and answer.kind is kind else None

    def require_free(self, request_id: str, tenant: Tenant | None) -> None:
        """Raises InvalidArgument if the id is used."""
        if (tenant or self.anonymous, request_id) in self._answers:
            raise reused_request_id()

    def begin(self, request_id: str, tenant: Tenant, kind: Kind) -> None:
        """A request begins. Raises InvalidArgument as `require_free`."""
        self.require_free(request_id, tenant)
        if request_id:
            self._answers[tenant, request_id] = IdempotencyEntry(kind, in_progress=True)

    def end(self, request_id: str, tenant: Tenant, kind: Kind) -> None:
        """The request has ended. Its results are added before or after this."""
        answer = self.find(request_id, tenant, kind)
        if answer is not None:
            answer.in_progress = False
            self._drop_if_empty(request_id, tenant, answer)

    def add(
        self,
        request_id: str,
        tenant: Tenant | None,
        kind: Kind,
        made: object,
        *,
        index: int = 0,
        digest: bytes = b"",
    ) -> None:
        """Adds something that was made, or was recovered after a restart."""
        key = tenant or self.anonymous, request_id
        answer = self._answers.setdefault(key, IdempotencyEntry(kind, digest=digest))
        if answer.kind is kind:
            answer.made[index] = made

    def remove(
        self, request_id: str, tenant: Tenant | None, kind: Kind, made: object, *, index: int = 0
    ) -> None:
        """Removes something that no longer exists."""
        answer = self.find(request_id, tenant, kind)
        if answer is not None and answer.made.get(index) is made:
            del answer.made[index]
            self._drop_if_empty(request_id, tenant or self.anonymous, answer)

    def _drop_if_empty(self, request_id: str, tenant: Tenant, answer: IdempotencyEntry) -> None:
        if not answer.made and not answer.in_progress:
            del self._answers[tenant, request_id]

    def __len__(self) -> int:
        return len(self._answers)
