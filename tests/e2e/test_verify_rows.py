"""Verifies whose positions differ, and what tokens were drawn from, against transformers."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from quire.v1 import executor_pb2 as pb
from quire.v1 import types_pb2

from tests.e2e.conftest import NewCache
from tests.gateway_process import GatewayProcess
from tests.model_factory import hf_greedy, hf_logits

PROMPT = [5, 9, 2, 40]
TIMEOUT_S = 30


@pytest.fixture
def cache(new_cache: NewCache) -> str:
    return new_cache(PROMPT)


def certain(token_id: int) -> types_pb2.VerifyRow:
    drawn_from = types_pb2.DraftProbabilities(token_ids=[token_id], probabilities=[1.0])
    return types_pb2.VerifyRow(draft=drawn_from)


@pytest.mark.parametrize("right", [0, 2])
def test_without_a_temperature_drafts_are_kept_as_greedily(
    tiny_gateway: GatewayProcess, tiny_model: Path, cache: str, right: int
) -> None:
    first, *truth = hf_greedy(tiny_model, PROMPT, 4)
    drafts = [token if at < right else (token + 1) % 50 for at, token in enumerate(truth)]
    answer = tiny_gateway.stub.ForwardVerify(
        pb.ForwardVerifyRequest(
            cache_id=cache,
            token_ids=[first, *drafts],
            accept=types_pb2.VERIFY_ACCEPT_SPECULATIVE,
            rows=[*map(certain, drafts), types_pb2.VerifyRow()],
        ),
        timeout=TIMEOUT_S,
    )
    assert answer.accepted == right and answer.kv_cache.seq_len == len(PROMPT) + 1 + right
    said = hf_greedy(tiny_model, [*PROMPT, first, *drafts[:right]], 1)
    assert [answer.outputs[right].token_id] == said


def test_what_the_model_cannot_draw_is_replaced_by_what_it_can(
    tiny_gateway: GatewayProcess, tiny_model: Path, cache: str
) -> None:
    """With top_k of 2 each token is one of two, wherever the drafts come from."""
    vocab = hf_logits(tiny_model, PROMPT).shape[-1]
    flat = np.full(vocab, 1 / vocab, dtype="<f4").tobytes()
    draft = types_pb2.VerifyRow(draft=types_pb2.DraftProbabilities(dense=flat))
    for seed in range(10):
        sampling = types_pb2.SamplingParams(temperature=1.0, top_k=2, seed=seed)
        request = pb.ForwardVerifyRequest(
            cache_id=cache,
            token_ids=[1, 7 * seed % vocab],
            position=len(PROMPT),
            accept=types_pb2.VERIFY_ACCEPT_SPECULATIVE,
            rows=[draft, types_pb2.VerifyRow()],
            output=types_pb2.OutputOptions(sampling=sampling),
        )
        answer = tiny_gateway.stub.ForwardVerify(request, timeout=TIMEOUT_S)
        # The same request again has the same answer.
        again = tiny_gateway.stub.ForwardVerify(request, timeout=TIMEOUT_S)
        assert list(again.outputs) == list(answer.outputs) and again.accepted == answer.accepted
        best = hf_logits(tiny_model, [*PROMPT, 1])[-1].topk(2).indices.tolist()
        assert answer.outputs[0].token_id in best
        assert answer.accepted == (answer.outputs[0].token_id == request.token_ids[1])
        truncate = pb.TruncateKVRequest(cache_id=cache, new_len=len(PROMPT))
        tiny_gateway.stub.TruncateKV(truncate, timeout=TIMEOUT_S)


def test_how_likely_a_draw_was(tiny_gateway: GatewayProcess, tiny_model: Path, cache: str) -> None:
    sampling = types_pb2.SamplingParams(temperature=0.7, top_k=5, seed=4)
    output = types_pb2.OutputOptions(sampling=sampling, logprob=True, sampled_logprob=True)
    request = pb.DecodeRequest(cache_id=cache, token_id=3, output=output)
    answer = tiny_gateway.stub.Decode(request, timeout=TIMEOUT_S).output
    logits = hf_logits(tiny_model, [*PROMPT, 3])[-1].double()
    best = logits.topk(5)
    at = best.indices.tolist().index(answer.token_id)
    assert answer.sampled_logprob == pytest.approx(
        torch.log_softmax(best.values / 0.7, -1)[at].item(), abs=1e-4
    )
    assert answer.logprob == pytest.approx(torch.log_softmax(logits, -1)[answer.token_id].item(), abs=1e-4)
    greedy = pb.DecodeRequest(
        cache_id=cache, token_id=4, output=types_pb2.OutputOptions(sampled_logprob=True)
    )
    assert math.isclose(tiny_gateway.stub.Decode(greedy, timeout=TIMEOUT_S).output.sampled_logprob, 0.0)


def test_penalties_count_from_where_they_are_told(tiny_gateway: GatewayProcess, cache: str) -> None:
    """Extending a cache moves what they count from; a position of one's own stays."""
    said = pb.PrefillRequest(cache_id=cache, token_ids=[31, 32, 33])
    tiny_gateway.stub.Prefill(said, timeout=TIMEOUT_S)

    def bias_of(token_id: int, penalty_from: int | None) -> float:
        """How much less likely a token is than without a penalty."""
        logprobs = []
        for penalty in (2.0, 0.0):
            sampling = types_pb2.SamplingParams(
                temperature=1.0, presence_penalty=penalty, penalty_from=penalty_from
            )
            allowed = types_pb2.TokenMask(allowed=types_pb2.TokenIds(ids=[token_id, 49]))
            output = types_pb2.OutputOptions(sampling=sampling, mask=allowed, sampled_logprob=True)
            request = pb.DecodeRequest(cache_id=cache, token_id=40, position=7, output=output)
            answer = tiny_gateway.stub.Decode(request, timeout=TIMEOUT_S).output
            mine = answer.sampled_logprob
            logprobs.append(mine if answer.token_id == token_id else math.log1p(-math.exp(mine)))
            tiny_gateway.stub.TruncateKV(pb.TruncateKVRequest(cache_id=cache, new_len=7), timeout=TIMEOUT_S)
        return logprobs[0] - logprobs[1]

    assert bias_of(32, None) == pytest.approx(0.0, abs=1e-5), "it is of the last Prefill"
    assert bias_of(32, 4) < -1e-3
    assert bias_of(PROMPT[0], 4) == pytest.approx(0.0, abs=1e-5)
    assert bias_of(PROMPT[0], 0) < -1e-3
