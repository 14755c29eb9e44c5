"""`quire status`: a table of the workers, once or repeatedly with rates."""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass

import grpc
from quire.v1 import executor_pb2, executor_pb2_grpc
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from service.cli.channel import CONTROL_TIMEOUT_S, open_channel, print_error
from service.printable import escaped

# Where there is no terminal whose width counts, every column is shown in full.
_WIDTH_WITHOUT_TERMINAL = 240
_COLUMNS = (
    "worker", "pid", "epoch", "device", "runner", "state", "seqs", "used", "free", "cached", "pages",
    "running", "prefills", "decodes", "prefill ms", "decode ms", "batch", "memory",
)  # fmt: skip
_RATE_COLUMNS = ("tokens/s", "prefills/s", "decodes/s", "steps/s")
_TEXT_COLUMNS = frozenset({"worker", "device", "runner", "state"})
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
    if not console.is_terminal:
        console.width = _WIDTH_WITHOUT_TERMINAL
    with open_channel(options) as channel:
        stub = executor_pb2_grpc.ModelExecutorServiceStub(channel)
        try:
            if interval_s is None:
                console.print(render(_read(stub), None))
            else:
                _watch(stub, console, interval_s)
        except grpc.RpcError as error:
            print_error(error)
            return 1
        except KeyboardInterrupt:
            # The only way to end --watch, so not a failure.
            return 0 if interval_s is not None else 1
    return 0


def _read(stub: executor_pb2_grpc.ModelExecutorServiceStub) -> Reading:
    status = stub.GetStatus(executor_pb2.GetStatusRequest(), timeout=CONTROL_TIMEOUT_S)
    return Reading(status, time.monotonic())


def _watch(stub: executor_pb2_grpc.ModelExecutorServiceStub, console: Console, interval_s: float) -> None:
    """Repeats until interrupted or the server fails. In place on a terminal, else one below the other."""
    before = _read(stub)
    if not console.is_terminal:
        console.print(render(before, None))
        while True:
            time.sleep(interval_s)
            now = _read(stub)
            console.print(render(now, before))
            before = now
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
    table = Table(box=None, header_style="bold", pad_edge=False)
    for name in _COLUMNS if before is None else (*_COLUMNS, *_RATE_COLUMNS):
        table.add_column(name, justify="left" if name in _TEXT_COLUMNS else "right", no_wrap=True)
    earlier = {worker.worker_id: worker for worker in before.status.workers} if before else {}
    for worker in status.workers:
        cells = worker_cells(worker)
        if before is not None:
            cells += rate_cells(worker, earlier.get(worker.worker_id), now.taken_s - before.taken_s)
        # As Text: rich would read markup in them.
        table.add_row(*(Text(escaped(cell)) for cell in cells))
    slow = ", ".join(w.worker_id for w in status.workers if NOT_COMPILED in w.executor.kernels)
    note = [Text(f"slow: the CPU kernels of {escaped(slow)} are not compiled, see the log")] if slow else []
    return Group(Text(escaped(line)), table, *note)


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
