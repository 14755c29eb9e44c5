"""The step loop with a table of adapters: random operations."""

from __future__ import annotations

import pytest

from tests.workers.adapted_callers import Callers
from tests.workers.adapted_steps import Adapted

SEEDS, ROUNDS = range(8), 150


@pytest.fixture(scope="module")
def adapted(tmp_path_factory: pytest.TempPathFactory) -> Adapted:
    return Adapted(tmp_path_factory.mktemp("adapted"))


def run(adapted: Adapted, seed: int) -> Callers:
    callers = Callers(adapted, seed)
    for _ in range(ROUNDS):
        callers.act()
    callers.finish()
    return callers


# Any one of them finds an eviction of what is in use, and a slot that keeps its first adapter.
@pytest.mark.parametrize(
    "seed", [pytest.param(seed, marks=pytest.mark.thorough if seed else ()) for seed in SEEDS]
)
def test_every_forward_ends_with_the_tokens_of_its_version(adapted: Adapted, seed: int) -> None:
    callers = run(adapted, seed)
    metrics = callers.worker.table.metrics()
    assert callers.answered > ROUNDS // 2 and sum(one.evictions for one in metrics) > 10
