"""The tables of what sets which field of an item: right in both directions."""

from __future__ import annotations

from typing import Any

import pytest
from quire.v1 import runner_pb2
from quire.v1.sampling_settings import SETTINGS

from service.extensions.openai.item_fields import CHAT, COMPLETION, GENERATE, ItemField, param_of

TABLES = [CHAT, COMPLETION, GENERATE]


@pytest.mark.parametrize("table", TABLES)
def test_each_names_a_field_of_an_item(table: tuple[ItemField, ...]) -> None:
    for target in (target for one in table for target in (one.target, *one.also)):
        kind: Any = runner_pb2.ExecuteItem.DESCRIPTOR
        for name in target.split("."):
            kind = kind.fields_by_name[name].message_type


@pytest.mark.parametrize("table", TABLES)
def test_every_sampling_setting_is_on_every_route(table: tuple[ItemField, ...]) -> None:
    names = {one.name for one in table}
    assert {setting.name for setting in SETTINGS} <= names


def test_a_field_of_a_request_with_several_prompts_keeps_its_name() -> None:
    """Errors of a prompt are renamed before those of the whole request are."""
    for one in COMPLETION:
        assert param_of(one.name, COMPLETION) == one.name


@pytest.mark.parametrize(
    ("table", "field", "param"),
    [
        (CHAT, "items[0].sampling.top_k", "top_k"),
        (CHAT, "items[0].stop[1]", "stop[1]"),
        (CHAT, "items[0].max_tokens", "max_tokens"),
        (CHAT, "items[0].output.sampling.temperature", "temperature"),
        (CHAT, "items[0].chat.messages[2].content", "messages[2].content"),
        (
            CHAT,
            "chat.messages[1].tool_calls[0].arguments_json",
            "messages[1].tool_calls[0].function.arguments",
        ),
        (CHAT, "chat", "messages"),
        (CHAT, "chat.template", "messages"),
        (CHAT, "chat.tools_json", "tools"),
        (CHAT, "items[0].constraint.json_schema", "structured_outputs"),
        (CHAT, "sampling.penalty_from", "penalty_from"),
        (COMPLETION, "items[7].tokens.token_ids[3]", "prompt"),
        (COMPLETION, "items[7].text", "prompt"),
        (COMPLETION, "items[0].top_logprobs", "logprobs"),
        (COMPLETION, "sampling.logit_bias", "logit_bias"),
        (GENERATE, "items[0].tokens.token_ids[3]", "token_ids[3]"),
        (GENERATE, "items[0].sampling.top_p", "sampling_params.top_p"),
        (GENERATE, "items[0].constraint.mask", "sampling_params.allowed_token_ids"),
        (GENERATE, "items[0].top_logprobs", "sampling_params.logprobs"),
        (GENERATE, "items[0].n", "sampling_params.n"),
        (GENERATE, "cache_salt", "sampling_params.cache_salt"),
    ],
)
def test_an_error_names_the_field_of_the_request(
    table: tuple[ItemField, ...], field: str, param: str
) -> None:
    assert param_of(field, table) == param
