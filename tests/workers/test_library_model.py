"""The transformers backend: whatever the batches over pages, the logits are those of the plain forward."""

from __future__ import annotations

import random
from typing import Any

import torch
from transformers import CONFIG_MAPPING, PreTrainedConfig, PreTrainedModel

from tests.workers.packing import HandPacker, HandSequence, Item, poison
from workers.kv.tensors import KvTensors
from workers.models.library.paged_model import LibraryModel

torch.set_num_threads(1)

PAGE_SIZE, PAGES = 16, 48
VOCAB = 97
# float32 with sums of a few hundred terms over a few layers: about ten times what is measured.
RELATIVE_ERROR = 1e-5

# Under every spelling that a family may have; a config takes what it knows.
SMALL: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "n_embd": 64,
    "d_model": 64,
    "intermediate_size": 96,
    "ffn_dim": 96,
    "num_hidden_layers": 3,
    "n_layer": 3,
    "n_layers": 3,
    "num_layers": 3,
    "num_attention_heads": 4,
    "n_head": 4,
    "n_heads": 4,
    "num_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "n_positions": 256,
    "sliding_window": 7,
    "moe_intermediate_size": 48,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MORE: dict[str, dict[str, Any]] = {}


def tiny_config(model_type: str) -> PreTrainedConfig:
    """A config of a few kilobytes."""
    known = CONFIG_MAPPING[model_type]
    default = known()
    names = set(default.to_dict()) | set(default.attribute_map)
    settings = {name: value for name, value in SMALL.items() if name in names}
    return known(**settings | MORE.get(model_type, {}))


def randomise(model: PreTrainedModel, seed: int = 0) -> None:
    """Weights with which attention is sharp, so that a wrong score is seen."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.3 * noise if parameter.dim() == 1 else 0.3 * noise)
    model.train(mode=False)


def worst_error(model: LibraryModel, seed: int = 0) -> float:
    """The largest relative error over texts that grow by random chunks in shared batches."""
    kv = KvTensors(model.layers, num_pages=PAGES, page_size=PAGE_SIZE, dtype=torch.float32)
    poison(kv)
    dice = random.Random(seed)
    packer = HandPacker(PAGE_SIZE, dice.sample(range(1, PAGES), PAGES - 1))
    texts = [[dice.randrange(VOCAB) for _ in range(length)] for length in (1, 17, 50, 70)]
    sequences = [HandSequence() for _ in texts]
    rows: list[list[torch.Tensor]] = [[] for _ in texts]
    while any(sequence.length < len(text) for sequence, text in zip(sequences, texts, strict=True)):
        items, owners = [], []
        for index, (sequence, text) in enumerate(zip(sequences, texts, strict=True)):
            size = min(dice.choice((0, 1, 1, 3, 16, 29)), len(text) - sequence.length)
            if size:
                items.append(Item(sequence, text[sequence.length : sequence.length + size], range(size)))
                owners += [index] * size
        if items:
            logits = model.logits(model.forward(packer.pack(items), kv))
            for owner, row in zip(owners, logits, strict=True):
                rows[owner].append(row)
    errors = []
    for text, found in zip(texts, rows, strict=True):
        expected = model.plain_logits(torch.tensor(text))
        errors.append(((torch.stack(found) - expected).abs().max() / expected.abs().max()).item())
    return max(errors)
