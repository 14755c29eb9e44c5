"""The page for operators: nothing from elsewhere, no markup from values, and rates from differences."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from pathlib import Path
from typing import Any

from quire.v1 import types_pb2

from service.extensions.metrics.status_page import PAGE
from tests.service.metrics_server import serving
from tests.service.served import become_ready
from workers.common import worker_pb2

HOSTILE = "<script>alert(1)</script>\"'&"


def part(name: str) -> str:
    (found,) = re.findall(rf"<{name}>(.*?)</{name}>", PAGE.decode(), flags=re.DOTALL)
    return str(found)


async def test_the_page_loads_nothing_else(tmp_path: Path) -> None:
    async with serving(tmp_path) as server:
        page, status = await server.get("/?x=1"), await server.get("/status.json")
    assert page.status == 200 and page.headers["content-type"] == "text/html; charset=utf-8"
    policy = page.headers["content-security-policy"].split("; ")
    assert policy[0] == "default-src 'none'" and "connect-src 'self'" in policy
    for name in ("style", "script"):
        digest = base64.b64encode(hashlib.sha256(part(name).encode()).digest()).decode()
        assert f"{name}-src 'sha256-{digest}'" in policy
    assert not re.search(r"https?:|//[\w.]+/|@import|url\(|\ssrc=|\son\w+=|\sstyle=", page.body)
    assert set(re.findall(r"href=\"([^\"]*)\"", page.body)) == {"status.json"}
    assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|eval|Function", page.body)
    assert status.headers["content-type"] == "application/json"
    for answer in (page, status):
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["cache-control"] == "no-store"


async def test_names_hold_no_markup(tmp_path: Path) -> None:
    async with serving(tmp_path) as server:
        versions = server.gateway.core.pool.versions
        ready = worker_pb2.WorkerReady(model=types_pb2.ModelDescription(model_id=HOSTILE))
        become_ready(versions, versions.slots[0], ready)
        server.gateway.state.call_log.refusals[HOSTILE] += 1
        answer = await server.get("/status.json")
    assert "<" not in answer.body
    found = json.loads(answer.body)
    assert found["model"] == HOSTILE and found["refusals"] == {HOSTILE: 1}
    assert found["state"] == "serving" and found["workers"][0]["state"] == "ready"


def status(at_s: int, count: int, **worker: Any) -> dict[str, Any]:
    """What a server has done `count` times."""
    one = {
        "worker_id": HOSTILE, "epoch": 1, "state": "ready", "load_progress": 1, "suspect": False,
        "sequences": 3, "operations_in_flight": 2, "memory_bytes": 3 << 20, "pages_total": 1000,
        "pages_free": 900, "pages_cached": 75, "pages_referenced": 25,
        "prefix_hit_tokens": 1, "prefix_query_tokens": 4,
        "steps": 10 * count, "step_tokens": 60 * count, "batch_items": 25 * count,
    }  # fmt: skip
    return {
        "version": "1", "state": "serving", "uptime_ms": at_s * 1000, "model": HOSTILE,
        "now": {"running": 1234}, "totals": {"generated_tokens": 100 * count, "calls": 8 * count},
        "refusals": {HOSTILE: 3}, "workers": [one | worker],
        "times": [{"name": HOSTILE, "count": 2, "mean_s": 0.0125, "p50_s": 0.01, "p99_s": None}],
    }  # fmt: skip
