"""`quire status`: a table of the workers, or the whole response as JSON."""

from __future__ import annotations

import argparse
import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence

from google.protobuf import json_format
from google.protobuf.duration_pb2 import Duration
from google.protobuf.internal.enum_type_wrapper import EnumTypeWrapper
from quire._enums import name_of
from quire.cli.connecting import connected
from quire.cli.terminal import escaped, size
from quire.v1 import executor_pb2, types_pb2
from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.table import Table
from rich.text import Text

# The width for output that is not a terminal, so that every column is shown.
UNLIMITED_WIDTH = 10_000


def enum_word(enum: EnumTypeWrapper, number: int) -> str:
    """Such as `ready` for WORKER_STATE_READY; the number, if a later version has added it."""
    return name_of(enum, number) or "unspecified"


def state_of(worker: executor_pb2.WorkerStatus) -> str:
    """The state in a word, with the progress of a worker that starts."""
    state = enum_word(executor_pb2.WorkerState, worker.state)
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
    "pid", "memory",
)  # fmt: skip


def show_status(options: argparse.Namespace) -> int:
    """Prints the status of a server. Returns the exit status."""
    console = Console()
    if not console.is_terminal or options.wide:
        console.width = UNLIMITED_WIDTH
    with connected(options) as client:
        status = client.status()
        if options.json:
            print(_json(status), flush=True)
            return 0
        has_lora = any(worker.executor.supports_lora for worker in status.workers)
        console.print(render(status, resident_adapters(client.lora_metrics()) if has_lora else {}))
    return 0


def resident_adapters(metrics: Sequence[executor_pb2.WorkerLoraMetrics]) -> Mapping[str, int]:
    """By worker: the LoRA adapters in its memory. Without workers that have none."""
    counts = {w.worker_id: sum(adapter.resident for adapter in w.adapters) for w in metrics}
    return {worker_id: count for worker_id, count in counts.items() if count}


def growth(
    now: executor_pb2.GetStatusResponse, before: executor_pb2.GetStatusResponse | None
) -> dict[str, Counter[str] | None]:
    """By worker: what its counters have grown by. None: not known, because `before` is of another process."""
    earlier = {} if before is None else {worker.worker_id: worker for worker in before.workers}
    return {worker.worker_id: _grown(worker, earlier.get(worker.worker_id)) for worker in now.workers}


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


def render(status: executor_pb2.GetStatusResponse, adapters: Mapping[str, int]) -> RenderableType:
    """The status as lines about the gateway and a table of workers. `adapters`: see `resident_adapters`."""
    line = (
        f"{enum_word(executor_pb2.ServerState, status.state)}  version {status.version}"
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
    rows = [[str(cell(worker)) for cell in _COLUMNS.values()] for worker in status.workers]
    table = FittingTable([*_COLUMNS], rows, _FIRST_COLUMNS)
    notes = []
    # Workers of one machine usually have the same products.
    for products in dict.fromkeys(w.executor.products for w in status.workers if w.executor.products):
        ids = ", ".join(w.worker_id for w in status.workers if w.executor.products == products)
        notes.append(Text(escaped(f"matrix products of {ids}: {products}")))
    if adapters:
        counts = ", ".join(f"{count} ({worker_id})" for worker_id, count in adapters.items())
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
