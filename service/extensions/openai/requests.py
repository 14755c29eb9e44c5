"""Parses requests of OpenAI's API into items of an execution and options of the response.

Fields of OpenAI's API that cannot change the result are ignored. Fields that could and are not supported, and
unknown fields, are refused. `item_fields` has the fields that set fields of items.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from quire.v1 import runner_pb2, types_pb2

from service.errors import InvalidArgument, SequenceTooLong
from service.extensions.openai.fields import Fields, bad_field, boolean, integer, string, unsupported
from service.extensions.openai.item_fields import (
    CHAT,
    COMPLETION,
    MAX_ID,
    MAX_TOP_LOGPROBS,
    ItemField,
    given,
    param_of,
    renamed,
    set_fields,
    token_ids,
)
from service.extensions.openai.models import ResolvedModel
from service.extensions.openai.routed_experts import NONE, RoutedExperts, routed_experts
from service.runtimes.items import MAX_SAMPLES
from service.runtimes.local import NAME

_MAX_PROMPTS = 1024
_MAX_PRIORITY = 1 << 63
# OpenAI's default for completions.
_DEFAULT_MAX_TOKENS = 16
# Fields for OpenAI's accounting, placement and storage.
IGNORED = frozenset(
    {
        "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key",
        "prompt_cache_retention",
    }
)  # fmt: skip

# Fields of other servers that some clients always send, with the values that have no effect.
NEUTRAL = MappingProxyType(
    {
        "best_of": 1, "detokenize": True, "early_stopping": False, "echo": False,
        "extra_args": {}, "function_call": "none", "functions": [], "include_stop_str_in_output": False,
        "length_penalty": 1, "logits_processors": [], "logprob_token_ids": [],
        "mm_processor_kwargs": {}, "return_token_ids": False, "return_tokens_as_token_ids": False,
        "spaces_between_special_tokens": True, "suffix": "", "use_beam_search": False,
        "verbosity": "medium", "vllm_xargs": {},
    }
)  # fmt: skip
# Fields of chats, which completions may have, too.
_NEUTRAL_OF_CHATS = MappingProxyType(
    {
        "add_generation_prompt": True, "chat_template_kwargs": {}, "continue_final_message": False,
        "documents": [], "include_reasoning": True,
    }
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionRequest:
    """A valid request, not yet checked against the model.

    Attributes:
        with_usage: Whether a stream ends with its usage. `usage_in_all`: each event has the usage so far.
        tables: The tables of `item_fields` for errors, in the order of lookup.
        names: Paths in the request that differ from those in the tables; see `renamed`.
        with_thoughts: Whether thoughts are returned.
        num_prompt_top: The number of alternatives to each prompt token. None: no log-probabilities of these.
        echo: The answer begins with the prompt. `echo_only`: it has nothing else.
        with_token_ids: Whether the token ids of prompts and answers are returned.
        experts: Which experts are returned. None: none.
        copied_bytes: The size of the settings of all items but the first, which are copies.
    """

    items: list[runner_pb2.ExecuteItem]
    model: ResolvedModel
    is_chat: bool
    has_logprobs: bool
    is_stream: bool
    with_usage: bool
    usage_in_all: bool = False
    priority: types_pb2.Priority = types_pb2.PRIORITY_UNSPECIFIED
    tables: Sequence[Sequence[ItemField]] = field(default=(), compare=False)
    names: Mapping[str, str] = field(default_factory=dict, compare=False)
    with_thoughts: bool = True
    num_prompt_top: int | None = None
    echo: bool = False
    echo_only: bool = False
    with_token_ids: bool = False
    experts: RoutedExperts | None = None
    copied_bytes: int = 0

    def param_of(self, path: str) -> str:
        """The field of the request that an error names by a field of an item."""
        return renamed(param_of(path, *self.tables), self.names)

    @property
    def num_scored(self) -> int | None:
        """As `num_prompt_top`, but includes the log-probabilities that an echo needs."""
        of_echo = self.items[0].top_logprobs if self.echo and self.has_logprobs else None
        wanted = [number for number in (of_echo, self.num_prompt_top) if number is not None]
        return max(wanted, default=None)


# Finds the runtime for the name of a model.
ResolveModel = Callable[[str], ResolvedModel]


def completion(
    value: object, resolve: ResolveModel, experts_form: str = NONE, max_bytes: int = sys.maxsize
) -> CompletionRequest:
    """Parses a request to /v1/completions. Raises InvalidArgument, and whatever `resolve` raises.

    `max_bytes`: the limit for all copies of its settings: each prompt but the first needs one.
    """
    fields = Fields(value)
    model = resolve(model_name(fields))
    shared = new_item(model)
    common = _common(fields, model, COMPLETION, experts_form)
    shared.experts = common["experts"] is not None
    shared.max_tokens = _DEFAULT_MAX_TOKENS
    echo = bool(fields.get("echo", boolean))
    # Some clients request the log-probabilities of a prompt this way.
    echo_only = echo and fields.get("max_tokens", integer, 0, MAX_ID) == 0
    set_fields(shared, fields, [one for one in COMPLETION if not (echo_only and one.name == "max_tokens")])
    if echo_only:
        shared.max_tokens = 1
    if echo and not model.is_local:
        raise unsupported("echo", "a provider does not return the tokens of a prompt")
    if fields.get("suffix", string):
        raise unsupported("suffix", "texts can be continued, not filled in")
    if fields.get("best_of", integer, 1, MAX_SAMPLES) not in (None, 1, shared.n):
        raise unsupported("best_of", "must be n: all samples are returned")
    given_prompts = prompts(fields.raw("prompt"), model.max_tokens, "prompt", _MAX_PROMPTS)
    copied_bytes = shared.ByteSize() * (len(given_prompts) - 1)
    if copied_bytes > max_bytes:
        text = f"the settings are copied for each prompt: all copies may have at most {max_bytes} bytes"
        raise InvalidArgument("REQUEST_TOO_LARGE", "prompt", text)
    items: list[runner_pb2.ExecuteItem] = []
    for prompt in given_prompts:
        item = runner_pb2.ExecuteItem()
        item.CopyFrom(shared)
        item.item_id = str(len(items))
        if isinstance(prompt, str):
            item.text = prompt
        else:
            item.tokens.token_ids.extend(prompt)
        items.append(item)
    neutral = {**NEUTRAL, **_NEUTRAL_OF_CHATS, "add_special_tokens": True}
    fields.refuse_others(IGNORED, neutral)
    return CompletionRequest(
        items=items,
        is_chat=False,
        has_logprobs=shared.logprobs,
        echo=echo,
        echo_only=echo_only,
        # Each prompt is an item, and together they may have too many samples.
        names={"items": "prompt"},
        copied_bytes=copied_bytes,
        **common,
    )


def chat(value: object, resolve: ResolveModel, experts_form: str = NONE) -> CompletionRequest:
    """Parses a request to /v1/chat/completions. Raises InvalidArgument, and whatever `resolve` raises."""
    fields = Fields(value)
    model = resolve(model_name(fields))
    item = new_item(model)
    set_fields(item, fields, CHAT)
    if not item.chat.messages:
        raise bad_field("messages", "is required")
    if item.top_logprobs and not item.logprobs:
        raise bad_field("top_logprobs", "needs logprobs")
    item.answer_parts.SetInParent()
    with_thoughts = fields.get("include_reasoning", boolean) is not False
    if fields.raw("modalities") not in (None, ["text"]):
        raise unsupported("modalities", 'must be ["text"]')
    common = _common(fields, model, CHAT, experts_form)
    item.experts = common["experts"] is not None
    fields.refuse_others(IGNORED, {**NEUTRAL, "add_special_tokens": False})
    return CompletionRequest(
        items=[item], is_chat=True, has_logprobs=item.logprobs, with_thoughts=with_thoughts, **common
    )


def _common(
    fields: Fields, model: ResolvedModel, table: Sequence[ItemField], experts_form: str
) -> dict[str, Any]:
    """The attributes of a request of either route, without its items."""
    num_prompt_top = fields.get("prompt_logprobs", integer, 0, MAX_TOP_LOGPROBS)
    with_token_ids = bool(fields.get("return_token_ids", boolean))
    if not model.is_local and (num_prompt_top is not None or with_token_ids):
        name = "return_token_ids" if with_token_ids else "prompt_logprobs"
        raise unsupported(name, "a provider does not return the tokens of a prompt")
    options = stream_options(fields)
    if num_prompt_top is not None and options["is_stream"]:
        raise unsupported("prompt_logprobs", "a stream has none")
    return {
        "model": model,
        "num_prompt_top": num_prompt_top,
        "with_token_ids": with_token_ids,
        "priority": priority_of(fields),
        "experts": routed_experts(fields, experts_form, model, is_stream=options["is_stream"]),
        "tables": (given(fields, table), table),
        **options,
    }


def new_item(model: ResolvedModel) -> runner_pb2.ExecuteItem:
    """The item of a request without any fields."""
    item = runner_pb2.ExecuteItem(item_id="0", n=1, adapter_id=model.adapter_id)
    item.sampling.CopyFrom(model.sampling_defaults)
    if not item.sampling.HasField("temperature"):
        # OpenAI's default.
        item.sampling.temperature = 1.0
    return item


def prompts(given: object, max_tokens: int, name: str, most: int) -> list[str | list[int]]:
    """At most `most` prompts from a text, texts, tokens or lists of tokens, each of at most `max_tokens`."""
    if isinstance(given, str):
        return [string(given, name)]
    if not isinstance(given, list) or not given:
        raise bad_field(name, "must be a string, a list of strings, tokens, or a list of lists of tokens")
    if isinstance(given[0], int):
        return [prompt_tokens(given, name, max_tokens)]
    if len(given) > most:
        raise bad_field(name, f"has more than {most} entries")
    return [
        prompt_tokens(each, f"{name}[{index}]", max_tokens)
        if isinstance(each, list)
        else string(each, f"{name}[{index}]")
        for index, each in enumerate(given)
    ]


def prompt_tokens(values: list[Any], field: str, max_tokens: int) -> list[int]:
    """Parses a prompt of token ids. Raises InvalidArgument or SequenceTooLong."""
    if len(values) > max_tokens:
        raise SequenceTooLong(len(values), max_tokens, field)
    return token_ids(values, field)


def stream_options(fields: Fields) -> dict[str, Any]:
    """Parses whether the response is a stream, and which of its events have the usage."""
    is_stream = bool(fields.get("stream", boolean))
    with_usage = usage_in_all = False
    if (options := fields.raw("stream_options")) is not None:
        inner = Fields(options, "stream_options")
        with_usage = bool(inner.get("include_usage", boolean))
        usage_in_all = bool(inner.get("continuous_usage_stats", boolean))
        inner.refuse_others({"include_obfuscation"})
        if with_usage and not is_stream:
            raise bad_field("stream_options", "needs stream")
    # As in vLLM, continuous_usage_stats needs include_usage.
    return {
        "is_stream": is_stream,
        "with_usage": with_usage,
        "usage_in_all": with_usage and usage_in_all,
    }


def model_name(fields: Fields) -> str:
    """The name in `model`. Absent or empty: this server's own model, as in vLLM."""
    return fields.get("model", string) or NAME


def priority_of(fields: Fields) -> types_pb2.Priority:
    """Parses the priority. As in vLLM, a request with a lower number runs first."""
    given_number = fields.get("priority", integer, -_MAX_PRIORITY, _MAX_PRIORITY - 1)
    if not given_number:
        return types_pb2.PRIORITY_UNSPECIFIED
    return types_pb2.PRIORITY_HIGH if given_number < 0 else types_pb2.PRIORITY_LOW
