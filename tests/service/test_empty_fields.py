"""What an empty list or text of a request means: every field is one of the rules in docs/calls.md."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from quire import token_mask
from quire.v1 import admin_pb2, executor_pb2, runner_pb2, types_pb2

from service.adapters.registry import check_adapter_id
from service.api import append_codec, validation
from service.api.request_limits import RequestLimits
from service.errors import InvalidArgument
from service.extensions.openai.generate import generate
from service.extensions.openai.models import ResolvedModel
from service.extensions.openai.requests import chat, completion
from service.runtimes import items
from service.runtimes.loading import model_of

VOCAB = 40
LIMITS = RequestLimits(VOCAB, 1 << 20, hidden_size=8, num_layers=2)

# Empty is absent: the comment of the field, or of the message, says what that means.
ABSENT = {
    "PrefillRequest.cache_id", "PrefillRequest.adapter_id", "PrefillRequest.request_id",
    "PrefillRequest.cache_salt", "PrefillRequest.sample_seeds", "OutputOptions.logprob_token_ids",
    "SamplingParams.logit_bias", "HiddenStates.layers", "ForwardVerifyRequest.rows",
    "ForwardVerifyRequest.parents", "UnifiedForwardItem.cache_id", "UnifiedForwardItem.adapter_id",
    "ForwardRequest.cache_salt", "ForwardRequest.adapter_id", "ForwardRequest.experts",
    "ForkCacheRequest.release", "ForkCacheRequest.request_id", "ForkCachesRequest.release",
    "ForkCachesRequest.request_id", "ListCachesRequest.page_token", "SessionRequest.calls",
    "ReleaseCacheRequest.request_ids",
    "ExecuteRequest.request_id", "ExecuteRequest.runtime", "ExecuteRequest.resume_after",
    "ExecuteItem.stop", "ExecuteItem.stop_token_ids", "ExecuteItem.adapter_id", "ExecuteItem.cache_salt",
    "ChatMessage.tool_calls", "ChatMessage.tool_call_id", "ChatMessage.name", "Chat.template",
    "Chat.tools_json", "Chat.variables_json", "ToolCall.arguments_json", "DraftProbabilities.dense",
    "EstimateCostRequest.runtime", "LoadWeightsRequest.runtime", "RebuildSessionRequest.runtime",
    "DrainRequest.worker_id", "LoadAdapterRequest.source", "UploadWeightsRequest.name",
    "UploadWeightsRequest.sha256", "EmbedRequest.adapter_id", "EmbedRequest.cache_salt",
    "ExecuteItem.bad_words", "AnswerParts.function", "AnswerParts.tools_json",
}  # fmt: skip
# Empty is a value: an empty text, data without bytes, a name that a template writes.
VALUE = {
    "ExecuteItem.text", "ChatMessage.content", "ChatMessage.reasoning_content", "ToolCall.id",
    "ToolCall.name", "UploadWeightsRequest.data", "AdapterFile.data", "Constraint.regex",
    "SampleProgress.item_id", "EmbedInput.text",
}  # fmt: skip
# Empty is a value, of a mask: no token is allowed, or none forbidden.
OF_MASKS = {"TokenMask.packed", "TokenMask.deflated", "TokenIds.ids"}
# Compiled by the process for grammars: see tests/service/text/test_constraints.py.
COMPILED = {"Constraint.json_schema", "Constraint.lark"}


def _fields(message: Descriptor, seen: set[str]) -> Iterator[FieldDescriptor]:
    """The lists, texts and bytes of a message and of all messages in it."""
    if message.full_name in seen or not message.full_name.startswith("quire."):
        return
    seen.add(message.full_name)
    for field in message.fields:
        if field.message_type is not None and not field.message_type.GetOptions().map_entry:
            yield from _fields(field.message_type, seen)
        if field.is_repeated or field.type in (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES):
            yield field


def _request_fields() -> set[str]:
    seen = set[str]()
    return {
        ".".join(field.full_name.split(".")[-2:])
        for module in (executor_pb2, runner_pb2, admin_pb2)
        for service in module.DESCRIPTOR.services_by_name.values()
        for method in service.methods
        for field in _fields(method.input_type, seen)
    }


def item(**fields: Any) -> runner_pb2.ExecuteItem:
    return runner_pb2.ExecuteItem(**{"item_id": "0", "text": "x", **fields})


def _verify(**fields: Any) -> None:
    given = {"cache_id": "c", "token_ids": [1, 2], "accept": types_pb2.VERIFY_ACCEPT_ALL, **fields}
    request = executor_pb2.ForwardVerifyRequest(**given)
    append_codec.verify(request, LIMITS, None)


def _drafts(draft: types_pb2.DraftProbabilities) -> None:
    rows = [types_pb2.VerifyRow(draft=draft), types_pb2.VerifyRow()]
    _verify(rows=rows, accept=types_pb2.VERIFY_ACCEPT_SPECULATIVE)


REFUSED: dict[str, tuple[str, Callable[[], object]]] = {
    "PrefillRequest.token_ids": (
        "EMPTY_TOKENS",
        lambda: append_codec.prefill(executor_pb2.PrefillRequest(), LIMITS, None),
    ),
    "BatchPrefillRequest.items": ("EMPTY_BATCH", lambda: validation.check_batch([], LIMITS)),
    "DecodeRequest.cache_id": (
        "EMPTY_CACHE_ID",
        lambda: append_codec.decode(executor_pb2.DecodeRequest(token_id=1), LIMITS, None),
    ),
    "BatchDecodeRequest.items": ("EMPTY_BATCH", lambda: validation.check_batch([], LIMITS)),
    "ForwardVerifyRequest.cache_id": ("EMPTY_CACHE_ID", lambda: _verify(cache_id="")),
    "ForwardVerifyRequest.token_ids": ("EMPTY_TOKENS", lambda: _verify(token_ids=[])),
    "DraftProbabilities.token_ids": ("BAD_DRAFT", lambda: _drafts(types_pb2.DraftProbabilities())),
    "DraftProbabilities.probabilities": (
        "BAD_DRAFT",
        lambda: _drafts(types_pb2.DraftProbabilities(token_ids=[2])),
    ),
    "UnifiedForwardItem.token_ids": ("EMPTY_TOKENS", lambda: validation.check_tokens([], LIMITS)),
    "UnifiedForwardRequest.items": ("EMPTY_BATCH", lambda: validation.check_batch([], LIMITS)),
    "ForwardRequest.token_ids": ("EMPTY_TOKENS", lambda: validation.check_tokens([], LIMITS)),
    "BatchForwardRequest.items": ("EMPTY_BATCH", lambda: validation.check_batch([], LIMITS)),
    "ForkCacheRequest.cache_id": (
        "EMPTY_CACHE_ID",
        lambda: validation.check_fork(executor_pb2.ForkCacheRequest(count=1), LIMITS),
    ),
    "ForkSource.cache_id": (
        "EMPTY_CACHE_ID",
        lambda: validation.check_forks(
            executor_pb2.ForkCachesRequest(forks=[executor_pb2.ForkSource()]), LIMITS
        ),
    ),
    "ForkCachesRequest.forks": (
        "EMPTY_BATCH",
        lambda: validation.check_forks(executor_pb2.ForkCachesRequest(), LIMITS),
    ),
    "TruncateKVRequest.cache_id": ("EMPTY_CACHE_ID", lambda: validation.check_cache_id("")),
    "ReleaseCacheRequest.cache_id": ("EMPTY_CACHE_ID", lambda: validation.check_cache_id("")),
    "RenewCacheRequest.cache_id": ("EMPTY_CACHE_ID", lambda: validation.check_cache_id("")),
    "ExecuteItem.item_id": ("BAD_ITEM_ID", lambda: items.check_ids([item(item_id="")])),
    "ExecuteRequest.items": ("EMPTY_BATCH", lambda: validation.check_num_items([], 5)),
    "EstimateCostRequest.items": ("EMPTY_BATCH", lambda: validation.check_num_items([], 5)),
    "EmbedRequest.inputs": ("EMPTY_BATCH", lambda: validation.check_num_items([], 5, "inputs")),
    "LoadWeightsRequest.source": ("BAD_SOURCE", lambda: model_of("", lambda _: None)),
    "LoadAdapterRequest.adapter_id": ("BAD_ADAPTER", lambda: check_adapter_id("")),
}
# Refused where caches, workers or files are looked up.
REFUSED_LATER = {
    "TokenPrompt.token_ids", "CachePrompt.token_ids", "CachePrompt.cache_id", "Chat.messages",
    "CancelExecutionRequest.request_id", "AdapterFile.name", "UnloadAdapterRequest.adapter_id",
}  # fmt: skip


def test_each_list_and_text_of_a_request_has_a_rule() -> None:
    rules = [ABSENT, VALUE, OF_MASKS, COMPILED, set(REFUSED), REFUSED_LATER]
    assert _request_fields() == set().union(*rules)
    assert sum(map(len, rules)) == len(set().union(*rules)), "one rule for each"


@pytest.mark.parametrize("name", REFUSED)
def test_an_empty_value_where_one_is_needed_is_refused(name: str) -> None:
    reason, check = REFUSED[name]
    with pytest.raises(InvalidArgument) as caught:
        check()
    assert caught.value.reason == reason


NONE_ALLOWED = [
    types_pb2.TokenMask(),
    types_pb2.TokenMask(packed=b""),
    types_pb2.TokenMask(deflated=b""),
    types_pb2.TokenMask(allowed=types_pb2.TokenIds()),
    token_mask([]),
    token_mask(b""),
]


@pytest.mark.parametrize("mask", NONE_ALLOWED)
def test_a_mask_that_allows_nothing_is_not_no_mask(mask: types_pb2.TokenMask) -> None:
    for check in (
        lambda: validation.check_output(types_pb2.OutputOptions(mask=mask), LIMITS, 1),
        lambda: _verify(rows=[types_pb2.VerifyRow(mask=mask), types_pb2.VerifyRow()]),
        lambda: items.check_output(types_pb2.OutputOptions(mask=mask), LIMITS, rows=1),
    ):
        with pytest.raises(InvalidArgument) as caught:
            check()
        assert caught.value.reason == "BAD_MASK"
    # Also after a way over the wire.
    read = types_pb2.OutputOptions.FromString(types_pb2.OutputOptions(mask=mask).SerializeToString())
    assert read.HasField("mask") and read.mask == mask


def test_a_constraint_of_no_kind_is_not_no_constraint() -> None:
    items.check(item())
    kinds: list[dict[str, Any]] = [{"regex": ""}, {"json_schema": ""}, {"lark": ""}, {"mask": {}}]
    for kind in kinds:
        items.check(item(constraint=kind))
    empty: runner_pb2.ExecuteItem
    for empty in (item(constraint={}), item(constraint=runner_pb2.Constraint())):
        with pytest.raises(InvalidArgument) as caught:
            items.check(runner_pb2.ExecuteItem.FromString(empty.SerializeToString()))
        assert (caught.value.reason, caught.value.field) == ("BAD_CONSTRAINT", "constraint")


def resolve(model: str) -> ResolvedModel:
    assert model in ("m", "local")
    return ResolvedModel("local", is_local=True, sampling_defaults=types_pb2.SamplingParams())


MESSAGES = [{"role": "user", "content": "x"}]
NO_SCHEMA = {"type": "json_schema", "json_schema": {}}
# Empty values over HTTP that are refused, with the field at fault.
BAD: list[tuple[Callable[..., Any], dict[str, Any], str]] = [
    (completion, {"prompt": []}, "prompt"),
    (completion, {"guided_choice": []}, "guided_choice"),
    (completion, {"guided_regex": ""}, "guided_regex"),
    (completion, {"structured_outputs": {}}, "structured_outputs"),
    (completion, {"allowed_token_ids": []}, "allowed_token_ids"),
    (chat, {"messages": []}, "messages"),
    (chat, {"messages": [{"role": "", "content": "x"}]}, "messages[0].role"),
    (chat, {"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
    (chat, {"messages": [{"role": "assistant", "content": None, "tool_calls": []}]}, "messages[0].content"),
    (chat, {"messages": [{"role": "tool", "content": "x", "tool_call_id": ""}]}, "messages[0].tool_call_id"),
    (chat, {"response_format": {}}, "response_format.type"),
    (chat, {"response_format": NO_SCHEMA}, "response_format.json_schema.schema"),
    (chat, {"tool_choice": ""}, "tool_choice"),
    (chat, {"tool_choice": {}}, "tool_choice.type"),
    (chat, {"modalities": []}, "modalities"),
    (generate, {"token_ids": []}, "token_ids"),
    (generate, {"cache_salt": ""}, "cache_salt"),
    (generate, {"sampling_params": {"cache_salt": ""}}, "sampling_params.cache_salt"),
    (generate, {"sampling_params": {"allowed_token_ids": []}}, "sampling_params.allowed_token_ids"),
    (generate, {"features": {}}, "features"),
]  # fmt: skip


def parsed(parse: Callable[..., Any], fields: dict[str, Any]) -> runner_pb2.ExecuteItem:
    base: dict[Any, dict[str, Any]] = {
        completion: {"model": "m", "prompt": "x"},
        chat: {"model": "m", "messages": MESSAGES},
        generate: {"token_ids": [1], "sampling_params": {}},
    }
    made: runner_pb2.ExecuteItem = parse({**base[parse], **fields}, resolve).items[0]
    return made


@pytest.mark.parametrize(("parse", "fields", "field"), BAD)
def test_an_empty_value_over_http_is_not_an_absent_one(
    parse: Callable[..., Any], fields: dict[str, Any], field: str
) -> None:
    with pytest.raises(InvalidArgument) as caught:
        parsed(parse, fields)
    assert caught.value.field == field


# Empty values over HTTP that mean the same as absent ones.
SAME: list[tuple[Callable[..., Any], dict[str, Any]]] = [
    (completion, {"stop": []}),
    (completion, {"logit_bias": {}}),
    (completion, {"suffix": ""}),
    (completion, {"model": ""}),
    (chat, {"tools": []}),
    (chat, {"messages": [{**MESSAGES[0], "name": ""}]}),
    (generate, {"sampling_params": {"stop_token_ids": []}}),
    (generate, {"sampling_params": {"stop": []}}),
    (generate, {"model": ""}),
]


@pytest.mark.parametrize(("parse", "fields"), SAME)
def test_an_empty_list_of_additions_is_none(parse: Callable[..., Any], fields: dict[str, Any]) -> None:
    assert parsed(parse, fields) == parsed(parse, {})


def test_empty_texts_over_http_are_texts() -> None:
    assert parsed(completion, {"prompt": ""}).WhichOneof("prompt") == "text"
    with_schema = parsed(chat, {"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}})
    assert with_schema.constraint.json_schema == "{}"
    with pytest.raises(InvalidArgument):
        # Refused with the item, as over gRPC.
        items.check(parsed(completion, {"stop": ""}))
