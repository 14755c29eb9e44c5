"""Which connections are hung up on."""

from __future__ import annotations

from service.doors.guests import Guests


def test_as_many_as_are_allowed_stay() -> None:
    guests = Guests(3)
    assert guests.seen([5, 7, 6]) == []
    assert guests.count == 3
    assert guests.seen([5]) == [] and guests.count == 1
    assert guests.seen([]) == [] and guests.count == 0


def test_the_newest_are_hung_up_on_once() -> None:
    guests = Guests(3)
    assert guests.seen([7, 9]) == []
    # Numbers start anew at some time: who was here before stays.
    assert guests.seen([1, 2, 3, 7, 9]) == [2, 3]
    assert guests.count == 3
    assert guests.seen([1, 2, 3, 7, 9]) == [], "they are leaving"
    assert guests.seen([1, 3, 7, 9, 10]) == [10]


def test_who_leaves_makes_room() -> None:
    guests = Guests(2)
    assert guests.seen([1, 2, 3]) == [3]
    assert guests.seen([1, 4]) == [], "2 and 3 are gone"
    assert guests.seen([1, 3, 4]) == [3], "a number may come again"
