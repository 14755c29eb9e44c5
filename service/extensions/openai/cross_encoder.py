"""Scores of pairs by a model that reads both texts, and whose next token is its answer: yes or no.

The files of such a model name the two tokens, as sentence-transformers has them (`LogitScore`), and its chat
template writes messages of the roles query and document, as in vLLM.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Any

from quire.v1 import executor_pb2, runner_pb2, types_pb2

from service.api import validation
from service.api.server_state import ServerState
from service.api.status import from_status
from service.auth.authenticator import current_tenant
from service.caches.tenants import counted
from service.errors import InvalidArgument, SequenceTooLong, Unsupported
from service.runtimes.embedding import BatchForward
from service.text.text_model import TextModel

# The query is in each pair: so many tokens of pairs are in memory at once.
_MOST_TOKENS = 1 << 20
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

        Raises QuireError, for the first pair that fails, when pairs before it may have been computed.
        """
        pooling = self._state.first_ready.model.pooling
        ids = _answers(pooling)
        if len(ids) != 2:
            # A logit alone is not in an answer.
            raise Unsupported(f"the model's scores need {pooling}, which has no token for no")
        validation.refuse_unknown(request)
        # Each Forward gets a copy of it.
        validation.check_cache_salt(request.cache_salt)
        if (tenant := current_tenant()) is not None:
            tenant.require_at_once(len(pairs))
        found, scores = list[runner_pb2.Embedding](), list[float]()
        items, num_tokens = list[executor_pb2.ForwardRequest](), 0
        for place, pair in enumerate(pairs, start=1):
            with counted(tenant, time.monotonic, give_back=True):
                items.append(await self._item(request, pair, ids))
            num_tokens += len(items[-1].token_ids)
            is_full = num_tokens >= _MOST_TOKENS or len(items) >= self._state.limits.max_items
            if is_full or place == len(pairs):
                for embedding, score in await self._answered(items, context):
                    found.append(embedding)
                    scores.append(score)
                items, num_tokens = [], 0
        return found, scores

    async def _answered(
        self, items: Sequence[executor_pb2.ForwardRequest], context: Any
    ) -> list[tuple[runner_pb2.Embedding, float]]:
        """What each Forward costs, and how likely it says yes. Raises QuireError."""
        batch = await self._forward(executor_pb2.BatchForwardRequest(items=items), context)
        answered = list[tuple[runner_pb2.Embedding, float]]()
        for item, result in zip(items, batch.results, strict=True):
            if result.HasField("error"):
                raise from_status(result.error)
            yes, no = result.response.outputs[-1].chosen_logprobs
            cached = result.response.reused_tokens
            cost = runner_pb2.Embedding(input_tokens=len(item.token_ids), cached_tokens=cached)
            answered.append((cost, 1 / (1 + math.exp(no - yes)) if no - yes < _LARGE else 0.0))
        return answered

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
