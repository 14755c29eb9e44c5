"""Scores of pairs by a model that reads both texts, and whose next token is its answer: yes or no.

The files of such a model name the two tokens, as sentence-transformers has them (`LogitScore`), and its chat
template writes messages of the roles query and document, as in vLLM.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from quire.v1 import executor_pb2, runner_pb2, types_pb2

from service.api import validation
from service.api.server_state import ServerState
from service.api.status import from_status
from service.api.time_slice import TimeSlice
from service.auth.authenticator import counted
from service.errors import InvalidArgument, SequenceTooLong, Unsupported
from service.runtimes.embedding import BatchForward
from service.text.text_model import TextModel

# Beyond which a likelihood is 0 as a float.
_LARGE = 700


class CrossEncoder:
    """Compares texts by the model that is served. Without state."""

    def __init__(self, state: ServerState, text: TextModel, forward: BatchForward) -> None:
        self._state, self._text, self._forward = state, text, forward

    @property
    def is_served(self) -> bool:
        """Whether the served model is one that reads pairs. Raises NoWorker."""
        return bool(_answers(self._state.first_ready.model.pooling))

    async def judge(
        self, request: runner_pb2.EmbedRequest, pairs: Sequence[tuple[int, int]], context: Any
    ) -> tuple[list[runner_pb2.Embedding], list[float]]:
        """How likely the model says yes to each pair of inputs, which are texts; and what these cost.

        Raises QuireError, for the first pair that fails.
        """
        pooling = self._state.first_ready.model.pooling
        ids = _answers(pooling)
        if len(ids) != 2:
            # A logit alone is not in an answer.
            raise Unsupported(f"the model's scores need {pooling}, which has no token for no")
        validation.refuse_unknown(request)
        # Each Forward gets a copy of it.
        validation.check_cache_salt(request.cache_salt)
        items, time_slice = list[executor_pb2.ForwardRequest](), TimeSlice()
        with counted(len(pairs), are_made=True):
            for pair in pairs:
                items.append(await self._item(request, pair, ids))
                if time_slice.due:
                    await time_slice.yield_to_others()
        found, scores = list[runner_pb2.Embedding](), list[float]()
        at_once = max(1, self._state.limits.max_items)
        for first in range(0, len(items), at_once):
            group = items[first : first + at_once]
            batch = await self._forward(executor_pb2.BatchForwardRequest(items=group), context)
            for item, result in zip(group, batch.results, strict=True):
                if result.HasField("error"):
                    raise from_status(result.error)
                yes, no = result.response.outputs[-1].chosen_logprobs
                scores.append(1 / (1 + math.exp(no - yes)) if no - yes < _LARGE else 0.0)
                cached = result.response.reused_tokens
                found.append(runner_pb2.Embedding(input_tokens=len(item.token_ids), cached_tokens=cached))
        return found, scores

    async def _item(
        self, request: runner_pb2.EmbedRequest, pair: tuple[int, int], ids: Sequence[int]
    ) -> executor_pb2.ForwardRequest:
        """The Forward whose last output has the answer. Errors name the second text."""
        query, document = (request.inputs[index].text for index in pair)
        limits, field = self._state.limits, f"inputs[{pair[1]}].text"
        try:
            tokens = await self._text.encode_pair(query, document, max_tokens=limits.max_seq_tokens)
            validation.check_tokens(tokens, limits)
        except (InvalidArgument, SequenceTooLong) as error:
            raise error.at(field) from None
        return executor_pb2.ForwardRequest(
            token_ids=tokens,
            output=types_pb2.OutputOptions(logprob_token_ids=ids),
            priority=request.priority,
            score_from=len(tokens) - 1,
            adapter_id=request.adapter_id,
            cache_salt=request.cache_salt,
        )


def _answers(pooling: str) -> list[int]:
    """The tokens for yes and for no, of "LogitScore:YES:NO"; empty: it is no such model."""
    kind, *ids = pooling.split(":")
    return [*map(int, ids)] if kind == "LogitScore" and all(map(str.isdigit, ids)) else []
