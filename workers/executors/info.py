"""What an executor says of itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ExecutorInfo:
    """The model and how it is run. Sizes in bytes and tokens."""

    executor: str
    runner: str
    kernels: Sequence[str]
    device: str
    dtype: str
    model_id: str
    architecture: str
    vocab_size: int
    max_seq_len: int
    num_layers: int
    hidden_size: int
    num_attention_heads: int
    num_kv_heads: int
    head_dim: int
    num_parameters: int = 0
    weight_bytes: int = 0
    eos_token_ids: Sequence[int] = ()
    bos_token_id: int | None = None
    # Contents of tokenizer.json; empty where there is none.
    tokenizer_json: bytes = b""


@dataclass(frozen=True, slots=True)
class KvCapacity:
    """Pages of the pool. `free` are empty, `cached` hold released tokens and are given up when needed."""

    page_size_tokens: int
    bytes_per_page: int
    total: int
    free: int
    cached: int

    @property
    def available(self) -> int:
        """Pages that can be had."""
        return self.free + self.cached


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What the executor can do."""

    native_unified_decode: bool
    verify: bool
    fork: bool
    sampling: bool
    prefix_reuse: bool
    lora: bool


@dataclass(slots=True)
class StepCounters:
    """What was run since the start. Owned by the executor; times in ns."""

    prefill_operations: int = 0
    decode_operations: int = 0
    prefill_ns: int = 0
    decode_ns: int = 0
    steps: int = 0
    step_tokens: int = 0
    batch_items: int = 0
