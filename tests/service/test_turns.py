"""Who gets the next turn, and how long a turn lasts."""

from __future__ import annotations

import asyncio

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
