"""Scores of texts: how their answers are made."""

from __future__ import annotations

import json
import random
from array import array
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from quire.v1 import executor_pb2, runner_pb2, types_pb2

from service.config import Config
from service.extensions.openai.cross_encoder import CrossEncoder
from service.extensions.openai.embeddings import rerank
from service.extensions.openai.fields import Fields
from tests.service.served import state_of
from workers.common import worker_pb2

NUM = 500
LOCAL: Any = SimpleNamespace(
    resolve=lambda name, **_: SimpleNamespace(is_local=True, model_id="m", adapter_id="", max_tokens=9)
)


def test_others_run_while_documents_are_compared() -> None:
    """Thousands of vectors of thousands of numbers take a second."""
    rng = random.Random(1)
    documents = [str(index) for index in range(NUM)]
    body = {"model": "m", "query": "q", "documents": documents, "top_n": 3}
    request = rerank(Fields(body), LOCAL)
    vectors = [runner_pb2.Embedding(values=[rng.random(), rng.random()]) for _ in range(NUM + 1)]
    cosines = (
        sum(a * b for a, b in zip(vectors[one].values, vectors[other].values, strict=True))
        for one, other in request.pairs
    )
    pieces = list(request.answer(vectors, cosines))
    assert len(pieces) > NUM, "the event loop has a chance between two"
    results = json.loads("".join(pieces))["results"]
    query = vectors[0].values
    best = sorted(
        range(NUM), key=lambda at: -sum(a * b for a, b in zip(query, vectors[at + 1].values, strict=True))
    )
    assert [each["index"] for each in results] == best[:3]


async def test_a_long_query_is_not_in_memory_once_for_each_of_its_documents() -> None:
    """Each pair has all of its tokens: with two thousand documents that may be a GB."""
    query, num_documents, groups = 400_000, 10, list[int]()

    async def encode_pair(*_: str, **__: int) -> Sequence[int]:
        return array("I", [1]) * query

    async def forward(batch: executor_pb2.BatchForwardRequest, _: Any) -> executor_pb2.BatchForwardResponse:
        groups.append(len(batch.items))
        answered = executor_pb2.BatchForwardResponse()
        for _ in batch.items:
            answered.results.add().response.outputs.add().chosen_logprobs.extend([0.0, 0.0])
        return answered

    model = types_pb2.ModelDescription(vocab_size=100, pooling="LogitScore:1:2", max_seq_len=1 << 20)
    able = types_pb2.ExecutorCapabilities(kv_capacity_tokens=1 << 20)
    state = state_of(Config(), worker_pb2.WorkerReady(model=model, executor=able))
    text: Any = SimpleNamespace(encode_pair=encode_pair)
    request = runner_pb2.EmbedRequest()
    request.inputs.extend(runner_pb2.EmbedInput(text="x") for _ in range(num_documents + 1))
    pairs = [(0, index) for index in range(1, num_documents + 1)]
    found, scores = await CrossEncoder(state, text, forward).judge(request, pairs, None)
    assert [each.input_tokens for each in found] == [query] * num_documents
    assert scores == [0.5] * num_documents
    assert sum(groups) == num_documents and max(groups) <= 3
