"""Requests of prefills and scorings, and what a scoring returns."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

from quire import _calls
from quire.errors import QuireError, from_status
from quire.v1 import executor_pb2, types_pb2

_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True)
class PrefillItem:
    """A prompt of `batch_prefill` with its own settings, which are those of `prefill`."""

    token_ids: Sequence[int]
    output: types_pb2.OutputOptions | None = None
    lease_s: float | None = None
    adapter_id: str = ""
    request_id: str = ""
    cache_salt: str = ""
    score_from: int | None = None
    sample_seeds: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class ScoreItem:
    """A text of `score_batch` with its own settings, which are those of `score`.

    Attributes:
        experts: Of a model with experts: `StepOutput.experts` of some consecutive tokens, joined. These are
            computed with these experts, as in a generation that returned them.
        experts_from: The index of the first of these tokens. None: that before the first scored one, with
            whose output the generation of the scored tokens began.
    """

    token_ids: Sequence[int]
    score_from: int = 0
    output: types_pb2.OutputOptions | None = None
    cache_salt: str = ""
    adapter_id: str = ""
    experts: bytes = b""
    experts_from: int | None = None


@dataclass(frozen=True, slots=True)
class Scored:
    """Log-probabilities of tokens, each given the tokens before it, under the model's own distribution.

    Attributes:
        token_logprobs: The log-probabilities of token_ids[max(score_from, 1):], in nats.
        token_is_argmax: For each of them, whether no other token was more likely.
        outputs: The predictions after the tokens from index max(score_from, 1) - 1 on: one more than scored.
        reused_tokens: Tokens of the context whose KV was cached.
        weights_version: The version of the weights that it was computed with; see LoadWeights.
        adapter_version: That of the adapter, 0 without one.
    """

    token_logprobs: Sequence[float]
    token_is_argmax: Sequence[bool]
    outputs: Sequence[types_pb2.StepOutput]
    reused_tokens: int
    weights_version: int
    adapter_version: int

    @property
    def logprob(self) -> float:
        """Log-probability of the scored tokens as a sequence, in nats."""
        return math.fsum(self.token_logprobs)

    @property
    def is_greedy(self) -> bool:
        """Whether greedy decoding generates the scored tokens, ties aside."""
        return all(self.token_is_argmax)


def checked(results: Iterable[_Result | QuireError]) -> list[_Result]:
    """The results of a batch. Raises the first QuireError in it."""
    found = []
    for result in results:
        if isinstance(result, QuireError):
            raise result
        found.append(result)
    return found


# Token ids, or items with their own settings.
Prompts: TypeAlias = Sequence[PrefillItem | Sequence[int]]
Texts: TypeAlias = Sequence[ScoreItem | Sequence[int]]


def prefill_request(
    item: PrefillItem, output: types_pb2.OutputOptions | None = None
) -> executor_pb2.PrefillRequest:
    """A request for a new cache. It always has a request id, so that a retry returns the same cache.

    `output` applies to an item without its own.
    """
    return executor_pb2.PrefillRequest(
        token_ids=_calls.tokens(item.token_ids),
        output=output if item.output is None else item.output,
        lease=_calls.duration(item.lease_s),
        adapter_id=item.adapter_id,
        request_id=item.request_id or _calls.new_request_id(),
        cache_salt=item.cache_salt,
        score_from=item.score_from,
        sample_seeds=item.sample_seeds,
    )


def forward_request(
    item: ScoreItem, output: types_pb2.OutputOptions | None = None
) -> executor_pb2.ForwardRequest:
    """A request for a scoring. `output` applies to an item without its own."""
    experts_from = item.experts_from
    if experts_from is None:
        experts_from = max(item.score_from, 1) - 1 if item.experts else 0
    return executor_pb2.ForwardRequest(
        token_ids=_calls.tokens(item.token_ids),
        output=output if item.output is None else item.output,
        score_from=item.score_from,
        cache_salt=item.cache_salt,
        adapter_id=item.adapter_id,
        experts=item.experts,
        experts_from=experts_from,
    )


def scored(response: executor_pb2.ForwardResponse) -> Scored:
    """The result of a scoring."""
    return Scored(
        tuple(response.token_logprobs),
        tuple(response.token_is_argmax),
        tuple(response.outputs),
        response.reused_tokens,
        response.weights_version,
        response.adapter_version,
    )


def result_of(result: Any) -> Any:
    """The response in a result of a batch, or the exception for its error."""
    return from_status(result.error) if result.HasField("error") else result.response
