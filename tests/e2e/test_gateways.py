"""Several gateways behind one port: calls for the caches of another, and what a crash of one does."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from google.rpc import error_details_pb2
from quire.v1 import admin_pb2, admin_pb2_grpc, executor_pb2, runner_pb2, runner_pb2_grpc

from tests import undisturbed
from tests.e2e.several_gateways import SeveralGateways, Stub, Text
from tests.error_details import refused

# More than a page.
TOKENS = list(range(1, 21))
LENGTH = len(TOKENS)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SeveralGateways]:
    with SeveralGateways(2, tmp_path_factory.mktemp("data")) as server:
        yield server


@pytest.fixture(scope="module")
def stubs(server: SeveralGateways) -> list[Stub]:
    return server.stubs()


def new_cache(stub: Stub, tokens: list[int] = TOKENS) -> str:
    return stub.Prefill(executor_pb2.PrefillRequest(token_ids=tokens), timeout=30).kv_cache.cache_id


def test_each_gateway_answers_for_the_caches_of_both(stubs: list[Stub]) -> None:
    for home, other in (stubs, stubs[::-1]):
        cache = new_cache(home)
        decode = executor_pb2.DecodeRequest(cache_id=cache, token_id=4, position=LENGTH)
        there, again = other.Decode(decode), home.Decode(decode)
        assert there.kv_cache.seq_len == LENGTH + 1 and there.output == again.output, (
            "the same answer, and applied once"
        )
        assert [there.output.token_id] == undisturbed.greedy([*TOKENS, 4], 1)
        forked = other.ForkCache(executor_pb2.ForkCacheRequest(cache_id=cache, count=2)).kv_caches
        cut = other.TruncateKV(executor_pb2.TruncateKVRequest(cache_id=forked[0].cache_id, new_len=1))
        assert cut.kv_cache.seq_len == 1
        assert other.ReleaseCache(executor_pb2.ReleaseCacheRequest(cache_id=cache)).released
        assert not home.ReleaseCache(executor_pb2.ReleaseCacheRequest(cache_id=cache)).released


def test_a_batch_over_both_is_answered_in_order_and_item_by_item(stubs: list[Stub]) -> None:
    caches = [new_cache(stubs[index % 2], [1] * (index + 1)) for index in range(4)]
    caches.append("kv1_" + "x" * 24)
    items = [executor_pb2.DecodeRequest(cache_id=cache, token_id=4) for cache in caches]
    items[2].token_id = 1 << 31
    results = stubs[0].BatchDecode(executor_pb2.BatchDecodeRequest(items=items)).results
    assert [one.response.kv_cache.seq_len for one in results] == [2, 3, 0, 5, 0]
    bad = error_details_pb2.BadRequest()
    results[2].error.details[1].Unpack(bad)
    assert bad.field_violations[0].field == "items[2].token_id", "its index in the caller's batch"


def test_a_session_over_both_keeps_the_order_of_each_cache(stubs: list[Stub]) -> None:
    caches = [new_cache(stub) for stub in stubs]
    both = [executor_pb2.DecodeRequest(cache_id=cache, token_id=5) for cache in caches]
    batch = executor_pb2.SessionCall(tag=0, batch_decode=executor_pb2.BatchDecodeRequest(items=both))
    calls = [batch]
    for position in range(LENGTH + 1, LENGTH + 9):
        for index, cache in enumerate(caches):
            # Each is refused unless all before it are applied.
            decode = executor_pb2.DecodeRequest(cache_id=cache, token_id=5, position=position)
            calls.append(executor_pb2.SessionCall(tag=2 * position + index, decode=decode))
    results = [
        result
        for message in stubs[0].Session(iter([executor_pb2.SessionRequest(calls=calls)]), timeout=60)
        for result in message.results
    ]
    assert len(results) == len(calls) and not any(result.HasField("error") for result in results)
    expected = [output.token_id for output in undisturbed.outputs(TOKENS, [5] * 9)[2:]]
    for index in range(2):
        of_cache = sorted(
            (result.tag, result) for result in results if result.tag and result.tag % 2 == index
        )
        assert [result.decode.output.token_id for _, result in of_cache] == expected


def test_a_generation_goes_on_with_a_cache_of_either(server: SeveralGateways) -> None:
    """Before, only the gateway that has the cache could run it."""
    channels = server.channels()
    for home in channels:
        text = Text(Stub(home), TOKENS)
        for channel in (*channels, *channels):
            text.generate(channel, 3)
        text.decode(Stub(channels[0]), 2)
        text.assert_as_undisturbed()
    texts = [Text(Stub(channel), TOKENS) for channel in channels]
    items = [text.item(2) for text in texts]
    items[1].item_id = "of another"
    both = runner_pb2.ExecuteRequest(items=items)
    runner = runner_pb2_grpc.ModelRunnerServiceStub(channels[0])
    assert refused(lambda: list(runner.Execute(both, timeout=60))) == "SEVERAL_SHARDS"


def test_a_kept_generation_on_another_gateway_is_resumed_and_cancelled(server: SeveralGateways) -> None:
    home, other = server.channels()
    text = Text(Stub(home), TOKENS)
    item = text.item(10_000)
    request = runner_pb2.ExecuteRequest(items=[item], request_id="kept")
    request.keep.seconds = 60
    runners = [runner_pb2_grpc.ModelRunnerServiceStub(channel) for channel in (other, home)]
    for runner in (*runners, *runners):
        call = runner.Execute(request, timeout=60)
        for response in call:
            if response.chunks:
                text.tokens += response.chunks[0].token_ids
                break
        call.cancel()
        del request.resume_after[:]
        request.resume_after.add(item_id="x", position=len(text.tokens))
    text.assert_as_undisturbed()
    cancel = runner_pb2.CancelExecutionRequest(request_id="kept")
    assert runners[0].CancelExecution(cancel, timeout=60).cancelled
    assert not runners[0].CancelExecution(cancel, timeout=60).cancelled


def test_a_generation_on_another_gateway_ends_if_nobody_reads_it(tmp_path: Path) -> None:
    """Before, it went on, and its tokens filled the memory of the gateway that the caller had reached."""
    with SeveralGateways(2, tmp_path, ["--message-timeout-s", "1"]) as server:
        home, other = server.channels()
        text = Text(Stub(home), TOKENS)
        item = text.item(30_000)
        item.top_logprobs = 1000
        call = runner_pb2_grpc.ModelRunnerServiceStub(other).Execute(
            runner_pb2.ExecuteRequest(items=[item]), timeout=120
        )
        next(iter(call))
        server.wait_until(lambda: any(each["event"] == "call cancelled" for each in server.records()))
        (cache,) = Stub(home).ListCaches(executor_pb2.ListCachesRequest()).kv_caches
        assert cache.seq_len < item.max_tokens
        assert refused(lambda: list(call)) == "SLOW_CONSUMER"


def test_what_is_all_or_nothing_is_refused_over_both(stubs: list[Stub]) -> None:
    caches = [new_cache(stub) for stub in stubs]
    forks = [executor_pb2.ForkSource(cache_id=cache, count=1) for cache in caches]
    step = executor_pb2.ForkCachesRequest(forks=forks)
    assert refused(lambda: stubs[0].ForkCaches(step)) == "SEVERAL_SHARDS"
    beam = executor_pb2.ForkCacheRequest(cache_id=caches[0], count=1, release=[caches[1]])
    assert refused(lambda: stubs[1].ForkCache(beam)) == "SEVERAL_SHARDS"


def test_all_caches_are_listed_whoever_is_asked(stubs: list[Stub]) -> None:
    mine = {new_cache(stub) for stub in stubs for _ in range(3)}
    for stub in stubs:
        token, found = "", []
        while True:
            page = stub.ListCaches(executor_pb2.ListCachesRequest(page_size=2, page_token=token))
            found += [cache.cache_id for cache in page.kv_caches]
            if not (token := page.next_page_token):
                break
        assert len(found) == len(set(found)) and mine <= set(found)


def test_changes_of_one_gateway_are_refused(server: SeveralGateways) -> None:
    unload = admin_pb2.UnloadAdapterRequest(adapter_id="a")
    assert refused(lambda: server.admin.UnloadAdapter(unload)) == "SEVERAL_GATEWAYS"


def test_a_killed_gateway_comes_back_with_its_caches_and_its_worker(tmp_path: Path) -> None:
    with SeveralGateways(2, tmp_path, ["--orphan-grace-s", "60"]) as server:
        stubs = server.stubs()
        # Half of them call the gateway that will be killed, and half have their caches there.
        texts = [Text(stubs[index // 2], [7 * index + 1, *TOKENS]) for index in range(4)]
        was_killed = threading.Event()
        # Not as fast as they can: how long it takes to find the victim depends on the machine.
        threads = [
            threading.Thread(target=text.decode_until, args=(stubs[index % 2], was_killed, 15, 0.01))
            for index, text in enumerate(texts)
        ]
        for thread in threads:
            thread.start()
        victim = server.gateways()[0]
        server.wait_until(lambda: all(len(text.tokens) > 10 for text in texts))
        victim.kill()
        was_killed.set()
        for thread in threads:
            thread.join()
        for text in texts:
            text.assert_as_undisturbed()
        events = {record["event"] for record in server.records() if record.get("gateway") == 0}
        assert {"recovered", "worker adopted"} <= events


def test_gateways_end_with_their_parent_also_those_that_cannot_look(tmp_path: Path) -> None:
    """Such as one that recovers a long journal: its shard stayed locked, and no next server started."""
    with SeveralGateways(2, tmp_path, forks=False) as server:
        gateways = server.gateways()
        for gateway in gateways:
            gateway.suspend()
        server.kill()
        gone, _ = psutil.wait_procs(gateways, timeout=60)
        for gateway in set(gateways) - set(gone):
            gateway.kill()
        assert len(gone) == 2
    with SeveralGateways(2, tmp_path):
        pass


def test_the_number_of_gateways_is_that_of_the_data_directory(tmp_path: Path) -> None:
    with SeveralGateways(2, tmp_path):
        pass
    for count in (1, 3):
        again = SeveralGateways(count, tmp_path)
        assert again.process.wait(60) == 2
        assert "the caches in" in again.log() and "are of 2" in again.log()


def test_a_gateway_whose_journal_is_refused_says_so(tmp_path: Path) -> None:
    """Before, that another process had its address, which its parent holds for all."""
    (tmp_path / "shards" / "0").mkdir(parents=True, mode=0o700)
    (tmp_path / "shards" / "0" / "journal").write_text("no directory")
    server = SeveralGateways(2, tmp_path)
    assert server.process.wait(60) == 1
    errors = [record for record in server.records() if record["level"] == "error"]
    assert [error["event"] for error in errors] == ["cannot use the journal"], errors


def test_operators_of_all_gateways(server: SeveralGateways) -> None:
    """Of the gateway that a connection leads to: Warmup waits for its workers, and Drain replaces them."""
    admins = [admin_pb2_grpc.AdminServiceStub(server.connect()) for _ in range(8)]
    for admin in admins:
        for workers in (0, 1):
            assert admin.Warmup(admin_pb2.WarmupRequest(workers=workers), timeout=60).workers_ready == 1
        too_many = admin_pb2.WarmupRequest(workers=2)
        assert refused(lambda: admin.Warmup(too_many, timeout=60)) == "TOO_MANY_WORKERS"  # noqa: B023
        unknown = admin_pb2.DrainRequest(worker_id="worker-77")
        assert refused(lambda: admin.Drain(unknown, timeout=60)) == "UNKNOWN_WORKER"  # noqa: B023
    (replaced,) = admins[0].Drain(admin_pb2.DrainRequest(), timeout=60).workers
    again = admin_pb2.DrainRequest(worker_id=replaced.worker_id)
    assert [one.old_pid for one in admins[0].Drain(again, timeout=60).workers] == [replaced.new_pid]
