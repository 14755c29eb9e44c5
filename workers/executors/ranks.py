"""Loads a model on all ranks of a group, with pages and slots for adapters: what rank 0 does for that."""

from __future__ import annotations

import dataclasses
import itertools
import logging
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from workers.adapters.slots import LoadedAdapter
from workers.adapters.table import AdapterTable
from workers.executors.loading import read_source
from workers.executors.memory import LoraLimits, StepLimits, allocate_pages, gpu_lora_slots, gpu_num_pages
from workers.kv.sizing import choose_num_pages
from workers.kv.tensors import KvTensors
from workers.models.errors import ModelError
from workers.models.model import Model, ModelDescription, page_bytes
from workers.operations import AdapterSource
from workers.runners.tensor_parallel import LeadingSlots, RankedLora, RankGroup

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


@contextmanager
def loading(ranks: RankGroup | None, question: str, directory: Path, dtype: str) -> Iterator[OnAll]:
    """Let the other ranks read their parts while the body of the `with` reads that of rank 0.

    Args:
        ranks: None: there are no others.
        question: "load", or "read_weights" for others to replace those that are served.
        directory: The model.
        dtype: See `LlmExecutor.load`.
    """
    if ranks is None:
        yield lambda description: description
        return
    details: dict[str, object] = {"threads": torch.get_num_threads()}
    if question == "read_weights":
        # On the one thread that reads.
        ranks.weights_read += 1
        details = {"number": ranks.weights_read}
    with ranks.asking(question, directory=str(directory), dtype=dtype, **details) as answers:

        def on_all(description: ModelDescription) -> ModelDescription:
            found = answers()
            if any(answer["fingerprint"] != description.fingerprint for answer in found):
                raise ModelError(f"{directory}: the files have changed while the model was loaded")
            weight_bytes = description.weight_bytes + sum(answer["weight_bytes"] for answer in found)
            return dataclasses.replace(description, weight_bytes=weight_bytes)

        yield on_all


def ranked_adapters(model: Model, limits: LoraLimits, ranks: RankGroup) -> AdapterTable[RankedLora]:
    """Make slots for adapters on all ranks. Raises KvSizingError if there is no memory for one."""
    modules, slots = model.lora_modules(), limits.max_adapters
    if model.device.type == "cuda":
        slots, _ = gpu_lora_slots(model, limits)
    with ranks.asking("allocate_lora", slots=slots, max_rank=limits.max_rank):
        model.allocate_lora(slots, limits.max_rank)
    keys = itertools.count()

    def read(source: AdapterSource) -> LoadedAdapter[RankedLora]:
        key = next(keys)
        # The other ranks read it after this one, so that all have the same files.
        adapter = read_source(source, modules, limits)
        with ranks.asking(
            "read_adapter",
            directory=source.directory,
            digest=source.digest,
            key=key,
            limits=dataclasses.asdict(limits),
        ) as answers:
            packed = model.pack_lora(adapter.weights)
            answers()
        return LoadedAdapter(RankedLora(packed, key), adapter.rank, ranks.ranks * packed.bytes)

    return AdapterTable(LeadingSlots(model, ranks), read, limits.max_bytes)


def ranked_pages(
    model: Model, description: ModelDescription, kv_pages: int | None, limits: StepLimits, ranks: RankGroup
) -> KvTensors:
    """As many pages on each rank as fit on all. Raises KvSizingError."""
    max_seq_len, step = description.max_seq_len, dataclasses.asdict(limits)
    if model.device.type != "cuda":
        # The ranks share the memory.
        num_pages = choose_num_pages(kv_pages, ranks.ranks * page_bytes(model))
    else:
        sizes = {"max_seq_len": max_seq_len, "vocab_size": description.vocab_size}
        with ranks.asking("count_pages", kv_pages=kv_pages, limits=step, **sizes) as answers:
            own = gpu_num_pages(model, kv_pages, limits, **sizes)
            num_pages = min(own, *(answer["pages"] for answer in answers()))
    with ranks.asking("allocate_pages", pages=num_pages, limits=step, max_seq_len=max_seq_len):
        kv = allocate_pages(model, num_pages)
    kv.others = ranks
    return kv
