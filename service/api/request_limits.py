"""The limits that requests are checked against, and checks of experts for replay."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import combinations

from quire.v1 import types_pb2

from service.errors import InvalidArgument, Unsupported, without_lora

# The number of rows of ids that are compared at a time: some of their columns fit into a CPU cache.
_BLOCK_ROWS = 1 << 16
# Up to this many experts per layer, an id takes one byte, else two. Workers use the same constant.
_ONE_BYTE_EXPERTS = 256


@dataclass(frozen=True, slots=True)
class Experts:
    """The experts of the served model, which may have none, or none that can be returned or replayed."""

    model: types_pb2.ModelDescription

    @property
    def token_bytes(self) -> int:
        """The size of StepOutput.experts in bytes."""
        id_bytes = 1 if self.model.num_experts <= _ONE_BYTE_EXPERTS else 2
        return self.model.moe_layers * self.model.experts_per_token * id_bytes

    def require(self, field: str) -> None:
        """Raises Unsupported, with `field`, if the model has no experts."""
        if not self.model.moe_layers:
            text = "the served model has no experts"
            if self.model.backend == "transformers":
                text = "the transformers backend neither returns nor replays experts"
            raise Unsupported(text, field=field)

    def check_replay(self, data: bytes, start: int, tokens: int) -> None:
        """Checks that `data` is for tokens from `start` on. Raises InvalidArgument or Unsupported."""
        if not data:
            if start:
                raise InvalidArgument("BAD_EXPERTS", "experts_from", "must be 0 without experts")
            return
        self.require("experts")
        if len(data) % self.token_bytes:
            text = f"must have {self.token_bytes} bytes for each token, got {len(data)} bytes"
            raise InvalidArgument("BAD_EXPERTS", "experts", text)
        given = len(data) // self.token_bytes
        if start + given > tokens:
            text = f"{given} tokens from {start} on, but there are only {tokens}"
            raise InvalidArgument("BAD_EXPERTS", "experts", text)
        self._check_ids(data)

    def _check_ids(self, data: bytes) -> None:
        import numpy as np  # noqa: PLC0415 - `ServerState` imports it before, if there are experts

        count, per_token = self.model.num_experts, self.model.experts_per_token
        ids = np.frombuffer(data, dtype="u1" if count <= _ONE_BYTE_EXPERTS else "<u2")
        rows = ids.reshape(-1, per_token)  # [tokens * layers, per_token]
        if ids.max() >= count:
            where, text = int(ids.argmax()), f"expert {ids.max()} of {count}"
        else:
            for start in range(0, len(rows), _BLOCK_ROWS):
                # Compares pairs of columns, which is faster than sorting each row.
                columns = np.ascontiguousarray(rows[start : start + _BLOCK_ROWS].T)
                pairs = combinations(columns, 2)
                repeated = next((found for a, b in pairs if (found := a == b).any()), None)
                if repeated is not None:
                    break
            else:
                return
            where = (start + int(repeated.argmax())) * per_token
            text = "an expert occurs more than once"
        token, place = divmod(where, self.model.moe_layers * per_token)
        text = f"{text}, in layer {place // per_token} of those with experts, of given token {token}"
        raise InvalidArgument("BAD_EXPERTS", "experts", text)


NO_EXPERTS = Experts(types_pb2.ModelDescription())


def no_adapter(_adapter_id: str, _made_with: int, reason: str = "") -> int:
    """`adapter_of` without support for adapters. `reason`: see ExecutorCapabilities.backend_reason."""
    raise without_lora(reason, field="adapter_id")


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """The limits that requests are checked against."""

    vocab_size: int
    max_response_bytes: int
    # The most tokens that a sequence can have in any worker.
    max_seq_tokens: int = 1 << 32
    max_items: int = 1024
    # The size of a hidden state. 0: the executor does not return any.
    hidden_size: int = 0
    num_layers: int = 0
    experts: Experts = NO_EXPERTS
    # The model version of these limits.
    weights: int = 0
    # The number of the adapter with an id. The second argument, if not 0, is the number of the adapter that
    # a repeated request was made with: it is returned if it has this id. Raises AdapterNotFound, Unsupported.
    adapter_of: Callable[[str, int], int] = no_adapter
    # The adapter of the cache that the request with an id creates or has created. 0: none.
    made_with: Callable[[str], int] = lambda _request_id: 0
