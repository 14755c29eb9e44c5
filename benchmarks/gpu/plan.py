"""What is measured and how large: on a lent GPU, and in a rehearsal of every line on a CPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.shapes import SHAPES, Shape

PAGE_SIZE = 16
_QWEN3 = {"vocab_size": 151_936, "num_key_value_heads": 8, "head_dim": 128}

SMALL = SHAPES["qwen3-0.6b"]
MIDDLE = Shape(
    name="qwen3-8b",
    hidden_size=4096,
    intermediate_size=12_288,
    num_hidden_layers=36,
    num_attention_heads=32,
    **_QWEN3,
)
LARGE = Shape(
    name="qwen3-14b",
    hidden_size=5120,
    intermediate_size=17_408,
    num_hidden_layers=40,
    num_attention_heads=40,
    **_QWEN3,
)
_TINY = Shape(
    name="tiny",
    vocab_size=160,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=64,
    max_position_embeddings=128,
)


@dataclass(frozen=True, slots=True)
class Plan:
    """The sizes of a run. Tokens, elements or counts, but for what has its unit in its name.

    Attributes:
        rehearsal: Everything runs once, small, on the CPU; figures mean nothing.
        repeats: Samples of a figure.
        row_tokens: Rows that the kernels without attention are given.
        decode_attention: (batch, context) of the decode kernel.
        prefill_attention: (new tokens, context with them) of the prefill kernel.
        shapes: Models, each a part of its own.
        decode_steps: Steps of a round; rounds are `repeats`.
        max_rows: Largest batch for which graphs are captured.
        requests: Of the workload; prompts and outputs have `request_tokens` (low, high).
        step_tokens: Token budget of a step of the workload.
    """

    rehearsal: bool
    device: torch.device
    dtype: torch.dtype
    repeats: int
    copy_bytes: int
    matmul_size: int
    kernel_shape: Shape
    row_tokens: tuple[int, ...]
    decode_attention: tuple[tuple[int, int], ...]
    prefill_attention: tuple[tuple[int, int], ...]
    sampling_rows: tuple[int, ...]
    shapes: tuple[Shape, ...]
    decode_batches: tuple[int, ...]
    decode_context: int
    decode_steps: int
    max_rows: int
    prefill_tokens: tuple[int, ...]
    workload_shape: Shape
    requests: int
    request_tokens: tuple[int, int]
    step_tokens: int
    peer_batches: tuple[int, ...]


def real_plan() -> Plan:
    """For one H200, all of it within minutes."""
    return Plan(
        rehearsal=False,
        device=torch.device("cuda:0"),
        dtype=torch.bfloat16,
        repeats=20,
        copy_bytes=8 << 30,
        matmul_size=8192,
        kernel_shape=MIDDLE,
        row_tokens=(1, 64, 4096),
        # From the fourth on there are at least 200 MB of keys and values.
        decode_attention=((1, 1024), (8, 1024), (32, 1024), (64, 1024), (256, 1024), (8, 8192), (2, 32_768)),
        prefill_attention=((2048, 2048), (8192, 8192), (2048, 32_768)),
        sampling_rows=(1, 64, 256),
        shapes=(SMALL, MIDDLE, LARGE),
        decode_batches=(1, 8, 32, 64, 256),
        decode_context=1024,
        decode_steps=32,
        max_rows=256,
        prefill_tokens=(512, 2048, 8192),
        workload_shape=SMALL,
        requests=256,
        request_tokens=(100, 1024),
        step_tokens=8192,
        peer_batches=(1, 32),
    )


def rehearsal_plan() -> Plan:
    """A fraction of each part, with Triton's interpreter."""
    return Plan(
        rehearsal=True,
        device=torch.device("cpu"),
        dtype=torch.float32,  # the interpreter computes bfloat16 wrongly
        repeats=1,
        copy_bytes=1 << 16,
        matmul_size=32,
        kernel_shape=_TINY,
        row_tokens=(1, 3),
        decode_attention=((2, 40),),
        prefill_attention=((20, 40),),
        sampling_rows=(2,),
        shapes=(_TINY,),
        decode_batches=(1, 2),
        decode_context=20,
        decode_steps=2,
        max_rows=2,
        prefill_tokens=(24,),
        workload_shape=_TINY,
        requests=3,
        request_tokens=(3, 8),
        step_tokens=32,
        peer_batches=(2,),
    )


def settings(shape: Shape) -> dict[str, Any]:
    """The config.json of a shape. Qwen3 ties the embeddings of its small models only."""
    tied = shape.name not in (MIDDLE.name, LARGE.name)
    return shape.hf_config() | {"tie_word_embeddings": tied}
