"""The capabilities and metrics of an executor: plain data with the field names of the protos."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from workers.operations import Kind


@dataclass(frozen=True, slots=True)
class Capabilities:
    """How the model is run, and which features it supports."""

    executor: str
    runner: str
    kernels: Sequence[str]
    products: str
    device: str
    page_size_tokens: int
    bytes_per_page: int
    # The maximum length of a sequence: the model's context, or all of the pool if that is smaller.
    kv_capacity_tokens: int
    supports_native_unified_decode: bool
    supports_token_trees: bool
    supports_hidden_states: bool
    batch_invariant: bool
    supports_lora: bool
    max_lora_adapters: int
    # The setting or tensor because of which the transformers library runs the model and not native code.
    backend_reason: str
    # The recurrent state of a sequence. 0: the model has none.
    bytes_per_state: int
    supports_verify: bool = True
    supports_fork: bool = True
    supports_sampling: bool = True
    supports_prefix_reuse: bool = True
    # The name of the model that drafts; "": none does.
    draft_model: str = ""


@dataclass(slots=True)
class StepCounts:
    """Counts since the start, by kind of operation. Times in ns, from `begin` to the answer."""

    prefill_operations: int = 0
    decode_operations: int = 0
    verify_operations: int = 0
    score_operations: int = 0
    prefill_ns: int = 0
    decode_ns: int = 0
    verify_ns: int = 0
    score_ns: int = 0
    replay_operations: int = 0
    replay_ns: int = 0
    steps: int = 0
    step_tokens: int = 0
    batch_items: int = 0
    # Of verifies that keep accepted drafts only.
    draft_tokens: int = 0
    accepted_draft_tokens: int = 0

    def add_operation(self, kind: Kind, took_ns: int, operations: int = 1) -> None:
        """Count completed operations, which took so long in all."""
        match kind:
            case Kind.PREFILL:
                self.prefill_operations += 1
                self.prefill_ns += took_ns
            case Kind.DECODE:
                self.decode_operations += operations
                self.decode_ns += took_ns
            case Kind.VERIFY:
                self.verify_operations += 1
                self.verify_ns += took_ns
            case Kind.SCORE:
                self.score_operations += 1
                self.score_ns += took_ns
            case Kind.REPLAY:
                self.replay_operations += 1
                self.replay_ns += took_ns


@dataclass(frozen=True, slots=True)
class ExecutorStatus:
    """The running step, and the counts since the start.

    Attributes:
        counts: A copy.
        step_age_ns: How long the running step has been running; 0 between steps.
        step_number: The number of the running or last step.
        step_expected_ns: Its time at the best rate measured so far; 0 between steps, or without a rate.
        device_memory_bytes: Device memory used by tensors; 0 on the CPU.
        device_memory_peak_bytes: The peak of that.
    """

    counts: StepCounts
    step_age_ns: int
    step_number: int
    step_expected_ns: int
    device_memory_bytes: int
    device_memory_peak_bytes: int
