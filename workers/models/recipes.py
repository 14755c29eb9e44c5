"""Recipes for quantising a model: the format of each matrix. The names are llama.cpp's."""

from __future__ import annotations

import torch

from kernels.group_formats import CHUNK_GROUPS, FORMATS, GROUP_INPUTS, GroupFormat
from workers.models.builder import build_decoder, is_router
from workers.models.config import ModelConfig
from workers.models.parameters import FormatOf

RECIPES = ("q8_0", "q4_0", "q4_k", "q4_k_m")
"""All matrices in one format; or "q4_k_m", which has more bits where they matter most."""

_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
# The families' names of these projections.
_VALUES, _FUSED = ("v_proj",), ("qkv_proj",)
_DOWN = ("down_proj", "w2", "output_linear")
# The formats for rows that are not whole super-blocks.
_WITHOUT_SUPER_BLOCKS = {"q4_k": "q5_0", "q5_k": "q8_0", "q6_k": "q8_0"}


def recipe(name: str, config: ModelConfig) -> FormatOf:
    """The format of each matrix of a model except routers. `name`: one of `RECIPES`."""
    targets = build_decoder(config, torch.float32, "meta").targets()

    def format_of(tensor: str) -> GroupFormat | None:
        if is_router(tensor):
            return None
        chosen = _mixed(tensor, config) if name == "q4_k_m" else name
        if targets[tensor].shape[-1] % (CHUNK_GROUPS * GROUP_INPUTS):
            chosen = _WITHOUT_SUPER_BLOCKS.get(chosen, chosen)
        return FORMATS[chosen]

    return format_of


def _mixed(tensor: str, config: ModelConfig) -> str:
    """As `llama_tensor_get_type` of llama.cpp, without its exceptions for 70B models and for 8 experts."""
    if tensor == (_EMBEDDING if config.tie_word_embeddings else _HEAD):
        return "q6_k"
    module = _module(tensor)
    if module in _FUSED:
        return "q5_k"
    if module in (*_VALUES, *_DOWN) and _has_more_bits(int(tensor.split(".")[2]), config.num_hidden_layers):
        return "q6_k"
    return "q4_k"


def _has_more_bits(layer: int, layers: int) -> bool:
    """Whether a layer gets more bits: all in the first and last eighth, and every third one in between."""
    eighth = layers // 8
    return layer < eighth or layer >= 7 * layers // 8 or (layer - eighth) % 3 == 2


def _module(tensor: str) -> str:
    return tensor.removesuffix(".weight").rpartition(".")[2]
