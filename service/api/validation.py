"""Checks requests against the limits of the model and the server. Failures have a field and a stable reason.

What depends on a cache's state (existence, position, length) is checked by `caches/append.py` when an
operation starts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from google.protobuf import duration_pb2
from google.protobuf.message import Message
from quire.v1 import executor_pb2, types_pb2
from quire.v1.sampling_settings import SETTINGS

from service.api.masks import check_choice, check_vocabulary, out_of_vocab
from service.api.request_limits import RequestLimits
from service.errors import InvalidArgument, SequenceTooLong, Unsupported, too_many
from workers.common.unknown_fields import unknown_field

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
    types_pb2.DATA_TYPE_UNSPECIFIED: 0,
    types_pb2.DATA_TYPE_F32: 4,
    types_pb2.DATA_TYPE_BF16: 2,
    types_pb2.DATA_TYPE_F16: 2,
}
_HIDDEN_BYTES = {**_ELEMENT_BYTES, types_pb2.DATA_TYPE_UNSPECIFIED: 4}
_ACCEPTS = frozenset(types_pb2.VerifyAccept.values())
# Upper estimates of parts of an answer.
# A top log-probability: a token id, a log-probability and tags.
_TOP_ENTRY_BYTES = 10
# Dtype, shape and framing of a hidden state.
_TENSOR_BYTES = 32
# The token id, log-probability and framing of a row.
_ROW_BYTES = 80
# A further sample of a row: its token id, two log-probabilities and framing.
_SAMPLE_BYTES = 24
# A score: a log-probability, and whether it is the largest.
_SCORE_BYTES = 5
# The rest of an answer: its handle, timing and framing; or instead the error of a batch item.
ANSWER_BYTES = 512
# An answer with one row and without further options.
ROW_ANSWER_BYTES = ANSWER_BYTES + _ROW_BYTES
# A handle in a list.
HANDLE_BYTES = 128
_LONGEST_TIMEOUT_S = 365 * 86_400.0


def refuse_unknown(message: Message, path: str = "") -> None:
    """Checks that a message, and those in it, have no unknown fields, which a newer client may send.

    Workers of this version would ignore them, and newer ones use them unchecked. `path`: the message's path
    in the request, with a dot at the end.
    """
    if field := unknown_field(message, path):
        raise InvalidArgument("UNKNOWN_FIELD", field, f"this server does not know {field}")


def check_tokens(token_ids: Sequence[int], limits: RequestLimits) -> None:
    """Checks that there are tokens, no more than a sequence can have, all in the vocabulary."""
    if not token_ids:
        raise InvalidArgument("EMPTY_TOKENS", "token_ids", "at least one token is required")
    if len(token_ids) > limits.max_seq_tokens:
        raise SequenceTooLong(len(token_ids), limits.max_seq_tokens)
    check_vocabulary(token_ids, limits, "token_ids")


def check_cache_id(cache_id: str, field: str = "cache_id") -> None:
    """Checks that a cache_id is given."""
    if not cache_id:
        raise InvalidArgument("EMPTY_CACHE_ID", field, "cache_id is required")


def check_scored(score_from: int, tokens: int) -> int:
    """Checks that `score_from` is one of the tokens. Returns how many are scored: never the first one."""
    if score_from >= tokens:
        text = f"must be below {tokens}, the number of tokens"
        raise InvalidArgument("BAD_SCORE_FROM", "score_from", text)
    return tokens - max(score_from, 1)


def check_sample_seeds(count: int) -> None:
    """Checks the number of sample seeds."""
    _check_at_most(MAX_SAMPLE_SEEDS, count, "BAD_COUNT", "sample_seeds")


def _check_at_most(limit: int, count: int, reason: str, field: str) -> None:
    if count > limit:
        raise InvalidArgument(reason, field, f"at most {limit} are allowed")


def check_output(
    output: types_pb2.OutputOptions | None,
    limits: RequestLimits,
    rows: int,
    scored: int = 0,
    samples: int = 0,
    *,
    takes_mean: bool = False,
) -> int:
    """Checks the options, and that the answer for `rows` positions fits into a response.

    Returns an upper estimate of the answer's size in bytes. `takes_mean`: whether the mean of hidden states
    is allowed.
    """
    row_bytes = _ROW_BYTES if output is None else _check_options(output, limits, takes_mean)
    size_bytes = ANSWER_BYTES + rows * row_bytes + scored * _SCORE_BYTES + samples * _SAMPLE_BYTES
    # This runs for each token, so the usual case has no further function call.
    if size_bytes > limits.max_response_bytes:
        check_response_size(size_bytes, limits, "output")
    return size_bytes


def _check_options(output: types_pb2.OutputOptions, limits: RequestLimits, takes_mean: bool) -> int:
    """Checks the options. Returns the size of the answer for one position in bytes."""
    if output.logits not in _ELEMENT_BYTES:
        raise InvalidArgument("BAD_OUTPUT", "output.logits", "the format is not defined")
    most_top = min(MAX_TOP_LOGPROBS, limits.vocab_size)
    _check_at_most(most_top, output.top_logprobs, "BAD_OUTPUT", "output.top_logprobs")
    num_ids = len(output.logprob_token_ids)
    _check_at_most(MAX_LOGPROB_TOKEN_IDS, num_ids, "BAD_OUTPUT", "output.logprob_token_ids")
    if num_ids:
        check_vocabulary(output.logprob_token_ids, limits, "output.logprob_token_ids")
    if output.HasField("sampling"):
        _check_sampling(output.sampling, limits)
    check_choice(output.mask if output.HasField("mask") else None, output.sampling, limits)
    row_bytes = limits.vocab_size * _ELEMENT_BYTES[output.logits]
    if output.HasField("hidden"):
        row_bytes += _check_hidden(output.hidden, limits)
        if output.hidden.mean and not takes_mean:
            raise InvalidArgument("BAD_OUTPUT", "output.hidden.mean", "only a Forward has means")
    if output.experts:
        limits.experts.require("output.experts")
        row_bytes += limits.experts.token_bytes
    return row_bytes + _TOP_ENTRY_BYTES * output.top_logprobs + 4 * num_ids + _ROW_BYTES


def _check_hidden(hidden: types_pb2.HiddenStates, limits: RequestLimits) -> int:
    """Checks that the hidden states are available. Returns their size for one position in bytes."""
    if hidden.dtype not in _HIDDEN_BYTES:
        raise InvalidArgument("BAD_OUTPUT", "output.hidden.dtype", "the format is not defined")
    _check_at_most(MAX_HIDDEN_LAYERS, len(hidden.layers), "BAD_OUTPUT", "output.hidden.layers")
    if not limits.hidden_size:
        raise Unsupported("this executor does not return hidden states", field="output.hidden")
    for index, layer in enumerate(hidden.layers):
        if layer > limits.num_layers:
            text = f"layer {layer} does not exist, the last one is {limits.num_layers}"
            raise InvalidArgument("BAD_OUTPUT", f"output.hidden.layers[{index}]", text)
    state_bytes = limits.hidden_size * _HIDDEN_BYTES[hidden.dtype] + _TENSOR_BYTES
    return max(len(hidden.layers), 1) * state_bytes


def check_response_size(size_bytes: int, limits: RequestLimits, field: str) -> None:
    """Checks that the answer is not too large."""
    if size_bytes > limits.max_response_bytes:
        text = f"the answer could have {size_bytes} bytes, the limit is {limits.max_response_bytes}"
        raise InvalidArgument("OUTPUT_TOO_LARGE", field, text)


def _check_sampling(sampling: types_pb2.SamplingParams, limits: RequestLimits) -> None:
    for setting in SETTINGS:
        name = setting.name
        if sampling.HasField(name) and not setting.allows(getattr(sampling, name)):
            raise InvalidArgument(
                "BAD_SAMPLING", f"output.sampling.{name}", f"{name} must be {setting.allowed}"
            )
    num_biases = len(sampling.logit_bias)
    _check_at_most(MAX_LOGIT_BIAS, num_biases, "BAD_SAMPLING", "output.sampling.logit_bias")
    for token_id, bias in sampling.logit_bias.items():
        if token_id >= limits.vocab_size:
            raise out_of_vocab(token_id, limits, f"output.sampling.logit_bias[{token_id}]")
        if math.isnan(bias) or bias == math.inf:
            text = "logit_bias must be finite, or -infinity"
            raise InvalidArgument("BAD_SAMPLING", "output.sampling.logit_bias", text)


def check_accept(request: executor_pb2.ForwardVerifyRequest) -> None:
    """Checks that the accept mode is known and fits the sampling settings."""
    if not request.accept or request.accept not in _ACCEPTS:
        why = "the mode is not defined" if request.accept else "which drafts are accepted has to be said"
        raise InvalidArgument("BAD_ACCEPT", "accept", why)
    sampled = request.output.sampling.temperature > 0
    if request.accept == types_pb2.VERIFY_ACCEPT_GREEDY and sampled:
        text = "must be 0 with VERIFY_ACCEPT_GREEDY"
        raise InvalidArgument("BAD_SAMPLING", "output.sampling.temperature", text)


def check_adapter(adapter_id: str, cache_id: str, limits: RequestLimits, made_with: int = 0) -> int:
    """Returns the number of the adapter of a new cache. 0: none. Also raises AdapterNotFound or Unsupported.

    `made_with`: see `RequestLimits.adapter_of`. 0: not a repetition.
    """
    if not adapter_id:
        return 0
    if cache_id:
        raise InvalidArgument("BAD_ADAPTER", "adapter_id", "must be empty for an existing cache")
    return limits.adapter_of(adapter_id, made_with)


def check_creation(request: executor_pb2.PrefillRequest) -> None:
    """Checks the fields that only a prefill has."""
    check_request_id(request.request_id)
    check_cache_salt(request.cache_salt)
    if request.cache_salt and request.cache_id:
        raise InvalidArgument("BAD_CACHE_SALT", "cache_salt", "must be empty for an existing cache")


def check_cache_salt(salt: str) -> None:
    """Checks that the salt is not too long."""
    _check_at_most(MAX_CACHE_SALT_CHARS, len(salt), "BAD_CACHE_SALT", "cache_salt")


def check_request_id(text: str, field: str = "request_id") -> None:
    """Checks that the request id can be stored and logged."""
    if not is_request_id(text):
        allowed = f"must have at most {MAX_REQUEST_ID_CHARS} characters of printable ASCII"
        raise InvalidArgument("BAD_REQUEST_ID", field, allowed)


def is_request_id(text: str) -> bool:
    """Whether a text is a valid request id, which is safe to write to logs and terminals."""
    return len(text) <= MAX_REQUEST_ID_CHARS and text.isascii() and text.isprintable()


def lease_seconds(message: duration_pb2.Duration) -> float:
    """A lease in seconds. It must be positive. The server's maximum is applied elsewhere."""
    seconds = _seconds(message)
    if seconds <= 0:
        raise InvalidArgument("BAD_LEASE", "lease", "a lease must be longer than 0")
    return seconds


def grace_seconds(message: duration_pb2.Duration) -> float:
    """A grace period in seconds."""
    seconds = _seconds(message)
    if seconds < 0:
        raise InvalidArgument("BAD_GRACE", "grace", "a grace must not be negative")
    return seconds


def timeout_seconds(left_s: float | None, timeout: duration_pb2.Duration | None = None) -> float | None:
    """The time until the deadline in seconds. A year or more counts as no deadline.

    gRPC allows deadlines of 11,000 years, which do not fit into the worker protocol's nanoseconds. `timeout`:
    of a call on a Session; the shorter one applies. Raises InvalidArgument if it is not positive.
    """
    if timeout is not None:
        timeout_s = _seconds(timeout)
        if timeout_s <= 0:
            raise InvalidArgument("BAD_TIMEOUT", "calls.timeout", "a timeout must be longer than 0")
        left_s = timeout_s if left_s is None else min(left_s, timeout_s)
    return None if left_s is None or left_s >= _LONGEST_TIMEOUT_S else left_s


def _seconds(message: duration_pb2.Duration) -> float:
    return message.seconds + message.nanos / 1e9


def check_fork(request: executor_pb2.ForkCacheRequest, limits: RequestLimits) -> None:
    """Checks a ForkCache."""
    check_cache_id(request.cache_id)
    _check_copies(request, request.count, limits, "count")


def check_forks(request: executor_pb2.ForkCachesRequest, limits: RequestLimits) -> None:
    """Checks a ForkCaches."""
    check_num_items(request.forks, limits.max_items, "forks")
    seen: set[str] = set()
    for index, fork in enumerate(request.forks):
        field = f"forks[{index}].cache_id"
        check_cache_id(fork.cache_id, field)
        if fork.cache_id in seen:
            raise InvalidArgument("DUPLICATE_CACHE_IN_BATCH", field, "the cache occurs more than once")
        seen.add(fork.cache_id)
    _check_copies(request, sum(fork.count for fork in request.forks), limits, "forks")


def _check_copies(
    request: executor_pb2.ForkCacheRequest | executor_pb2.ForkCachesRequest,
    count: int,
    limits: RequestLimits,
    field: str,
) -> None:
    check_request_id(request.request_id)
    _check_at_most(MAX_FORK_COUNT, count, "BAD_COUNT", field)
    _check_at_most(MAX_FORK_RELEASE, len(request.release), "BAD_COUNT", "release")
    check_response_size(forked_bytes(count), limits, field)


def forked_bytes(count: int) -> int:
    """The largest size of a fork's answer in bytes."""
    return ANSWER_BYTES + HANDLE_BYTES * count


def check_num_items(items: Sequence[object], max_items: int, field: str = "items") -> None:
    """Checks that a batch has items, and not too many."""
    if not items:
        raise InvalidArgument("EMPTY_BATCH", field, f"{field} must not be empty")
    if len(items) > max_items:
        raise too_many(field, max_items)


def check_batch(items: Sequence[object], limits: RequestLimits) -> None:
    """Checks that a batch has items, and not so many that an answer of errors for all would be too large."""
    check_num_items(items, limits.max_items)
    check_response_size(len(items) * ANSWER_BYTES, limits, "items")
