"""What an empty list or text of a request means: the rules are in docs/calls.md.

Those that are refused over gRPC are among the cases of tests/e2e/test_errors.py and test_execute.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from quire import token_mask
from quire.v1 import executor_pb2, runner_pb2, types_pb2

from service.api import append_codec, validation
from service.api.request_limits import RequestLimits
from service.errors import InvalidArgument
from service.extensions.openai.generate import generate
from service.extensions.openai.models import ResolvedModel
from service.extensions.openai.requests import chat, completion
from service.runtimes import items

VOCAB = 40
LIMITS = RequestLimits(VOCAB, 1 << 20, hidden_size=8, num_layers=2)


def item(**fields: Any) -> runner_pb2.ExecuteItem:
    return runner_pb2.ExecuteItem(**{"item_id": "0", "text": "x", **fields})


def _verify(**fields: Any) -> None:
    given = {"cache_id": "c", "token_ids": [1, 2], "accept": types_pb2.VERIFY_ACCEPT_ALL, **fields}
    request = executor_pb2.ForwardVerifyRequest(**given)
    append_codec.verify(request, LIMITS, None)


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
    (completion, {"model": ""}, "model"),
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
