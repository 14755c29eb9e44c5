"""The transformers backend: whatever the batches over pages, the logits are those of the plain forward."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

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
# Of DeepSeek and others: keys and values from a narrow vector, values of another width than keys.
LATENT: dict[str, Any] = {
    "head_dim": None,
    "num_key_value_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
}
ROUTED: dict[str, Any] = {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
# What a family needs besides; None: leave it to the family.
MORE: dict[str, dict[str, Any]] = {
    "codegen": {"head_dim": None, "rotary_dim": 8},
    "deepseek_v2": LATENT | ROUTED,
    "deepseek_v3": LATENT | ROUTED,
    "glm4_moe_lite": LATENT | ROUTED,
    "gpt_neo": {"num_layers": 2, "attention_types": [[["global", "local"], 1]], "window_size": 7},
    "gptj": {"head_dim": None, "rotary_dim": 8},
    # Its default of 1 multiplies scores that are not divided by anything: they are large, and so are errors.
    "granitemoe": {"attention_multiplier": 0.25},
    "granitemoeshared": {"attention_multiplier": 0.25},
    "minicpm3": LATENT,
}

RUN = """
    afmoe apertus arcee aria_text beam biogpt bitnet cohere cohere2 cohere2_moe ctrl cwm deepseek_v2
    deepseek_v3 ernie4_5 ernie4_5_moe exaone4 exaone_moe flex_olmo gemma gemma2 gemma3_text glm glm4
    glm4_moe glm4_moe_lite gpt2 gpt_bigcode gpt_neox gpt_oss granite granite_swa granitemoe
    granitemoeshared helium hunyuan_v1_dense hunyuan_v1_moe jais2 jetmoe llama llama4_text
    mimo_v2_flash minicpm3 minimax_m2 ministral mistral mixtral modernbert-decoder nanochat nemotron
    olmo olmo2 olmo3 olmoe opt persimmon phi phi3 phimoe qwen2 qwen2_moe qwen3 qwen3_moe seed_oss
    smollm3 stablelm starcoder2 vaultgemma
"""


def tiny_config(model_type: str, **more: Any) -> PreTrainedConfig:
    """A config of a few kilobytes."""
    known = CONFIG_MAPPING[model_type]
    default = known()
    names = set(default.to_dict()) | set(default.attribute_map)
    settings = {name: value for name, value in SMALL.items() if name in names}
    settings |= MORE.get(model_type, {}) | more
    config: PreTrainedConfig = known(**{name: value for name, value in settings.items() if value is not None})
    return config


def tiny_model(model_type: str, **more: Any) -> PreTrainedModel:
    """A random model."""
    model: PreTrainedModel = AutoModelForCausalLM.from_config(tiny_config(model_type, **more))
    randomise(model)
    return model


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


@pytest.mark.parametrize("model_type", RUN.split())
def test_mixed_batches_of_random_chunks(model_type: str) -> None:
    """Four texts grow by random chunks in shared batches over NaN; every row's logits are compared."""
    assert worst_error(LibraryModel(tiny_model(model_type))) < RELATIVE_ERROR
