"""Models with random weights, created on the device, in executors with prefilled-looking sequences."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from benchmarks.gpu.kernels import PAGE_SIZE, fill_quantised
from benchmarks.in_process import LlmExecutor
from benchmarks.shapes import Shape
from kernels.gpu_experts import GpuExperts
from kernels.gpu_weight import GpuWeight
from workers.executors.engine import Engine
from workers.kv.table import KvTable
from workers.models.builder import build_decoder
from workers.models.config import ModelConfig
from workers.models.decoder import Decoder
from workers.models.experts import Experts
from workers.models.lora import LoraPair
from workers.models.model import ModelDescription, new_pages
from workers.models.weights import formats_of
from workers.runners.cuda_graph import CudaGraphRunner

SEED = 20_260
LORA_RANK = 16


@dataclass(frozen=True, slots=True)
class Bench:
    """An executor and its parts. Sequences have the ids 0, 1, 2 and so on."""

    shape: Shape
    decoder: Decoder
    executor: LlmExecutor
    table: KvTable
    runner: CudaGraphRunner

    def fill(self, batch: int, tokens: int) -> None:
        """Creates `batch` sequences of random tokens, whose KV is the current content of their pages."""
        dice = random.Random(SEED)
        for key in range(batch):
            sequence = self.table.create(key)
            self.table.reserve(sequence, tokens)
            self.table.append(sequence, dice.choices(range(self.shape.vocab_size), k=tokens))


def make_bench(
    shape: Shape,
    pool_tokens: int,
    max_rows: int,
    *,
    rehearsal: bool,
    adapters: int = 0,
    batch_invariant: bool = False,
    quantization: str | None = None,
) -> Bench:
    """An executor like the one that `LlmExecutor.load` makes, over random weights and a pool of random KV.

    In a rehearsal it is on the CPU, and launches are repeated in place of a CUDA graph. `adapters`: so many
    are in slots, of rank 16 on all projections. `quantization`: see `LoadPlan`; as on a GPU, wherever it is.
    """
    device = torch.device("cpu" if rehearsal else "cuda:0")
    # Triton's interpreter computes bfloat16 wrongly.
    dtype = torch.float32 if rehearsal else torch.bfloat16
    config = ModelConfig.from_settings(shape.hf_config())
    formats = formats_of(quantization, {}, config, torch.device("cuda"))
    decoder = build_decoder(config, dtype, device, formats=formats)
    _fill_weights(decoder)
    decoder.batch_invariant = batch_invariant
    if adapters:
        _fill_slots(decoder, adapters)
    num_pages = -(-pool_tokens // PAGE_SIZE)
    kv = new_pages(decoder, num_pages)
    for index in range(kv.num_layers):
        for pages in kv.layer(index):
            pages.data.normal_()
    runner = CudaGraphRunner(
        decoder,
        kv,
        max_rows=max_rows,
        max_seq_len=config.max_position_embeddings,
        capture=_repeat_launches if rehearsal else None,
    )
    table = KvTable(kv.num_pages, PAGE_SIZE)
    description = ModelDescription(
        architecture=config.model_type,
        vocab_size=config.vocab_size,
        max_seq_len=config.max_position_embeddings,
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        num_attention_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        dtype=str(dtype).removeprefix("torch."),
    )
    executor = LlmExecutor(description, Engine(table, kv, runner))
    return Bench(shape, decoder, executor, table, runner)


def _fill_weights(decoder: Decoder) -> None:
    """Scaled so that activations keep their size from layer to layer."""
    generator = torch.Generator(decoder.device).manual_seed(SEED)
    for stack in _stacks(decoder):
        fill_quantised(stack)
    for name, target in decoder.targets().items():
        if isinstance(target.into, GpuWeight):
            if ".experts." not in name:
                fill_quantised(target.into)
        elif name.endswith("norm.weight"):
            target.tensor.fill_(1.0)
        else:
            target.tensor.normal_(0.0, target.shape[-1] ** -0.5, generator=generator)


def _stacks(decoder: Decoder) -> Iterator[GpuWeight]:
    """The quantised experts of each layer: to fill them one by one takes longer than all the rest."""
    for layer in decoder.layers:
        body = layer[-1].body
        for weights in (body.gate_up, body.down) if isinstance(body, Experts) else ():
            if isinstance(weights, GpuExperts):
                yield from weights.stacks


def _fill_slots(decoder: Decoder, adapters: int) -> None:
    """Random ones, of which few are different: drawing takes longer than all the rest."""
    decoder.allocate_lora(adapters, LORA_RANK)
    generator = torch.Generator().manual_seed(SEED)
    weights = {
        name: LoraPair(
            torch.randn(LORA_RANK, inputs, generator=generator).mul_(inputs**-0.5).to(decoder.dtype),
            torch.randn(outputs, LORA_RANK, generator=generator).mul_(0.1).to(decoder.dtype),
        )
        for name, (outputs, inputs) in decoder.adaptable().modules.items()
    }
    packed = decoder.pack_lora(weights)
    for slot in range(adapters):
        decoder.set_lora(slot, packed)


def _repeat_launches(run: Callable[[], None]) -> Callable[[], None]:
    run()
    return run
