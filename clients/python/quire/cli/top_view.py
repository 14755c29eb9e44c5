"""What `quire top` shows: two readings of a server as lines and a table of its workers. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from quire.cli.status import FittingTable, duration, enum_word, growth, seconds, state_of
from quire.cli.terminal import escaped, size
from quire.v1 import executor_pb2, types_pb2
from rich.console import Group, RenderableType
from rich.text import Text

_KINDS = ("prefill", "decode", "verify", "score")
# What the chosen tokens are counted by.
_CHOSEN = ("decode_operations", "verify_operations", "accepted_draft_tokens")
_BAR_CHARS = 10
_MOST_REASONS = 3
_COLUMNS = (
    "worker", "state", "epoch", "queue", "batch", "tokens/s", "decodes/s", "prefill ms", "decode ms",
    "KV in use", "pages", "hits", "memory",
)  # fmt: skip
_FIRST_COLUMNS = ("worker", "state", "queue", "batch", "tokens/s", "decode ms", "KV in use", "hits")


@dataclass(frozen=True, slots=True)
class Reading:
    """What a server has said at one time. Only the first two are always there."""

    status: executor_pb2.GetStatusResponse
    taken_s: float  # time.monotonic()
    model_id: str = ""
    # The caller's oldest caches, and whether there are more.
    caches: Sequence[types_pb2.KvCacheHandle] | None = None
    has_more_caches: bool = False
    # See `resident_adapters`.
    adapters: Mapping[str, int] = field(default_factory=dict)


def frame(now: Reading, before: Reading | None, target: str, notes: Sequence[str] = ()) -> RenderableType:
    """Lines about all of the server, `notes` in red below the first, and a table of the workers."""
    elapsed_s = 0.0 if before is None else now.taken_s - before.taken_s
    grown = growth(now.status, None if before is None else before.status)
    known = [counts for counts in grown.values() if counts is not None]
    total = sum(known, Counter[str]()) if known else None
    state = enum_word(executor_pb2.ServerState, now.status.state)
    up, version = f"up {duration(seconds(now.status.uptime))}", f"version {now.status.version}"
    model = [f"model {now.model_id}"] if now.model_id else []
    lines = [(state, target, *model, up, version), *_work(now.status, total, elapsed_s)]
    lines += _callers(now, before, elapsed_s)
    text = [
        Text.assemble((f"{escaped(title):<11}", "bold"), escaped("   ".join(filter(None, parts))))
        for title, *parts in lines
    ]
    text[1:1] = [Text(escaped(note), style="bold red") for note in notes]
    rows = [_cells(worker, grown[worker.worker_id], elapsed_s) for worker in now.status.workers]
    troubles = [Text(escaped(f"{w.worker_id}: {w.trouble}")) for w in now.status.workers if w.trouble]
    for line in (*text, *troubles):
        line.no_wrap, line.overflow = True, "ellipsis"
    return Group(*text, FittingTable(_COLUMNS, rows, _FIRST_COLUMNS), *troubles)


def _work(
    status: executor_pb2.GetStatusResponse, total: Counter[str] | None, elapsed_s: float
) -> list[Sequence[str]]:
    """The work of all workers together."""
    at_workers = sum(worker.operations_in_flight for worker in status.workers)
    # Both numbers are of slightly different moments.
    in_flight = max(at_workers, status.operations_in_flight)
    pools = [worker.pool for worker in status.workers]
    used, cached, pages = (
        sum(getattr(pool, f"pages_{s}") for pool in pools) for s in ("referenced", "cached", "total")
    )
    operations = [f"{kind}_operations" for kind in _KINDS]
    reused = "-" if total is None else _percent(total["prefix_hit_tokens"], total["prefix_query_tokens"])
    return [
        (
            "tokens/s",
            f"in {_rate(total, elapsed_s, 'prefix_query_tokens')} ({reused} reused)",
            f"out {_rate(total, elapsed_s, *_CHOSEN)}",
            f"computed {_rate(total, elapsed_s, 'step_tokens')}",
        ),
        (
            "operations",
            f"{_rate(total, elapsed_s, *operations)}/s",
            f"{in_flight} in flight, {at_workers} of them at workers",
        ),
        ("mean ms", *(f"{kind} {_mean_ms(total, kind)}" for kind in _KINDS)),
        (
            "KV pages",
            _bar(used, cached, pages).lstrip(),
            f"{used:,} in use",
            f"{cached:,} cached",
            f"{pages:,} in all",
        ),
        *_on_disk(status, total, elapsed_s),
        *_drafts(status, total, elapsed_s),
    ]


def _on_disk(
    status: executor_pb2.GetStatusResponse, total: Counter[str] | None, elapsed_s: float
) -> list[Sequence[str]]:
    """A line about KV on disk, if a worker stores any."""
    disks = [worker.kv_disk for worker in status.workers if worker.HasField("kv_disk")]
    if not disks:
        return []
    # Workers of a host share a directory, and each reports all of it.
    most = max(disks, key=lambda disk: disk.bytes)
    found = "-" if total is None else _percent(total["read_pages"], total["wanted_pages"])
    stopped = sum(disk.stopped for disk in disks)
    return [
        (
            "KV on disk",
            f"{size(most.bytes)} of {size(most.max_bytes)}",
            f"pages/s read {_rate(total, elapsed_s, 'read_pages')} ({found} of those wanted)",
            f"written {_rate(total, elapsed_s, 'written_pages')}",
            f"{stopped} of {len(disks)} workers store nothing" if stopped else "",
        )
    ]


def _drafts(
    status: executor_pb2.GetStatusResponse, total: Counter[str] | None, elapsed_s: float
) -> list[Sequence[str]]:
    """A line about speculative decoding, if there was any."""
    if not any(worker.counts.draft_tokens for worker in status.workers):
        return []
    accepted = "-" if total is None else _percent(total["accepted_draft_tokens"], total["draft_tokens"])
    drafted = _rate(total, elapsed_s, "draft_tokens")
    return [("drafts", f"tokens/s verified {drafted}", f"{accepted} of them accepted")]


def _callers(now: Reading, before: Reading | None, elapsed_s: float) -> list[Sequence[str]]:
    """What is known of callers, as far as this one may know it."""
    status, refusals = now.status, Counter(now.status.refusals)
    grown = None
    # Counts of another gateway are of no use.
    if before is not None and seconds(before.status.uptime) <= seconds(status.uptime):
        grown = refusals - Counter(before.status.refusals)
    reasons = ", ".join(f"{reason} {count:,}" for reason, count in refusals.most_common(_MOST_REASONS))
    # Both numbers are of slightly different moments.
    in_all = max(status.caches, len(now.caches or ()))
    caches = [f"{in_all:,} in all", f"{size(status.journal_bytes)} of tokens"]
    if now.caches is not None:
        more = "+" if now.has_more_caches else ""
        tokens = _count(sum(cache.seq_len for cache in now.caches), "token", more)
        caches.append(f"{len(now.caches)}{more} of yours, with {tokens}")
    memory, stall = size(status.memory_bytes), f"longest stall {status.longest_stall.ToMilliseconds()} ms"
    adapters = [f"{count} in memory of {worker_id}" for worker_id, count in now.adapters.items()]
    return [
        ("refused", f"{_rate(grown, elapsed_s, *refusals)}/s", f"{refusals.total():,} in all", reasons),
        (
            "gateway",
            _count(status.connections, "connection"),
            _count(status.sessions, "session"),
            memory,
            stall,
        ),
        ("caches", *caches),
        *([("adapters", *adapters)] if adapters else []),
    ]


def _count(number: int, noun: str, more: str = "") -> str:
    """Such as `1 session`. `more`: "+" if the number is a lower bound."""
    return f"{number:,}{more} {noun}{'s' if number != 1 or more else ''}"


def _cells(
    worker: executor_pb2.WorkerStatus, grown: Counter[str] | None, elapsed_s: float
) -> list[str | Text]:
    """The cells of _COLUMNS."""
    pool, is_ready = worker.pool, worker.state == executor_pb2.WORKER_STATE_READY
    state = state_of(worker) + (", silent" if worker.suspect else "")
    batch = "-" if grown is None or not grown["steps"] else f"{grown['batch_items'] / grown['steps']:.1f}"
    return [
        worker.worker_id,
        Text(escaped(state), style="green" if is_ready and not worker.suspect else "bold red"),
        str(worker.epoch),
        str(worker.operations_in_flight),
        batch,
        _rate(grown, elapsed_s, "step_tokens"),
        _rate(grown, elapsed_s, "decode_operations"),
        _mean_ms(grown, "prefill"),
        _mean_ms(grown, "decode"),
        _bar(pool.pages_referenced, pool.pages_cached, pool.pages_total),
        str(pool.pages_total),
        _percent(pool.prefix_hit_tokens, pool.prefix_query_tokens),
        size(worker.memory_bytes),
    ]


def _rate(grown: Counter[str] | None, elapsed_s: float, *names: str) -> str:
    """The growth of some counters in a second."""
    if grown is None or elapsed_s <= 0:
        return "-"
    rate = sum(grown[name] for name in names) / elapsed_s
    return f"{rate:,.0f}" if rate >= 1000 else f"{rate:.1f}"


def _bar(used: int, cached: int, pages: int) -> str:
    """Such as ` 42% [||||::....]`: pages in use and cached ones. A single one is seen."""
    # Never longer, whatever a server says.
    ends = [-(-min(count, pages) * _BAR_CHARS // max(1, pages)) for count in (used, used + cached)]
    bar = "|" * ends[0] + ":" * (ends[1] - ends[0])
    return f"{_percent(used, pages):>4} [{bar:.<{_BAR_CHARS}}]"


def _percent(part: int, whole: int) -> str:
    return f"{part / whole:.0%}" if whole else "-"


def _mean_ms(grown: Counter[str] | None, kind: str) -> str:
    """The mean time of the operations of a kind that ended between the readings."""
    count = 0 if grown is None else grown[f"{kind}_operations"]
    return "-" if grown is None or not count else f"{grown[f'{kind}_ns'] / count / 1e6:.1f}"
