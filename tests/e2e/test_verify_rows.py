"""Verifies whose positions differ, and what tokens were drawn from, against transformers."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from quire.v1 import types_pb2

from tests.e2e.conftest import NewCache
from tests.gateway_process import GatewayProcess
from tests.model_factory import hf_greedy

PROMPT = [5, 9, 2, 40]


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
    answer = tiny_gateway.verify(
        cache,
        [first, *drafts],
        accept=types_pb2.VERIFY_ACCEPT_SPECULATIVE,
        rows=[*map(certain, drafts), types_pb2.VerifyRow()],
    )
    assert answer.accepted == right and answer.kv_cache.seq_len == len(PROMPT) + 1 + right
    said = hf_greedy(tiny_model, [*PROMPT, first, *drafts[:right]], 1)
    assert [answer.outputs[right].token_id] == said


def test_penalties_count_from_where_they_are_told(tiny_gateway: GatewayProcess, cache: str) -> None:
    """Extending a cache moves what they count from; a position of one's own stays."""
    tiny_gateway.prefill([31, 32, 33], cache_id=cache)

    def bias_of(token_id: int, penalty_from: int | None) -> float:
        """How much less likely a token is than without a penalty."""
        logprobs = []
        for penalty in (2.0, 0.0):
            sampling = types_pb2.SamplingParams(
                temperature=1.0, presence_penalty=penalty, penalty_from=penalty_from
            )
            allowed = types_pb2.TokenMask(allowed=types_pb2.TokenIds(ids=[token_id, 49]))
            output = types_pb2.OutputOptions(sampling=sampling, mask=allowed, sampled_logprob=True)
            answer = tiny_gateway.decode(cache, 40, position=7, output=output).output
            mine = answer.sampled_logprob
            logprobs.append(mine if answer.token_id == token_id else math.log1p(-math.exp(mine)))
            tiny_gateway.truncate(cache, 7)
        return logprobs[0] - logprobs[1]

    assert bias_of(32, None) == pytest.approx(0.0, abs=1e-5), "it is of the last Prefill"
    assert bias_of(32, 4) < -1e-3
    assert bias_of(PROMPT[0], 4) == pytest.approx(0.0, abs=1e-5)
    assert bias_of(PROMPT[0], 0) < -1e-3
