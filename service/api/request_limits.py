"""What requests are checked against: the limits of a model and its workers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from quire.v1 import types_pb2

from service.api.experts import Experts
from service.errors import without_lora

NO_EXPERTS = Experts(types_pb2.ModelDescription())


def no_adapter(_adapter_id: str, _made_with: int, reason: str = "") -> int:
    """What an executor without adapters answers. `reason`: see ExecutorCapabilities.backend_reason."""
    raise without_lora(reason, field="adapter_id")


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """The limits that requests are checked against."""

    vocab_size: int
    max_response_bytes: int
    # The most tokens that a sequence can have in any worker.
    max_seq_tokens: int = 1 << 32
    max_items: int = 1024
    # Of hidden states. 0: the executor does not return any.
    hidden_size: int = 0
    num_layers: int = 0
    experts: Experts = NO_EXPERTS
    # The model version of these limits.
    weights: int = 0
    # The number of the adapter that an id names; for a repetition of what was made with a version of that id,
    # this one's number, which is given. Raises AdapterNotFound, or Unsupported.
    adapter_of: Callable[[str, int], int] = no_adapter
    # The adapter of the cache that a request with this id makes or has made. 0: none.
    made_with: Callable[[str], int] = lambda _request_id: 0
