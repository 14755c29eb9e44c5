"""The experts of tokens in answers over HTTP, compared with those of the transformers library."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.e2e.test_generate_endpoint import events, generate, post
from tests.expert_routing import library_experts
from tests.families import settings_of
from tests.http_gateway import HttpGateway
from tests.model_factory import make_family_model
from tests.talkers import save_tokenizer

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4]
COUNT = 6
START = "routed_experts_prompt_start"
DRAW = {"max_tokens": COUNT, "ignore_eos": True, "seed": 1}
LAYERS, DENSE = 4, 1


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One of its layers is dense."""
    model_type, settings = settings_of("qwen3_moe")
    settings = {**settings, "vocab_size": 300, "mlp_only_layers": [DENSE]}
    model = make_family_model(tmp_path_factory.mktemp("moe") / "talker", model_type, settings)
    save_tokenizer(model)
    return model


def serve(model: Path, form: str) -> HttpGateway:
    flags = ["--dtype", "float32", "--kv-pages", "256"]
    return HttpGateway(model=str(model), flags=[*flags, "--openai-routed-experts", form])


@pytest.fixture(scope="module")
def gateway(model: Path) -> Iterator[HttpGateway]:
    with serve(model, "npy") as gateway:
        yield gateway


@pytest.fixture(scope="module")
def client(gateway: HttpGateway) -> Iterator[Any]:
    with gateway.client() as client:
        yield client


def loaded(value: str) -> NDArray[np.uint8]:
    found: NDArray[np.uint8] = np.load(io.BytesIO(base64.b64decode(value, validate=True)), allow_pickle=False)
    return found


def expected(model: Path, tokens: list[int], start: int = 0) -> NDArray[np.int64]:
    """Those of all tokens but the last one, from `start` on."""
    found = np.zeros((len(tokens) - 1, LAYERS, 2), np.int64)
    found[:, [layer for layer in range(LAYERS) if layer != DENSE]] = library_experts(model, tokens[:-1])
    return found[start:]


@pytest.mark.parametrize("start", [None, 5, len(PROMPT)])
def test_generated_tokens_and_the_prompt_have_those_of_the_library(
    gateway: HttpGateway, model: Path, start: int | None
) -> None:
    settings = {**DRAW, "n": 2} if start is None else {**DRAW, START: start}
    choices = generate(gateway, settings)["choices"]
    for choice in choices:
        experts = loaded(choice["routed_experts"])
        assert experts.dtype == np.uint8
        assert np.array_equal(experts, expected(model, PROMPT + choice["token_ids"], start or 0))
    assert len({choice["routed_experts"] for choice in choices}) == len(choices)
    *before, last = [event["choices"][0] for event in events(gateway, {**settings, "n": 1})]
    assert last["routed_experts"] == choices[0]["routed_experts"]
    assert not any("routed_experts" in each for each in before)


def test_with_log_probabilities_of_the_prompt(gateway: HttpGateway, model: Path) -> None:
    answer = generate(gateway, {**DRAW, START: 7, "prompt_logprobs": 1, "logprobs": 1})
    (choice,) = answer["choices"]
    assert np.array_equal(loaded(choice["routed_experts"]), expected(model, PROMPT + choice["token_ids"], 7))
    assert len(answer["prompt_logprobs"]) == len(PROMPT)


def test_a_start_behind_the_prompt_is_refused(gateway: HttpGateway) -> None:
    for start in (len(PROMPT) + 1, -1):
        status, body = post(gateway, {**DRAW, START: start})
        assert (status, json.loads(body)["error"]["param"]) == (400, f"sampling_params.{START}")


@pytest.mark.parametrize("asked", [{"prompt": PROMPT}, {"prompt": "a fox", "echo": True, "logprobs": 1}])
def test_completions(client: Any, model: Path, asked: dict[str, Any]) -> None:
    body = {START: 2, "ignore_eos": True, "return_token_ids": True}
    answer = client.completions.create(model="local", max_tokens=COUNT, n=2, extra_body=body, **asked)
    for choice in answer.choices:
        tokens = choice.prompt_token_ids + choice.token_ids
        assert np.array_equal(loaded(choice.routed_experts), expected(model, tokens, 2))
    stream = client.completions.create(model="local", max_tokens=COUNT, stream=True, extra_body=body, **asked)
    assert not any(hasattr(event.choices[0], "routed_experts") for event in stream)


def test_only_a_prompt(client: Any, model: Path) -> None:
    answer = client.completions.create(model="local", prompt=PROMPT, echo=True, max_tokens=0)
    (choice,) = answer.choices
    assert np.array_equal(loaded(choice.routed_experts), expected(model, PROMPT))


def test_chats(client: Any, model: Path) -> None:
    answer = client.chat.completions.create(
        model="local",
        messages=[{"role": "user", "content": "a fox?"}],
        max_tokens=COUNT,
        extra_body={"ignore_eos": True, "return_token_ids": True},
    )
    (choice,) = answer.choices
    tokens = answer.prompt_token_ids + choice.token_ids
    assert np.array_equal(loaded(choice.routed_experts), expected(model, tokens))


def test_the_form_of_prime_rl(gateway: HttpGateway, model: Path) -> None:
    with serve(model, "raw") as raw:
        _, body = post(raw, {**DRAW, START: 3})
        # Its client cuts the data out of the answer before that is parsed.
        assert b'"routed_experts":{"data":"' in body
        (streamed,) = [each["choices"][0] for each in events(raw, {**DRAW, START: 3})][-1:]
    (choice,) = json.loads(body)["choices"]
    value = choice["routed_experts"]
    assert (value["start"], value["dtype"]) == (3, "uint8")
    ids = np.frombuffer(base64.b64decode(value["data"]), value["dtype"]).reshape(value["shape"])
    assert np.array_equal(ids, expected(model, PROMPT + choice["token_ids"], 3))
    assert streamed["routed_experts"] == value
