"""The page `/` of the port for operators, and `/status.json`, which it reads every two seconds.

The page is constant and loads nothing else. Its script writes all values as text, never as HTML.
"""

from __future__ import annotations

import base64
import hashlib
import json
from importlib import metadata
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
        "uptime_ms": state.uptime_ms,
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


_STYLE = """
:root { color-scheme: light dark; --back: #f6f7f9; --card: #fff; --text: #1c2024; --dim: #5d6672;
  --line: #dde1e6; --used: #2563c9; --cached: #a8c5f0; --bad: #b3261e; --good: #18794e }
@media (prefers-color-scheme: dark) { :root { --back: #14171a; --card: #1d2125; --text: #e8eaed;
  --dim: #9aa4b0; --line: #343a41; --used: #6ea8fe; --cached: #31527f; --bad: #ff8a80; --good: #5fd39b } }
* { box-sizing: border-box; margin: 0 }
body { background: var(--back); color: var(--text); font: 15px/1.5 system-ui, sans-serif; margin: 0 auto;
  max-width: 75rem; padding: 1rem; overflow-wrap: break-word; font-variant-numeric: tabular-nums }
h1 { font-size: 1.25rem } h2 { font-size: 1rem; margin: 1.5rem 0 .5rem } h3 { font-size: .95rem }
p, th, dt { color: var(--dim) } .bad { color: var(--bad) } .good { color: var(--good) }
.grid { display: grid; gap: .5rem; grid-template-columns: repeat(auto-fill, minmax(8.5rem, 1fr)) }
.wide { grid-template-columns: repeat(auto-fill, minmax(min(19rem, 100%), 1fr)) }
.card { background: var(--card); border: 1px solid var(--line); border-radius: 6px; padding: .6rem .75rem }
dd { font-size: 1.35rem } dt { font-size: .85rem }
.map { display: grid; gap: 2px; grid-template-columns: repeat(25, 1fr); margin: .5rem 0 }
.map i { aspect-ratio: 1; background: var(--line); border-radius: 1px }
.map .used { background: var(--used) } .map .cached { background: var(--cached) }
table { background: var(--card); border-collapse: collapse; width: 100% }
td, th { border: 1px solid var(--line); font-size: .85rem; font-weight: 400; padding: .2rem .35rem;
  text-align: right; white-space: nowrap }
td:first-child, th:first-child { text-align: left; white-space: normal }
@media (max-width: 30rem) { td, th { font-size: .75rem; padding: .2rem .25rem } }
"""
_SCRIPT = """
"use strict";
const PERIOD_MS = 2000, CELLS = 100, at = id => document.getElementById(id);
let last = null, seen = null;
const made = (name, kind, ...parts) => {
  const one = document.createElement(name);
  one.className = kind;
  one.append(...parts);  // strings become text
  return one;
};
const number = (value, digits = 1) => value == null ? "-" :
  value.toLocaleString("en", {maximumFractionDigits: value < 100 ? digits : 0});
const percent = (part, whole) => whole ? Math.round(100 * part / whole) + "%" : "-";
// null: not known. Counts of another process are smaller, or of no use.
const quotient = (part, whole) => part == null || !whole ? null : part / whole;
const growth = (now, before, name) => before && now[name] >= before[name] ? now[name] - before[name] : null;
const tile = (name, value) => made("div", "card", made("dt", "", name.replaceAll("_", " ")),
  made("dd", "", number(value)));
const table = (id, ...rows) => at(id).replaceChildren(...rows.map(
  (row, index) => made("tr", "", ...row.map(cell => made(index ? "td" : "th", "", cell)))));
function worker(now, before, seconds) {
  const same = before && before.epoch === now.epoch ? before : null, steps = growth(now, same, "steps");
  const ends = [now.pages_referenced, now.pages_referenced + now.pages_cached].map(
    pages => Math.ceil(CELLS * pages / (now.pages_total || 1)));
  const map = made("div", "map", ...Array.from({length: CELLS}, (_, index) =>
    made("i", index < ends[0] ? "used" : index < ends[1] ? "cached" : "")));
  const state = now.state + (now.state === "starting" ? " " + percent(now.load_progress, 1) : "");
  map.setAttribute("aria-hidden", "true");
  return made("div", "card", made("h3", "", now.worker_id + " ", made("span",
    now.state === "ready" && !now.suspect ? "good" : "bad", state + (now.suspect ? ", silent" : ""))), map,
    made("p", "", `${number(now.pages_referenced)} of ${number(now.pages_total)} KV pages in use, ` +
      `${number(now.pages_cached)} cached, ${number(now.sequences)} sequences`),
    made("p", "", `${number(quotient(growth(now, same, "step_tokens"), seconds))} tokens/s in ` +
      `${number(quotient(steps, seconds))} steps/s of ${number(quotient(growth(now, same, "batch_items"),
      steps))} operations, ${number(now.operations_in_flight)} in its queue`),
    made("p", "", `${percent(now.prefix_hit_tokens, now.prefix_query_tokens)} of prompts reused, ` +
      `${number(now.memory_bytes / 2 ** 20)} MiB, epoch ${now.epoch}`));
}
function show(now) {
  const up = Math.floor(now.uptime_ms / 1000), same = last && now.uptime_ms > last.uptime_ms ? last : null;
  const seconds = same && (now.uptime_ms - same.uptime_ms) / 1000;
  at("state").replaceChildren(made("span", now.state === "serving" ? "good" : "bad", now.state),
    ` ${now.model}, version ${now.version}, up ${Math.floor(up / 3600)} h ${Math.floor(up / 60) % 60} min`);
  at("rates").replaceChildren(...Object.keys(now.totals).map(
    name => tile(name + "/s", quotient(growth(now.totals, same && same.totals, name), seconds))));
  at("now").replaceChildren(...Object.entries(now.now).map(([name, value]) => tile(name, value)));
  at("workers").replaceChildren(...now.workers.map(
    one => worker(one, same && same.workers.find(other => other.worker_id === one.worker_id), seconds)));
  const ms = seconds => number(seconds == null ? null : seconds * 1000, 2);
  table("times", ["ms", "count", "mean", "50% ≤", "99% ≤"], ...now.times.map(
    one => [one.name, number(one.count), ms(one.mean_s), ms(one.p50_s), ms(one.p99_s)]));
  table("refusals", ["reason", "count"], ...Object.entries(now.refusals).map(([of, n]) => [of, number(n)]));
  last = now;
  seen = new Date();
}
async function follow() {
  try {
    if (!document.hidden) {
      const answer = await fetch("status.json", {signal: AbortSignal.timeout(5000)});
      if (!answer.ok) throw new Error(answer.status);
      show(await answer.json());
      at("note").textContent = "";
    }
  } catch (error) {
    at("note").textContent = `no answer: ${error.message}` +
      (seen ? `; these figures are of ${seen.toLocaleTimeString()}` : "");
  }
  setTimeout(follow, PERIOD_MS);
}
follow();
"""
PAGE = f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>Quire</title>
<meta name="viewport" content="width=device-width, initial-scale=1"><style>{_STYLE}</style></head><body>
<h1>Quire</h1><p id="state"></p><p id="note" class="bad" role="status"></p>
<noscript>Without scripts there is <a href="status.json">JSON</a>.</noscript>
<h2>Rates</h2><dl id="rates" class="grid"></dl>
<h2>Now</h2><dl id="now" class="grid"></dl>
<h2>Workers</h2><div id="workers" class="grid wide"></div>
<h2>Times since the start, with the slowest methods</h2><table id="times"></table>
<h2>Refused calls since the start</h2><table id="refusals"></table>
<script>{_SCRIPT}</script></body></html>
""".encode()


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


# For each answer of the port.
POLICY = (
    f"default-src 'none'; connect-src 'self'; style-src {_hash(_STYLE)}; script-src {_hash(_SCRIPT)};"
    " base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
