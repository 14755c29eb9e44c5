"""sample_seeds of a real server: draws that can be had again."""

from __future__ import annotations

from typing import Any

import pytest
from quire.v1 import executor_pb2 as pb
from quire.v1 import types_pb2 as types

from tests.gateway_process import GatewayProcess

TIMEOUT_S = 60
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
SEEDS = [*range(12), 2**64 - 1]


@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_samples_are_what_copies_with_these_seeds_draw(
    tiny_gateway: GatewayProcess, temperature: float
) -> None:
    def output(seed: int) -> types.OutputOptions:
        sampling = types.SamplingParams(temperature=temperature, top_p=0.95, seed=seed)
        allowed = types.TokenMask(allowed=types.TokenIds(ids=range(0, 90, 2)))
        return types.OutputOptions(sampling=sampling, logprob=True, sampled_logprob=True, mask=allowed)

    request: Any = {"output": output(5), "sample_seeds": SEEDS, "request_id": f"samples-{temperature}"}
    drawn = tiny_gateway.prefill(PROMPT, **request)
    parent = tiny_gateway.prefill(PROMPT[:-1]).kv_cache.cache_id
    copies = [handle.cache_id for handle in tiny_gateway.fork(parent, len(SEEDS))]
    items = [
        pb.DecodeRequest(cache_id=copy, token_id=PROMPT[-1], output=output(seed))
        for copy, seed in zip(copies, SEEDS, strict=True)
    ]
    results = tiny_gateway.stub.BatchDecode(pb.BatchDecodeRequest(items=items), timeout=TIMEOUT_S).results
    outputs = [result.response.output for result in results]

    assert [sample.token_id for sample in drawn.samples] == [one.token_id for one in outputs]
    assert drawn.samples[5].token_id == drawn.output.token_id, "the row's own seed is one of them"
    assert len({sample.token_id for sample in drawn.samples}) > (1 if temperature else 0)
    for sample, one in zip(drawn.samples, outputs, strict=True):
        assert sample.logprob == pytest.approx(one.logprob, abs=1e-4)
        assert sample.sampled_logprob == pytest.approx(one.sampled_logprob, abs=1e-4)
    again = tiny_gateway.prefill(PROMPT, **request)
    assert again.kv_cache.cache_id == drawn.kv_cache.cache_id and again.samples == drawn.samples
    fewer = tiny_gateway.prefill(PROMPT, **{**request, "sample_seeds": SEEDS[3:5]})
    assert list(fewer.samples) == list(drawn.samples[3:5]), "other seeds are drawn for, too"
    for cache_id in (parent, *copies, drawn.kv_cache.cache_id):
        tiny_gateway.release(cache_id)
    tiny_gateway.assert_pools_are_whole()
