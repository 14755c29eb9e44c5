"""`quire top`: rates of what two readings differ by, restarts, and the terminal before and after."""

from __future__ import annotations

import contextlib
import io
import os
import pty
import re
import select
import signal
import subprocess
import sys
import termios
import time
from types import SimpleNamespace
from typing import Any, Self, cast

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration
from quire.cli import top
from quire.cli.main import main
from quire.cli.status import render
from quire.cli.top_view import Reading, frame
from quire.v1 import executor_pb2 as pb
from quire.v1 import types_pb2
from rich.console import Console

from benchmarks.checkout import ROOT, environment
from tests.fake_executor import FakeExecutor, rich_status, serving
from tests.gateway_process import GatewayProcess
from tests.quire_command import run

PATIENCE_S = 60.0
ATTACK = "\x1b[2J\x1b]0;x\x07[bold]\x9b"


def reading(at_s: float, count: int, **worker: Any) -> Reading:
    """One worker, which has done `count` times the same."""
    status = pb.GetStatusResponse(
        state=pb.SERVER_STATE_SERVING,
        uptime=Duration(seconds=int(at_s)),
        version="1.2.3",
        operations_in_flight=5,
    )
    status.refusals["QUEUE_FULL"] = 6 * count
    one = status.workers.add(
        **{"worker_id": "worker-0", "epoch": 1, "pid": 7, "state": 2, "operations_in_flight": 3} | worker
    )
    one.counts.CopyFrom(
        types_pb2.StepCounts(
            prefill_operations=2 * count, prefill_ns=count * 30_000_000,
            decode_operations=40 * count, decode_ns=count * 100_000_000,
            verify_operations=4 * count, steps=20 * count, batch_items=50 * count, step_tokens=5000 * count,
        )
    )  # fmt: skip
    one.pool.CopyFrom(
        types_pb2.PoolUsage(
            pages_total=100, pages_referenced=25, pages_cached=15, pages_free=60,
            prefix_query_tokens=100 * count, prefix_hit_tokens=40 * count,
        )
    )  # fmt: skip
    return Reading(status, at_s)


def shown(now: Reading, before: Reading | None, width: int = 200, **more: Any) -> list[str]:
    console = Console(width=width, file=io.StringIO())
    with console.capture() as capture:
        console.print(frame(now, before, "here:1", **more))
    return [line.rstrip() for line in capture.get().splitlines()]


def test_kv_on_disk_has_a_line_if_a_worker_stores_any() -> None:
    now, before = reading(13.0, 30), reading(11.0, 20)
    assert not any(line.startswith("KV on disk") for line in shown(now, before))
    for one, count in ((now, 30), (before, 20)):
        one.status.workers[0].kv_disk.CopyFrom(
            types_pb2.KvDiskUsage(
                bytes=3 << 20, max_bytes=1 << 30, stopped=True,
                wanted_pages=8 * count, read_pages=6 * count, written_pages=10 * count,
            )
        )  # fmt: skip
    (found,) = (line for line in shown(now, before) if line.startswith("KV on disk"))
    assert found == (
        "KV on disk 3.0 MiB of 1.0 GiB   pages/s read 30.0 (75% of those wanted)   written 50.0"
        "   1 of 1 workers store nothing"
    )


def test_drafts_have_a_line_if_there_were_any() -> None:
    now, before = reading(13.0, 30), reading(11.0, 20)
    assert not any(line.startswith("drafts") for line in shown(now, before))
    for one, count in ((now, 30), (before, 20)):
        counts = one.status.workers[0].counts
        counts.draft_tokens, counts.accepted_draft_tokens = 10 * count, 6 * count
    assert line(shown(now, before), "drafts") == ("drafts     tokens/s verified 50.0   60% of them accepted")
    assert "out 250.0" in line(shown(now, before), "tokens/s"), "a step can choose several tokens"


def line(lines: list[str], title: str) -> str:
    (found,) = (line for line in lines if line.split()[0] == title)
    return found


def cells(lines: list[str]) -> dict[str, str]:
    (index,) = (index for index, line in enumerate(lines) if line.startswith("worker "))
    names, row = (re.split(r" {2,}", line) for line in lines[index : index + 2])
    return dict(zip(names, row, strict=True))


def test_rates_are_what_two_readings_differ_by() -> None:
    lines = shown(reading(13.0, 30), reading(11.0, 20))
    assert line(lines, "tokens/s") == "tokens/s   in 500.0 (40% reused)   out 220.0   computed 25,000"
    # (2 + 40 + 4) * 10 in two seconds.
    assert line(lines, "operations") == "operations 230.0/s   5 in flight, 3 of them at workers"
    assert line(lines, "mean") == "mean ms    prefill 15.0   decode 2.5   verify 0.0   score -"
    assert line(lines, "refused") == "refused    30.0/s   180 in all   QUEUE_FULL 180"
    assert line(lines, "serving") == "serving    here:1   up 0m13s   version 1.2.3"
    assert cells(lines) == {
        "worker": "worker-0", "state": "ready", "epoch": "1", "queue": "3", "batch": "2.5",
        "tokens/s": "25,000", "decodes/s": "200.0", "prefill ms": "15.0", "decode ms": "2.5",
        "KV in use": "25% [|||:......]",
        "pages": "100", "hits": "40%", "memory": "0 B",
    }  # fmt: skip


@pytest.mark.parametrize("after", [{"epoch": 2}, {"pid": 8}, {}])
def test_counters_that_begin_anew_give_no_rate(after: dict[str, int]) -> None:
    """Also where a worker of another gateway has the same epoch, or counts more than the one before."""
    before, now = reading(11.0, 20), reading(13.0, 30 if after else 3, **after)
    lines = shown(now, before)
    assert line(lines, "tokens/s") == "tokens/s   in - (- reused)   out -   computed -"
    assert {cells(lines)[name] for name in ("batch", "tokens/s", "decodes/s", "prefill ms")} == {"-"}
    assert not re.search(r"-\d", "\n".join(lines).replace("worker-0", ""))


@pytest.mark.parametrize("width", [80, 160])
def test_it_fits_the_terminal(width: int) -> None:
    now, before = reading(13.0, 30), reading(11.0, 20)
    for index in range(1, 4):
        now.status.workers.add(worker_id=f"worker-{index}", state=index, trouble="it does not fit " * 20)
    lines = shown(now, before, width, notes=["x" * 300])
    assert max(map(len, lines)) <= width and len(lines) <= 24
    assert lines[1].startswith("xxx"), "what a low terminal must not cut off"
    header = next(line for line in lines if line.startswith("worker "))
    assert all(name in header for name in ("state", "queue", "batch", "tokens/s", "KV in use", "hits"))
    assert ("memory" in header) == (width == 160)


def test_names_of_servers_do_not_move_the_terminal() -> None:
    now = reading(13.0, 30, worker_id=ATTACK, trouble=ATTACK)
    now.status.version = ATTACK
    now.status.refusals[ATTACK] = 1000
    one = Reading(now.status, 1.0, ATTACK, adapters={ATTACK: 1})
    text = "\n".join(shown(one, None, 500, notes=[ATTACK]))
    assert text.replace("\n", "").isprintable() and text.count("[bold]") == 8, "markup is shown, too"


def test_numbers_of_servers_are_shown_whatever_they_are() -> None:
    """States of a later version, and more pages than there are."""
    now = reading(13.0, 30, state=99)
    now.status.state = cast("Any", 77)
    now.status.workers[0].pool.pages_referenced = 2**32 - 1
    text = "\n".join(shown(now, None))
    assert "77" in text and "99" in text and "[||||||||||]" in text
    Console(file=io.StringIO()).print(render(now.status, {}))


def test_once_prints_one_table(
    target: str, executor: FakeExecutor, capsys: pytest.CaptureFixture[str]
) -> None:
    executor.caches = {"a": [1] * 5, "b": [2] * 7, "c": [3]}
    executor.resident = {"worker-0": ["sql", "chat"]}
    assert main(["top", "--once", "--interval", "0.2", "--target", target]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(executor.calls["GetStatus"]) == 2
    assert line(lines, "serving").startswith(f"serving    {target}   model fake   up 1m01s")
    # The fake gives two on each page.
    assert line(lines, "caches").endswith("2+ of yours, with 12+ tokens")
    assert line(lines, "adapters") == "adapters   2 in memory of worker-0"
    assert sum(line.startswith("worker ") for line in lines) == 1
    assert "starting 42%" in lines[-1]


def test_what_the_token_may_not_see_is_left_out(
    target: str, executor: FakeExecutor, capsys: pytest.CaptureFixture[str]
) -> None:
    for method in ("ListCaches", "GetModelInfo"):
        for _ in range(2):
            executor.fail(method, rich_status(grpc.StatusCode.PERMISSION_DENIED, "ROLE_MISSING"))
    assert main(["top", "--once", "--interval", "0.01", "--target", target]) == 0
    said = capsys.readouterr().out
    assert "of yours" not in said and "model" not in said and "worker-0" in said
    executor.fail("GetStatus", rich_status(grpc.StatusCode.PERMISSION_DENIED, "ROLE_MISSING", "observe"))
    assert main(["top", "--once", "--target", target]) == 1
    assert capsys.readouterr().err == "quire: PERMISSION_DENIED ROLE_MISSING observe\n"


def test_a_real_server(
    gateway: GatewayProcess, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def work(_interval_s: float) -> None:
        cache_id = gateway.prefill([1] * 30).kv_cache.cache_id
        for _ in range(20):
            gateway.decode(cache_id, 3)

    monkeypatch.setattr(top, "time", SimpleNamespace(sleep=work, monotonic=time.monotonic))
    assert main(["top", "--once", "--target", gateway.address]) == 0
    lines = capsys.readouterr().out.splitlines()
    rates = re.findall(r"(?:in|out|computed) ([\d,.]+)", line(lines, "tokens/s"))
    tokens_in, tokens_out, computed = (float(rate.replace(",", "")) for rate in rates)
    # Rounding changes a rate by at most 0.05, or 0.5 from 1000 on.
    assert tokens_out > 0
    slack = 0.05 * 3 + 0.001 * computed
    assert tokens_in == pytest.approx(tokens_out * 30 / 20, abs=slack)
    assert computed == pytest.approx(tokens_out * 50 / 20, abs=slack)
    assert cells(lines)["state"] == "ready" and cells(lines)["batch"] == "1.0"


# Opens its controlling terminal, so that Ctrl-C is a signal, and becomes the command.
LEADER = """
import os, sys
os.close(os.open(os.ttyname(0), os.O_RDWR))
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""


class OnTerminal:
    """`quire top` in a terminal of 80 columns."""

    def __init__(self, target: str) -> None:
        self.ours, theirs = pty.openpty()
        termios.tcsetwinsize(theirs, (24, 80))
        self.theirs, self.before, self.text = theirs, termios.tcgetattr(theirs), ""
        command = [sys.executable, "-c", LEADER, "-m", "quire.cli", "top", "--interval", "0.1"]
        self.process = subprocess.Popen(
            [*command, "--target", target],
            stdin=theirs, stdout=theirs, stderr=theirs, cwd=ROOT, start_new_session=True,
            env=environment(ROOT) | {"TERM": "xterm"},
        )  # fmt: skip

    def read_until(self, wanted: str) -> None:
        give_up_s = time.monotonic() + PATIENCE_S
        while wanted not in self.text:
            assert time.monotonic() < give_up_s, f"{wanted} never came: {self.text[-3000:]!r}"
            self._read(0.1)

    def _read(self, wait_s: float) -> None:
        while select.select([self.ours], [], [], wait_s)[0]:
            self.text += os.read(self.ours, 1 << 16).decode()
            wait_s = 0.0

    def end(self) -> int:
        give_up_s = time.monotonic() + PATIENCE_S
        while self.process.poll() is None:
            assert time.monotonic() < give_up_s
            self._read(0.05)
        self._read(0.0)
        return self.process.returncode

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.ours)
        os.close(self.theirs)

    def is_restored(self) -> bool:
        """Echo and lines are back, and with them the screen of before and the cursor."""
        at = [self.text.rfind(f"\x1b[?{name}") for name in ("1049h", "1049l", "25l", "25h")]
        return 0 <= at[0] < at[1] and 0 <= at[2] < at[3] and termios.tcgetattr(self.theirs) == self.before


@pytest.mark.parametrize(
    ("keys", "status"),
    [(b"xq", 0), (b"", 128 + signal.SIGTERM)],
    ids=["q", "sigterm"],
)
def test_the_terminal_is_restored(target: str, keys: bytes, status: int) -> None:
    with OnTerminal(target) as terminal:
        terminal.read_until("worker-0")
        assert termios.tcgetattr(terminal.theirs) != terminal.before, "keys are read one by one"
        os.write(terminal.ours, keys)
        if not keys:
            terminal.process.terminate()
        assert terminal.end() == status
        assert terminal.is_restored()
        assert "Traceback" not in terminal.text


def test_it_survives_the_server() -> None:
    before, after = FakeExecutor(), FakeExecutor()
    with contextlib.ExitStack() as end:
        with serving(before) as target:
            terminal = end.enter_context(OnTerminal(target))
            terminal.read_until("worker-0")
        terminal.read_until("no answer; these figures are")
        terminal.read_until("UNAVAILABLE")
        end.enter_context(serving(after, int(target.rpartition(":")[2])))
        terminal.read_until("the server answers again, after")
        os.write(terminal.ours, b"q")
        assert terminal.end() == 0 and terminal.is_restored()


def test_in_a_pipe_it_goes_on_until_interrupted(target: str) -> None:
    with run("top", "--interval", "0.1", "--target", target) as process:
        assert process.stdout is not None
        rows = 0
        while rows < 3:
            rows += process.stdout.readline().startswith("worker-0")
        process.send_signal(signal.SIGINT)
        _, error = process.communicate(timeout=PATIENCE_S)
        assert (process.returncode, error) == (0, "")
