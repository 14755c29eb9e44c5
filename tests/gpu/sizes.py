"""Real sizes on a GPU, small ones in a rehearsal; and small models with the shapes of real ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import numpy as np
import torch

from kernels.few_rows_tiles import Tiles
from tests.kernels.conftest import INTERPRETED
from workers.kv.tensors import KvTensors
from workers.models.builder import build_decoder
from workers.models.config import ModelConfig
from workers.models.decoder import Decoder
from workers.models.few_rows import Place, TilesOfPlaces
from workers.models.model import new_pages
from workers.runners.cuda_graph import buckets_up_to

T = TypeVar("T")

# In a rehearsal torch multiplies the matrices, and on many CPUs bfloat16 is slow.
MODEL_DTYPE = torch.float32 if INTERPRETED else torch.bfloat16


def sized(real: T, rehearsal: T) -> T:
    """The size for where this runs."""
    return rehearsal if INTERPRETED else real


def layers_of_qwen3_8b(max_positions: int) -> ModelConfig:
    """Two layers of Qwen3-8B, with a smaller vocabulary; narrow ones in a rehearsal."""
    return ModelConfig.from_settings(
        {
            "model_type": "qwen3",
            "vocab_size": sized(32_000, 97),
            "hidden_size": sized(4096, 64),
            "intermediate_size": sized(12_288, 96),
            "num_hidden_layers": sized(2, 1),
            "num_attention_heads": sized(32, 2),
            "num_key_value_heads": sized(8, 1),
            "head_dim": sized(128, 64),
            "rms_norm_eps": 1e-6,
            "rope_theta": 1e6,
            "max_position_embeddings": max_positions,
            "tie_word_embeddings": False,
        }
    )


def layers_of_qwen3_moe(max_positions: int) -> ModelConfig:
    """Two layers in the sizes of Qwen3-30B-A3B, with a quarter of its experts; narrow ones in a rehearsal."""
    return ModelConfig.from_settings(
        {
            "model_type": "qwen3_moe",
            "vocab_size": sized(32_000, 97),
            "hidden_size": sized(2048, 64),
            "intermediate_size": sized(6144, 96),
            "num_hidden_layers": sized(2, 1),
            "num_attention_heads": sized(32, 2),
            "num_key_value_heads": sized(4, 1),
            "head_dim": sized(128, 64),
            "num_experts": sized(32, 4),
            "num_experts_per_tok": sized(8, 2),
            "moe_intermediate_size": sized(768, 48),
            "norm_topk_prob": True,
            "rope_theta": 1e6,
            "max_position_embeddings": max_positions,
            "tie_word_embeddings": False,
        }
    )


def layers_of_gemma3(max_positions: int) -> ModelConfig:
    """A layer with a window and one without, in the sizes of Gemma 3 12B; narrow ones in a rehearsal."""
    return ModelConfig.from_settings(
        {
            "model_type": "gemma3_text",
            "vocab_size": sized(32_000, 97),
            "hidden_size": sized(3840, 64),
            "intermediate_size": sized(15_360, 96),
            "num_hidden_layers": 2,
            "num_attention_heads": sized(16, 2),
            "num_key_value_heads": sized(8, 1),
            "head_dim": sized(256, 64),
            "layer_types": ["sliding_attention", "full_attention"],
            "sliding_window": sized(128, 8),
            "max_position_embeddings": max_positions,
        }
    )


def layers_of_deepseek_v3(max_positions: int) -> ModelConfig:
    """A dense layer and one with experts: the heads of DeepSeek-V3, fewer experts; narrow in a rehearsal."""
    return ModelConfig.from_settings(
        {
            "model_type": "deepseek_v3",
            "vocab_size": sized(32_000, 97),
            "hidden_size": sized(2048, 64),
            "intermediate_size": sized(4096, 96),
            "num_hidden_layers": 2,
            "num_attention_heads": sized(128, 2),
            "num_key_value_heads": sized(128, 2),
            "q_lora_rank": sized(1536, 24),
            "kv_lora_rank": sized(512, 48),
            "qk_rope_head_dim": sized(64, 16),
            "qk_nope_head_dim": sized(128, 16),
            "v_head_dim": sized(128, 20),
            "n_routed_experts": sized(32, 4),
            "num_experts_per_tok": sized(8, 2),
            "n_group": sized(8, 2),
            "topk_group": sized(4, 1),
            "moe_intermediate_size": sized(512, 48),
            "first_k_dense_replace": 1,
            "max_position_embeddings": max_positions,
        }
    )


def layers_of_each_kind(max_positions: int) -> dict[str, ModelConfig]:
    """A dense model, and those with experts, windows and latents, all with the same vocabulary."""
    return {
        "dense": layers_of_qwen3_8b(max_positions),
        "experts": layers_of_qwen3_moe(max_positions),
        "windows": layers_of_gemma3(max_positions),
        "latents": layers_of_deepseek_v3(max_positions),
    }


def random_decoder(config: ModelConfig, device: torch.device) -> Decoder:
    """Seeded weights under which activations keep their size."""
    decoder = build_decoder(config, MODEL_DTYPE, device)
    generator = torch.Generator().manual_seed(1)
    for name, target in decoder.targets().items():
        values = torch.randn(target.shape, generator=generator)
        scaled = 1 + 0.1 * values if name.endswith("norm.weight") else values * target.shape[-1] ** -0.5
        target.tensor.copy_(scaled)
    if INTERPRETED:
        decoder.fuse_few_rows(FirstTiles(lambda _: 0.0))
    return decoder


class FirstTiles(TilesOfPlaces):
    """Fuses each product, without measuring: for rehearsals."""

    def choose(self, place: Place, rows: int) -> Tiles | None:
        """The first of them."""
        return place.tiles[0] if place.tiles else None


def nan_kv(decoder: Decoder, num_pages: int) -> KvTensors:
    """Pages whose unused slots hold NaN."""
    kv = new_pages(decoder, num_pages)
    for layer in range(kv.num_layers):
        for pages in kv.layer(layer):
            pages.data.fill_(torch.nan)
    return kv


def repeat_launches(run: Callable[[], None]) -> Callable[[], None]:
    """In place of a CUDA graph."""
    # Rows without a sequence are computed of whatever is in memory, and not read.
    with np.errstate(over="ignore", invalid="ignore"):
        run()
    return run


class ForwardsFirst:
    """In place of CUDA graphs: as `repeat_launches`, but only forwards are launched to capture them.

    What chooses once more is captured after them. In the interpreter it takes most of the time of a capture,
    and nobody reads what it leaves. For one runner, without adapters.
    """

    def __init__(self, max_rows: int) -> None:
        self._forwards = len(buckets_up_to(max_rows))

    def __call__(self, run: Callable[[], None]) -> Callable[[], None]:
        self._forwards -= 1
        return run if self._forwards < 0 else repeat_launches(run)
