"""Where new sequences go, by what workers have of a prefix and what is queued: against a plain model."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from service.caches.requests import Priority
from service.caches.worker_load import End
from service.caches.workers import PrefixAffinity, Workers, WorkerView

GRAIN = 16
HOLDERS = 3
VOCAB = 3


def view(number: int) -> WorkerView:
    return WorkerView(f"worker-{number}", 1, 16, 10_000, 10_000, 10_000 - number)


class Model:
    """Every prefix that was ever computed, as it is, with its last holders: the latest first."""

    def __init__(self) -> None:
        self.holders: dict[tuple[bytes, tuple[int, ...]], list[WorkerView]] = {}

    def record(self, tokens: Sequence[int], worker: WorkerView, salt: bytes) -> None:
        for end in range(GRAIN, len(tokens) + 1, GRAIN):
            known = self.holders.setdefault((salt, tuple(tokens[:end])), [])
            known[:] = [worker, *(each for each in known if each is not worker)][:HOLDERS]

    def forget(self, tokens: Sequence[int], worker: WorkerView, salt: bytes) -> None:
        for end in range(GRAIN, len(tokens) + 1, GRAIN):
            key = (salt, tuple(tokens[:end]))
            left = [each for each in self.holders.pop(key, []) if each is not worker]
            if left:
                self.holders[key] = left

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


@pytest.mark.parametrize("seed", range(50))
def test_it_chooses_as_the_plain_model_does(seed: int) -> None:
    rng = random.Random(seed)
    workers, model = Workers(), Model()
    views = [view(number) for number in range(rng.randint(1, 5))]
    for worker in views:
        workers.add(worker)
    for caller in range(1, 120):
        tokens, salt = any_tokens(rng), rng.choice((b"", b"", b"other"))
        held = model.held(tokens, salt)
        known = {(worker.worker_id, worker.epoch): count for worker, count in held.items()}
        assert workers.affinity.held(tokens, salt) == known

        def total(worker: WorkerView, length: int = len(tokens), held: dict[WorkerView, int] = held) -> int:
            return worker.load.estimate(0, max(length - held.get(worker, 0), 1), 1, Priority.NORMAL).total

        chosen = workers.choose(tokens, salt)
        assert chosen is min(views, key=lambda worker: (total(worker), -worker.headroom))
        assert workers.choose(tokens, salt) is chosen, "asked again, it says the same"
        change = rng.random()
        if change < 0.7:
            workers.affinity.record(tokens, chosen, salt)
            model.record(tokens, chosen, salt)
        elif change < 0.8:
            workers.affinity.forget(tokens, chosen, salt)
            model.forget(tokens, chosen, salt)
        if rng.random() < 0.6:
            load = rng.choice(views).load
            work = load.estimate(caller, rng.randint(1, 60), 1, Priority.NORMAL, enters=True)
            if rng.random() < 0.5:
                load.leave([(work, caller - 0.1)], float(caller), End.ANSWERED)


def test_the_holders_of_a_prefix_are_few() -> None:
    affinity = PrefixAffinity(holders=2)
    for number in (1, 2, 3, 2):
        affinity.record([5] * GRAIN, view(number))
    assert affinity.held([5] * GRAIN) == {("worker-2", 1): GRAIN, ("worker-3", 1): GRAIN}


def computed_in_turns(workers: int, *, remembers: bool) -> int:
    """The tokens that the busiest worker computes: 64 callers at once, whose prompts have one prefix.

    remembers: as it is. Otherwise as it was: one holder takes all that it has room for.
    """
    placement, prefix = Workers(), [1] * 512
    views = [view(number) for number in range(workers)]
    for worker in views:
        placement.add(worker)
    placement.affinity.record(prefix, views[0])
    computed = dict.fromkeys(views, 0)
    for caller in range(1, 65):
        tokens = [*prefix, *([caller + 1] * 64)]
        chosen = placement.choose(tokens) if remembers else views[0]
        held = placement.affinity.held(tokens).get((chosen.worker_id, chosen.epoch), 0)
        chosen.load.estimate(caller, len(tokens) - held, 1, Priority.NORMAL, enters=True)
        computed[chosen] += len(tokens) - held
        placement.affinity.record(tokens, chosen)
    return max(computed.values())


def test_a_hot_prefix_is_not_tied_to_one_worker() -> None:
    """With four workers all is done in less than half the time, though they compute the prefix again."""
    alone, shared = computed_in_turns(4, remembers=False), computed_in_turns(4, remembers=True)
    assert alone == 64 * 64
    # A quarter of all that is computed, and at most one prompt more than another.
    assert shared <= (64 * 64 + 3 * 512) / 4 + (512 + 64) < alone / 2
