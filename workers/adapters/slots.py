"""Manages the adapters in the slots of a model, and evictions.

Used by the thread of the step loop.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from quire.v1.types_pb2 import LoraAdapterMetrics

from workers.adapters.errors import AdapterError
from workers.operations import AdapterSource

_Weights = TypeVar("_Weights")
_Taken_contra = TypeVar("_Taken_contra", contravariant=True)


@dataclass(frozen=True, slots=True)
class LoadedAdapter(Generic[_Weights]):
    """An adapter in the model's form, and its data for reports."""

    weights: _Weights
    rank: int
    size_bytes: int


class Slots(Protocol[_Taken_contra]):
    """The part of a model that holds adapters."""

    @property
    def max_lora_slots(self) -> int:
        """The number of slots that exist or can be made."""

    def make_slots(self) -> int:
        """Makes the slots, unless they exist. Returns their number.

        Raises AdapterError if there is no memory for them.
        """

    def fits(self, packed: _Taken_contra) -> bool:
        """Whether an adapter fits the served weights, if it depends on them."""

    def set_lora(self, slot: int, packed: _Taken_contra | None) -> None:
        """Puts an adapter into a slot. None: empties it."""


@dataclass(slots=True, eq=False)
class KnownAdapter(Generic[_Weights]):
    """An adapter that forwards can name. `ResidentAdapters` sets its slot and weights."""

    source: AdapterSource
    metrics: LoraAdapterMetrics
    slot: int = -1
    # None: it is not resident.
    weights: _Weights | None = None
    # The op_ids of waiting commands to load it.
    commands: list[int] = field(default_factory=list)


class ResidentAdapters(Generic[_Weights]):
    """Owner of the model's slots."""

    def __init__(self, model: Slots[_Weights], max_bytes: int) -> None:
        """`max_bytes`: the limit for all resident adapters."""
        self._model = model
        self._max_bytes = max_bytes
        # None until the first adapter comes, so that slots take no memory before.
        self._num_slots: int | None = None
        self._free_slots: list[int] = []
        # By number, in order of their last use.
        self._resident: OrderedDict[int, KnownAdapter[_Weights]] = OrderedDict()
        self._used_bytes = 0

    @property
    def max_adapters(self) -> int:
        """The most adapters that can be resident at a time."""
        return self._model.max_lora_slots if self._num_slots is None else self._num_slots

    def used(self, known: KnownAdapter[_Weights]) -> None:
        """Notes that a forward uses a resident adapter."""
        self._resident.move_to_end(known.source.number)

    def add(
        self,
        known: KnownAdapter[_Weights],
        loaded: LoadedAdapter[_Weights],
        in_use: Callable[[], Collection[int]],
    ) -> bool:
        """Puts an adapter into a slot, after evicting others if necessary. False: there is no room yet.

        Raises AdapterError if there can never be room.
        """
        pinned = [one for one in self._resident.values() if one.source.pinned]
        pinned_bytes = sum(one.metrics.size_bytes for one in pinned)
        if len(pinned) == self.max_adapters or pinned_bytes + loaded.size_bytes > self._max_bytes:
            # Checked before others are evicted in vain.
            raise AdapterError("the memory for adapters (max_lora_adapters, max_lora_bytes) is too small")
        if self._num_slots is None:
            num_slots = self._model.make_slots()
            self._free_slots, self._num_slots = list(range(num_slots)), num_slots
        used = in_use()
        while not self._free_slots or self._used_bytes + loaded.size_bytes > self._max_bytes:
            evictable = (one for one in self._resident.values() if not one.source.pinned)
            victim = next((one for one in evictable if one.source.number not in used), None)
            if victim is None:
                return False
            victim.metrics.evictions += 1
            self.remove(victim)
        slot = self._free_slots.pop()
        self._model.set_lora(slot, loaded.weights)
        known.slot, known.weights = slot, loaded.weights
        known.metrics.rank, known.metrics.size_bytes = loaded.rank, loaded.size_bytes
        known.metrics.loads += 1
        known.metrics.resident = True
        self._used_bytes += loaded.size_bytes
        self._resident[known.source.number] = known
        return True

    def remove(self, known: KnownAdapter[_Weights]) -> None:
        """Empties the slot of a resident adapter."""
        self._model.set_lora(known.slot, None)
        self._free_slots.append(known.slot)
        self._used_bytes -= known.metrics.size_bytes
        known.slot, known.weights, known.metrics.resident = -1, None, False
        del self._resident[known.source.number]

    def move(self) -> None:
        """Puts resident adapters into the slots of a model that has replaced another one, if they fit it.

        The others are dropped: no forward uses them, and the next one that needs one reads it again.
        """
        if self._num_slots is not None:
            num_slots = self._model.make_slots()
            assert num_slots == self._num_slots, "the other model has as many slots"
        for known in list(self._resident.values()):
            assert known.weights is not None
            if self._model.fits(known.weights):
                self._model.set_lora(known.slot, known.weights)
            else:
                self.remove(known)

    def fits(self, loaded: LoadedAdapter[_Weights]) -> bool:
        """Whether a loaded adapter fits the served weights."""
        return self._model.fits(loaded.weights)
