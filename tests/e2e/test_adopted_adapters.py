"""Caches of adapters outlive their gateway: the next one adopts workers with their KV and their adapters."""

from __future__ import annotations

from pathlib import Path

import pytest
from quire.v1 import executor_pb2 as pb
from quire.v1 import types_pb2

from tests.e2e.greedy import Text
from tests.e2e.test_adapters import PATIENCE_S, Adapted, ids, load, texts_of_versions
from tests.e2e.test_adoption import Home, home
from tests.gateway_process import GatewayProcess

__all__ = ["home"]
FLAGS = ("--dtype", "float32", "--max-lora-adapters", "3")


@pytest.fixture(scope="module")
def adapted(tmp_path_factory: pytest.TempPathFactory) -> Adapted:
    return Adapted(tmp_path_factory.mktemp("adapted"), 4)


def start(home: Home, model: Path) -> GatewayProcess:
    return home.start(*FLAGS, model=str(model))


def metrics(gateway: GatewayProcess) -> list[types_pb2.LoraAdapterMetrics]:
    """Of all adapters on all workers, by version."""
    workers = gateway.stub.GetLoraMetrics(pb.GetLoraMetricsRequest(), timeout=PATIENCE_S).workers
    return sorted((one for worker in workers for one in worker.adapters), key=lambda one: one.version)


def reads(gateway: GatewayProcess) -> int:
    return sum(one.loads for one in metrics(gateway))


def test_caches_of_adapters_continue_after_an_adoption(home: Home, adapted: Adapted) -> None:
    """Of the base model, of two adapters, of an old version, and of one without an id.

    No KV is computed again, and no adapter read again that was in memory.
    """
    with start(home, adapted.model) as first:
        before = home.note_workers(first)
        texts = texts_of_versions(first, adapted)
        known = {one.version: (one.loads, one.resident) for one in metrics(first)}
        assert len(known) == 3 and reads(first) > 0
        first.kill()
    with start(home, adapted.model) as second:
        assert home.note_workers(second) == before
        assert list(ids(second)) == ["a"]
        for text in texts:
            text.gateway = second
            text.decode(2)
        assert {one.version: (one.loads, one.resident) for one in metrics(second)} == known
        assert [text.replayed_tokens for text in texts] == [0, 0, 0, 0]
        # Another one takes the place of the least recently used one, which is read again from its copy.
        load(second, "c", adapted.adapters[3])
        texts += [Text(second, "c"), Text(second, "a")]
        assert [text.finish() for text in texts] == [adapted.tokens[index] for index in (0, 1, 2, 3, 4, 3)]
        assert sum(text.replayed_tokens for text in texts) == 0
        for text in texts:
            text.release()
        second.wait_until(lambda: all(not worker.pool.sequences for worker in second.pools()))
        second.assert_pools_are_whole()
