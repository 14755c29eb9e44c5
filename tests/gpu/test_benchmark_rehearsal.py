"""The GPU benchmark, small and on the CPU, without what only the gateway needs: every row has figures."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu.shapes import SHAPES, WindowsShape
from tests import quire_command
from workers.models.builder import build_decoder
from workers.models.config import ModelConfig

ROOT = Path(__file__).resolve().parents[2]
# What the lent machine does not have.
# Not psutil: transformers looks whether there is such a file, and imports it then.
ABSENT = ("structlog", "grpc", "quire", "hypothesis", "rich")


def rehearse(out: Path, *arguments: str, hidden: Sequence[str] = ()) -> tuple[dict[str, Any], str]:
    """The result and its tables. Modules of the `hidden` names, found first, cannot be imported anywhere."""
    absent = out / "absent"
    absent.mkdir()
    for name in hidden:
        (absent / f"{name}.py").write_text(f"raise ModuleNotFoundError({name!r})\n")
    command = ["benchmarks.run", "--rehearse", "--out", str(out), *arguments]
    # What is forked has imported them.
    command = [sys.executable, "-m", *command] if hidden else quire_command.module(*command)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(absent), str(ROOT)])}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    (written,) = out.glob("*.json")
    return json.loads(written.read_text()), written.with_suffix(".md").read_text()


@pytest.mark.thorough
def test_every_row_has_figures(tmp_path: Path) -> None:
    result, text = rehearse(tmp_path, "--commit", "abc", hidden=ABSENT)
    names = [workload["name"] for workload in result["workloads"]]
    kernels = ["attention", "products", "workload", "rows", "sampling"]
    assert names == ["rehearsal", "profile", *kernels, "peer", "rehearsal-experts"]
    figures = [figure for workload in result["workloads"] for figure in workload["figures"]]
    assert all("problem" not in figure and figure["ms"]["p50"] > 0 for figure in figures), text
    assert all(ratio["ratio"] for workload in result["workloads"] for ratio in workload["ratios"]), text
    (log,) = tmp_path.glob("*.log")
    assert "== device.log" in log.read_text() and "aten::linear" in log.read_text()
    assert result["suite"] == "rehearsal" and result["machine"]["commit"] == "abc"
    of_kernels = result["workloads"][1]["figures"][0]["more"]
    assert of_kernels["kernels"] > 10 and "gaps us" in of_kernels and "other kernels us" in of_kernels
    more = result["workloads"][4]["figures"][0]["more"]
    assert more["output tokens"] >= 9 and more["decode steps"] > 0
    assert (
        "decode, batch 2, launched ahead" in text
        and "decode, batch 2, device-fed" in text
        and "transformers, graph, batch 2" in text
    )


@pytest.mark.parametrize("name", SHAPES)
def test_a_full_batch_reads_every_matrix(name: str) -> None:
    """As many bytes as the decoder has, but for norms, and for the embedding, of which it reads rows."""
    shape = SHAPES[name]
    decoder = build_decoder(ModelConfig.from_settings(shape.hf_config()), torch.bfloat16, "meta")
    unread = ("norm.weight",) if shape.tie_word_embeddings else ("norm.weight", "embed_tokens.weight")
    sizes = [t.tensor.nbytes for name, t in decoder.targets().items() if not name.endswith(unread)]
    assert shape.decode_bytes(1 << 20, 0) == sum(sizes)


def test_a_window_bounds_what_is_read_and_computed() -> None:
    gemma = SHAPES["gemma3-12b"]
    assert isinstance(gemma, WindowsShape)
    everything = dataclasses.replace(gemma, sliding_window=1 << 20)
    for context in (1024, 8192):
        unread = everything.decode_bytes(2, context) - gemma.decode_bytes(2, context)
        # In 40 of 48 layers, keys and values of 8 heads, of two sequences.
        assert unread == 2 * 40 * (context - 1024) * 2 * 8 * 256 * 2
    assert gemma.prefill_flops(1, 1024) == everything.prefill_flops(1, 1024)
    assert gemma.prefill_flops(1, 8192) < everything.prefill_flops(1, 8192)


@pytest.mark.thorough
def test_a_server_is_measured(tmp_path: Path) -> None:
    """What serves is the gateway with the executor that test_server.py has, too."""
    result, text = rehearse(tmp_path, "--rows", "server")
    figures = result["workloads"][0]["figures"]
    assert [figure["label"] for figure in figures][:2] == ["unary, batch 1", "batch, batch 1"]
    assert all("problem" not in figure and figure["ms"]["p50"] > 0 for figure in figures), text


def test_rows_for_which_no_time_is_left_are_reported(tmp_path: Path) -> None:
    result, text = rehearse(tmp_path, "--minutes", "0", "--rows", "rows,sampling")
    problems = {workload["name"]: workload["problem"] for workload in result["workloads"]}
    assert problems == dict.fromkeys(("rows", "sampling"), "skipped: no time was left")
    assert text.count("skipped: no time was left") == 2
