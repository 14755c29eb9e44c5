"""Planted bugs: in the pool and in Sessions, for the schedules of the shell. Each public name is one."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from service.api.session import Session, write_in_time
from service.budgets import Budget
from service.errors import SlowConsumer
from service.pool.incarnation import Incarnation
from service.pool.liveness import Liveness
from tests.sim.fake_pool import FakeLauncher
from tests.sim.machine import PlantedMachine
from tests.sim.planted import begins_at, everywhere
from tests.sim.watched import WatchedDispatcher

# The pool.


def pauses_count_as_silence(patch: pytest.MonkeyPatch) -> None:
    """A late tick counts as the number of ticks that are missing."""
    tick = Liveness.tick

    def ticks(liveness: Liveness, elapsed_s: float) -> None:
        while elapsed_s > 0:
            tick(liveness, min(elapsed_s, liveness.tick_s))
            elapsed_s -= liveness.tick_s

    patch.setattr(Liveness, "tick", ticks)


def silence_is_not_noticed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Liveness, "check", lambda _: None)


class LeasesDoNotRunOut(PlantedMachine):
    def expire(self, *_: Any) -> int:
        return 0


def failed_starts_are_not_tried_again(patch: pytest.MonkeyPatch) -> None:
    start = FakeLauncher.start

    async def gives_up(launcher: FakeLauncher, config: Any) -> Any:
        if launcher.has_failed(config.worker_id):
            await asyncio.get_running_loop().create_future()
        return await start(launcher, config)

    patch.setattr(FakeLauncher, "start", gives_up)


def failed_starts_are_hammered(patch: pytest.MonkeyPatch) -> None:
    start = FakeLauncher.start

    async def at_once(launcher: FakeLauncher, config: Any) -> Any:
        while True:
            try:
                return await start(launcher, config)
            except OSError:
                continue

    patch.setattr(FakeLauncher, "start", at_once)


def who_died_is_not_told_of(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(WatchedDispatcher, "worker_lost", lambda *_, **__: None)


def new_weights_are_not_put_into_place(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Incarnation, "apply_weights", lambda _, **__: None)


# Sessions.


class _Other:
    """Something but for what is told here."""

    def __init__(self, real: Any, **other: Any) -> None:
        self._real = real
        vars(self).update(other)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


def _configured(patch: pytest.MonkeyPatch, **other: Any) -> None:
    """Sessions have another configuration than their callers think."""

    def session(dispatcher: Any, state: Any, context: Any) -> Session:
        return Session(dispatcher, _Other(state, config=dataclasses.replace(state.config, **other)), context)  # type: ignore[arg-type]

    patch.setattr("tests.sim.peers.Session", session)


def stalled_readers_calls_are_not_undone(patch: pytest.MonkeyPatch) -> None:
    def session(dispatcher: Any, state: Any, context: Any) -> Session:
        return Session(_Other(dispatcher, cancel=lambda _: None), state, context)  # type: ignore[arg-type]

    patch.setattr("tests.sim.peers.Session", session)


def stalled_readers_are_not_cut_off(patch: pytest.MonkeyPatch) -> None:
    _configured(patch, message_timeout_s=1e9)


@begins_at(21)
def a_pause_is_the_readers_fault(patch: pytest.MonkeyPatch) -> None:
    async def in_one_go(writing: Awaitable[None], stall_s: float, give_up: Callable[[], None]) -> None:
        is_late = False

        def late() -> None:
            nonlocal is_late
            is_late = True
            give_up()

        timer = asyncio.get_running_loop().call_later(stall_s, late)
        try:
            await writing
        finally:
            timer.cancel()
        if is_late:
            raise SlowConsumer(stall_s)

    everywhere(patch, write_in_time, in_one_go)


def sessions_are_read_without_end(patch: pytest.MonkeyPatch) -> None:
    _configured(patch, max_session_calls=1 << 20, max_response_bytes=1 << 30)


def answers_keep_their_bytes(patch: pytest.MonkeyPatch) -> None:
    adjust = Budget.adjust

    def keeps(budget: Budget, amount: int, **options: bool) -> None:
        adjust(budget, max(amount, 0), **options)

    patch.setattr(Budget, "adjust", keeps)
