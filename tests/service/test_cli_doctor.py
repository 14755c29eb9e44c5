"""`quire doctor`: a line for each thing, advice for what is not ok, whatever hangs or is missing."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import socket
import sys
from importlib import metadata
from pathlib import Path

import pytest
from quire.cli.main import main

from service.auth.connections import TooFewDescriptors
from service.cli import child, doctor, probes
from service.cli.probes import OK, PROBLEM, SLOW, Finding
from service.config import Config
from service.data_directory import data_directories, data_directory
from tests.forks import WORKERS, asked, fork_server
from tests.service.journal_traffic import open_journal

ROOT = Path(__file__).resolve().parents[2]
NAMES = {
    "settings", "python", "cores", "memory", "huge pages", "/dev/shm", "open files", "clock", "address",
    "disk", "fsync", "cpu", "products", "gpu", "bandwidth",
}  # fmt: skip


@pytest.fixture(autouse=True)
def _free_address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setenv("QUIRE_LISTEN", "127.0.0.1:0")


def found(name: str, **settings: object) -> list[Finding]:
    return [*probes.PROBES[name](dataclasses.replace(Config(), **settings))]  # type: ignore[arg-type]


def test_it_says_all_of_it_and_no_secret(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("QUIRE_TOKEN", "HF_TOKEN", "QUIRE_SECRET_TOKEN"):
        monkeypatch.setenv(name, "hunter2")
    # They import torch; those of other tests do it themselves.
    monkeypatch.setattr(child, "subprocess", asked(fork_server(*WORKERS)))
    status = main(["doctor", "--json"])
    out = capsys.readouterr().out
    findings = [Finding(**one) for one in json.loads(out)]
    assert {finding.name for finding in findings} >= NAMES
    assert all(finding.advice for finding in findings if finding.state != OK)
    assert status == any(finding.state == PROBLEM for finding in findings)
    settings = findings[0]
    assert settings.state == PROBLEM and "config check" in settings.advice, "of QUIRE_SECRET_TOKEN"
    assert "hunter2" not in out


def test_it_fits_80_columns_and_advises(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    long = Finding("products", SLOW, "torch: " + "there is no build, " * 9, "compile " * 20)
    escape = Finding("cpu", OK, "\x1b[2J", "is not shown")
    for part in ("_settings", "_limits"):
        monkeypatch.setattr(doctor, part, lambda _: [])
    monkeypatch.setattr(doctor, "_torch", list)
    monkeypatch.setattr(doctor, "_system", lambda _: [long, escape])
    assert main(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80 and lines[0].startswith("slow    products")
    assert lines[-1] == "ok      cpu        \\x1b[2J"
    (advice,) = (index for index, line in enumerate(lines) if "-> compile" in line)
    assert all(line.startswith(" " * 19) for line in lines[1:-1]) and advice


@pytest.mark.parametrize("other_model", [False, True])
def test_the_address_of_a_running_server_is_no_problem(tmp_path: Path, *, other_model: bool) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        (finding,) = found("address", listen=address)
        assert finding.state == PROBLEM, "of anybody else"
        model = str(tmp_path) if other_model else Config().model
        directory = data_directory(Config(listen=address, model=model))
        assert directory is not None
        with contextlib.closing(open_journal(directory)):
            (finding,) = found("address", listen=address)
        assert (finding.state, finding.text) == (OK, f"{address} is that of the running server")


def test_a_home_that_is_no_directory_is_a_problem_of_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_STATE_HOME")
    monkeypatch.setenv("HOME", "/dev/null")
    (address,) = found("address", listen="127.0.0.1:50999")
    assert address.text == "127.0.0.1:50999 is free" or address.state == PROBLEM
    assert found("disk", listen="127.0.0.1:50999")[0].state in (OK, SLOW, PROBLEM)
    assert data_directories() == []


def test_without_torch_the_rest_is_known(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "torch.py").write_text("raise ModuleNotFoundError(\"No module named 'torch'\")\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert main(["doctor", "--json"]) == 1
    findings = {one["name"]: Finding(**one) for one in json.loads(capsys.readouterr().out)}
    assert findings["torch"].state == PROBLEM and "No module named 'torch'" in findings["torch"].text
    assert {"python", "disk", "fsync", "address"} <= findings.keys()


def test_what_hangs_is_a_problem_and_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So do the processes that it has started itself."""
    (tmp_path / "endless.py").write_text("import time\ntime.sleep(10000)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(child.NoAnswer, match=r"no answer within 0\.2 s"):
        child.ask("endless", timeout_s=0.2)


def test_what_was_said_before_a_failure_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = "import sys\nprint('{\"a\": 1}', flush=True)\nprint('no json')\nsys.exit('the disk\\nis gone')\n"
    (tmp_path / "failing.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(child.NoAnswer) as caught:
        child.ask("failing", timeout_s=60)
    assert (caught.value.why, caught.value.lines) == ("is gone", [{"a": 1}])


def test_no_code_of_the_current_directory_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An operator may ask in a directory of downloads."""
    for name in ("tomllib", "grpc", "psutil", "service"):
        (tmp_path / f"{name}.py").write_text("open('ran', 'w')\nraise SystemExit('planted')\n")
    elsewhere = [path for path in sys.path if path not in ("", str(Path.cwd()))]
    monkeypatch.setattr(sys, "path", [str(ROOT), *elsewhere])
    monkeypatch.chdir(tmp_path)
    assert "disk" in {finding.name for finding in doctor._system("")}
    assert not (tmp_path / "ran").exists()


def test_the_probe_that_hangs_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    said = [dataclasses.asdict(Finding(name, OK, "")) for name in [*probes.PROBES][:-1]]

    def hang(*_: str, timeout_s: float) -> None:
        raise child.NoAnswer(f"no answer within {timeout_s:g} s", said)

    monkeypatch.setattr(doctor, "ask", hang)
    *others, last = doctor._system("")
    assert len(others) == len(said)
    assert (last.name, last.state, last.text) == ("disk", PROBLEM, "no answer within 15 s")


CONFIG = Config()
LIMITS = {"cores": 16, "usable_cores": 2.5, "memory_bytes": 64 << 30, "available_bytes": 8 << 30}


def limits_found(monkeypatch: pytest.MonkeyPatch, config: Config = CONFIG, **facts: object) -> list[Finding]:
    found = LIMITS | {"memory_limit_bytes": None} | facts
    monkeypatch.setattr(doctor, "ask", lambda *_, **__: [found])
    return [*doctor._limits(config)]


def test_more_threads_than_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    cores, _ = limits_found(monkeypatch)
    assert cores == Finding("cores", OK, "2.5 of 16 are usable, by affinity and cgroup")
    for threads, state in (1, OK), (2, SLOW):
        config = Config(workers=2, threads_per_worker=threads)
        cores, _ = limits_found(monkeypatch, config)
        assert cores.state == state and ("--threads-per-worker" in cores.advice) == (state == SLOW)
    cores, _ = limits_found(monkeypatch, usable_cores=16)
    assert (cores.state, cores.text) == (OK, "all 16 are usable")


def test_memory_that_a_cgroup_does_not_allow(monkeypatch: pytest.MonkeyPatch) -> None:
    _, memory = limits_found(monkeypatch, memory_limit_bytes=9 << 30)
    assert memory == Finding("memory", OK, "8.0 GiB available of 64.0; a cgroup allows 9.0")
    _, memory = limits_found(monkeypatch, available_bytes=1 << 29)
    assert memory.state == PROBLEM and "1 GiB" in memory.advice


def test_huge_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes, "_HUGE_PAGES", tmp_path / "enabled")
    assert found("huge pages")[0].state == SLOW
    for text, state in (("always [madvise] never\n", OK), ("always madvise [never]\n", SLOW)):
        (tmp_path / "enabled").write_text(text)
        assert found("huge pages")[0].state == state


def test_files_that_may_not_be_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes, "with_descriptors", lambda c: dataclasses.replace(c, max_connections=100))
    (files,) = found("open files")
    assert files.state == SLOW and "100 connections" in files.text and "4096" in files.text

    def refuse(_: Config) -> Config:
        raise TooFewDescriptors("30 are too few")

    monkeypatch.setattr(probes, "with_descriptors", refuse)
    assert found("open files")[0].state == PROBLEM


def test_an_address_in_use() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        (address,) = found("address", listen=f"127.0.0.1:{taken.getsockname()[1]}")
        assert address.state == PROBLEM and "end it, or choose another address" in address.text
    assert found("address", listen="127.0.0.1:0")[0].state == OK


def test_a_slow_disk_and_one_that_cannot_be_written_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = sorted(tmp_path.rglob("*"))
    disk, sync = found("disk", data_dir=str(tmp_path / "not" / "yet"))
    assert disk.state == OK and str(tmp_path) in disk.text and "ms to sync" in sync.text
    assert sorted(tmp_path.rglob("*")) == before
    monkeypatch.setattr(probes, "_sync_s", lambda _: 0.05)
    sync = found("disk")[1]
    assert sync.state == SLOW and "50.00 ms" in sync.text and "--data-dir" in sync.advice

    def refuse(_: int) -> float:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(probes, "_sync_s", refuse)
    (disk,) = found("disk")
    assert disk.state == PROBLEM and "Permission denied" in disk.text


def test_other_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    needed = ["numpy>=2.0", "absent>=1", 'pytest>=1; extra == "dev"', "psutil<1"]
    monkeypatch.setattr(metadata, "requires", lambda _: needed)
    (python,) = found("python")
    assert python.state == PROBLEM and "absent is missing" in python.text and "is not <1" in python.text
    assert "pytest" not in python.text and "numpy" not in python.text


FACTS = {
    "cpu": "A CPU", "instruction_sets": ["avx2"], "kernels": None, "library": None, "compiler": None,
    "products": {"bfloat16": "torch: there is no build; expect it to be slow", "float32": "cpu-avx2"},
    "torch": "2.13.0", "gpus": [], "cuda": None, "has_device_files": False, "driver": "",
    "warning": "", "triton": None, "read_bytes_per_s": 4e9,
}  # fmt: skip
GPU = {"name": "A GPU", "capability": "9.0", "memory_bytes": 80 << 30, "free_bytes": 79 << 30}


@pytest.mark.parametrize(
    ("facts", "name", "state", "said"),
    [
        ({}, "products", SLOW, "install g++"),
        ({"compiler": "/usr/bin/g++"}, "products", SLOW, "compile them"),
        ({"instruction_sets": []}, "cpu", SLOW, "another machine"),
        (
            {"products": dict.fromkeys(("bfloat16", "float32"), "torch: QUIRE_CPU_ISA = none")},
            "products",
            SLOW,
            "unset",
        ),
        ({}, "bandwidth", SLOW, "4.0 GB/s"),
        ({}, "gpu", OK, "none"),
        (
            {"has_device_files": True, "warning": "the driver is too old"},
            "gpu",
            SLOW,
            "the driver is too old",
        ),
        (
            {"gpus": [GPU], "cuda": "13.0"},
            "gpu",
            OK,
            "A GPU, sm_90, 79.0 GiB free of 80.0, CUDA 13.0, driver unknown",
        ),
        ({"gpus": [GPU]}, "triton", PROBLEM, "--device cpu"),
    ],
)
def test_what_torch_says_is_judged(
    facts: dict[str, object], name: str, state: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "ask", lambda *_, timeout_s: [FACTS | facts])
    finding = next(finding for finding in doctor._torch() if finding.name == name)
    assert finding.state == state and said in finding.text + finding.advice
