"""Responses that /v1/responses keeps, so that the next request can name what came before by an id.

They are texts in the memory of this gateway. Their KV is found in the prefix cache, as that of any prompt
that begins like an earlier one.
"""

from __future__ import annotations

import json
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from service.errors import InvalidArgument

KEPT_S = 3600.0
_MAX_BYTES = 64 << 20
# The most of these that one tenant has.
TENANT_SHARE = 4
# Counted for each: so there are never too many to look through.
_ENTRY_BYTES = 4 << 10


def not_found(reason: str, field: str) -> InvalidArgument:
    """The id of a response is unknown here."""
    text = "there is no such response: it was deleted, or its hour is over, or another gateway has it"
    return InvalidArgument(reason, field, text)


@dataclass(frozen=True, slots=True)
class _Stored:
    """`items`: of the conversation up to this response and with it, as JSON. `response`: itself, likewise."""

    items: bytes
    response: bytes
    until_s: float

    @property
    def size_bytes(self) -> int:
        return len(self.items) + len(self.response) + _ENTRY_BYTES


class StoredResponses:
    """Owner of what is kept, by tenant, "" without authentication, and id."""

    def __init__(self, now_s: Callable[[], float] = time.monotonic, max_bytes: int = _MAX_BYTES) -> None:
        """`max_bytes`: of all tenants. What has not been used for the longest time goes first."""
        self._now_s = now_s
        self._max_bytes = max_bytes
        # The least recently used first.
        self._stored: OrderedDict[tuple[str, str], _Stored] = OrderedDict()
        self._bytes: dict[str, int] = {}

    def keep(self, tenant: str, items: Sequence[Any], response: Mapping[str, Any]) -> None:
        """Keeps a response, and the items of its request and of all before, unless it is too large."""
        both = [*items, *response["output"]], response
        try:
            # In ASCII: fields that nobody has read may have unpaired surrogates.
            of_items, whole = (json.dumps(each).encode() for each in both)
        except RecursionError:
            return
        stored = _Stored(of_items, whole, self._now_s() + KEPT_S)
        self.delete(tenant, response["id"])
        if stored.size_bytes > self._max_bytes // TENANT_SHARE:
            return
        self._stored[tenant, response["id"]] = stored
        self._bytes[tenant] = self._bytes.get(tenant, 0) + stored.size_bytes
        self._make_room(tenant)

    def items(self, tenant: str, response_id: str) -> list[Any] | None:
        """The items up to a response and with it. None: it is not there."""
        stored = self._find(tenant, response_id)
        return None if stored is None else json.loads(stored.items)

    def response(self, tenant: str, response_id: str) -> bytes | None:
        """A response as JSON. None: it is not there."""
        stored = self._find(tenant, response_id)
        return None if stored is None else stored.response

    def delete(self, tenant: str, response_id: str) -> bool:
        """Forgets a response. Returns whether there was one."""
        stored = self._stored.pop((tenant, response_id), None)
        if stored is None:
            return False
        self._bytes[tenant] -= stored.size_bytes
        if not self._bytes[tenant]:
            del self._bytes[tenant]
        return True

    def _find(self, tenant: str, response_id: str) -> _Stored | None:
        stored = self._stored.get((tenant, response_id))
        if stored is None or stored.until_s <= self._now_s():
            self.delete(tenant, response_id)
            return None
        self._stored.move_to_end((tenant, response_id))
        return stored

    def _make_room(self, tenant: str) -> None:
        """Forgets as much as is too much of this tenant, or of all."""
        for owner, response_id in list(self._stored):
            is_full = sum(self._bytes.values()) > self._max_bytes
            is_tenant_full = self._bytes.get(tenant, 0) > self._max_bytes // TENANT_SHARE
            if not is_full and not is_tenant_full:
                return
            if is_full or owner == tenant:
                self.delete(owner, response_id)
