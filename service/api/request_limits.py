"""What requests are checked against: the limits of a model and its workers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from quire.v1 import types_pb2

from service.api.experts import Experts
from service.errors import without_lora

NO_EXPERTS = Experts(types_pb2.ModelDescription())


def no_adapter(_adapter_id: str, reason: str = "") -> int:
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
    # The number of the adapter that an id names. Raises AdapterNotFound, or Unsupported.
    adapter_of: Callable[[str], int] = no_adapter
    # The limits for a request with the id of one that creates or has created a cache. None: there is none.
    limits_of_creation: Callable[[str], RequestLimits | None] | None = None

    def of_creation(self, request_id: str) -> RequestLimits:
        """The limits for a new cache, or for one that this request id has made."""
        if not request_id or self.limits_of_creation is None:
            return self
        return self.limits_of_creation(request_id) or self
