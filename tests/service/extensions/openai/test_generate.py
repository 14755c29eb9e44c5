"""Requests for tokens as items of an execution, and their responses, over a runtime that tests control."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from quire.v1 import executor_pb2, runner_pb2, types_pb2

from service.caches.requests import Priority
from service.errors import InvalidArgument, QuireError, RuntimeNotFound, SequenceTooLong
from service.extensions.openai import errors
from service.extensions.openai.generate import GenerateRequest, generate
from service.extensions.openai.models import ResolvedModel
from service.runtimes.base import Batch, ChunkSink
from tests.service.extensions.openai.served_front import FakeRuntime, chunk, serving
from tests.service.extensions.openai.test_requests import VALUES

DEFAULTS = types_pb2.SamplingParams(temperature=0.5, top_k=20)
STOP = runner_pb2.FINISH_REASON_STOP


def resolve(model: str) -> ResolvedModel:
    if model == "provider":
        return ResolvedModel(model, is_local=False, sampling_defaults=types_pb2.SamplingParams())
    if model not in ("local", "poet"):
        raise RuntimeNotFound(f"there is no model '{model}'")
    adapter_id = model if model == "poet" else ""
    return ResolvedModel(
        "local", is_local=True, sampling_defaults=DEFAULTS, max_tokens=4, adapter_id=adapter_id
    )


def request(settings: dict[str, Any] | None = None, **fields: Any) -> GenerateRequest:
    return generate({"token_ids": [1, 2], "sampling_params": settings or {}, **fields}, resolve)


def test_a_request() -> None:
    plain = request()
    expected = runner_pb2.ExecuteItem(item_id="0", n=1, tokens_only=True)
    expected.tokens.token_ids.extend([1, 2])
    # Neither the settings that the model recommends nor a limit on the tokens.
    expected.sampling.temperature = 1.0
    assert plain.items == [expected] and not plain.is_stream and plain.num_prompt_top is None
    settings = {
        "n": 2, "temperature": 0.7, "top_p": 0.9, "top_k": -1, "min_p": 0.1, "seed": 3, "max_tokens": 9,
        "typical_p": 0.8, "repetition_penalty": 1.1, "frequency_penalty": 0.1, "presence_penalty": 0.2,
        "stop_token_ids": [7], "allowed_token_ids": [5, 7], "ignore_eos": True, "logit_bias": {"5": 1.5},
        "logprobs": 5, "prompt_logprobs": 2, "stop": "x",
    }  # fmt: skip
    full = request(settings, model="poet", request_id="mine")
    expected = runner_pb2.ExecuteItem(
        item_id="0", n=2, max_tokens=9, stop_token_ids=[7], ignore_eos=True, logprobs=True, top_logprobs=5,
        stop=["x"], adapter_id="poet",
    )  # fmt: skip
    expected.tokens.token_ids.extend([1, 2])
    expected.constraint.mask.allowed.ids.extend([5, 7])
    given = types_pb2.SamplingParams(
        temperature=0.7, top_p=0.9, top_k=0, min_p=0.1, typical_p=0.8, seed=3, repetition_penalty=1.1,
        frequency_penalty=0.1, presence_penalty=0.2, logit_bias={5: 1.5},
    )  # fmt: skip
    expected.sampling.CopyFrom(given)
    assert full.items == [expected]
    assert (full.request_id, full.num_top, full.num_prompt_top) == ("mine", 5, 2)


def test_fields_that_change_no_token_are_ignored() -> None:
    settings = {
        "detokenize": False, "skip_special_tokens": False, "spaces_between_special_tokens": True,
        "include_stop_str_in_output": True, "output_kind": 2, "flat_logprobs": True, "min_tokens": 0,
        "routed_experts_prompt_start": 4, "return_token_ids": True, "seed": -1,
        "stop_token_ids": [], "allowed_token_ids": None, "bad_words": [], "structured_outputs": None,
        "length_penalty": 1.0, "use_beam_search": False, "best_of": 1, "logprob_token_ids": [],
        "logits_processors": [], "early_stopping": False, "extra_args": {}, "logit_bias": {}, "stop": [],
        "truncate_prompt_tokens": None, "n": 1,
    }  # fmt: skip
    fields: dict[str, Any] = {
        "features": None, "content_parts": [], "kv_transfer_params": None, "output_mode": "tokens",
        "priority": 0, "stream_options": {"include_usage": False}, "stream": False,
    }  # fmt: skip
    assert request(settings, return_token_ids=False, **fields) == request()


# The settings and the other fields of a request, and what is refused of them.
BAD: list[tuple[dict[str, Any], dict[str, Any], str, str]] = [
    ({}, {"token_ids": None}, "token_ids", "BAD_FIELD"),
    ({}, {"token_ids": []}, "token_ids", "BAD_FIELD"),
    ({}, {"token_ids": "text"}, "token_ids", "BAD_FIELD"),
    ({}, {"token_ids": [[1]]}, "token_ids[0]", "BAD_FIELD"),
    ({}, {"token_ids": [1, -1]}, "token_ids[1]", "BAD_FIELD"),
    ({}, {"token_ids": [1, 1 << 32]}, "token_ids[1]", "BAD_FIELD"),
    ({}, {"token_ids": [1, True]}, "token_ids[1]", "BAD_FIELD"),
    ({}, {"sampling_params": None}, "sampling_params", "BAD_FIELD"),
    ({}, {"sampling_params": [1]}, "sampling_params", "BAD_FIELD"),
    ({}, {"model": 3}, "model", "BAD_FIELD"),
    ({}, {"model": "provider"}, "model", "UNSUPPORTED_FIELD"),
    ({}, {"request_id": 3}, "request_id", "BAD_FIELD"),
    ({}, {"request_id": "x" * 129}, "request_id", "BAD_FIELD"),
    ({}, {"priority": "high"}, "priority", "BAD_FIELD"),
    ({}, {"cache_salt": 3}, "cache_salt", "BAD_FIELD"),
    ({"cache_salt": ["x"]}, {}, "sampling_params.cache_salt", "BAD_FIELD"),
    ({}, {"priority": 1 << 63}, "priority", "BAD_FIELD"),
    ({}, {"stream": "yes"}, "stream", "BAD_FIELD"),
    ({}, {"stream_options": {"include_usage": True}}, "stream_options", "BAD_FIELD"),
    ({}, {"output_mode": "text"}, "output_mode", "UNSUPPORTED_FIELD"),
    ({}, {"return_token_ids": True}, "return_token_ids", "UNSUPPORTED_FIELD"),
    ({}, {"features": {}}, "features", "UNKNOWN_FIELD"),
    ({}, {"content_parts": [{}]}, "content_parts", "UNKNOWN_FIELD"),
    ({}, {"kv_transfer_params": {}}, "kv_transfer_params", "UNKNOWN_FIELD"),
    ({}, {"ec_transfer_params": {}}, "ec_transfer_params", "UNKNOWN_FIELD"),
    ({}, {"prompt": "x"}, "prompt", "UNKNOWN_FIELD"),
    ({"temperature": "hot"}, {}, "sampling_params.temperature", "BAD_FIELD"),
    ({"max_tokens": 0}, {}, "sampling_params.max_tokens", "BAD_FIELD"),
    ({"n": 129}, {}, "sampling_params.n", "BAD_FIELD"),
    ({"top_k": -2}, {}, "sampling_params.top_k", "BAD_FIELD"),
    ({"stop": [3]}, {}, "sampling_params.stop[0]", "BAD_FIELD"),
    ({"stop": {}}, {}, "sampling_params.stop", "BAD_FIELD"),
    ({"stop_token_ids": 3}, {}, "sampling_params.stop_token_ids", "BAD_FIELD"),
    ({"stop_token_ids": [1.5]}, {}, "sampling_params.stop_token_ids[0]", "BAD_FIELD"),
    ({"allowed_token_ids": ["x"]}, {}, "sampling_params.allowed_token_ids[0]", "BAD_FIELD"),
    ({"logit_bias": {"x": 1}}, {}, "sampling_params.logit_bias", "BAD_FIELD"),
    ({"logit_bias": {"1": "x"}}, {}, "sampling_params.logit_bias[1]", "BAD_FIELD"),
    ({"logprobs": -1}, {}, "sampling_params.logprobs", "BAD_FIELD"),
    ({"logprobs": True}, {}, "sampling_params.logprobs", "BAD_FIELD"),
    ({"prompt_logprobs": 21}, {}, "sampling_params.prompt_logprobs", "BAD_FIELD"),
    ({"prompt_logprobs": 0}, {"stream": True}, "sampling_params.prompt_logprobs", "UNSUPPORTED_FIELD"),
    ({"min_tokens": -1}, {}, "sampling_params.min_tokens", "BAD_FIELD"),
    ({"structured_outputs": {"regex": 1}}, {}, "sampling_params.structured_outputs.regex", "BAD_FIELD"),
    ({"bad_words": [1]}, {}, "sampling_params.bad_words[0]", "BAD_FIELD"),
    ({"logprob_token_ids": [1]}, {}, "sampling_params.logprob_token_ids", "UNKNOWN_FIELD"),
    ({"temprature": 1}, {}, "sampling_params.temprature", "UNKNOWN_FIELD"),
]


@pytest.mark.parametrize(("settings", "fields", "field", "reason"), BAD)
def test_bad_requests(settings: dict[str, Any], fields: dict[str, Any], field: str, reason: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        request(settings, **fields)
    assert (caught.value.field, caught.value.reason) == (field, reason)
    assert errors.body(caught.value)["error"]["param"] == field


def test_what_the_model_does_not_have() -> None:
    with pytest.raises(SequenceTooLong):
        request(token_ids=[1] * 5)
    with pytest.raises(RuntimeNotFound):
        request(model="prose")


NAMES = st.sampled_from(
    ["token_ids", "sampling_params", "model", "priority", "stream", "stop", "n", "logprobs", "seed"]
)


@given(VALUES | st.dictionaries(NAMES, VALUES, max_size=6), st.booleans())
def test_any_value_is_a_request_or_refused(value: Any, is_inner: bool) -> None:
    whole = {"token_ids": [1], "sampling_params": value}
    if not is_inner:
        whole = {**whole, "sampling_params": {}, **value} if isinstance(value, dict) else value
    refusal = None
    try:
        assert generate(whole, resolve).items[0].ByteSize()
    except QuireError as error:
        refusal = error
    if refusal is not None:
        assert errors.http_status(refusal) in (400, 404)
        json.dumps(errors.body(refusal), ensure_ascii=False).encode()


def tokens_of(*token_ids: int, **fields: Any) -> runner_pb2.SampleChunk:
    """A chunk with log-probabilities, and two alternatives for each token."""
    made = chunk(token_ids=token_ids, **fields)
    for token_id in token_ids:
        top = types_pb2.TopLogprobs(token_ids=[8, token_id], logprobs=[-0.25, -1.0])
        made.logprobs.add(logprob=-1.0, top=top)
    return made


async def post(client: Any, settings: dict[str, Any] | None = None, **fields: Any) -> Any:
    """The response of a server, which OpenAI's client only sends."""
    body = {"token_ids": [1, 2, 3], "sampling_params": settings or {}, **fields}
    url = str(client.base_url).replace("/v1/", "/inference/v1/generate")
    return (await client._client.post(url, json=body)).json()


async def test_a_response_has_both_forms_of_logprobs() -> None:
    batches: list[Batch] = []

    async def run(batch: Batch, sink: ChunkSink) -> None:
        batches.append(batch)
        sink.put([tokens_of(5), tokens_of(6, position=1, finish_reason=STOP)])

    async with serving(FakeRuntime(run, "local")) as served, served.client() as client:
        answer = await post(client, {"logprobs": 2}, priority=-1)
        assert batches[0].priority == Priority.HIGH
        (choice,) = answer["choices"]
        assert (choice["token_ids"], choice["finish_reason"]) == ([5, 6], "stop")
        own = {"token": "token_id:5", "token_id": 5, "logprob": -1.0, "rank": 2}
        other = {"token": "token_id:8", "token_id": 8, "logprob": -0.25, "rank": 1}
        assert choice["logprobs"]["content"][0] == {**own, "top_logprobs": [own, other]}
        # As in vLLM: one alternative is the token itself.
        (choice,) = (await post(client, {"logprobs": 1}))["choices"]
        assert choice["logprobs"]["content"][0]["top_logprobs"] == [own]
        assert answer["request_id"] and answer["output_mode"] == "tokens"
        assert not batches[0].items[0].text


async def test_a_stream_ends_with_the_error_of_its_sample() -> None:
    async def run(_batch: Batch, sink: ChunkSink) -> None:
        sink.put([tokens_of(5)])
        raise InvalidArgument("BAD_SAMPLING", "sampling.temperature", "too hot")

    async with serving(FakeRuntime(run, "local")) as served, served.client() as client:
        url = str(client.base_url).replace("/v1/", "/inference/v1/generate")
        body = {"token_ids": [1], "sampling_params": {}, "stream": True}
        response = await client._client.post(url, json=body)
        first, last = (json.loads(line[6:]) for line in response.text.split("\n\n") if line)
        assert first["choices"][0]["token_ids"] == [5]
        assert last["error"]["param"] == "sampling_params.temperature"


async def test_a_scored_prompt_counts_until_its_response_is_sent() -> None:
    held: list[int] = []

    async def run(_batch: Batch, sink: ChunkSink) -> None:
        held.append(served.state.budgets.answers.used)
        sink.put([tokens_of(5, finish_reason=STOP)])

    async def forward(asked: executor_pb2.ForwardRequest, context: Any) -> executor_pb2.ForwardResponse:
        assert list(asked.token_ids) == [1, 2, 3] and asked.output.top_logprobs == 1
        served.state.budgets.answers.take_until_done(5000, context)
        response = executor_pb2.ForwardResponse(token_logprobs=[-1.5, -2.5])
        for top in (2, 7, 7):
            response.outputs.add().top.CopyFrom(types_pb2.TopLogprobs(token_ids=[top], logprobs=[-1.5]))
        return response

    async with serving(FakeRuntime(run, "local"), forward=forward) as served, served.client() as client:
        answer = await post(client, {"prompt_logprobs": 1})
        assert held == [5000] and not served.state.budgets.answers.used

    def entry(logprob: float, rank: int | None) -> dict[str, Any]:
        return {"logprob": logprob, "rank": rank, "decoded_token": None}

    assert answer["prompt_logprobs"] == [
        None, {"2": entry(-1.5, 1)}, {"3": entry(-2.5, None), "7": entry(-1.5, 1)},
    ]  # fmt: skip
