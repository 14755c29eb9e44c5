"""The executor in the caller's own process: it says what it does."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from benchmarks.in_process import InProcess, LlmExecutor, PagedAttentionExecutor
from tests.model_factory import TinyModel, make_model
from workers.kv.page_pool import OutOfPages
from workers.kv.sizing import KvSizingError
from workers.operations import Chunk, Forward
from workers.outputs import GREEDY, DataType, OutputSpec

PAGES = 12
VOCAB = 1024


@pytest.fixture
def executor() -> InProcess:
    """One that holds sequence 1 of three tokens."""
    made = PagedAttentionExecutor.create(kv_pages=PAGES)
    made.prefill(1, [5, 6, 7])
    return made


def test_a_sequence_is_not_longer_than_the_context_of_the_model(tmp_path: Path) -> None:
    model = make_model(tmp_path, TinyModel(max_positions=20))
    assert LlmExecutor.load(model, kv_pages=PAGES).capabilities().kv_capacity_tokens == 20


def test_status_says_whether_a_step_runs(executor: InProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    runner, ages = executor.engine.runner, []
    step = runner.step

    def look(*arguments: object) -> object:
        ages.append(executor.status().step_age_ns)
        return step(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(runner, "step", look)
    executor.decode(1, 4)
    monkeypatch.setattr(runner, "step", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        executor.decode(1, 4)
    assert ages[0] > 0
    status = executor.status()
    assert status.step_age_ns == 0
    assert (status.device_memory_bytes, status.device_memory_peak_bytes) == (0, 0)  # of a CPU


def test_each_operation_counts_under_its_own_kind(executor: InProcess) -> None:
    executor.engine.reset_counts()
    executor.forward([1, 2, 3])
    executor.forward_verify(1, [4, 5])
    executor.decode(1, 6)
    # A prompt's first token comes alone too, and so does what follows a cut to nothing.
    executor.unified_decode([(1, [7], 1, GREEDY), (2, [8], 0, GREEDY), (3, [9, 9], 1, GREEDY)])
    executor.truncate_kv(3, 0)
    executor.unified_decode([(3, [9], 1, GREEDY)])
    counts = executor.status().counts
    assert (counts.score_operations, counts.verify_operations) == (1, 1)
    assert (counts.decode_operations, counts.prefill_operations) == (2, 3)
    assert min(counts.score_ns, counts.verify_ns, counts.decode_ns, counts.prefill_ns) > 0
    assert (counts.steps, counts.batch_items, counts.step_tokens) == (5, 7, 3 + 2 + 1 + 4 + 1)


def prefix_counts(executor: InProcess) -> tuple[int, int]:
    usage = executor.engine.kv_table.usage()
    return usage.prefix_hit_tokens, usage.prefix_query_tokens


def test_every_token_of_a_prompt_that_is_begun_counts_as_looked_for(executor: InProcess) -> None:
    executor.engine.reset_counts()
    prompt = list(range(40))
    executor.prefill(2, prompt)
    assert prefix_counts(executor) == (0, 40)
    executor.prefill(3, prompt)
    assert prefix_counts(executor) == (32, 80)
    executor.prefill(3, [1, 2, 3])  # within a page: nothing can be found, all of it is computed
    executor.unified_decode([(4, [5], 0, GREEDY)])
    assert prefix_counts(executor) == (32, 84)
    executor.decode(3, 4)
    executor.forward_verify(3, [5, 6])
    executor.forward(prompt)
    assert prefix_counts(executor) == (32, 84)


def test_a_prompt_refused_for_lack_of_pages_does_not_count(executor: InProcess) -> None:
    executor.prefill(2, list(range(40)))
    counted = prefix_counts(executor)
    prompt = list(range(40)) + [500] * 124
    for _ in range(2):
        with pytest.raises(OutOfPages):
            executor.prefill(3, prompt)
    assert prefix_counts(executor) == counted
    executor.release_cache(1)
    executor.release_cache(2)
    executor.prefill(3, prompt)
    assert prefix_counts(executor) == (counted[0] + 32, counted[1] + 164)


def test_only_rows_decide_what_may_be_reused(executor: InProcess) -> None:
    """Tokens that have a row are computed again, and so is the last one in any case."""
    executor.prefill(2, list(range(50)))
    for op_id, (rows, reused) in enumerate(((0, 48), (1, 48), (2, 48), (3, 32), (18, 32), (19, 16), (50, 0))):
        op = Forward(op_id, 9, 0, list(range(50)), rows=rows)
        executor.engine.begin(op)
        assert op.reused == op.computed == reused
        executor.engine.execute([Chunk(op, reused, op.remaining)])
        executor.engine.complete(op)
        assert len(op.outputs) == rows
        executor.release_cache(9)


@pytest.mark.parametrize("pages", [1, 2, 3])
@pytest.mark.parametrize("weightless", [False, True])
def test_small_pools_warm_up_and_serve(tmp_path: Path, pages: int, weightless: bool) -> None:
    executor: InProcess
    if weightless:
        executor = PagedAttentionExecutor.create(kv_pages=pages)
    else:
        executor = LlmExecutor.load(make_model(tmp_path, TinyModel()), kv_pages=pages)
    empty = executor.engine.kv_table.usage()
    executor.warmup()
    assert executor.engine.kv_table.usage() == empty
    assert executor.status().counts.steps == 0
    assert executor.capabilities().kv_capacity_tokens == 16 * pages
    executor.prefill(1, [3] * (16 * pages - 1))
    executor.decode(1, 3)
    executor.release_cache(1)
    assert executor.engine.kv_table.usage().pages_referenced == 0


def test_no_pages_are_refused_as_a_setting() -> None:
    with pytest.raises(KvSizingError, match="kv_pages = 0: must be at least 1"):
        PagedAttentionExecutor.create(kv_pages=0)


def test_capabilities_say_where_kernels_are_not_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workers.models.active_kernels.kernel_name", lambda: None)
    assert "cpu-not-compiled" in PagedAttentionExecutor.create(kv_pages=1).capabilities().kernels
    monkeypatch.setattr("workers.models.active_kernels.kernel_name", lambda: "cpu-avx2")
    assert "cpu-not-compiled" not in PagedAttentionExecutor.create(kv_pages=1).capabilities().kernels


def test_a_page_that_could_not_be_copied_is_not_taken_for_the_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the fork would go on over keys and values of nobody."""
    executor = PagedAttentionExecutor.create(kv_pages=8)
    executor.prefill(1, [5, 6, 7])
    executor.fork(1, [2])
    right = executor.engine.kv.copy_pages

    def fail(pairs: Sequence[tuple[int, int]]) -> None:
        assert pairs
        raise torch.OutOfMemoryError

    monkeypatch.setattr(executor.engine.kv, "copy_pages", fail)
    with pytest.raises(torch.OutOfMemoryError):
        executor.decode(2, 8)
    executor.check_integrity()
    monkeypatch.setattr(executor.engine.kv, "copy_pages", right)
    wanted = OutputSpec(logits=DataType.F32)
    assert executor.decode(2, 8, wanted).logits == executor.decode(1, 8, wanted).logits
    executor.check_integrity()
