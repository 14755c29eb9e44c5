"""Batch-invariant models on the device: the same bits for any batch and chunks, with graphs and without.

In a rehearsal the CPU's kernels compute.
"""

from __future__ import annotations

import random

import pytest
import torch

from tests.gpu.sizes import ForwardsFirst, layers_of_each_kind, nan_kv, random_decoder, sized
from tests.kernels.conftest import INTERPRETED
from tests.kernels.instruction_sets import need_compiled
from tests.workers.packing import HandPacker, HandSequence, Item
from workers.outputs import OutputSpec
from workers.row_outputs import build_outputs, score_tokens
from workers.runners.cuda_graph import CudaGraphRunner
from workers.sampling import SamplingRow

torch.set_num_threads(1)

MAX_ROWS = sized(64, 4)
PAGES = sized(4000, 80)
CONFIGS = layers_of_each_kind(4096)
LENGTHS = sized([1, 40, 300, 700, 1500, *[90] * 40], [1, 20, 45])


@pytest.mark.parametrize("name", CONFIGS)
def test_a_row_has_the_same_bits_in_any_batch(name: str, device: torch.device) -> None:
    """Each text in one forward by itself, and in random chunks beside others; decodes are graphs."""
    decoder = random_decoder(CONFIGS[name], device)
    if INTERPRETED:
        need_compiled()
        decoder.pack()
    decoder.batch_invariant = True
    kv, packer = nan_kv(decoder, PAGES), HandPacker(16, range(1, PAGES))
    capture = ForwardsFirst(MAX_ROWS) if INTERPRETED else None
    runner = CudaGraphRunner(decoder, kv, max_rows=MAX_ROWS, max_seq_len=4096, capture=capture)

    def step(items: list[Item]) -> torch.Tensor:
        inputs = packer.pack(items)
        return runner.step(inputs, [SamplingRow()] * len(inputs.wanted_rows)).logits.clone()

    dice = random.Random(name)
    texts = [[dice.randrange(97) for _ in range(length)] for length in LENGTHS]
    alone = [step([Item(HandSequence(), text, range(len(text)))]) for text in texts]
    sequences = [HandSequence() for _ in texts]
    while True:
        left = [index for index, text in enumerate(texts) if sequences[index].length < len(text)]
        if not left:
            break
        owners, items = [], []
        sizes = dice.choice(((1,), (1, 1, 5, 64, 300)))  # of decodes only, or mixed
        for index in dice.sample(left, dice.randint(1, len(left))):
            begin = sequences[index].length
            chunk = texts[index][begin : begin + dice.choice(sizes)]
            owners += [(index, begin + row) for row in range(len(chunk))]
            items.append(Item(sequences[index], chunk, range(len(chunk))))
        expected = torch.stack([alone[index][position] for index, position in owners])
        assert torch.equal(step(items), expected)
    assert runner.name == "cuda_graph"


def test_log_probabilities_of_a_vocabulary_that_is_no_multiple_of_4(device: torch.device) -> None:
    """Its rows are at different alignments, by which torch divides their sums."""
    vocab = 50_257
    logits = torch.randn(7, vocab, generator=torch.Generator().manual_seed(1)).to(device)
    targets, spec = torch.arange(7), OutputSpec(logprob=True)
    scores = score_tokens(logits, targets).logprobs
    outputs = build_outputs(logits, targets, [spec] * 7)
    for row in range(7):
        one = slice(row, row + 1)
        assert score_tokens(logits[one].clone(), targets[one]).logprobs == [scores[row]]
        assert build_outputs(logits[one].clone(), targets[one], [spec])[0].logprob == outputs[row].logprob
