"""Who goes first in a worker's queue, and that nobody waits for good."""

from __future__ import annotations

import pytest
from quire.v1 import executor_pb2, types_pb2

from service.api import append_codec
from service.api.request_limits import RequestLimits
from tests.forwards import SentForward, command_of
from tests.sim.model_worker import message_of
from tests.workers.scheduling import Bench
from workers.forward_queues import HEAD_START_STEPS, SHORT_TOKENS
from workers.operations import Forward, Priority
from workers.wire import to_command

ASKED = {
    types_pb2.PRIORITY_UNSPECIFIED: Priority.NORMAL,
    types_pb2.PRIORITY_LOW: Priority.LOW,
    types_pb2.PRIORITY_NORMAL: Priority.NORMAL,
    types_pb2.PRIORITY_HIGH: Priority.HIGH,
}
LOW, NORMAL, HIGH = Priority.LOW, Priority.NORMAL, Priority.HIGH


class Line(Bench):
    """One item in a step, or more, and whose forward each was."""

    def __init__(self, items: int = 1) -> None:
        super().__init__(items, tokens=512, rows=256)

    def ask(self, priority: Priority, tokens: int, caller: int = 0) -> None:
        self.add(caller, tokens=tokens, priority=priority)

    def next(self) -> Priority:
        return self.next_of_many()[0]

    def next_of_many(self) -> list[Priority]:
        return [self.asked[op_id].priority for op_id in self.step()]


@pytest.mark.parametrize("tokens", [1, SHORT_TOKENS + 1, 300])
def test_those_that_come_together_go_by_priority(tokens: int) -> None:
    line = Line()
    for priority in (LOW, NORMAL, HIGH, LOW, NORMAL, HIGH):
        line.ask(priority, tokens)
    assert [line.next() for _ in range(6)] == [HIGH, HIGH, NORMAL, NORMAL, LOW, LOW]


@pytest.mark.parametrize("first", [NORMAL, HIGH])
@pytest.mark.parametrize("tokens", [1, 300])
def test_low_priority_has_its_turn_however_many_others_come(first: Priority, tokens: int) -> None:
    """Each of them is a caller of its own, as every unary call is."""
    line = Line()
    line.ask(LOW, tokens)
    for _ in range(3):
        line.ask(first, tokens)
    for _step in range(200_000 // tokens):
        if line.next() is LOW:
            return
        line.ask(first, tokens)
    pytest.fail("it never had its turn")


def test_a_high_priority_is_a_head_start_and_no_larger_share() -> None:
    """Of two callers who always have something, one at a high priority has no more in the long run."""
    line = Line()
    for _ in range(4):
        line.ask(HIGH, 64, caller=1)
        line.ask(NORMAL, 64, caller=2)
    ahead = []
    for _ in range(2):
        done = {HIGH: 0, NORMAL: 0}
        for _step in range(4000):
            priority = line.next()
            done[priority] += 1
            line.ask(priority, 64, caller=1 if priority is HIGH else 2)
        ahead.append(done[HIGH] - done[NORMAL])
    assert ahead[0] > 50 and abs(ahead[1]) < 10


@pytest.mark.parametrize(
    ("first", "others"),
    [
        # Fewer than a step takes, and more.
        pytest.param(first, others, marks=() if others in always else pytest.mark.thorough)
        for first, always in ((NORMAL, (2, 257)), (HIGH, (64,)))
        for others in (2, 64, 257, 1000)
    ],
)
def test_however_many_are_ahead_by_priority_it_is_for_a_bounded_number_of_steps(
    first: Priority, others: int
) -> None:
    """Each of them is new, so that nobody ever pays for a turn; and there are always so many."""
    line = Line(items=256)
    for _ in range(others):
        line.ask(first, 1)
    waits = NORMAL if first is HIGH else LOW
    line.ask(waits, 1)
    bound = 2 * HEAD_START_STEPS + 2 * others // 256 + 4
    for _step in range(bound):
        priorities = line.next_of_many()
        if waits in priorities:
            return
        for _ in priorities:
            line.ask(first, 1)
    pytest.fail(f"it waited for more than {bound} steps")


@pytest.mark.parametrize("others", [0, 100])
def test_a_priority_is_the_forwards_and_not_its_callers(others: int) -> None:
    """What a caller has queued at a low priority does not hold back what it asks for at a high one."""
    line = Line(items=16)
    for _ in range(others):
        line.ask(NORMAL, 1)
    for _ in range(3):
        line.ask(LOW, 1, caller=1)
    line.ask(HIGH, 1, caller=1)
    assert HIGH in line.next_of_many()


@pytest.mark.parametrize(("asked", "priority"), ASKED.items())
def test_what_a_caller_asks_for_reaches_the_queue(asked: types_pb2.Priority, priority: Priority) -> None:
    limits = RequestLimits(vocab_size=100, max_response_bytes=1 << 20)
    request = executor_pb2.PrefillRequest(token_ids=[1, 2], priority=asked)
    append = append_codec.prefill(request, limits, None)
    command = command_of(
        SentForward(op_id=1, number=2, position=0, append=append, seed=3, prompt_len=2, caller=4)
    )
    forward = to_command(message_of(command))
    assert isinstance(forward, Forward) and forward.priority is priority
