"""Converts prompts, messages and settings to items of Execute, and checks them."""

from __future__ import annotations

import datetime as dt
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, TypeAlias, TypedDict, Unpack

from google.protobuf import duration_pb2
from quire._calls import duration
from quire._enums import number_of
from quire._options import sampling_params
from quire.v1 import runner_pb2, types_pb2
from quire.v1.sampling_settings import SamplingSettings

# Token ids, a text, messages such as [{"role": "user", "content": "..."}], or a cache with tokens to append.
Prompt: TypeAlias = str | Sequence[int] | Sequence[Mapping[str, Any]] | runner_pb2.CachePrompt

_ROLES = {
    "system": runner_pb2.CHAT_ROLE_SYSTEM,
    "user": runner_pb2.CHAT_ROLE_USER,
    "assistant": runner_pb2.CHAT_ROLE_ASSISTANT,
    "tool": runner_pb2.CHAT_ROLE_TOOL,
}
_KEYS = ("role", "content", "tool_calls", "tool_call_id", "name", "reasoning_content")
_PROMPTS = ("tokens", "text", "chat")
_TOOL_CHOICES = {"none": runner_pb2.TOOL_CHOICE_NONE, "required": runner_pb2.TOOL_CHOICE_REQUIRED}
# What sets fields of `answer_parts`.
_OF_ANSWERS = ("tools", "tool_choice", "parallel_tool_calls", "answer_parts")


class ConstraintSettings(TypedDict, total=False):
    """One of the kinds of Constraint. A JSON schema is a string, or an object that `json.dumps` accepts."""

    json_schema: str | Mapping[str, Any]
    regex: str
    lark: str
    mask: types_pb2.TokenMask


class SpeculationSettings(TypedDict, total=False):
    """Speculative decoding: where drafts come from, and the most tokens of one."""

    method: Literal["prompt_lookup", "draft_model"]
    max_draft_tokens: int


class TextSettings(SamplingSettings, total=False):
    """How texts are generated: the settings of sampling, and the fields of ExecuteItem. None: unset.

    Attributes:
        sampling: Default settings, such as `model_info().sampling_defaults`.
        timeout: In seconds or a timedelta.
        speculation: Speculative decoding, which changes no text: its method, or with its other setting.
        tools: As in the OpenAI API: {"type": "function", "function": {...}}. Texts are divided then. The
            prompt is messages, or the tokens of one that shows them.
        tool_choice: "auto", "none", "required", or the name of the function to call.
        parallel_tool_calls: False: a text has at most one call.
        answer_parts: True: divide texts into content, thoughts and tool calls also without tools.
        template_variables: Of the chat template, such as {"enable_thinking": False}.
    """

    sampling: types_pb2.SamplingParams | SamplingSettings | None
    max_tokens: int | None
    stop: Sequence[str] | None
    stop_token_ids: Sequence[int] | None
    ignore_eos: bool
    logprobs: bool
    top_logprobs: int
    n: int | None
    constraint: runner_pb2.Constraint | ConstraintSettings | None
    tokens_only: bool
    timeout: float | dt.timedelta | duration_pb2.Duration | None
    adapter_id: str
    sampled_logprobs: bool
    cache_salt: str
    min_logprob: float | None
    max_entropy: float | None
    special_tokens_in_text: bool
    min_tokens: int
    bad_words: Sequence[str] | None
    hidden: types_pb2.HiddenStates | None
    experts: bool
    speculation: Literal["prompt_lookup", "draft_model"] | runner_pb2.Speculation | SpeculationSettings | None
    tools: Sequence[Mapping[str, Any]] | None
    tool_choice: str | None
    parallel_tool_calls: bool
    answer_parts: runner_pb2.AnswerParts | bool
    template_variables: Mapping[str, Any] | None


def item(
    prompt: Prompt, *, item_id: str = "0", max_cost_usd: float | None = None, **settings: Unpack[TextSettings]
) -> runner_pb2.ExecuteItem:
    """An item for `execute`. Raises TypeError or ValueError for invalid arguments.

    Args:
        prompt: Token ids, a text to continue, or messages: mappings with `role`, `content`, and for tools
            `tool_calls` and `tool_call_id`, as in the OpenAI API, and `name` and `reasoning_content` for the
            chat templates that use these. Or a cache to continue: see the method `prompt` of a cache.
        item_id: Identifies the item in the chunks; unique in its batch.
        max_cost_usd: The maximum cost of the item. None: no limit.
        settings: Settings of sampling, such as temperature and seed, and other fields of ExecuteItem, such as
            max_tokens, stop, n, constraint; see `TextSettings`.
    """
    made = runner_pb2.ExecuteItem(item_id=item_id, max_cost_usd=max_cost_usd)
    sampling: Any = {}
    variables = settings.pop("template_variables", None)
    for name, value in settings.items():
        if name in types_pb2.SamplingParams.DESCRIPTOR.fields_by_name:
            sampling[name] = value
        else:
            _set(made, name, value)
    if any(value is not None for value in sampling.values()):
        made.sampling.MergeFrom(sampling_params(sampling))
    if isinstance(prompt, runner_pb2.CachePrompt):
        made.cache.CopyFrom(prompt)
    elif isinstance(prompt, str):
        made.text = prompt
    elif isinstance(prompt, Mapping):
        raise TypeError("messages are a list: put the message into one")
    elif len(prompt) and isinstance(prompt[0], Mapping):
        made.chat.messages.extend(_message(message) for message in prompt)
    else:
        try:
            made.tokens.token_ids.extend(prompt)  # type: ignore[arg-type]
        except (TypeError, ValueError) as error:
            raise type(error)(f"a prompt is a text, token ids, or messages: {error}") from None
    _complete_chat(made, variables)
    return made


def _complete_chat(made: runner_pb2.ExecuteItem, variables: Mapping[str, Any] | None) -> None:
    """Moves the tools to the chat, if there is one: then its template shows them. Raises ValueError."""
    if made.HasField("chat"):
        if made.answer_parts.tools_json:
            made.chat.tools_json = made.answer_parts.tools_json
            made.answer_parts.ClearField("tools_json")
        made.chat.variables_json = json.dumps(variables) if variables else ""
    elif variables:
        raise TypeError("template_variables are for messages")
    elif made.HasField("text") and made.answer_parts.tools_json:
        raise ValueError("tools are for messages, or for the tokens of a prompt that shows them")


def items_of(
    asked: Sequence[runner_pb2.ExecuteItem] | Sequence[Prompt] | Prompt, settings: TextSettings
) -> Sequence[runner_pb2.ExecuteItem]:
    """The items of `execute`. The ids of several prompts are "0", "1" and so on; they share the settings.

    Raises TypeError if there are both items and settings, and the errors of `item`.
    """
    if isinstance(asked, str | Mapping | runner_pb2.CachePrompt) or not len(asked):
        return [item(asked, **settings)]  # type: ignore[arg-type]
    if isinstance(asked[0], runner_pb2.ExecuteItem):
        if settings:
            raise TypeError(f"{', '.join(settings)}: each item has settings of its own")
        if not all(isinstance(one, runner_pb2.ExecuteItem) for one in asked):
            raise TypeError("items and prompts do not go together: make each an item")
        return asked  # type: ignore[return-value]
    if isinstance(asked[0], Sequence | runner_pb2.CachePrompt):
        return [item(one, item_id=str(index), **settings) for index, one in enumerate(asked)]  # type: ignore[arg-type]
    return [item(asked, **settings)]  # type: ignore[arg-type]


def require_one_text(prompt: Prompt, n: int | None) -> None:
    """Raises TypeError for several prompts or samples, of which `items_of` makes several texts."""
    parts = prompt if isinstance(prompt, Sequence) and not isinstance(prompt, str) else ()
    are_prompts = len(parts) > 1 and isinstance(parts[0], Sequence | runner_pb2.CachePrompt)
    if are_prompts or (n or 1) > 1:
        raise TypeError("generate returns one text; for several: execute(...).texts()")


def embed_inputs(given: Sequence[str] | Sequence[Sequence[int]]) -> Iterator[runner_pb2.EmbedInput]:
    """The inputs of Embed: texts, or lists of token ids. Raises TypeError or ValueError."""
    if isinstance(given, str):
        raise TypeError("inputs are a list of texts, or of lists of token ids: put the text into a list")
    for one in given:
        if isinstance(one, str):
            yield runner_pb2.EmbedInput(text=one)
        else:
            yield runner_pb2.EmbedInput(tokens=runner_pb2.TokenPrompt(token_ids=one))


def _set(made: runner_pb2.ExecuteItem, name: str, value: Any) -> None:
    if name not in TextSettings.__annotations__:
        raise TypeError(f"an item has no setting {name}: it has {', '.join(TextSettings.__annotations__)}")
    try:
        if name in _OF_ANSWERS:
            name, value = "answer_parts", _answer_parts(name, value)
        elif name == "timeout":
            value = _timeout(value)
        elif name == "constraint" and isinstance(value, Mapping):
            value = _constraint(value)
        elif name == "speculation" and isinstance(value, str | Mapping):
            value = _speculation({"method": value} if isinstance(value, str) else value)
        elif isinstance(value, str) and runner_pb2.ExecuteItem.DESCRIPTOR.fields_by_name[name].is_repeated:
            raise TypeError("it is a list: put the text into one")
        made.MergeFrom(runner_pb2.ExecuteItem(**{name: value}))
    except (TypeError, ValueError) as error:
        raise type(error)(f"{name} cannot be {value!r:.80}: {error}") from None


def _answer_parts(name: str, value: Any) -> runner_pb2.AnswerParts | None:
    """What one of `_OF_ANSWERS` says. None: nothing, and texts are not divided for it."""
    if name == "tools":
        return runner_pb2.AnswerParts(tools_json=json.dumps(value)) if value else None
    if name == "parallel_tool_calls":
        return runner_pb2.AnswerParts(single_call=True) if value is False else None
    if name == "answer_parts":
        return runner_pb2.AnswerParts() if value is True else value or None
    if value in (None, "auto"):
        return None
    choice = _TOOL_CHOICES.get(value)
    if choice is not None:
        return runner_pb2.AnswerParts(tool_choice=choice)
    return runner_pb2.AnswerParts(tool_choice=runner_pb2.TOOL_CHOICE_REQUIRED, function=value)


def _timeout(value: Any) -> Any:
    if isinstance(value, dt.timedelta | duration_pb2.Duration | None):
        return value
    if isinstance(value, int | float):
        return duration(value)
    raise TypeError("it is a number of seconds, or a timedelta")


def _constraint(value: Mapping[str, Any]) -> Mapping[str, Any]:
    schema = value.get("json_schema", "")
    return value if isinstance(schema, str) else {**value, "json_schema": json.dumps(schema)}


def _speculation(value: Mapping[str, Any]) -> Mapping[str, Any]:
    methods = runner_pb2.SpeculationMethod
    return {**value, "method": number_of("its method", methods, value.get("method", ""))}


def _message(message: Any) -> runner_pb2.ChatMessage:
    if not isinstance(message, Mapping):
        raise TypeError(f"a message is a mapping with role and content, not {message!r:.80}")
    # What an OpenAI client returns has all other keys too, with null or an empty list.
    if unknown := [
        str(key) for key, value in message.items() if key not in _KEYS and value not in (None, [])
    ]:
        raise ValueError(f"a message has {', '.join(_KEYS)}, and not {', '.join(unknown)}")
    role, content = message.get("role"), message.get("content")
    if role not in _ROLES:
        raise ValueError(f"the role of a message is one of {', '.join(_ROLES)}, not {role!r}")
    calls = message.get("tool_calls") or ()
    if not isinstance(content, str) and not (content is None and calls):
        raise TypeError(f"the content of a message is a text, not {content!r:.80}")
    return runner_pb2.ChatMessage(
        role=_ROLES[role],
        content=content,
        tool_calls=[_tool_call(index, call) for index, call in enumerate(calls)],
        tool_call_id=message.get("tool_call_id") or "",
        name=message.get("name") or "",
        reasoning_content=message.get("reasoning_content"),
    )


def _tool_call(index: int, call: Any) -> runner_pb2.ToolCall:
    if isinstance(call, runner_pb2.ToolCall):
        return call
    try:
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        if not isinstance(arguments, str):
            arguments = json.dumps(arguments)
        return runner_pb2.ToolCall(index=index, id=call["id"], name=name, arguments_json=arguments)
    except (KeyError, TypeError, ValueError) as error:
        form = '{"id": ..., "function": {"name": ..., "arguments": ...}}'
        raise ValueError(f"a tool call is {form}, not {call!r:.80}: {error}") from None
