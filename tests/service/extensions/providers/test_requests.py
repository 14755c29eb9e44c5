"""The request bodies for an item, and the fields that a dialect does not support."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from quire.v1 import runner_pb2, types_pb2

from service.errors import InvalidArgument, ProviderFailure
from service.extensions.providers.config import DialectName, ProviderConfig
from service.extensions.providers.runtime import DIALECTS, check

CHAT = runner_pb2.Chat(
    messages=[
        runner_pb2.ChatMessage(role=runner_pb2.CHAT_ROLE_SYSTEM, content="Be brief."),
        runner_pb2.ChatMessage(role=runner_pb2.CHAT_ROLE_USER, content="Weather?"),
        runner_pb2.ChatMessage(
            role=runner_pb2.CHAT_ROLE_ASSISTANT,
            tool_calls=[runner_pb2.ToolCall(id="c1", name="look", arguments_json='{"at": "Rome"}')],
        ),
        runner_pb2.ChatMessage(role=runner_pb2.CHAT_ROLE_TOOL, content="sunny", tool_call_id="c1"),
    ],
    tools_json=json.dumps(
        [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
    ),
)
SCHEMA = '{"type": "object"}'
sampling = types_pb2.SamplingParams


def body(
    dialect: DialectName, item: runner_pb2.ExecuteItem, samples: int = 1, **settings: Any
) -> dict[str, Any]:
    made = ProviderConfig(name="x", dialect=dialect, base_url="https://a.example", model="m", **settings)
    asyncio.run(check(item, DIALECTS[dialect]))
    return dict(DIALECTS[dialect].body(item, samples, made))


def asked(**fields: Any) -> runner_pb2.ExecuteItem:
    fields = fields if {"text", "chat", "tokens"} & fields.keys() else {"text": "Hi", **fields}
    return runner_pb2.ExecuteItem(item_id="a", **fields)


def test_a_text_becomes_one_chat_message() -> None:
    message = {"role": "user", "content": "Hi"}
    # Without sampling it is greedy. There is always a token limit.
    assert body("openai-chat", asked()) == {
        "model": "m",
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": 0.0,
        "messages": [message],
        "max_tokens": 4096,
    }
    assert body("anthropic-messages", asked(max_tokens=5)) == {
        "model": "m",
        "stream": True,
        "temperature": 0.0,
        "messages": [message],
        "max_tokens": 5,
    }


def test_a_chat_with_tools() -> None:
    openai = body("openai-chat", asked(chat=CHAT), max_tokens_field="max_completion_tokens")
    system, user, assistant, tool = openai["messages"]
    assert (system["role"], user["content"]) == ("system", "Weather?")
    assert assistant["content"] is None
    assert assistant["tool_calls"][0]["function"] == {"name": "look", "arguments": '{"at": "Rome"}'}
    assert (tool["role"], tool["tool_call_id"], tool["content"]) == ("tool", "c1", "sunny")
    assert openai["tools"] == json.loads(CHAT.tools_json)
    assert openai["max_completion_tokens"] == 4096 and "max_tokens" not in openai

    anthropic = body("anthropic-messages", asked(chat=CHAT))
    assert anthropic["system"] == "Be brief."
    user, assistant, tool = anthropic["messages"]
    used = {"type": "tool_use", "id": "c1", "name": "look", "input": {"at": "Rome"}}
    assert assistant == {"role": "assistant", "content": [used]}
    result = {"type": "tool_result", "tool_use_id": "c1", "content": "sunny"}
    assert tool == {"role": "user", "content": [result]}
    assert anthropic["tools"] == [{"name": "look", "input_schema": {"type": "object"}}]


@pytest.mark.parametrize(
    ("parts", "openai", "anthropic"),
    [
        ({}, {}, {}),
        ({"tool_choice": "NONE"}, {"tool_choice": "none"}, {"tool_choice": {"type": "none"}}),
        (
            {"tool_choice": "REQUIRED", "function": "look"},
            {"tool_choice": {"type": "function", "function": {"name": "look"}}},
            {"tool_choice": {"type": "tool", "name": "look"}},
        ),
        (
            {"tool_choice": "REQUIRED", "single_call": True},
            {"tool_choice": "required", "parallel_tool_calls": False},
            {"tool_choice": {"type": "any", "disable_parallel_tool_use": True}},
        ),
        (
            {"single_call": True},
            {"parallel_tool_calls": False},
            {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}},
        ),
    ],
)
def test_which_tools_are_called(
    parts: dict[str, Any], openai: dict[str, Any], anthropic: dict[str, Any]
) -> None:
    if "tool_choice" in parts:
        parts = {**parts, "tool_choice": f"TOOL_CHOICE_{parts['tool_choice']}"}
    item = asked(chat=CHAT, answer_parts=runner_pb2.AnswerParts(**parts))
    plain = asked(chat=CHAT)
    assert body("openai-chat", item) == {**body("openai-chat", plain), **openai}
    assert body("anthropic-messages", item) == {**body("anthropic-messages", plain), **anthropic}


def test_settings_are_passed_on() -> None:
    own = sampling(
        temperature=0.7, top_p=0.9, frequency_penalty=0.5, presence_penalty=-0.5, seed=3,
        logit_bias={5: 2.5, 6: float("-inf")}, top_k=0, min_p=0, repetition_penalty=1,
    )  # fmt: skip
    wanted = asked(sampling=own, stop=["a", "b"], constraint={"json_schema": SCHEMA})
    made = body("openai-chat", wanted, samples=3)
    expected = {
        "temperature": 0.7, "top_p": 0.9, "frequency_penalty": 0.5, "presence_penalty": -0.5, "seed": 3,
        "logit_bias": {"5": 2.5, "6": -100.0}, "stop": ["a", "b"], "n": 3,
    }  # fmt: skip
    assert expected.items() <= made.items()
    assert made["response_format"]["json_schema"]["schema"] == {"type": "object"}
    assert not {"top_k", "min_p", "repetition_penalty"} & made.keys()


def test_anthropics_models_get_no_temperature_that_is_their_default() -> None:
    """Newer ones refuse it together with top_p, and the HTTP API sets it to 1 where nothing is said."""
    own = sampling(temperature=1, top_p=0.5)
    made = body("anthropic-messages", asked(sampling=own))
    assert made["top_p"] == 0.5 and "temperature" not in made
    assert body("anthropic-messages", asked(sampling=sampling(temperature=0.5)))["temperature"] == 0.5


def test_extensions_are_for_providers_that_have_them() -> None:
    own = sampling(top_k=5, min_p=0.1, typical_p=0.9, repetition_penalty=1.1)
    wanted = asked(sampling=own, stop_token_ids=[7], ignore_eos=True)
    made = body("openai-completions", wanted, extensions=True)
    expected = {
        "top_k": 5,
        "min_p": 0.1,
        "typical_p": 0.9,
        "repetition_penalty": 1.1,
        "stop_token_ids": [7],
        "ignore_eos": True,
    }
    assert expected.items() <= made.items()


TOKENS = runner_pb2.TokenPrompt(token_ids=[1])
UNSUPPORTED: list[tuple[DialectName, str, dict[str, Any]]] = [
    ("openai-chat", "tokens", {"tokens": TOKENS}),
    ("openai-chat", "tokens_only", {"tokens_only": True}),
    ("openai-chat", "top_logprobs", {"top_logprobs": 2}),
    ("openai-chat", "sampled_logprobs", {"sampled_logprobs": True}),
    ("openai-chat", "chat.template", {"chat": runner_pb2.Chat(messages=CHAT.messages, template="rag")}),
    ("openai-chat", "constraint.regex", {"constraint": {"regex": "a"}}),
    ("openai-chat", "constraint.lark", {"constraint": {"lark": "a"}}),
    ("openai-chat", "constraint.mask", {"constraint": {"mask": {"packed": b"1"}}}),
    ("openai-chat", "sampling.top_k", {"sampling": sampling(top_k=2)}),
    ("openai-chat", "sampling.min_p", {"sampling": sampling(min_p=0.5)}),
    ("openai-chat", "sampling.typical_p", {"sampling": sampling(typical_p=0.5)}),
    ("openai-chat", "sampling.penalty_from", {"sampling": sampling(penalty_from=1)}),
    ("openai-chat", "sampling.repetition_penalty", {"sampling": sampling(repetition_penalty=2)}),
    ("openai-chat", "stop_token_ids", {"stop_token_ids": [1]}),
    ("openai-chat", "ignore_eos", {"ignore_eos": True}),
    ("openai-completions", "chat", {"chat": CHAT}),
    ("openai-completions", "constraint.json_schema", {"constraint": {"json_schema": SCHEMA}}),
    ("anthropic-messages", "tokens", {"tokens": TOKENS}),
    ("anthropic-messages", "sampling.seed", {"sampling": sampling(seed=1)}),
    ("anthropic-messages", "sampling.typical_p", {"sampling": sampling(typical_p=0.5)}),
    ("anthropic-messages", "sampling.min_p", {"sampling": sampling(min_p=0.1)}),
    ("anthropic-messages", "sampling.logit_bias", {"sampling": sampling(logit_bias={1: 1.0})}),
    ("anthropic-messages", "logprobs", {"logprobs": True}),
    ("anthropic-messages", "constraint.json_schema", {"constraint": {"json_schema": SCHEMA}}),
]


@pytest.mark.parametrize(
    ("dialect", "field", "fields"), UNSUPPORTED, ids=[f"{d}-{f}" for d, f, _ in UNSUPPORTED]
)
def test_unsupported_fields_are_refused(dialect: DialectName, field: str, fields: dict[str, Any]) -> None:
    with pytest.raises(ProviderFailure) as raised:
        body(dialect, asked(**fields))
    assert (raised.value.reason, raised.value.field) == ("UNSUPPORTED", field)


@pytest.mark.parametrize("dialect", ["openai-chat", "anthropic-messages"])
def test_settings_that_change_nothing_are_no_requests(dialect: DialectName) -> None:
    neutral = sampling(
        top_k=0,
        min_p=0,
        typical_p=1,
        repetition_penalty=1,
        frequency_penalty=0,
        presence_penalty=0,
        logit_bias={},
    )
    made, plain = body(dialect, asked(sampling=neutral)), body(dialect, asked())
    # OpenAI's API has these two.
    assert {name: value for name, value in made.items() if not name.endswith("_penalty")} == plain


def test_names_reach_providers_that_have_them_and_no_arguments_are_an_object() -> None:
    call = runner_pb2.ToolCall(id="1", name="f", arguments_json="null")
    messages = [
        runner_pb2.ChatMessage(role=runner_pb2.CHAT_ROLE_USER, content="x", name="ann"),
        runner_pb2.ChatMessage(
            role=runner_pb2.CHAT_ROLE_ASSISTANT, tool_calls=[call], reasoning_content="thoughts"
        ),
        runner_pb2.ChatMessage(role=runner_pb2.CHAT_ROLE_TOOL, content="3", tool_call_id="1"),
    ]
    chat = runner_pb2.Chat(messages=messages)
    user, assistant, tool = body("openai-chat", asked(chat=chat))["messages"]
    assert user["name"] == "ann" and "name" not in tool
    assert assistant["tool_calls"][0]["function"]["arguments"] == "{}"
    of_anthropic = body("anthropic-messages", asked(chat=chat))["messages"]
    assert of_anthropic[1]["content"][0]["input"] == {}
    for sent in (assistant, of_anthropic):
        assert "thoughts" not in str(sent)


NO_ROLE = runner_pb2.Chat(messages=[runner_pb2.ChatMessage(content="x")])
BAD: list[tuple[str, str, dict[str, Any]]] = [
    ("EMPTY_PROMPT", "chat", {"chat": runner_pb2.Chat()}),
    ("EMPTY_PROMPT", "text", {"text": ""}),
    ("BAD_CHAT", "chat.messages[0].role", {"chat": NO_ROLE}),
    ("BAD_CHAT", "chat.tools_json", {"chat": runner_pb2.Chat(messages=CHAT.messages, tools_json="{")}),
    ("BAD_CHAT", "chat.tools_json", {"chat": runner_pb2.Chat(messages=CHAT.messages, tools_json="{}")}),
    ("BAD_CHAT", "chat.tools_json", {"chat": runner_pb2.Chat(messages=CHAT.messages, tools_json="[1e999]")}),
    ("BAD_CONSTRAINT", "constraint.json_schema", {"constraint": {"json_schema": "[NaN]"}}),
    ("BAD_CONSTRAINT", "constraint.json_schema", {"constraint": {"json_schema": '["\\ud800"]'}}),
    ("BAD_STOP", "stop", {"stop": ["x"] * 17}),
    ("BAD_STOP", "stop[1]", {"stop": ["x", ""]}),
    ("BAD_SAMPLING", "sampling.temperature", {"sampling": sampling(temperature=-1)}),
    ("BAD_SAMPLING", "sampling.top_p", {"sampling": sampling(top_p=float("nan"))}),
    ("BAD_SAMPLING", "sampling.logit_bias", {"sampling": sampling(logit_bias={1: 101.0})}),
    ("TOO_MANY_SAMPLES", "n", {"n": 129}),
]


@pytest.mark.parametrize(("reason", "field", "fields"), BAD, ids=[f"{r}-{f}" for r, f, _ in BAD])
def test_invalid_items_are_refused_before_they_are_sent(
    reason: str, field: str, fields: dict[str, Any]
) -> None:
    with pytest.raises(InvalidArgument) as raised:
        body("openai-chat", asked(**fields))
    assert (raised.value.reason, raised.value.field) == (reason, field)
