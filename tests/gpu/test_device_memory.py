"""What is taken of a GPU's memory, and what is refused. Nothing else may run on the device meanwhile."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.in_process import LlmExecutor
from tests.model_factory import TinyModel, make_model
from workers.executors.memory import StepLimits
from workers.kv.sizing import KvSizingError
from workers.models.errors import ModelError
from workers.outputs import GREEDY

pytestmark = pytest.mark.gpu

UTILIZATION = 0.4
MAX_TOKENS = 512


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"), TinyModel(head_dim=64, max_positions=MAX_TOKENS))


def taken_share() -> float:
    """Of the device, by this process and all others."""
    free_bytes, total_bytes = torch.cuda.mem_get_info()
    return 1 - free_bytes / total_bytes


def test_the_share_is_taken_and_not_exceeded(directory: Path, device: torch.device) -> None:
    limits = StepLimits(max_tokens=MAX_TOKENS, max_items=64, gpu_memory_utilization=UTILIZATION)
    executor = LlmExecutor.load(directory, device=device, limits=limits)
    assert UTILIZATION - 0.05 < taken_share() <= UTILIZATION
    executor.prefill(0, list(range(90)) * 5)
    for key in range(1, 64):
        executor.prefill(key, [key])
    executor.batch_decode([(key, 1, GREEDY) for key in range(64)])  # captures the graphs
    executor.engine.release_all()
    assert executor.engine.kv_table.usage().pages_referenced == 0
    assert taken_share() <= UTILIZATION


def test_pages_that_do_not_fit_are_refused(directory: Path, device: torch.device) -> None:
    _, total_bytes = torch.cuda.mem_get_info()
    small = LlmExecutor.load(directory, device=device, kv_pages=4)
    too_many = total_bytes // small.capabilities().bytes_per_page
    with pytest.raises(KvSizingError, match=f"kv_pages = {too_many} needs"):
        LlmExecutor.load(directory, device=device, kv_pages=too_many)


def test_no_room_for_a_page_is_refused(directory: Path, device: torch.device) -> None:
    limits = StepLimits(gpu_memory_utilization=1e-6)
    with pytest.raises(KvSizingError, match="no KV page fits"):
        LlmExecutor.load(directory, device=device, limits=limits)


def test_weights_that_do_not_fit_are_refused(tmp_path: Path, device: torch.device) -> None:
    directory = make_model(tmp_path, TinyModel(head_dim=64))
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(1e-6)
    try:
        with pytest.raises(KvSizingError, match=r"weights of .* do not fit"):
            LlmExecutor.load(directory, device=device)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def test_a_head_width_without_kernels_is_run_by_the_library(tmp_path: Path, device: torch.device) -> None:
    directory = make_model(tmp_path, TinyModel(head_dim=32))
    executor = LlmExecutor.load(directory, device=device, kv_pages=4)
    assert executor.info().backend == "transformers" and executor.capabilities().runner == "eager"
    executor.prefill(0, [1, 2, 3])
    with pytest.raises(ModelError, match=r"head_dim: must be one of .* got 32"):
        LlmExecutor.load(directory, device=device, backend="native")
