"""Loads a model on all ranks of a group, with pages and slots for adapters: what rank 0 does for that."""

from __future__ import annotations

import dataclasses
import itertools
import logging
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from workers.adapters.errors import AdapterError
from workers.adapters.slots import LoadedAdapter
from workers.adapters.table import AdapterTable
from workers.executors.loading import load_served, read_source
from workers.executors.lora_slots import ModelSlots, on_made
from workers.executors.memory import LoraLimits, StepLimits, allocate_pages, gpu_num_pages
from workers.executors.replacement import Served
from workers.kv.sizing import choose_num_pages
from workers.kv.tensors import KvTensors
from workers.models.errors import ModelError
from workers.models.model import Model, ModelDescription, state_sizes
from workers.models.weights import Progress
from workers.operations import AdapterSource
from workers.runners.base import DeviceLostError, Runner
from workers.runners.tensor_parallel import RankedLora, RankGroup

_log = logging.getLogger(__name__)

OnAll = Callable[[ModelDescription], ModelDescription]
"""Waits until all ranks have loaded a model. Takes what rank 0 has loaded; returns what all have."""


def connect(ranks: RankGroup, device: torch.device) -> None:
    """Let the ranks meet. Each GPU is the next one after that of the rank before."""
    # A directory that only this user can enter; the file in it says where the ranks listen.
    with tempfile.TemporaryDirectory(prefix="quire-ranks-") as place:
        rendezvous = Path(place) / "store"
        with ranks.asking("connect", rendezvous=str(rendezvous), device=str(device)):
            ranks.collectives.connect(rendezvous, device)
    _log.info("%d ranks run the model together", ranks.ranks)


def load_on_all(
    ranks: RankGroup | None,
    question: str,
    directory: Path,
    dtype: str,
    device: torch.device,
    progress: Progress | None,
    *,
    quantization: str | None,
    rounds_rows: bool,
    **others: Any,
) -> tuple[Model, ModelDescription]:
    """Load this rank's part of a model while the other ranks load theirs. Raises as `load_served` does.

    Args:
        ranks: None: there are no others, and the part is all of it.
        question: "load", or "read_weights" for others to replace those that are served.
        directory: The model; the rest: see `load_served`.
    """
    group = None if ranks is None else ranks.collectives
    of_weights: dict[str, Any] = {"quantization": quantization, "rounds_rows": rounds_rows}
    with _loading(ranks, question, directory, dtype, of_weights) as on_all:
        model, description = load_served(
            directory, dtype, device, progress, group=group, **of_weights, **others
        )
        return model, on_all(description)


@contextmanager
def _loading(
    ranks: RankGroup | None,
    question: str,
    directory: Path,
    dtype: str,
    of_weights: Mapping[str, Any],
) -> Iterator[OnAll]:
    """Let the other ranks read their parts while the body of the `with` reads that of rank 0."""
    if ranks is None:
        yield lambda description: description
        return
    details: dict[str, object] = {"dtype": dtype, **of_weights}
    if question == "read_weights":
        # On the one thread that reads.
        ranks.weights_read += 1
        details["number"] = ranks.weights_read
    else:
        details["threads"] = torch.get_num_threads()
    with ranks.asking(question, directory=str(directory), **details) as answers:

        def on_all(description: ModelDescription) -> ModelDescription:
            found = answers()
            if any(answer["fingerprint"] != description.fingerprint for answer in found):
                raise ModelError(f"{directory}: the files have changed while the model was loaded")
            weight_bytes = description.weight_bytes + sum(answer["weight_bytes"] for answer in found)
            return dataclasses.replace(description, weight_bytes=weight_bytes)

        yield on_all


class RankedSlots:
    """Rank 0's `Slots` for adapters. The other ranks have as many, and do to them what is done to these."""

    def __init__(self, own: ModelSlots, ranks: RankGroup) -> None:
        """Lead with the slots of rank 0."""
        self._own, self._ranks = own, ranks

    @property
    def max_lora_slots(self) -> int:
        return self._own.max_lora_slots

    def find_room(self, limits: LoraLimits) -> None:
        """Agree on as many slots as the rank with the least memory has room for. Raises AdapterError."""
        with self._ranks.asking("lora_room", limits=dataclasses.asdict(limits)) as answers:
            own = self._own.find_room()
            slots = min(own, *(answer["slots"] for answer in answers()))
        with self._ranks.asking("agree_lora", slots=slots):
            self._own.agree(slots)

    def make_slots(self) -> int:
        """See `Slots.make_slots`. Graphs are captured by all ranks at once, so the others are told before.

        Raises DeviceLostError where the others may have made slots and this rank has not.
        """
        self._ranks.set_lora(-1, -1)
        try:
            return self._own.make_slots()
        except AdapterError as error:
            raise DeviceLostError(f"slots for adapters are not on all ranks: {error}") from error

    def fits(self, packed: RankedLora) -> bool:
        return self._own.fits(packed.packed)

    def set_lora(self, slot: int, packed: RankedLora | None) -> None:
        self._own.set_lora(slot, None if packed is None else packed.packed)
        self._ranks.set_lora(slot, -1 if packed is None else packed.key)


def ranked_adapters(
    served: Served, limits: LoraLimits, ranks: RankGroup, runner: Runner
) -> AdapterTable[RankedLora]:
    """The adapters of a model that is split over ranks."""
    slots = RankedSlots(ModelSlots(served, limits, on_made(runner)), ranks)
    keys = itertools.count()

    def read(source: AdapterSource) -> LoadedAdapter[RankedLora]:
        slots.find_room(limits)
        key = next(keys)
        # The other ranks read it after this one, so that all have the same files.
        adapter = read_source(source, served.adapted, limits)
        with ranks.asking(
            "read_adapter",
            directory=source.directory,
            digest=source.digest,
            key=key,
            limits=dataclasses.asdict(limits),
        ) as answers:
            packed = served.adapted.pack_lora(adapter.weights)
            answers()
        return LoadedAdapter(RankedLora(packed, key), adapter.rank, ranks.ranks * packed.bytes)

    return AdapterTable(slots, read, limits.max_bytes)


def ranked_pages(
    model: Model,
    description: ModelDescription,
    kv_pages: int | None,
    limits: StepLimits,
    ranks: RankGroup,
    kv_dtype: str,
) -> KvTensors:
    """As many pages on each rank as fit on all. Raises KvSizingError, and ModelError as `allocate_pages`."""
    max_seq_len, step = description.max_seq_len, dataclasses.asdict(limits)
    if model.device.type != "cuda":
        # The ranks share the memory.
        own = state_sizes(model, kv_dtype)
        per_page, fixed = ranks.ranks * own.bytes_per_page, ranks.ranks * own.fixed_bytes
        num_pages = choose_num_pages(kv_pages, per_page, fixed)
    else:
        sizes = {"max_seq_len": max_seq_len, "vocab_size": description.vocab_size}
        with ranks.asking("count_pages", kv_pages=kv_pages, limits=step, **sizes) as answers:
            own_pages = gpu_num_pages(model, kv_pages, limits, **sizes)
            num_pages = min(own_pages, *(answer["pages"] for answer in answers()))
    told = {"pages": num_pages, "limits": step, "max_seq_len": max_seq_len, "kv_dtype": kv_dtype}
    with ranks.asking("allocate_pages", **told):
        kv = allocate_pages(model, num_pages, kv_dtype)
    kv.others = ranks
    return kv
