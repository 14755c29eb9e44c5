"""Calls for caches that other gateways of this server have: an extension answers them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Protocol, TypeAlias

# Answers a call with caches of this shard alone: its method, its request and its context.
RunHere: TypeAlias = Callable[[str, Any, Any], Awaitable[Any]]


class OtherShards(Protocol):
    """What answers for the shards of other gateways. None in its place: there are none."""

    def must_answer(self, method: str, request: Any) -> bool:
        """Whether a request may name a cache of another shard."""

    async def answer(self, method: str, request: Any, context: Any, here: RunHere) -> Any:
        """The response to such a call. Raises QuireError."""

    async def list_caches(self, request: Any, context: Any, here: Callable[..., Awaitable[Any]]) -> Any:
        """The response to ListCaches."""

    async def observe(self, method: str, request: Any, context: Any, response: Any) -> None:
        """Adds what further shards of this gateway say to the response of the first one to a reader."""

    async def execute(self, request: Any, context: Any) -> bool:
        """Answers an Execute on caches of another shard. False: it is not one. Raises QuireError."""

    async def cancel_execution(self, request: Any, context: Any) -> bool:
        """Ends a kept execution of another shard. Returns whether there was one. Raises QuireError."""

    def in_session(self, stream: Any, here: RunHere) -> SessionCalls:
        """For the calls of one Session; `stream` is its context."""


class SessionCalls(Protocol):
    """The calls of a Session for other shards. Each runs by itself, in order for each cache."""

    def must_answer(self, method: str, request: Any) -> bool:
        """Whether a call is one of them, or has to wait for one of them."""

    def start(
        self, method: str, request: Any, timeout_s: float | None, on_done: Callable[[Any], None]
    ) -> asyncio.Task[None]:
        """Runs a call. `on_done` gets its response or a QuireError, but not if the task is cancelled."""
