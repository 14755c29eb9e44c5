"""The blocking client against a fake server: what it sends, what it remembers, what it retries."""

from __future__ import annotations

import copy
import gc
import pickle
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import pytest
from quire import (
    Cache,
    Client,
    DeadlineExceeded,
    OutputOptions,
    PositionMismatch,
    ResourceExhausted,
    SamplingParams,
    Unavailable,
    output_options,
)
from quire.v1 import executor_pb2, types_pb2

from tests.fake_executor import FakeExecutor, rich_status

UNAVAILABLE = rich_status(grpc.StatusCode.UNAVAILABLE, "WORKER_LOST", "try again")


@pytest.fixture
def client(target: str) -> Iterator[Client]:
    with Client(target, timeout_s=20) as connected:
        yield connected


def test_a_decoding_loop(client: Client, executor: FakeExecutor) -> None:
    executor.script = [7, 8, 9]
    with client.prefill([1, 2, 3]) as cache:
        seen = [cache.output.token_id]
        while len(seen) < 3:
            seen.append(cache.decode(seen[-1]).token_id)
        assert seen == [7, 8, 9]
        assert executor.caches[cache.cache_id] == [1, 2, 3, 7, 8]
        assert (cache.seq_len, cache.output.token_id) == (5, 9)
        cache.extend([5, 6])
        assert cache.seq_len == 7
    assert executor.caches == {}
    # Every step says its position.
    assert [request.position for request in executor.calls["Decode"]] == [3, 4]
    assert [request.position for request in executor.calls["Prefill"][1:]] == [5]


def test_the_cache_is_released_when_the_block_fails(client: Client, executor: FakeExecutor) -> None:
    with pytest.raises(KeyError), client.prefill([1]):
        raise KeyError
    assert executor.caches == {}
    # What failed in the block is told, not that the release failed as well.
    executor.fail("ReleaseCache", rich_status(grpc.StatusCode.INTERNAL, "INTERNAL"))
    with pytest.raises(KeyError), client.prefill([1]):
        raise KeyError


def test_several_caches_are_forked_in_one_call_that_is_safe_to_retry(
    client: Client, executor: FakeExecutor
) -> None:
    left, right = client.prefill([1, 2]), client.prefill([3])
    executor.fail("ForkCaches", UNAVAILABLE, applied=True)
    (first, second), (third,) = client.fork_caches([(left, 2), (right, 1)], release=[left])
    request, again = executor.calls["ForkCaches"]
    assert request == again and request.request_id
    sources = [(fork.cache_id, fork.count, fork.position) for fork in request.forks]
    assert sources == [(left.cache_id, 2, 2), (right.cache_id, 1, 1)]
    assert list(request.release) == [left.cache_id]
    assert len({first.cache_id, second.cache_id, third.cache_id}) == 3 and len(executor.caches) == 5
    assert (first.seq_len, third.seq_len) == (2, 1) and third.output == right.output
    first.decode(9)
    assert executor.caches[first.cache_id] == [1, 2, 9] and executor.caches[second.cache_id] == [1, 2]
    client.fork_caches([(right, 0)], request_id="mine")
    assert executor.calls["ForkCaches"][-1].request_id == "mine"


def test_only_unavailable_is_retried(client: Client, executor: FakeExecutor) -> None:
    cache = client.prefill([1])
    full = rich_status(
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        "KV_EXHAUSTED",
        metadata={"pages_needed": "2"},
        retry_delay_s=0.25,
    )
    executor.fail("Decode", full)
    with pytest.raises(ResourceExhausted) as caught:
        cache.decode(2)
    assert len(executor.calls["Decode"]) == 1
    assert (caught.value.reason, caught.value.retry_delay_s) == ("KV_EXHAUSTED", 0.25)
    assert caught.value.metadata == {"pages_needed": "2"}
    assert cache.seq_len == 1, "a failed append leaves the length as it was"


def test_retries_end(client: Client, executor: FakeExecutor) -> None:
    cache = client.prefill([1])
    full = rich_status(grpc.StatusCode.UNAVAILABLE, "JOURNAL_UNAVAILABLE", "the disk is full")
    for _ in range(10):
        executor.fail("Decode", full)
    with pytest.raises(Unavailable, match="UNAVAILABLE JOURNAL_UNAVAILABLE: the disk is full"):
        cache.decode(2)
    assert len(executor.calls["Decode"]) == 4


def test_a_text_in_place_of_tokens_is_refused_with_what_makes_tokens(client: Client) -> None:
    cache = client.prefill([1, 2, 3])
    text: Any = "hello"
    for call in (
        lambda: client.prefill(text),
        lambda: client.score(text),
        lambda: client.batch_prefill([text]),
        lambda: client.score_batch([text]),
        lambda: cache.extend(text),
        lambda: cache.verify(text),
    ):
        with pytest.raises(TypeError, match=r"not a text: tokenizer\(\)\.encode\(text\)"):
            call()


def test_no_token_and_no_length_are_no_zero(client: Client, executor: FakeExecutor) -> None:
    cache = client.prefill([1, 2, 3])
    nothing: Any = None
    for call in (
        lambda: cache.decode(nothing),
        lambda: client.batch_decode([(cache, nothing)]),
        lambda: cache.truncate(nothing),
    ):
        with pytest.raises(TypeError, match="not None"):
            call()
    assert executor.caches[cache.cache_id] == [1, 2, 3]


def test_verify_truncate_fork_renew(client: Client, executor: FakeExecutor) -> None:
    cache = client.prefill([1, 2, 3])
    verified = cache.verify([50, 51, 52, 99])
    assert (verified.accepted, cache.seq_len, cache.output.token_id) == (2, 6, 53)
    assert verified.tokens == (51, 52, 53), "the accepted drafts and the next token"
    with pytest.raises(ValueError, match="accept is one of all, greedy, sampled, speculative"):
        cache.verify([4], accept="some")  # type: ignore[arg-type]
    cache.truncate(4)
    assert cache.seq_len == 4
    # What is beyond the known length goes, whatever it is.
    cache.truncate(4)
    fenced, unfenced = executor.calls["TruncateKV"]
    assert fenced.position == 6 and not unfenced.HasField("position")
    left, right = cache.fork(2)
    left.decode(7)
    assert (left.seq_len, right.seq_len, cache.seq_len) == (5, 4, 4)
    assert executor.caches[right.cache_id] == [1, 2, 3, 50]
    cache.renew(90.5)
    assert executor.calls["RenewCache"][0].lease.ToNanoseconds() == 90_500_000_000
    assert cache.release() is True
    assert cache.release() is False


def test_options_reach_the_server(client: Client, executor: FakeExecutor) -> None:
    output = OutputOptions(sampling=SamplingParams(temperature=0.5, seed=7), top_logprobs=3)
    cache = client.prefill([1], output=output, lease_s=60, adapter_id="a", request_id="mine")
    cache.decode(2, output=output)
    request = executor.calls["Prefill"][0]
    assert (request.output, request.adapter_id, request.request_id) == (output, "a", "mine")
    assert request.lease.seconds == 60
    assert executor.calls["Decode"][0].output == output


def test_what_a_cache_was_asked_for_goes_on(client: Client, executor: FakeExecutor) -> None:
    """Before, masks and sampling settings were gone with the next call, which returned forbidden tokens."""
    first, other = output_options(temperature=0.5, allowed=[7, 8]), output_options(top_logprobs=2)

    def sent(method: str) -> OutputOptions:
        request = executor.calls[method][-1]
        output: OutputOptions = (request.items[0] if method == "BatchDecode" else request).output
        return output

    cache = client.prefill([1, 2], output=first)
    (copy,), ((other_copy,),) = cache.fork(), client.fork_caches([(cache, 1)])
    (made,) = client.batch_prefill([[1, 2]], output=first)
    assert isinstance(made, Cache)
    for each in (cache, copy, other_copy, made):
        each.decode(3)
        each.extend([3])
        each.verify([3])
        client.batch_decode([(each, 3)])
        for method in ("Decode", "Prefill", "ForwardVerify", "BatchDecode"):
            assert sent(method) == first, method
    cache.decode(3, output=other)
    assert sent("Decode") == other
    cache.decode(3)
    assert sent("Decode") == first, "what one call was given is that call's"
    client.batch_decode([(cache, 3)], output=other)
    assert sent("BatchDecode") == other
    cache.default_output = other
    cache.decode(3)
    assert sent("Decode") == other
    cache.default_output = None
    cache.decode(3)
    assert not executor.calls["Decode"][-1].HasField("output")
    # What the caller changes later is no change of the cache's.
    first.top_logprobs = 5
    copy.decode(3)
    assert sent("Decode") != first


def test_a_priority_goes_with_all_that_is_asked(target: str, executor: FakeExecutor) -> None:
    with Client(target, priority="low") as client:
        cache = client.prefill([1])
        cache.decode(2)
        cache.extend([3])
        cache.verify([4])
        client.forward([5])
        client.batch_decode([(cache, 6)])
        cache.truncate(1)
    asked = [*executor.calls["Prefill"], *executor.calls["Decode"], *executor.calls["ForwardVerify"]]
    asked += [*executor.calls["Forward"], *executor.calls["BatchDecode"][0].items]
    assert [request.priority for request in asked] == [types_pb2.PRIORITY_LOW] * 6


def test_a_call_can_have_its_own_priority(client: Client, executor: FakeExecutor) -> None:
    client.prefill([1], priority="high").decode(2, priority="low")
    asked = [*executor.calls["Prefill"], *executor.calls["Decode"]]
    assert [request.priority for request in asked] == [types_pb2.PRIORITY_HIGH, types_pb2.PRIORITY_LOW]
    for make in (lambda: Client(priority="top"), lambda: client.prefill([1], priority="top")):  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="priority is one of low, normal, high, not 'top'"):
            make()


def test_the_length_can_be_taken_over_from_the_server(client: Client, executor: FakeExecutor) -> None:
    cache = client.prefill([1, 2, 3])
    client.cache(cache.cache_id).extend([4, 5])
    with pytest.raises(PositionMismatch):
        cache.decode(9)
    assert cache.refresh() == cache.seq_len == 5
    cache.decode(9)
    assert executor.caches[cache.cache_id] == [1, 2, 3, 4, 5, 9]


def test_a_cache_that_nobody_releases_is_warned_of(client: Client) -> None:
    def forget(keep: Callable[[Cache], object]) -> list[str]:
        gc.collect()  # What other tests left.
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            keep(client.prefill([1]))
            gc.collect()
        return [str(warning.message) for warning in caught]

    (message,) = forget(lambda _: None)
    assert "of 1 tokens> was not released" in message
    assert not forget(Cache.release) and not forget(Cache.detach)
    assert not forget(lambda cache: client.cache(cache.detach()))
    assert not forget(lambda cache: [copy.release() for copy in cache.fork(2, release=[cache])])


def test_who_is_not_there_is_asked_for() -> None:
    with (
        Client("127.0.0.1:1", retries=False) as client,
        pytest.raises(Unavailable, match="is a server running"),
    ):
        client.status()


def test_time_limit(target: str, executor: FakeExecutor) -> None:
    executor.decode_delay_s = 2.0
    with Client(target) as client:
        cache = client.prefill([1])
        with pytest.raises(DeadlineExceeded):
            cache.decode(2, timeout_s=0.2)
    with Client(target, timeout_s=0.2) as client:
        cache = client.prefill([1])
        with pytest.raises(DeadlineExceeded):
            cache.decode(2)


def test_a_setting_that_does_not_exist_is_refused(client: Client, executor: FakeExecutor) -> None:
    """Without types, `timeout` in place of `timeout_s` would have no effect."""
    cache: Any = client.prefill([1])
    untyped: Any = client
    with pytest.raises(TypeError, match="temperature"):
        untyped.prefill([1], temperature=0.5)
    for call, name in ((cache.decode, "Decode"), (cache.truncate, "TruncateKV"), (cache.renew, "RenewCache")):
        with pytest.raises(TypeError, match=f"{name} has no setting timeout$"):
            call(1, timeout=3)
    with pytest.raises(TypeError, match=r"GetStatus has no setting timeout$"):
        untyped.status(timeout=3)
    session: Any = client.session()
    with session, pytest.raises(TypeError, match=r"Prefill has no setting temperature$"):
        session.prefill([1], temperature=0.5)
    assert cache.seq_len == 1 and len(executor.caches) == 1
    cache.release()


def test_a_release_that_is_refused_changes_nothing(client: Client, executor: FakeExecutor) -> None:
    cache: Any = client.prefill([1])
    with pytest.raises(TypeError, match=r"Cache\.release\(\) .*'timeout'"):
        cache.release(timeout=3)
    with pytest.raises(ValueError, match="priority is one of"):
        cache.release(priority="x")
    calls: list[tuple[int, dict[str, Any]]] = [(1, {"priority": "x"}), (-1, {})]
    for count, call in calls:
        with pytest.raises(ValueError):
            cache.fork(count, release=[cache], **call)
        with pytest.raises(ValueError):
            client.fork_caches([(cache, count)], release=[cache], **call)
    assert cache.cache_id in executor.caches
    with pytest.warns(ResourceWarning, match="was not released"):
        del cache


def test_another_process_is_told_how_to_get_a_cache(client: Client) -> None:
    with client.prefill([1]) as cache:
        for to_process in (pickle.dumps, copy.copy):
            with pytest.raises(TypeError, match=r"detach\(\)"):
                to_process(cache)
            with pytest.raises(TypeError, match="each process makes its own"):
                to_process(client)


def test_message_bounds(target: str, executor: FakeExecutor) -> None:
    executor.tokenizer_json = bytes(5 << 20)
    with Client(target) as client:
        assert client.model_info().tokenizer_json == b""
        assert len(client.model_info(include_tokenizer=True).tokenizer_json) == 5 << 20
    with Client(target, max_response_bytes=1 << 20) as client, pytest.raises(ResourceExhausted):
        client.model_info(include_tokenizer=True)
    with Client(target, max_request_bytes=1 << 10) as client, pytest.raises(ResourceExhausted):
        client.prefill([1000] * 1024)


def test_a_token_goes_with_every_call(target: str, executor: FakeExecutor) -> None:
    with Client(target, token="secret", timeout_s=20) as client:
        client.model_info()
        client.prefill([1]).decode(2)
        client.stub.GetStatus(executor_pb2.GetStatusRequest(), metadata=client.metadata)
    assert executor.authorizations == {"Bearer secret"}
    assert Client(target).metadata is None
    for wrong in ("a b", "a\n", "é"):
        with pytest.raises(ValueError, match="printable ASCII") as caught:
            Client(target, token=wrong)
        assert wrong not in str(caught.value)
