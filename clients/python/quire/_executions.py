"""Execute for the blocking and the asyncio client: the request, and the position to resume a stream at."""

from __future__ import annotations

import random
import uuid
from collections.abc import Sequence

import grpc
from quire._calls import duration
from quire.v1 import runner_pb2, types_pb2

# The delay between two attempts to resume: the first, and the maximum.
_INITIAL_BACKOFF_S = 0.1
_MAX_BACKOFF_S = 2.0


class Progress:
    """A request, and how much of its response has been received."""

    def __init__(
        self,
        items: Sequence[runner_pb2.ExecuteItem],
        *,
        runtime: str,
        request_id: str,
        policy: runner_pb2.RoutingPolicy,
        keep_s: float | None,
        max_cost_usd: float | None,
        priority: types_pb2.Priority,
    ) -> None:
        """Nothing has been received. If `request_id` is empty, one is generated."""
        self._request = runner_pb2.ExecuteRequest(
            items=items,
            runtime=runtime,
            request_id=request_id or uuid.uuid4().hex,
            policy=policy,
            keep=duration(keep_s),
            max_cost_usd=max_cost_usd,
            priority=priority,
        )
        self._position: dict[tuple[str, int], int] = {}
        self._backoff_s = 0.0

    @property
    def request_id(self) -> str:
        """The key of the execution."""
        return self._request.request_id

    def request(self) -> runner_pb2.ExecuteRequest:
        """The request to start or resume the execution with. Valid until the next call."""
        del self._request.resume_after[:]
        for (item_id, sample), position in self._position.items():
            self._request.resume_after.add(item_id=item_id, sample=sample, position=position)
        return self._request

    def received(self, response: runner_pb2.ExecuteResponse) -> Sequence[runner_pb2.SampleChunk]:
        """Records that the chunks of a message were received, and returns them."""
        if response.chunks:
            self._backoff_s = 0.0
        for chunk in response.chunks:
            self._position[chunk.item_id, chunk.sample] = chunk.position + max(1, len(chunk.token_ids))
        return response.chunks

    def backoff_s(self, error: grpc.RpcError) -> float | None:
        """The delay before resuming after an error. None: the execution cannot be resumed."""
        code = error.code()
        if not self._request.HasField("keep") or code is not grpc.StatusCode.UNAVAILABLE:
            return None
        # Jitter spreads the attempts of many clients.
        self._backoff_s = min(_MAX_BACKOFF_S, 2 * self._backoff_s or _INITIAL_BACKOFF_S)
        return self._backoff_s * random.uniform(0.5, 1.0)
