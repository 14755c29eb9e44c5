"""Parses requests of OpenAI's API into items of an execution and the form of the response.

Fields of OpenAI's API that cannot change the result are ignored. Fields that could and are not supported, and
unknown fields, are refused. Those that set a field of an item are in `item_fields`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from quire.v1 import runner_pb2, types_pb2

from service.errors import InvalidArgument, SequenceTooLong
from service.extensions.openai.fields import Fields, bad_field, boolean, integer, string
from service.extensions.openai.item_fields import CHAT, COMPLETION, ItemField, set_fields, token_ids
from service.extensions.openai.models import ResolvedModel
from service.runtimes.items import MAX_SAMPLES

_MAX_PROMPTS = 1024
# OpenAI's default for completions.
_DEFAULT_MAX_TOKENS = 16
# For OpenAI's accounting, placement and storage.
_IGNORED = frozenset(
    {
        "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key",
        "prompt_cache_retention", "prediction",
    }
)  # fmt: skip

# Settings of other servers, with the values at which they ask for nothing: some clients always send them.
NEUTRAL = MappingProxyType(
    {
        "add_generation_prompt": True, "bad_words": [], "best_of": 1, "chat_template_kwargs": {},
        "continue_final_message": False, "detokenize": True, "documents": [], "early_stopping": False,
        "echo": False, "extra_args": {}, "function_call": "none", "functions": [], "ignore_eos": False,
        "include_reasoning": True, "include_stop_str_in_output": False, "length_penalty": 1,
        "logits_processors": [], "logprob_token_ids": [], "min_tokens": 0, "mm_processor_kwargs": {},
        "priority": 0, "return_token_ids": False, "return_tokens_as_token_ids": False,
        "skip_special_tokens": True, "spaces_between_special_tokens": True,
        "suffix": "", "use_beam_search": False, "verbosity": "medium", "vllm_xargs": {},
    }
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class CompletionRequest:
    """A valid request, not yet checked against the model."""

    items: list[runner_pb2.ExecuteItem]
    model: ResolvedModel
    is_chat: bool
    has_logprobs: bool
    is_stream: bool
    with_usage: bool
    priority: types_pb2.Priority = types_pb2.PRIORITY_UNSPECIFIED
    # Which of its fields set those of the items.
    table: Sequence[ItemField] = ()


# Finds the runtime for a model's name.
ResolveModel = Callable[[str], ResolvedModel]


def completion(value: object, resolve: ResolveModel) -> CompletionRequest:
    """A request to /v1/completions. Raises InvalidArgument, and what `resolve` raises."""
    fields = Fields(value)
    model = resolve(fields.required("model"))
    shared = new_item(model)
    shared.max_tokens = _DEFAULT_MAX_TOKENS
    set_fields(shared, fields, COMPLETION)
    if fields.get("echo", boolean):
        raise unsupported("echo", "the prompt cannot be repeated")
    if fields.get("suffix", string):
        raise unsupported("suffix", "texts can be continued, not filled in")
    if fields.get("best_of", integer, 1, MAX_SAMPLES) not in (None, 1, shared.n):
        raise unsupported("best_of", "must be n: all samples are returned")
    is_stream, with_usage = stream_options(fields)
    items: list[runner_pb2.ExecuteItem] = []
    for prompt in _prompts(fields.raw("prompt"), model.max_tokens):
        item = runner_pb2.ExecuteItem()
        item.CopyFrom(shared)
        item.item_id = str(len(items))
        if isinstance(prompt, str):
            item.text = prompt
        else:
            item.tokens.token_ids.extend(prompt)
        items.append(item)
    fields.refuse_others(_IGNORED, {**NEUTRAL, "add_special_tokens": True})
    return CompletionRequest(items, model, False, shared.logprobs, is_stream, with_usage, table=COMPLETION)


def chat(value: object, resolve: ResolveModel) -> CompletionRequest:
    """A request to /v1/chat/completions. Raises InvalidArgument, and what `resolve` raises."""
    fields = Fields(value)
    model = resolve(fields.required("model"))
    item = new_item(model)
    set_fields(item, fields, CHAT)
    if not item.chat.messages:
        raise bad_field("messages", "is required")
    if item.top_logprobs and not item.logprobs:
        raise bad_field("top_logprobs", "needs logprobs")
    _check_tools(item.chat, fields)
    if fields.raw("modalities") not in (None, ["text"]):
        raise unsupported("modalities", 'must be ["text"]')
    is_stream, with_usage = stream_options(fields)
    fields.refuse_others(_IGNORED, {**NEUTRAL, "add_special_tokens": False})
    return CompletionRequest([item], model, True, item.logprobs, is_stream, with_usage, table=CHAT)


def new_item(model: ResolvedModel) -> runner_pb2.ExecuteItem:
    """The item of a request in which all fields are absent."""
    item = runner_pb2.ExecuteItem(item_id="0", n=1, adapter_id=model.adapter_id)
    item.sampling.CopyFrom(model.sampling_defaults)
    if not item.sampling.HasField("temperature"):
        # OpenAI's default.
        item.sampling.temperature = 1.0
    return item


def _prompts(prompt: object, max_tokens: int) -> list[str | list[int]]:
    """The prompts of a request: a text, texts, tokens or lists of tokens, each of at most `max_tokens`."""
    if isinstance(prompt, str):
        return [string(prompt, "prompt")]
    if not isinstance(prompt, list) or not prompt:
        raise bad_field("prompt", "must be a string, a list of strings, tokens, or a list of lists of tokens")
    if isinstance(prompt[0], int):
        return [prompt_tokens(prompt, "prompt", max_tokens)]
    if len(prompt) > _MAX_PROMPTS:
        raise bad_field("prompt", f"has more than {_MAX_PROMPTS} entries")
    return [
        prompt_tokens(each, f"prompt[{index}]", max_tokens)
        if isinstance(each, list)
        else string(each, f"prompt[{index}]")
        for index, each in enumerate(prompt)
    ]


def prompt_tokens(values: list[Any], field: str, max_tokens: int) -> list[int]:
    """A prompt of tokens. Raises InvalidArgument or SequenceTooLong."""
    if len(values) > max_tokens:
        raise SequenceTooLong(len(values), max_tokens)
    return token_ids(values, field)


def stream_options(fields: Fields) -> tuple[bool, bool]:
    """Whether the response is a stream, and whether that includes its usage."""
    is_stream = bool(fields.get("stream", boolean))
    options = fields.raw("stream_options")
    if options is None:
        return is_stream, False
    inner = Fields(options, "stream_options")
    with_usage = bool(inner.get("include_usage", boolean))
    inner.refuse_others({"include_obfuscation"}, {"continuous_usage_stats": False})
    if with_usage and not is_stream:
        raise bad_field("stream_options", "needs stream")
    return is_stream, with_usage


def _check_tools(item_chat: runner_pb2.Chat, fields: Fields) -> None:
    choice = fields.raw("tool_choice")
    if choice not in (None, "none", "auto"):
        raise unsupported("tool_choice", "must be none or auto")
    if fields.raw("parallel_tool_calls") not in (None, True) and item_chat.tools_json:
        raise unsupported("parallel_tool_calls", "the model decides how many tools it calls")
    if choice == "none":
        item_chat.ClearField("tools_json")


def unsupported(field: str, why: str) -> InvalidArgument:
    """The error for a field with a valid value that could change the result, and cannot here."""
    return InvalidArgument("UNSUPPORTED_FIELD", field, f"{field}: {why}")
