"""A worker that is silent takes nothing new while another is there, and keeps what it has."""

from __future__ import annotations

from service.caches.machine import CacheMachine
from service.caches.requests import Append, AppendKind
from service.caches.reservations import Limits
from service.caches.workers import Workers, WorkerView

PROMPT = tuple(range(40))


def view(worker_id: str, epoch: int, pages_available: int) -> WorkerView:
    return WorkerView(worker_id, epoch, 16, 100, 1000, pages_available)


def test_neither_room_nor_a_prefix_makes_up_for_it() -> None:
    placement, large, small = Workers(), view("large", 1, 90), view("small", 2, 10)
    placement.add(large)
    placement.add(small)
    assert placement.choose(PROMPT) is large
    large.suspect = True
    assert placement.choose(PROMPT) is small
    small.suspect = True
    assert placement.choose(range(50, 90)) is large, "where all are, they are what there is"
    large.suspect = small.suspect = False
    assert placement.choose(range(200, 240)) is large


def test_the_machine_is_told_of_one_incarnation() -> None:
    machine = CacheMachine(Limits())
    machine.worker_ready(view("a", 1, 90), 0.0)
    machine.worker_ready(view("b", 2, 10), 0.0)

    def sent_to() -> str:
        machine.submit_many([Append(AppendKind.PREFILL, "", PROMPT)], 0.0)
        ((worker_id, _, _),) = machine.take_effects().commands
        return worker_id

    machine.worker_suspected("a", 7, suspect=True)
    assert sent_to() == "a", "that was another incarnation"
    machine.worker_suspected("a", 1, suspect=True)
    assert sent_to() == "b"
    machine.worker_suspected("a", 1, suspect=False)
    assert sent_to() == "b", "the prefix is there by now"
