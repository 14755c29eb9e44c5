"""`quire status`: a table of the workers, once or repeatedly with rates; or the whole response as JSON."""

from __future__ import annotations

import argparse
import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from google.protobuf import json_format
from google.protobuf.duration_pb2 import Duration
from quire import Client
from quire.cli.connecting import CONTROL_TIMEOUT_S, connected
from quire.cli.terminal import escaped, size
from quire.v1 import executor_pb2, types_pb2
from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

# The width for output that is not a terminal, so that every column is shown.
UNLIMITED_WIDTH = 10_000


def enum_word(name: str) -> str:
    """Converts `WORKER_STATE_READY` to `ready`."""
    return name.rpartition("_STATE_")[2].lower()


def state_of(worker: executor_pb2.WorkerStatus) -> str:
    """The state in a word, with the progress of a worker that starts."""
    state = enum_word(executor_pb2.WorkerState.Name(worker.state))
    if worker.state == executor_pb2.WORKER_STATE_STARTING:
        state += f" {worker.load_progress:.0%}"
    return state


_COLUMNS: Mapping[str, Callable[[executor_pb2.WorkerStatus], object]] = {
    "worker": lambda worker: worker.worker_id,
    "pid": lambda worker: worker.address or worker.pid,
    "epoch": lambda worker: worker.epoch,
    "device": lambda worker: worker.executor.device,
    "runner": lambda worker: worker.executor.runner,
    "state": state_of,
    "seqs": lambda worker: worker.pool.sequences,
    "used": lambda worker: worker.pool.pages_referenced,
    "free": lambda worker: worker.pool.pages_free,
    "cached": lambda worker: worker.pool.pages_cached,
    "pages": lambda worker: worker.pool.pages_total,
    "running": lambda worker: worker.operations_in_flight,
    "prefills": lambda worker: worker.counts.prefill_operations,
    "decodes": lambda worker: worker.counts.decode_operations,
    "prefill ms": lambda worker: _mean_ms(worker.counts.prefill_ns, worker.counts.prefill_operations),
    "decode ms": lambda worker: _mean_ms(worker.counts.decode_ns, worker.counts.decode_operations),
    "batch": lambda worker: _mean(worker.counts.batch_items, worker.counts.steps),
    "memory": lambda worker: size(worker.memory_bytes),
    "disk": lambda worker: size(worker.kv_disk.bytes) if worker.HasField("kv_disk") else "-",
}
# Of two readings, with what they are the growth of.
_RATES = {
    "tokens/s": "step_tokens",
    "prefills/s": "prefill_operations",
    "decodes/s": "decode_operations",
    "steps/s": "steps",
}
# The counters of a WorkerStatus, by the field that has them.
_COUNTERS = {
    "counts": [field.name for field in types_pb2.StepCounts.DESCRIPTOR.fields],
    "pool": ["prefix_hit_tokens", "prefix_query_tokens"],
    "kv_disk": ["wanted_pages", "read_pages", "written_pages"],
}
_TEXT_COLUMNS = frozenset({"worker", "device", "runner", "state"})
# The most important columns, for narrow terminals. The others are less important.
_FIRST_COLUMNS = (
    "worker", "state", "seqs", "used", "pages", "running", "decode ms", "batch",
    "tokens/s", "decodes/s", "pid", "memory",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Reading:
    """What a server has said at one time. Only the first two are always there."""

    status: executor_pb2.GetStatusResponse
    taken_s: float  # time.monotonic()
    model_id: str = ""
    # The caller's oldest caches, and whether there are more.
    caches: Sequence[types_pb2.KvCacheHandle] | None = None
    has_more_caches: bool = False
    # By worker: the LoRA adapters in its memory. Without workers that have none.
    adapters: Mapping[str, int] = field(default_factory=dict)


def show_status(options: argparse.Namespace) -> int:
    """Prints the status of a server, every `options.watch` seconds if given. Returns the exit status."""
    console = Console()
    in_place = console.is_terminal and not (options.wide or options.json)
    if not in_place:
        console.width = UNLIMITED_WIDTH
    # Ctrl-C is the normal way to end --watch.
    interrupted = 1 if options.watch is None else 0
    with connected(options, interrupted) as client:
        readings = _readings(client, options.watch)
        if options.watch is not None and in_place:
            with Live(render(*next(readings)), console=console, auto_refresh=False) as live:
                for now, before in readings:
                    live.update(render(now, before), refresh=True)
        for now, before in readings:
            if options.json:
                print(_json(now.status), flush=True)
            else:
                console.print(render(now, before))
    return 0


def _readings(client: Client, interval_s: float | None) -> Iterator[tuple[Reading, Reading | None]]:
    """Readings, each with the previous one. Without an interval only one. Raises QuireError."""
    before = None
    while True:
        status = client.status()
        now = Reading(status, time.monotonic(), adapters=_adapters(client, status))
        yield now, before
        if interval_s is None:
            return
        before = now
        time.sleep(interval_s)


def _adapters(client: Client, status: executor_pb2.GetStatusResponse) -> Mapping[str, int]:
    """See Reading. Raises grpc.RpcError."""
    if not any(worker.executor.supports_lora for worker in status.workers):
        return {}
    request = executor_pb2.GetLoraMetricsRequest()
    return resident_adapters(
        client.stub.GetLoraMetrics(request, timeout=CONTROL_TIMEOUT_S, metadata=client.metadata)
    )


def resident_adapters(metrics: executor_pb2.GetLoraMetricsResponse) -> Mapping[str, int]:
    """See Reading."""
    counts = {w.worker_id: sum(adapter.resident for adapter in w.adapters) for w in metrics.workers}
    return {worker_id: count for worker_id, count in counts.items() if count}


def growth(now: Reading, before: Reading | None) -> dict[str, Counter[str] | None]:
    """By worker: what its counters have grown by. None: not known, because `before` is of another process."""
    earlier = {} if before is None else {worker.worker_id: worker for worker in before.status.workers}
    return {worker.worker_id: _grown(worker, earlier.get(worker.worker_id)) for worker in now.status.workers}


def _grown(now: executor_pb2.WorkerStatus, before: executor_pb2.WorkerStatus | None) -> Counter[str] | None:
    if before is None or (before.epoch, before.pid) != (now.epoch, now.pid):
        return None
    counts = Counter[str]()
    for part, names in _COUNTERS.items():
        for name in names:
            counts[name] = getattr(getattr(now, part), name) - getattr(getattr(before, part), name)
    return None if min(counts.values()) < 0 else counts


def _json(status: executor_pb2.GetStatusResponse) -> str:
    """The status as JSON in one line."""
    return json_format.MessageToJson(
        status, indent=None, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )


def render(now: Reading, before: Reading | None) -> RenderableType:
    """The status as lines about the gateway and a table of workers, with rates since `before`."""
    status = now.status
    line = (
        f"{enum_word(executor_pb2.ServerState.Name(status.state))}  version {status.version}"
        f"  up {duration(seconds(status.uptime))}  {status.caches} caches"
        f"  {status.operations_in_flight} operations in flight  {size(status.memory_bytes)}"
    )
    model = (
        f"model {status.model_id}  {status.fingerprint}  weights {status.weights_version}"
        if status.model_id
        else ""
    )
    limits = (
        f"{status.connections} connections  {status.sessions} sessions"
        f"  {size(status.journal_bytes)} of tokens  {size(status.unread_bytes)} of answers unread"
        f"  longest stall {status.longest_stall.ToMilliseconds()} ms  {sum(status.refusals.values())} refused"
    )
    elapsed_s = 0.0 if before is None else now.taken_s - before.taken_s
    # Counts of another gateway are of no use.
    if before is not None and elapsed_s > 0 and seconds(before.status.uptime) <= seconds(status.uptime):
        refused = sum(status.refusals.values()) - sum(before.status.refusals.values())
        limits += f"  {refused / elapsed_s:.1f} refused/s"
    grown = growth(now, before)
    rows = []
    for worker in status.workers:
        cells = [str(cell(worker)) for cell in _COLUMNS.values()]
        if before is not None:
            cells += _rate_cells(grown[worker.worker_id], elapsed_s)
        rows.append(cells)
    table = FittingTable([*_COLUMNS, *(_RATES if before is not None else ())], rows, _FIRST_COLUMNS)
    notes = []
    # Workers of one machine usually have the same products.
    for products in dict.fromkeys(w.executor.products for w in status.workers if w.executor.products):
        ids = ", ".join(w.worker_id for w in status.workers if w.executor.products == products)
        notes.append(Text(escaped(f"matrix products of {ids}: {products}")))
    if now.adapters:
        counts = ", ".join(f"{count} ({worker_id})" for worker_id, count in now.adapters.items())
        notes.append(Text(escaped(f"LoRA adapters in memory: {counts}")))
    lines = [Text(escaped(text)) for text in (line, model, limits) if text]
    return Group(*lines, table, *notes)


class FittingTable:
    """A table with as many complete columns as fit into the console."""

    def __init__(
        self, names: Sequence[str], rows: Sequence[Sequence[str | Text]], first: Sequence[str]
    ) -> None:
        """`first`: the most important columns, which come before the others where not all of them fit."""
        self._names = names
        self._first = first
        # As Text, because rich interprets markup in strings.
        self._rows = [
            [cell if isinstance(cell, Text) else Text(escaped(cell)) for cell in row] for row in rows
        ]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Table]:
        shown, gap = self._fitting(options.max_width)
        table = Table(box=None, header_style="bold", padding=(0, gap, 0, 0), pad_edge=False)
        for name in (self._names[i] for i in shown):
            table.add_column(name, justify="left" if name in _TEXT_COLUMNS else "right", overflow="fold")
        for row in self._rows:
            table.add_row(*(row[i] for i in shown))
        yield table

    def _fitting(self, width: int) -> tuple[list[int], int]:
        """The indexes of the columns that fit, in order, and the number of blanks between two of them."""
        widths = [
            max([len(name), *(row[i].cell_len for row in self._rows)]) for i, name in enumerate(self._names)
        ]
        first = [self._names.index(name) for name in self._first if name in self._names]
        by_rank = first + [i for i in range(len(self._names)) if i not in first]
        gap = 2 if sum(widths[i] + 2 for i in first) - 2 <= width else 1
        ends = itertools.accumulate(widths[i] + gap for i in by_rank)
        count = sum(end - gap <= width for end in ends)
        return sorted(by_rank[: max(1, count)]), gap


def _rate_cells(grown: Counter[str] | None, elapsed_s: float) -> list[str]:
    """Rates between two readings."""
    if grown is None or elapsed_s <= 0:
        return ["-"] * len(_RATES)
    return [f"{grown[name] / elapsed_s:.1f}" for name in _RATES.values()]


def _mean(total: int, count: int) -> str:
    return f"{total / count:.1f}" if count else "-"


def _mean_ms(total_ns: int, count: int) -> str:
    return f"{total_ns / count / 1e6 if count else 0:.1f}"


def seconds(span: Duration) -> float:
    """The length of a span."""
    return span.ToNanoseconds() / 1e9


def duration(elapsed_s: float) -> str:
    """Such as `1m01s`."""
    minutes, rest = divmod(int(elapsed_s), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02}m{rest:02}s" if hours else f"{minutes}m{rest:02}s"
