"""`quire status`: a table of the workers, once or repeatedly with rates; or all of the answer, as JSON."""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import grpc
from google.protobuf import json_format
from quire.v1 import executor_pb2, executor_pb2_grpc
from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from service.cli.channel import CONTROL_TIMEOUT_S, connected, print_error
from service.printable import escaped

# Where no terminal's width counts, every column is shown in full.
_WIDTH_OF_ALL = 10_000
_COLUMNS = (
    "worker", "pid", "epoch", "device", "runner", "state", "seqs", "used", "free", "cached", "pages",
    "running", "prefills", "decodes", "prefill ms", "decode ms", "batch", "memory",
)  # fmt: skip
_RATE_COLUMNS = ("tokens/s", "prefills/s", "decodes/s", "steps/s")
_TEXT_COLUMNS = frozenset({"worker", "device", "runner", "state"})
# What is shown first where there is not room for all; what is not among them comes last.
_FIRST_COLUMNS = (
    "worker", "state", "seqs", "used", "pages", "running", "decode ms", "batch",
    "tokens/s", "decodes/s", "pid", "memory",
)  # fmt: skip
# Among the kernels of a worker whose CPU kernels could not be compiled.
NOT_COMPILED = "cpu-not-compiled"


@dataclass(frozen=True, slots=True)
class Reading:
    """What the server said, and when."""

    status: executor_pb2.GetStatusResponse
    taken_s: float  # time.monotonic()


def show_status(options: argparse.Namespace) -> int:
    """Prints the status of a server, every `options.watch` seconds if given. Returns the exit status."""
    interval_s: float | None = options.watch
    console = Console()
    in_place = console.is_terminal and not (options.wide or options.json)
    if not in_place:
        console.width = _WIDTH_OF_ALL
    # Ctrl-C is the only way to end --watch, so not a failure.
    interrupted = 1 if interval_s is None else 0

    def show(now: Reading, before: Reading | None) -> None:
        console.print(render(now, before))

    try:
        with connected(options, interrupted) as channel:
            stub = executor_pb2_grpc.ModelExecutorServiceStub(channel)
            if interval_s is not None and in_place:
                _watch_in_place(stub, console, interval_s)
            else:
                _print_each(stub, _print_json if options.json else show, interval_s)
    except grpc.RpcError as error:
        print_error(error)
        return 1
    return 0


def _read(stub: executor_pb2_grpc.ModelExecutorServiceStub) -> Reading:
    status = stub.GetStatus(executor_pb2.GetStatusRequest(), timeout=CONTROL_TIMEOUT_S)
    return Reading(status, time.monotonic())


def _print_each(
    stub: executor_pb2_grpc.ModelExecutorServiceStub,
    show: Callable[[Reading, Reading | None], None],
    interval_s: float | None,
) -> None:
    """Shows one reading; with an interval one below the other, until interrupted or the server fails."""
    before = _read(stub)
    show(before, None)
    while interval_s is not None:
        time.sleep(interval_s)
        now = _read(stub)
        show(now, before)
        before = now


def _print_json(now: Reading, _: Reading | None) -> None:
    line = json_format.MessageToJson(
        now.status, indent=None, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
    print(line, flush=True)


def _watch_in_place(
    stub: executor_pb2_grpc.ModelExecutorServiceStub, console: Console, interval_s: float
) -> None:
    """Repeats until interrupted or the server fails."""
    before = _read(stub)
    with Live(render(before, None), console=console, auto_refresh=False) as live:
        while True:
            time.sleep(interval_s)
            now = _read(stub)
            live.update(render(now, before), refresh=True)
            before = now


def render(now: Reading, before: Reading | None) -> RenderableType:
    """The status as a line about the gateway and a table of workers; with rates since `before`."""
    status = now.status
    line = (
        f"{_enum_word(executor_pb2.ServerState.Name(status.state))}  version {status.version}"
        f"  up {_duration(status.uptime_ms / 1000)}  {status.caches} caches"
        f"  {status.operations_in_flight} operations in flight  {_bytes(status.memory_bytes)}"
    )
    limits = (
        f"{status.connections} connections  {status.sessions} sessions"
        f"  {_bytes(status.journal_bytes)} of tokens  {_bytes(status.unread_bytes)} of answers unread"
        f"  longest stall {status.longest_stall_ms} ms  {sum(status.refusals.values())} refused"
    )
    if before is not None and (elapsed_s := now.taken_s - before.taken_s) > 0:
        refused = sum(status.refusals.values()) - sum(before.status.refusals.values())
        limits += f"  {refused / elapsed_s:.1f} refused/s"
    earlier = {worker.worker_id: worker for worker in before.status.workers} if before else {}
    rows = []
    for worker in status.workers:
        cells = worker_cells(worker)
        if before is not None:
            cells += rate_cells(worker, earlier.get(worker.worker_id), now.taken_s - before.taken_s)
        rows.append(cells)
    table = _Workers(_COLUMNS if before is None else (*_COLUMNS, *_RATE_COLUMNS), rows)
    notes = []
    # Workers of one machine run on the same ones, as a rule.
    for used in dict.fromkeys(tuple(w.executor.kernels) for w in status.workers if w.executor.kernels):
        ids = ", ".join(w.worker_id for w in status.workers if tuple(w.executor.kernels) == used)
        slow = "  slow, see the log" if NOT_COMPILED in used else ""
        notes.append(Text(escaped(f"kernels of {ids}: {', '.join(used)}{slow}")))
    return Group(Text(escaped(line)), Text(escaped(limits)), table, *notes)


class _Workers:
    """A table of as many columns as the console has room for: those left are whole."""

    def __init__(self, names: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        self._names = names
        # As Text: rich would read markup in them.
        self._rows = [[Text(escaped(cell)) for cell in row] for row in rows]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Table]:
        shown, gap = self._fitting(options.max_width)
        table = Table(box=None, header_style="bold", padding=(0, gap, 0, 0), pad_edge=False)
        for name in (self._names[i] for i in shown):
            table.add_column(name, justify="left" if name in _TEXT_COLUMNS else "right", overflow="fold")
        for row in self._rows:
            table.add_row(*(row[i] for i in shown))
        yield table

    def _fitting(self, width: int) -> tuple[list[int], int]:
        """The columns that fit, in their order, and the blanks between two of them."""
        widths = [
            max([len(name), *(row[i].cell_len for row in self._rows)]) for i, name in enumerate(self._names)
        ]
        first = [self._names.index(name) for name in _FIRST_COLUMNS if name in self._names]
        by_rank = first + [i for i in range(len(self._names)) if i not in first]
        gap = 2 if sum(widths[i] + 2 for i in first) - 2 <= width else 1
        ends = itertools.accumulate(widths[i] + gap for i in by_rank)
        count = sum(end - gap <= width for end in ends)
        return sorted(by_rank[: max(1, count)]), gap


def worker_cells(worker: executor_pb2.WorkerStatus) -> list[str]:
    """The cells of one worker, in the order of the columns."""
    state = _enum_word(executor_pb2.WorkerState.Name(worker.state))
    if worker.state == executor_pb2.WORKER_STATE_STARTING:
        state += f" {worker.load_progress:.0%}"
    pool, counts, executor = worker.pool, worker.counts, worker.executor
    return [
        worker.worker_id,
        str(worker.pid),
        str(worker.epoch),
        executor.device,
        executor.runner,
        state,
        str(pool.sequences),
        str(pool.pages_referenced),
        str(pool.pages_free),
        str(pool.pages_cached),
        str(pool.pages_total),
        str(worker.operations_in_flight),
        str(counts.prefill_operations),
        str(counts.decode_operations),
        _mean_ms(counts.prefill_ns, counts.prefill_operations),
        _mean_ms(counts.decode_ns, counts.decode_operations),
        f"{counts.batch_items / counts.steps:.1f}" if counts.steps else "-",
        _bytes(worker.memory_bytes),
    ]


def rate_cells(
    worker: executor_pb2.WorkerStatus, earlier: executor_pb2.WorkerStatus | None, elapsed_s: float
) -> list[str]:
    """Rates between two readings. None for a worker that was restarted in between: it counts from 0 again."""
    if earlier is None or earlier.epoch != worker.epoch or elapsed_s <= 0:
        return ["-"] * len(_RATE_COLUMNS)
    now, before = worker.counts, earlier.counts
    grown = (
        now.step_tokens - before.step_tokens,
        now.prefill_operations - before.prefill_operations,
        now.decode_operations - before.decode_operations,
        now.steps - before.steps,
    )
    return [f"{count / elapsed_s:.1f}" for count in grown]


def _mean_ms(total_ns: int, count: int) -> str:
    return f"{total_ns / count / 1e6 if count else 0:.1f}"


def _enum_word(name: str) -> str:
    """`ready` of `WORKER_STATE_READY`."""
    return name.rpartition("_STATE_")[2].lower()


def _duration(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02}m{rest:02}s" if hours else f"{minutes}m{rest:02}s"


def _bytes(count: int) -> str:
    size, unit = float(count), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if size < 1024:
            break
        size, unit = size / 1024, larger
    return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
