"""The rotation, and the frequencies of every scaling type against transformers."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from transformers import Qwen3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from kernels.rope import ROPE_TYPES, RopeSpec, apply_rope_reference, rope_frequencies, rope_table
from tests.kernels.references import angle_loss, assert_close, rotate64

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


def parameters_by_transformers(
    scaling: dict[str, Any], head_dim: int, max_positions: int, text_tokens: int | None = None
) -> tuple[torch.Tensor, float]:
    """What its function for this type makes of a config, for a text of some length."""
    config = Qwen3Config(
        head_dim=head_dim,
        max_position_embeddings=max_positions,
        rope_parameters={"rope_theta": 10_000.0, **scaling},
    )
    frequencies, factor = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](config, seq_len=text_tokens)
    return frequencies, factor


def test_every_type_of_transformers_is_known() -> None:
    assert {"default", *ROPE_INIT_FUNCTIONS} == set(ROPE_TYPES)


@pytest.mark.parametrize("share", [0.25, 0.5, 1.0])
@pytest.mark.parametrize("scaling", SCALINGS[1:], ids=lambda scaling: str(scaling["rope_type"]))
def test_partial_frequencies_as_transformers(scaling: dict[str, Any], share: float) -> None:
    partial = {**scaling, "partial_rotary_factor": share}
    expected, factor = parameters_by_transformers(partial, 64, 1024)
    actual, actual_factor = rope_frequencies(RopeSpec(theta=10_000.0, **scaling), int(64 * share))
    assert torch.equal(actual, expected)
    assert actual_factor == pytest.approx(factor, rel=1e-15)


@pytest.mark.parametrize("share", [0.0, 0.25, 0.3, 1.0])
@pytest.mark.parametrize("factor", [1.0, 8.0])
def test_proportional_as_transformers(share: float, factor: float) -> None:
    scaling: dict[str, Any] = {"rope_type": "proportional", "partial_rotary_factor": share, "factor": factor}
    expected, _ = parameters_by_transformers(scaling, 64, 1024)
    actual, attention_factor = rope_frequencies(RopeSpec(theta=10_000.0, **scaling), 64)
    assert torch.equal(actual == 0, expected == 0), "other pairs are turned"
    assert torch.equal(actual, expected)
    assert attention_factor == 1.0


@pytest.mark.parametrize("text_tokens", [1, 100, 1024])
def test_dynamic_as_transformers_for_every_text_that_is_served(text_tokens: int) -> None:
    scaling: dict[str, Any] = {"rope_type": "dynamic", "factor": 2.5}
    expected, _ = parameters_by_transformers(scaling, 64, 1024, text_tokens)
    spec = RopeSpec(theta=10_000.0, max_position_embeddings=1024, **scaling)
    assert torch.equal(rope_frequencies(spec, 64)[0], expected)
    assert len(rope_table(spec, 64, 1024)) == 1024
    assert not torch.allclose(parameters_by_transformers(scaling, 64, 1024, 1025)[0], expected, rtol=1e-6)
    with pytest.raises(ValueError, match="rope_type dynamic: beyond 1024 positions"):
        rope_table(spec, 64, 1025)


LONGROPE: dict[str, Any] = {
    "rope_type": "longrope",
    "original_max_position_embeddings": 256,
    "short_factor": [1.0 + pair / 8 for pair in range(16)],
    "long_factor": [2.0 + pair for pair in range(16)],
}


@pytest.mark.parametrize("extra", [{}, {"factor": 16.0}, {"attention_factor": 1.5}])
@pytest.mark.parametrize(
    ("served", "text_tokens"), [(256, 1), (256, 256), (257, 257), (1024, 257), (1024, 1024)]
)
def test_longrope_as_transformers(served: int, text_tokens: int, extra: dict[str, float]) -> None:
    scaling = LONGROPE | extra
    expected, factor = parameters_by_transformers(scaling, 32, 1024, text_tokens)
    # Without a factor of its own it is the ratio of the two lengths.
    spec = RopeSpec(theta=10_000.0, max_position_embeddings=served, **({"factor": 1024 / 256} | scaling))
    frequencies, attention_factor = rope_frequencies(spec, 32)
    assert torch.equal(frequencies, expected)
    assert attention_factor == pytest.approx(factor, rel=1e-15)


def test_factors_for_another_number_of_pairs_are_refused() -> None:
    spec = RopeSpec(theta=1e4, max_position_embeddings=1024, **LONGROPE)
    with pytest.raises(ValueError, match="long_factor: must have 8 entries, one a pair, got 16"):
        rope_frequencies(spec, 16)
    with pytest.raises(ValueError, match="short_factor and long_factor: must be positive"):
        dataclasses.replace(spec, short_factor=[0.0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_only_the_first_elements_are_turned(dtype: torch.dtype) -> None:
    x = torch.randn(4, 3, 80).to(dtype)
    x[..., 33] = torch.nan  # not even read by the rotation
    cos_sin = rope_table(RopeSpec(theta=10_000.0), 32, 4)
    actual = apply_rope_reference(x, cos_sin)
    assert torch.equal(actual[..., :32], apply_rope_reference(x[..., :32], cos_sin))
    assert torch.equal(actual[..., 32:].nan_to_num(7.0), x[..., 32:].nan_to_num(7.0))


@pytest.mark.parametrize(
    ("rope_type", "settings", "message"),
    [
        ("axial", {}, "rope_type: must be one of default, linear, .*, got 'axial'"),
        ("dynamic", {"factor": 2.0}, "^max_position_embeddings: must be positive for rope_type dynamic"),
        (
            "longrope",
            {"original_max_position_embeddings": 64},
            "^max_position_embeddings: must be positive for rope_type longrope",
        ),
        ("proportional", {"partial_rotary_factor": 1.5}, "partial_rotary_factor"),
        ("yarn", {"factor": 2.0}, "original_max_position_embeddings"),
        (
            "llama3",
            {"original_max_position_embeddings": 8, "low_freq_factor": 4, "high_freq_factor": 1},
            "high_freq_factor",
        ),
        ("default", {"theta": 0.0}, "rope_theta"),
    ],
)
def test_settings_that_mean_nothing_are_named(rope_type: str, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RopeSpec(**{"theta": 1e4, "rope_type": rope_type, **settings})
