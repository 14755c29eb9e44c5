"""Other weights for the server's own workers: loaded beside those that serve, then switched to.

Until the switch nothing has changed, whatever goes wrong, and whoever goes. The switch is written down before
it is made: a gateway that ends at any moment is followed by one that serves either these weights or those,
and caches know whose they are. Afterwards callers may use caches of the weights before for as long as was
asked for; then what is under way is finished, for a bounded time, and the old workers end.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any, TypeAlias

from quire.v1 import runner_pb2

from service.api.server_state import ServerState
from service.dispatcher import Dispatcher
from service.errors import LoadFailed, Loading
from service.logging import get_logger
from service.pool.crew import Crew
from service.pool.rotation import Rotation
from service.pool.served import Served, ServedFile
from service.pool.supervisor import Supervisor
from service.runtimes.sources import Sources, require_memory

_log = get_logger(__name__)
_POLL_S = 0.02
# How often a caller is told how far it is.
_TELL_S = 0.5
_Said: TypeAlias = runner_pb2.LoadWeightsResponse
# Told which weights are served from now on.
OnSwitch = Callable[[Crew], None]


class WeightsLoader:
    """Owner of the load under way, and of the drain behind it: one at a time."""

    def __init__(
        self,
        pool: Supervisor,
        dispatcher: Dispatcher,
        state: ServerState,
        rotation: Rotation,
        sources: Sources,
        served: ServedFile,
        configured: str,
        on_switch: OnSwitch,
    ) -> None:
        """`configured`: what the settings name."""
        self._pool = pool
        self._dispatcher = dispatcher
        self._state = state
        self._rotation = rotation
        self._sources = sources
        self._served = served
        self._configured = configured
        self._on_switch = on_switch
        # Whose turn it is; None: anybody's.
        self._turn: object = None
        # No number is given twice, also if nothing came of it.
        self._last_weights = 0
        # What goes on though nobody may wait for it: the end of the weights before.
        self._draining: asyncio.Task[None] | None = None
        self._drains_until_s = 0.0

    @property
    def is_busy(self) -> bool:
        """Whether weights are being loaded, or those before are still in use."""
        return self._turn is not None

    async def load(self, source: str, drain_s: float) -> AsyncGenerator[_Said]:
        """See `Runtime.load_weights`. Whoever closes it before the switch takes it back.

        Raises Loading, InvalidArgument, NoMemory or LoadFailed: nothing has changed.
        """
        if self._turn is not None or self._sources.is_busy:
            raise Loading
        mine = self._turn = object()
        try:
            async with contextlib.aclosing(self._load(source, drain_s)) as saying:
                async for said in saying:
                    yield said
        finally:
            if self._turn is mine and self._draining is None:
                self._turn = None

    async def _load(self, source: str, drain_s: float) -> AsyncGenerator[_Said]:
        yield _Said(phase=runner_pb2.LOAD_WEIGHTS_PHASE_LOADING)
        finding = asyncio.ensure_future(self._sources.find(source))
        try:
            while not (await asyncio.wait({finding}, timeout=_TELL_S))[0]:
                yield _Said(phase=runner_pb2.LOAD_WEIGHTS_PHASE_LOADING, progress=self._sources.downloaded)
        finally:
            finding.cancel()
        model = finding.result()
        self._require_memory(model)
        self._last_weights = max(self._last_weights, self._dispatcher.weights) + 1
        crew = self._pool.load(self._last_weights, model)
        _log.info("loading weights", model=model, weights=crew.weights)
        try:
            while not await crew.loaded(_TELL_S):
                yield _how_far(crew)
            if crew.failure is None:
                # Also where all of that took less than it takes to be told.
                yield _Said(phase=runner_pb2.LOAD_WEIGHTS_PHASE_CHECKING, progress=1.0)
            async with self._rotation.paused():
                if crew.failure is not None:
                    raise LoadFailed(crew.failure)
                await _to_its_end(self._switch(crew, drain_s))
        finally:
            if self._dispatcher.weights != crew.weights:
                _log.warning(
                    "weights are not loaded", model=model, why=crew.failure or "nobody waits for them"
                )
                await _to_its_end(self._take_back(crew))
        async for said in self._until_drained(drain_s):
            yield said
        model_served = self._state.first_ready.model
        yield _Said(
            phase=runner_pb2.LOAD_WEIGHTS_PHASE_SERVING,
            progress=1.0,
            model_id=model_served.model_id,
            fingerprint=model_served.fingerprint,
        )

    def _require_memory(self, model: str) -> None:
        """Raises NoMemory. A GPU's memory is its worker's to look at, which refuses what does not fit."""
        if self._pool.is_on_cpu:
            require_memory(model, len(self._pool.slots))

    # The switch.

    async def _switch(self, crew: Crew, drain_s: float) -> None:
        """Raises LoadFailed: it is not written down, and nothing has changed."""
        old = self._pool.serving
        # Who dies from now on has a successor, as ever.
        self._pool.keep(crew)
        served = Served(self._configured, crew.model, crew.weights)
        try:
            await self._write_down(served)
        except OSError as error:
            raise LoadFailed(f"the switch cannot be written down: {error.strerror}") from None
        self._pool.serve(crew)
        self._state.switch(crew.weights)
        self._on_switch(crew)
        self._dispatcher.weights_switched(crew.weights, drain=drain_s > 0)
        self._drains_until_s = time.monotonic() + drain_s
        self._draining = asyncio.create_task(self._drain(old), name="drain-weights")
        lasts = self._served.is_kept
        _log.info(
            "serving other weights", model=crew.model, weights=crew.weights, outlives_this_gateway=lasts
        )

    async def _write_down(self, served: Served) -> None:
        """Raises OSError."""
        await asyncio.to_thread(self._served.write, served)

    async def _take_back(self, crew: Crew) -> None:
        self._dispatcher.weights_ended(crew.weights)
        await self._pool.end(crew)
        self._state.forget(crew.weights)

    # The end of the weights before.

    async def _drain(self, old: Crew) -> None:
        try:
            await asyncio.sleep(self._drains_until_s - time.monotonic())
            self._dispatcher.weights_drained(old.weights)
            self._state.forget(old.weights)
            # What was asked before is finished, as when the server ends.
            until_s = time.monotonic() + self._state.config.drain_grace_s
            while self._dispatcher.uses_of(old.weights) and time.monotonic() < until_s:  # noqa: ASYNC110
                await asyncio.sleep(_POLL_S)
            self._dispatcher.weights_ended(old.weights)
            await self._pool.end(old)
            _log.info("the weights before are gone", model=old.model, weights=old.weights)
        except Exception:
            # A bug of ours.
            _log.exception("the weights before could not be ended")
        self._draining = self._turn = None

    async def _until_drained(self, drain_s: float) -> AsyncGenerator[_Said]:
        while (draining := self._draining) is not None:
            left_s = max(0.0, self._drains_until_s - time.monotonic())
            part = 1 - left_s / drain_s if drain_s else 1.0
            yield _Said(phase=runner_pb2.LOAD_WEIGHTS_PHASE_DRAINING, progress=part)
            await asyncio.wait({draining}, timeout=_TELL_S)


def _how_far(crew: Crew) -> _Said:
    """Weights are read; then each worker compares the model with its plain forward, and runs it once.

    Where that is done in another order, or there are none to read, it is not told how far reading is.
    """
    loaded = [slot.load_progress for slot in crew.slots]
    if min(loaded) < 1.0:
        part = sum(loaded) / len(loaded)
        return _Said(phase=runner_pb2.LOAD_WEIGHTS_PHASE_LOADING, progress=part)
    part = sum(slot.ready is not None for slot in crew.slots) / len(crew.slots)
    return _Said(phase=runner_pb2.LOAD_WEIGHTS_PHASE_CHECKING, progress=part)


async def _to_its_end(step: Coroutine[Any, Any, None]) -> None:
    """Carries out a short step as a whole: who is cancelled meanwhile is so afterwards."""
    task = asyncio.ensure_future(step)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait({task})
        raise
