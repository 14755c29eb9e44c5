"""A worker's process when no gateway comes to it."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from google.protobuf import json_format
from quire.v1 import worker_pb2

from benchmarks.checkout import ROOT, environment
from tests.forks import WORKERS, Forked, ForkedWorker, fork_server
from workers import pool_member
from workers import process as entry_point
from workers.common.protocol import SECRET_VARIABLE

# Far more than it takes.
PATIENCE_S = 60


def start(socket: str, grace_s: float) -> ForkedWorker:
    config = worker_pb2.WorkerConfig(
        model="paged-attention", kv_pages=8, device="cpu", threads=1, log_level="info", orphan_grace_s=grace_s
    )
    config.max_batch_tokens = config.max_batch_items = 16
    command = [sys.executable, "-m", "workers", "--socket", socket]
    command += ["--config", json_format.MessageToJson(config, indent=None)]
    settings = environment(ROOT) | {SECRET_VARIABLE: "opensesame"}
    return ForkedWorker(fork_server(*WORKERS), command, env=settings, cwd=str(ROOT), is_session=False)


def test_it_ends_by_itself() -> None:
    """If nobody connects, with a gateway or without; at once, if that died before it was written down."""
    with tempfile.TemporaryDirectory() as place:
        lonely, orphan, unwritten = (
            start(f"{place}/{name}", grace_s) for name, grace_s in (("a", 0.5), ("b", 0.5), ("c", 600))
        )
        for worker in (lonely, orphan):
            worker.stdin.write(b"\n")
        for worker in (orphan, unwritten):
            worker.stdin.close()
        assert lonely.wait(PATIENCE_S) == -signal.SIGALRM
        lonely.stdin.close()
        assert orphan.wait(PATIENCE_S) == -signal.SIGALRM
        assert unwritten.wait(PATIENCE_S) == -signal.SIGKILL


def test_it_needs_a_secret(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delenv(SECRET_VARIABLE, raising=False)
    monkeypatch.setattr(sys, "argv", ["workers", "--socket", "/nowhere", "--config", "{}"])
    with pytest.raises(SystemExit):
        entry_point._parse_arguments()
    assert SECRET_VARIABLE in capsys.readouterr().err


def log_lines(file: int, *arguments: str) -> None:
    """Forked from a process with its imports, that would take seconds each time."""
    command = [sys.executable, "-m", "tests.workers.log_lines", *arguments]
    server = fork_server(*WORKERS)
    assert Forked(server, command, env=environment(ROOT), cwd=str(ROOT), files=(0, 1, file)).wait(60) == 0


def test_a_line_of_the_log_is_written_in_one_piece() -> None:
    """Gateway and workers write to one pipe: a line in two writes has those of others in its middle."""
    # What is written at once to such a pipe is read at once.
    read_end, write_end = os.pipe2(os.O_DIRECT)
    try:
        log_lines(write_end, "json")
        line = os.read(read_end, 1 << 16)
        assert json.loads(line)["event"] == "hello" and line.endswith(b"\n")
        os.set_blocking(read_end, False)
        with pytest.raises(BlockingIOError):
            os.read(read_end, 1 << 16)
    finally:
        os.close(read_end)
        os.close(write_end)


def test_lines_of_all_threads_say_whose_they_are(tmp_path: Path) -> None:
    """The model is loaded on a thread of its own, also by modules that use `logging`."""
    with (tmp_path / "log").open("wb") as file:
        log_lines(file.fileno(), "json", "another")
    found = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    assert [(line["worker_id"], line["logger"], line["level"], line["event"]) for line in found] == [
        ("worker-3", "workers.a", "info", "one"),
        ("worker-3", "workers.b", "info", "other"),
        ("worker-3", "workers.a", "error", "failed"),
        ("worker-3", "workers.b", "error", "failed too"),
        ("worker-3", "workers.a", "error", "later"),
    ]
    assert found[0]["number"] == 1
    assert all(line["exception"].endswith("ValueError: planted") for line in found[2:])
    assert all(line["pid"] and line["timestamp"] for line in found)


def test_colours_are_for_terminals(tmp_path: Path) -> None:
    with (tmp_path / "log").open("wb") as file:
        log_lines(file.fileno(), "pretty")
    written = (tmp_path / "log").read_bytes()
    assert b"hello" in written and b"\x1b" not in written
    assert written.count(b"\n") == 1, "what a field has is in one line"


@pytest.mark.parametrize("module", [entry_point, pool_member])
def test_its_threads_take_turns_as_often_as_those_of_the_gateway(
    module: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With Python's five milliseconds, a command waited for that long while a step computed in Python."""
    arguments = argparse.Namespace(log_format="json", log_level="info")
    given = ("", worker_pb2.WorkerConfig(), "") if module is entry_point else arguments
    monkeypatch.setattr(module, "_parse_arguments", lambda: given)
    for name in ("configure_logging", "end_with_parent", "_serve"):
        monkeypatch.setattr(module, name, lambda *_: None)
    for name in ("signal", "pthread_sigmask"):
        monkeypatch.setattr(signal, name, lambda *_: None)
    loop = SimpleNamespace(run_until_complete=lambda _: int(sys.getswitchinterval() * 1e6))
    monkeypatch.setattr("uvloop.new_event_loop", lambda: loop)
    before_s = sys.getswitchinterval()
    try:
        sys.setswitchinterval(0.005)
        assert module.main() == 500
    finally:
        sys.setswitchinterval(before_s)


def test_gpus_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """It sees no others, and the rest of its configuration is as without them."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "all")
    config = worker_pb2.WorkerConfig(device="cpu")
    entry_point.see_own_devices(config)
    assert (config.device, os.environ["CUDA_VISIBLE_DEVICES"]) == ("cpu", "all")
    config = worker_pb2.WorkerConfig(device="auto:GPU-1,GPU-2")
    entry_point.see_own_devices(config)
    assert (config.device, os.environ["CUDA_VISIBLE_DEVICES"]) == ("auto", "GPU-1,GPU-2")


@pytest.mark.parametrize("module", ["process", "pool_member"])
def test_torch_is_not_loaded_before_the_devices_are_chosen(module: str) -> None:
    code = f"import workers.{module}, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


def test_what_triton_lacks_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before a model is loaded: a compiler, and a directory for what it has compiled."""
    for name in ("CC", "TRITON_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TRITON_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "C compiler" in entry_point.triton_problem()
    compiler = tmp_path / "clang"
    compiler.write_text("")
    compiler.chmod(0o755)
    assert not entry_point.triton_problem()
    assert (tmp_path / ".triton" / "cache").is_dir(), "the one that Triton will use"
    monkeypatch.setenv("TRITON_CACHE_DIR", str(compiler / "cache"))
    assert "set TRITON_CACHE_DIR" in entry_point.triton_problem()
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("CC", "cc")
    monkeypatch.delenv("TRITON_CACHE_DIR")
    assert not entry_point.triton_problem()


def test_a_missing_package_is_named(tmp_path: Path) -> None:
    """On a GPU's image without them. The packages that are needed are said."""
    (tmp_path / "uvloop.py").write_text("raise ModuleNotFoundError(name='uvloop')")
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"}
    done = subprocess.run(
        [sys.executable, "-m", "workers"], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 1
    assert done.stderr.startswith("python -m workers needs uvloop") and "protobuf" in done.stderr


def test_a_step_has_more_tokens_on_a_gpu() -> None:
    auto = worker_pb2.WorkerConfig()
    assert entry_point._step_tokens(auto, "cpu") == 512
    assert entry_point._step_tokens(auto, "cuda:0") == 4096
    assert entry_point._step_tokens(worker_pb2.WorkerConfig(max_batch_tokens=7), "cuda:0") == 7
