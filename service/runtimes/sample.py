"""What becomes of the tokens of one sample: text, stop texts, and the end. Pure.

The same tokens give the same chunks, however often they are pushed through a new one of these: that is how an
execution goes on after a restart, from the tokens that the journal has kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from google.rpc import status_pb2
from quire.v1 import runner_pb2, types_pb2

from service.text.detokenizer import Decodes, Detokenizer
from service.text.matcher import Matcher
from service.text.stops import StopTexts


@dataclass(frozen=True, slots=True)
class Plan:
    """What all samples of an item have in common."""

    item_id: str
    prompt: Sequence[int]
    max_tokens: int
    # Tokens that end a sample.
    end_ids: frozenset[int]
    stops: StopTexts
    # None: no text is wanted, or there is nothing to make it with.
    tokenizer: Decodes | None
    with_logprobs: bool


class Sample:
    """One sample of an item, from its first token to its end."""

    def __init__(self, plan: Plan, index: int, matcher: Matcher | None = None) -> None:
        self.plan = plan
        self.index = index
        self.matcher = matcher
        self.is_finished = False
        self._num_tokens = 0
        self._stops = plan.stops.watch()
        self._detokenizer = None
        if plan.tokenizer is not None:
            self._detokenizer = Detokenizer(plan.tokenizer, plan.prompt)
        # Of the prompt: tokens that were found computed.
        self.cached_tokens = 0

    @property
    def tokens_left(self) -> int:
        """How many more it may have."""
        return self.plan.max_tokens - self._num_tokens

    @property
    def has_begun(self) -> bool:
        """Whether it has a token."""
        return self._num_tokens > 0

    def take(self, token_id: int, output: types_pb2.StepOutput | None = None) -> runner_pb2.SampleChunk:
        """The next token was chosen. `output`: what the model said of it, where that is known."""
        chunk = self._chunk()
        chunk.token_ids.append(token_id)
        if self.plan.with_logprobs and output is not None:
            top = output.top if output.HasField("top") else None
            chunk.logprobs.add(logprob=output.logprob, top=top)
        self._num_tokens += 1
        is_end = token_id in self.plan.end_ids
        if self._detokenizer is not None and not is_end:
            chunk.text = self._stops.push(self._detokenizer.push(token_id))
        if self.matcher is not None and not is_end:
            self.matcher.take(token_id)
        if self._stops.found or is_end:
            self._finish(chunk, runner_pb2.FINISH_REASON_STOP)
        elif self._num_tokens >= self.plan.max_tokens:
            self._finish(chunk, runner_pb2.FINISH_REASON_LENGTH)
        return chunk

    def complete(self) -> runner_pb2.SampleChunk:
        """Its constraint allows nothing more."""
        chunk = self._chunk()
        self._finish(chunk, runner_pb2.FINISH_REASON_STOP)
        return chunk

    def fail(self, error: status_pb2.Status) -> runner_pb2.SampleChunk:
        """It ends with an error. What came before stands."""
        chunk = self._chunk()
        chunk.error.CopyFrom(error)
        self._finish(chunk, runner_pb2.FINISH_REASON_ERROR)
        return chunk

    def _chunk(self) -> runner_pb2.SampleChunk:
        return runner_pb2.SampleChunk(item_id=self.plan.item_id, sample=self.index, position=self._num_tokens)

    def _finish(self, chunk: runner_pb2.SampleChunk, reason: runner_pb2.FinishReason) -> None:
        self.is_finished = True
        if not self._stops.found and self._detokenizer is not None:
            chunk.text += self._stops.push(self._detokenizer.flush())
        if self._stops.found:
            # What was held back may end with one.
            if reason == runner_pb2.FINISH_REASON_LENGTH:
                reason = runner_pb2.FINISH_REASON_STOP
            chunk.stop = self._stops.found
        else:
            chunk.text += self._stops.flush()
        chunk.finish_reason = reason
        chunk.usage.input_tokens = len(self.plan.prompt)
        chunk.usage.output_tokens = self._num_tokens
        chunk.usage.cached_tokens = self.cached_tokens
        # Whatever the hardware costs, nobody is billed by the token.
        chunk.usage.cost_usd = 0
