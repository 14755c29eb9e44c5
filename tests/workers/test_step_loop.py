"""The step loop when steps fail."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest

from workers import extra_samples, sampling, step_loop
from workers.executors.engine import Engine
from workers.executors.weightless import PagedAttentionExecutor
from workers.kv import integrity
from workers.models.inputs import ForwardInputs
from workers.operations import (
    Abort,
    CheckIntegrity,
    Chunk,
    Failed,
    FailureReason,
    Fork,
    Forward,
    HeldSequences,
    IntegrityReport,
    Kind,
    OutputSpec,
    Release,
    Reset,
    Result,
    Sampling,
    TokenMask,
)
from workers.runners.base import DeviceLostError, StepResult
from workers.scheduler import Scheduler
from workers.step_loop import StepLoop

# More than any of these has.
MAX_SEQ_TOKENS = 1 << 10


def forward(op_id: int) -> Forward:
    return Forward(
        op_id=op_id,
        sequence=op_id,
        position=0,
        token_ids=[1, 2],
        kind=Kind.PREFILL,
        prompt_len=2,
    )


def run(loop: StepLoop, results: list[Result], count: int) -> None:
    """Until there are so many results."""
    while len(results) < count:
        loop.take()
        loop.step()
        loop.flush()


def make_loop(engine: Engine, results: list[Result]) -> StepLoop:
    return StepLoop(engine, Scheduler(64, 16, max_rows=16), results.extend, MAX_SEQ_TOKENS)


def test_only_the_cause_of_a_failed_step_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = PagedAttentionExecutor.create(kv_pages=16).engine
    execute = engine.execute

    def fail_with_two(chunks: Sequence[Chunk]) -> None:
        if any(chunk.forward.op_id == 2 for chunk in chunks):
            raise RuntimeError("planted")
        execute(chunks)

    monkeypatch.setattr(engine, "execute", fail_with_two)
    results: list[Result] = []
    loop = make_loop(engine, results)
    loop.submit([forward(op_id) for op_id in (1, 2, 3)])
    run(loop, results, 3)
    done = {result.op_id for result in results if isinstance(result, Forward)}
    assert done == {1, 3}
    (failed,) = (result for result in results if isinstance(result, Failed))
    assert failed.op_id == 2 and failed.reason is FailureReason.FAULT
    engine.check_integrity()


def test_a_row_without_an_allowed_token_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other forwards keep their results: nothing runs again."""
    engine = PagedAttentionExecutor.create(kv_pages=16).engine
    step, sizes = engine.runner.step, list[int]()

    def counted(inputs: ForwardInputs, *others: Any) -> StepResult:
        sizes.append(len(inputs.token_ids))
        return step(inputs, *others)

    monkeypatch.setattr(engine.runner, "step", counted)
    results: list[Result] = []
    loop = make_loop(engine, results)
    forwards = [dataclasses.replace(forward(op_id), rows=1) for op_id in (1, 2, 3)]
    forwards[1] = dataclasses.replace(forwards[1], output=OutputSpec(mask=TokenMask(allowed=[])))
    loop.submit(forwards)
    run(loop, results, 3)
    assert sizes == [6]
    alone: list[Result] = []
    other = make_loop(PagedAttentionExecutor.create(kv_pages=16).engine, alone)
    other.submit([dataclasses.replace(forwards[0])])
    run(other, alone, 1)
    done = {result.op_id: result for result in results if isinstance(result, Forward)}
    (expected,) = (result for result in alone if isinstance(result, Forward))
    assert done.keys() == {1, 3}
    assert done[1].outputs == expected.outputs == done[3].outputs
    (failed,) = (result for result in results if isinstance(result, Failed))
    assert failed.op_id == 2 and engine.length(2) is None and engine.length(3) == 2
    engine.check_integrity()


def prefill_with_samples(op_id: int, draws: int) -> Forward:
    output = OutputSpec(sampling=Sampling(temperature=1.0))
    return dataclasses.replace(forward(op_id), rows=1, output=output, sample_seeds=range(draws))


def test_many_draws_are_spread_over_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other forwards are answered before all tokens of a row are drawn."""
    monkeypatch.setattr(step_loop, "_DRAW_BUDGET", 1)
    monkeypatch.setattr(extra_samples, "_BATCH_COST", 1)
    engine = PagedAttentionExecutor.create(kv_pages=16).engine
    results: list[Result] = []
    loop = make_loop(engine, results)
    loop.submit([prefill_with_samples(1, 50), prefill_with_samples(2, 3), forward(3)])
    answered: dict[int, int] = {}
    for step in range(1, 100):
        loop.take()
        loop.step()
        loop.flush()
        for result in results:
            assert isinstance(result, Forward)
            answered.setdefault(result.op_id, step)
        if len(answered) == 3:
            break
    assert answered[3] == 1 and answered[2] < 10 and answered[1] > 50
    by_id = {result.op_id: result for result in results if isinstance(result, Forward)}
    assert [len(by_id[op_id].samples) for op_id in (1, 2, 3)] == [50, 3, 0]
    assert by_id[1].samples[:3] == by_id[2].samples
    engine.check_integrity()


def test_few_forwards_draw_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A forward that draws takes several times the memory of its row of logits."""
    monkeypatch.setattr(step_loop, "_DRAW_BUDGET", 1)
    monkeypatch.setattr(extra_samples, "_BATCH_COST", 1)
    begun: list[int] = []

    def counted(*of_one: Any) -> sampling.GumbelSampler:
        begun.append(1)
        return sampling.GumbelSampler(*of_one)

    monkeypatch.setattr(extra_samples, "GumbelSampler", counted)
    results: list[Result] = []
    loop = make_loop(PagedAttentionExecutor.create(kv_pages=64).engine, results)
    loop.submit([prefill_with_samples(op_id, 3) for op_id in range(1, 31)])
    while len(results) < 30:
        loop.take()
        loop.step()
        loop.flush()
        assert len(begun) - len(results) <= 16
    assert all(isinstance(result, Forward) and len(result.samples) == 3 for result in results)


def test_a_forward_that_draws_can_be_aborted_and_reset() -> None:
    engine = PagedAttentionExecutor.create(kv_pages=16).engine
    results: list[Result] = []
    loop = make_loop(engine, results)
    for last in (Abort(9, target_op_id=1), Reset(1)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(step_loop, "_DRAW_BUDGET", 0)
            loop.submit([prefill_with_samples(1, 5)])
            loop.take()
            loop.step()
            assert loop.operations_in_flight == 1
            loop.submit([last])
            loop.take()
        assert loop.operations_in_flight == 0
        assert not list(engine.sequences)
    loop.flush()
    assert not any(isinstance(result, Forward) for result in results)


def test_a_lost_device_ends_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device is unusable, so no operation is retried alone, and none is answered."""
    engine = PagedAttentionExecutor.create(kv_pages=16).engine
    tried = []

    def lose(chunks: Sequence[Chunk]) -> None:
        tried.append(len(chunks))
        raise DeviceLostError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(engine, "execute", lose)
    results: list[Result] = []
    loop = make_loop(engine, results)
    loop.submit([forward(op_id) for op_id in (1, 2, 3)])
    with pytest.raises(DeviceLostError):
        loop.run()
    assert tried == [3] and not results


def test_a_limited_prefill_waits_for_decodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a step of the prefill alone would follow each step of decodes."""
    engine = PagedAttentionExecutor.create(kv_pages=64).engine
    for protected, waits in ((8, True), (None, False)):
        results: list[Result] = []
        loop = StepLoop(
            engine, Scheduler(64, 16, 16, max_mixed_prefill_tokens=protected), results.extend, MAX_SEQ_TOKENS
        )
        asked: list[int] = []
        monkeypatch.setattr(
            loop._window, "remaining_ns", lambda _now, waiting, asked=asked: asked.append(waiting) or 0
        )
        loop.submit([forward(1)])
        loop.take()
        loop._scheduler.add(
            Forward(
                op_id=9, sequence=9, position=0, token_ids=list(range(300)), kind=Kind.PREFILL, prompt_len=300
            )
        )
        asked.clear()
        loop.take()
        assert bool(asked) is waits


def test_a_full_step_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = PagedAttentionExecutor.create(kv_pages=64).engine
    loop = StepLoop(engine, Scheduler(64, 2, max_rows=2), lambda _: None, MAX_SEQ_TOKENS)
    monkeypatch.setattr(loop._window, "remaining_ns", lambda *_: pytest.fail("it asked how long to wait"))
    loop.submit([forward(op_id) for op_id in (1, 2, 3)])
    loop.take()
    assert loop.operations_in_flight == 3


def test_an_abort_before_begin_does_not_roll_back() -> None:
    """Another forward of the same sequence is in the middle of a prompt."""
    engine = PagedAttentionExecutor.create(kv_pages=16).engine
    results: list[Result] = []
    loop = StepLoop(engine, Scheduler(16, 4, max_rows=4), results.extend, MAX_SEQ_TOKENS)
    prompt = Forward(2, sequence=1, position=2, token_ids=list(range(40)))
    behind = Forward(3, sequence=1, position=2, token_ids=[7])
    loop.submit([forward(1), prompt, behind])
    for _ in range(2):
        loop.take()
        loop.step()
    loop.flush()
    assert 2 < (engine.length(1) or 0) < 42
    loop.submit([Abort(op_id=4, target_op_id=3)])
    run(loop, results, 2)
    assert [result.op_id for result in results if isinstance(result, Forward)] == [1, 2]
    assert engine.length(1) == 42
    assert loop.operations_in_flight == 0
    engine.check_integrity()


def test_a_scored_sequence_is_not_expected_back() -> None:
    """Its sequence is released with the answer."""
    engine = PagedAttentionExecutor.create(kv_pages=64).engine
    results: list[Result] = []
    loop = make_loop(engine, results)
    scored = dataclasses.replace(forward(1), ephemeral=True, rows=2, kind=Kind.SCORE)
    loop.submit([scored, forward(2)])
    run(loop, results, 2)
    assert set(loop._window._answered) == {2}


def test_an_integrity_check_does_not_delay_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sequences are created and released, and forwards run, between its slices."""
    monkeypatch.setattr(integrity, "PAGES_PER_SLICE", 8)
    engine = PagedAttentionExecutor.create(kv_pages=200).engine
    results: list[Result] = []
    loop = make_loop(engine, results)
    loop.submit([dataclasses.replace(forward(1), token_ids=[3] * 40)])
    run(loop, results, 1)
    loop.submit([Fork(2, 1, range(100, 200)), CheckIntegrity(3, check_pages=True), CheckIntegrity(4)])
    loop.submit([CheckIntegrity(5, check_pages=True)])
    for op_id in range(10, 40):
        decode = Forward(op_id, sequence=100 + op_id, position=40, token_ids=[op_id], kind=Kind.DECODE)
        prompt = dataclasses.replace(forward(1000 + op_id), token_ids=[op_id] * 20)
        loop.submit([decode, prompt, CheckIntegrity(100 + op_id, check_pages=True)])
        loop.submit([Release(200 + op_id, [100 + op_id - 3, 1000 + op_id - 2, 189 - op_id])])
        loop.take()
        loop.step()
        loop.flush()
        assert any(isinstance(result, Forward) and result.op_id == op_id for result in results)
    run(loop, results, 2 + 3 + 30 * 4)
    reports = {result.op_id: result.intact for result in results if isinstance(result, IntegrityReport)}
    assert reports == {4: None, **dict.fromkeys((3, 5, *range(110, 140)), True)}
    order = [result.op_id for result in results if not isinstance(result, HeldSequences)]
    assert order.index(4) < order.index(15) < order.index(3)
    engine.check_integrity()


def test_an_integrity_check_in_slices_finds_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(integrity, "PAGES_PER_SLICE", 2)
    engine = PagedAttentionExecutor.create(kv_pages=16).engine
    results: list[Result] = []
    loop = make_loop(engine, results)
    loop.submit([forward(1), CheckIntegrity(2, check_pages=True)])
    loop.take()
    loop.step()
    engine._kv_table._pool._refcounts[9] += 1
    run(loop, results, 2)
    loop.submit([CheckIntegrity(3, check_pages=True)])
    run(loop, results, 3)
    assert [r.intact for r in results if isinstance(r, IntegrityReport)] == [False, False]
