"""The types of `quire.tinker`, with the names and fields of Tinker's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

StopReason: TypeAlias = Literal["length", "stop"]


@dataclass(frozen=True, kw_only=True)
class EncodedTextChunk:
    """Tokens of a prompt."""

    tokens: Sequence[int]
    type: Literal["encoded_text"] = "encoded_text"

    @property
    def length(self) -> int:
        """The number of tokens."""
        return len(self.tokens)


# Tinker also has images and sound.
ModelInputChunk: TypeAlias = EncodedTextChunk


@dataclass(frozen=True, kw_only=True)
class ModelInput:
    """A prompt, in parts."""

    chunks: list[EncodedTextChunk]

    @classmethod
    def from_ints(cls, tokens: list[int]) -> ModelInput:
        """A prompt of one part."""
        return cls(chunks=[EncodedTextChunk(tokens=tokens)])

    @classmethod
    def empty(cls) -> ModelInput:
        """A prompt without parts."""
        return cls(chunks=[])

    def to_ints(self) -> list[int]:
        """The tokens of all parts."""
        return [token for chunk in self.chunks for token in chunk.tokens]

    @property
    def length(self) -> int:
        """The number of tokens."""
        return sum(chunk.length for chunk in self.chunks)

    def append(self, chunk: EncodedTextChunk) -> ModelInput:
        """A new prompt with one more part."""
        return ModelInput(chunks=[*self.chunks, chunk])

    def append_int(self, token: int) -> ModelInput:
        """A new prompt with one more token."""
        return self.append(EncodedTextChunk(tokens=[token]))


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How tokens are drawn, and what ends a sample.

    Attributes:
        max_tokens: None: as many as fit into the model's context.
        seed: Sample i draws with `seed + i`. None: a random one.
        stop: Texts, or token ids, beside the model's end tokens. What ends a sample is part of it. An empty
            list: nothing ends it, not even an end token.
        temperature: 0: the most likely token.
        top_k: -1: no limit.
        top_p: 1: no limit.
    """

    max_tokens: int | None = None
    seed: int | None = None
    stop: str | Sequence[str] | Sequence[int] | None = None
    temperature: float = 1
    top_k: int = -1
    top_p: float = 1


@dataclass(frozen=True)
class SampledSequence:
    """A sample.

    Attributes:
        stop_reason: "stop": an end token, or one of `stop`. "length": max_tokens, or the end of the context.
        sequence_id: Different for each sample.
        tokens: The tokens, the one that ended it included.
        logprobs: The log-probability of each token, in nats, under the distribution that it was drawn from;
            with temperature 0 under the model's own.
    """

    stop_reason: StopReason
    sequence_id: str
    tokens: list[int]
    logprobs: list[float] | None = None


@dataclass(frozen=True)
class SampleResponse:
    """The samples of a prompt.

    Attributes:
        sequences: The samples.
        prompt_logprobs: For each token of the prompt its log-probability, in nats, under the model's own
            distribution; None for the first one. None: they were not requested.
        topk_prompt_logprobs: For each token of the prompt the most likely tokens at its place, as pairs
            (token, log-probability) in descending order; None for the first one. None: not requested.
        prompt_cache_hit_tokens: Tokens of the prompt whose KV was cached.
    """

    sequences: Sequence[SampledSequence]
    prompt_logprobs: list[float | None] | None = None
    topk_prompt_logprobs: list[list[tuple[int, float]] | None] | None = None
    prompt_cache_hit_tokens: int = 0
