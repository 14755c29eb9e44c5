"""`quire serve` of what cannot be served ends by itself, once, and one line says why."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from service.model_names import shipped_model_dir
from tests import quire_command
from tests.bad_directories import make_good
from tests.e2e.test_gguf import Q4_K_M, make
from tests.service.test_quantised import QUANTISED
from workers.common.protocol import EXIT_CONFIG

UNEXPLAINED = "tensors of GPTQ and AWQ"
Flags = list[str]
# Writes a model into a directory, and returns flags.
Make = Callable[[Path], Flags]


def started(*flags: str) -> subprocess.CompletedProcess[str]:
    return quire_command.completed("serve", "--listen", "127.0.0.1:0", *flags)


def unexplained(directory: Path) -> Flags:
    damage, _ = QUANTISED[UNEXPLAINED]
    damage(make_good(directory / "model", sharded=False))
    return ["--model", str(directory / "model"), "--gateways", "2", "--workers", "2"]


def cut_short(directory: Path) -> Flags:
    file = make(directory, Q4_K_M)
    file.write_bytes(file.read_bytes()[:-1000])
    return ["--model", str(file.parent)]


def fifo(directory: Path) -> Flags:
    os.mkfifo(directory / "model.gguf")
    return ["--model", str(directory / "model.gguf")]


@dataclass(frozen=True)
class Refused:
    """By the gateway, before its port listens."""

    make: Make
    says: str
    status: int = EXIT_CONFIG


# All of them: tests/service/test_quantised.py and test_config.py, tests/workers/test_gguf_headers.py.
BEFORE_IT_LISTENS = {
    "tensors that config.json does not explain, to several gateways": Refused(
        unexplained, QUANTISED[UNEXPLAINED][1]
    ),
    "a GGUF file that is cut short": Refused(
        cut_short, "ends beyond the end of the file, which is cut short"
    ),
    "a draft model that is none": Refused(
        lambda directory: ["--model", "storyteller", "--draft-model", str(directory)],
        "it has no config.json",
        2,
    ),
    "a GGUF file that is none": Refused(fifo, "is refused: model.gguf is no regular file; must be", 2),
}


@pytest.mark.parametrize("case", BEFORE_IT_LISTENS.values(), ids=list(BEFORE_IT_LISTENS))
def test_what_the_gateway_sees_is_refused_before_its_port_listens(case: Refused, tmp_path: Path) -> None:
    done = started(*case.make(tmp_path))
    assert done.returncode == case.status
    (line,) = done.stderr.splitlines()
    assert line.startswith("quire: ") and case.says in line


# All that is wrong with directories: tests/workers/test_bad_directories.py.
BY_THE_WORKER: dict[str, tuple[Make, str]] = {
    "more pages than there is memory": (lambda _: ["--kv-pages", "1000000000"], "kv_pages"),
    "a device that is not there": (lambda _: ["--device", "cuda"], "no CUDA device"),
    "a draft model with another tokenizer": (
        lambda _: ["--model", "storyteller", "--draft-model", str(shipped_model_dir("adder"))],
        "it needs the tokenizer of the model, and that has the token",
    ),
    "a model that cannot be split": (
        lambda _: ["--model", "paged-attention", "--tensor-parallel", "2"],
        "tensor_parallel = 2, and paged-attention cannot be split",
    ),
}


def test_a_model_without_experts_ends_a_server_that_is_to_return_them() -> None:
    flags = ["--openai-listen", "127.0.0.1:0", "--openai-routed-experts", "npy"]
    done = started("--model", "paged-attention", "--kv-pages", "64", *flags)
    assert done.returncode == EXIT_CONFIG and "Traceback" not in done.stderr
    (record,) = [json.loads(line) for line in done.stderr.splitlines() if "cannot start workers" in line]
    assert record["error"] == (
        "openai_routed_experts = npy needs a model with experts: the served model has no experts"
    )


@pytest.mark.parametrize("name", BY_THE_WORKER)
def test_what_a_worker_refuses_ends_the_server(name: str, tmp_path: Path) -> None:
    """One worker was started: to try again cannot help."""
    if name == "a device that is not there" and torch.cuda.is_available():
        pytest.skip("this machine has a CUDA device")
    make_flags, says = BY_THE_WORKER[name]
    done = started("--no-self-check", *make_flags(tmp_path))
    records = [json.loads(line) for line in done.stderr.splitlines() if line.startswith("{")]
    (refusal,) = (r["error"] for r in records if r["event"] == "cannot serve with this configuration")
    assert done.returncode == EXIT_CONFIG and re.search(says, refusal)
    assert "Traceback" not in done.stderr
    assert not any("model" in record for record in records), "it is not announced before it is checked"
    assert [record["event"] for record in records].count("worker started") == 1
