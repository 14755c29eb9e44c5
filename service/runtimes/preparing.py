"""Prepares the items of a batch for the workers: validates them and tokenizes their prompts.

Expensive parts (long texts, templates, grammars) run in a bounded number of threads or processes.
"""

from __future__ import annotations

import hashlib
import math
import secrets
import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from quire.v1 import runner_pb2, types_pb2

from service.api import masks, validation
from service.api.append_codec import MAX_KEPT_BYTES, last_row, sampled_rows
from service.api.request_limits import RequestLimits
from service.api.server_state import ServerState
from service.caches.requests import AppendKind
from service.errors import InvalidArgument, SequenceTooLong, Unsupported, WeightsChanged
from service.runtimes import items
from service.runtimes.answer_parts import TOOLS, Parsing, encoded_prompt, formats_of_model, parsing_of
from service.runtimes.held_caches import HeldCache
from service.runtimes.sample import Sample, SampleSpec
from service.runtimes.speculation import DEFAULT_DRAFT_TOKENS
from service.runtimes.token_rules import token_rules
from service.text.constraints import Matcher
from service.text.text_model import TextModel
from service.text.tokenizer import with_special_tokens

_SEEDS = 1 << 64
# More tokens than the longest bad word has bytes.
_MAX_WORD_TOKENS = 4 * items.MAX_STOP_CHARACTERS + 2


@dataclass(frozen=True, slots=True)
class PreparedItem:
    """An item that can be run. `deadline_s` is on the monotonic clock."""

    spec: SampleSpec
    num_samples: int
    answer_bytes: int
    is_large: bool
    deadline_s: float | None
    new_matcher: Callable[[], Matcher] | None
    # The weights whose tokenizer made the tokens.
    weights: int
    adapter: int
    cache_salt: str
    _output: types_pb2.OutputOptions
    _first_mask: bytes | None
    _limits: RequestLimits
    # The cache of the caller that it continues: itself, or copies of it.
    held: HeldCache | None = None
    on_copies: bool = False

    @property
    def in_place(self) -> HeldCache | None:
        """The caller's cache, if that itself is appended to."""
        return None if self.on_copies else self.held

    @property
    def first(self) -> int:
        """The index in the prompt of the first token that a sample on a copy appends itself."""
        return len(self.spec.prompt) - 1 if self.held is None else self.held.position

    @property
    def first_kind(self) -> AppendKind:
        """The kind of the append from there on."""
        is_decode = self.held is not None and len(self.spec.prompt) - self.first == 1
        return AppendKind.DECODE if is_decode else AppendKind.PREFILL

    @property
    def has_hidden(self) -> bool:
        return self._output.HasField("hidden")

    @property
    def is_late(self) -> bool:
        return self.deadline_s is not None and time.monotonic() >= self.deadline_s

    def sample(self, index: int) -> Sample:
        """A sample without tokens."""
        return Sample(self.spec, index, None if self.new_matcher is None else self.new_matcher())

    def options(self, sample: Sample, mask: bytes | None = None) -> bytes:
        """The encoded output options for a step of a sample. `mask`: None: the mask of the first step.

        Raises InvalidArgument if mask and rules leave no token.
        """
        output = self._output_of(sample, self._first_mask if mask is None else mask)
        return last_row(output, sorted(self.spec.end_ids))

    def draft_options(self, sample: Sample, rows: int, masks: Sequence[bytes], draft_tokens: int) -> bytes:
        """The options for a step that verifies a draft, or asks for one; see `sampled_rows`."""
        return sampled_rows(self._output_of(sample, None), rows, masks, draft_tokens)

    def _output_of(self, sample: Sample, mask: bytes | None) -> types_pb2.OutputOptions:
        output = types_pb2.OutputOptions()
        output.CopyFrom(self._output)
        if mask is not None:
            output.mask.packed = mask
        if output.sampling.HasField("seed"):
            output.sampling.seed = (output.sampling.seed + sample.index) % _SEEDS
        if forbidden := sample.forbidden:
            # Ids outside of the vocabulary have no effect.
            for token_id in forbidden:
                output.sampling.logit_bias[token_id] = -math.inf
            items.check_choice(output, self._limits, self._forbidding)
        return output

    @property
    def _forbidding(self) -> str:
        """The field that the error names if every token is forbidden."""
        if self.new_matcher is not None:
            return "constraint"
        if self._output.HasField("mask"):
            return "constraint.mask"
        return "bad_words" if self.spec.rules is not None and self.spec.rules.words else "min_tokens"


class ItemPreparer:
    """Prepares items for the served model."""

    def __init__(self, state: ServerState, text: TextModel) -> None:
        self._state = state
        self._text = text

    async def prepare(
        self,
        item: runner_pb2.ExecuteItem,
        deadline_s: float | None,
        kept_as: str = "",
        earlier_adapter: int = 0,
        held: HeldCache | None = None,
    ) -> PreparedItem:
        """Validates and prepares an item. Raises a QuireError.

        `deadline_s`: of the item, on the monotonic clock. `kept_as`: the execution's key if it is kept.
        `earlier_adapter`: of the caches that an earlier run has made for it. `held`: the cache that it
        continues. Without it, such an item can only be estimated.
        """
        limits = self._state.limits
        items.check(item)
        adapter = validation.check_adapter(item.adapter_id, "", limits, earlier_adapter)
        validation.check_cache_salt(item.cache_salt)
        output = _output(item)
        answer_bytes = items.check_output(output, limits, rows=1)
        if output.HasField("mask"):
            output.mask.CopyFrom(masks.shortened(output.mask, limits))
        _set_seed(output, item, kept_as, held)
        # Last comes what may take long: templates, long texts and grammars.
        tokenizer = None if item.tokens_only else await self._text.tokenizer()
        if item.stop and tokenizer is None:
            raise InvalidArgument(
                "BAD_STOP", "stop", "stop texts need a tokenizer, which the model does not have"
            )
        item, parsing = parsing_of(item, formats_of_model(self._state))
        prompt, parsing = await self._prompt(item, parsing, limits, held)
        if parsing is not None:
            # A kept sample that is resumed gets the same ids for its tool calls.
            key = f"{kept_as}\0{item.item_id}" if kept_as else secrets.token_hex()
            parsing = replace(parsing, call_key=key)
        stop_ids = await self._stop_ids(item)
        end_ids = self._end_ids(item).union(stop_ids)
        rules = token_rules(item.min_tokens, end_ids, await self._bad_words(item))
        new_matcher, first_mask = await self._matcher(item, parsing, end_ids)
        has_special = item.special_tokens_in_text or (parsing is not None and parsing.has_special_tokens)
        if self._state.model_version != limits.weights:
            # The weights were switched while the item was prepared.
            raise WeightsChanged(can_be_repeated=True)
        return PreparedItem(
            spec=SampleSpec(
                item_id=item.item_id,
                prompt=prompt,
                max_tokens=_max_tokens(item, len(prompt), limits),
                end_ids=end_ids,
                stops=tuple(item.stop),
                stop_ids=stop_ids,
                tokenizer=with_special_tokens(tokenizer) if has_special and tokenizer else tokenizer,
                with_logprobs=item.logprobs or item.sampled_logprobs or item.top_logprobs > 0,
                min_logprob=item.min_logprob if item.HasField("min_logprob") else None,
                max_entropy=item.max_entropy if item.HasField("max_entropy") else None,
                context_tokens=0 if held is None else held.position,
                max_draft_tokens=_max_draft_tokens(item),
                has_draft_model=self._has_draft_model(item),
                rules=rules,
                parsing=parsing,
            ),
            num_samples=items.num_samples(item),
            answer_bytes=answer_bytes,
            is_large=answer_bytes + output.ByteSize() + len(first_mask or b"") > MAX_KEPT_BYTES,
            deadline_s=deadline_s,
            new_matcher=new_matcher,
            weights=limits.weights,
            adapter=adapter,
            cache_salt=item.cache_salt,
            _output=output,
            _first_mask=first_mask,
            _limits=limits,
            held=held,
            on_copies=not items.is_in_place(item),
        )

    def _has_draft_model(self, item: runner_pb2.ExecuteItem) -> bool:
        """Whether drafts come from a draft model. Raises Unsupported if there is none."""
        if item.speculation.method != runner_pb2.SPECULATION_METHOD_DRAFT_MODEL:
            return False
        if not self._state.first_ready.executor.draft_model:
            raise Unsupported("this server has no draft model", field="speculation.method")
        return True

    async def _prompt(
        self,
        item: runner_pb2.ExecuteItem,
        parsing: Parsing | None,
        limits: RequestLimits,
        held: HeldCache | None,
    ) -> tuple[array[int], Parsing | None]:
        """See `encoded_prompt`. With a held cache the prompt begins with its tokens."""
        context = array("I") if held is None else held.token_ids[: held.position]
        prompt, parsing = await encoded_prompt(
            item, parsing, self._text, max_tokens=limits.max_seq_tokens, context=context
        )
        try:
            validation.check_tokens(prompt, limits)
        except InvalidArgument as error:
            # The error names the field that the caller sent.
            kind = item.WhichOneof("prompt")
            where = f"{kind}.{error.field}" if kind in ("tokens", "cache") else str(kind)
            raise error.at(where) from None
        tokens = array("I", prompt)
        if held is not None:
            tokens = context + tokens
            if len(tokens) > limits.max_seq_tokens:
                raise SequenceTooLong(len(tokens), limits.max_seq_tokens)
        return tokens, parsing

    async def _matcher(
        self, item: runner_pb2.ExecuteItem, parsing: Parsing | None, end_ids: frozenset[int]
    ) -> tuple[Callable[[], Matcher] | None, bytes | None]:
        """What matches the item's constraint, and the mask of its first token."""
        kind = item.constraint.WhichOneof("kind")
        if kind is None or kind == "mask":
            return None, None
        grammar, vocab_size = getattr(item.constraint, kind), self._state.limits.vocab_size
        try:
            new_matcher = await self._text.constraint(kind, grammar, end_ids, vocab_size)
        except InvalidArgument as error:
            if parsing is None or not parsing.is_forced:
                raise
            # The grammar was made of the schemas of the tools.
            raise error.at(TOOLS) from None
        matcher = new_matcher()
        return new_matcher, await matcher.in_turn(matcher.allowed)

    async def _stop_ids(self, item: runner_pb2.ExecuteItem) -> Mapping[int, str]:
        """The stop texts that are a special token, which never becomes text, by its id."""
        special_ids = await self._text.special_ids() if item.stop else {}
        return {special_ids[stop]: stop for stop in item.stop if stop in special_ids}

    async def _bad_words(self, item: runner_pb2.ExecuteItem) -> Sequence[Sequence[int]]:
        """The tokens of each bad word at the beginning of a text, and after a space."""
        words: list[Sequence[int]] = []
        for index, word in enumerate(item.bad_words):
            for text in (word.lstrip(), f" {word.lstrip()}"):
                ids = await self._text.encode(
                    text,
                    max_tokens=_MAX_WORD_TOKENS,
                    add_special_tokens=False,
                    field=f"bad_words[{index}]",
                )
                # If the space is a token of its own, this would forbid the same once more.
                if text[0] != " " or (words and len(ids) == len(words[-1])):
                    words.append(ids)
        return words

    def _end_ids(self, item: runner_pb2.ExecuteItem) -> frozenset[int]:
        own = () if item.ignore_eos else self._state.first_ready.model.eos_token_ids
        return frozenset((*own, *item.stop_token_ids))


def _max_tokens(item: runner_pb2.ExecuteItem, prompt_tokens: int, limits: RequestLimits) -> int:
    """One more than a sequence has room for, since the last token is never appended."""
    room = limits.max_seq_tokens - prompt_tokens + 1
    return min(item.max_tokens or room, room)


def _output(item: runner_pb2.ExecuteItem) -> types_pb2.OutputOptions:
    output = types_pb2.OutputOptions(
        sampling=item.sampling if item.HasField("sampling") else None,
        logprob=item.logprobs or item.HasField("min_logprob"),
        top_logprobs=item.top_logprobs,
        sampled_logprob=item.sampled_logprobs,
        entropy=item.HasField("max_entropy"),
        hidden=item.hidden if item.HasField("hidden") else None,
        experts=item.experts,
    )
    if item.constraint.WhichOneof("kind") == "mask":
        output.mask.CopyFrom(item.constraint.mask)
    return output


def _set_seed(
    output: types_pb2.OutputOptions, item: runner_pb2.ExecuteItem, kept_as: str, held: HeldCache | None
) -> None:
    """Sets the seed of `output` if the caller gives none and the same draws may be made once more."""
    if not output.HasField("sampling") or output.sampling.HasField("seed"):
        return
    if held is not None and items.is_in_place(item):
        # The seed of a Decode. A copy, on which the same is generated again, has another seed.
        output.sampling.seed = held.seed
    elif kept_as:
        digest = hashlib.sha256(f"{kept_as}\x00{item.item_id}".encode()).digest()
        output.sampling.seed = int.from_bytes(digest[:8])


def _max_draft_tokens(item: runner_pb2.ExecuteItem) -> int:
    if not item.HasField("speculation"):
        return 0
    return item.speculation.max_draft_tokens or DEFAULT_DRAFT_TOKENS
