"""What the clients send again when an answer is lost: only what cannot be applied twice.

Each call fails once after it was applied, against a fake server that applies as the real one does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grpc
import pytest
from google.protobuf.message import Message
from quire import Cache, Client, Unavailable, _methods
from quire._methods import Method
from quire.v1 import admin_pb2, executor_pb2, types_pb2

from tests.fake_executor import FakeExecutor, rich_status

LOST = rich_status(grpc.StatusCode.UNAVAILABLE, "", "the connection was lost")
METHODS = [found for found in vars(_methods).values() if isinstance(found, Method)]

# Of each call, what makes it: with a client, and a cache of the tokens 1, 2, 3.
MADE_BY: dict[str, Callable[[Client, Cache], Any]] = {
    "Prefill": lambda client, _: client.prefill([7]),
    "BatchPrefill": lambda client, _: client.batch_prefill([[7], [8]]),
    "Decode": lambda _, cache: cache.decode(4),
    "BatchDecode": lambda client, cache: client.batch_decode([(cache, 4)]),
    "ForwardVerify": lambda _, cache: cache.verify([4, 5]),
    "Forward": lambda client, _: client.forward([7]),
    "BatchForward": lambda client, _: client.score_batch([[7]]),
    "ForkCache": lambda _, cache: cache.fork(2),
    "ForkCaches": lambda client, cache: client.fork_caches([(cache, 2)]),
    "TruncateKV": lambda _, cache: cache.truncate(1),
    "ReleaseCache": lambda _, cache: cache.release(),
    "RenewCache": lambda _, cache: cache.renew(),
    "UnifiedForward": lambda client, cache: client.unified_forward(
        [executor_pb2.UnifiedForwardItem(cache_id=cache.cache_id, token_ids=[4], position=3)]
    ),
    "ListCaches": lambda client, _: client.list_caches(),
    "GetCapabilities": lambda client, _: client.capabilities(),
    "GetCacheMetrics": lambda client, _: client.cache_metrics(),
    "GetLoraMetrics": lambda client, _: client.lora_metrics(),
    "ListRuntimes": lambda client, _: client.list_runtimes(),
    "Embed": lambda client, _: client.embed([[1, 2]]),
    "EstimateCost": lambda client, _: client.estimate_cost([1], max_tokens=2),
    "RebuildSession": lambda client, _: client.rebuild_session(),
    "Warmup": lambda client, _: client.warmup(),
    "Drain": lambda client, _: client.drain(),
    "Shutdown": lambda client, _: client.shutdown(),
    "GetModelInfo": lambda client, _: client.model_info(),
    "GetStatus": lambda client, _: client.status(),
    "CancelExecution": lambda client, _: client.cancel_execution("id"),
    "UnloadAdapter": lambda client, _: client.unload_adapter("sql"),
    "ListAdapters": lambda client, _: client.list_adapters(),
}

# Requests that nothing fences, and that would be applied twice.
UNFENCED: dict[str, Message] = {
    "RebuildSession": admin_pb2.RebuildSessionRequest(),
    "Drain": admin_pb2.DrainRequest(),
    "Shutdown": admin_pb2.ShutdownRequest(),
    "UnifiedForward": executor_pb2.UnifiedForwardRequest(
        items=[executor_pb2.UnifiedForwardItem(token_ids=[7], position=0)]
    ),
    "Prefill": executor_pb2.PrefillRequest(token_ids=[7]),
    "extending Prefill": executor_pb2.PrefillRequest(cache_id="cache-0", token_ids=[7], request_id="r"),
    "BatchPrefill": executor_pb2.BatchPrefillRequest(
        items=[
            executor_pb2.PrefillRequest(token_ids=[7], request_id="r"),
            executor_pb2.PrefillRequest(token_ids=[8]),
        ]
    ),
    "Decode": executor_pb2.DecodeRequest(cache_id="cache-0", token_id=7),
    "BatchDecode": executor_pb2.BatchDecodeRequest(
        items=[executor_pb2.DecodeRequest(cache_id="cache-0", token_id=7)]
    ),
    "ForwardVerify": executor_pb2.ForwardVerifyRequest(
        cache_id="cache-0", token_ids=[7], accept=types_pb2.VERIFY_ACCEPT_ALL
    ),
    "ForkCache": executor_pb2.ForkCacheRequest(cache_id="cache-0", count=1),
    "ForkCaches": executor_pb2.ForkCachesRequest(
        forks=[executor_pb2.ForkSource(cache_id="cache-0", count=1, position=3)]
    ),
}


def test_every_call_is_tried_here() -> None:
    assert set(MADE_BY) == {method.rpc for method in METHODS}


@pytest.mark.parametrize("rpc", sorted(set(MADE_BY) - {"RebuildSession", "Drain", "Shutdown"}))
def test_what_was_applied_is_answered_and_not_applied_again(
    rpc: str, target: str, executor: FakeExecutor
) -> None:
    with Client(target, timeout_s=20) as client:
        client.prefill([9])
        cache = client.prefill([1, 2, 3])
        before = len(executor.calls[rpc])
        executor.fail(rpc, LOST, applied=True)
        MADE_BY[rpc](client, cache)
        first, second = executor.calls[rpc][before:]
        assert first == second
        after_loss = {id_: list(tokens) for id_, tokens in executor.caches.items()}
        # The same on a cache of its own, without a loss.
        executor.caches.clear()
        executor._prompt_len.clear()
        client.prefill([9])
        MADE_BY[rpc](client, client.prefill([1, 2, 3]))
        assert sorted(executor.caches.values()) == sorted(after_loss.values())


@pytest.mark.parametrize("name", UNFENCED)
def test_what_nothing_fences_is_sent_once(name: str, target: str, executor: FakeExecutor) -> None:
    rpc = name.rpartition(" ")[2]
    method: Method[Any, Any] = next(method for method in METHODS if method.rpc == rpc)
    with Client(target, timeout_s=20) as client:
        client.prefill([1, 2, 3])
        before = len(executor.calls[rpc])
        executor.fail(rpc, LOST, applied=True)
        with pytest.raises(Unavailable):
            client._call(method, UNFENCED[name])
        assert len(executor.calls[rpc]) == before + 1


def test_a_client_without_retries_sends_nothing_twice(target: str, executor: FakeExecutor) -> None:
    with Client(target, timeout_s=20, retries=False) as client:
        cache = client.prefill([1, 2, 3])
        for rpc, make in MADE_BY.items():
            before = len(executor.calls[rpc])
            executor.fail(rpc, LOST)
            with pytest.raises(Unavailable):
                make(client, cache)
            assert len(executor.calls[rpc]) == before + 1


def test_calls_of_the_stub_are_sent_once(target: str, executor: FakeExecutor) -> None:
    with Client(target, timeout_s=20) as client:
        client.prefill([1, 2, 3])
        for rpc, request in (
            ("Decode", executor_pb2.DecodeRequest(cache_id="cache-0", token_id=7)),
            ("GetStatus", executor_pb2.GetStatusRequest()),
        ):
            executor.fail(rpc, LOST, applied=True)
            with pytest.raises(grpc.RpcError):
                getattr(client.stub, rpc)(request)
            assert len(executor.calls[rpc]) == 1
    assert executor.caches["cache-0"] == [1, 2, 3, 7]


@pytest.mark.parametrize("timeout_s", [60, None])
def test_the_server_says_how_long_to_wait_and_the_limit_whether_to(
    timeout_s: float | None, target: str, executor: FakeExecutor
) -> None:
    later = rich_status(grpc.StatusCode.UNAVAILABLE, "NO_WORKER", retry_delay_s=600)
    with Client(target, timeout_s=timeout_s) as client:
        executor.fail("GetStatus", later)
        with pytest.raises(Unavailable, match="NO_WORKER"):
            client.status()
    assert len(executor.calls["GetStatus"]) == 1, "nobody waits for ten minutes, limit or not"


def test_a_client_that_was_closed_meanwhile_says_what_failed(
    target: str, executor: FakeExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = Client(target, timeout_s=20)
    monkeypatch.setattr("quire.client.time.sleep", lambda _: client.close())
    executor.fail("GetStatus", LOST)
    with pytest.raises(Unavailable, match="the connection was lost"):
        client.status()
    assert len(executor.calls["GetStatus"]) == 1
