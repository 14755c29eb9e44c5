"""What all executors say of a model's config: its description, and the shape of its pages."""

from __future__ import annotations

from typing import TypedDict

import torch

from workers.executors.info import ModelDescription
from workers.kv.tensors import LayerKv
from workers.models.config import ModelConfig
from workers.models.embedding_attention import EmbeddingConfig

PAGE_SIZE = 16


class KvShape(TypedDict):
    """Arguments of KvTensors."""

    layers: tuple[LayerKv, ...]
    page_size: int
    dtype: torch.dtype


def kv_shape(config: ModelConfig | EmbeddingConfig, dtype: torch.dtype) -> KvShape:
    """The shape of a model's pages."""
    layer = LayerKv(config.num_key_value_heads, config.head_dim, config.head_dim)
    return KvShape(layers=(layer,) * config.num_hidden_layers, page_size=PAGE_SIZE, dtype=dtype)


def describe(
    config: ModelConfig | EmbeddingConfig,
    model_id: str,
    dtype: torch.dtype,
    num_parameters: int = 0,
    weight_bytes: int = 0,
    fingerprint: str = "",
) -> ModelDescription:
    """The model of a config."""
    return ModelDescription(
        model_id=model_id,
        architecture=config.model_type,
        vocab_size=config.vocab_size,
        max_seq_len=config.max_position_embeddings,
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        num_attention_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        dtype=str(dtype).removeprefix("torch."),
        num_parameters=num_parameters,
        weight_bytes=weight_bytes,
        eos_token_ids=config.eos_token_ids,
        bos_token_id=config.bos_token_id,
        fingerprint=fingerprint,
    )
