"""Waiting for callers who are about to come back, and for nobody else.

A story is what happens to a window, at a time in ms: `Step` answers sequences, after so many ms; `Arrive` is
their next request; `Wait` says for how much longer the next step waits while so many requests are queued.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import pytest

from workers.coalescing import CoalescingWindow

MS = 1_000_000


@dataclass(frozen=True)
class Step:
    at: float
    answered: Iterable[int]
    took: float = 40


@dataclass(frozen=True)
class Arrive:
    at: float
    sequences: Iterable[int]


@dataclass(frozen=True)
class Wait:
    at: float
    queued: int
    left: float


@dataclass(frozen=True)
class Release:
    sequence: int


Story = list[Step | Arrive | Wait | Release]


def punctual(count: int, took: float = 40) -> Story:
    """All of these came back in time once, and have just been answered again, at 100."""
    return [Step(0, range(count), took), Arrive(2, range(count)), Step(100, range(count), took)]


def busy(gap: float, count: int = 8) -> Story:
    """Messages of one request each, `gap` apart; all were answered just now, after 40 of them."""
    messages = [Arrive(message * gap, [message % count]) for message in range(40)]
    return [*messages, Step(40 * gap, range(count), 0.5)]


STORIES: dict[str, Story] = {
    "it waits for callers that came back in time, until all are here": [
        *punctual(4), Arrive(101, [0]), Wait(101, 1, 9), Arrive(102, [1, 2, 3]), Wait(102, 4, 0),
    ],
    "two halves that arrive during each other's steps join": [
        Step(0, [1, 2]),
        # The step of the others begins at once, and is over when these are taken, who had come in time.
        Step(40, [3, 4]), Arrive(2, [1, 2]),
        Step(80, [1, 2]), Arrive(42, [3, 4]), Wait(81, 2, 9),
        Arrive(83, [1, 2]), Wait(83, 4, 0),
    ],
    "an unknown caller is not waited for": [Step(0, [1, 2]), Arrive(1, [1]), Wait(1, 1, 0)],
    "a late caller is not waited for until it is in time again": [
        *punctual(2), Arrive(101, [0]), Wait(111, 1, 0),
        Step(150, [0]), Arrive(151, [1]), Wait(151, 1, 9), Arrive(152, [0]),
        Step(200, [0, 1]), Arrive(201, [0]), Wait(201, 1, 0), Arrive(202, [1]),
        Step(250, [0, 1]), Arrive(251, [0]), Wait(251, 1, 9),
    ],
    "a lone caller never waits": [
        event
        for at in range(0, 500, 100)
        for event in (Step(at, [7]), Arrive(at + 1, [7]), Wait(at + 1, 1, 0))
    ],
    "without queued requests there is no wait": [*punctual(3), Wait(100, 0, 0)],
    "the wait is a quarter of a short step": [*punctual(3, 10), Arrive(100, [0]), Wait(100, 1, 2.5)],
    "the wait after a long step has a maximum": [*punctual(3, 1000), Arrive(100, [0]), Wait(100, 1, 20)],
    "a released sequence is not expected": [*punctual(2), Arrive(101, [0]), Release(1), Wait(101, 1, 0)],
    "messages that follow each other closely are waited for, beyond a share of a short step": [
        *busy(0.5), Arrive(20, [0]), Wait(20, 1, 2), Arrive(21, range(1, 8)), Wait(21, 8, 0),
    ],
    "messages far apart are not waited for": [*busy(3), Arrive(120, [0]), Wait(120, 1, 0)],
    "a fast lone caller does not wait": [*busy(0.5, 1), Arrive(20, [0]), Wait(20, 1, 0)],
    "callers that were not answered in the last 20 ms are forgotten": [
        *busy(0.5), Step(60, [0], 0.5), Arrive(60, [0]), Wait(60, 1, 0),
    ],
    "there is no wait after a pause": [
        *busy(0.5), Arrive(500, [0]), Wait(500, 1, 0), Arrive(503, [1]), Wait(503, 1, 0),
    ],
}  # fmt: skip


@pytest.mark.parametrize("name", STORIES)
def test_how_long_a_step_waits(name: str) -> None:
    window = CoalescingWindow()
    for event in STORIES[name]:
        match event:
            case Step():
                window.step_done(list(event.answered), int(event.at * MS), int(event.took * MS))
            case Arrive():
                for sequence in event.sequences:
                    window.requests_arrived((sequence,), int(event.at * MS))
            case Wait():
                assert window.remaining_ns(int(event.at * MS), event.queued) == event.left * MS, event
            case Release():
                window.forget(event.sequence)
