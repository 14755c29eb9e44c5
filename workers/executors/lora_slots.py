"""The slots of a model for adapters, whose memory is taken when the first adapter comes.

On a GPU a slot takes the memory of the largest adapter, whatever is in it. It comes from what
gpu_memory_utilization leaves. Elsewhere adapters bring their own memory.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch

from workers.adapters.errors import AdapterError
from workers.adapters.slots import LoadedAdapter
from workers.adapters.table import AdapterTable
from workers.executors.loading import read_source
from workers.executors.memory import LoraLimits
from workers.executors.replacement import Served
from workers.models.adapted import Adapted
from workers.models.lora import PackedLora
from workers.operations import AdapterSource
from workers.runners.base import Runner
from workers.runners.cuda_graph import CudaGraphRunner

_log = logging.getLogger(__name__)

# Free memory that is kept for steps with adapters, and for their graphs.
_RESERVE_BYTES = 512 << 20


def most_slots(slot_bytes: int, limits: LoraLimits) -> int:
    """How many slots of so many bytes the limits allow; each GPU has `max_bytes`."""
    return min(limits.max_adapters, limits.max_bytes // slot_bytes)


class ModelSlots:
    """The slots of a model, or of a rank's part of it: see `workers.adapters.slots.Slots`."""

    def __init__(self, served: Served, limits: LoraLimits, on_made: Callable[[], None]) -> None:
        """`on_made`: called after slots were made."""
        self._served, self._limits, self._on_made = served, limits, on_made
        self._slot_bytes = self._model.lora_slot_bytes(limits.max_rank)
        self.max_lora_slots = limits.max_adapters
        if self._model.device.type == "cuda":
            self.max_lora_slots = most_slots(self._slot_bytes, limits)
            if not self.max_lora_slots:
                _log.warning("no adapter can be loaded: %s", self._too_large)

    @property
    def _model(self) -> Adapted:
        return self._served.adapted

    @property
    def _too_large(self) -> str:
        mib = self._slot_bytes >> 20
        rank = self._limits.max_rank
        return f"one of rank {rank} takes {mib} MiB: raise max_lora_bytes or lower max_lora_rank"

    def find_room(self) -> int:
        """How many slots the device has room for, as long as there are none. On any thread.

        Raises AdapterError if it is none.
        """
        if not self.max_lora_slots:
            raise AdapterError(self._too_large)
        if self._model.max_lora_slots or self._model.device.type != "cuda":
            return self.max_lora_slots
        free_bytes, _ = torch.cuda.mem_get_info(self._model.device)
        slots = min(self.max_lora_slots, (free_bytes - _RESERVE_BYTES) // self._slot_bytes)
        if slots <= 0:
            raise AdapterError(
                f"the GPU has {free_bytes >> 20} MiB left, and a slot for an adapter needs"
                f" {self._slot_bytes + _RESERVE_BYTES >> 20}: lower gpu_memory_utilization or max_lora_rank"
            )
        return slots

    def agree(self, slots: int) -> None:
        """Sets how many are made."""
        if not self._model.max_lora_slots:
            self.max_lora_slots = slots

    def make_slots(self) -> int:
        if not self._model.max_lora_slots:
            try:
                self._model.allocate_lora(self.max_lora_slots, self._limits.max_rank)
            except torch.OutOfMemoryError as error:
                raise AdapterError("the GPU has no memory left for adapters") from error
            self._on_made()
        return self._model.max_lora_slots

    def fits(self, packed: PackedLora) -> bool:
        return packed.made_for is None or packed.made_for() is self._model

    def set_lora(self, slot: int, packed: PackedLora | None) -> None:
        self._model.set_lora(slot, packed)


def on_made(runner: Runner | None) -> Callable[[], None]:
    """The callback when slots were made: a runner with graphs captures those of decodes with adapters."""
    return runner.capture_lora if isinstance(runner, CudaGraphRunner) else lambda: None


def adapter_table(served: Served, limits: LoraLimits, runner: Runner) -> AdapterTable[PackedLora]:
    """The adapters of a model that is not split."""
    slots = ModelSlots(served, limits, on_made(runner))

    def read(source: AdapterSource) -> LoadedAdapter[PackedLora]:
        slots.agree(slots.find_room())
        model = served.adapted
        adapter = read_source(source, model, limits)
        packed = model.pack_lora(adapter.weights, adapter.steering)
        return LoadedAdapter(packed, adapter.rank, packed.bytes)

    return AdapterTable(slots, read, limits.max_bytes)
