"""Stores responses of /v1/responses, so that the next request can name the previous ones by an id.

They are texts in the memory of this gateway, without KV: continuing one costs as much as sending the messages
again. The KV is found in the prefix cache, like that of any prompt that shares a prefix with an earlier one.
"""

from __future__ import annotations

import json
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from service.auth.authenticator import current_tenant, current_tenant_name
from service.budgets import Budgets
from service.errors import InvalidArgument
from service.extensions.openai.fields import Fields
from service.extensions.openai.generation import JSON, ResponseBody

KEPT_S = 3600.0
_MAX_BYTES = 64 << 20
# One tenant may use 1 / TENANT_SHARE of the memory.
TENANT_SHARE = 4
# Counted for each response, which bounds their number.
_ENTRY_BYTES = 4 << 10
# A stored response is sent in parts of this size.
_PART_BYTES = 1 << 16


def not_found(reason: str, field: str) -> InvalidArgument:
    """The error for an unknown response id."""
    text = "there is no such response: it was deleted, or its hour is over, or another gateway has it"
    return InvalidArgument(reason, field, text)


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """`messages`: all messages up to and including this response, as JSON. `response`: itself, as JSON."""

    messages: bytes
    response: bytes
    until_s: float

    @property
    def size_bytes(self) -> int:
        return len(self.messages) + len(self.response) + _ENTRY_BYTES


class StoredResponses:
    """Owner of the stored responses, by tenant ("" without authentication) and id."""

    def __init__(self, now_s: Callable[[], float] = time.monotonic, max_bytes: int = _MAX_BYTES) -> None:
        """`max_bytes`: the limit for all tenants. The least recently used responses are dropped first."""
        self._now_s = now_s
        self._max_bytes = max_bytes
        # In order of use, the least recent first.
        self._stored: OrderedDict[tuple[str, str], StoredResponse] = OrderedDict()
        self._bytes: dict[str, int] = {}
        self._all_bytes = 0

    def keep(self, tenant: str, messages: Sequence[Any], response: Mapping[str, Any]) -> None:
        """Stores a response, and the messages up to and including it, unless they are too large."""
        try:
            # ASCII escapes unpaired surrogates, which unchecked fields may have.
            earlier, whole = (json.dumps(each).encode() for each in (messages, response))
        except RecursionError:
            return
        stored = StoredResponse(earlier, whole, self._now_s() + KEPT_S)
        self.delete(tenant, response["id"])
        if stored.size_bytes > self._max_bytes // TENANT_SHARE:
            return
        self._stored[tenant, response["id"]] = stored
        self._count(tenant, stored.size_bytes)
        self._make_room(tenant)

    def find(self, tenant: str, response_id: str) -> StoredResponse | None:
        """The response with an id, if it is stored."""
        stored = self._stored.get((tenant, response_id))
        if stored is None or stored.until_s <= self._now_s():
            self.delete(tenant, response_id)
            return None
        self._stored.move_to_end((tenant, response_id))
        return stored

    def delete(self, tenant: str, response_id: str) -> bool:
        """Removes a response. Returns whether it was stored."""
        stored = self._stored.pop((tenant, response_id), None)
        if stored is None:
            return False
        self._count(tenant, -stored.size_bytes)
        return True

    def _count(self, tenant: str, more_bytes: int) -> None:
        self._all_bytes += more_bytes
        self._bytes[tenant] = self._bytes.get(tenant, 0) + more_bytes
        if not self._bytes[tenant]:
            del self._bytes[tenant]

    def _make_room(self, tenant: str) -> None:
        """Removes responses until this tenant and all tenants together are within their limits."""
        for owner, response_id in list(self._stored):
            is_full = self._all_bytes > self._max_bytes
            is_tenant_full = self._bytes.get(tenant, 0) > self._max_bytes // TENANT_SHARE
            if not is_full and not is_tenant_full:
                return
            if is_full or owner == tenant:
                self.delete(owner, response_id)


@dataclass(frozen=True, eq=False)
class StoredResponseHandler:
    """The ASGI application that returns or deletes a stored response."""

    stored: StoredResponses
    budgets: Budgets

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handles a request. Raises InvalidArgument or AnswersFull."""
        request = Request(scope, receive)
        tenant, response_id = current_tenant_name(), request.path_params["response_id"]
        if request.method == "DELETE":
            if not self.stored.delete(tenant, response_id):
                raise not_found("RESPONSE_NOT_FOUND", "")
            await JSONResponse({"id": response_id, "object": "response", "deleted": True})(
                scope, receive, send
            )
            return
        # Streaming is refused: a client that expects a stream cannot read an answer in one piece.
        Fields({**request.query_params}).refuse_others({"include_obfuscation"}, {"stream": "false"})
        if (stored := self.stored.find(tenant, response_id)) is None:
            raise not_found("RESPONSE_NOT_FOUND", "")
        found = stored.response
        # Counted here too: the response may be deleted, and others stored, before the client has read it.
        with self.budgets.of(current_tenant()).answers.held(len(found)):
            body = ResponseBody(send, [JSON])
            starts = range(0, len(found), _PART_BYTES)
            await body.write(found[start : start + _PART_BYTES].decode("ascii") for start in starts)
            await body.end()
