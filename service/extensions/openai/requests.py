"""Parses requests of OpenAI's API into items of an execution and the form of the response.

Fields of OpenAI's API that cannot change the result are ignored. Fields that could and are not supported, and
unknown fields, are refused.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from quire.v1 import runner_pb2, types_pb2
from quire.v1.sampling_settings import SETTINGS

from service.api.validation import MAX_LOGIT_BIAS
from service.errors import InvalidArgument, SequenceTooLong
from service.extensions.openai.fields import Fields, array, bad_field, boolean, integer, number, string
from service.extensions.openai.messages import MAX_TOOLS, parse_messages
from service.extensions.openai.models import ResolvedModel
from service.runtimes.items import MAX_SAMPLES, MAX_STOPS

_MAX_PROMPTS = 1024
# Only so that a list is short: an item may have fewer.
_MAX_STOP_IDS = 1024
MAX_TOP_LOGPROBS = 20
MAX_ID = (1 << 32) - 1
_SEEDS = 1 << 64
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


# Finds the runtime for a model's name.
ResolveModel = Callable[[str], ResolvedModel]


def completion(value: object, resolve: ResolveModel) -> CompletionRequest:
    """A request to /v1/completions. Raises InvalidArgument, and what `resolve` raises."""
    fields = Fields(value)
    model = resolve(fields.required("model"))
    shared = runner_pb2.ExecuteItem()
    set_common(shared, fields, model)
    max_tokens = fields.get("max_tokens", integer, 1, MAX_ID)
    shared.max_tokens = _DEFAULT_MAX_TOKENS if max_tokens is None else max_tokens
    top = fields.get("logprobs", integer, 0, MAX_TOP_LOGPROBS)
    if top is not None:
        shared.logprobs, shared.top_logprobs = True, top
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
    return CompletionRequest(items, model, False, shared.logprobs, is_stream, with_usage)


def chat(value: object, resolve: ResolveModel) -> CompletionRequest:
    """A request to /v1/chat/completions. Raises InvalidArgument, and what `resolve` raises."""
    fields = Fields(value)
    model = resolve(fields.required("model"))
    item = runner_pb2.ExecuteItem(item_id="0")
    set_common(item, fields, model)
    newer = fields.get("max_completion_tokens", integer, 1, MAX_ID)
    older = fields.get("max_tokens", integer, 1, MAX_ID)
    item.max_tokens = newer or older or 0
    item.logprobs = bool(fields.get("logprobs", boolean))
    top = fields.get("top_logprobs", integer, 0, MAX_TOP_LOGPROBS)
    if top and not item.logprobs:
        raise bad_field("top_logprobs", "needs logprobs")
    item.top_logprobs = top or 0
    item.chat.CopyFrom(parse_messages(fields))
    _set_tools(item.chat, fields)
    _set_format(item, fields)
    if fields.raw("modalities") not in (None, ["text"]):
        raise unsupported("modalities", 'must be ["text"]')
    is_stream, with_usage = stream_options(fields)
    fields.refuse_others(_IGNORED, {**NEUTRAL, "add_special_tokens": False})
    return CompletionRequest([item], model, True, item.logprobs, is_stream, with_usage)


def set_common(item: runner_pb2.ExecuteItem, fields: Fields, model: ResolvedModel) -> None:
    """Sets the fields that all routes have in common."""
    item.n = fields.get("n", integer, 1, MAX_SAMPLES) or 1
    item.adapter_id = model.adapter_id
    stop = fields.raw("stop")
    if stop is not None:
        texts = [stop] if isinstance(stop, str) else stop
        path = fields.path("stop")
        if not isinstance(texts, list) or len(texts) > MAX_STOPS:
            raise bad_field(path, f"must be a string, or a list of at most {MAX_STOPS}")
        item.stop.extend(string(text, f"{path}[{index}]") for index, text in enumerate(texts))
    given_ids = fields.get("stop_token_ids", array, _MAX_STOP_IDS)
    if given_ids:
        item.stop_token_ids.extend(token_ids(given_ids, fields.path("stop_token_ids")))
    item.sampling.CopyFrom(model.sampling_defaults)
    if not item.sampling.HasField("temperature"):
        # OpenAI's default.
        item.sampling.temperature = 1.0
    for setting in SETTINGS:
        given: float | None
        if setting.type is float:
            given = fields.get(setting.name, number)
        else:
            # In other servers -1 means no limit, as 0 does here.
            given = fields.get(setting.name, integer, -1, int(setting.maximum))
        if given is not None:
            setattr(item.sampling, setting.name, given if setting.type is float else max(0, given))
    seed = fields.get("seed", integer, -_SEEDS // 2, _SEEDS - 1)
    if seed is not None:
        item.sampling.seed = seed % _SEEDS
    _set_bias(item.sampling, fields.raw("logit_bias"), fields.path("logit_bias"))


def _set_bias(sampling: types_pb2.SamplingParams, given: object, path: str) -> None:
    if given is None:
        return
    if not isinstance(given, dict) or len(given) > MAX_LOGIT_BIAS:
        raise bad_field(path, f"must be an object of at most {MAX_LOGIT_BIAS} tokens")
    for name, value in given.items():
        if not (name.isascii() and name.isdigit() and len(name) <= 10 and int(name) <= MAX_ID):
            raise bad_field(path, "must have token ids as keys")
        sampling.logit_bias[int(name)] = number(value, f"{path}[{name}]")


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


def token_ids(values: list[Any], field: str) -> list[int]:
    """A list of token ids, of any length. Raises InvalidArgument."""
    # There may be a million: they are checked one by one only to find the invalid one.
    if set(map(type, values)) - {int} or (values and not 0 <= min(values) <= max(values) <= MAX_ID):
        for index, value in enumerate(values):
            if type(value) is not int or not 0 <= value <= MAX_ID:
                integer(value, f"{field}[{index}]", 0, MAX_ID)
    return values


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


def _set_tools(item_chat: runner_pb2.Chat, fields: Fields) -> None:
    tools = fields.get("tools", array, MAX_TOOLS)
    choice = fields.raw("tool_choice")
    if choice not in (None, "none", "auto"):
        raise unsupported("tool_choice", "must be none or auto")
    if fields.raw("parallel_tool_calls") not in (None, True) and tools:
        raise unsupported("parallel_tool_calls", "the model decides how many tools it calls")
    for index, tool in enumerate(tools or ()):
        inner = Fields(tool, f"tools[{index}]")
        if inner.raw("type") != "function":
            raise bad_field(f"tools[{index}].type", "must be function")
        Fields(inner.raw("function"), f"tools[{index}].function").required("name")
    if tools and choice != "none":
        item_chat.tools_json = _json(tools, "tools")


def _set_format(item: runner_pb2.ExecuteItem, fields: Fields) -> None:
    given = fields.raw("response_format")
    if given is None:
        return
    form = Fields(given, "response_format")
    kind = form.raw("type")
    if kind == "json_object":
        item.constraint.json_schema = '{"type":"object"}'
    elif kind == "json_schema":
        inner = Fields(form.raw("json_schema"), "response_format.json_schema")
        schema = inner.raw("schema")
        if not isinstance(schema, dict):
            raise bad_field("response_format.json_schema.schema", "must be an object")
        item.constraint.json_schema = _json(schema, "response_format")
        inner.refuse_others({"name", "description", "strict"})
    elif kind != "text":
        raise bad_field("response_format.type", "must be text, json_object or json_schema")
    form.refuse_others()


def _json(value: object, field: str) -> str:
    try:
        return string(json.dumps(value, ensure_ascii=False), field)
    except RecursionError:
        raise bad_field(field, "is nested too deeply") from None


def unsupported(field: str, why: str) -> InvalidArgument:
    """The error for a field with a valid value that could change the result, and cannot here."""
    return InvalidArgument("UNSUPPORTED_FIELD", field, f"{field}: {why}")
