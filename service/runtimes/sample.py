"""Turns the tokens of one sample into chunks: text, stop texts, and the end. Pure.

The same tokens always give the same chunks. So an execution can resume after a restart: the tokens in the
journal are pushed through a new `Sample`.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from google.rpc import status_pb2
from quire.detokenizer import Detokenizer, TokenDecoder
from quire.v1 import runner_pb2, types_pb2

from service.runtimes.answer_parts import ChunkParser, Parsing
from service.runtimes.held_caches import HeldCache
from service.runtimes.speculation import Drafter
from service.runtimes.token_rules import FOR_EVER, TokenRules
from service.text.constraints import Matcher
from service.text.stops import StopMatcher

# How many tokens of a sample a worker may compute before they are requested, and return in one answer.
MAX_PRELAUNCHED = 16


@dataclass(frozen=True, slots=True)
class SampleSpec:
    """The settings that all samples of an item share."""

    item_id: str
    prompt: Sequence[int]
    max_tokens: int
    # Each of these tokens ends a sample.
    end_ids: frozenset[int]
    stops: Sequence[str]
    # None: no text is wanted, or the model has no tokenizer.
    tokenizer: TokenDecoder | None
    with_logprobs: bool
    # The `end_ids` that are stop texts: special tokens, which have no text in a sample.
    stop_ids: Mapping[int, str] = field(default_factory=dict)
    # A token with a lower logprob is the last one. None: no condition.
    min_logprob: float | None = None
    # A token whose distribution has more entropy is the last one. None: no condition.
    max_entropy: float | None = None
    # Tokens of the prompt that the caller's cache already had.
    context_tokens: int = 0
    # The most tokens of a draft. 0: no speculative decoding.
    max_draft_tokens: int = 0
    # Drafts come from a draft model, not from the prompt.
    has_draft_model: bool = False
    # Which tokens are forbidden. None: no rules.
    rules: TokenRules | None = None
    # How its text is parsed into parts. None: it is not.
    parsing: Parsing | None = None

    @property
    def has_condition(self) -> bool:
        """Whether the end depends on a token's logprob or entropy, which the journal does not have.

        Then nothing may be appended after a token before these were checked.
        """
        return self.min_logprob is not None or self.max_entropy is not None


class Sample:
    """One sample of an item, from its first token to its end."""

    def __init__(self, spec: SampleSpec, index: int, matcher: Matcher | None = None) -> None:
        self.spec = spec
        self.index = index
        self.matcher = matcher
        self.is_finished = False
        self._num_tokens = 0
        # The last tokens, as many as the rules need.
        self._last = deque[int](maxlen=0 if spec.rules is None else spec.rules.num_before)
        # The length of the text, including what is held back.
        self._num_characters = 0
        self._stops = StopMatcher(spec.stops)
        # Stop texts are not looked for in the text of this many first tokens.
        self._min_tokens = 0 if spec.rules is None else spec.rules.min_tokens
        self._detokenizer = None
        if spec.tokenizer is not None:
            self._detokenizer = Detokenizer(spec.tokenizer, spec.prompt)
            if matcher is not None:
                # A constrained text does not complete a character that the prompt has begun.
                self._detokenizer.flush()
        self._parser = None if spec.parsing is None else ChunkParser(spec.parsing, index)
        self.drafter: Drafter | None = None
        # No drafts with both rules and a grammar: together they may allow no token after a draft. Nor with a
        # condition: it would be checked only after later tokens were appended.
        if spec.max_draft_tokens and (matcher is None or spec.rules is None) and not spec.has_condition:
            self.drafter = Drafter(spec.prompt, spec.max_draft_tokens, has_model=spec.has_draft_model)
        # Prompt tokens whose KV was found in a cache.
        self.cached_tokens = 0
        # The cache with its tokens. Empty: none yet.
        self.cache_id = ""
        # The caller's cache, while the sample runs on a copy of it to generate again what it has.
        self.catching_up: HeldCache | None = None

    @property
    def can_prelaunch(self) -> int:
        """How many of the next requests differ only in their tokens, if none of these ends the sample."""
        if self.matcher is not None or (self.drafter is not None and self.drafter.expects_draft):
            return 0
        most = 1 if self.spec.has_condition or self.drafter is not None else MAX_PRELAUNCHED
        return min(self.spec.max_tokens - self._num_tokens - 1, most, self._same_rules)

    @property
    def forbidden(self) -> frozenset[int]:
        """The tokens that may not follow, whatever the constraint allows."""
        rules = self.spec.rules
        return frozenset() if rules is None else rules.forbidden(self._num_tokens, self._last)

    @property
    def _same_rules(self) -> int:
        """For how many tokens after the next one the same tokens stay forbidden."""
        rules = self.spec.rules
        return FOR_EVER if rules is None else rules.stays_same(self._num_tokens)

    @property
    def wanted_drafts(self) -> int:
        """How many tokens the draft model should draft after the token that the next append chooses."""
        if self.drafter is None or self.catching_up is not None:
            return 0
        return self.drafter.wanted(self.spec.max_tokens - self._num_tokens - 2)

    @property
    def most_drafts(self) -> int:
        """How many tokens a draft may have now, leaving room for the token that is chosen after it."""
        if self.drafter is None or self.catching_up is not None:
            return 0
        return self.drafter.most(min(self.spec.max_tokens - self._num_tokens - 1, self._same_rules))

    def draft(self) -> Sequence[int]:
        """Tokens that may follow, at most `most_drafts`."""
        if self.drafter is None:
            return ()
        return self.drafter.draft(self.most_drafts)

    def before_end(self, draft: Sequence[int]) -> Sequence[int]:
        """The tokens of a draft before the first one that would end the sample.

        That one may still be chosen, but is not appended as a draft: a cache never has tokens after the end.
        """
        ahead = self._copy() if self.spec.stops and draft else None
        for index, token_id in enumerate(draft):
            if token_id in self.spec.end_ids or (ahead is not None and ahead.take(token_id).finish_reason):
                return draft[:index]
        return draft

    def _copy(self) -> Sample:
        """A copy that finds the end according to tokens alone."""
        # ruff: disable[SLF001] - of its own class
        ahead = copy.copy(self)
        ahead.matcher = ahead.drafter = ahead._parser = None
        ahead._last, ahead._stops = self._last.copy(), copy.copy(self._stops)
        ahead._detokenizer = None if self._detokenizer is None else self._detokenizer.copy()
        # ruff: enable[SLF001]
        return ahead

    @property
    def has_begun(self) -> bool:
        return self._num_tokens > 0

    def take(
        self, token_id: int, output: types_pb2.StepOutput | None = None, weights: int | None = None
    ) -> runner_pb2.SampleChunk:
        """Adds the next token. `output`, `weights`: None for tokens that are resumed from the journal."""
        chunk = self._chunk()
        chunk.token_ids.append(token_id)
        if output is not None:
            self._add_output(chunk, output, weights)
        self._num_tokens += 1
        self._last.append(token_id)
        is_end = token_id in self.spec.end_ids
        is_stopped = False
        if self._detokenizer is not None and not is_end:
            text = self._detokenizer.push(token_id)
            self._num_characters += len(text)
            if self._num_tokens <= self._min_tokens:
                chunk.text = text
            else:
                chunk.text = self._stops.push(text)
                # A further token could change the unsettled text. If the sample ends here, it stays as it is,
                # so a stop text may end in it.
                is_stopped = bool(self._stops.found) or self._stops.ends_in(self._detokenizer.unsettled)
        if self.matcher is not None and not is_end:
            self.matcher.take(token_id)
        if self.drafter is not None:
            self.drafter.push(token_id)
        if is_stopped or is_end:
            self._finish(chunk, runner_pb2.FINISH_REASON_STOP)
            chunk.stop = chunk.stop or self.spec.stop_ids.get(token_id, "")
        elif self._num_tokens >= self.spec.max_tokens:
            self._finish(chunk, runner_pb2.FINISH_REASON_LENGTH)
        elif output is not None and (met := self._condition_met(output)):
            self._finish(chunk, met)
        elif self._parser is not None:
            self._parser.parse(chunk)
        return chunk

    def _add_output(
        self, chunk: runner_pb2.SampleChunk, output: types_pb2.StepOutput, weights: int | None
    ) -> None:
        if weights is not None:
            chunk.weights_version = weights
        if self.spec.with_logprobs:
            top = output.top if output.HasField("top") else None
            added = chunk.logprobs.add(logprob=output.logprob, top=top)
            if output.HasField("sampled_logprob"):
                added.sampled_logprob = output.sampled_logprob
            if self._detokenizer is not None:
                added.text_offset = self._num_characters + len(self._detokenizer.unsettled)
        if output.hidden:
            chunk.hidden.add(states=output.hidden)
        if output.experts:
            chunk.experts.append(output.experts)

    def _condition_met(self, output: types_pb2.StepOutput) -> runner_pb2.FinishReason | None:
        """Why this token is the last one, if it is. Tokens that are resumed from the journal were not."""
        least, most = self.spec.min_logprob, self.spec.max_entropy
        if least is not None and output.logprob < least:
            return runner_pb2.FINISH_REASON_UNLIKELY
        if most is not None and output.entropy > most:
            return runner_pb2.FINISH_REASON_UNCERTAIN
        return None

    def complete(self) -> runner_pb2.SampleChunk:
        """Ends the sample, whose constraint allows no further token."""
        chunk = self._chunk()
        self._finish(chunk, runner_pb2.FINISH_REASON_STOP)
        return chunk

    def fail(self, error: status_pb2.Status) -> runner_pb2.SampleChunk:
        """Ends the sample with an error. Earlier chunks stay valid."""
        chunk = self._chunk()
        chunk.error.CopyFrom(error)
        self._finish(chunk, runner_pb2.FINISH_REASON_ERROR)
        return chunk

    def _chunk(self) -> runner_pb2.SampleChunk:
        return runner_pb2.SampleChunk(item_id=self.spec.item_id, sample=self.index, position=self._num_tokens)

    def _finish(self, chunk: runner_pb2.SampleChunk, reason: runner_pb2.FinishReason) -> None:
        self.is_finished = True
        if not self._stops.found and self._detokenizer is not None:
            rest = self._detokenizer.flush()
            chunk.text += rest if self._num_tokens <= self._min_tokens else self._stops.push(rest)
        if self._stops.found:
            # The flushed text contained a stop text.
            if reason != runner_pb2.FINISH_REASON_ERROR:
                reason = runner_pb2.FINISH_REASON_STOP
            chunk.stop = self._stops.found
        else:
            chunk.text += self._stops.flush()
        chunk.finish_reason = reason
        chunk.usage.input_tokens = len(self.spec.prompt) - self.spec.context_tokens
        chunk.usage.output_tokens = self._num_tokens
        chunk.usage.cached_tokens = self.cached_tokens
        if self.drafter is not None:
            chunk.usage.draft_tokens = self.drafter.drafted
            chunk.usage.accepted_draft_tokens = self.drafter.accepted
        # Own hardware has no price per token.
        chunk.usage.cost_usd = 0
        if self._parser is not None:
            self._parser.parse(chunk)
