"""The model without weights, against its formula written out in plain Python."""

from __future__ import annotations

import math

import pytest
import torch

from tests.workers.packing import HandPacker, HandSequence, Item, poisoned_pages
from workers.models.embedding_attention import EmbeddingAttention
from workers.models.model import new_pages

torch.set_num_threads(1)


def by_hand(model: EmbeddingAttention, tokens: list[int]) -> list[float]:
    """Logits after the last of the tokens."""
    vocab, layer = model.vocab_size, model.kv_layers[0]
    width, group_size = layer.key_dim, model.num_heads // layer.kv_heads

    def embed(token: int, head: int) -> list[float]:
        row = []
        for pair in range(width // 2):
            angle = 2 * math.pi * (token * 3 ** (head * width // 2 + pair + 1) % vocab) / vocab
            row += [math.cos(angle), math.sin(angle)]
        return row

    def dot(a: list[float], b: list[float]) -> float:
        return sum(x * y for x, y in zip(a, b, strict=True))

    logits = [0.0] * vocab
    for head in range(layer.kv_heads):
        rows = [embed(token, head) for token in tokens]
        weights = [math.exp(dot(rows[-1], row) / math.sqrt(width)) for row in rows]
        mean = [
            sum(weight * row[i] for weight, row in zip(weights, rows, strict=True)) / sum(weights)
            for i in range(width)
        ]
        for token in range(vocab):
            logits[token] += group_size * dot(mean, embed(token, head))
    return logits


@pytest.mark.parametrize(
    "sizes", [{"vocab_size": 64}, {"vocab_size": 50, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8}]
)
def test_formula(sizes: dict[str, int]) -> None:
    model = EmbeddingAttention("cpu", **sizes)
    kv = poisoned_pages(model, 9)
    packer = HandPacker(16, [7, 2, 5, 1, 8])
    texts = [[5, 9, 9, 41, 0] * 7, [3], [49, 1, 12]]
    sequences = [HandSequence() for _ in texts]
    inputs = packer.pack([Item(s, text[:-1] or text) for s, text in zip(sequences, texts, strict=True)])
    model.forward(inputs, kv)
    inputs = packer.pack([Item(sequences[0], texts[0][-1:]), Item(sequences[2], texts[2][-1:])])
    hidden = model.forward(inputs, kv)
    assert hidden.shape == (2, model.num_heads * model.kv_layers[0].key_dim)
    logits = model.logits(hidden)
    assert logits.dtype == torch.float32
    for row, text in zip(logits, (texts[0], texts[2]), strict=True):
        assert torch.allclose(row, torch.tensor(by_hand(model, text)), rtol=0, atol=1e-4)


def test_tokens_are_told_apart() -> None:
    """After one token the likeliest is that token: no two embeddings of the default are alike."""
    model = EmbeddingAttention()
    kv = new_pages(model, 1024)
    packer = HandPacker(16, range(1024))
    inputs = packer.pack([Item(HandSequence(), [token]) for token in range(1024)])
    assert model.logits(model.forward(inputs, kv)).argmax(-1).tolist() == list(range(1024))
