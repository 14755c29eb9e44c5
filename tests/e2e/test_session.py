"""The Session stream: the unary calls' answers, many at once, and what a bad caller gets."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from typing import Self

import grpc
import pytest
from google.protobuf import duration_pb2
from quire.v1 import executor_pb2 as pb
from quire.v1 import executor_pb2_grpc, types_pb2

from tests import undisturbed
from tests.e2e.unharmed import release_all
from tests.error_details import reason_of, status_info, status_reason
from tests.gateway_process import GatewayProcess

SESSION = "/quire.v1.ModelExecutorService/Session"
PROMPT = list(range(20))
MAX_SESSION_CALLS, FLOOD = 1024, 1500


@pytest.fixture(scope="module")
def gateway() -> Iterator[GatewayProcess]:
    flags = ["--kv-pages", "512", "--message-timeout-s", "1", "--max-response-bytes", str(12 << 20)]
    with GatewayProcess(model="paged-attention", workers=2, flags=flags) as process:
        yield process


class Lane:
    """A session, blocking: `send` calls, `take` answers."""

    def __init__(self, gateway: GatewayProcess) -> None:
        self.channel = gateway.connect()
        self._outgoing: queue.SimpleQueue[pb.SessionRequest | None] = queue.SimpleQueue()
        self.call = executor_pb2_grpc.ModelExecutorServiceStub(self.channel).Session(
            iter(self._outgoing.get, None), timeout=60
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._outgoing.put(None)
        self.call.cancel()
        self.channel.close()

    def send(self, *calls: pb.SessionCall) -> None:
        self._outgoing.put(pb.SessionRequest(calls=calls))

    def half_close(self) -> None:
        self._outgoing.put(None)

    def take(self, count: int) -> dict[int, pb.SessionResult]:
        results: dict[int, pb.SessionResult] = {}
        while len(results) < count:
            for result in next(self.call).results:
                assert result.tag not in results
                results[result.tag] = result
        return results


def end_of(lane: Lane) -> grpc.RpcError:
    with pytest.raises(grpc.RpcError) as ended:
        for _ in lane.call:
            pass
    return ended.value


def test_every_call_is_answered_as_its_unary_twin(gateway: GatewayProcess) -> None:
    with Lane(gateway) as lane:
        options = types_pb2.OutputOptions(top_logprobs=3)
        lane.send(pb.SessionCall(tag=1, prefill=pb.PrefillRequest(token_ids=PROMPT, output=options)))
        first = lane.take(1)[1].prefill
        cache_id = first.kv_cache.cache_id
        twin = gateway.prefill(PROMPT, output=options)
        # The twin finds its first page computed.
        assert first.output == twin.output and [first.output.token_id] == undisturbed.greedy(PROMPT, 1)
        # In one message, on one cache: in this order.
        lane.send(
            pb.SessionCall(tag=2, decode=pb.DecodeRequest(cache_id=cache_id, token_id=5, position=20)),
            pb.SessionCall(tag=3, truncate_kv=pb.TruncateKVRequest(cache_id=cache_id, new_len=10)),
            pb.SessionCall(tag=4, decode=pb.DecodeRequest(cache_id=cache_id, token_id=6, position=10)),
            pb.SessionCall(
                tag=5,
                forward_verify=pb.ForwardVerifyRequest(
                    cache_id=cache_id, token_ids=[1, 2], position=11, accept=types_pb2.VERIFY_ACCEPT_ALL
                ),
            ),
            pb.SessionCall(tag=6, fork_cache=pb.ForkCacheRequest(cache_id=cache_id, count=2)),
            pb.SessionCall(tag=7, forward=pb.ForwardRequest(token_ids=[1, 2, 3])),
            pb.SessionCall(tag=8, renew_cache=pb.RenewCacheRequest(cache_id=cache_id)),
            pb.SessionCall(
                tag=9, batch_prefill=pb.BatchPrefillRequest(items=[pb.PrefillRequest(token_ids=[9, 9])])
            ),
        )
        answers = lane.take(8)
        assert [answers[tag].WhichOneof("result") for tag in range(2, 10)] == [
            "decode", "truncate_kv", "decode", "forward_verify", "fork_cache", "forward", "renew_cache",
            "batch_prefill",
        ]  # fmt: skip
        assert answers[4].decode.kv_cache.seq_len == 11
        assert answers[5].forward_verify.kv_cache.seq_len == 13
        said = [answers[2].decode.output, answers[4].decode.output, *answers[5].forward_verify.outputs]
        (_, once), (_, *others) = (
            undisturbed.outputs(PROMPT[:length], tokens) for length, tokens in ((20, [5]), (10, [6, 1, 2]))
        )
        assert [output.token_id for output in said] == [output.token_id for output in (once, *others)]
        forks = [handle.cache_id for handle in answers[6].fork_cache.kv_caches]
        items = [pb.DecodeRequest(cache_id=fork, token_id=1) for fork in [*forks, "kv_unknown"]]
        lane.send(
            pb.SessionCall(tag=1, batch_decode=pb.BatchDecodeRequest(items=items)),
            pb.SessionCall(tag=2, release_cache=pb.ReleaseCacheRequest(cache_id=cache_id)),
            pb.SessionCall(tag=3, release_cache=pb.ReleaseCacheRequest(cache_id=forks[0], request_ids=["x"])),
        )
        answers = lane.take(3)
        kinds = [r.WhichOneof("result") for r in answers[1].batch_decode.results]
        assert kinds == ["response", "response", "error"]
        assert answers[2].release_cache.released
        # What they have made is not found here.
        assert answers[3].WhichOneof("result") == "error"
        lane.half_close()
        assert list(lane.call) == []
        assert lane.call.code() == grpc.StatusCode.OK
    release_all(gateway)


def calls_in_order(cache_id: str) -> list[pb.SessionCall]:
    """Everything that can be asked of a cache of 20 tokens, up to its end and past it."""
    return [
        pb.SessionCall(tag=1, decode=pb.DecodeRequest(cache_id=cache_id, token_id=5, position=20)),
        pb.SessionCall(tag=2, truncate_kv=pb.TruncateKVRequest(cache_id=cache_id, new_len=10)),
        pb.SessionCall(tag=3, renew_cache=pb.RenewCacheRequest(cache_id=cache_id)),
        pb.SessionCall(tag=4, decode=pb.DecodeRequest(cache_id=cache_id, token_id=6, position=10)),
        pb.SessionCall(tag=5, release_cache=pb.ReleaseCacheRequest(cache_id=cache_id)),
        pb.SessionCall(tag=6, release_cache=pb.ReleaseCacheRequest(cache_id=cache_id)),
        pb.SessionCall(tag=7, decode=pb.DecodeRequest(cache_id=cache_id, token_id=7)),
        pb.SessionCall(tag=8, renew_cache=pb.RenewCacheRequest(cache_id=cache_id)),
    ]


@pytest.mark.parametrize("messages", [1, 8])
def test_calls_on_a_cache_run_in_the_order_sent(gateway: GatewayProcess, messages: int) -> None:
    """Its release and renewal too, in one message or in several."""
    with Lane(gateway) as lane:
        lane.send(pb.SessionCall(tag=1, prefill=pb.PrefillRequest(token_ids=PROMPT)))
        cache_id = lane.take(1)[1].prefill.kv_cache.cache_id
        calls = calls_in_order(cache_id)
        for first in range(0, len(calls), len(calls) // messages):
            lane.send(*calls[first : first + len(calls) // messages])
        answers = lane.take(len(calls))
        assert list(answers) == list(range(1, 9)), "answered in order"
        assert answers[1].decode.kv_cache.seq_len == 21
        assert answers[2].truncate_kv.kv_cache.seq_len == 10
        assert answers[3].renew_cache.kv_cache.seq_len == 10
        assert answers[4].decode.kv_cache.seq_len == 11
        assert answers[5].release_cache.released
        assert answers[6].HasField("release_cache") and not answers[6].release_cache.released
        assert [status_reason(answers[tag].error) for tag in (7, 8)] == ["CACHE_NOT_FOUND"] * 2
        ids = [status_info(answers[tag].error).metadata["request_id"] for tag in (7, 8)]
        assert ids[0] and ids[0] == ids[1], "also of errors that are known late"
    gateway.assert_pools_are_whole()


def test_an_error_is_the_calls_own(gateway: GatewayProcess) -> None:
    score = pb.ForwardRequest(token_ids=[1])
    with Lane(gateway) as lane:
        lane.send(
            pb.SessionCall(tag=1, decode=pb.DecodeRequest(cache_id="kv_unknown", token_id=1)),
            pb.SessionCall(tag=2, prefill=pb.PrefillRequest()),
            pb.SessionCall(tag=3),
            pb.SessionCall(tag=4, forward=score, timeout=duration_pb2.Duration(nanos=-1)),
            pb.SessionCall(tag=5, forward=score, timeout=duration_pb2.Duration()),
            pb.SessionCall(tag=6, forward=score, timeout=duration_pb2.Duration(seconds=60)),
            pb.SessionCall(tag=7, forward=score),
        )
        answers = lane.take(7)
        assert [status_reason(answers[tag].error) for tag in range(1, 6)] == [
            "CACHE_NOT_FOUND",
            "EMPTY_TOKENS",
            "EMPTY_CALL",
            "BAD_TIMEOUT",
            "BAD_TIMEOUT",
        ]
        assert [answers[tag].WhichOneof("result") for tag in (6, 7)] == ["forward", "forward"]


def test_a_call_that_has_not_begun_in_its_time_is_dropped(gateway: GatewayProcess) -> None:
    """On a stream that has no deadline, and beside one that has none."""
    score = pb.ForwardRequest(token_ids=[1] * 200)
    prefill = pb.PrefillRequest(token_ids=[2] * 40)
    with Lane(gateway) as lane:
        lane.send(
            pb.SessionCall(tag=1, forward=score),
            pb.SessionCall(tag=2, prefill=prefill, timeout=duration_pb2.Duration(nanos=1)),
        )
        answers = lane.take(2)
    assert answers[1].WhichOneof("result") == "forward"
    assert status_reason(answers[2].error) == "DEADLINE_PASSED"
    gateway.assert_pools_are_whole()


def test_a_repeated_tag_ends_the_stream(gateway: GatewayProcess) -> None:
    with Lane(gateway) as lane:
        call = pb.SessionCall(tag=7, prefill=pb.PrefillRequest(token_ids=list(range(400))))
        lane.send(call, call)
        error = end_of(lane)
        assert error.code() == grpc.StatusCode.INVALID_ARGUMENT
        assert reason_of(error) == "DUPLICATE_TAG"
    gateway.assert_pools_are_whole()


def test_garbage_ends_the_stream(gateway: GatewayProcess) -> None:
    with gateway.connect() as channel:
        raw = channel.stream_stream(
            SESSION, request_serializer=lambda data: data, response_deserializer=lambda data: data
        )
        call = raw(iter([b"\xff\xff\xff\xff"]), timeout=30)
        with pytest.raises(grpc.RpcError) as ended:
            list(call)
        assert ended.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        assert reason_of(ended.value) == "MALFORMED_REQUEST"


def test_a_flood_is_read_no_faster_than_it_is_answered(gateway: GatewayProcess) -> None:
    """More calls than may be open at once: no more than the bound are held, and all are answered."""
    workers = gateway.worker_processes()
    with Lane(gateway) as lane:
        for worker in workers:
            worker.suspend()
        try:
            for tag in range(FLOOD):
                forward = pb.ForwardRequest(token_ids=[tag % 1000, 3])
                lane.send(pb.SessionCall(tag=tag, forward=forward))
            lane.half_close()
            gateway.wait_until_in_flight(MAX_SESSION_CALLS)
            assert gateway.status().operations_in_flight <= MAX_SESSION_CALLS
        finally:
            for worker in workers:
                worker.resume()
        assert sorted(lane.take(FLOOD)) == list(range(FLOOD))


def test_a_caller_that_does_not_read_is_cut_off_and_hurts_nobody(gateway: GatewayProcess) -> None:
    before = gateway.status().memory_bytes
    unread = 2000

    # The blocking API, which reports the server's status: grpcio's asyncio API may put INTERNAL in its place
    # while a message is being sent (grpc/grpc issue 36066).
    options = [("grpc.http2.bdp_probe", 0)]
    others = Neighbour(gateway)
    others.start()
    with grpc.insecure_channel(gateway.address, options=options) as channel:
        stub = executor_pb2_grpc.ModelExecutorServiceStub(channel)
        call = stub.Session(_rows_of_logits(unread), timeout=60)
        # Not one answer is read until the server has had enough; the status comes after what is buffered.
        gateway.wait_until(lambda: "does not read its answers" in gateway.log() and others.answered > 10)
        with pytest.raises(grpc.RpcError) as ended:
            for _ in call:
                pass
    others.stop()
    assert ended.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert reason_of(ended.value) == "SLOW_CONSUMER"
    # 2000 answers of 64 kB would be 128 MB.
    assert gateway.status().memory_bytes - before < 100 << 20
    gateway.assert_pools_are_whole()


def _rows_of_logits(count: int) -> Iterator[pb.SessionRequest]:
    output = types_pb2.OutputOptions(logits=types_pb2.DATA_TYPE_F32)
    for tag in range(count):
        request = pb.ForwardRequest(token_ids=[i % 1000 for i in range(16)], output=output)
        yield pb.SessionRequest(calls=[pb.SessionCall(tag=tag, forward=request)])


class Neighbour(threading.Thread):
    """Another caller, in a loop."""

    def __init__(self, gateway: GatewayProcess) -> None:
        super().__init__()
        self._gateway = gateway
        self._stopping = threading.Event()
        self.answered = 0

    def run(self) -> None:
        while not self._stopping.is_set():
            self._gateway.forward([1, 2])
            self.answered += 1

    def stop(self) -> None:
        self._stopping.set()
        self.join()
