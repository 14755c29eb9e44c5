"""Tool calls of models that have learnt to write them, in the forms of three families, over gRPC and HTTP.

Each model is trained in three seconds. It is the template, the tokens, the text of these and its parts, and
the same parts again in the next prompt, that are tested here.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jsonschema
import openai
import pytest
import quire
from transformers import AutoTokenizer

from tests.e2e.test_auth import Guarded
from tests.http_gateway import HttpGateway
from tests.tool_writers import FAMILIES, TOOLS, Family, conversations, train

_Messages = list[dict[str, Any]]
MODEL: Any = {"model": "local", "temperature": 0, "max_tokens": 80}


# The one with special tokens, thoughts, and texts before calls is always run. How each writes is known to
# tests/service/text/test_output_parser.py, too.
@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=() if name == "mistral" else pytest.mark.thorough) for name in FAMILIES],
)
def family(request: pytest.FixtureRequest) -> Family:
    return FAMILIES[request.param]


@pytest.fixture(scope="module")
def directory(family: Family, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(family, tmp_path_factory.mktemp("models") / "writer")


@pytest.fixture(scope="module")
def gateway(directory: Path) -> Iterator[HttpGateway]:
    flags = ["--dtype", "float32", "--kv-pages", "512"]
    with HttpGateway(model=str(directory), flags=flags) as gateway:
        yield gateway


@pytest.fixture
def client(gateway: HttpGateway) -> Iterator[quire.Client]:
    with quire.Client(gateway.address) as client:
        yield client


def asked(messages: Sequence[dict[str, Any]]) -> _Messages:
    """As a client sends them: the arguments of calls as text."""
    sent: _Messages = json.loads(json.dumps(messages))
    for message in sent:
        for call in message.get("tool_calls", ()):
            call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
    return sent


def parts(message: dict[str, Any]) -> tuple[str, str, list[tuple[str, Any]]]:
    """What it says, thinks and calls."""
    calls = [call["function"] for call in message.get("tool_calls") or ()]
    named = [(call["name"], call["arguments"]) for call in calls]
    return message["content"] or "", message.get("reasoning_content") or "", named


def parts_of(answer: quire.Answer) -> tuple[str, str, list[tuple[str, Any]]]:
    assert len({call.id for call in answer.tool_calls}) == len(answer.tool_calls)
    assert (answer.finish_reason == "tool_calls") == bool(answer.tool_calls)
    calls = [(call.name, json.loads(call.arguments_json)) for call in answer.tool_calls]
    return answer.text, answer.reasoning_content, calls


def streamed(http: Any, messages: _Messages, **settings: Any) -> tuple[str, str, list[tuple[str, Any]]]:
    content = thoughts = ""
    calls: list[list[str]] = []
    for event in http.chat.completions.create(messages=messages, stream=True, **settings):
        delta = event.choices[0].delta
        content += delta.content or ""
        thoughts += getattr(delta, "reasoning_content", None) or ""
        for part in delta.tool_calls or ():
            if part.function.name:
                calls.append([part.function.name, ""])
            calls[part.index][1] += part.function.arguments
    return content, thoughts, [(name, json.loads(arguments)) for name, arguments in calls]


@pytest.mark.parametrize("kind", ["one", "two", "said", "none"])
def test_what_it_writes_is_divided(
    gateway: HttpGateway, client: quire.Client, family: Family, kind: str
) -> None:
    *before, learnt = conversations(family)[kind]
    wanted, messages = parts(learnt), asked(before)
    (answer,) = client.execute(messages, tools=TOOLS, max_tokens=80).answers()
    assert parts_of(answer) == wanted
    chunks = list(client.execute(messages, tools=TOOLS, max_tokens=80))
    assert [part.index for chunk in chunks for part in chunk.tool_calls if part.name] == [
        *range(len(wanted[2]))
    ]
    if wanted[2]:
        assert sum(bool(part.arguments_json) for chunk in chunks for part in chunk.tool_calls) > 2, (
            "in pieces"
        )
    with gateway.client() as http:
        whole = http.chat.completions.create(messages=messages, tools=TOOLS, **MODEL).choices[0].message
        message = whole.model_dump()
        for call in message["tool_calls"] or ():
            call["function"]["arguments"] = json.loads(call["function"]["arguments"])
        assert parts(message) == wanted
        assert streamed(http, messages, tools=TOOLS, **MODEL) == wanted
        # It goes on from its own answer, as from one that a client has written.
        again = [*messages, whole.model_dump(exclude_none=True), {"role": "user", "content": "Hello!"}]
        for number, call in enumerate(whole.tool_calls or ()):
            again.insert(-1, {"role": "tool", "content": str(number), "tool_call_id": call.id})
        assert http.chat.completions.create(messages=again, tools=TOOLS, **MODEL).choices[0].finish_reason


def test_what_is_not_wanted_is_left_out(client: quire.Client, family: Family) -> None:
    """Without `answer_parts` an answer is text."""
    *before, _ = conversations(family)["two"]
    item = quire.item(asked(before), tools=TOOLS, max_tokens=80, special_tokens_in_text=True)
    item.ClearField("answer_parts")
    (text,) = client.execute([item]).texts()
    assert text.count("get_weather") == text.count("city") == 2
    one = quire.item(asked(before), tools=TOOLS, parallel_tool_calls=False, max_tokens=80)
    assert [call.index for call in client.execute([one]).answers()[0].tool_calls] == [0]
    none = quire.item(asked(before), tools=TOOLS, tool_choice="none", max_tokens=80)
    (without,) = client.execute([none]).answers()
    assert not without.tool_calls and without.finish_reason != "tool_calls"


@pytest.mark.parametrize("choice", ["required", "get_weather", "stop"])
def test_calls_that_must_come(
    gateway: HttpGateway, client: quire.Client, family: Family, choice: str
) -> None:
    """By a grammar, whatever it has learnt."""
    *before, _ = conversations(family)["none"]
    settings: dict[str, Any] = {"tools": TOOLS, "parallel_tool_calls": False, "max_tokens": 200}
    (answer,) = client.execute(asked(before), tool_choice=choice, **settings).answers()
    text, thoughts, ((name, arguments),) = parts_of(answer)
    assert (text, thoughts) == ("", "") and name in ("get_weather", "stop")
    assert choice in (name, "required")
    schema = next(tool["function"]["parameters"] for tool in TOOLS if tool["function"]["name"] == name)
    jsonschema.validate(arguments, schema)
    over_http: Any = choice if choice == "required" else {"type": "function", "function": {"name": choice}}
    with gateway.client() as http:
        found = streamed(http, asked(before), tool_choice=over_http, **{**MODEL, **settings})
    assert found == ("", "", [(name, arguments)])


def test_what_cannot_be(gateway: HttpGateway, client: quire.Client) -> None:
    question = [{"role": "user", "content": "Hello!"}]
    for settings, field in (
        ({"tool_choice": "required"}, "answer_parts.tool_choice"),
        ({"tool_choice": "other", "tools": TOOLS}, "answer_parts.function"),
        ({"tool_choice": "stop", "tools": TOOLS, "constraint": {"regex": "a"}}, "answer_parts.tool_choice"),
        ({"answer_parts": True, "tokens_only": True}, "answer_parts"),
    ):
        with pytest.raises(quire.InvalidRequest) as refused:
            client.execute(question, **settings).answers()
        assert (refused.value.reason, refused.value.violations[0][0]) == ("BAD_TOOL_CHOICE", field)
    with pytest.raises(ValueError, match="tools are for messages"):
        client.execute("Hello!", tools=TOOLS)
    of_text = quire.item("Hello!", answer_parts=True)
    of_text.answer_parts.tools_json = json.dumps(TOOLS)
    with pytest.raises(quire.InvalidRequest) as refused:
        client.execute([of_text]).answers()
    assert refused.value.violations[0][0] == "answer_parts.tools_json", refused.value
    schema = {"properties": {"a": {"type": "nothing"}}}
    wrong = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    with pytest.raises(quire.InvalidRequest) as refused:
        client.execute(question, tools=wrong, tool_choice="required").answers()
    assert (refused.value.reason, refused.value.violations[0][0]) == ("BAD_CONSTRAINT", "chat.tools_json")
    with gateway.client() as http, pytest.raises(openai.BadRequestError) as bad:
        http.chat.completions.create(messages=question, tools=wrong, tool_choice="required", **MODEL)
    assert bad.value.param == "tools"


def test_a_kept_execution_has_the_same_calls_when_it_is_read_again(
    client: quire.Client, family: Family
) -> None:
    """With their ids: a client may have begun to answer them."""
    *before, _ = conversations(family)["two"]
    settings: dict[str, Any] = {"tools": TOOLS, "max_tokens": 80, "keep_s": 60}
    with client.execute(asked(before), **settings) as execution:
        (first,) = execution.answers()
        (again,) = client.execute(asked(before), request_id=execution.request_id, **settings).answers()
    assert again.tool_calls == first.tool_calls and len(first.tool_calls) == 2


def test_prompts_as_tokens(client: quire.Client, family: Family, directory: Path) -> None:
    """Of callers who render the template themselves: the schemas are beside it."""
    *before, learnt = conversations(family)["two"]
    tokenizer: Any = AutoTokenizer.from_pretrained(directory)
    prompt = tokenizer.apply_chat_template(before, tools=TOOLS, add_generation_prompt=True, return_dict=False)
    (answer,) = client.execute(prompt, tools=TOOLS, max_tokens=80).answers()
    assert parts_of(answer) == parts(learnt)
    (answer,) = client.execute(prompt, tools=TOOLS, tool_choice="stop", max_tokens=80).answers()
    assert [call.name for call in answer.tool_calls] == ["stop"]


@pytest.mark.parametrize("kind", ["one", "none"])
def test_an_answer_in_several_generations_on_a_cache(
    client: quire.Client, family: Family, directory: Path, kind: str
) -> None:
    """Thoughts that an earlier one has begun go on in the next one, and end where the model ends them."""
    *before, learnt = conversations(family)[kind]
    content, thoughts, _ = parts(learnt)
    tokenizer: Any = AutoTokenizer.from_pretrained(directory)
    prompt = tokenizer.apply_chat_template(before, tools=TOOLS, add_generation_prompt=True, return_dict=False)
    answer = quire.Answer("0", 0, finish_reason="length")
    token_id = prompt.pop()
    with client.prefill(prompt) as cache:
        while answer.finish_reason == "length" and len(answer.text) < len(content):
            for chunk in cache.generate(token_id, answer_parts=True, max_tokens=2):
                answer.add(chunk)
                token_id = chunk.token_ids[-1]
    assert (answer.text.strip(), answer.reasoning_content.strip()) == (content, thoughts)


def test_a_worker_that_is_killed_within_calls(
    gateway: HttpGateway, client: quire.Client, family: Family
) -> None:
    """Texts and calls come whole, and once."""
    *before, learnt = conversations(family)["two"]
    # So many that most are unfinished when the first call of one has begun.
    items = [quire.item(asked(before), item_id=str(n), tools=TOOLS, max_tokens=80) for n in range(40)]
    answers = [quire.Answer(item.item_id, 0) for item in items]
    unfinished = 0
    for chunk in client.execute(items):
        answers[int(chunk.item_id)].add(chunk)
        if chunk.tool_calls and not unfinished:
            (worker,) = gateway.worker_processes()
            worker.kill()
            unfinished = sum(answer.finish_reason is None for answer in answers)
    assert unfinished > 1
    assert [parts_of(answer) for answer in answers] == [parts(learnt)] * len(items)
    gateway.wait_until_ready()


def test_an_answer_that_is_cancelled_within_a_call(
    gateway: HttpGateway, client: quire.Client, family: Family
) -> None:
    """Nothing of it is left, and the next one is whole."""
    *before, learnt = conversations(family)["two"]
    for keep_s in (None, 60.0):
        execution = client.execute(asked(before), tools=TOOLS, max_tokens=80, keep_s=keep_s)
        for chunk in execution:
            if chunk.tool_calls:
                break
        execution.cancel()
        gateway.wait_until(lambda: gateway.status().operations_in_flight == 0)
        gateway.wait_until(lambda: gateway.status().caches == 0)
    (answer,) = client.execute(asked(before), tools=TOOLS, max_tokens=80).answers()
    assert parts_of(answer) == parts(learnt)


def test_tenants_on_two_gateways_have_their_own_tools(tmp_path: Path) -> None:
    """Also if they name their executions alike, whichever gateway the kernel chooses for a connection."""
    flags = ["--gateways", "2", "--workers", "2", "--data-dir", str(tmp_path / "data")]
    question = [{"role": "user", "content": "Hello!"}]
    with Guarded(tmp_path, *flags, model="storyteller") as gateway:

        def called(name: str, tool: dict[str, Any]) -> set[str]:
            found: set[str] = set()
            for number in range(6):
                with gateway.client(name) as client:
                    settings: dict[str, Any] = {"tools": [tool], "tool_choice": "required", "max_tokens": 300}
                    execution = client.execute(question, request_id=str(number % 2), keep_s=60, **settings)
                    found.update(call.name for call in execution.answers()[0].tool_calls)
            return found

        with ThreadPoolExecutor(2) as pool:
            found = list(pool.map(called, ("alice", "mallory"), TOOLS))
    assert found == [{"get_weather"}, {"stop"}]
