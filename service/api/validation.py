"""Checks of requests before anything is done with them: each failure names its field and a stable reason.

Knows the limits of the model and the server; knows nothing of caches. What depends on a cache's state (its
existence, position, length) is checked by `caches/table.py` when the operation's turn comes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from google.protobuf import duration_pb2
from quire.v1 import executor_pb2, types_pb2

from service.api.masks import check_choice
from service.api.vocabulary import check_vocabulary
from service.errors import InvalidArgument, SequenceTooLong, Unsupported, too_many, too_many_forks

MAX_TOP_LOGPROBS = 1024
MAX_LOGPROB_TOKEN_IDS = 4096
MAX_LOGIT_BIAS = 1024
MAX_HIDDEN_LAYERS = 8
MAX_FORK_COUNT = 1024
MAX_FORK_RELEASE = 4096
MAX_SAMPLE_SEEDS = 1024
MAX_REQUEST_ID_CHARS = 128
MAX_CACHE_SALT_CHARS = 128
MAX_PAGE_SIZE = 1000
DEFAULT_PAGE_SIZE = 100
_ELEMENT_BYTES = {
    types_pb2.LOGITS_FORMAT_UNSPECIFIED: 0,
    types_pb2.LOGITS_FORMAT_F32: 4,
    types_pb2.LOGITS_FORMAT_BF16: 2,
    types_pb2.LOGITS_FORMAT_F16: 2,
}
_HIDDEN_BYTES = {
    types_pb2.DATA_TYPE_UNSPECIFIED: 4,
    types_pb2.DATA_TYPE_F32: 4,
    types_pb2.DATA_TYPE_BF16: 2,
    types_pb2.DATA_TYPE_F16: 2,
}
_ACCEPTS = frozenset(types_pb2.VerifyAccept.values())
# An id, a logprob and their share of tags, generously.
_TOP_ENTRY_BYTES = 10
# Dtype, shape and framing of a hidden state, generously.
_TENSOR_BYTES = 32
# A row's token id, log-probability and framing, generously.
_ROW_BYTES = 80
# A drawn token beside the row's own: its id, two log-probabilities and framing.
_SAMPLE_BYTES = 24
# A score: a log-probability, and whether it is the largest.
_SCORE_BYTES = 5
# The rest of an answer: its handle, timing and framing, or the error of a batch's item in its place.
ANSWER_BYTES = 512
# A handle in a list of them, generously.
HANDLE_BYTES = 128
_LONGEST_TIMEOUT_S = 365 * 86_400.0


@dataclass(frozen=True, slots=True)
class HiddenLimits:
    """The sizes of a model whose hidden states can be asked for."""

    num_layers: int
    hidden_size: int


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """What requests are checked against."""

    vocab_size: int
    max_response_bytes: int
    # The most tokens that a sequence can have in any worker. What is longer need not be looked at.
    max_seq_tokens: int = 1 << 32
    max_items: int = 1024
    # Of the hidden states that can be asked for. None: there are none.
    hidden: HiddenLimits | None = None
    # Of which weights they are. Where there are caches of others: the limits for a cache, if it is known.
    weights: int = 0
    of_others: Callable[[str], RequestLimits | None] | None = None

    def of(self, cache_id: str) -> RequestLimits:
        """Those for an append to a cache; an empty id is a new one. Raises WeightsChanged."""
        if self.of_others is None or not cache_id:
            return self
        return self.of_others(cache_id) or self


def check_tokens(token_ids: Sequence[int], limits: RequestLimits) -> None:
    """At least one token, no more than a sequence can have, all of them in the vocabulary."""
    if not token_ids:
        raise InvalidArgument("EMPTY_TOKENS", "token_ids", "at least one token is needed")
    if len(token_ids) > limits.max_seq_tokens:
        raise SequenceTooLong(len(token_ids), limits.max_seq_tokens)
    check_vocabulary(token_ids, limits, "token_ids")


def check_token(token_id: int, limits: RequestLimits) -> None:
    """The token is in the vocabulary."""
    if token_id >= limits.vocab_size:
        raise InvalidArgument(
            "TOKEN_OUT_OF_VOCAB",
            "token_id",
            f"token {token_id} is not below the vocabulary size {limits.vocab_size}",
        )


def check_cache_id(cache_id: str, field: str = "cache_id") -> None:
    """A cache is named."""
    if not cache_id:
        raise InvalidArgument("EMPTY_CACHE_ID", field, "a cache_id is needed")


def check_scored(score_from: int, tokens: int) -> int:
    """Tokens from `score_from` on can be scored. Returns how many; of the first one there is no row."""
    if score_from >= tokens:
        text = f"must be below {tokens}, the number of tokens, of which the first cannot be scored"
        raise InvalidArgument("BAD_SCORE_FROM", "score_from", text)
    return tokens - max(score_from, 1)


def check_sample_seeds(count: int) -> None:
    """Not too many."""
    if count > MAX_SAMPLE_SEEDS:
        raise InvalidArgument("BAD_COUNT", "sample_seeds", f"at most {MAX_SAMPLE_SEEDS} tokens can be drawn")


def check_output(
    output: types_pb2.OutputOptions | None,
    limits: RequestLimits,
    rows: int,
    scored: int = 0,
    samples: int = 0,
) -> int:
    """Options can be met, and the answer for `rows` positions fits a response: what is applied can be sent.

    Returns the answer's size in bytes, at most.
    """
    row_bytes = _ROW_BYTES if output is None else _check_options(output, limits)
    size_bytes = ANSWER_BYTES + rows * row_bytes + scored * _SCORE_BYTES + samples * _SAMPLE_BYTES
    check_response_size(size_bytes, limits, "output")
    return size_bytes


def _check_options(output: types_pb2.OutputOptions, limits: RequestLimits) -> int:
    """Options can be met. Returns the bytes of a position's answer."""
    if output.logits not in _ELEMENT_BYTES:
        raise InvalidArgument("BAD_OUTPUT", "output.logits", "the format is not known")
    if output.top_logprobs > min(MAX_TOP_LOGPROBS, limits.vocab_size):
        allowed = min(MAX_TOP_LOGPROBS, limits.vocab_size)
        raise InvalidArgument("BAD_OUTPUT", "output.top_logprobs", f"at most {allowed} can be returned")
    if len(output.logprob_token_ids) > MAX_LOGPROB_TOKEN_IDS:
        raise InvalidArgument(
            "BAD_OUTPUT", "output.logprob_token_ids", f"at most {MAX_LOGPROB_TOKEN_IDS} are allowed"
        )
    if output.logprob_token_ids:
        check_vocabulary(output.logprob_token_ids, limits, "output.logprob_token_ids")
    if output.HasField("sampling"):
        _check_sampling(output.sampling, limits)
    check_choice(output.mask if output.HasField("mask") else None, output.sampling, limits)
    row_bytes = limits.vocab_size * _ELEMENT_BYTES[output.logits]
    if output.HasField("hidden"):
        row_bytes += _check_hidden(output.hidden, limits.hidden)
    return row_bytes + _TOP_ENTRY_BYTES * output.top_logprobs + 4 * len(output.logprob_token_ids) + _ROW_BYTES


def _check_hidden(hidden: types_pb2.HiddenStates, limits: HiddenLimits | None) -> int:
    """These hidden states can be had. Returns the bytes of a position's."""
    if hidden.dtype not in _HIDDEN_BYTES:
        raise InvalidArgument("BAD_OUTPUT", "output.hidden.dtype", "the format is not known")
    if len(hidden.layers) > MAX_HIDDEN_LAYERS:
        text = f"at most {MAX_HIDDEN_LAYERS} are returned"
        raise InvalidArgument("BAD_OUTPUT", "output.hidden.layers", text)
    if limits is None:
        raise Unsupported("this executor has no hidden states", metadata={"field": "output.hidden"})
    for index, layer in enumerate(hidden.layers):
        if layer > limits.num_layers:
            text = f"{layer} is above {limits.num_layers}, the last one"
            raise InvalidArgument("BAD_OUTPUT", f"output.hidden.layers[{index}]", text)
    state_bytes = limits.hidden_size * _HIDDEN_BYTES[hidden.dtype] + _TENSOR_BYTES
    return max(len(hidden.layers), 1) * state_bytes


def check_response_size(size_bytes: int, limits: RequestLimits, field: str) -> None:
    """The answer may be sent."""
    if size_bytes > limits.max_response_bytes:
        raise InvalidArgument(
            "OUTPUT_TOO_LARGE",
            field,
            f"the answer would have {size_bytes} bytes, at most {limits.max_response_bytes} are sent",
        )


def _bad_sampling(name: str, allowed: str) -> InvalidArgument:
    return InvalidArgument("BAD_SAMPLING", f"output.sampling.{name}", f"{name} must be {allowed}")


# Each bounded setting: its name, the test it must pass (written so that NaN fails), and that test in words.
_SAMPLING_RULES: tuple[tuple[str, Callable[[float], bool], str], ...] = (
    ("temperature", lambda v: 0.0 <= v <= 100.0, "in [0, 100]"),
    ("top_p", lambda v: 0.0 < v <= 1.0, "in (0, 1]"),
    ("min_p", lambda v: 0.0 <= v <= 1.0, "in [0, 1]"),
    ("repetition_penalty", lambda v: 0.0 < v <= 10.0, "in (0, 10]"),
    ("frequency_penalty", lambda v: -2.0 <= v <= 2.0, "in [-2, 2]"),
    ("presence_penalty", lambda v: -2.0 <= v <= 2.0, "in [-2, 2]"),
)


def _check_sampling(sampling: types_pb2.SamplingParams, limits: RequestLimits) -> None:
    for name, passes, allowed in _SAMPLING_RULES:
        if sampling.HasField(name) and not passes(getattr(sampling, name)):
            raise _bad_sampling(name, allowed)
    if len(sampling.logit_bias) > MAX_LOGIT_BIAS:
        raise _bad_sampling("logit_bias", f"at most {MAX_LOGIT_BIAS} entries")
    for token_id, bias in sampling.logit_bias.items():
        if token_id >= limits.vocab_size:
            raise InvalidArgument(
                "TOKEN_OUT_OF_VOCAB",
                f"output.sampling.logit_bias[{token_id}]",
                f"token {token_id} is not below the vocabulary size {limits.vocab_size}",
            )
        if math.isnan(bias) or bias == math.inf:
            raise _bad_sampling("logit_bias", "finite, or -infinity")


def check_accept(request: executor_pb2.ForwardVerifyRequest) -> None:
    """A verify accepts drafts in a way that fits how tokens are chosen."""
    if request.accept not in _ACCEPTS:
        raise InvalidArgument("BAD_ACCEPT", "accept", "the mode is not known")
    sampled = request.output.sampling.temperature > 0
    if request.accept == types_pb2.VERIFY_ACCEPT_GREEDY and sampled:
        raise InvalidArgument(
            "BAD_SAMPLING", "output.sampling.temperature", "must be 0 when drafts are accepted greedily"
        )


def check_creation(request: executor_pb2.PrefillRequest) -> None:
    """What only a prefill says. Raises Unsupported for an adapter: no executor has any yet."""
    if request.adapter_id:
        raise Unsupported("this executor has no LoRA adapters", metadata={"field": "adapter_id"})
    check_request_id(request.request_id)
    check_cache_salt(request.cache_salt)
    if request.cache_salt and request.cache_id:
        raise InvalidArgument("BAD_CACHE_SALT", "cache_salt", "a cache has the salt it was made with")


def check_cache_salt(salt: str) -> None:
    """The salt is short enough to be kept."""
    if len(salt) > MAX_CACHE_SALT_CHARS:
        raise InvalidArgument(
            "BAD_CACHE_SALT", "cache_salt", f"at most {MAX_CACHE_SALT_CHARS} characters are allowed"
        )


def check_request_id(text: str) -> None:
    """The request id can be kept and written down."""
    if not is_request_id(text):
        raise InvalidArgument(
            "BAD_REQUEST_ID",
            "request_id",
            f"at most {MAX_REQUEST_ID_CHARS} characters are allowed, of printable ASCII",
        )


def is_request_id(text: str) -> bool:
    """Whether it can name a request, and be written to logs and terminals as it is."""
    return len(text) <= MAX_REQUEST_ID_CHARS and text.isascii() and text.isprintable()


def lease_seconds(message: duration_pb2.Duration) -> float:
    """A lease in seconds. It must be positive; the server's own maximum is applied silently."""
    seconds = _seconds(message)
    if seconds <= 0:
        raise InvalidArgument("BAD_LEASE", "lease", "a lease must be longer than 0")
    return seconds


def grace_seconds(message: duration_pb2.Duration) -> float:
    """How long something may go on, in seconds."""
    seconds = _seconds(message)
    if seconds < 0:
        raise InvalidArgument("BAD_GRACE", "grace", "a grace must not be negative")
    return seconds


def timeout_seconds(left_s: float | None, own: duration_pb2.Duration | None = None) -> float | None:
    """What is left of a caller's deadline. One of a year or more counts as none, which is what it means.

    gRPC allows deadlines of 11,000 years, which the worker protocol's nanoseconds cannot hold. `own`: a
    call's own, which may be shorter. Raises InvalidArgument for one that is not positive.
    """
    if own is not None:
        own_s = _seconds(own)
        if own_s <= 0:
            raise InvalidArgument("BAD_TIMEOUT", "calls.timeout", "a timeout must be longer than 0")
        left_s = own_s if left_s is None else min(left_s, own_s)
    return None if left_s is None or left_s >= _LONGEST_TIMEOUT_S else left_s


def _seconds(message: duration_pb2.Duration) -> float:
    return message.seconds + message.nanos / 1e9


def check_fork(request: executor_pb2.ForkCacheRequest, limits: RequestLimits) -> int:
    """A fork's fields. Returns the answer's size in bytes, at most."""
    check_cache_id(request.cache_id)
    return _check_copies(request, request.count, limits, "count")


def check_forks(request: executor_pb2.ForkCachesRequest, limits: RequestLimits) -> int:
    """The fields of a fork of several. Returns the answer's size in bytes, at most."""
    if not request.forks:
        raise InvalidArgument("EMPTY_BATCH", "forks", "at least one cache to copy is needed")
    if len(request.forks) > limits.max_items:
        raise too_many_forks(limits.max_items)
    seen: set[str] = set()
    for index, fork in enumerate(request.forks):
        field = f"forks[{index}].cache_id"
        check_cache_id(fork.cache_id, field)
        if fork.cache_id in seen:
            raise InvalidArgument("DUPLICATE_CACHE_IN_BATCH", field, "the cache occurs more than once")
        seen.add(fork.cache_id)
    return _check_copies(request, sum(fork.count for fork in request.forks), limits, "forks")


def _check_copies(
    request: executor_pb2.ForkCacheRequest | executor_pb2.ForkCachesRequest,
    count: int,
    limits: RequestLimits,
    field: str,
) -> int:
    check_request_id(request.request_id)
    if count > MAX_FORK_COUNT:
        raise InvalidArgument("BAD_COUNT", field, f"at most {MAX_FORK_COUNT} copies can be made")
    if len(request.release) > MAX_FORK_RELEASE:
        raise InvalidArgument("BAD_COUNT", "release", f"at most {MAX_FORK_RELEASE} caches can be released")
    size_bytes = ANSWER_BYTES + HANDLE_BYTES * count
    check_response_size(size_bytes, limits, field)
    return size_bytes


def check_num_items(items: Sequence[object], max_items: int) -> None:
    """A batch has items, and not too many."""
    if not items:
        raise InvalidArgument("EMPTY_BATCH", "items", "at least one item is needed")
    if len(items) > max_items:
        raise too_many("items", max_items)


def check_batch(items: Sequence[object], limits: RequestLimits) -> None:
    """A batch has items, and no more than can be answered, be it with an error each."""
    check_num_items(items, limits.max_items)
    check_response_size(len(items) * ANSWER_BYTES, limits, "items")
