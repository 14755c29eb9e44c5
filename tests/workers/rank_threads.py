"""A model split over ranks that are threads of this process, behind the interface of one model."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import torch

from workers.kv.tensors import KvTensors
from workers.models.capture import RowCapture
from workers.models.decoder import Decoder
from workers.models.inputs import ForwardInputs
from workers.models.lora import LoraWeights
from workers.models.model import new_pages
from workers.models.weights import load_planned, plan_load

T = TypeVar("T")


class ThreadGroup:
    """One rank's side of a `Group` whose ranks are threads."""

    def __init__(self, rank: int, given: list[torch.Tensor], barrier: threading.Barrier) -> None:
        self.rank, self.ranks = rank, len(given)
        self._given, self._barrier = given, barrier

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        total, *others = self._exchange(x)
        for other in others:
            total = total + other
        return total.to(x.dtype)

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        parts = self._exchange(x)
        return torch.cat(parts, -1) if self.rank == 0 else x

    def share(self, x: torch.Tensor) -> None:
        x.copy_(self._exchange(x)[0])

    def _exchange(self, x: torch.Tensor) -> list[torch.Tensor]:
        self._given[self.rank] = x.clone()
        self._barrier.wait()
        found = list(self._given)
        self._barrier.wait()
        return found


def split_model(
    directory: Path, ranks: int, dtype: str = "auto", *, pack: bool = True, quantization: str | None = None
) -> Any:
    """What tests use of a `Model`: see `SplitModel`."""
    return SplitModel(directory, ranks, dtype, pack, quantization)


class SplitModel:
    """Runs each forward on all ranks. The pages of rank 0 are the caller's, the others have their own."""

    def __init__(self, directory: Path, ranks: int, dtype: str, pack: bool, quantization: str | None) -> None:
        barrier = threading.Barrier(ranks)
        self._barrier = barrier
        given = [torch.empty(0)] * ranks
        self._threads = ThreadPoolExecutor(ranks)
        self.models: list[Decoder] = []
        for rank in range(ranks):
            plan = plan_load(directory, dtype, "cpu", ThreadGroup(rank, given, barrier), quantization)
            self.models.append(load_planned(plan, pack=pack)[0])
        self._pages: list[KvTensors] = []
        self._hidden: list[torch.Tensor] = []
        first = self.models[0]
        self.config, self.dtype, self.device, self.kv_layers = (
            first.config, first.dtype, first.device, first.kv_layers
        )  # fmt: skip
        self.packs_kv = self.has_hidden_states = True
        self.state_shapes = first.state_shapes

    def _on_all(self, run: Callable[[int], T]) -> list[T]:
        def guarded(rank: int) -> T:
            try:
                return run(rank)
            except BaseException:
                self._barrier.abort()
                raise

        return list(self._threads.map(guarded, range(len(self.models))))

    def forward(
        self, inputs: ForwardInputs, kv: KvTensors, capture: RowCapture | None = None
    ) -> torch.Tensor:
        if not self._pages or self._pages[0] is not kv:
            self._pages = [kv, *(new_pages(model, kv.num_pages) for model in self.models[1:])]
            for pages in self._pages[1:]:
                for layer in range(pages.num_layers):
                    for half in pages.layer(layer):
                        half.data.fill_(float("nan"))
                for tensor in () if pages.states is None else pages.states.tensors:
                    tensor.fill_(float("nan"))

        def run(rank: int) -> torch.Tensor:
            own = dataclasses.replace(inputs)
            return self.models[rank].forward(own, self._pages[rank], None if rank else capture)

        self._hidden = self._on_all(run)
        return self._hidden[0]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        assert hidden is self._hidden[0]
        return self._on_all(lambda rank: self.models[rank].logits(self._hidden[rank]))[0]

    def allocate_lora(self, slots: int, max_rank: int) -> None:
        for model in self.models:
            model.allocate_lora(slots, max_rank)

    def set_lora(self, slot: int, weights: LoraWeights) -> None:
        for model in self.models:
            model.set_lora(slot, model.pack_lora(weights))
