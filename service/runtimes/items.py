"""Validation of items for all runtimes, with a field and a stable reason for each error; failed items."""

from __future__ import annotations

from collections.abc import Sequence

from quire.v1 import runner_pb2, types_pb2

from service.api import masks, validation
from service.api.request_limits import RequestLimits
from service.api.status import to_status
from service.errors import InvalidArgument, QuireError
from service.logging import current_request_id
from service.runtimes.speculation import MAX_DRAFT_TOKENS

MAX_SAMPLES = 128
# Requests of an item with several samples beside those of each: its prompt, and the copies of it.
FORK_REQUESTS = 2
MAX_STOPS = 16
MAX_STOP_CHARACTERS = 256
MAX_STOP_TOKENS = 64
MAX_BAD_WORDS = 128
MAX_ITEM_ID_CHARACTERS = 128
_SPECULATION_METHODS = (
    runner_pb2.SPECULATION_METHOD_PROMPT_LOOKUP,
    runner_pb2.SPECULATION_METHOD_DRAFT_MODEL,
)
_LONGEST_TIMEOUT_S = 365 * 86_400.0


def num_samples(item: runner_pb2.ExecuteItem) -> int:
    """How many samples of an item end. An item that asks for too many fails as one sample."""
    return max(1, item.n) if item.n <= MAX_SAMPLES else 1


def is_in_place(item: runner_pb2.ExecuteItem) -> bool:
    """Whether an item appends to a cache of the caller, not to copies or to caches of its own."""
    return item.HasField("cache") and item.n == 0


def check_ids(items: Sequence[runner_pb2.ExecuteItem]) -> None:
    """Raises InvalidArgument for an item_id that is not valid or not unique, or a cache of several items."""
    seen: set[str] = set()
    # The caches that are appended to, and those that are copied.
    changed: set[str] = set()
    copied: set[str] = set()
    for index, item in enumerate(items):
        field = f"items[{index}].item_id"
        if not item.item_id or len(item.item_id) > MAX_ITEM_ID_CHARACTERS or not item.item_id.isprintable():
            text = f"needs 1 to {MAX_ITEM_ID_CHARACTERS} printable characters"
            raise InvalidArgument("BAD_ITEM_ID", field, text)
        if item.item_id in seen:
            raise InvalidArgument("DUPLICATE_ITEM_ID", field, "another item has the same item_id")
        seen.add(item.item_id)
        if item.HasField("cache"):
            cache_id = item.cache.cache_id
            if cache_id in changed or (is_in_place(item) and cache_id in copied):
                text = "the cache occurs more than once in the batch, and not only to be copied by `n`"
                raise InvalidArgument("DUPLICATE_CACHE_IN_BATCH", f"items[{index}].cache.cache_id", text)
            (changed if is_in_place(item) else copied).add(cache_id)


def check(item: runner_pb2.ExecuteItem) -> None:
    """Checks all that needs no model. Raises InvalidArgument."""
    validation.refuse_unknown(item)
    _check_prompt(item)
    if item.n > MAX_SAMPLES:
        raise InvalidArgument("TOO_MANY_SAMPLES", "n", f"at most {MAX_SAMPLES} samples of an item")
    _check_stops(item)
    _check_bad_words(item)
    if item.HasField("constraint") and item.constraint.WhichOneof("kind") is None:
        text = "one of json_schema, regex, lark and mask is needed"
        raise InvalidArgument("BAD_CONSTRAINT", "constraint", text)
    if item.HasField("timeout") and _timeout_s(item) <= 0:
        raise InvalidArgument("BAD_TIMEOUT", "timeout", "a timeout must be longer than 0")
    if item.HasField("answer_parts") and item.tokens_only:
        text = "what is divided is text, which tokens_only does without"
        raise InvalidArgument("BAD_TOOL_CHOICE", "answer_parts", text)
    if item.HasField("text") and item.answer_parts.tools_json:
        text = "a text does not show tools: send a chat, or the tokens of a prompt that does"
        raise InvalidArgument("BAD_TOOL_CHOICE", "answer_parts.tools_json", text)
    if item.HasField("speculation"):
        _check_speculation(item.speculation)
    check_cost(item)


def _check_stops(item: runner_pb2.ExecuteItem) -> None:
    if len(item.stop) > MAX_STOPS:
        raise InvalidArgument("BAD_STOP", "stop", f"at most {MAX_STOPS} stop texts")
    for index, stop in enumerate(item.stop):
        if not 0 < len(stop) <= MAX_STOP_CHARACTERS:
            text = f"a stop text has 1 to {MAX_STOP_CHARACTERS} characters, not {len(stop)}"
            raise InvalidArgument("BAD_STOP", f"stop[{index}]", text)
    if item.stop and item.tokens_only:
        raise InvalidArgument("BAD_STOP", "stop", "stop texts need text, which tokens_only does without")
    if len(item.stop_token_ids) > MAX_STOP_TOKENS:
        raise InvalidArgument("BAD_STOP", "stop_token_ids", f"at most {MAX_STOP_TOKENS} stop tokens")
    if item.HasField("min_logprob") and not item.min_logprob <= 0:
        raise InvalidArgument("BAD_STOP", "min_logprob", "a log-probability is at most 0")
    if item.HasField("max_entropy") and not item.max_entropy >= 0:
        raise InvalidArgument("BAD_STOP", "max_entropy", "an entropy is at least 0")
    if item.max_tokens and item.min_tokens > item.max_tokens:
        raise InvalidArgument("BAD_STOP", "min_tokens", "is more than max_tokens")


def _check_bad_words(item: runner_pb2.ExecuteItem) -> None:
    if len(item.bad_words) > MAX_BAD_WORDS:
        raise InvalidArgument("BAD_CONSTRAINT", "bad_words", f"at most {MAX_BAD_WORDS} texts")
    for index, word in enumerate(item.bad_words):
        if not word.strip() or len(word) > MAX_STOP_CHARACTERS:
            text = f"must have 1 to {MAX_STOP_CHARACTERS} characters, not all of them spaces"
            raise InvalidArgument("BAD_CONSTRAINT", f"bad_words[{index}]", text)


def _check_prompt(item: runner_pb2.ExecuteItem) -> None:
    kind = item.WhichOneof("prompt")
    if kind is None:
        raise InvalidArgument("EMPTY_PROMPT", "prompt", "a prompt is needed: tokens, text, chat or a cache")
    if kind != "cache":
        return
    validation.check_cache_id(item.cache.cache_id, "cache.cache_id")
    if item.adapter_id:
        raise InvalidArgument("BAD_ADAPTER", "adapter_id", "must be empty for an existing cache")
    if item.cache_salt:
        raise InvalidArgument("BAD_CACHE_SALT", "cache_salt", "must be empty for an existing cache")


def _check_speculation(speculation: runner_pb2.Speculation) -> None:
    if speculation.method not in _SPECULATION_METHODS:
        raise InvalidArgument("BAD_SPECULATION", "speculation.method", "a method is needed")
    if speculation.HasField("max_draft_tokens") and not 0 < speculation.max_draft_tokens <= MAX_DRAFT_TOKENS:
        text = f"must be 1 to {MAX_DRAFT_TOKENS}"
        raise InvalidArgument("BAD_SPECULATION", "speculation.max_draft_tokens", text)


def check_cost(message: runner_pb2.ExecuteItem | runner_pb2.ExecuteRequest) -> None:
    """Raises InvalidArgument if max_cost_usd is negative or not a number."""
    if message.HasField("max_cost_usd") and not message.max_cost_usd >= 0:
        raise InvalidArgument("BAD_MAX_COST", "max_cost_usd", "must be a number, and not negative")


def check_output(output: types_pb2.OutputOptions, limits: RequestLimits, rows: int) -> int:
    """See `validation.check_output`. Its errors name fields of an item instead."""
    try:
        return validation.check_output(output, limits, rows)
    except InvalidArgument as error:
        field = error.field.removeprefix("output.")
        field = f"constraint.{field}" if field.startswith("mask") else field
        raise error.at(field) from None


def check_choice(output: types_pb2.OutputOptions, limits: RequestLimits, field: str) -> None:
    """Raises InvalidArgument if what an item forbids by its mask and its rules is every token.

    `field`: of the item, which the error names.
    """
    try:
        masks.check_choice(output.mask if output.HasField("mask") else None, output.sampling, limits)
    except InvalidArgument:
        text = "what the constraint, min_tokens and bad_words leave is no token"
        raise InvalidArgument("BAD_MASK", field, text) from None


def deadline_s(item: runner_pb2.ExecuteItem, batch_deadline_s: float | None, now_s: float) -> float | None:
    """The deadline of an item, on the clock of `now_s`. None: there is none."""
    if not item.HasField("timeout"):
        return batch_deadline_s
    own_s = now_s + _timeout_s(item)
    return own_s if batch_deadline_s is None else min(batch_deadline_s, own_s)


def _timeout_s(item: runner_pb2.ExecuteItem) -> float:
    # Timers do not take longer ones.
    return min(item.timeout.seconds + item.timeout.nanos / 1e9, _LONGEST_TIMEOUT_S)


def failures(item: runner_pb2.ExecuteItem, error: QuireError) -> list[runner_pb2.SampleChunk]:
    """The last chunks of all samples of an item that could not be started."""
    status = to_status(error, current_request_id())
    return [
        runner_pb2.SampleChunk(
            item_id=item.item_id,
            sample=sample,
            finish_reason=runner_pb2.FINISH_REASON_ERROR,
            error=status,
        )
        for sample in range(num_samples(item))
    ]
