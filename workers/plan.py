"""What a model needs, from its config alone: `python -m workers.plan JSON` prints it as JSON.

The sizes are computed by what sizes a worker. The speeds are roofs: how fast the memory could be read, and
the products computed, if nothing else took time. No weights are read, and nothing is allocated.
"""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from pathlib import Path

import torch

from workers.executors.memory import StepLimits
from workers.kv.sizing import (
    GpuMemory,
    KvSizingError,
    check_weights_fit,
    choose_num_gpu_pages,
    choose_num_pages,
)
from workers.machine_limits import available_bytes
from workers.models import machine
from workers.models.active_kernels import check_cuda_kernels
from workers.models.builder import build_decoder
from workers.models.checkpoint import choose_dtype, name_of
from workers.models.config import ModelConfig
from workers.models.errors import ModelError, UnsupportedError
from workers.models.model import PAGE_SIZE, page_bytes
from workers.runners.working_memory import RESERVE_BYTES, graph_bytes

BATCHES = (1, 8, 32)
PROMPT_TOKENS = 512
# The float32 copies of logits in a step, and about the widest of a step's temporary tensors in widths.
_COPIED_ROWS, _WIDTHS = 3 * 128, 4
_EMBEDDING, _HEAD, _EXPERTS = "model.embed_tokens.weight", "lm_head.weight", ".experts."


@dataclasses.dataclass(frozen=True, slots=True)
class Roof:
    """What a device could do at most, and where that is known from.

    fractions: what was reached of the roof with each of BATCHES, and in a prefill; empty: not measured.
    """

    memory_bytes: int
    bytes_per_s: float
    flops_per_s: float
    source: str
    fractions: tuple[float, ...] = ()


def _gpu(gigabytes: int, gigabytes_per_s: int, teraflops: float, sheet: str) -> Roof:
    return Roof(
        gigabytes * 10**9, gigabytes_per_s * 1e9, teraflops * 1e12, f"NVIDIA's data sheet of the {sheet}"
    )


# Memory, its bandwidth, and dense products of bfloat16 with float32 sums (half of what sheets say with
# sparsity). GPUs for which the kernels are compiled.
GPUS = {
    "A100-40GB": _gpu(40, 1555, 312, "A100"),
    "A100-80GB": _gpu(80, 2039, 312, "A100 80GB SXM"),
    "L4": _gpu(24, 300, 121, "L4"),
    "L40S": _gpu(48, 864, 362, "L40S"),
    "H100": _gpu(80, 3350, 989, "H100 SXM"),
    "H100-PCIe": _gpu(80, 2000, 756, "H100 PCIe"),
    "H200": _gpu(141, 4800, 989, "H200 SXM"),
}
# By kernels: what Quire's service reached of the roof, with Qwen3-0.6B in bfloat16, contexts of 128 and a
# prompt of 512 tokens: benchmarks/results, docs/performance.md.
CPU_FRACTIONS = {
    "cpu-amx": (0.78, 0.69, 0.54, 0.60),
    "cpu-avx512bf16": (0.88, 0.68, 0.57, 0.84),
    "cpu-avx2": (0.92, 0.59, 0.62, 0.72),
}


class Needs:
    """What a model of native code reads, computes and stores.

    Raises ModelError for a config that is not supported, or not by native code.
    """

    def __init__(self, directory: Path, dtype: str, *, on_gpu: bool) -> None:
        config = ModelConfig.from_directory(directory)
        if on_gpu:
            check_cuda_kernels(config.head_dim)
        chosen = choose_dtype(dtype, config.dtype, None, torch.device("cuda" if on_gpu else "cpu"))
        self.config, self.model = config, build_decoder(config, chosen, "meta")
        sizes = {name: math.prod(target.shape) for name, target in self.model.targets().items()}
        tensors = self.model.targets().values()
        self.weight_bytes = sum(target.tensor.nbytes for target in tensors)
        self.num_parameters = sum(sizes.values())
        self.head = sizes.get(_HEAD, sizes[_EMBEDDING])
        # Without a head of its own, the embedding is read as one.
        self._experts = sum(size for name, size in sizes.items() if _EXPERTS in name)
        self._dense = self.num_parameters - self._experts - (sizes[_EMBEDDING] if _HEAD in sizes else 0)

    def decode(self, batch: int, context: int) -> tuple[float, float]:
        """The bytes that a decode step reads at least, and its FLOP."""
        config, itemsize = self.config, self.model.dtype.itemsize
        chosen = 0.0
        if config.experts is not None:
            chosen = config.experts.per_token / config.experts.count
        numbers = self._dense + min(1.0, batch * chosen) * self._experts
        pairs = [min(context, layer.window or context) for layer in config.layers]
        for attended, kv in zip(pairs, self.model.kv_layers, strict=True):
            numbers += batch * attended * kv.kv_heads * (kv.key_dim + kv.value_dim)
        attention = 4 * config.num_attention_heads * config.head_dim * sum(pairs)
        return numbers * itemsize, batch * (2 * (self._dense + chosen * self._experts) + attention)

    def prefill_flops(self, tokens: int) -> float:
        """The FLOP of a prompt: causal attention, and one row of logits."""
        config = self.config
        chosen = config.experts.per_token / config.experts.count if config.experts is not None else 0.0
        matrices = self._dense - self.head + chosen * self._experts
        pairs = 0.0
        for layer in config.layers:
            width = min(tokens, layer.window or tokens)
            pairs += width * tokens - width * (width - 1) / 2
        attention = 4 * config.num_attention_heads * config.head_dim * pairs
        return 2 * (matrices * tokens + self.head) + attention


def num_gpu_pages(needs: Needs, memory_bytes: int, limits: StepLimits) -> int:
    """The pages of a worker on an otherwise empty GPU. The memory of steps is estimated, not measured.

    Raises KvSizingError.
    """
    model, config = needs.model, needs.config
    check_weights_fit("the model", needs.weight_bytes, memory_bytes)
    rows = min(limits.max_items, limits.max_tokens)
    width = max(config.hidden_size, config.intermediate_size, config.num_attention_heads * config.head_dim)
    step_bytes = config.vocab_size * (rows * model.dtype.itemsize + _COPIED_ROWS * torch.float32.itemsize)
    step_bytes += limits.max_tokens * _WIDTHS * width * model.dtype.itemsize
    free_bytes = memory_bytes - needs.weight_bytes
    positions = min(config.max_position_embeddings, free_bytes // page_bytes(model) * PAGE_SIZE)
    step_bytes += positions * model.rotation_bytes
    logits = config.vocab_size, model.dtype.itemsize
    working_bytes = step_bytes + graph_bytes(limits.max_items, *logits) + RESERVE_BYTES
    memory = GpuMemory(memory_bytes, free_bytes, working_bytes, limits.gpu_memory_utilization)
    return choose_num_gpu_pages(None, page_bytes(model), memory)


def num_cpu_pages(needs: Needs, memory_bytes: int) -> int:
    """The pages of a worker on a CPU with so much free memory. Raises KvSizingError."""
    check_weights_fit("the model", needs.weight_bytes, memory_bytes)
    return choose_num_pages(None, page_bytes(needs.model), memory_bytes - needs.weight_bytes)


def _cpu_roof(memory_bytes: int | None) -> Roof:
    kernels = str(machine.describe_cpu()["kernels"])
    return Roof(
        memory_bytes or available_bytes(),
        machine.read_bytes_per_s(),
        machine.product_flops_per_s(),
        "measured on this machine: plain reads, and torch's product",
        CPU_FRACTIONS.get(kernels, ()),
    )


def plan(
    directory: Path,
    dtype: str,
    gpu: str | None,
    memory_bytes: int | None,
    context: int,
    limits: StepLimits,
) -> dict[str, object]:
    """Sizes in bytes and tokens, and rates in tokens/s.

    `gpu`: a key of GPUS; None: this machine's CPU, with `memory_bytes` free, or as much as is free now.
    `limits`: of a worker on a GPU.

    Raises ModelError or KvSizingError.
    """
    needs = Needs(directory, dtype, on_gpu=gpu is not None)
    roof = GPUS[gpu] if gpu is not None else _cpu_roof(memory_bytes)
    pages = (
        num_cpu_pages(needs, roof.memory_bytes)
        if gpu is None
        else num_gpu_pages(needs, roof.memory_bytes, limits)
    )
    context = min(context, needs.config.max_position_embeddings)
    contexts = pages // -(-context // PAGE_SIZE)
    rates = []
    for index, batch in enumerate(BATCHES):
        if batch <= contexts:
            bytes_read, flops = needs.decode(batch, context)
            seconds = max(bytes_read / roof.bytes_per_s, flops / roof.flops_per_s)
            rates.append(_rate(f"decode, {batch} at once", batch / seconds, roof, index))
    prompt = min(PROMPT_TOKENS, needs.config.max_position_embeddings)
    seconds = max(needs.decode(1, 0)[0] / roof.bytes_per_s, needs.prefill_flops(prompt) / roof.flops_per_s)
    rates.append(_rate(f"prefill of {prompt}", prompt / seconds, roof, len(BATCHES)))
    kv_bytes = page_bytes(needs.model)
    return {
        "architecture": needs.config.model_type,
        "dtype": name_of(needs.model.dtype),
        "device": gpu or "cpu",
        "source": roof.source,
        "memory_bytes": roof.memory_bytes,
        "bytes_per_s": roof.bytes_per_s,
        "flops_per_s": roof.flops_per_s,
        "num_parameters": needs.num_parameters,
        "weight_bytes": needs.weight_bytes,
        "kv_bytes_per_token": kv_bytes // PAGE_SIZE,
        "pages": pages,
        "page_tokens": PAGE_SIZE,
        "pages_bytes": pages * kv_bytes,
        "pool_tokens": pages * PAGE_SIZE,
        "max_seq_len": needs.config.max_position_embeddings,
        "context": context,
        "contexts": contexts,
        "rates": rates,
    }


def _rate(what: str, tokens_per_s: float, roof: Roof, index: int) -> dict[str, object]:
    """A line of the table. `expected` is None where nothing was measured."""
    fraction = roof.fractions[index] if roof.fractions else None
    expected = None if fraction is None else fraction * tokens_per_s
    return {"what": what, "roof": tokens_per_s, "fraction": fraction, "expected": expected}


def main() -> int:
    """Print the plan that the argument asks for, or {"error": why}. Returns the exit status."""
    asked = json.loads(sys.argv[1])
    try:
        if asked["gpu"] is not None and asked["gpu"] not in GPUS:
            raise ModelError(f"gpu {asked['gpu']!r} is not known; there are {', '.join(GPUS)}")
        asked["limits"] = StepLimits(**asked.pop("steps"))
        found = plan(Path(asked.pop("directory")), **asked)
    except UnsupportedError as error:
        found = {"error": f"only models of native code can be planned: {error}"}
    except (ModelError, KvSizingError) as error:
        found = {"error": str(error)}
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
