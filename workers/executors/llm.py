"""The executor of decoder-only language models, loaded from a Hugging Face directory."""

from __future__ import annotations

import dataclasses
import functools
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch

from workers.adapters.adapter import read_adapter
from workers.adapters.errors import AdapterError
from workers.adapters.slots import LoadedAdapter
from workers.adapters.table import AdapterTable
from workers.executors.base import ModelExecutor
from workers.executors.engine import Engine
from workers.executors.loading import AUTO, NATIVE, choose_backend, load_served
from workers.executors.replacement import WeightsReplacement
from workers.kv.sizing import GpuMemory, KvSizingError, choose_num_gpu_pages, choose_num_pages
from workers.kv.table import KvTable
from workers.kv.tensors import KvTensors
from workers.models.active_kernels import check_cuda_device
from workers.models.decoder import Decoder
from workers.models.errors import ModelError
from workers.models.files import check_not_pickled
from workers.models.licence import read_licence
from workers.models.lora import PackedLora
from workers.models.model import PAGE_SIZE, Model, ModelDescription, new_pages, page_bytes
from workers.models.text import read_text
from workers.models.tokenizer import MAX_BYTES
from workers.models.weights import copy_weights
from workers.operations import AdapterSource
from workers.runners.base import Runner
from workers.runners.cuda_graph import CudaGraphRunner
from workers.runners.eager import EagerRunner
from workers.runners.working_memory import measure_working_bytes

# The path of a snapshot of ORG/NAME in a cache of the Hugging Face hub. Names contain no double dashes.
_SNAPSHOT = re.compile(r".*/models--([^/]+)/snapshots/[0-9a-f]{40}")
# The default of LoraLimits.max_rank on a GPU, where each adapter takes the memory of that rank.
GPU_LORA_RANK = 64


@dataclass(frozen=True, slots=True)
class StepLimits:
    """The size of the largest step, and the share of a GPU's memory that may be used in all.

    cuda_graphs: whether decodes on a GPU replay CUDA graphs, or launch each kernel.
    """

    max_tokens: int = 512
    max_items: int = 256
    gpu_memory_utilization: float = 0.9
    cuda_graphs: bool = True


@dataclass(slots=True)
class _Served:
    """The model that runs. Nothing else may refer to it, or its memory stays when it is replaced."""

    model: Model


@dataclass(frozen=True, slots=True)
class LoraLimits:
    """The adapters that are in memory at a time: how many, of which rank, and how large in all."""

    max_adapters: int
    max_rank: int
    max_bytes: int


class LlmExecutor(ModelExecutor):
    """Any decoder-only model that `workers/models` supports."""

    name = "llm"

    @classmethod
    def load(  # noqa: PLR0913 - the settings of a worker
        cls,
        directory: Path,
        *,
        dtype: str = "auto",
        device: torch.device | str = "cpu",
        kv_pages: int | None = None,
        limits: StepLimits | None = None,
        lora: LoraLimits | None = None,
        backend: str = AUTO,
        self_check: bool = True,
        batch_invariant: bool = False,
        max_text_bytes: int = MAX_BYTES,
        progress: Callable[[int, int], None] | None = None,
    ) -> Self:
        """Loads the weights and allocates the pool.

        dtype: "bfloat16", "float16" or "float32", for weights and KV; "auto": the model's own, but on a CPU
            float32 for float16.
        kv_pages: pages of 16 tokens; None sizes the pool from free memory.
        limits: the largest step; on a GPU it determines the memory that is left for the pool.
        lora: None: no adapters. Models of the transformers library have none.
        backend: "native", "transformers" or "auto"; see `loading`.
        self_check: whether to check the model's outputs before it is served, with either backend.
        batch_invariant: refuse a model whose rows depend on the rest of the batch. On a GPU this selects
            other, slower kernels.
        max_text_bytes: tokenizer.json and the chat template are omitted if they are larger.
        progress: called with (done_bytes, total_bytes) while weights are read.

        Raises ModelError for a directory that cannot be served, KvSizingError if memory is too small.
        """
        device = torch.device(device)
        limits = limits or StepLimits()
        if device.type == "cuda":
            device = torch.device("cuda", device.index or 0)
            torch.cuda.set_device(device)  # kernels are launched on the thread's current device
            check_cuda_device(device)
        check_not_pickled(directory)
        backend, vocab_size = choose_backend(directory, backend, on_cuda=device.type == "cuda")
        # Before the weights, which take longer to load.
        text = read_text(directory, vocab_size, max_text_bytes)
        try:
            model, description = load_served(
                directory,
                dtype,
                device,
                progress,
                backend=backend,
                self_check=self_check,
                batch_invariant=batch_invariant,
            )
        except torch.OutOfMemoryError as error:
            free_bytes, total_bytes = torch.cuda.mem_get_info(device)
            raise KvSizingError(
                f"the weights of {directory.name} do not fit on {device}, which has {total_bytes >> 20} MiB;"
                f" {free_bytes >> 20} MiB of them were left"
            ) from error
        if batch_invariant:
            _make_batch_invariant(model, directory, backend)
        served = _Served(model)
        adapters = None if lora is None or backend != NATIVE else _adapter_table(served, lora)
        if device.type == "cuda":
            kv, runner = _on_gpu(model, description, kv_pages, limits)
        else:
            kv = new_pages(model, choose_num_pages(kv_pages, page_bytes(model)))
            runner = EagerRunner(model, kv)
        described = dataclasses.replace(
            description, model_id=model_id_of(directory), license=read_licence(directory)
        )
        table = KvTable(kv.num_pages, kv.page_size)
        engine = Engine(
            table,
            kv,
            runner,
            takes_trees=model.takes_trees,
            batch_invariant=model.batch_invariant,
            num_experts=description.num_experts,
        )
        executor = cls(described, engine, text, adapters)
        if device.type == "cuda" and backend != NATIVE:
            return executor

        def read(source: Path) -> tuple[Model, ModelDescription]:
            other = choose_backend(source, backend)[0]
            # On a GPU they are read into main memory, and copied into place.
            on_gpu = served.model.device.type == "cuda"
            read_model, read_description = load_served(
                source,
                str(served.model.dtype).removeprefix("torch."),
                torch.device("cpu"),
                None,
                backend=other,
                self_check=False,
                pack=not on_gpu,
            )
            _check_same_config(served.model, description, read_model, read_description)
            if lora is not None and adapters is not None and not on_gpu:
                read_model.allocate_lora(lora.max_adapters, lora.max_rank)
            named = dataclasses.replace(
                read_description, model_id=model_id_of(source), license=read_licence(source)
            )
            return read_model, named

        executor.replacement = WeightsReplacement(read, functools.partial(executor.use, served))
        return executor

    def use(self, served: _Served, other: Model, description: ModelDescription) -> None:
        """Puts other weights of the same config into place, between two steps.

        Args:
            served: The model that runs. On a GPU its memory stays; on the CPU `other` takes its place.
            other: Where they are now, on the CPU.
            description: What is reported of them.
        """
        if served.model.device.type == "cuda":
            assert isinstance(served.model, Decoder) and isinstance(other, Decoder)
            copy_weights(other, served.model)
        else:
            assert isinstance(self.engine.runner, EagerRunner)
            self.engine.runner.use(other)
            served.model = other
            if self.adapters is not None:
                self.adapters.use(other)
        self._model = description


def _make_batch_invariant(model: Model, directory: Path, backend: str) -> None:
    """Select the kernels for it. Raises ModelError if there are none for the model."""
    if model.device.type == "cuda" and backend == NATIVE:
        model.batch_invariant = True
    if not model.batch_invariant:
        raise ModelError(
            f"{directory}: batch_invariant is on, which the {backend} backend does not guarantee with"
            f" {model.dtype} on {model.device}"
        )


def _adapter_table(served: _Served, limits: LoraLimits) -> AdapterTable[PackedLora]:
    """Make slots for adapters in a model. Raises KvSizingError if there is not one in the memory for them."""
    modules, slots = served.model.lora_modules(), limits.max_adapters
    if served.model.device.type == "cuda":
        slots, _ = gpu_lora_slots(served.model, limits)
    try:
        served.model.allocate_lora(slots, limits.max_rank)
    except torch.OutOfMemoryError as error:
        raise KvSizingError("the weights leave no memory for adapters: lower max_lora_bytes") from error

    def read(source: AdapterSource) -> LoadedAdapter[PackedLora]:
        directory = Path(source.directory)
        adapter = read_adapter(directory, modules, max_rank=limits.max_rank, max_bytes=limits.max_bytes)
        if source.identity not in ("", adapter.identity):
            raise AdapterError("the files of the adapter have changed since it was found")
        packed = served.model.pack_lora(adapter.weights)
        return LoadedAdapter(packed, adapter.rank, packed.bytes)

    return AdapterTable(served.model, read, limits.max_bytes)


def gpu_lora_slots(model: Model, limits: LoraLimits) -> tuple[int, int]:
    """The number of slots for adapters on a GPU, and the bytes of one. Raises KvSizingError if none fits.

    There, a slot takes the memory of the largest adapter, whatever is in it.
    """
    modules = model.lora_modules().values()
    slot_bytes = limits.max_rank * sum(outputs + inputs for outputs, inputs in modules) * model.dtype.itemsize
    slots = min(limits.max_adapters, limits.max_bytes // slot_bytes)
    if not slots:
        raise KvSizingError(
            f"an adapter of rank {limits.max_rank} takes {slot_bytes >> 20} MiB:"
            " raise max_lora_bytes or lower max_lora_rank"
        )
    return slots, slot_bytes


def _check_same_config(
    model: Model, served: ModelDescription, other_model: Model, other: ModelDescription
) -> None:
    """Raises ModelError unless other weights fit into the place of those that are served."""
    if getattr(model, "config", None) != getattr(other_model, "config", None):
        raise ModelError("config.json differs from that of the weights that are served")
    for field in dataclasses.fields(ModelDescription):
        if field.name not in ("model_id", "fingerprint", "license"):
            ours, theirs = getattr(served, field.name), getattr(other, field.name)
            if ours != theirs:
                raise ModelError(f"{field.name} is {theirs}, and that of the served weights is {ours}")


def model_id_of(directory: Path) -> str:
    """The name of a model: as on the hub for a snapshot in the hub's cache, else the directory's."""
    directory = Path(os.path.abspath(directory))  # noqa: PTH100 - gives "." a name, and keeps that of a link
    found = _SNAPSHOT.fullmatch(directory.as_posix())
    return found[1].replace("--", "/") if found is not None else directory.name


def _on_gpu(
    model: Model, description: ModelDescription, kv_pages: int | None, limits: StepLimits
) -> tuple[KvTensors, Runner]:
    """A pool in the memory that the weights and the largest step leave, and the runner."""
    max_seq_len = description.max_seq_len
    try:
        trial = new_pages(model, -(-limits.max_tokens // PAGE_SIZE))
        working_bytes = measure_working_bytes(
            model,
            trial,
            max_step_tokens=limits.max_tokens,
            max_seq_len=max_seq_len,
            max_rows=limits.max_items,
            vocab_size=description.vocab_size,
        )
        del trial
        torch.cuda.empty_cache()
    except torch.OutOfMemoryError as error:
        raise KvSizingError(
            f"a step of {limits.max_tokens} tokens does not fit into the memory that the weights leave:"
            f" lower max_batch_tokens or max_batch_items"
        ) from error
    free_bytes, total_bytes = torch.cuda.mem_get_info(model.device)
    # The rotations of all positions that fit the pages also need memory; the trial had those of a few.
    positions = min(max_seq_len, free_bytes // page_bytes(model) * PAGE_SIZE)
    working_bytes += positions * model.rotation_bytes
    memory = GpuMemory(total_bytes, free_bytes, working_bytes, limits.gpu_memory_utilization)
    num_pages = choose_num_gpu_pages(kv_pages, page_bytes(model), memory)
    try:
        kv = new_pages(model, num_pages)
    except torch.OutOfMemoryError as error:
        needed_bytes = num_pages * page_bytes(model)
        raise KvSizingError(
            f"{num_pages} pages need {needed_bytes >> 20} MiB of GPU memory in one piece, which is not there"
        ) from error
    if not (limits.cuda_graphs and model.graphable):
        return kv, EagerRunner(model, kv)
    return kv, CudaGraphRunner(model, kv, max_rows=limits.max_items, max_seq_len=max_seq_len)
