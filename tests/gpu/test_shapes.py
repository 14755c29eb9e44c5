"""What a step has to read and compute on the models of the measurements."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from benchmarks.gpu.shapes import SHAPES, WindowsShape
from workers.models.builder import build_decoder
from workers.models.config import ModelConfig


@pytest.mark.parametrize("name", SHAPES)
def test_a_full_batch_reads_every_matrix(name: str) -> None:
    """As many bytes as the decoder has, but for norms, and for the embedding, of which it reads rows."""
    shape = SHAPES[name]
    decoder = build_decoder(ModelConfig.from_settings(shape.hf_config()), torch.bfloat16, "meta")
    unread = ("norm.weight",) if shape.tie_word_embeddings else ("norm.weight", "embed_tokens.weight")
    sizes = [t.tensor.nbytes for name, t in decoder.targets().items() if not name.endswith(unread)]
    assert shape.decode_bytes(1 << 20, 0) == sum(sizes)


def test_a_window_bounds_what_is_read_and_computed() -> None:
    gemma = SHAPES["gemma3-12b"]
    assert isinstance(gemma, WindowsShape)
    everything = dataclasses.replace(gemma, sliding_window=1 << 20)
    for context in (1024, 8192):
        unread = everything.decode_bytes(2, context) - gemma.decode_bytes(2, context)
        # In 40 of 48 layers, keys and values of 8 heads, of two sequences.
        assert unread == 2 * 40 * (context - 1024) * 2 * 8 * 256 * 2
    assert gemma.prefill_flops(1, 1024) == everything.prefill_flops(1, 1024)
    assert gemma.prefill_flops(1, 8192) < everything.prefill_flops(1, 8192)
