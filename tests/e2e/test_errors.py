"""Each way a call can fail: its code, its reason, the field at fault; and that nothing is left behind."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import grpc
import psutil
import pytest
from google.protobuf import text_format
from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc_status import rpc_status
from quire.v1 import executor_pb2 as pb
from quire.v1 import types_pb2 as types

from tests.e2e.error_cases import ABOUT, CASES, INVALID, MAX_RESPONSE_BYTES, PROMPT, VOCAB, Case
from tests.gateway_process import GatewayProcess

PAGES, PAGE_TOKENS = 64, 16
MAX_DETAIL_BYTES = 4096
TIMEOUT_S = 30.0
WITH_LOGPROB = types.OutputOptions(logprob=True)


@dataclass(frozen=True)
class Refusal:
    """What a client reads from a failure."""

    code: int
    reason: str
    fields: tuple[str, ...]
    metadata: dict[str, str]
    retry_delay_s: float | None


def read_status(status: status_pb2.Status) -> Refusal:
    """Reads a status, and checks what all of ours have in common."""
    assert status.ByteSize() < MAX_DETAIL_BYTES
    info, retry = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo()
    request = error_details_pb2.BadRequest()
    for detail in status.details:
        assert sum(detail.Unpack(message) for message in (info, retry, request)) == 1
    assert info.domain == "quire" and status.message
    assert info.metadata.pop("request_id")
    assert bool(request.field_violations) == (status.code == INVALID)
    delay_s = retry.retry_delay.ToNanoseconds() / 1e9
    return Refusal(
        code=status.code,
        reason=info.reason,
        fields=tuple(violation.field for violation in request.field_violations),
        metadata=dict(info.metadata),
        retry_delay_s=delay_s if retry.HasField("retry_delay") else None,
    )


def refusal(call: Callable[..., Any], request: Any) -> Refusal:
    with pytest.raises(grpc.RpcError) as caught:
        call(request, timeout=TIMEOUT_S)
    error: Any = caught.value
    status = rpc_status.from_call(error)
    assert status is not None
    return read_status(status)


def holdings(gateway: GatewayProcess) -> list[tuple[int, int, int]]:
    """What the sequences of each worker hold, with the pools' invariants checked."""
    workers = gateway.pools()
    assert all(worker.pool_intact for worker in workers)
    pools = [worker.pool for worker in workers]
    for pool in pools:
        assert pool.pages_free + pool.pages_cached + pool.pages_referenced == pool.pages_total
    return [(pool.sequences, pool.tokens, pool.pages_referenced) for pool in pools]


@pytest.fixture(scope="module")
def cache(weightless_gateway: GatewayProcess) -> Iterator[str]:
    """A cache that holds PROMPT."""
    cache_id = weightless_gateway.prefill(PROMPT).kv_cache.cache_id
    yield cache_id
    weightless_gateway.release(cache_id)
    weightless_gateway.assert_pools_are_whole()


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_failed_call_says_why_and_leaves_nothing_behind(
    weightless_gateway: GatewayProcess, cache: str, case: Case
) -> None:
    before = holdings(weightless_gateway)

    refused = refusal(getattr(weightless_gateway.stub, case.rpc), case.request(cache))

    assert (refused.code, refused.reason) == (case.code, case.reason)
    assert refused.fields == ((case.at,) if case.at else ())
    assert refused.metadata == case.metadata
    assert refused.retry_delay_s is None  # The same call would fail again.
    assert holdings(weightless_gateway) == before
    (handle,) = weightless_gateway.stub.ListCaches(pb.ListCachesRequest(), timeout=TIMEOUT_S).kv_caches
    assert (handle.cache_id, handle.seq_len) == (cache, len(PROMPT))


# Batches.

GOOD_PROMPTS = ([5, 6, 7], list(range(100, 140)))


# Of each batch call: the single call that an item stands for, and the item's message.
BATCHES = {
    "BatchPrefill": ("Prefill", "PrefillRequest"),
    "BatchDecode": ("Decode", "DecodeRequest"),
    "UnifiedForward": ("Prefill", "UnifiedForwardItem"),
}


def good_items(gateway: GatewayProcess, rpc: str) -> list[Any]:
    """Two items that succeed. Those of a decode are about caches of their own, on either worker."""
    if rpc == "BatchPrefill":
        return [pb.PrefillRequest(token_ids=tokens, output=WITH_LOGPROB) for tokens in GOOD_PROMPTS]
    if rpc == "UnifiedForward":
        return [pb.UnifiedForwardItem(token_ids=tokens, output=WITH_LOGPROB) for tokens in GOOD_PROMPTS]
    ids = [gateway.prefill(tokens[:-1]).kv_cache.cache_id for tokens in GOOD_PROMPTS]
    return [
        pb.DecodeRequest(cache_id=cache_id, token_id=tokens[-1], output=WITH_LOGPROB)
        for cache_id, tokens in zip(ids, GOOD_PROMPTS, strict=True)
    ]


def run_batch(gateway: GatewayProcess, rpc: str, bad: list[Any]) -> tuple[list[Any], list[Any]]:
    """Runs bad items among two good ones, whose caches it releases. The good and the bad results."""
    first, last = good_items(gateway, rpc)
    request = getattr(pb, f"{rpc}Request")(items=[first, *bad, last])
    results = list(getattr(gateway.stub, rpc)(request, timeout=TIMEOUT_S).results)
    assert len(results) == len(bad) + 2
    good = [results[0], results[-1]]
    for result in good:
        assert result.WhichOneof("result") == "response", result
        assert gateway.release(result.response.kv_cache.cache_id)
    return good, results[1:-1]


def assert_same(good: list[Any], expected: list[Any]) -> None:
    for result, other in zip(good, expected, strict=True):
        assert result.response.kv_cache.seq_len == other.response.kv_cache.seq_len
        assert result.response.output.token_id == other.response.output.token_id
        # Batches of other sizes add in another order.
        assert result.response.output.logprob == pytest.approx(other.response.output.logprob, abs=1e-5)


@pytest.mark.parametrize("rpc", BATCHES)
def test_no_bad_item_hurts_the_others(weightless_gateway: GatewayProcess, cache: str, rpc: str) -> None:
    single, message = BATCHES[rpc]
    before = holdings(weightless_gateway)
    expected, _ = run_batch(weightless_gateway, rpc, [])
    tried = 0
    for case in (case for case in CASES if case.rpc == single):
        try:
            item = case.parsed(message, cache)
        except text_format.ParseError:
            # An item of a UnifiedForward has not all fields of a Prefill.
            continue
        tried += 1
        good, (bad,) = run_batch(weightless_gateway, rpc, [item])

        assert_same(good, expected)
        refused = read_status(bad.error)
        assert (refused.code, refused.reason) == (case.code, case.reason), str(case)
        assert refused.fields == ((f"items[1].{case.at}",) if case.at else ()), str(case)
        assert (refused.metadata, refused.retry_delay_s) == (case.metadata, None)
    assert tried > 10 and holdings(weightless_gateway) == before


@pytest.mark.parametrize("rpc", BATCHES)
def test_a_cache_that_occurs_twice_fails_alone(
    weightless_gateway: GatewayProcess, cache: str, rpc: str
) -> None:
    expected, _ = run_batch(weightless_gateway, rpc, [])
    single, message = BATCHES[rpc]
    twice = Case(single, ABOUT[single].replace("POSITION", ""), "").parsed(message, cache)

    good, bad = run_batch(weightless_gateway, rpc, [twice, twice])

    assert_same(good, expected)
    for index, result in enumerate(bad, start=1):
        refused = read_status(result.error)
        assert (refused.code, refused.reason) == (INVALID, "DUPLICATE_CACHE_IN_BATCH")
        assert refused.fields == (f"items[{index}].cache_id",)


# Failures that depend on what else is held or runs.


def test_the_largest_answer_that_is_not_refused_arrives(weightless_gateway: GatewayProcess) -> None:
    stub = weightless_gateway.stub
    output = types.OutputOptions(logits=types.DATA_TYPE_F32, top_logprobs=3, logprob=True)
    rows = MAX_RESPONSE_BYTES // (4 * VOCAB)
    answer = None
    while answer is None:
        request = pb.ForwardRequest(token_ids=[1] * rows, output=output)
        try:
            answer = stub.Forward(request, timeout=TIMEOUT_S)
        except grpc.RpcError:
            assert refusal(stub.Forward, request).reason == "OUTPUT_TOO_LARGE"
            rows -= 1
    # Nearly all of the bound can be used.
    assert len(answer.outputs) == rows and answer.ByteSize() > 0.9 * MAX_RESPONSE_BYTES


def test_a_full_queue_and_a_drain_refuse_new_calls_and_finish_the_others() -> None:
    # A stopped worker holds its operation in flight for as long as it is needed.
    flags = ["--kv-pages", "8", "--max-queued-operations", "1", "--heartbeat-timeout-s", "600"]
    request = pb.PrefillRequest(token_ids=[1, 2, 3])
    with GatewayProcess(model="paged-attention", flags=flags) as gateway:
        batch = pb.BatchPrefillRequest(items=[request, request])
        first, second = gateway.stub.BatchPrefill(batch, timeout=TIMEOUT_S).results
        assert first.WhichOneof("result") == "response"
        refused = read_status(second.error)
        assert (refused.code, refused.reason) == (code_pb2.RESOURCE_EXHAUSTED, "QUEUE_FULL")
        assert refused.metadata == {"limit": "1"} and refused.retry_delay_s is not None

        worker = psutil.Process(gateway.status().workers[0].pid)
        worker.suspend()
        try:
            running = gateway.stub.Prefill.future(request, timeout=TIMEOUT_S)
            gateway.wait_until_in_flight(1)
            assert refusal(gateway.stub.Prefill, request).reason == "QUEUE_FULL"
            gateway.process.send_signal(signal.SIGTERM)
            while (refused := refusal(gateway.stub.Prefill, request)).reason == "QUEUE_FULL":
                pass
            assert (refused.code, refused.reason) == (code_pb2.UNAVAILABLE, "DRAINING")
            assert refused.retry_delay_s is not None
        finally:
            worker.resume()
        assert running.result().kv_cache.seq_len == 3
        assert gateway.process.wait(TIMEOUT_S) == 0
