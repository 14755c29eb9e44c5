"""What the blocking and the asyncio client share of Execute: the request, and where a broken stream is."""

from __future__ import annotations

import random
import uuid
from collections.abc import Sequence

import grpc
from quire._calls import duration
from quire.v1 import runner_pb2, types_pb2

# Between two tries to go on, at first and at most.
_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 2.0


class Progress:
    """A request, and how much of its answer has come."""

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
        """Of its answer nothing has come. An empty `request_id`: one is made."""
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
        self._pause_s = 0.0

    @property
    def request_id(self) -> str:
        """Names the request."""
        return self._request.request_id

    def request(self) -> runner_pb2.ExecuteRequest:
        """What to send: the first time, or to go on."""
        del self._request.resume_after[:]
        for (item_id, sample), position in self._position.items():
            self._request.resume_after.add(item_id=item_id, sample=sample, position=position)
        return self._request

    def took(self, response: runner_pb2.ExecuteResponse) -> Sequence[runner_pb2.SampleChunk]:
        """The chunks of a message, which are told to the caller now."""
        if response.chunks:
            self._pause_s = 0.0
        for chunk in response.chunks:
            self._position[chunk.item_id, chunk.sample] = chunk.position + max(1, len(chunk.token_ids))
        return response.chunks

    def pause_s(self, error: grpc.RpcError) -> float | None:
        """How long to wait before going on after an error; None: it cannot be gone on."""
        code = error.code()
        if not self._request.HasField("keep") or code is not grpc.StatusCode.UNAVAILABLE:
            return None
        # Not all come again at once.
        self._pause_s = min(_LONGEST_PAUSE_S, 2 * self._pause_s or _FIRST_PAUSE_S)
        return self._pause_s * random.uniform(0.5, 1.0)
