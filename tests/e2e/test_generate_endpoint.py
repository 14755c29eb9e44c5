"""The endpoint for tokens of a real gateway, compared with Decode, Forward and Execute."""

from __future__ import annotations

import contextlib
import http.client
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from quire import AdapterNotFound, Client, output_options

from tests.adapter_factory import make_adapter
from tests.chat_templates import byte_tokenizer
from tests.http_gateway import HttpGateway
from tests.model_factory import TinyModel, make_model
from tests.talkers import VOCAB, make_talker

TIMEOUT_S = 60.0
CONTEXT = 200
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4]
COUNT = 12
SPEC = TinyModel(vocab_size=VOCAB, max_positions=CONTEXT)


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HttpGateway]:
    directory = tmp_path_factory.mktemp("model")
    # What a model recommends is not used for tokens.
    settings = {"eos_token_id": [299], "temperature": 0.3, "top_k": 1}
    model = make_talker(directory / "talker", SPEC, **settings)
    adapter = make_adapter(directory / "adapters" / "poet", model, 1)
    flags = ["--dtype", "float32", "--kv-pages", "512"]
    with HttpGateway(model=str(model), flags=[*flags, "--adapters", str(adapter.parent)]) as gateway:
        yield gateway


@pytest.fixture
def client(gateway: HttpGateway) -> Iterator[Client]:
    with Client(gateway.address, timeout_s=TIMEOUT_S) as client:
        yield client
    # No request leaves anything behind.
    gateway.wait_until(lambda: not gateway.status().caches and not gateway.status().operations_in_flight)


def post(gateway: HttpGateway, settings: dict[str, Any], **fields: Any) -> tuple[int, bytes]:
    """The status and the body of the response."""
    body = {"token_ids": PROMPT, "sampling_params": {"max_tokens": COUNT, **settings}, **fields}
    connection = http.client.HTTPConnection("127.0.0.1", gateway.http_port, timeout=TIMEOUT_S)
    headers = {"content-type": "application/json"}
    with contextlib.closing(connection):
        connection.request("POST", "/inference/v1/generate", json.dumps(body), headers)
        response = connection.getresponse()
        return response.status, response.read()


def generate(gateway: HttpGateway, settings: dict[str, Any], **fields: Any) -> Any:
    """The response in one piece."""
    status, body = post(gateway, settings, **fields)
    answer = json.loads(body)
    assert status == 200, answer
    return answer


def events(gateway: HttpGateway, settings: dict[str, Any], **fields: Any) -> list[Any]:
    """The events of a stream."""
    status, body = post(gateway, settings, stream=True, **fields)
    lines = [line.removeprefix(b"data: ") for line in body.split(b"\n\n") if line]
    assert status == 200 and lines.pop() == b"[DONE]"
    return [json.loads(line) for line in lines]


@pytest.mark.parametrize("adapter_id", ["", "poet"])
def test_greedy_tokens_and_logprobs_are_those_of_decodes(
    gateway: HttpGateway, client: Client, adapter_id: str
) -> None:
    """Exactly: the bits of a row depend on its own text alone."""
    output = output_options(logprob=True, top_logprobs=3)
    with client.prefill(PROMPT, output=output, adapter_id=adapter_id) as cache:
        steps = [cache.output]
        while len(steps) < COUNT:
            steps.append(cache.decode(steps[-1].token_id, output=output))
    model = {"model": adapter_id} if adapter_id else {}
    settings = {"temperature": 0, "ignore_eos": True, "logprobs": 3}
    answer = generate(gateway, settings, request_id="mine", **model)
    (choice,) = answer["choices"]
    assert choice["token_ids"] == [step.token_id for step in steps]
    assert (choice["index"], choice["finish_reason"]) == (0, "length")
    content = choice["logprobs"]["content"]
    assert [entry["logprob"] for entry in content] == [step.logprob for step in steps]
    for entry, step in zip(content, steps, strict=True):
        assert entry["token"] == f"token_id:{step.token_id}" and entry["token_id"] == step.token_id
        assert [each["token_id"] for each in entry["top_logprobs"]] == list(step.top.token_ids)
        assert [each["logprob"] for each in entry["top_logprobs"]] == list(step.top.logprobs)
        assert [each["rank"] for each in entry["top_logprobs"]] == [1, 2, 3]
    assert (answer["request_id"], answer["model"]) == ("mine", adapter_id or "talker")
    assert answer["usage"]["prompt_tokens"] == len(PROMPT) and answer["usage"]["completion_tokens"] == COUNT
    assert answer["prompt_logprobs"] is None
    stream = events(gateway, settings, request_id="mine", stream_options={"include_usage": True}, **model)
    *parts, last = stream
    assert [part["choices"][0]["token_ids"] for part in parts] == [[step.token_id] for step in steps]
    assert [each for part in parts for each in part["choices"][0]["logprobs"]["content"]] == content
    assert [part["choices"][0]["finish_reason"] for part in parts] == [None] * (COUNT - 1) + ["length"]
    assert last["choices"] == [] and last["usage"]["total_tokens"] == len(PROMPT) + COUNT
    assert {part["request_id"] for part in stream} == {"mine"}


@pytest.mark.parametrize("adapter_id", ["", "poet"])
def test_logprobs_of_the_prompt_are_those_of_a_scoring(
    gateway: HttpGateway, client: Client, adapter_id: str
) -> None:
    scored = client.score(PROMPT, output=output_options(top_logprobs=2), adapter_id=adapter_id)
    model = {"model": adapter_id} if adapter_id else {}
    for num_top in (0, 2):
        answer = generate(gateway, {"max_tokens": 1, "prompt_logprobs": num_top}, **model)
        first, *rest = answer["prompt_logprobs"]
        assert first is None and len(rest) == len(PROMPT) - 1
        # The token comes first, also where it is not one of the most likely.
        assert [next(iter(entry)) for entry in rest] == [str(token_id) for token_id in PROMPT[1:]]
        assert [next(iter(entry.values()))["logprob"] for entry in rest] == list(scored.token_logprobs)
        for entry, output in zip(rest, scored.outputs, strict=False):
            top = dict(zip(map(str, output.top.token_ids[:num_top]), output.top.logprobs, strict=False))
            assert top.items() <= {token: each["logprob"] for token, each in entry.items()}.items()
            assert len(entry) <= num_top + 1
            assert {entry[token]["rank"] for token in top} == set(range(1, num_top + 1))


def test_samples_are_those_of_execute(gateway: HttpGateway, client: Client) -> None:
    """With the settings of the request only, and a seed for each sample."""
    found: dict[int, list[int]] = {}
    sampling: Any = {"temperature": 1.0, "top_p": 0.9, "seed": 7}
    for chunk in client.execute(PROMPT, max_tokens=COUNT, n=3, tokens_only=True, **sampling):
        found.setdefault(chunk.sample, []).extend(chunk.token_ids)
    answer = generate(gateway, {"top_p": 0.9, "top_k": -1, "seed": 7, "n": 3})
    assert [choice["token_ids"] for choice in answer["choices"]] == [found[index] for index in range(3)]
    assert len({tuple(tokens) for tokens in found.values()}) == 3
    assert all(choice["logprobs"] is None for choice in answer["choices"])
    streamed: dict[int, list[int]] = {}
    for part in events(gateway, {"top_p": 0.9, "seed": 7, "n": 3}):
        streamed.setdefault(part["choices"][0]["index"], []).extend(part["choices"][0]["token_ids"])
    assert streamed == found
    drawn = [generate(gateway, {"seed": -1})["choices"][0]["token_ids"] for _ in range(2)]
    assert drawn[0] != drawn[1], "-1 is no seed"


def test_processed_logprobs_are_those_that_decodes_return(tmp_path: Path) -> None:
    model = make_model(tmp_path / "talker", SPEC)
    flags = ["--dtype", "float32", "--kv-pages", "512"]
    flags += ["--openai-logprobs-mode", "processed_logprobs"]
    drawn: Any = {"temperature": 0.7, "top_p": 0.9, "top_k": 40, "seed": 7}
    with HttpGateway(model=str(model), flags=flags) as gateway, Client(gateway.address) as client:
        (choice,) = generate(gateway, {**drawn, "logprobs": 1})["choices"]
        content = choice["logprobs"]["content"]
        assert [entry["token_id"] for entry in content] == choice["token_ids"]
        output = output_options(sampled_logprob=True, logprob=True, **drawn)
        with client.prefill(PROMPT, output=output) as cache:
            steps = [cache.output]
            while len(steps) < COUNT:
                steps.append(cache.decode(steps[-1].token_id, output=output))
        assert choice["token_ids"] == [step.token_id for step in steps]
        assert [entry["logprob"] for entry in content] == [step.sampled_logprob for step in steps]
        assert [step.logprob for step in steps] != [step.sampled_logprob for step in steps]
        for part, entry in zip(events(gateway, {**drawn, "logprobs": 1}), content, strict=True):
            assert part["choices"][0]["logprobs"]["content"] == [entry]
        (greedy,) = generate(gateway, {"temperature": 0, "logprobs": 1})["choices"]
        with client.prefill(PROMPT, output=output_options(logprob=True)) as cache:
            assert greedy["logprobs"]["content"][0]["logprob"] == cache.output.logprob
        both = client.execute(PROMPT, max_tokens=COUNT, **drawn, logprobs=True, sampled_logprobs=True)
        found = [each for chunk in both for each in chunk.logprobs]
        assert [each.logprob for each in found] == [step.logprob for step in steps]
        assert [each.sampled_logprob for each in found] == [step.sampled_logprob for step in steps]


def test_salts_keep_prefixes_apart(gateway: HttpGateway, client: Client) -> None:
    prompt = [*range(40)]

    def cached_tokens(**fields: Any) -> int:
        (chunk,) = client.execute(prompt, max_tokens=1, n=1, tokens_only=True, **fields)
        assert chunk.usage is not None
        return chunk.usage.cached_tokens

    assert cached_tokens(cache_salt="a") == 0
    assert cached_tokens(cache_salt="b") == cached_tokens() == 0
    assert cached_tokens(cache_salt="a") == 32
    # The same salt, in the other API.
    answer = generate(gateway, {"prompt_logprobs": 0, "max_tokens": 1}, token_ids=prompt, cache_salt="c")
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 32, "of the scoring's"
    assert cached_tokens(cache_salt="c") == 32
    status, body = post(gateway, {}, cache_salt="s" * 129)
    error = json.loads(body)["error"]
    assert (status, error["code"], error["param"]) == (400, "bad_cache_salt", "cache_salt")


def test_what_ends_a_sample(gateway: HttpGateway, client: Client) -> None:
    letters = byte_tokenizer().encode("abcdefghijklmnopqrstuvwxyz").ids

    def ended(**settings: Any) -> tuple[list[int], str]:
        settings = {"temperature": 0, "allowed_token_ids": letters, **settings}
        choice = generate(gateway, settings)["choices"][0]
        return choice["token_ids"], choice["finish_reason"]

    free, _ = ended()
    last = next(token_id for token_id in free if token_id != free[0])
    expected = free[: free.index(last) + 1], "stop"
    assert ended(stop_token_ids=[298, last]) == expected, "the token itself is returned"
    assert ended(stop=["nowhere", byte_tokenizer().decode([last])]) == expected
    # The model's own end token.
    assert ended(allowed_token_ids=[299]) == ([299], "stop")
    assert ended(allowed_token_ids=[299], ignore_eos=True) == ([299] * COUNT, "length")
    # Without a limit the text fills the context. Its last token needs no room.
    tokens, reason = ended(max_tokens=None)
    assert tokens[:COUNT] == free and reason == "length"
    assert len(tokens) == CONTEXT - len(PROMPT) + 1


@pytest.mark.parametrize(
    ("settings", "fields", "status", "code", "param"),
    [
        ({}, {"token_ids": [1, 300]}, 400, "token_out_of_vocab", "token_ids[1]"),
        ({}, {"token_ids": [1] * (CONTEXT + 1)}, 400, "context_length_exceeded", "token_ids"),
        ({"temperature": 200}, {}, 400, "bad_sampling", "sampling_params.temperature"),
        ({"logit_bias": {"300": 1}}, {}, 400, "token_out_of_vocab", "sampling_params.logit_bias[300]"),
        ({"allowed_token_ids": [300]}, {}, 400, "token_out_of_vocab", "sampling_params.allowed_token_ids"),
        ({"stop_token_ids": [1] * 65}, {}, 400, "bad_stop", "sampling_params.stop_token_ids"),
        ({"stop": ["x" * 257]}, {}, 400, "bad_stop", "sampling_params.stop[0]"),
        ({}, {"model": "prose"}, 404, "model_not_found", "model"),
    ],
)
@pytest.mark.parametrize("is_stream", [False, True])
def test_what_the_model_cannot_do_is_refused(
    gateway: HttpGateway,
    client: Client,
    settings: dict[str, Any],
    fields: dict[str, Any],
    status: int,
    code: str,
    param: str | None,
    is_stream: bool,
) -> None:
    found, body = post(gateway, settings, stream=is_stream, **fields)
    error = json.loads(body)["error"]
    assert (found, error["code"], error["param"]) == (status, code, param)


def test_prompts_are_scored_within_the_same_limits(gateway: HttpGateway, client: Client) -> None:
    status, body = post(gateway, {"prompt_logprobs": 1}, token_ids=[1, 300])
    assert (status, json.loads(body)["error"]["param"]) == (400, "token_ids[1]")
    assert generate(gateway, {"prompt_logprobs": 1}, token_ids=[1])["prompt_logprobs"] == [None]


def test_the_adapters_are_models(gateway: HttpGateway, client: Client) -> None:
    with gateway.client() as http_client:
        listed = {model.id: model.max_model_len for model in http_client.models.list()}
    assert listed == {"local": CONTEXT, "talker": CONTEXT, "poet": CONTEXT}
    assert generate(gateway, {}, model="local")["model"] == "talker"
    with pytest.raises(AdapterNotFound):
        client.score(PROMPT, adapter_id="prose")
