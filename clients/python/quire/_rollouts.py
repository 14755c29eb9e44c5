"""Samples by a loop of decodes on a session, for callers in any thread."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import threading
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

from quire._aio_caches import AsyncCache
from quire._batches import Scored
from quire._calls import new_request_id
from quire._options import output_options
from quire.aio import AsyncClient, AsyncSession
from quire.errors import OutOfRange, QuireError, SessionEnded
from quire.text import ModelTokenizer
from quire.v1 import types_pb2

_Result = TypeVar("_Result")
# A token, and what was requested of it.
Drawn: TypeAlias = types_pb2.SampledToken | types_pb2.StepOutput


class Connection:
    """A client and its session, in an event loop of its own thread."""

    def __init__(self, target: str, settings: dict[str, Any]) -> None:
        """`settings`: those of AsyncClient, whose errors are raised."""
        self._session: AsyncSession | None = None
        self._model: types_pb2.ModelDescription | None = None
        self._tokenizer: ModelTokenizer | None = None
        connected: Future[AsyncClient] = Future()
        main = self._main(functools.partial(AsyncClient, target, **settings), connected)
        # A daemon, so that a program can exit without closing it.
        self._thread = threading.Thread(target=asyncio.run, args=(main,), name="quire-rollouts", daemon=True)
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

    def submit(self, work: Coroutine[Any, Any, _Result]) -> Future[_Result]:
        """Runs `work` in the event loop; from any thread. Cancelling the future cancels it.

        Raises RuntimeError if the connection is closed.
        """
        if not self._thread.is_alive():
            work.close()
            raise RuntimeError("the connection is closed")
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def close(self) -> None:
        """Closes the connection, cancels what runs, and ends the thread. Idempotent."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._closing.set)
            self._thread.join()

    # In the event loop.

    async def on_session(self, call: Callable[[AsyncSession], Awaitable[_Result]]) -> _Result:
        """Makes a call that is safe to repeat. If the stream has ended, repeats it once on a new one."""
        session = self._session = self._session or self.client.session()
        try:
            return await call(session)
        except SessionEnded:
            if self._session is session:
                self._session = self.client.session()
            return await call(self._session)

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


@dataclass(frozen=True, slots=True)
class Ends:
    """What ends a sample."""

    # None: nothing but the end of the context.
    max_tokens: int | None
    ids: frozenset[int]
    texts: Sequence[str] = ()
    # None: there are no texts.
    tokenizer: ModelTokenizer | None = None


class Rollout:
    """A sample of a prompt, which grows token by token."""

    def __init__(self, prompt: list[int], output: types_pb2.OutputOptions, ends: Ends) -> None:
        """`output`: how its tokens are drawn."""
        self.output = output
        self.drawn: list[Drawn] = []
        # One of `ends`, and not the number of tokens.
        self.is_stopped = False
        self._ends = ends
        self._text = None if ends.tokenizer is None else ends.tokenizer.stream(prompt)
        # The end of the text, as long as a stop text can be.
        self._tail = ""

    @property
    def is_finished(self) -> bool:
        """Whether no token follows."""
        return self.is_stopped or len(self.drawn) == self._ends.max_tokens

    def take(self, drawn: Drawn) -> None:
        """Adds a token."""
        self.drawn.append(drawn)
        self.is_stopped = drawn.token_id in self._ends.ids or self._has_stop_text(drawn.token_id)

    def _has_stop_text(self, token_id: int) -> bool:
        if self._text is None:
            return False
        text = self._tail + self._text.push(token_id)
        self._tail = text[-max(map(len, self._ends.texts)) :]
        return any(stop in text for stop in self._ends.texts)


class Sampler:
    """Draws and scores with one model."""

    def __init__(self, connection: Connection, adapter_id: str) -> None:
        """`adapter_id`: empty for the served model itself."""
        self._connection = connection
        self._adapter_id = adapter_id

    async def score(self, tokens: list[int], num_top: int) -> Scored:
        """The log-probabilities of tokens, with `num_top` alternatives. Raises QuireError."""
        output = output_options(top_logprobs=num_top)
        return await self._connection.on_session(
            lambda session: session.score(tokens, output=output, adapter_id=self._adapter_id)
        )

    async def draw(
        self, prompt: list[int], outputs: Sequence[types_pb2.OutputOptions], ends: Ends
    ) -> tuple[list[Rollout], int]:
        """A sample for each of `outputs`, which differ in their seeds, and the tokens whose KV was cached.

        The prompt is computed once. Raises QuireError.
        """
        request_id = new_request_id()
        root = await self._connection.on_session(
            lambda session: session.prefill(
                prompt,
                output=outputs[0],
                adapter_id=self._adapter_id,
                request_id=request_id,
                sample_seeds=[output.sampling.seed for output in outputs],
            )
        )
        rollouts = [Rollout(prompt, output, ends) for output in outputs]
        for rollout, drawn in zip(rollouts, root.samples, strict=True):
            rollout.take(drawn)
        await self._finish(root, [each for each in rollouts if not each.is_finished])
        return rollouts, root.reused_tokens

    async def _finish(self, root: AsyncCache, rollouts: list[Rollout]) -> None:
        """Continues samples, each in a fork of `root`, which is released."""
        caches, request_id = [root], new_request_id()
        if len(rollouts) != 1:
            # If this fails, the cache is released when its lease ends.
            caches = await self._connection.on_session(
                lambda session: _on(session, root).fork(len(rollouts), release=[root], request_id=request_id)
            )
        try:
            async with asyncio.TaskGroup() as group:
                for cache, rollout in zip(caches, rollouts, strict=True):
                    group.create_task(self._decode(cache, rollout))
        except ExceptionGroup as failed:
            raise failed.exceptions[0] from None

    async def _decode(self, cache: AsyncCache, rollout: Rollout) -> None:
        """Decodes a sample to its end, and releases the cache."""
        try:
            while not rollout.is_finished:
                last = rollout.drawn[-1].token_id
                drawn = await self._connection.on_session(
                    lambda session, last=last: _on(session, cache).decode(last, output=rollout.output)  # type: ignore[misc]
                )
                rollout.take(drawn)
        except OutOfRange:
            # The context is full.
            return
        finally:
            # Otherwise it is released when its lease ends.
            with contextlib.suppress(QuireError):
                await cache.release()


def _on(session: AsyncSession, cache: AsyncCache) -> AsyncCache:
    """The cache, whose calls use the session from now on."""
    session.adopt(cache)
    return cache
