"""What a server has, on the command line: its status as JSON, and its caches."""

from __future__ import annotations

import json

import pytest

from tests.client.conftest import Quire
from tests.fake_executor import FakeExecutor


@pytest.fixture
def executor() -> FakeExecutor:
    executor = FakeExecutor()
    executor.caches = {f"kv_{number}": [1] * number for number in range(1, 6)}
    return executor


def test_status_as_json(quire: Quire) -> None:
    (line,) = quire("status", "--json").out.splitlines()
    status = json.loads(line)
    assert (status["version"], status["state"], status["caches"]) == ("9.9.9", "SERVER_STATE_SERVING", 0)
    assert [worker["state"] for worker in status["workers"]] == [
        "WORKER_STATE_READY",
        "WORKER_STATE_STARTING",
    ]


def test_caches_are_listed_page_by_page(quire: Quire, executor: FakeExecutor) -> None:
    header, *rows = quire("caches", "list").out.splitlines()
    assert header.split() == ["cache", "tokens", "worker", "expires"]
    assert [row.split() for row in rows[:2]] == [
        ["kv_1", "1", "worker-0", "2033-05-18T03:33:20+00:00"],
        ["kv_2", "2", "worker-0", "2033-05-18T03:33:20+00:00"],
    ]
    assert [row.split()[0] for row in rows] == list(executor.caches)
    assert len(executor.calls["ListCaches"]) == 3


def test_caches_are_released_by_id(quire: Quire, executor: FakeExecutor) -> None:
    assert quire("caches", "release", "kv_2", "kv_4") == (0, "released 2 of 2 caches\n", "")
    assert list(executor.caches) == ["kv_1", "kv_3", "kv_5"]
    assert quire("caches", "release", "kv_2", "kv_3") == (
        1,
        "released 1 of 2 caches\n",
        "quire: not known: kv_2\n",
    )


def test_all_caches_are_released_once_that_is_confirmed(quire: Quire, executor: FakeExecutor) -> None:
    assert quire("caches", "release", "--all") == (
        2,
        "",
        "quire: --all releases all of your caches (5): add --yes\n",
    )
    assert len(executor.caches) == 5
    assert quire("caches", "release", "--all", "--yes") == (0, "released 5 of 5 caches\n", "")
    assert executor.caches == {}
    assert quire("caches", "release", "--all").status == 0, "there is nothing to confirm"
