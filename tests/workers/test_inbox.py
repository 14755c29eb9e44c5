"""The queue of commands: each item once and in order, and a timeout ends whenever it passes."""

from __future__ import annotations

import queue
import threading

import pytest

from workers.inbox import Inbox


@pytest.mark.parametrize("timeout_s", [0.0, 1e-9, 1e-6, 3e-6, 1e-5])
def test_a_timeout_ends_that_passes_before_the_wait_begins(timeout_s: float) -> None:
    for _ in range(3000):
        with pytest.raises(queue.Empty):
            Inbox[int]().get(timeout_s)


def test_items_of_threads_arrive_once_and_in_the_order_of_each() -> None:
    inbox: Inbox[tuple[int, int]] = Inbox()

    def put_all(who: int) -> None:
        for number in range(3000):
            inbox.put((who, number))

    for thread in [threading.Thread(target=put_all, args=(who,)) for who in range(4)]:
        thread.start()
    taken: list[tuple[int, int]] = []
    while len(taken) < 12_000:
        try:
            taken.append(inbox.get(1e-5 if len(taken) % 2 else None))
        except queue.Empty:
            continue
    assert not inbox.items
    for who in range(4):
        assert [number for one, number in taken if one == who] == list(range(3000))


def test_who_waits_without_a_timeout_is_woken() -> None:
    inbox: Inbox[int] = Inbox()
    taken: list[int] = []
    waiting = threading.Thread(target=lambda: taken.extend(inbox.get() for _ in range(100)))
    waiting.start()
    for number in range(100):
        inbox.put(number)
    waiting.join(30)
    assert taken == [*range(100)]
