"""Masks of every form through a real gateway: equal sets give equal choices, in every call with a mask."""

from __future__ import annotations

import random

import pytest
from quire.v1 import executor_pb2 as pb
from quire.v1 import runner_pb2, types_pb2

from tests.e2e.conftest import NewCache
from tests.gateway_process import GatewayProcess
from tests.masks import forms

PROMPT = [5, 9, 2, 40, 41, 7]
VOCAB = 97
TIMEOUT_S = 30


@pytest.mark.parametrize("count", [3, 96])
def test_each_item_has_its_own_mask(tiny_gateway: GatewayProcess, new_cache: NewCache, count: int) -> None:
    """In every call: decodes, prefills, a verify and its rows, mixed steps, scorings, executions."""
    allowed = set(random.Random(count).sample(range(VOCAB), count))
    masks = forms(allowed, VOCAB, words=count % 2 == 0)
    sampling = types_pb2.SamplingParams(temperature=2.0, seed=count)
    outputs = [types_pb2.OutputOptions(mask=mask, sampling=sampling) for mask in masks]
    pairs = [(new_cache(PROMPT), output) for output in outputs]

    decodes = [pb.DecodeRequest(cache_id=cache, token_id=3, output=output) for cache, output in pairs]
    decoded = tiny_gateway.stub.BatchDecode(pb.BatchDecodeRequest(items=decodes), timeout=TIMEOUT_S)
    prefills = [pb.PrefillRequest(cache_id=cache, token_ids=[3, 4], output=output) for cache, output in pairs]
    prefilled = tiny_gateway.stub.BatchPrefill(pb.BatchPrefillRequest(items=prefills), timeout=TIMEOUT_S)
    items = [pb.UnifiedForwardItem(cache_id=cache, token_ids=[6], output=output) for cache, output in pairs]
    unified = tiny_gateway.stub.UnifiedForward(pb.UnifiedForwardRequest(items=items), timeout=TIMEOUT_S)
    scorings = [pb.ForwardRequest(token_ids=PROMPT, score_from=5, output=output) for output in outputs]
    scored = tiny_gateway.stub.BatchForward(pb.BatchForwardRequest(items=scorings), timeout=TIMEOUT_S)
    choices = [
        [result.response.output.token_id for result in answer.results]
        for answer in (decoded, prefilled, unified)
    ]
    choices += [[result.response.outputs[row].token_id for result in scored.results] for row in (0, 1)]
    rows = [types_pb2.VerifyRow(), *(types_pb2.VerifyRow(mask=mask) for mask in masks)]
    for row in range(5):
        of_row = []
        for cache, output in pairs:
            answer = tiny_gateway.verify(
                cache, [row], rows=rows[row : row + 1], output=output, accept=types_pb2.VERIFY_ACCEPT_ALL
            )
            of_row.append(answer.outputs[0].token_id)
        choices.append(of_row)
    executed = runner_pb2.ExecuteRequest(
        items=[
            runner_pb2.ExecuteItem(
                item_id=str(index),
                tokens=runner_pb2.TokenPrompt(token_ids=PROMPT),
                max_tokens=3,
                ignore_eos=True,
                tokens_only=True,
                sampling=sampling,
                constraint=runner_pb2.Constraint(mask=mask),
            )
            for index, mask in enumerate(masks)
        ]
    )
    for tokens in choices:
        assert len(set(tokens)) == 1 and tokens[0] in allowed
    texts: dict[str, list[int]] = {}
    for response in tiny_gateway.runner.Execute(executed, timeout=TIMEOUT_S):
        for chunk in response.chunks:
            texts.setdefault(chunk.item_id, []).extend(chunk.token_ids)
    assert len(texts) == 4 and all(text == texts["0"] and set(text) <= allowed for text in texts.values())
