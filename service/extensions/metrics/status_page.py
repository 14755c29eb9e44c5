"""The page `/` of the port for operators, and `/status.json`, which it reads every two seconds.

The page is a file beside this one, and loads nothing else. Its script writes all values as
text, never as HTML.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from importlib import metadata
from pathlib import Path
from typing import Any

from quire.v1 import executor_pb2

from service.extension import GatewayParts
from service.extensions.metrics.collector import running_and_waiting
from service.extensions.metrics.figures import Figures
from service.pool.model_versions import WorkerSlot

_VERSION = metadata.version("quire-llm-server")
_MOST_METHODS = 8
_PAGES = ("pages_total", "pages_free", "pages_cached", "pages_referenced")
_PREFIXES = ("prefix_hit_tokens", "prefix_query_tokens")
_STEPS = ("steps", "step_tokens", "batch_items")


def status_json(parts: GatewayParts, figures: Figures) -> bytes:
    """The figures as JSON. Names nothing of callers."""
    # No markup, whatever takes it for HTML.
    return json.dumps(_figures(parts, figures)).replace("<", "\\u003c").encode()


def _figures(parts: GatewayParts, figures: Figures) -> dict[str, Any]:
    state, shards, appends = parts.state, parts.shards(), figures.appends
    ready = shards[0].versions.first_ready
    running, waiting = running_and_waiting(parts)
    refusals = state.call_log.refusals
    return {
        "version": _VERSION,
        "state": state.state_name,
        "uptime_ms": int(state.uptime_s * 1000),
        "model": "" if ready is None else ready.model.model_id,
        "now": {
            "running": running,
            "waiting": waiting,
            "operations_in_flight": sum(one.caches.operations_in_flight for one in shards),
            "executions": parts.executions.num_unfinished,
            "caches": sum(len(one.caches) for one in shards),
            "sessions": state.receiver.streams,
            "connections": state.connections.count + parts.num_http_connections(),
        },
        # Since the start.
        "totals": {
            "prompt_tokens": appends.prompt_tokens,
            "generated_tokens": appends.generated_tokens,
            "appends": sum(appends.answered),
            "calls": figures.calls.handled.total(),
            "refusals": refusals.total(),
        },
        "refusals": dict(refusals.most_common()),
        "workers": [_worker(slot) for slot in parts.slots()],
        "times": _times(figures),
    }


def _worker(slot: WorkerSlot) -> dict[str, Any]:
    """Fields of WorkerStatus. Not `trouble`, which can have paths."""
    snapshot = slot.snapshot
    return {
        "worker_id": slot.worker_id,
        "epoch": slot.epoch,
        "state": executor_pb2.WorkerState.Name(slot.state).removeprefix("WORKER_STATE_").lower(),
        "load_progress": slot.load_progress,
        "suspect": slot.suspect,
        "sequences": snapshot.pool.sequences,
        "operations_in_flight": snapshot.operations_in_flight,
        "memory_bytes": snapshot.memory_bytes,
        **{name: getattr(snapshot.pool, name) for name in (*_PAGES, *_PREFIXES)},
        **{name: getattr(snapshot.counts, name) for name in _STEPS},
    }


def _times(figures: Figures) -> list[dict[str, Any]]:
    """What takes time: parts of the work, then the slowest unary methods by their mean."""
    appends, calls = figures.appends, figures.calls.seconds
    parts = {
        "first token": appends.first_token,
        "next token": appends.token,
        "queue of a worker": appends.queue,
        "journal commit": figures.commits,
        "event loop lag": figures.lag,
    }
    methods = [{"name": name, **one.summary()} for (kind, _, name), one in calls.items() if kind == "unary"]
    methods.sort(key=lambda one: one["mean_s"] or 0.0, reverse=True)
    return [*({"name": name, **one.summary()} for name, one in parts.items()), *methods[:_MOST_METHODS]]


PAGE = Path(__file__).with_suffix(".html").read_bytes()


def _hash_of(element: str) -> str:
    """Of the page's only element of this name, by which a policy names it."""
    (text,) = re.findall(rf"<{element}>(.*?)</{element}>".encode(), PAGE, re.DOTALL)
    return f"'sha256-{base64.b64encode(hashlib.sha256(text).digest()).decode()}'"


# For each answer of the port.
POLICY = (
    f"default-src 'none'; connect-src 'self'; style-src {_hash_of('style')}; script-src {_hash_of('script')};"
    " base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
