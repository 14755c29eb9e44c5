"""The step loop with a table of adapters: random operations, and bugs that they have to find."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from tests.workers.adapted_callers import Callers
from tests.workers.adapted_steps import Adapted
from workers.adapters.table import AdapterTable
from workers.answers import Answers
from workers.decodes import ADAPTER, Decodes, Mask
from workers.models.decoder import Decoder
from workers.models.lora import PackedLora
from workers.operations import AdapterRead
from workers.other_commands import required
from workers.scheduler import Scheduler
from workers.step_loop import StepLoop

torch.set_num_threads(1)

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
    # Any one of them finds each of the bugs below.
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


def prelaunched_forwards_do_not_count_as_use(patch: pytest.MonkeyPatch) -> None:
    def adapters(self: Scheduler) -> set[int]:
        queued = {one.adapter for one in self._forwards.values() if not one.is_prelaunched}
        parts = [self.running, *self._waiting._parts]
        return queued.union(*[part.columns[ADAPTER, ~part.prelaunched].tolist() for part in parts])

    patch.setattr(Scheduler, "adapters", adapters)


def only_forwards_that_have_begun_count_as_use(patch: pytest.MonkeyPatch) -> None:
    def adapters(self: Scheduler) -> set[int]:
        queued = {one.adapter for one in self._forwards.values() if one.has_begun}
        return queued | set(self.running.column(ADAPTER))

    patch.setattr(Scheduler, "adapters", adapters)


def the_reading_thread_changes_slots_itself(patch: pytest.MonkeyPatch) -> None:
    """While a step is launched."""
    submit = StepLoop.submit

    def at_once(self: StepLoop, commands: Any) -> None:
        for command in commands:
            if isinstance(command, AdapterRead):
                table = required(self._adapters)
                table.read(command)
                if table.is_full:
                    table._place(set)
            else:
                submit(self, [command])

    patch.setattr(StepLoop, "submit", at_once)


def a_prelaunched_forward_keeps_the_slot_of_the_one_before(patch: pytest.MonkeyPatch) -> None:
    """Its adapter may be in another one by then."""
    follow = Answers._follow

    def with_any_slot(_self: object, decodes: Decodes) -> Mask:
        return np.ones(decodes.size, np.bool_)

    def followed(self: Answers, *arguments: Any) -> None:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(AdapterTable, "assign_slots", with_any_slot)
            follow(self, *arguments)

    patch.setattr(Answers, "_follow", followed)


def what_waits_is_not_woken(patch: pytest.MonkeyPatch) -> None:
    place = AdapterTable._place

    def silent(self: AdapterTable[Any], in_use: Any) -> None:
        before = self._has_changed
        place(self, in_use)
        self._has_changed = before

    patch.setattr(AdapterTable, "_place", silent)


def the_loop_sleeps_while_an_adapter_waits_for_a_slot(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(AdapterTable, "has_work", property(lambda self: bool(self._results)))


def who_waits_for_an_evicted_adapter_is_forgotten(patch: pytest.MonkeyPatch) -> None:
    """It was read for those that waited, and evicted before they ran."""
    advance = AdapterTable.advance

    def once(self: AdapterTable[Any], in_use: Any) -> Any:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(AdapterTable, "_want", lambda *_: None)
            return advance(self, in_use)

    patch.setattr(AdapterTable, "advance", once)


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
        (prelaunched_forwards_do_not_count_as_use, "a slot was changed that a forward uses"),
        (only_forwards_that_have_begun_count_as_use, "a slot was changed that a forward uses"),
        (the_reading_thread_changes_slots_itself, "a slot was changed"),
        (a_prelaunched_forward_keeps_the_slot_of_the_one_before, "with another adapter"),
        (what_waits_is_not_woken, "nothing will wake|never ended"),
        (the_loop_sleeps_while_an_adapter_waits_for_a_slot, "nothing will wake"),
        (who_waits_for_an_evicted_adapter_is_forgotten, "nothing will wake|never ended"),
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
