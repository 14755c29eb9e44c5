"""Scores of texts: how their answers are made."""

from __future__ import annotations

import json
import random
from types import SimpleNamespace
from typing import Any

from quire.v1 import runner_pb2

from service.extensions.openai.embeddings import rerank
from service.extensions.openai.fields import Fields

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
