"""Calls that create a cache: awaited, or used in an `async with`, which releases the cache."""

from __future__ import annotations

import functools
from collections.abc import Callable, Coroutine, Generator
from types import TracebackType
from typing import Any, Generic, ParamSpec, Protocol, Self, TypeVar


class _Cache(Protocol):
    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


_Opened = TypeVar("_Opened", bound=_Cache)
_Arguments = ParamSpec("_Arguments")


class Opening(Coroutine[Any, Any, _Opened], Generic[_Opened]):
    """`await` it for the cache, or `async with` it to release the cache at the end of the block.

    It is a coroutine, so that `asyncio.create_task` and `asyncio.gather` take it too.
    """

    __slots__ = ("_cache", "_creation")

    def __init__(self, creation: Coroutine[Any, Any, _Opened]) -> None:
        self._creation = creation
        # Inside the block.
        self._cache: _Opened | None = None

    def __await__(self) -> Generator[Any, Any, _Opened]:
        return self._creation.__await__()

    def send(self, value: Any) -> Any:
        """See Coroutine."""
        return self._creation.send(value)

    def throw(self, *error: Any) -> Any:
        """See Coroutine."""
        return self._creation.throw(*error)

    def close(self) -> None:
        """See Coroutine."""
        self._creation.close()

    async def __aenter__(self) -> _Opened:
        self._cache = await self._creation
        return await self._cache.__aenter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._cache is not None
        await self._cache.__aexit__(kind, error, trace)


def opens(
    create: Callable[_Arguments, Coroutine[Any, Any, _Opened]],
) -> Callable[_Arguments, Opening[_Opened]]:
    """Makes an async function that creates a cache return an `Opening`."""

    @functools.wraps(create)
    def opening(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> Opening[_Opened]:
        return Opening(create(*args, **kwargs))

    return opening
