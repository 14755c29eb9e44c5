"""Who gets the next turn, and how long a turn lasts."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from service.turns import Turns


class Work:
    """What callers do in their turns, until the test lets them end."""

    def __init__(self, most: int) -> None:
        self.turns = Turns(most)
        self.began: list[str] = []
        self._may_end: list[tuple[str, asyncio.Event]] = []
        self.tasks: list[asyncio.Task[None]] = []

    async def ask(self, *tenants: str) -> None:
        self.tasks += [asyncio.create_task(self._work(tenant)) for tenant in tenants]
        await settle()

    async def end(self, tenant: str) -> None:
        """Ends the oldest turn of a tenant."""
        found = next(each for each in self._may_end if each[0] == tenant)
        self._may_end.remove(found)
        found[1].set()
        await settle()

    async def _work(self, tenant: str) -> None:
        async with self.turns.turn(tenant):
            self.began.append(tenant)
            may_end = asyncio.Event()
            self._may_end.append((tenant, may_end))
            await may_end.wait()


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_tenants_take_turns() -> None:
    work = Work(1)
    await work.ask("a", "a", "a", "b", "b")
    for tenant in "ababa":
        await work.end(tenant)
    assert work.began == [*"ababa"]


async def test_a_tenant_has_half_of_the_turns_at_once() -> None:
    work = Work(4)
    await work.ask(*"aaaa")
    assert work.began == [*"aa"]
    await work.ask(*"bcd")
    assert work.began == [*"aabc"], "others did not have to wait for it"
    await work.end("a")
    assert work.began == [*"aabcd"], "who has less is next"
    await work.end("d")
    assert work.began == [*"aabcda"]


async def test_callers_without_a_tenant_have_all_turns() -> None:
    work = Work(2)
    await work.ask("", "", "")
    assert work.began == ["", ""]


async def test_who_leaves_gets_no_turn_and_keeps_none() -> None:
    work = Work(1)
    await work.ask(*"abcd")
    work.tasks[1].cancel()
    work.tasks[0].cancel()
    await asyncio.sleep(0)
    # It has just got its turn, and does not know yet.
    work.tasks[2].cancel()
    await settle()
    assert work.began == [*"ad"]


@pytest.mark.parametrize("leaves", [False, True])
async def test_a_turn_in_a_thread_lasts_until_the_work_ends(leaves: bool) -> None:
    """Else a caller who leaves again and again would occupy more threads than there are turns."""
    began, may_end, log = threading.Event(), threading.Event(), list[str]()

    def work() -> None:
        began.set()
        assert may_end.wait(60)
        log.append("first")

    with ThreadPoolExecutor(4) as threads:
        turns = Turns(1)
        first = asyncio.create_task(turns.in_thread("a", threads, work))
        second = asyncio.create_task(turns.in_thread("b", threads, lambda: log.append("second")))
        await asyncio.to_thread(began.wait, 60)
        if leaves:
            first.cancel()
        await settle()
        assert not log
        may_end.set()
        await second
    assert log == ["first", "second"]
    assert first.cancelled() == leaves


@pytest.mark.parametrize("fail", [RuntimeError, KeyboardInterrupt])
async def test_a_thread_that_cannot_start_keeps_no_turn(fail: type[BaseException]) -> None:
    class Broken(ThreadPoolExecutor):
        def submit(self, function: Callable[..., object], *arguments: object) -> None:  # type: ignore[override]
            raise fail

    turns = Turns(1)
    for _ in range(2):
        with pytest.raises(fail):
            await turns.in_thread("a", Broken(1), list)
    async with turns.turn("a"):
        pass
