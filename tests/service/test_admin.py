"""What operators are told of adapters, without a server."""

from __future__ import annotations

from collections import Counter
from typing import Any, cast

from quire.v1 import admin_pb2, types_pb2, worker_pb2

from service.adapters.registry import Adapters, AdapterVersion
from service.api.admin import AdminApi
from service.config import Config
from tests.service.served import state_of


async def test_an_adapter_of_the_directory_has_a_rank_once_a_worker_has_loaded_it() -> None:
    adapters = Adapters(9)
    for number, name in enumerate(("used", "not used yet"), start=1):
        adapters.update([AdapterVersion(number, name, None, "/directory", identity="files")])
    state, none = state_of(Config(), worker_pb2.WorkerReady()), cast(Any, None)
    of_worker = types_pb2.LoraAdapterMetrics(version=1, rank=8, size_bytes=1 << 20)
    state.slots[0].snapshot = worker_pb2.WorkerSnapshot(
        lora_adapters=[of_worker, types_pb2.LoraAdapterMetrics(version=2, operations=1, waiting=1)]
    )
    api = AdminApi(state, none, none, adapters, lambda: Counter({1: 3}), none, none)
    listed = (await api.ListAdapters(admin_pb2.ListAdaptersRequest(), none)).adapters
    found = {one.adapter_id: (one.rank, one.size_bytes, one.caches) for one in listed}
    assert found == {"used": (8, 1 << 20, 3), "not used yet": (0, 0, 0)}
