"""Statistics of an engine: the running step, and counts and times since its start."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from quire.v1.types_pb2 import StepCounts

from workers.common.worker_pb2 import WorkerSnapshot
from workers.operations import Accept, Forward, Kind

# The fields of StepCounts for each kind.
_FIELDS = {kind: (f"{kind.name.lower()}_operations", f"{kind.name.lower()}_ns") for kind in Kind}


class StepStats:
    """Written by the engine's thread. Any thread may call `status`."""

    def __init__(self, device: torch.device) -> None:
        """`device`: whose memory is reported."""
        self._device = device
        self._counts = StepCounts()
        # In time.monotonic_ns(); 0 between steps.
        self._began_ns = 0
        self._number = 0
        self._tokens = 0
        # The best time per token of any step so far; short steps take more. 0: no step yet.
        self._ns_per_token = 0.0

    def step_begins(self, tokens: int, began_ns: int) -> None:
        """Note that a step of `tokens` tokens has begun."""
        self._number += 1
        self._tokens = tokens
        self._began_ns = began_ns

    def step_ends(self, items: int) -> None:
        """Count a step of `items` forwards. 0: it failed."""
        if items:
            ns_per_token = (time.monotonic_ns() - self._began_ns) / self._tokens
            self._ns_per_token = min(self._ns_per_token or ns_per_token, ns_per_token)
            self._counts.steps += 1
            self._counts.batch_items += items
            self._counts.step_tokens += self._tokens
        self._began_ns = 0

    def count(self, forward: Forward) -> None:
        """Count a complete forward that was requested."""
        for field, more in zip(_FIELDS[forward.kind], (1, forward.compute_ns), strict=True):
            setattr(self._counts, field, getattr(self._counts, field) + more)
        if forward.kind is Kind.VERIFY and forward.accept is Accept.CHOSEN:
            self._counts.draft_tokens += len(forward.token_ids) - 1
            self._counts.accepted_draft_tokens += forward.kept - 1

    def count_decodes(self, times_ns: Sequence[int]) -> None:
        """Count complete plain decodes that were requested, by their times."""
        self._counts.decode_operations += len(times_ns)
        self._counts.decode_ns += sum(times_ns)

    def reset(self) -> None:
        self._counts = StepCounts()

    def status(self) -> WorkerSnapshot:
        """The part of a snapshot about the running step and the counts."""
        began_ns, device = self._began_ns, self._device
        on_gpu = device.type == "cuda"
        return WorkerSnapshot(
            counts=self._counts,
            step_age_ns=time.monotonic_ns() - began_ns if began_ns else 0,
            step_number=self._number,
            step_expected_ns=int(self._tokens * self._ns_per_token) if began_ns else 0,
            device_memory_bytes=torch.cuda.memory_allocated(device) if on_gpu else 0,
            device_memory_peak_bytes=torch.cuda.max_memory_allocated(device) if on_gpu else 0,
        )
