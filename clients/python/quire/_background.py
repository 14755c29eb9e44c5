"""An AsyncClient in an event loop of its own thread, for callers in any thread."""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

from quire.aio import AsyncClient
from quire.text import ModelTokenizer
from quire.v1 import types_pb2

# How long calls that are cancelled have to end what runs on the server.
_END_TIMEOUT_S = 5.0
_Result = TypeVar("_Result")


class BackgroundClient:
    """Owner of the client and of the thread. `close` it."""

    def __init__(self, target: str, settings: dict[str, Any]) -> None:
        """`settings`: those of AsyncClient, whose errors are raised."""
        self._model: types_pb2.ModelDescription | None = None
        self._tokenizer: ModelTokenizer | None = None
        self._running: set[asyncio.Task[Any]] = set()
        connected: Future[AsyncClient] = Future()
        main = self._main(functools.partial(AsyncClient, target, **settings), connected)
        # A daemon, so that a program can exit without closing it.
        self._thread = threading.Thread(target=asyncio.run, args=(main,), name="quire-client", daemon=True)
        self._thread.start()
        self.client = connected.result()

    async def _main(self, connect: Callable[[], AsyncClient], connected: Future[AsyncClient]) -> None:
        self._loop, self._closing = asyncio.get_running_loop(), asyncio.Event()
        try:
            client = connect()
        except Exception as error:
            connected.set_exception(error)
            return
        connected.set_result(client)
        async with client:
            await self._closing.wait()
            # While there is a connection.
            for task in self._running:
                task.cancel()
            if self._running:
                await asyncio.wait(self._running, timeout=_END_TIMEOUT_S)

    def submit(self, work: Coroutine[Any, Any, _Result]) -> Future[_Result]:
        """Runs `work` in the event loop; from any thread. Cancelling the future cancels it.

        Raises RuntimeError if the client is closed.
        """
        if not self._thread.is_alive():
            work.close()
            raise RuntimeError("the connection is closed")
        return asyncio.run_coroutine_threadsafe(self._run(work), self._loop)

    def close(self) -> None:
        """Closes the connection, cancels what runs, and ends the thread. Idempotent."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._closing.set)
            self._thread.join()

    # In the event loop.

    async def _run(self, work: Coroutine[Any, Any, _Result]) -> _Result:
        task = asyncio.current_task()
        assert task is not None
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return await work

    async def model(self) -> types_pb2.ModelDescription:
        """The model that was served when this was first asked. Raises QuireError."""
        if self._model is None:
            self._model = (await self.client.model_info()).model
        return self._model

    async def tokenizer(self) -> ModelTokenizer:
        """The model's tokenizer. Raises as `AsyncClient.tokenizer` does."""
        if self._tokenizer is None:
            self._tokenizer = await self.client.tokenizer()
        return self._tokenizer
