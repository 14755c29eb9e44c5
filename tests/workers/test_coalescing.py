"""Waiting for callers who are about to come back, and for nobody else."""

from __future__ import annotations

from workers.coalescing import CoalescingWindow

MS = 1_000_000


def punctual_window(sequences: range, step_ns: int = 40 * MS) -> CoalescingWindow:
    """A window after all of these came back in time once, and have just been answered again."""
    window = CoalescingWindow()
    window.step_done(sequences, 0, step_ns)
    for sequence in sequences:
        window.request_arrived(sequence, 2 * MS)
    window.step_done(sequences, 100 * MS, step_ns)
    return window


def test_it_waits_for_callers_that_came_back_in_time() -> None:
    window = punctual_window(range(4))
    window.request_arrived(0, 101 * MS)
    assert window.remaining_ns(101 * MS, waiting=1) == 9 * MS
    for sequence in (1, 2, 3):
        window.request_arrived(sequence, 102 * MS)
    assert window.remaining_ns(102 * MS, waiting=4) == 0, "all are here"


def test_two_halves_that_arrive_during_each_others_steps_join() -> None:
    window = CoalescingWindow()
    window.step_done([1, 2], 0, 40 * MS)
    # The step of the others begins at once, and is over when these are taken, who had come in time.
    window.step_done([3, 4], 40 * MS, 40 * MS)
    for sequence in (1, 2):
        window.request_arrived(sequence, 2 * MS)
    window.step_done([1, 2], 80 * MS, 40 * MS)
    for sequence in (3, 4):
        window.request_arrived(sequence, 42 * MS)
    assert window.remaining_ns(81 * MS, waiting=2) == 9 * MS
    for sequence in (1, 2):
        window.request_arrived(sequence, 83 * MS)
    assert window.remaining_ns(83 * MS, waiting=4) == 0, "all are here"


def test_an_unknown_caller_is_not_waited_for() -> None:
    window = CoalescingWindow()
    window.step_done([1, 2], 0, 40 * MS)
    window.request_arrived(1, 1 * MS)
    assert window.remaining_ns(1 * MS, waiting=1) == 0


def test_a_late_caller_is_not_waited_for_until_it_is_in_time_again() -> None:
    window = punctual_window(range(2))
    window.request_arrived(0, 101 * MS)
    assert window.remaining_ns(111 * MS, waiting=1) == 0, "the window has closed"
    window.step_done([0], 150 * MS, 40 * MS)
    window.request_arrived(1, 151 * MS)
    assert window.remaining_ns(151 * MS, waiting=1) == 9 * MS, "0 was prompt and is expected"
    window.request_arrived(0, 152 * MS)
    window.step_done([0, 1], 200 * MS, 40 * MS)
    window.request_arrived(0, 201 * MS)
    assert window.remaining_ns(201 * MS, waiting=1) == 0, "1 was late for the step before"
    window.request_arrived(1, 202 * MS)
    window.step_done([0, 1], 250 * MS, 40 * MS)
    window.request_arrived(0, 251 * MS)
    assert window.remaining_ns(251 * MS, waiting=1) > 0, "1 was prompt this time"


def test_a_lone_caller_never_waits() -> None:
    window = CoalescingWindow()
    for step in range(5):
        window.step_done([7], step * 100 * MS, 40 * MS)
        window.request_arrived(7, step * 100 * MS + 1 * MS)
        assert window.remaining_ns(step * 100 * MS + 1 * MS, waiting=1) == 0


def test_without_queued_requests_there_is_no_wait() -> None:
    assert punctual_window(range(3)).remaining_ns(100 * MS, waiting=0) == 0


def test_the_wait_is_a_share_of_the_step_with_a_maximum() -> None:
    short = punctual_window(range(3), step_ns=10 * MS)
    short.request_arrived(0, 100 * MS)
    assert short.remaining_ns(100 * MS, waiting=1) == int(2.5 * MS)
    long = punctual_window(range(3), step_ns=1000 * MS)
    long.request_arrived(0, 100 * MS)
    assert long.remaining_ns(100 * MS, waiting=1) == 20 * MS


def test_a_released_sequence_is_not_expected() -> None:
    window = punctual_window(range(2))
    window.request_arrived(0, 101 * MS)
    window.forget(1)
    assert window.remaining_ns(101 * MS, waiting=1) == 0


def busy_window(gap_ns: int, sequences: range = range(8)) -> CoalescingWindow:
    """A window after messages of one operation each, `gap_ns` apart; all were answered just now."""
    window = CoalescingWindow()
    for message in range(40):
        window.request_arrived(sequences[message % len(sequences)], message * gap_ns)
    window.step_done(sequences, 40 * gap_ns, MS // 2)
    return window


def test_messages_that_follow_each_other_closely_are_waited_for() -> None:
    window = busy_window(MS // 2)
    window.request_arrived(0, 20 * MS)
    assert window.remaining_ns(20 * MS, waiting=1) == 2 * MS, (
        "though nobody came back within a share of a step"
    )
    for sequence in range(1, 8):
        window.request_arrived(sequence, 21 * MS)
    assert window.remaining_ns(21 * MS, waiting=8) == 0, "all are here"


def test_messages_far_apart_are_not_waited_for() -> None:
    window = busy_window(3 * MS)
    window.request_arrived(0, 120 * MS)
    assert window.remaining_ns(120 * MS, waiting=1) == 0


def test_a_fast_lone_caller_does_not_wait() -> None:
    window = busy_window(MS // 2, range(1))
    window.request_arrived(0, 20 * MS)
    assert window.remaining_ns(20 * MS, waiting=1) == 0


def test_absent_callers_are_forgotten() -> None:
    window = busy_window(MS // 2)
    window.step_done([0], 60 * MS, MS // 2)
    window.request_arrived(0, 60 * MS)
    assert window.remaining_ns(60 * MS, waiting=1) == 0, "nobody was answered in the last 20 ms but 0"


def test_there_is_no_wait_after_a_pause() -> None:
    window = busy_window(MS // 2)
    for sequence, now_ns in ((0, 500 * MS), (1, 503 * MS)):
        window.request_arrived(sequence, now_ns)
        assert window.remaining_ns(now_ns, waiting=1) == 0
