"""Embed over gRPC and HTTP: the hidden states of the transformers library, pooled as the model says."""

from __future__ import annotations

import asyncio
import json
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx2
import numpy as np
import openai
import pytest
import quire
import torch
from quire.errors import from_rpc_error
from quire.v1 import admin_pb2, types_pb2
from safetensors.torch import load_file, save_file

from tests.chat_templates import byte_tokenizer
from tests.http_gateway import HttpGateway
from tests.model_factory import TinyModel, hf_logits, hf_states, make_model, pooled_by
from tests.talkers import make_talker, save_tokenizer

# Longer ones than a step, so that chunks are pooled; 1 is the shortest.
STEP_TOKENS, PAGES = 32, 512
# Too few for the hidden states of each token of the longest text.
RESPONSE_BYTES, MANY = 128 << 10, 300
TEXTS = ["a", "The otter swims.", "The otter swims. " * 26, "Ein Öltanker 🚢", "The otter sleeps."]
RELATIVE_ERROR = 2e-5
WIDTH = 64
# By the names of sentence-transformers: what is kept of the states behind all tokens.
POOLINGS: dict[str, Any] = {
    "lasttoken": lambda states: states[-1],
    "mean": lambda states: states.mean(dim=0),
    "cls": lambda states: states[0],
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_talker(tmp_path_factory.mktemp("model") / "embedder")


@pytest.fixture(scope="module", params=POOLINGS)
def served(model: Path, request: pytest.FixtureRequest) -> Iterator[tuple[HttpGateway, str]]:
    pooling = request.param
    old = {
        "pooling_mode_cls_token": False,
        "pooling_mode_mean_tokens": True,
        "word_embedding_dimension": WIDTH,
    }
    pooled_by(model, old if pooling == "mean" else {"pooling_mode": pooling}, "Normalize")
    flags = ["--dtype", "float32", "--kv-pages", str(PAGES)]
    flags += ["--max-batch-tokens", str(STEP_TOKENS), "--max-response-bytes", str(RESPONSE_BYTES)]
    with HttpGateway(model=str(model), flags=flags) as gateway:
        yield gateway, pooling


def expected(model: Path, pooling: str, text: str) -> torch.Tensor:
    tokens = byte_tokenizer().encode(text).ids
    return POOLINGS[pooling](hf_states(model, tokens)[-2])  # type: ignore[no-any-return]


def assert_close(found: list[float], wanted: torch.Tensor) -> None:
    assert (torch.tensor(found) - wanted).abs().max() < RELATIVE_ERROR * wanted.abs().max()


def test_vectors_are_the_librarys(served: tuple[HttpGateway, str], model: Path) -> None:
    gateway, pooling = served
    wanted = [expected(model, pooling, text) for text in TEXTS]
    with quire.Client(gateway.address) as client:
        assert client.model_info().model.pooling == pooling
        for found, states in zip(client.embed(TEXTS, normalize=False), wanted, strict=True):
            assert_close(found, states)
        normalized = client.embed([byte_tokenizer().encode(text).ids for text in TEXTS], dimensions=7)
        # Their forwards' answers together are larger than a response may be.
        many = client.embed(["a"] * MANY)
        assert many == [many[0]] * MANY
    for found, states in zip(normalized, wanted, strict=True):
        assert_close(found, states[:7] / states[:7].norm())


def test_a_base_model_without_a_head_makes_vectors(model: Path, tmp_path: Path) -> None:
    """As Qwen3-Embedding-8B and E5-Mistral are: the vectors of the model with its head."""
    base = tmp_path / "base"
    shutil.copytree(model, base)
    pooled_by(base, {"pooling_mode": "lasttoken"}, "Normalize")
    tensors = load_file(base / "model.safetensors")
    del tensors["lm_head.weight"]
    renamed = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    save_file(renamed, base / "model.safetensors", {"format": "pt"})
    with (
        HttpGateway(model=str(base), flags=["--dtype", "float32", "--kv-pages", str(PAGES)]) as gateway,
        quire.Client(gateway.address) as client,
    ):
        assert client.model_info().model.backend == "native"
        for found, text in zip(client.embed(TEXTS, normalize=False), TEXTS, strict=True):
            assert_close(found, expected(model, "lasttoken", text))


async def test_a_vector_has_the_same_bits_in_any_company(served: tuple[HttpGateway, str]) -> None:
    gateway, pooling = served
    rng = random.Random(pooling)
    async with quire.AsyncClient(gateway.address) as client:
        texts = {text: (await client.embed([text], cache_salt=text[:9]))[0] for text in TEXTS}
        calls = [rng.choices(TEXTS, k=rng.randint(1, 9)) for _ in range(12)]
        found = await asyncio.gather(*map(client.embed, calls))
    assert found == [[texts[text] for text in call] for call in calls]
    assert not gateway.status().caches


def test_a_forwards_means_are_those_of_its_states(served: tuple[HttpGateway, str]) -> None:
    """Of each row with an output and each layer, with the same bits as the sum of all rows, in chunks too."""
    (gateway, _), tokens = served, list(range(40, 40 + STEP_TOKENS + 8))

    def states(score_from: int, *, mean: bool) -> np.ndarray[Any, Any]:
        output = types_pb2.OutputOptions(hidden=types_pb2.HiddenStates(layers=[2, 0, 2], mean=mean))
        answer = gateway.forward(tokens, output=output, score_from=score_from)
        rows = [[quire.floats(tensor) for tensor in row.hidden] for row in answer.outputs]
        return np.array(rows, np.float32)

    sums = np.cumsum(states(1, mean=False).astype(np.float64), axis=0)  # [tokens, layers, width]
    wanted = (sums / np.arange(1, len(tokens) + 1)[:, None, None]).astype(np.float32)
    for score_from in (1, 5, len(tokens) - 1):
        assert np.array_equal(states(score_from, mean=True), wanted[score_from - 1 :])
    output = types_pb2.OutputOptions(hidden=types_pb2.HiddenStates(mean=True))
    with pytest.raises(grpc.RpcError) as refused:
        gateway.prefill(tokens, output=output)
    assert from_rpc_error(refused.value).reason == "BAD_OUTPUT"


def test_over_http_they_are_the_same(served: tuple[HttpGateway, str]) -> None:
    gateway, _ = served
    with quire.Client(gateway.address) as client:
        wanted = client.embed(TEXTS)
    http = gateway.client()
    # Its package asks for base64, and decodes that.
    answer = http.embeddings.create(model="local", input=TEXTS)
    assert [each.embedding for each in answer.data] == wanted
    assert answer.model == "embedder"  # which "local" is, as in other answers
    numbers = http.embeddings.create(model="local", input=TEXTS[1], encoding_format="float", dimensions=4)
    assert len(numbers.data[0].embedding) == 4
    assert numbers.usage.prompt_tokens == len(byte_tokenizer().encode(TEXTS[1]).ids)
    with pytest.raises(openai.BadRequestError) as refused:
        http.embeddings.create(model="local", input=[[1, 2], [3, 70_000]])
    assert (refused.value.code, refused.value.param) == ("token_out_of_vocab", "input[1][1]")


def test_documents_are_ordered_by_their_cosine(served: tuple[HttpGateway, str]) -> None:
    gateway, _ = served
    with quire.Client(gateway.address) as client:
        vectors = torch.tensor(client.embed(TEXTS), dtype=torch.float64)
    cosines = (vectors[1:] @ vectors[0]).tolist()
    with httpx2.Client(base_url=f"http://127.0.0.1:{gateway.http_port}", timeout=60) as http:
        documents = [TEXTS[1], *({"text": text} for text in TEXTS[2:])]
        asked = {"model": "local", "query": TEXTS[0], "documents": documents}
        results = http.post("/v1/rerank", json={**asked, "top_n": 3}).json()["results"]
        best = sorted(range(len(cosines)), key=lambda index: -cosines[index])[:3]
        assert [each["index"] for each in results] == best
        assert [each["document"]["text"] for each in results] == [TEXTS[1:][index] for index in best]
        scores = http.post("/score", json={"model": "local", "text_1": TEXTS[0], "text_2": TEXTS[1:]}).json()
        assert [each["score"] for each in scores["data"]] == pytest.approx(cosines, abs=1e-6)
        assert results[0]["relevance_score"] == max(each["score"] for each in scores["data"])
        for path, body, param in (
            ("/rerank", {**asked, "documents": [""]}, "documents[0]"),
            ("/v2/rerank", {**asked, "documents": []}, "documents"),
            ("/v1/score", {"model": "local", "text_1": ["a", "b"], "text_2": "a"}, "text_1"),
            ("/v1/embeddings", {"model": "local", "input": "a", "dimensions": WIDTH + 1}, "dimensions"),
            ("/v1/embeddings", {"model": "local", "input": ["a", "b" * 99_999]}, "input[1]"),
            ("/v1/embeddings", {"model": "local", "input": [[1], [1] * 99_999]}, "input[1]"),
            ("/v1/rerank", {**asked, "documents": ["a", "b" * 2_000]}, "documents[1]"),
            ("/v1/rerank", {**asked, "documents": [{"text": "a", "txet": 1}]}, "documents[0].txet"),
        ):
            answer = http.post(path, json=body)
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), path


# As that of Qwen3-Reranker, with the names of roles that sentence-transformers and vLLM have.
RERANKER = (
    "{% for role in ('query', 'document') %}<{{ role }}>"
    "{{ messages | selectattr('role', 'eq', role) | map(attribute='content') | first }}\n{% endfor %}"
    "{% if add_generation_prompt %}Yes or no?{% endif %}"
)
YES, NO = 57, 45


def test_a_model_that_reads_both_texts(tmp_path: Path) -> None:
    """How likely it says yes, as the logits of the transformers library have it."""
    directory = make_model(tmp_path / "judge", TinyModel(vocab_size=300))
    save_tokenizer(directory, chat_template=RERANKER)
    types = [f"sentence_transformers.{name}" for name in ("Transformer", "cross_encoder.LogitScore")]
    paths = ["", "1_LogitScore"]
    modules = [{"idx": n, "path": paths[n], "type": types[n]} for n in range(2)]
    (directory / "modules.json").write_text(json.dumps(modules))
    (directory / paths[1]).mkdir()
    settings = directory / paths[1] / "config.json"
    settings.write_text(json.dumps({"true_token_id": YES, "false_token_id": NO}))
    documents, wanted = TEXTS[:4], list[float]()
    for document in documents:
        prompt = f"<query>fox\n<document>{document}\nYes or no?"
        logits = hf_logits(directory, byte_tokenizer().encode(prompt).ids)[-1]
        wanted.append(torch.sigmoid(logits[YES] - logits[NO]).item())
    flags = ["--dtype", "float32", "--kv-pages", str(PAGES)]
    with (
        HttpGateway(model=str(directory), flags=flags) as gateway,
        httpx2.Client(base_url=f"http://127.0.0.1:{gateway.http_port}", timeout=60) as http,
    ):
        asked: dict[str, Any] = {"model": "local", "query": "fox", "documents": documents}
        answer = http.post("/v1/rerank", json=asked).json()
        found = {each["index"]: each["relevance_score"] for each in answer["results"]}
        assert [found[n] for n in range(len(wanted))] == pytest.approx(wanted, abs=1e-5)
        assert list(found) == sorted(found, key=lambda index: -wanted[index])
        assert answer["usage"]["prompt_tokens"] > sum(map(len, documents))
        texts = {"model": "local", "text_1": ["fox"] * 4, "text_2": documents}
        scores = http.post("/score", json=texts).json()["data"]
        assert [each["score"] for each in scores] == [found[n] for n in range(len(wanted))]
        long = http.post("/rerank", json={**asked, "documents": ["a", "b" * 2_000]})
        assert (long.status_code, long.json()["error"]["param"]) == (400, "documents[1]")
        refused = http.post("/v1/embeddings", json={"model": "local", "input": "a"})
        assert f"LogitScore:{YES}:{NO}" in refused.json()["error"]["message"]


@pytest.mark.parametrize(
    ("settings", "more", "named"),
    [({"pooling_mode": "max"}, [], "max"), ({"pooling_mode": "mean"}, ["Dense"], "mean+Dense")],
)
def test_what_is_not_known_is_refused_by_name(
    model: Path, settings: dict[str, Any], more: list[str], named: str
) -> None:
    pooled_by(model, settings, *more)
    with HttpGateway(model=str(model), flags=["--dtype", "float32", "--kv-pages", "64"]) as gateway:
        with quire.Client(gateway.address) as client, pytest.raises(quire.QuireError) as refused:
            client.embed(["a"])
        assert named in str(refused.value) and refused.value.reason == "UNSUPPORTED_BY_EXECUTOR"
        # New weights have the texts of before.
        gateway.admin.LoadWeights(admin_pb2.LoadWeightsRequest(source=str(model)), timeout=60)
        assert gateway.model().pooling == named
