"""`quire load` against a real server: every way to call, what it leaves behind, and how it ends."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from quire.cli.load.processes import ClientProcesses
from quire.cli.main import main
from quire.cli.terminal import CommandFailed

from benchmarks.checkout import ROOT, environment
from tests import quire_command
from tests.gateway_process import GatewayProcess

SHORT = ("--warm-up", "0.2", "--duration", "0.5")


@pytest.fixture
def load(gateway: GatewayProcess, tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """Runs the command, and returns what it wrote."""

    def loaded(*arguments: str) -> dict[str, Any]:
        out = tmp_path / "out.json"
        assert main(["load", "--target", gateway.address, "--out", str(out), *arguments]) == 0
        found: dict[str, Any] = json.loads(out.read_text())
        return found

    return loaded


RATE, CALLERS = ("--rate", "40", "--arrivals", "constant"), ("--callers", "3")


@pytest.mark.parametrize(
    ("mode", "pace"),
    [
        ("session", RATE),
        ("execute", CALLERS),
        # The calls of these: test_drivers.py.
        pytest.param("unary", RATE, marks=pytest.mark.thorough),
        pytest.param("batch", CALLERS, marks=pytest.mark.thorough),
    ],
)
def test_every_mode_runs_what_was_asked_and_leaves_nothing(
    gateway: GatewayProcess, load: Callable[..., dict[str, Any]], mode: str, pace: tuple[str, ...]
) -> None:
    lengths = ("--prompt-tokens", "8-40", "--output-tokens", "1-5", "--shared-prefix-tokens", "16")
    document = load(*pace, "--mode", mode, "--batch", "4", "--processes", "2", *lengths, *SHORT)
    [run] = document["runs"]
    requests = run["requests"]
    assert requests["done"] == requests["begun"] > 0 and run["errors"] == {}
    if "--rate" in pace:
        # From 0.2 s on, for half a second; of a batch, those that begin with it.
        assert requests["begun"] == 20
    assert run["ttft_ms"]["count"] == run["e2e_ms"]["count"] == requests["done"]
    # Execute may bring several tokens in a message.
    assert 0 < run["tbt_ms"]["count"] <= 4 * requests["done"]
    assert run["e2e_ms"]["max"] >= run["ttft_ms"]["max"] > 0
    assert run["server"]["steps"] > 0 and run["server"]["mean_batch"] >= 1
    assert len(run["client"]["processes"]) == 2
    gateway.wait_until(lambda: gateway.status().caches == 0)
    gateway.assert_pools_are_whole()


def test_a_trace_runs_at_its_times(load: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    lines = [
        {"at_s": i / 20, "prompt_tokens": 20, "output_tokens": 2, "shared_prefix": i % 2} for i in range(20)
    ]
    trace.write_text("\n".join(json.dumps(line) for line in lines))
    [run] = load("--trace", str(trace), "--shared-prefix-tokens", "16")["runs"]
    assert run["requests"] == {"begun": 20, "done": 20, "failed": 0, "unfinished": 0, "cut_off": 0}


def test_a_sweep_is_a_run_for_each_rate_and_a_page(
    load: Callable[..., dict[str, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.html"
    lengths = ("--prompt-tokens", "64", "--output-tokens", "3")
    document = load("--sweep", "20,40", *lengths, "--slo-ttft-ms", "60000", "--report", str(page), *SHORT)
    assert [run["pace"]["rate"] for run in document["runs"]] == [20, 40]
    for run in document["runs"]:
        assert run["goodput"]["share"] == 1
        assert run["tbt_ms"]["count"] == 2 * run["requests"]["done"], "outputs have the length"
        assert not run["server"]["prefix_hit_share"], "prompts are not those of another run"
    assert "requests/s asked" in page.read_text()
    printed = capsys.readouterr()
    assert "40 requests/s, poisson" in printed.out and "to first token" in printed.out


def test_errors_are_counted_by_reason(gateway: GatewayProcess, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    # A deadline that nothing can keep. Execute leaves nothing behind even so.
    arguments = ["--callers", "2", "--mode", "execute", "--timeout", "0.00001", "--out", str(out), *SHORT]
    assert main(["load", "--target", gateway.address, *arguments]) == 1
    [run] = json.loads(out.read_text())["runs"]
    assert set(run["errors"]) <= {"DEADLINE_EXCEEDED", "DEADLINE_PASSED", "OVERLOADED"} and run["errors"]
    assert run["requests"]["failed"] == run["requests"]["begun"]


def decoded(gateway: GatewayProcess) -> int:
    return sum(worker.counts.decode_operations for worker in gateway.status().workers)


def test_ctrl_c_ends_it_with_the_report_of_what_there_is(gateway: GatewayProcess, tmp_path: Path) -> None:
    out, before = tmp_path / "out.json", decoded(gateway)
    endless = ("--output-tokens", "1000", "--warm-up", "0", "--duration", "600")
    arguments = (
        "--target",
        gateway.address,
        "--out",
        str(out),
        "--callers",
        "2",
        "--mode",
        "session",
        *endless,
    )
    with quire_command.run("load", *arguments) as process:
        # Whoever asks for the second token has the first.
        gateway.wait_until(lambda: decoded(gateway) > before)
        process.send_signal(signal.SIGINT)
        printed, complaints = process.communicate(timeout=60)
    assert process.returncode == 1 and "Traceback" not in complaints
    [found] = json.loads(out.read_text())["runs"]
    assert found["interrupted"] and found["ttft_ms"]["count"] > 0
    assert found["throughput"]["output_tokens_per_s"] > 0
    assert "interrupted" in printed
    gateway.wait_until(lambda: gateway.status().caches == 0)


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGTERM])
def test_its_client_processes_end_with_it(gateway: GatewayProcess, sent: signal.Signals) -> None:
    before = decoded(gateway)
    endless = ("--output-tokens", "1000", "--warm-up", "0", "--duration", "600", "--processes", "2")
    arguments = ("load", "--target", gateway.address, "--callers", "2", *endless)
    with subprocess.Popen(
        [sys.executable, "-m", "quire.cli", *arguments],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=environment(ROOT),
    ) as process:
        gateway.wait_until(lambda: decoded(gateway) > before)
        started = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(sent)
    assert len(started) >= 2
    _, left = psutil.wait_procs(started, timeout=60)
    for other in left:
        other.kill()
    assert not left


@pytest.mark.parametrize("is_read", [True, False])
def test_the_files_are_written_whatever_becomes_of_the_output(
    gateway: GatewayProcess, tmp_path: Path, is_read: bool
) -> None:
    """A terminal without the sign for "at most", and a reader that leaves."""
    out = tmp_path / "out.json"
    arguments = ("--target", gateway.address, "--out", str(out), "--slo-ttft-ms", "60000", *SHORT)
    with subprocess.Popen(
        [sys.executable, "-m", "quire.cli", "load", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(ROOT) | {"PYTHONIOENCODING": "ascii"},
    ) as process:
        if not is_read:
            assert process.stdout is not None
            process.stdout.close()
            process.stdout = None
        printed, complaints = process.communicate(timeout=60)
    assert process.returncode == (0 if is_read else 1) and "Traceback" not in complaints
    assert json.loads(out.read_text())["runs"]
    assert not is_read or "with TTFT ? 60,000 ms" in printed


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--rate", "1", "--callers", "2"], "--rate and --callers exclude each other"),
        (["--prompt-tokens", "0"], "--prompt-tokens '0' is refused: must be at least 1"),
        (["--output-tokens", "many"], "--output-tokens 'many' is refused"),
        (["--prompt-tokens", "100000000"], "a sequence of this server has room for"),
    ],
)
def test_what_cannot_be_done_is_refused_in_one_line(
    gateway: GatewayProcess, capsys: pytest.CaptureFixture[str], arguments: list[str], says: str
) -> None:
    assert main(["load", "--target", gateway.address, *arguments]) == 2
    complaint = capsys.readouterr().err
    assert says in complaint and complaint.count("\n") == 1


async def test_a_client_process_that_fails_ends_the_run(gateway: GatewayProcess) -> None:
    """It ends at once, although it still listens for orders."""
    plan = SimpleNamespace(processes=1)
    connected = {"target": gateway.address, "tls": False}
    spec: Any = SimpleNamespace(plan=plan, connection=connected, mode="unary", timeout_s=30.0)
    async with ClientProcesses(spec, 1) as clients:
        with pytest.raises(CommandFailed, match="client process 0 has ended"):
            await asyncio.wait_for(clients.run(spec.plan, 0.0, asyncio.Event(), lambda _: None), 20)
