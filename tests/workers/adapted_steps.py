"""A step loop with adapters that notes each breach of an invariant, and models that adapters are merged into.

The test decides when a reading thread ends, also in the middle of a step.
"""

from __future__ import annotations

import dataclasses
import queue
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.adapter_factory import make_adapter, merge
from tests.commands import Command
from tests.model_factory import TinyModel, load_decoder, make_model
from tests.workers import stepping
from workers.adapters.adapter import read_adapter
from workers.adapters.slots import LoadedAdapter
from workers.adapters.table import AdapterTable
from workers.decodes import NO_DECODES, Column, Decodes
from workers.executors.engine import Engine
from workers.kv.table import KvTable
from workers.models.lora import PackedLora
from workers.models.model import new_pages
from workers.operations import AdapterSource, Chunk, Forward, Reset, Result
from workers.runners.eager import EagerRunner

RANK, PAGES, LONGEST_TOKENS = 4, 300, 150


class Adapted:
    """A model, adapters, and the models that they are merged into. Index 0: the model itself."""

    def __init__(self, directory: Path, adapters: int = 4) -> None:
        self.model = make_model(directory / "model", TinyModel(seed=3))
        self.adapters = [
            make_adapter(directory / f"{n}", self.model, n, rank=RANK) for n in range(1, adapters + 1)
        ]
        merged = [merge(directory / f"merged-{each.name}", self.model, each) for each in self.adapters]
        self._oracles: list[PreTrainedModel] = [
            AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager")
            for path in (self.model, *merged)
        ]

    def logits(self, index: int, tokens: Sequence[int]) -> torch.Tensor:
        """Of every position, [tokens, vocabulary]."""
        with torch.inference_mode():
            logits: torch.Tensor = self._oracles[index](torch.tensor([tokens]), use_cache=False).logits[0]
        return logits


class Slots:
    """The slots of a model, and the version that each holds. Says what is changed while it is in use."""

    def __init__(self, model: Any, slots: int, breach: Callable[[str], None]) -> None:
        model.allocate_lora(slots, RANK)
        self.max_lora_slots = slots
        self.holds: dict[int, int] = {}
        self.in_use: Callable[[], set[int]] = set
        self._model = model
        self._breach = breach

    def make_slots(self) -> int:
        return self.max_lora_slots

    def fits(self, packed: tuple[int, PackedLora]) -> bool:
        return True

    def set_lora(self, slot: int, packed: tuple[int, PackedLora] | None) -> None:
        if slot in self.in_use():
            self._breach("a slot was changed that a forward uses")
        self.holds.pop(slot, None)
        if packed is not None:
            self.holds[slot] = packed[0]
        self._model.set_lora(slot, None if packed is None else packed[1])


class Worker(stepping.Worker):
    """A worker with adapters, whose reading threads the test runs."""

    def __init__(self, adapted: Adapted, dice: random.Random) -> None:
        self.breaches: list[str] = []
        self.threads: list[Callable[[], None]] = []
        self._dice = dice
        self._model = load_decoder(adapted.model, pack=True)
        self._is_asleep = False
        self.slots = Slots(self._model, dice.randint(1, 3), self.breaches.append)
        sizes = {self._read(AdapterSource(1, str(path))).size_bytes for path in adapted.adapters}
        # How many adapters have room.
        self.room = max(1, self.slots.max_lora_slots - dice.choice([0, 0, 1]))
        self.table = AdapterTable[tuple[int, PackedLora]](
            self.slots, self._read, self.room * max(sizes), self.threads.append
        )
        kv = new_pages(self._model, PAGES)
        engine = Engine(KvTable(kv.num_pages, kv.page_size), kv, EagerRunner(self._model, kv))
        # Most prompts take several steps.
        limits = dice.choice([(16, 4, 8), (40, 8, 16)])
        super().__init__(engine, limits=limits, max_seq_tokens=LONGEST_TOKENS, adapters=self.table)
        self.loop._wait = self._sleep  # type: ignore[method-assign]
        self.slots.in_use = self._slots_in_use

    def _slots_in_use(self) -> set[int]:
        scheduler = self.loop._scheduler
        columns = [scheduler.running, *scheduler._waiting._parts]
        in_columns = {slot for decodes in columns for slot in decodes.column(Column.LORA_SLOT) if slot >= 0}
        return in_columns | {one.lora_slot for one in scheduler._queues.forwards.values() if one.adapter}

    def _read(self, source: AdapterSource) -> LoadedAdapter[tuple[int, PackedLora]]:
        model = self._model.adaptable()
        adapter = read_adapter(Path(source.directory), model, max_rank=RANK, max_bytes=1 << 20)
        packed = self._model.pack_lora(adapter.weights)
        return LoadedAdapter((source.number, packed), adapter.rank, packed.bytes)

    def _sleep(self) -> Any:
        try:
            return self.loop._inbox.get(0.0)
        except queue.Empty:
            self._is_asleep = True
            return (), 0

    def read_one(self) -> None:
        """A reading thread ends."""
        if self.threads:
            self.threads.pop(0)()

    def _note(self, chunks: Sequence[Chunk], decodes: Decodes = NO_DECODES) -> Decodes:
        # An error here would be the failure of a step.
        self._check(chunks, decodes)
        before = dict(self.slots.holds)
        if self._dice.random() < 0.5:
            self.read_one()
        done = self._execute(chunks, decodes)
        if self.slots.holds != before:
            self.breaches.append("a slot was changed while a step was launched")
        return done

    def _check(self, chunks: Sequence[Chunk], decodes: Decodes) -> None:
        used = [(chunk.forward.lora_slot, chunk.forward.adapter) for chunk in chunks]
        used += zip(decodes.column(Column.LORA_SLOT), decodes.column(Column.ADAPTER), strict=True)
        for slot, adapter in used:
            if (self.slots.holds.get(slot) if slot >= 0 else 0) != adapter:
                self.breaches.append("a step was launched with another adapter")

    def round(self, *commands: Command | Reset) -> list[Result]:
        if commands:
            own = [dataclasses.replace(one) if isinstance(one, Forward) else one for one in commands]
            self.loop.submit(self._sent(own))
        self._is_asleep = False
        self.loop.take()
        if not self._is_asleep:
            self.loop.flush()
            self.loop.step()
            self.loop.flush()
        elif self.loop.operations_in_flight and not self.threads:
            self.breaches.append("the loop sleeps, and nothing will wake what waits")
        assert not self.breaches, self.breaches[0]
        self.engine.kv_table.check_integrity()
        results = [one for result in self._results for one in self._received(result)]
        self._results.clear()
        return results
