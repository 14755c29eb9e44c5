"""The rotation, and the frequencies of every scaling type against transformers."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from kernels.rope import RopeSpec, apply_rope_reference, rope_frequencies, rope_table
from tests.kernels.references import angle_loss, assert_close, rotate64

torch.set_num_threads(1)

SCALINGS: list[dict[str, Any]] = [
    {"rope_type": "default"},
    {"rope_type": "linear", "factor": 4.0},
    {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 256,
    },
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256},
    {
        "rope_type": "yarn",
        "factor": 16.0,
        "original_max_position_embeddings": 128,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
        "truncate": False,
        "mscale": 0.7,
        "mscale_all_dim": 1.2,
    },
    {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64, "attention_factor": 1.25},
]


@pytest.mark.parametrize("scaling", SCALINGS, ids=lambda scaling: str(scaling["rope_type"]))
@pytest.mark.parametrize(("theta", "head_dim"), [(10_000.0, 64), (1_000_000.0, 128), (500_000.0, 80)])
def test_table_as_transformers(scaling: dict[str, Any], theta: float, head_dim: int) -> None:
    config = Qwen3Config(
        head_dim=head_dim, max_position_embeddings=1024, rope_parameters={"rope_theta": theta, **scaling}
    )
    positions = torch.arange(1024)
    cos, sin = Qwen3RotaryEmbedding(config)(torch.zeros(1, dtype=torch.float32), positions[None])
    table = rope_table(RopeSpec(theta=theta, **scaling), head_dim, 1024)
    half = head_dim // 2
    # One unit in the last place of a frequency is this angle at the last position.
    tolerance = 1024 * 2.0**-23
    assert torch.allclose(table[:, :half], cos[0, :, :half], rtol=0, atol=tolerance)
    assert torch.allclose(table[:, half:], sin[0, :, half:], rtol=0, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("head_dim", [32, 80])
def test_rotation_is_accurate(head_dim: int, dtype: torch.dtype) -> None:
    spec = RopeSpec(theta=10_000.0)
    positions = [0, 1, 17, 63]
    # Every second head of a wider tensor: the heads are a strided view, as they are in the decoder.
    x = torch.randn(4, 6, head_dim).to(dtype)[:, ::2]
    table = rope_table(spec, head_dim, 64)
    frequencies = rope_frequencies(spec, head_dim)[0].tolist()
    actual = apply_rope_reference(x, table[torch.tensor(positions)])
    assert actual.is_contiguous()
    exact = rotate64(x, positions, frequencies)
    assert_close(actual, exact, angle_loss(63))


def test_position_zero_changes_nothing() -> None:
    x = torch.randn(3, 2, 64)
    table = rope_table(RopeSpec(theta=10_000.0), 64, 1)
    assert torch.equal(apply_rope_reference(x, table.expand(3, -1)), x)


def test_wrong_arguments_are_named() -> None:
    with pytest.raises(
        ValueError, match="rope_type: must be one of default, linear, llama3, yarn, got 'dynamic'"
    ):
        RopeSpec(theta=1e4, rope_type="dynamic")
    with pytest.raises(ValueError, match="original_max_position_embeddings"):
        RopeSpec(theta=1e4, rope_type="yarn", factor=2.0)
    with pytest.raises(ValueError, match="high_freq_factor"):
        RopeSpec(
            theta=1e4,
            rope_type="llama3",
            original_max_position_embeddings=8,
            low_freq_factor=4,
            high_freq_factor=1,
        )
    with pytest.raises(ValueError, match="rope_theta"):
        RopeSpec(theta=0.0)
    with pytest.raises(ValueError, match="head_dim"):
        rope_frequencies(RopeSpec(theta=1e4), 33)


def test_spec_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        RopeSpec(theta=1e4).theta = 1.0  # type: ignore[misc]
