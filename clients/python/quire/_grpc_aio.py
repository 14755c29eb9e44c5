"""Workarounds for grpcio's asyncio API, which can hide why a call has ended."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import grpc
from quire.errors import Cancelled


def cancellation(caught: asyncio.CancelledError) -> BaseException:
    """What to raise for what a call has raised: `caught` if the task is cancelled, otherwise Cancelled.

    grpcio raises CancelledError also for a call that this client has cancelled, by closing for example. As a
    task's own it would not be noticed: a TaskGroup takes it for the wish of the task.
    """
    task = asyncio.current_task()
    if task is None or task.cancelling():
        return caught
    return Cancelled(grpc.StatusCode.CANCELLED, "", "cancelled by this client")


class FirstStatus:
    """Keeps the status with which the server ended a call.

    If a message was being sent at that moment, grpcio may then replace the status by INTERNAL "Internal error
    from Core" (grpc/grpc issue 36066).
    """

    def __init__(self, call: Any) -> None:
        """`call`: of a method with a stream of requests, before it is awaited or read."""
        self._error: grpc.aio.AioRpcError | None = None
        call.add_done_callback(self._keep)

    def instead_of(self, error: grpc.aio.AioRpcError) -> grpc.aio.AioRpcError:
        """The error to report for `error`, with which the call failed."""
        if error.code() != grpc.StatusCode.INTERNAL or self._error is None:
            return error
        return self._error

    def _keep(self, call: Any) -> None:
        code, details = _result_of(call.code()), _result_of(call.details())
        trailing = _result_of(call.trailing_metadata())
        self._error = grpc.aio.AioRpcError(code, grpc.aio.Metadata(), trailing, details)


def _result_of(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """The result of a coroutine that does not suspend, for callbacks, which cannot await it."""
    try:
        coroutine.send(None)
    except StopIteration as finished:
        return finished.value
    raise AssertionError("the status of a call that is done is known")
