"""Scores pairs of texts by a model that reads both, and answers yes or no with its next token.

The model's files name the two tokens, in the format of sentence-transformers (`LogitScore`), and its chat
template takes messages of the roles query and document, as in vLLM.
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

# The most tokens of pairs in memory at once: each pair repeats the query.
_MOST_TOKENS = 1 << 20
# Beyond this the probability counts as 0. exp() would overflow a little later.
_LARGE = 700


class CrossEncoder:
    """Scores pairs by the served model. Has no state."""

    def __init__(self, state: ServerState, text: TextModel, forward: BatchForward) -> None:
        self._state, self._text, self._forward = state, text, forward

    @property
    def is_served(self) -> bool:
        """Whether the served model is a cross-encoder. Raises NoWorker."""
        return bool(_answers(self._state.first_ready.model.pooling))

    async def judge(
        self, request: runner_pb2.EmbedRequest, pairs: Sequence[tuple[int, int]], context: Any
    ) -> tuple[list[runner_pb2.Embedding], list[float]]:
        """Returns the usage and the probability of "yes" for each pair of inputs, which must be texts.

        Raises QuireError for the first pair that fails. Pairs before it may have been computed.
        """
        pooling = self._state.first_ready.model.pooling
        ids = _answers(pooling)
        if len(ids) != 2:
            # Outputs have log-probabilities, which give the difference of two logits, but no single logit.
            raise Unsupported(f"the model's scores need {pooling}, which has no token for no")
        validation.refuse_unknown(request)
        # Checked here, because each Forward gets a copy of the salt.
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
        """The usage of each Forward, and the probability of "yes". Raises QuireError."""
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
        """The Forward whose last output has the answer for a pair. Errors name the second text."""
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
    """The tokens for yes and no, from "LogitScore:YES:NO". Empty: the model is no cross-encoder."""
    kind, *ids = pooling.split(":")
    return [*map(int, ids)] if kind == "LogitScore" and all(map(str.isdigit, ids)) else []
