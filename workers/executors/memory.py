"""Limits that size a worker's memory, and the pages that fit."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from workers.kv.sizing import GpuMemory, KvSizingError, choose_num_gpu_pages
from workers.kv.states import StateSlots
from workers.kv.table import KvTable
from workers.kv.tensors import KvTensors
from workers.models.errors import ModelError
from workers.models.model import PAGE_SIZE, Model, new_pages, page_bytes, state_sizes
from workers.models.shard import Group
from workers.runners.base import Runner
from workers.runners.cuda_graph import CudaGraphRunner
from workers.runners.eager import EagerRunner
from workers.runners.working_memory import measure_working_bytes

# The tokens of a worker's steps if it is not told. 4096 of an 8B model are 0.07 s of an H100 at its peak.
# Chunks beside decodes are shorter; see `workers.caller_limits`.
GPU_STEP_TOKENS = 4096
CPU_STEP_TOKENS = 512
# The default of LoraLimits.max_rank on a GPU, where each adapter takes the memory of that rank.
GPU_LORA_RANK = 64


@dataclass(frozen=True, slots=True)
class StepLimits:
    """The size of the largest step, and the share of a GPU's memory that may be used in all.

    cuda_graphs: whether decodes on a GPU replay CUDA graphs, or launch each kernel over the same memory.
    """

    max_tokens: int = GPU_STEP_TOKENS
    max_items: int = 256
    gpu_memory_utilization: float = 0.9
    cuda_graphs: bool = True


@dataclass(frozen=True, slots=True)
class LoraLimits:
    """The adapters that are in memory at a time: how many, of which rank, and how large in all.

    Attributes:
        max_bytes: Of all; on a GPU of the slots on each.
    """

    max_adapters: int
    max_rank: int
    max_bytes: int


def gpu_num_pages(
    model: Model,
    kv_pages: int | None,
    limits: StepLimits,
    *,
    max_seq_len: int,
    vocab_size: int,
    beside_bytes: int = 0,
) -> int:
    """The pages that fit into the memory that the weights and the largest step leave. Runs such a step.

    `beside_bytes`: what is allocated with each page. Raises KvSizingError.
    """
    try:
        trial = new_pages(model, -(-limits.max_tokens // PAGE_SIZE))
        working_bytes = measure_working_bytes(
            model,
            trial,
            max_step_tokens=limits.max_tokens,
            max_seq_len=max_seq_len,
            max_rows=limits.max_items,
            vocab_size=vocab_size,
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
    bytes_per_page = page_bytes(model) + beside_bytes
    positions = min(max_seq_len, free_bytes // bytes_per_page * PAGE_SIZE)
    working_bytes += positions * model.rotation_bytes + state_sizes(model).fixed_bytes
    memory = GpuMemory(total_bytes, free_bytes, working_bytes, limits.gpu_memory_utilization)
    return choose_num_gpu_pages(kv_pages, bytes_per_page, memory)


def allocate_pages(model: Model, num_pages: int, kv_dtype: str) -> KvTensors:
    """Allocate pages. On a CPU memory is there once it is written to.

    Raises KvSizingError on a GPU, and ModelError if the model has no pages of this `kv_dtype`.
    """
    try:
        return new_pages(model, num_pages, kv_dtype)
    except ValueError as error:
        raise ModelError(f"kv_cache_dtype = {kv_dtype}: {error}") from error
    except torch.OutOfMemoryError as error:
        needed_bytes = num_pages * page_bytes(model)
        raise KvSizingError(
            f"{num_pages} pages need {needed_bytes >> 20} MiB of GPU memory in one piece, which is not there"
        ) from error


def new_table(kv: KvTensors) -> KvTable:
    """The accounting of these pages, and of the states beside them."""
    states = None
    if kv.states is not None:
        states = StateSlots(kv.states.num_slots, kv.states.spacing, kv.page_size)
    return KvTable(kv.num_pages, kv.page_size, states)


def new_runner(
    model: Model, kv: KvTensors, limits: StepLimits, max_seq_len: int, group: Group | None = None
) -> Runner:
    """The runner of a model on its device, or of a rank's part of it."""
    if model.device.type == "cuda" and model.graphable:
        return CudaGraphRunner(
            model,
            kv,
            max_rows=limits.max_items,
            max_seq_len=max_seq_len,
            graphs=limits.cuda_graphs,
            share=None if group is None else group.share,
        )
    return EagerRunner(model, kv)
