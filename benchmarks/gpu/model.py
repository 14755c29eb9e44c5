"""Models of random weights, made on the device, and executors with sequences that look prefilled."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from benchmarks.gpu.plan import PAGE_SIZE, Plan, settings
from benchmarks.shapes import Shape
from workers.executors.describe import describe, kv_shape
from workers.executors.engine import Engine
from workers.executors.llm import LlmExecutor
from workers.kv.table import KvSequence, KvTable
from workers.kv.tensors import KvTensors
from workers.models.config import ModelConfig
from workers.models.decoder import Decoder
from workers.models.inputs import AttentionBatch, ForwardInputs
from workers.runners.cuda_graph import CudaGraphRunner

SEED = 20_260


@dataclass(frozen=True, slots=True)
class Bench:
    """An executor and what it is made of. Sequences are named 0, 1, 2 and so on."""

    shape: Shape
    executor: LlmExecutor
    table: KvTable
    runner: CudaGraphRunner

    def fill(self, batch: int, tokens: int) -> list[KvSequence]:
        """Make `batch` sequences of random tokens, their keys and values being what lies in the pages."""
        dice = random.Random(SEED)
        made = []
        for key in range(batch):
            sequence = self.table.create(key)
            self.table.reserve(sequence, tokens)
            self.table.append(sequence, [dice.randrange(self.shape.vocab_size) for _ in range(tokens)])
            made.append(sequence)
        return made

    def release(self, batch: int) -> None:
        """Forget the sequences that `fill` made."""
        for key in range(batch):
            self.executor.release_cache(key)


def make_bench(plan: Plan, shape: Shape, pool_tokens: int) -> Bench:
    """An executor like the one that `LlmExecutor.load` makes, over random weights and a pool of random KV."""
    config = ModelConfig.from_settings(settings(shape))
    decoder = Decoder.from_config(config, plan.dtype, plan.device)
    _fill_weights(decoder)
    num_pages = -(-pool_tokens // PAGE_SIZE)
    kv = KvTensors(num_pages=num_pages, device=plan.device, **kv_shape(config, plan.dtype))
    for index in range(kv.num_layers):
        for pages in kv.layer(index):
            pages.normal_()
    runner = CudaGraphRunner(
        decoder,
        kv,
        max_rows=plan.max_rows,
        max_seq_len=config.max_position_embeddings,
        capture=_repeat_launches if plan.rehearsal else None,
    )
    table = KvTable(kv.num_pages, PAGE_SIZE)
    executor = LlmExecutor(describe(config, "random", plan.dtype), Engine(table, kv, runner))
    return Bench(shape, executor, table, runner)


def decode_inputs(sequences: Sequence[KvSequence]) -> ForwardInputs:
    """One more token for each of several sequences, with page tables of all the pages they own."""
    contexts = [len(sequence) + 1 for sequence in sequences]
    slots = [
        sequence.pages[len(sequence) // PAGE_SIZE] * PAGE_SIZE + len(sequence) % PAGE_SIZE
        for sequence in sequences
    ]
    count = len(sequences)
    return ForwardInputs(
        token_ids=torch.arange(count),
        positions=torch.tensor(contexts) - 1,
        slots=torch.tensor(slots),
        wanted_rows=torch.arange(count),
        attention=AttentionBatch(
            page_tables=torch.tensor([sequence.pages for sequence in sequences], dtype=torch.int32),
            query_starts=torch.arange(count + 1, dtype=torch.int32),
            context_lens=torch.tensor(contexts, dtype=torch.int32),
            query_lens=[1] * count,
            context_lens_host=contexts,
        ),
    )


def _fill_weights(decoder: Decoder) -> None:
    """Scaled so that activations keep their size from layer to layer."""
    generator = torch.Generator(decoder.device).manual_seed(SEED)
    for name, target in decoder.targets().items():
        if name.endswith("norm.weight"):
            target.tensor.fill_(1.0)
        else:
            target.tensor.normal_(0.0, target.shape[-1] ** -0.5, generator=generator)


def _repeat_launches(run: Callable[[], None]) -> Callable[[], None]:
    """In place of a CUDA graph."""
    run()
    return run
