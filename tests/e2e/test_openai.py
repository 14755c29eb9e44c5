"""OpenAI's own client, and misbehaving ones, against the HTTP server of a real gateway."""

from __future__ import annotations

import http.client
import itertools
import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from quire import Client
from transformers import AutoTokenizer

from tests.e2e.test_auth import Guarded
from tests.gateway_process import GatewayProcess
from tests.http_gateway import TIMEOUT_S, HttpGateway, openai_client
from tests.model_factory import hf_greedy
from tests.talkers import make_talker

QUESTION = [{"role": "user", "content": "What is 2 < 3?"}]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_talker(tmp_path_factory.mktemp("model") / "talker")


@pytest.fixture(scope="module")
def tokenizer(model: Path) -> Any:
    return AutoTokenizer.from_pretrained(model)


@pytest.fixture(scope="module")
def gateway(model: Path) -> Iterator[HttpGateway]:
    flags = ["--dtype", "float32", "--kv-pages", "512"]
    flags += ["--message-timeout-s", "1", "--max-request-bytes", str(1 << 18)]
    with HttpGateway(model=str(model), flags=flags) as gateway:
        yield gateway


@pytest.fixture
def client(gateway: HttpGateway) -> Iterator[Any]:
    with gateway.client() as client:
        yield client
    # No request leaves anything behind.
    gateway.wait_until(lambda: not gateway.status().caches and not gateway.status().operations_in_flight)


def test_models(client: Any) -> None:
    listed = {model.id: model for model in client.models.list()}
    assert set(listed) == {"local", "talker"}
    assert client.models.retrieve("talker") == listed["talker"]
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("other")
    assert caught.value.code == "model_not_found"


def test_a_chat_equals_that_of_transformers(client: Any, model: Path, tokenizer: Any) -> None:
    request: list[Any] = [
        {"role": "developer", "content": [{"type": "text", "text": "Be kind €."}]},
        *QUESTION,
    ]
    answer = client.chat.completions.create(model="talker", messages=request, temperature=0, max_tokens=12)
    messages = [{"role": "system", "content": "Be kind €."}, *QUESTION]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    expected = hf_greedy(model, prompt, 12)
    choice = answer.choices[0]
    assert choice.message.content == tokenizer.decode(expected, skip_special_tokens=True)
    assert (choice.finish_reason, choice.message.role) == ("length", "assistant")
    assert answer.usage is not None and answer.usage.prompt_tokens == len(prompt)
    assert (answer.usage.completion_tokens, answer.object, answer.model) == (12, "chat.completion", "talker")
    stream = client.chat.completions.create(
        model="local", messages=request, temperature=0, max_completion_tokens=12, stream=True,
        stream_options={"include_usage": True},
    )  # fmt: skip
    first, *chunks, last = list(stream)
    assert first.choices[0].delta.role == "assistant" and first.object == "chat.completion.chunk"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == choice.message.content
    assert [chunk.choices[0].finish_reason for chunk in chunks][-2:] == [None, "length"]
    assert last.choices == [] and last.usage is not None
    # The same prompt as before.
    assert last.usage.completion_tokens == 12 and last.usage.total_tokens == answer.usage.total_tokens
    assert len({chunk.id for chunk in chunks} | {first.id, last.id}) == 1


def test_completions_of_several_prompts(gateway: HttpGateway, client: Any) -> None:
    prompts = [list(b"one, two"), [7], [9, 8]]
    with Client(gateway.address) as grpc_client:
        expected = [
            "".join(chunk.text for chunk in grpc_client.execute(prompt, max_tokens=5)) for prompt in prompts
        ]
    answer = client.completions.create(model="talker", prompt=prompts, max_tokens=5, temperature=0, n=2)
    assert [choice.index for choice in answer.choices] == list(range(6))
    texts = [choice.text for choice in answer.choices]
    assert texts == [text for text in expected for _ in range(2)]
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (11, 30)
    found = [""] * 6
    for chunk in client.completions.create(
        model="talker", prompt=prompts, max_tokens=5, temperature=0, n=2, stream=True
    ):
        assert chunk.object == "text_completion" and chunk.usage is None
        found[chunk.choices[0].index] += chunk.choices[0].text
    assert found == texts
    one = client.completions.create(model="talker", prompt="a", temperature=0)
    assert one.usage is not None and one.usage.completion_tokens == 16, "the default of OpenAI's API"
    for unnamed in (openai.omit, ""):
        same = client.completions.create(model=unnamed, prompt="a", temperature=0)
        assert (same.model, same.choices) == (one.model, one.choices)


def test_samples_depend_on_seeds_and_end_at_stop_texts(client: Any) -> None:
    def ask(**settings: Any) -> list[Any]:
        made = client.chat.completions.create(
            model="talker", messages=QUESTION, max_tokens=24, n=3, **settings
        )
        return [(choice.message.content, choice.finish_reason) for choice in made.choices]

    drawn = ask(seed=-7)
    assert drawn == ask(seed=-7, temperature=1.0) != ask(seed=8) and len(set(drawn)) == 3
    text = drawn[0][0]
    stop = text[6:8]
    assert ask(seed=-7, stop=stop)[0] == (text[: text.index(stop)], "stop")
    assert ask(seed=-7, stop=["nowhere to be found", stop])[0] == (text[: text.index(stop)], "stop")
    top = {"top_k": 1, "min_p": 0.0, "repetition_penalty": 1.0}
    assert len(set(ask(extra_body=top))) == 1
    forced = client.chat.completions.create(
        model="talker", messages=QUESTION, max_tokens=3, logit_bias={str(ord("x") - 33): 100}
    )
    assert len(set(forced.choices[0].message.content)) == 1


def test_logprobs(client: Any) -> None:
    settings: dict[str, Any] = {"model": "talker", "max_tokens": 6, "temperature": 0}
    chat = client.chat.completions.create(messages=QUESTION, logprobs=True, top_logprobs=3, **settings)
    content = chat.choices[0].logprobs.content
    assert len(content) == 6 and all(len(entry.top_logprobs) == 3 for entry in content)
    for entry in content:
        assert entry.token == entry.top_logprobs[0].token, "greedy"
        assert entry.logprob == pytest.approx(entry.top_logprobs[0].logprob) and entry.logprob < 0
        named = entry.token.startswith("bytes:")
        assert entry.bytes and (named or entry.bytes == list(entry.token.encode()))
    whole = b"".join(bytes(entry.bytes) for entry in content)
    assert whole.decode(errors="replace") == chat.choices[0].message.content
    streamed = client.chat.completions.create(
        messages=QUESTION, logprobs=True, top_logprobs=3, stream=True, **settings
    )
    entries = [e for c in streamed if c.choices[0].logprobs for e in c.choices[0].logprobs.content]
    assert [e.token for e in entries] == [e.token for e in content]
    text = client.completions.create(prompt="abc", logprobs=2, **settings).choices[0]
    assert text.logprobs is not None and text.logprobs.text_offset is not None
    assert text.logprobs.text_offset[0] == 0 and len(text.logprobs.tokens or []) == 6
    assert all(len(top) <= 2 for top in text.logprobs.top_logprobs or [])
    offsets = [*text.logprobs.text_offset, len(text.text)]
    for token, (begin, end) in zip(text.logprobs.tokens or [], itertools.pairwise(offsets), strict=True):
        assert token == text.text[begin:end] or token.startswith("bytes:")
    assert all(
        token in top for token, top in zip(text.logprobs.tokens, text.logprobs.top_logprobs, strict=True)
    )
    streamed = client.completions.create(prompt="abc", logprobs=2, stream=True, **settings)
    parts = [chunk.choices[0].logprobs.to_dict() for chunk in streamed]
    for name, values in text.logprobs.to_dict().items():
        assert [value for part in parts for value in part[name]] == values


@pytest.mark.parametrize(
    ("settings", "param", "code"),
    [
        ({"temperature": 200}, "temperature", "bad_sampling"),
        ({"n": 129}, "n", "bad_field"),
        ({"stop": ["x" * 257]}, "stop[0]", "bad_stop"),
        ({"logit_bias": {"300": 1}}, "logit_bias[300]", "token_out_of_vocab"),
        ({"messages": [{"role": "narrator", "content": "x"}]}, "messages[0].role", "bad_field"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "messages[0].content", "bad_field"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "messages[0].content[0].type",
            "bad_field",
        ),
        ({"tool_choice": "required"}, "tool_choice", "bad_tool_choice"),
        ({"response_format": {"type": "xml"}}, "response_format.type", "bad_field"),
        ({"temprature": 1}, "temprature", "unknown_field"),
        ({"model": ["talker"]}, "model", "bad_field"),
    ],
)
def test_invalid_requests_are_refused(client: Any, settings: dict[str, Any], param: str, code: str) -> None:
    # As bytes: the client cannot send unpaired surrogates.
    body = json.dumps({"model": "talker", "messages": QUESTION, **settings}).encode()
    options = {"headers": {"content-type": "application/json"}}
    with pytest.raises(openai.BadRequestError) as caught:
        client.post("/chat/completions", content=body, cast_to=object, options=options)
    assert (caught.value.param, caught.value.code) == (param, code)
    assert caught.value.type == "invalid_request_error"


def test_a_response_matches_its_schema(client: Any) -> None:
    schema = {"enum": [{"kind": "a"}, {"kind": "b"}]}
    form = {"type": "json_schema", "json_schema": {"name": "it", "strict": True, "schema": schema}}
    answer = client.chat.completions.create(
        model="talker", messages=QUESTION, response_format=form, n=4, seed=1, max_tokens=200
    )
    assert {choice.finish_reason for choice in answer.choices} == {"stop"}
    assert all(json.loads(choice.message.content) in schema["enum"] for choice in answer.choices)
    form["json_schema"]["schema"] = {"type": "nothing"}  # type: ignore[index]
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="talker", messages=QUESTION, response_format=form)
    assert caught.value.param == "response_format"


def test_errors_have_their_status(gateway: HttpGateway, client: Any) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        client.completions.create(model="gpt-4", prompt="x")
    assert missing.value.code == "model_not_found" and missing.value.param == "model"
    assert missing.value.request_id
    with pytest.raises(openai.BadRequestError) as long:
        client.completions.create(model="talker", prompt=[1] * 10_000)
    assert (long.value.code, long.value.param) == ("context_length_exceeded", "prompt")
    with pytest.raises(openai.BadRequestError):
        client.completions.create(model="talker", prompt=[1] * 10_000, stream=True)
    for settings in ({"suffix": "x"}, {"best_of": 2}):
        with pytest.raises(openai.BadRequestError, match=next(iter(settings))):
            client.completions.create(model="talker", prompt="x", **settings)
    with pytest.raises(openai.NotFoundError, match="nothing is served at this path"):
        client.moderations.create(model="talker", input="x")
    with pytest.raises(openai.NotFoundError):
        # Without --openai-weight-transfer. It would not be below /v1.
        client.post(f"http://127.0.0.1:{gateway.http_port}/pause", cast_to=object)
    with pytest.raises(openai.APIStatusError) as method:
        client.get("/completions", cast_to=object)
    assert method.value.status_code == 405 and method.value.response.headers["allow"] == "POST"
    with pytest.raises(openai.APIStatusError) as large:
        client.completions.create(model="talker", prompt="x" * (1 << 18))
    assert large.value.status_code == 413
    assert client.completions.create(model="talker", prompt="x", max_tokens=1).choices


def test_a_client_that_disconnects_ends_its_batch(gateway: HttpGateway, client: Any) -> None:
    stream = client.completions.create(model="talker", prompt="x", max_tokens=400, n=8, stream=True)
    next(iter(stream))
    assert gateway.status().caches
    stream.close()
    gateway.wait_until(lambda: not gateway.status().caches)
    body = json.dumps({"model": "talker", "prompt": "x", "max_tokens": 400, "n": 8}).encode()
    with connected(gateway) as raw:
        raw.sendall(post("/v1/completions", body))
        gateway.wait_until_in_flight(1)
    gateway.wait_until(lambda: not gateway.status().caches)


def connected(gateway: GatewayProcess) -> socket.socket:
    return socket.create_connection(("127.0.0.1", gateway.http_port), timeout=TIMEOUT_S)


def post(path: str, body: bytes, *headers: str, length: int | None = None) -> bytes:
    lines = [f"POST {path} HTTP/1.1", "host: localhost", "content-type: application/json", *headers]
    lines.append(f"content-length: {len(body) if length is None else length}")
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def read_response(raw: socket.socket) -> tuple[int, Any]:
    """A response's status and JSON."""
    response = http.client.HTTPResponse(raw)
    response.begin()
    return response.status, json.loads(response.read())


def read_to_end(raw: socket.socket) -> bytes:
    """All bytes until the server closes the connection."""
    found = b""
    try:
        while part := raw.recv(65536):
            found += part
    except ConnectionResetError:
        pass
    return found


GOOD = json.dumps({"model": "talker", "prompt": [1], "max_tokens": 1}).encode()


def test_incomplete_requests_time_out(gateway: HttpGateway, client: Any) -> None:
    """No bytes, half of the headers, half of a body, and half of a body before a half close."""
    silent, headers, body, closed = (connected(gateway) for _ in range(4))
    with silent, headers, body, closed:
        headers.sendall(b"GET /v1/models HTTP/1.1\r\nhost: localh")
        body.sendall(post("/v1/completions", GOOD[:10], length=200))
        closed.sendall(post("/v1/completions", GOOD[:10], length=200))
        closed.shutdown(socket.SHUT_WR)
        assert read_to_end(closed) == read_to_end(silent) == read_to_end(headers) == b""
        status, response = read_response(body)
        assert status == 408 and response["error"]["code"] == "message_timeout"


def test_authentication(tmp_path: Path) -> None:
    flags = ["--openai-listen", "127.0.0.1:0", "--drain-grace-s", "0.2"]
    limits = ["[tenants.alice]", "max_in_flight = 4"]
    with Guarded(tmp_path, *flags, model="adder", quotas=limits) as gateway:
        tokens = gateway.tokens
        for key in ("wrong", tokens["alice"][:-1]):
            with (
                openai_client(gateway, key) as anonymous,
                pytest.raises(openai.AuthenticationError) as refused,
            ):
                anonymous.completions.create(model="adder", prompt="1+1=")
            assert refused.value.code == "invalid_api_key"
        for host in (b"a/health?", b"[", b"a/health#"):
            with connected(gateway) as raw:
                raw.sendall(post("/v1/completions", GOOD).replace(b"localhost", host))
                assert read_response(raw)[0] in (400, 401), "such a Host header does not avoid authentication"
        with openai_client(gateway, tokens["ops"]) as ops:
            assert [model.id for model in ops.models.list()] == ["local", "adder"]
            with pytest.raises(openai.PermissionDeniedError):
                ops.completions.create(model="adder", prompt="1+1=")
        with connected(gateway) as raw:
            raw.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
            assert read_response(raw) == (200, {"status": "serving"})
        with openai_client(gateway, tokens["alice"]) as alice:
            assert (
                alice.completions.create(model="adder", prompt="12+30=", temperature=0).choices[0].text
                == "42"
            )
            with pytest.raises(openai.RateLimitError) as quota:
                alice.completions.create(model="adder", prompt="1+1=", n=8)
            assert quota.value.code == "insufficient_quota"
            assert quota.value.response.headers["retry-after"] == "1"
            with pytest.raises(openai.BadRequestError) as no_template:
                alice.chat.completions.create(model="adder", messages=QUESTION)
            assert no_template.value.code == "no_chat_template"
        assert not any(token in gateway.log() for token in tokens.values())


def test_an_echo_has_the_log_probabilities_of_its_prompt(
    gateway: HttpGateway, client: Any, tokenizer: Any
) -> None:
    """As Forward scores it, and as a stream; what follows is that of an answer without an echo."""
    text = "2 < 3 \u20ac"
    prompt = tokenizer.encode(text)
    settings: Any = {"model": "talker", "temperature": 0, "max_tokens": 4, "logprobs": 2}
    with Client(gateway.address) as grpc_client:
        scores = list(grpc_client.score(prompt).token_logprobs)
    echoed = client.completions.create(prompt=prompt, echo=True, **settings).choices[0]
    plain = client.completions.create(prompt=prompt, **settings).choices[0]
    begin = len(prompt)
    assert echoed.text == text + plain.text
    assert echoed.logprobs.token_logprobs[:begin] == [None, *scores]
    assert echoed.logprobs.top_logprobs[0] is None
    assert echoed.logprobs.token_logprobs[begin:] == plain.logprobs.token_logprobs
    offsets = [len(text) + offset for offset in plain.logprobs.text_offset]
    assert echoed.logprobs.text_offset == [0, 1, 2, 3, 4, 5, 6, 6, 6, *offsets]
    only = client.completions.create(prompt=prompt, echo=True, **{**settings, "max_tokens": 0})
    assert (only.choices[0].text, only.usage.completion_tokens) == (text, 0)
    assert only.choices[0].logprobs.token_logprobs == [None, *scores]
    streamed = list(client.completions.create(prompt=prompt, echo=True, stream=True, **settings))
    assert "".join(event.choices[0].text for event in streamed) == echoed.text
    values = [value for event in streamed for value in event.choices[0].logprobs.token_logprobs]
    assert values == echoed.logprobs.token_logprobs
    with_ids = client.completions.create(
        prompt=prompt, echo=True, **settings, extra_body={"return_token_ids": True}
    ).choices[0]
    # By their texts: a JavaScript object puts keys that are numbers first.
    (first, *ids), tokens = with_ids.logprobs.top_token_ids, with_ids.logprobs.tokens
    of_tokens = [each[token] for each, token in zip(ids, tokens[1:], strict=True)]
    assert first is None and of_tokens == [*prompt[1:], *with_ids.token_ids]
    assert list(map(set, ids)) == list(map(set, echoed.logprobs.top_logprobs[1:]))


def test_tokens_are_returned_and_usage_as_it_grows(client: Any, tokenizer: Any) -> None:
    body = {"return_token_ids": True, "chat_template_kwargs": {"enable_thinking": False}}
    asked: Any = {"model": "talker", "messages": QUESTION, "temperature": 0, "max_tokens": 5}
    whole = client.chat.completions.create(**asked, extra_body={**body, "prompt_logprobs": 1})
    expected = tokenizer.apply_chat_template(
        QUESTION, add_generation_prompt=True, enable_thinking=False, return_dict=False
    )
    assert whole.prompt_token_ids == expected
    assert [next(iter(each)) for each in whole.prompt_logprobs[1:]] == list(map(str, expected[1:]))
    stream = client.chat.completions.create(
        **asked, stream=True, extra_body=body,
        stream_options={"include_usage": True, "continuous_usage_stats": True},
    )  # fmt: skip
    first, *events = list(stream)
    assert first.prompt_token_ids == expected
    token_ids = [token for event in events if event.choices for token in event.choices[0].token_ids]
    assert token_ids == whole.choices[0].token_ids and len(token_ids) == 5
    counts = [event.usage.completion_tokens for event in [first, *events]]
    assert counts == sorted(counts) and counts[-1] == 5
    assert {event.usage.prompt_tokens for event in [first, *events]} == {len(expected)}


def test_a_message_is_continued(client: Any, model: Path, tokenizer: Any) -> None:
    talk: list[Any] = [*QUESTION, {"role": "assistant", "content": "Yes, it is "}]
    further = {"continue_final_message": True, "add_generation_prompt": False}
    answer = client.chat.completions.create(
        model="talker", messages=talk, temperature=0, max_tokens=6, extra_body=further
    )
    talk[1]["content"] = "Yes, it is"
    prompt = tokenizer.apply_chat_template(talk, continue_final_message=True, return_dict=False)
    assert answer.usage.prompt_tokens == len(prompt)
    expected = tokenizer.decode(hf_greedy(model, prompt, 6), skip_special_tokens=True)
    assert answer.choices[0].message.content == expected


@pytest.mark.parametrize(
    ("wanted", "texts"),
    [
        ({"structured_outputs": {"choice": ["yes", 'n"o']}}, {"yes", 'n"o'}),
        ({"structured_outputs": {"regex": "[ab]c"}}, {"ac", "bc"}),
        ({"structured_outputs": {"grammar": 'start: "x" | "y"'}}, {"x", "y"}),
        ({"guided_choice": ["red", "blue"]}, {"red", "blue"}),
        ({"guided_json": {"enum": [7]}}, {"7", " 7"}),
    ],
)
def test_structured_outputs(client: Any, wanted: Any, texts: set[str]) -> None:
    answer = client.completions.create(
        model="talker", prompt="a", max_tokens=9, n=4, seed=1, extra_body=wanted
    )
    assert {choice.text for choice in answer.choices} <= texts
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="talker", prompt="a", extra_body={**wanted, "guided_regex": "x"})
    assert str(caught.value.param).split(".")[0] in {*wanted, "guided_regex"}, "two constraints"
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="talker", prompt="a", extra_body={"guided_regex": "(("})
    assert caught.value.param == "guided_regex"
