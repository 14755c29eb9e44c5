"""Bytes that no client of ours would send. Whatever comes, the same processes go on and nothing is left."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from google.protobuf import descriptor, message_factory
from google.protobuf.message import DecodeError, Message
from google.rpc import code_pb2
from grpc_status import rpc_status
from quire import errors
from quire.v1 import executor_pb2 as pb
from quire.v1 import types_pb2 as types

from tests.e2e.unharmed import TIMEOUT_S, release_all, unharmed
from tests.gateway_process import GatewayProcess

SERVICE = pb.DESCRIPTOR.services_by_name["ModelExecutorService"]
METHODS: dict[str, descriptor.MethodDescriptor] = {method.name: method for method in SERVICE.methods}
OTHERS = (
    "/grpc.health.v1.Health/Check",
    "/grpc.health.v1.Health/Watch",
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
)
MAX_REQUEST_BYTES = 262_144
# What a request that makes sense, or almost does, can be answered with.
ORDINARY = {
    code_pb2.OK,
    code_pb2.INVALID_ARGUMENT,
    code_pb2.NOT_FOUND,
    code_pb2.FAILED_PRECONDITION,
    code_pb2.OUT_OF_RANGE,
    code_pb2.RESOURCE_EXHAUSTED,
}


@pytest.fixture(autouse=True)
def gateway_goes_on(weightless_gateway: GatewayProcess) -> Iterator[None]:
    with unharmed(weightless_gateway):
        yield


def send(gateway: GatewayProcess, path: str, data: bytes, **options: Any) -> tuple[int, bytes, str]:
    """Calls a method with bytes. The status code; the answer's bytes, or the reason of the failure."""
    assert gateway.channel is not None
    method: Any = gateway.channel.unary_unary(path)
    try:
        return code_pb2.OK, method(data, timeout=TIMEOUT_S, **options), ""
    except grpc.RpcError as error:
        failed: Any = error
        if (status := rpc_status.from_call(failed)) is not None:
            return status.code, b"", errors.from_status(status).reason
        return failed.code().value[0], b"", ""


def send_to(gateway: GatewayProcess, rpc: str, data: bytes, **options: Any) -> tuple[int, bytes, str]:
    return send(gateway, f"/{SERVICE.full_name}/{rpc}", data, **options)


def is_message(rpc: str, data: bytes) -> bool:
    try:
        message_factory.GetMessageClass(METHODS[rpc].input_type).FromString(data)
    except DecodeError:
        return False
    return True


def test_bytes_that_are_no_message_are_refused_as_such(weightless_gateway: GatewayProcess) -> None:
    for rpc in METHODS:
        for data in (b"\xff", b"\x0a\x05abc", b"\x0a\x02\xff"):
            code, _, reason = send_to(weightless_gateway, rpc, data)
            assert (code, reason) == (code_pb2.INVALID_ARGUMENT, "MALFORMED_REQUEST"), rpc


def test_random_bytes_do_not_hurt_other_services(weightless_gateway: GatewayProcess) -> None:
    assert weightless_gateway.channel is not None
    rng = random.Random("other services")
    for path in OTHERS:
        method: Any = weightless_gateway.channel.stream_stream(path)
        for size in (0, 1, 5, 300):
            call = method(iter([b"\xff" + rng.randbytes(size)]), timeout=TIMEOUT_S)
            with pytest.raises(grpc.RpcError):
                list(call)
            assert call.code() is not grpc.StatusCode.DEADLINE_EXCEEDED


# Requests that make sense, and what becomes of them when their bytes are changed.


def sensible_requests(cache_id: str) -> dict[str, list[Message]]:
    output = types.OutputOptions(
        logits=types.DATA_TYPE_BF16,
        top_logprobs=3,
        logprob_token_ids=[1, 2],
        sampling=types.SamplingParams(temperature=0.7, top_k=5, top_p=0.9, logit_bias={3: 1.0}, seed=7),
        mask=types.TokenMask(allowed=types.TokenIds(ids=range(50))),
    )
    prefill = pb.PrefillRequest(token_ids=range(40), output=output, request_id="mutated")
    prefill.lease.seconds = 60
    decode = pb.DecodeRequest(cache_id=cache_id, token_id=5, output=output)
    item = pb.UnifiedForwardItem(cache_id=cache_id, token_ids=[1, 2], is_final_chunk=False)
    return {
        "Prefill": [prefill, pb.PrefillRequest(cache_id=cache_id, token_ids=[9, 8])],
        "Decode": [decode],
        "ForwardVerify": [
            pb.ForwardVerifyRequest(cache_id=cache_id, token_ids=[1, 2, 3], accept="VERIFY_ACCEPT_GREEDY")
        ],
        "Forward": [pb.ForwardRequest(token_ids=range(20), output=output)],
        "BatchPrefill": [pb.BatchPrefillRequest(items=[prefill, pb.PrefillRequest(token_ids=[1])])],
        "BatchDecode": [pb.BatchDecodeRequest(items=[decode, pb.DecodeRequest(cache_id="kv_x")])],
        "UnifiedForward": [pb.UnifiedForwardRequest(items=[item, pb.UnifiedForwardItem(token_ids=[3])])],
        "ForkCache": [pb.ForkCacheRequest(cache_id=cache_id, count=2, release=["kv_x"])],
        "TruncateKV": [pb.TruncateKVRequest(cache_id=cache_id, new_len=2)],
        "RenewCache": [pb.RenewCacheRequest(cache_id=cache_id)],
        "ReleaseCache": [pb.ReleaseCacheRequest(cache_id="kv_x")],
        "ListCaches": [pb.ListCachesRequest(page_size=3, page_token="1")],
        "GetCacheMetrics": [pb.GetCacheMetricsRequest(check_integrity=True)],
    }


def mutated(data: bytes, rng: random.Random) -> bytes:
    """Some bytes changed, removed, doubled or inserted."""
    changed = bytearray(data)
    for _ in range(rng.randrange(1, 5)):
        at = rng.randrange(len(changed) + 1)
        match rng.randrange(4):
            case 0 if at < len(changed):
                changed[at] = rng.randrange(256)
            case 1:
                del changed[at : at + rng.randrange(4)]
            case 2:
                changed[at:at] = changed[at : at + rng.randrange(30)]
            case _:
                changed[at:at] = rng.choice((b"\x00", b"\x80", b"\xff\xff\xff\xff\x0f", b"\x01\x01", b"\x7f"))
    return bytes(changed)


def item_codes(rpc: str, answer: bytes) -> set[int]:
    """The codes of a batch's items."""
    message: Any = message_factory.GetMessageClass(METHODS[rpc].output_type).FromString(answer)
    results = getattr(message, "results", ())
    return {result.error.code if result.HasField("error") else code_pb2.OK for result in results}


def test_requests_with_changed_bytes_get_ordinary_answers(weightless_gateway: GatewayProcess) -> None:
    rng = random.Random("changed bytes")
    seen: set[int] = set()
    for _ in range(15):
        cache_id = weightless_gateway.prefill(range(20)).kv_cache.cache_id
        for rpc, requests in sensible_requests(cache_id).items():
            for request in requests * 3:
                data = mutated(request.SerializeToString(), rng)

                code, answer, reason = send_to(weightless_gateway, rpc, data)

                assert code in ORDINARY, (rpc, data, code)
                assert is_message(rpc, data) == (reason != "MALFORMED_REQUEST")
                assert item_codes(rpc, answer) <= ORDINARY, (rpc, data)
                seen.add(code)
        release_all(weightless_gateway)
    # Most of what can happen did.
    assert seen >= {code_pb2.OK, code_pb2.INVALID_ARGUMENT, code_pb2.NOT_FOUND}


def unknown_field(size: int) -> bytes:
    """A field that no request of ours has, number 999, of `size` bytes in all."""
    header_bytes = 7
    length = size - header_bytes
    # Five bytes hold any length; a parser takes those that are not needed, too.
    varint = bytes(length >> 7 * place & 0x7F | (0x80 if place < 4 else 0) for place in range(5))
    return b"\xba\x3e" + varint + b"x" * length


def test_unknown_fields_are_ignored(weightless_gateway: GatewayProcess) -> None:
    for rpc, requests in sensible_requests("kv_x").items():
        for request in requests:
            data = request.SerializeToString()
            plain, extended = (
                send_to(weightless_gateway, rpc, sent) for sent in (data, data + unknown_field(40))
            )
            assert (plain[0], plain[2]) == (extended[0], extended[2]), rpc


def test_a_request_may_be_as_large_as_the_bound_and_no_larger(weightless_gateway: GatewayProcess) -> None:
    request = pb.PrefillRequest(token_ids=[1, 2, 3]).SerializeToString()
    for size in (MAX_REQUEST_BYTES, MAX_REQUEST_BYTES + 1):
        data = request + unknown_field(size - len(request))
        assert len(data) == size
        code, _, _ = send_to(weightless_gateway, "Prefill", data)
        assert code == (code_pb2.OK if size == MAX_REQUEST_BYTES else code_pb2.RESOURCE_EXHAUSTED)


@pytest.mark.parametrize("compression", [grpc.Compression.Gzip, grpc.Compression.Deflate])
def test_compressed_messages_are_not_unpacked(
    weightless_gateway: GatewayProcess, compression: grpc.Compression
) -> None:
    """Before, those of a few kilobytes that unpack to the largest allowed held all callers up for seconds."""
    data = unknown_field(MAX_REQUEST_BYTES - 8)
    code, _, _ = send(weightless_gateway, OTHERS[0], data, compression=compression)
    assert code == code_pb2.UNIMPLEMENTED


def test_unknown_methods_are_said_to_be(weightless_gateway: GatewayProcess) -> None:
    for path in ("/quire.v1.ModelExecutorService/Nothing", "/quire.v1.WorkerService/Connect", "/", "/a/b/c"):
        assert send(weightless_gateway, path, b"\x08\x01")[0] == code_pb2.UNIMPLEMENTED, path


ODD_METADATA: tuple[list[tuple[str, str | bytes]], ...] = (
    [("x-request-id", "")],
    [("x-request-id", "a"), ("x-request-id", "b")],
    [("x-request-id", " {}\"'%n ")],
    [("x-request-id", "r" * 4000)],
    [("x-request-id-bin", b"\xff\x00")],
    [("x-noise-bin", bytes(range(256)) * 8)],
    [(f"x-many-{n}", "v") for n in range(100)],
)


def test_odd_metadata_is_taken(weightless_gateway: GatewayProcess) -> None:
    for metadata in ODD_METADATA:
        assert send_to(weightless_gateway, "GetStatus", b"", metadata=metadata)[0] == code_pb2.OK
        code, _, reason = send_to(weightless_gateway, "Decode", b"", metadata=metadata)
        assert (code, reason) == (code_pb2.INVALID_ARGUMENT, "EMPTY_CACHE_ID")
