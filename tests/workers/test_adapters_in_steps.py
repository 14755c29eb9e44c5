"""The step loop with a table of adapters: random operations, and bugs that they have to find."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.workers.adapted_callers import Callers
from tests.workers.adapted_steps import Adapted
from workers.adapters.table import AdapterTable
from workers.models.decoder import Decoder
from workers.models.lora import PackedLora

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


def run_all(adapted: Adapted) -> None:
    for seed in SEEDS:
        run(adapted, seed)


@pytest.mark.parametrize(
    # Any one of them finds the bugs below.
    "seed",
    [pytest.param(seed, marks=pytest.mark.thorough if seed else ()) for seed in SEEDS],
)
def test_every_forward_ends_with_the_tokens_of_its_version(adapted: Adapted, seed: int) -> None:
    callers = run(adapted, seed)
    metrics = callers.worker.table.metrics()
    assert callers.answered > ROUNDS // 2 and sum(one.evictions for one in metrics) > 10


# Bugs.


def eviction_ignores_what_is_in_use(patch: pytest.MonkeyPatch) -> None:
    place = AdapterTable._place
    patch.setattr(AdapterTable, "_place", lambda self, _: place(self, set))


def the_loop_sleeps_while_an_adapter_waits_for_a_slot(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(AdapterTable, "has_work", property(lambda self: bool(self._results)))


def a_slot_keeps_its_first_adapter(patch: pytest.MonkeyPatch) -> None:
    set_lora = Decoder.set_lora
    filled: set[tuple[int, int]] = set()

    def once(self: Decoder, slot: int, packed: PackedLora | None) -> None:
        if packed is not None and (id(self), slot) not in filled:
            filled.add((id(self), slot))
            set_lora(self, slot, packed)

    patch.setattr(Decoder, "set_lora", once)


@pytest.mark.parametrize(
    ("plant", "found"),
    [
        (eviction_ignores_what_is_in_use, "a slot was changed that a forward uses"),
        (the_loop_sleeps_while_an_adapter_waits_for_a_slot, "nothing will wake"),
        (a_slot_keeps_its_first_adapter, "a token of another adapter"),
    ],
)
def test_a_planted_bug_is_found(
    plant: Callable[[pytest.MonkeyPatch], None],
    found: str,
    adapted: Adapted,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plant(monkeypatch)
    with pytest.raises(AssertionError, match=found):
        run_all(adapted)
