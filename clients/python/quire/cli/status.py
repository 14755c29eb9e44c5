"""`quire status`: a table of the workers, once or repeatedly with rates; or the whole response as JSON."""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from google.protobuf import json_format
from quire import Client
from quire.cli.connecting import CONTROL_TIMEOUT_S, connected
from quire.cli.terminal import escaped, size
from quire.v1 import executor_pb2
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
}
# Of two readings, with what they are the growth of.
_RATES = {
    "tokens/s": "step_tokens",
    "prefills/s": "prefill_operations",
    "decodes/s": "decode_operations",
    "steps/s": "steps",
}
_TEXT_COLUMNS = frozenset({"worker", "device", "runner", "state"})
# The most important columns, for narrow terminals. The others are less important.
_FIRST_COLUMNS = (
    "worker", "state", "seqs", "used", "pages", "running", "decode ms", "batch",
    "tokens/s", "decodes/s", "pid", "memory",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Reading:
    """A status of the server, and when it was read."""

    status: executor_pb2.GetStatusResponse
    taken_s: float  # time.monotonic()
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
        now = Reading(status, time.monotonic(), _adapters(client, status))
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
    metrics = client.stub.GetLoraMetrics(request, timeout=CONTROL_TIMEOUT_S, metadata=client.metadata)
    counts = {w.worker_id: sum(adapter.resident for adapter in w.adapters) for w in metrics.workers}
    return {worker_id: count for worker_id, count in counts.items() if count}


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
        f"  up {duration(status.uptime_ms / 1000)}  {status.caches} caches"
        f"  {status.operations_in_flight} operations in flight  {size(status.memory_bytes)}"
    )
    model = (
        f"model {status.model_id}  {status.fingerprint}  weights {status.weights}" if status.model_id else ""
    )
    limits = (
        f"{status.connections} connections  {status.sessions} sessions"
        f"  {size(status.journal_bytes)} of tokens  {size(status.unread_bytes)} of answers unread"
        f"  longest stall {status.longest_stall_ms} ms  {sum(status.refusals.values())} refused"
    )
    if before is not None and (elapsed_s := now.taken_s - before.taken_s) > 0:
        refused = sum(status.refusals.values()) - sum(before.status.refusals.values())
        limits += f"  {refused / elapsed_s:.1f} refused/s"
    earlier = {worker.worker_id: worker for worker in before.status.workers} if before else {}
    rows = []
    for worker in status.workers:
        cells = [str(cell(worker)) for cell in _COLUMNS.values()]
        if before is not None:
            cells += _rate_cells(worker, earlier.get(worker.worker_id), now.taken_s - before.taken_s)
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


def _rate_cells(
    worker: executor_pb2.WorkerStatus, earlier: executor_pb2.WorkerStatus | None, elapsed_s: float
) -> list[str]:
    """Rates between two readings. "-" for a worker that was restarted, whose counters restarted at 0."""
    if earlier is None or earlier.epoch != worker.epoch or elapsed_s <= 0:
        return ["-"] * len(_RATES)
    grown = (getattr(worker.counts, name) - getattr(earlier.counts, name) for name in _RATES.values())
    return [f"{count / elapsed_s:.1f}" for count in grown]


def _mean(total: int, count: int) -> str:
    return f"{total / count:.1f}" if count else "-"


def _mean_ms(total_ns: int, count: int) -> str:
    return f"{total_ns / count / 1e6 if count else 0:.1f}"


def duration(seconds: float) -> str:
    """Such as `1m01s`."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02}m{rest:02}s" if hours else f"{minutes}m{rest:02}s"
