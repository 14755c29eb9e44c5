"""Families with recurrent layers with each kernel of a GPU, in the decode runner: the library's logits."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from kernels import gpu_format
from tests.families import some
from tests.gpu.sizes import FirstTiles, ForwardsFirst
from tests.kernels.conftest import INTERPRETED
from tests.recurrent import RECURRENT
from tests.tiny_types import tiny_model
from tests.workers.packing import HandSequence, Item, new_packer, poisoned_pages, random_texts
from workers.kv.states import FROM_START
from workers.models.active_kernels import check_cuda_kernels
from workers.models.decoder import Decoder
from workers.models.library.loading import make_library_model
from workers.models.registry import FAMILIES
from workers.models.weights import load_planned, plan_load
from workers.runners.cuda_graph import CudaGraphRunner
from workers.sampling import SamplingRow

torch.set_num_threads(1)
# A convolution, the gated delta rule, and Mamba 2 beside attention; others take the same ways. Layers of the
# same kinds are few, since each program takes milliseconds in the interpreter; lfm2 has two with states.
ALWAYS: dict[str, dict[str, Any]] = {
    "lfm2": {},
    "qwen3_5_text": {"layer_types": ["linear_attention", "full_attention"], "num_hidden_layers": 2},
    "falcon_h1": {"num_hidden_layers": 1},
}
# Heads of attention for which there are kernels. Those of Mamba 2 alone are not of attention.
SIZES = {name: {} if name == "mamba2" else {"head_dim": 64} for name in RECURRENT}
# Of each step: how many tokens of each text. Chunks, then decodes of three texts, padded to four, and of one.
STEPS = ((4, 2, 0), (1, 1, 3), (1, 1, 1), (0, 1, 0), (1, 1, 1))
LENGTHS = [sum(counts) for counts in zip(*STEPS, strict=True)]


def decoder_on(device: str, directory: Path, monkeypatch: pytest.MonkeyPatch) -> Decoder:
    """Interpreted, all is in the CPU's memory as in a GPU's from here on, and computed by its kernels."""
    if INTERPRETED:
        monkeypatch.setattr(gpu_format, "is_gpu", lambda _: True)
        monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    decoder = load_planned(plan_load(directory, "float32", device))[0]
    check_cuda_kernels(decoder.config)
    decoder.packs_kv = False
    if INTERPRETED and decoder.config.family.recurrent == "short_conv":  # which is enough, and they are slow
        decoder.fuse_few_rows(FirstTiles(lambda _: 0.0))
    return decoder


@pytest.mark.parametrize(
    "model_type",
    some(sorted(RECURRENT.keys() & FAMILIES.keys()), ALWAYS),
)
def test_logits_are_those_of_transformers(
    model_type: str, device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = RECURRENT[model_type] | SIZES[model_type] | ALWAYS.get(model_type, {})
    library = make_library_model(tiny_model(model_type, **settings))
    texts = random_texts(5, LENGTHS)
    expected = [library.plain_logits(torch.tensor(text)) for text in texts]
    library.module.save_pretrained(tmp_path)
    decoder = decoder_on(device, tmp_path, monkeypatch)
    kv = poisoned_pages(decoder)
    capture = ForwardsFirst(4) if INTERPRETED else None
    runner = CudaGraphRunner(decoder, kv, max_rows=4, max_seq_len=64, capture=capture)
    packer, sequences, earlier = new_packer(1), [HandSequence() for _ in texts], FROM_START
    for number, counts in enumerate(STEPS):
        taken = [index for index, count in enumerate(counts) if count]
        before = [sequences[index].length for index in taken]
        items = [
            Item(sequences[index], texts[index][begin : begin + counts[index]], range(counts[index]))
            for index, begin in zip(taken, before, strict=True)
        ]
        inputs = packer.pack_with_states(items, kv)
        if number == 1:
            earlier = sequences[0].state
        if number == len(STEPS) - 1:
            # The first text goes on from a state before its last one: some tokens are computed again.
            again = texts[0][earlier.position : before[0]]
            first, *others = inputs.states
            inputs.states = [dataclasses.replace(first, source=earlier, before=again), *others]
        logits = runner.step(inputs, [SamplingRow()] * len(inputs.token_ids)).logits
        exact = torch.cat([expected[i][b : b + counts[i]] for i, b in zip(taken, before, strict=True)])
        torch.testing.assert_close(logits.cpu(), exact, rtol=1e-4, atol=1e-4)
    assert runner.name == "cuda_graph"
