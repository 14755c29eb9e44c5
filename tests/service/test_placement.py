"""Which worker takes a new sequence, by its room, what it has of a prefix, and what is queued."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import pytest

from service.caches.admission import Limits
from service.caches.entries import Operation, WorkerView
from service.caches.machine import CacheMachine
from service.caches.placement import PrefixAffinity, Workers
from service.caches.requests import Append, AppendKind, Priority
from service.caches.worker_load import End, WorkerLoad
from service.errors import Overloaded
from tests.forwards import SentForward, command_of

# Prefixes are remembered every so many tokens.
GRAIN = 16
PROMPT = list(range(3 * GRAIN + 5))


def view(
    worker_id: str, epoch: int, pages_available: int, *, page_tokens: int = 16, capacity_tokens: int = 1000
) -> WorkerView:
    return WorkerView(worker_id, epoch, page_tokens, 100, capacity_tokens, pages_available)


def placed(*workers: WorkerView) -> Workers:
    placement = Workers()
    for worker in workers:
        placement.add(worker)
    return placement


def test_memory_of_prefixes_is_bounded() -> None:
    affinity = PrefixAffinity(capacity=4)
    for first in range(10):
        affinity.record([first] * (2 * GRAIN), view("a", 1, 50))
    assert affinity.held([0] * GRAIN) == {}
    assert affinity.held([9] * (2 * GRAIN)) == {("a", 1): 2 * GRAIN}


# A worker that is silent takes nothing new while another is there.


def test_the_machine_is_told_of_one_incarnation() -> None:
    machine = CacheMachine(Limits())
    machine.worker_ready(view("a", 1, 90), 0.0)
    machine.worker_ready(view("b", 2, 10), 0.0)

    def sent_to() -> str:
        machine.submit([Append(AppendKind.PREFILL, "", PROMPT)], 0.0)
        ((worker_id, _, _),) = machine.take_effects().commands
        return worker_id

    machine.worker_suspected("a", 7, suspect=True)
    assert sent_to() == "a", "that was another incarnation"
    machine.worker_suspected("a", 1, suspect=True)
    assert sent_to() == "b"
    machine.worker_suspected("a", 1, suspect=False)
    assert sent_to() == "a", "both have the prefix by now, and it has more room"


# Against a plain model of what workers have of a prefix, and of what is queued.

HOLDERS = 3
VOCAB = 3


def numbered(number: int) -> WorkerView:
    return WorkerView(f"worker-{number}", 1, 16, 10_000, 10_000, 10_000 - number)


class Model:
    """Every prefix that was ever computed, as it is, with its last holders: the latest first."""

    def __init__(self) -> None:
        self.holders: dict[tuple[bytes, tuple[int, ...]], list[WorkerView]] = {}

    def record(self, tokens: Sequence[int], worker: WorkerView, salt: bytes) -> None:
        for end in range(GRAIN, len(tokens) + 1, GRAIN):
            known = self.holders.setdefault((salt, tuple(tokens[:end])), [])
            known[:] = [worker, *(each for each in known if each is not worker)][:HOLDERS]

    def held(self, tokens: Sequence[int], salt: bytes) -> dict[WorkerView, int]:
        found: dict[WorkerView, int] = {}
        for end in range(GRAIN, len(tokens) + 1, GRAIN):
            holders = self.holders.get((salt, tuple(tokens[:end])), [])
            if not holders:
                break
            found |= dict.fromkeys(holders, end)
        return found


def any_tokens(rng: random.Random) -> list[int]:
    """Of few kinds, so that prefixes are common."""
    return [token for _ in range(rng.randint(0, 4)) for token in [rng.randrange(VOCAB)] * GRAIN] + [
        7
    ] * rng.randint(1, 9)


@pytest.mark.parametrize("seed", range(20))
def test_it_chooses_as_the_plain_model_does(seed: int) -> None:
    rng = random.Random(seed)
    workers, model = Workers(), Model()
    views = [numbered(number) for number in range(rng.randint(1, 5))]
    for worker in views:
        workers.add(worker)
    for caller in range(1, 120):
        tokens, salt = any_tokens(rng), rng.choice((b"", b"", b"other"))
        held = model.held(tokens, salt)
        known = {(worker.worker_id, worker.epoch): count for worker, count in held.items()}
        assert workers.affinity.held(tokens, salt) == known

        def total(worker: WorkerView, length: int = len(tokens), held: dict[WorkerView, int] = held) -> int:
            return worker.load.total_for(max(length - held.get(worker, 0), 1))

        chosen = workers.choose(tokens, salt)
        assert chosen is min(views, key=lambda worker: (total(worker), -worker.headroom))
        assert workers.choose(tokens, salt) is chosen, "asked again, it says the same"
        change, computes = rng.random(), rng.choice((chosen, *views))
        if change < 0.7:
            workers.affinity.record(tokens, computes, salt)
            model.record(tokens, computes, salt)
        if rng.random() < 0.6:
            load = rng.choice(views).load
            queued = forward_for(caller)
            load.enter(queued, rng.randint(1, 60), 1, Priority.NORMAL, math.inf, caller - 0.1)
            if rng.random() < 0.5:
                load.leave([queued], float(caller), End.ANSWERED)


def forward_for(caller: int) -> Operation:
    return command_of(SentForward(0, 1, 0, Append(AppendKind.PREFILL, "", ()), caller=caller))


def test_a_hot_prefix_is_not_tied_to_one_worker() -> None:
    """64 callers at once, whose prompts have one prefix. Three of four workers compute it again."""
    placement, prefix = Workers(), [1] * 512
    views = [numbered(number) for number in range(4)]
    for worker in views:
        placement.add(worker)
    placement.affinity.record(prefix, views[0])
    computed = dict.fromkeys(views, 0)
    for caller in range(1, 65):
        tokens = [*prefix, *([caller + 1] * 64)]
        chosen = placement.choose(tokens)
        held = placement.affinity.held(tokens).get((chosen.worker_id, chosen.epoch), 0)
        queued = forward_for(caller)
        chosen.load.enter(queued, len(tokens) - held, 1, Priority.NORMAL, math.inf, 0.0)
        computed[chosen] += len(tokens) - held
        placement.affinity.record(tokens, chosen)
    # A quarter of all that is computed, and at most one prompt more than another.
    assert max(computed.values()) <= (64 * 64 + 3 * 512) / 4 + (512 + 64)


def test_replays_that_are_read_from_disk_do_not_refuse_others() -> None:
    """Before, each of their tokens counted as one that is computed, for minutes."""

    def accepts_a_prompt(reused_tokens: int) -> bool:
        load = WorkerLoad()
        for number in range(200):
            # Ten milliseconds a token; half of the prompts wait for another one.
            others = [forward_for(1000 + n) for n in range(number % 2)]
            for forward in (*others, forward_for(number + 1)):
                load.enter(forward, 99, 1, Priority.NORMAL, 1000.0, number * 10.0)
            load.leave([*others, forward], number * 10.0 + 1 + number % 2, End.ANSWERED)
            load.replayed(32_000, reused_tokens)
        replay, prompt = forward_for(1), forward_for(2)
        load.enter(replay, 32_000, 0, Priority.NORMAL, 1000.0, 5000.0, is_replay=True)
        prompt.deadline_s = 5000.0 + 400
        try:
            load.enter(prompt, 20_000, 1, Priority.NORMAL, 1000.0, 5000.0)
        except Overloaded:
            return False
        return True

    assert accepts_a_prompt(31_984) and not accepts_a_prompt(0)
