"""Embed: texts as vectors, by Forwards of all inputs.

The hidden states of a token do not depend on what follows it, so those of the last token represent the text.
A model whose layers see what follows cannot be served at all.
"""

from __future__ import annotations

import asyncio
import importlib
import re
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from quire.v1 import executor_pb2, runner_pb2, types_pb2

from service.api import validation
from service.api.server_state import ServerState
from service.api.status import from_status
from service.api.time_slice import TimeSlice
from service.auth.authenticator import current_tenant
from service.caches.tenants import counted
from service.errors import InvalidArgument, QuireError, SequenceTooLong, Unsupported
from service.text.text_model import TextModel

if TYPE_CHECKING:
    import numpy as np

MAX_INPUTS = 2048
LAST, MEAN, FIRST = "lasttoken", "mean", "cls"
# The size of an answer beside its numbers.
_VECTOR_BYTES = 32
_ITEM = re.compile(r"^(?:items\[\d+\]\.)?(?:token_ids)?")
# The method of this name. Any: the context of the call.
BatchForward: TypeAlias = Callable[
    [executor_pb2.BatchForwardRequest, Any], Awaitable[executor_pb2.BatchForwardResponse]
]


class Embedder:
    """Makes the embeddings of the model that is served. Without state."""

    def __init__(self, state: ServerState, text: TextModel, forward: BatchForward) -> None:
        self._state, self._text, self._forward = state, text, forward

    async def embed(self, request: runner_pb2.EmbedRequest, context: Any) -> runner_pb2.EmbedResponse:
        """Answers Embed. Raises QuireError, for the first input that fails."""
        validation.refuse_unknown(request)
        await self._state.first_worker(context.time_remaining())
        model, limits = self._state.first_ready.model, self._state.limits
        pooling = model.pooling or LAST
        if pooling not in (LAST, MEAN, FIRST):
            raise Unsupported(f"the model's embeddings need the pooling {pooling}, which is not supported")
        validation.check_num_items(request.inputs, MAX_INPUTS, "inputs")
        # Each Forward gets a copy of these.
        validation.check_cache_salt(request.cache_salt)
        validation.check_adapter(request.adapter_id, "", limits)
        if request.HasField("dimensions") and not 0 < request.dimensions <= model.hidden_size:
            raise InvalidArgument("BAD_OUTPUT", "dimensions", f"must be 1 to {model.hidden_size}")
        size_bytes = len(request.inputs) * (4 * (request.dimensions or model.hidden_size) + _VECTOR_BYTES)
        validation.check_response_size(size_bytes, limits, "inputs")
        # In messages, where a token takes 4 bytes; in a list it takes 36.
        items, lengths, time_slice = list[executor_pb2.ForwardRequest](), list[int](), TimeSlice()
        with counted(current_tenant(), time.monotonic, len(request.inputs), give_back=True):
            for index in range(len(request.inputs)):
                token_ids = await self._tokens(request, index)
                items.append(_item(request, token_ids, pooling))
                lengths.append(len(token_ids))
                if time_slice.due:
                    await time_slice.yield_to_others()
        # The last token is scored, so that there are outputs of two.
        item_bytes = validation.check_output(items[0].output, limits, rows=2, scored=1, takes_mean=True)
        at_once = max(1, min(limits.max_items, limits.max_response_bytes // item_bytes))
        await asyncio.to_thread(importlib.import_module, "numpy")
        response = runner_pb2.EmbedResponse()
        for first in range(0, len(items), at_once):
            group = items[first : first + at_once]
            batch = await self._forward(executor_pb2.BatchForwardRequest(items=group), context)
            time_slice = TimeSlice()
            for index, result in enumerate(batch.results):
                if result.HasField("error"):
                    raise _of_input(from_status(result.error), request, first + index)
                vector = _vector(result.response.outputs[-1], request)
                response.embeddings.add(
                    values=vector.tolist(),
                    input_tokens=lengths[first + index],
                    cached_tokens=result.response.reused_tokens,
                )
                if time_slice.due:
                    await time_slice.yield_to_others()
        return response

    async def _tokens(self, request: runner_pb2.EmbedRequest, index: int) -> Sequence[int]:
        """The valid tokens of an input."""
        given, limits = request.inputs[index], self._state.limits
        token_ids: Sequence[int] = given.tokens.token_ids
        try:
            if given.WhichOneof("input") == "text":
                most = limits.max_seq_tokens
                token_ids = await self._text.encode(given.text, max_tokens=most)
            validation.check_tokens(token_ids, limits)
        except (InvalidArgument, SequenceTooLong) as error:
            raise _of_input(error, request, index) from None
        return token_ids


def _item(
    request: runner_pb2.EmbedRequest, token_ids: Sequence[int], pooling: str
) -> executor_pb2.ForwardRequest:
    """The Forward whose last output has the vector."""
    return executor_pb2.ForwardRequest(
        # What follows the first token does not change its states.
        token_ids=token_ids[:1] if pooling == FIRST else token_ids,
        output=types_pb2.OutputOptions(hidden=types_pb2.HiddenStates(mean=pooling == MEAN)),
        priority=request.priority,
        score_from=0 if pooling == FIRST else len(token_ids) - 1,
        adapter_id=request.adapter_id,
        cache_salt=request.cache_salt,
    )


def _vector(
    output: types_pb2.StepOutput, request: runner_pb2.EmbedRequest
) -> np.ndarray[Any, np.dtype[np.float32]]:
    """The pooled states, cut and of the length that the request says."""
    import numpy as np  # noqa: PLC0415 - most gateways never embed

    # In float64 the squares have no error that a float32 would show.
    states: Any = np.frombuffer(output.hidden[0].data, np.float32).astype(np.float64)
    vector = states[: request.dimensions] if request.dimensions else states
    if not request.unnormalized and (length := float(np.linalg.norm(vector))):
        vector = vector / length
    pooled: np.ndarray[Any, np.dtype[np.float32]] = vector.astype(np.float32)
    return pooled


def _of_input(error: QuireError, request: runner_pb2.EmbedRequest, index: int) -> QuireError:
    """The same error, which names a field of the input, or of the request."""
    kind = request.inputs[index].WhichOneof("input") or "tokens"
    of_input = f"inputs[{index}].{kind}"
    if isinstance(error, SequenceTooLong):
        return error.at(of_input)
    if isinstance(error, InvalidArgument):
        field = _ITEM.sub("", error.field)
        is_shared = field in ("adapter_id", "cache_salt", "priority")
        if not is_shared:
            field = f"{of_input}.token_ids{field}" if kind == "tokens" else of_input
        return error.at(field)
    return error
