"""The page for operators: nothing from elsewhere, no markup from values, and rates from differences."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
import shutil
import subprocess
from bisect import bisect_left
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from quire.v1 import types_pb2

from service.extensions.metrics.figures import TIMES_S, Distribution
from service.extensions.metrics.status_page import PAGE
from tests.service.metrics_server import serving
from tests.service.served import become_ready
from workers.common import worker_pb2

HOSTILE = "<script>alert(1)</script>\"'&"
# A browser for the page's script: elements are lists of children, and markup is refused.
BROWSER = """
class Element {
  constructor(name) { this.name = name; this.children = []; }
  append(...parts) { this.children.push(...parts); }
  replaceChildren(...parts) { this.children = parts; }
  setAttribute(name, value) {}
  set textContent(text) { this.children = [text]; }
  set innerHTML(_) { throw new Error("markup"); }
}
const ids = {}, answers = ANSWERS;
globalThis.document = {
  hidden: false,
  createElement: name => new Element(name),
  getElementById: id => ids[id] ??= new Element(id),
};
globalThis.fetch = async path => {
  if (path !== "status.json") throw new Error(path);
  return {ok: true, json: async () => answers.shift()};
};
const text = part => typeof part !== "object" ? String(part) :
  part.name === "i" ? part.className || "free" : part.children.map(text).join("|");
const shown = [];
globalThis.setTimeout = then => {
  shown.push(Object.fromEntries(Object.entries(ids).map(([id, one]) => [id, text(one)])));
  if (answers.length) then(); else process.stdout.write(JSON.stringify(shown));
};
"""


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


@given(st.lists(st.one_of(st.sampled_from(TIMES_S), st.floats(0, 1e4)), max_size=50))
def test_half_and_most_values_are_below_their_bounds(values: list[float]) -> None:
    times = Distribution(TIMES_S)
    for value in values:
        times.add(value)
    summary = times.summary()
    assert summary["count"] == len(values)
    if not values:
        assert set(summary.values()) == {0, None}
        return
    assert summary["mean_s"] == pytest.approx(math.fsum(values) / len(values))
    for name, share in (("p50_s", 0.5), ("p99_s", 0.99)):
        # The smallest of the values that enough others do not exceed.
        exact = sorted(values)[math.ceil(share * len(values)) - 1]
        index = bisect_left(TIMES_S, exact)
        assert summary[name] == (TIMES_S[index] if index < len(TIMES_S) else None)


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


def shown(*answers: dict[str, Any]) -> list[dict[str, str]]:
    """The texts of the page after each answer."""
    node = shutil.which("node")
    if node is None:
        pytest.skip("there is no node")
    script = BROWSER.replace("ANSWERS", json.dumps(answers)) + part("script")
    done = subprocess.run([node, "-"], input=script, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    found: list[dict[str, str]] = json.loads(done.stdout)
    assert all(page["note"] == "" for page in found)
    return found


def test_the_page_shows_rates_between_two_answers() -> None:
    first, second = shown(status(10, 5), status(14, 9))
    assert first["rates"] == "generated tokens/s|-|calls/s|-"
    assert second["rates"] == "generated tokens/s|100|calls/s|8"
    assert second["now"] == "running|1,234" and second["state"].startswith(f"serving| {HOSTILE}, version 1")
    assert "25 of 1,000 KV pages in use, 75 cached, 3 sequences" in second["workers"]
    assert "60 tokens/s in 10 steps/s of 2.5 operations, 2 in its queue" in second["workers"]
    assert "25% of prompts reused, 3 MiB, epoch 1" in second["workers"] and HOSTILE in second["workers"]
    assert second["times"].endswith(f"{HOSTILE}|2|12.5|10|-") and second["refusals"].endswith(f"{HOSTILE}|3")


@pytest.mark.parametrize("after", [status(3, 9), status(14, 9, epoch=2), status(14, 2)])
def test_counts_that_begin_anew_give_no_rate(after: dict[str, Any]) -> None:
    _, second = shown(status(10, 5), after)
    assert "- tokens/s in - steps/s of - operations" in second["workers"]
    if after["workers"][0]["epoch"] == 1:
        assert second["rates"] == "generated tokens/s|-|calls/s|-"


@pytest.mark.parametrize(
    ("used", "cached", "cells"), [(0, 0, [0, 0]), (1, 0, [1, 0]), (250, 100, [25, 10]), (1000, 0, [100, 0])]
)
def test_the_map_has_a_cell_for_each_hundredth(used: int, cached: int, cells: list[int]) -> None:
    """One page in use is seen."""
    (page,) = shown(status(10, 5, pages_referenced=used, pages_cached=cached))
    found = re.findall(r"(?<=\|)(?:used|cached|free)(?=\|)", page["workers"])
    assert found == ["used"] * cells[0] + ["cached"] * cells[1] + ["free"] * (100 - sum(cells))
