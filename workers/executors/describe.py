"""A model's description and the shape of its pages, from its config. Shared by all executors."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TypedDict

import torch

from workers.executors.info import DescribedConfig, ModelDescription
from workers.kv.tensors import LayerKv

PAGE_SIZE = 16

# The path of a snapshot of ORG/NAME in a cache of the Hugging Face hub. Names contain no double dashes.
_SNAPSHOT = re.compile(r".*/models--([^/]+)/snapshots/[0-9a-f]{40}")


class KvShape(TypedDict):
    """Arguments of KvTensors."""

    layers: tuple[LayerKv, ...]
    page_size: int
    dtype: torch.dtype


def kv_layers(config: DescribedConfig) -> tuple[LayerKv, ...]:
    """The KV shape of each layer, in a model whose layers are alike."""
    return (LayerKv(config.num_key_value_heads, config.head_dim, config.head_dim),) * config.num_hidden_layers


def kv_shape(config: DescribedConfig, dtype: torch.dtype) -> KvShape:
    """The shape of the pages of a model whose layers are alike."""
    return KvShape(layers=kv_layers(config), page_size=PAGE_SIZE, dtype=dtype)


def model_id_of(directory: Path) -> str:
    """The name of a model: as on the hub for a snapshot in the hub's cache, else the directory's."""
    directory = Path(os.path.abspath(directory))  # noqa: PTH100 - gives "." a name, and keeps that of a link
    found = _SNAPSHOT.fullmatch(directory.as_posix())
    return found[1].replace("--", "/") if found is not None else directory.name


def describe(
    config: DescribedConfig,
    model_id: str,
    dtype: torch.dtype,
    num_parameters: int = 0,
    weight_bytes: int = 0,
    fingerprint: str = "",
    backend: str = "native",
    licence: str = "",
) -> ModelDescription:
    """The description of a model."""
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
        backend=backend,
        license=licence,
    )
