"""What was made under request ids: caches, by creations and forks, and executions. One table for all of them.

A request with an id is carried out once. A repetition finds here what the first one has made, or is making,
and is answered with it.

- An id belongs to one request of a tenant. Another request that would make something under it is refused,
  whichever kind of request either is.
- It is known until nothing is left of what was made. So there are at most as many as there are caches and
  executions, and each of these has a limit.
- Caches keep it in the journal. An execution does not: after a restart of the gateway it is made again, from
  its caches, whose ids follow from its own.

Not here: whether a request is the same as the first one. Each kind compares that with what it has made.
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
class KeyedAnswer:
    """What one request has made."""

    kind: Kind
    # By place: the children of a fork have their indexes, all else 0. What is gone is missing.
    made: dict[int, Any] = field(default_factory=dict)
    # Identifies the request, if what it has made does not.
    digest: bytes = b""
    # Whether it is still making something.
    is_making: bool = False


class KeyedAnswers:
    """Owns the table. An empty request id is none."""

    def __init__(self) -> None:
        self._answers: dict[tuple[Tenant, str], KeyedAnswer] = {}
        # The tenant of callers without a name.
        self.anonymous = Tenant()

    def find(self, request_id: str, tenant: Tenant | None, kind: Kind) -> KeyedAnswer | None:
        """What a request of this kind has made, or is making."""
        answer = self._answers.get((tenant or self.anonymous, request_id)) if request_id else None
        return answer if answer is not None and answer.kind is kind else None

    def require_free(self, request_id: str, tenant: Tenant | None) -> None:
        """Raises InvalidArgument if the id belongs to a request."""
        if (tenant or self.anonymous, request_id) in self._answers:
            raise reused_request_id()

    def begin(self, request_id: str, tenant: Tenant, kind: Kind) -> None:
        """A request begins to make something. Raises InvalidArgument as `require_free`."""
        self.require_free(request_id, tenant)
        if request_id:
            self._answers[tenant, request_id] = KeyedAnswer(kind, is_making=True)

    def end(self, request_id: str, tenant: Tenant, kind: Kind) -> None:
        """It makes nothing more. What it has made is added, before or after this."""
        answer = self.find(request_id, tenant, kind)
        if answer is not None:
            answer.is_making = False
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
        """Something was made, or is known again after a restart."""
        key = tenant or self.anonymous, request_id
        answer = self._answers.setdefault(key, KeyedAnswer(kind, digest=digest))
        if answer.kind is kind:
            answer.made[index] = made

    def remove(
        self, request_id: str, tenant: Tenant | None, kind: Kind, made: object, *, index: int = 0
    ) -> None:
        """Something that was made is gone."""
        answer = self.find(request_id, tenant, kind)
        if answer is not None and answer.made.get(index) is made:
            del answer.made[index]
            self._drop_if_empty(request_id, tenant or self.anonymous, answer)

    def _drop_if_empty(self, request_id: str, tenant: Tenant, answer: KeyedAnswer) -> None:
        if not answer.made and not answer.is_making:
            del self._answers[tenant, request_id]

    def __len__(self) -> int:
        return len(self._answers)
