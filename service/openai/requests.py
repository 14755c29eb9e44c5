"""Requests of OpenAI's API as batches: what is asked for, and in which form it is to be answered.

What OpenAI's API knows and cannot change the answer is ignored. What could, and is not done here, is refused,
and so is what nobody knows.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from quire.v1 import runner_pb2, types_pb2

from service.errors import InvalidArgument, SequenceTooLong
from service.openai.fields import Fields, bad, number, sound, whole
from service.openai.messages import MAX_TOOLS, chat_of
from service.openai.models import Served

_MAX_SAMPLES = 128
_MAX_PROMPTS = 1024
_MAX_STOPS = 16
_MAX_TOP_LOGPROBS = 20
_MAX_BIAS = 1024
_MAX_ID = (1 << 32) - 1
_SEEDS = 1 << 64
# What the completions of OpenAI have by default.
_DEFAULT_MAX_TOKENS = 16
# They tell OpenAI who asks, where it may compute, and what it may keep.
_IGNORED = frozenset(
    {
        "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key",
        "prompt_cache_retention", "prediction",
    }
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Asked:
    """A request that makes sense, whatever the model has to say to it."""

    items: list[runner_pb2.ExecuteItem]
    served: Served
    is_chat: bool
    # Samples of each item.
    n: int
    has_logprobs: bool
    is_stream: bool
    with_usage: bool


# Finds what serves a model, by its name.
Find = Callable[[str], Served]


def completion(value: object, find: Find) -> Asked:
    """A request to /v1/completions. Raises InvalidArgument, and what `find` raises."""
    fields = Fields(value)
    served = find(fields.needed("model"))
    shared = runner_pb2.ExecuteItem()
    n = _set_common(shared, fields, served)
    asked = fields.whole("max_tokens", 1, _MAX_ID)
    shared.max_tokens = _DEFAULT_MAX_TOKENS if asked is None else asked
    top = fields.whole("logprobs", 0, _MAX_TOP_LOGPROBS)
    if top is not None:
        shared.logprobs, shared.top_logprobs = True, top
    if fields.flag("echo"):
        raise _unsupported("echo", "the prompt is not repeated")
    if fields.text("suffix"):
        raise _unsupported("suffix", "texts are continued, not filled in")
    if fields.whole("best_of", 1, _MAX_SAMPLES) not in (None, n):
        raise _unsupported("best_of", "must be n: all samples are answered")
    is_stream, with_usage = _stream(fields)
    items: list[runner_pb2.ExecuteItem] = []
    for prompt in _prompts(fields.take("prompt"), served.max_tokens):
        item = runner_pb2.ExecuteItem()
        item.CopyFrom(shared)
        item.item_id = str(len(items))
        if isinstance(prompt, str):
            item.text = prompt
        else:
            item.tokens.token_ids.extend(prompt)
        items.append(item)
    fields.end(_IGNORED)
    return Asked(items, served, False, n, shared.logprobs, is_stream, with_usage)


def chat(value: object, find: Find) -> Asked:
    """A request to /v1/chat/completions. Raises InvalidArgument, and what `find` raises."""
    fields = Fields(value)
    served = find(fields.needed("model"))
    item = runner_pb2.ExecuteItem(item_id="0")
    n = _set_common(item, fields, served)
    item.n = n
    newer = fields.whole("max_completion_tokens", 1, _MAX_ID)
    older = fields.whole("max_tokens", 1, _MAX_ID)
    item.max_tokens = newer or older or 0
    item.logprobs = fields.flag("logprobs")
    top = fields.whole("top_logprobs", 0, _MAX_TOP_LOGPROBS)
    if top and not item.logprobs:
        raise bad("top_logprobs", "needs logprobs")
    item.top_logprobs = top or 0
    item.chat.CopyFrom(chat_of(fields.take("messages")))
    _set_tools(item.chat, fields)
    _set_format(item, fields)
    if fields.take("modalities") not in (None, ["text"]):
        raise _unsupported("modalities", 'must be ["text"]')
    is_stream, with_usage = _stream(fields)
    fields.end(_IGNORED)
    return Asked([item], served, True, n, item.logprobs, is_stream, with_usage)


def _set_common(item: runner_pb2.ExecuteItem, fields: Fields, served: Served) -> int:
    """Sets what completions and chats have in common. Returns n."""
    n = fields.whole("n", 1, _MAX_SAMPLES) or 1
    item.n = n
    stop = fields.take("stop")
    if stop is not None:
        texts = [stop] if isinstance(stop, str) else stop
        if not isinstance(texts, list) or len(texts) > _MAX_STOPS:
            raise bad("stop", f"must be a string, or a list of at most {_MAX_STOPS}")
        item.stop.extend(sound(text, f"stop[{index}]") for index, text in enumerate(texts))
    item.sampling.CopyFrom(served.sampling_defaults)
    if not item.sampling.HasField("temperature"):
        # What OpenAI's clients expect.
        item.sampling.temperature = 1.0
    for name in (
        "temperature", "top_p", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty",
    ):  # fmt: skip
        given = fields.number(name)
        if given is not None:
            setattr(item.sampling, name, given)
    top_k = fields.whole("top_k", -1, _MAX_ID)
    if top_k is not None:
        # -1 is all, too, to those who know it from elsewhere.
        item.sampling.top_k = max(0, top_k)
    seed = fields.whole("seed", -_SEEDS // 2, _SEEDS - 1)
    if seed is not None:
        item.sampling.seed = seed % _SEEDS
    _set_bias(item.sampling, fields.take("logit_bias"))
    return n


def _set_bias(sampling: types_pb2.SamplingParams, given: object) -> None:
    if given is None:
        return
    if not isinstance(given, dict) or len(given) > _MAX_BIAS:
        raise bad("logit_bias", f"must be an object of at most {_MAX_BIAS} tokens")
    for name, value in given.items():
        if not (name.isascii() and name.isdigit() and len(name) <= 10 and int(name) <= _MAX_ID):
            raise bad("logit_bias", "must have token ids as its names")
        sampling.logit_bias[int(name)] = number(value, f"logit_bias[{name}]")


def _prompts(prompt: object, max_tokens: int) -> list[str | list[int]]:
    """The prompts of a request: a text, texts, tokens, or lists of them, of up to so many tokens."""
    if isinstance(prompt, str):
        return [sound(prompt, "prompt")]
    if not isinstance(prompt, list) or not prompt:
        raise bad("prompt", "must be a string, a list of strings, tokens, or a list of lists of tokens")
    if isinstance(prompt[0], int):
        return [_tokens(prompt, "prompt", max_tokens)]
    if len(prompt) > _MAX_PROMPTS:
        raise bad("prompt", f"has more than {_MAX_PROMPTS} entries")
    return [
        _tokens(each, f"prompt[{index}]", max_tokens)
        if isinstance(each, list)
        else sound(each, f"prompt[{index}]")
        for index, each in enumerate(prompt)
    ]


def _tokens(values: list[Any], field: str, max_tokens: int) -> list[int]:
    if len(values) > max_tokens:
        raise SequenceTooLong(len(values), max_tokens)
    # There may be a million: they are looked at one by one only to say what is wrong.
    if set(map(type, values)) - {int} or (values and not 0 <= min(values) <= max(values) <= _MAX_ID):
        for index, value in enumerate(values):
            if type(value) is not int or not 0 <= value <= _MAX_ID:
                whole(value, f"{field}[{index}]", 0, _MAX_ID)
    return values


def _stream(fields: Fields) -> tuple[bool, bool]:
    """Whether a stream is wanted, and its usage."""
    is_stream = fields.flag("stream")
    options = fields.take("stream_options")
    if options is None:
        return is_stream, False
    if not is_stream:
        raise bad("stream_options", "goes with stream")
    inner = Fields(options, "stream_options")
    with_usage = inner.flag("include_usage")
    inner.end({"include_obfuscation"})
    return is_stream, with_usage


def _set_tools(chat_: runner_pb2.Chat, fields: Fields) -> None:
    tools = fields.items("tools", MAX_TOOLS)
    choice = fields.take("tool_choice")
    if choice not in (None, "none", "auto"):
        raise _unsupported("tool_choice", "must be none or auto")
    if fields.take("parallel_tool_calls") not in (None, True):
        raise _unsupported("parallel_tool_calls", "how many tools are called is up to the model")
    for index, tool in enumerate(tools or ()):
        inner = Fields(tool, f"tools[{index}]")
        if inner.take("type") != "function":
            raise bad(f"tools[{index}].type", "must be function")
        Fields(inner.take("function"), f"tools[{index}].function").needed("name")
    if tools and choice != "none":
        chat_.tools_json = _json(tools, "tools")


def _set_format(item: runner_pb2.ExecuteItem, fields: Fields) -> None:
    given = fields.take("response_format")
    if given is None:
        return
    form = Fields(given, "response_format")
    kind = form.take("type")
    if kind == "json_object":
        item.constraint.json_schema = '{"type":"object"}'
    elif kind == "json_schema":
        inner = Fields(form.take("json_schema"), "response_format.json_schema")
        schema = inner.take("schema")
        if not isinstance(schema, dict):
            raise bad("response_format.json_schema.schema", "must be an object")
        item.constraint.json_schema = _json(schema, "response_format")
        inner.end({"name", "description", "strict"})
    elif kind != "text":
        raise bad("response_format.type", "must be text, json_object or json_schema")
    form.end()


def _json(value: object, field: str) -> str:
    try:
        return sound(json.dumps(value, ensure_ascii=False), field)
    except RecursionError:
        raise bad(field, "is nested too deeply") from None


def _unsupported(field: str, why: str) -> InvalidArgument:
    return InvalidArgument("UNSUPPORTED_FIELD", field, f"{field}: {why}")
