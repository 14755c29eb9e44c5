"""The interface of the extension that answers calls for caches of other gateways of this server."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol, TypeAlias

from service.dispatcher import Dispatcher

# Answers a call for caches of this shard alone. Arguments: its method, request and context.
RunHere: TypeAlias = Callable[[str, Any, Any], Awaitable[Any]]


class OtherShards(Protocol):
    """Answers calls for the shards of other gateways. None in its place: there are no others."""

    def must_answer(self, method: str, request: Any) -> bool:
        """Whether a request may name a cache of another shard, so that `answer` must answer it."""

    async def answer(self, method: str, request: Any, context: Any, here: RunHere) -> Any:
        """Returns the response to such a call. Raises QuireError."""

    @property
    def dispatchers(self) -> Sequence[Dispatcher]:
        """Those of the further shards of this gateway."""

    async def list_caches(self, request: Any, context: Any, here: Callable[..., Awaitable[Any]]) -> Any:
        """Returns the response to ListCaches."""

    async def observe(self, method: str, request: Any, context: Any, response: Any) -> None:
        """Adds the values of further shards of this gateway to the response to a read-only call."""

    async def execute(self, request: Any, context: Any) -> bool:
        """Answers an Execute on caches of another shard. False: it is on none. Raises QuireError."""

    async def cancel_execution(self, request: Any, context: Any) -> bool:
        """Ends a kept execution of another shard. Returns whether there was one. Raises QuireError."""

    def in_session(self, stream: Any, here: RunHere) -> SessionCalls:
        """Returns the handler for calls of one Session. `stream`: the Session's context."""


class SessionCalls(Protocol):
    """Runs the calls of a Session for other shards, each in its own task, in order for each cache."""

    def must_answer(self, method: str, request: Any) -> bool:
        """Whether a call is for another shard, or has to wait for such a call."""

    def start(
        self, method: str, request: Any, timeout_s: float | None, on_done: Callable[[Any], None]
    ) -> asyncio.Task[None]:
        """Starts a call. `on_done` gets its response or a QuireError, unless the task is cancelled."""
