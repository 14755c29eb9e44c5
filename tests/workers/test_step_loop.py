"""The step loop when steps fail."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest

from tests.commands import Abort, CheckIntegrity, Command, Fork, Release
from tests.workers.stepping import Worker
from workers import answers, extra_samples, sampling
from workers.common.worker_pb2 import WorkerCommand
from workers.decodes import Column, Decodes
from workers.executors.weightless import PagedAttentionExecutor
from workers.kv import integrity
from workers.logging import fields_of
from workers.operations import (
    Chunk,
    Failed,
    FailureReason,
    Forward,
    HeldSequences,
    IntegrityReport,
    Kind,
    Reset,
    Result,
)
from workers.outputs import OutputSpec, Sampling, TokenMask
from workers.runners.base import DeviceLostError

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


def failure(answers: dict[int, Result], op_id: int) -> FailureReason:
    failed = answers[op_id]
    assert isinstance(failed, Failed)
    return failed.reason


def fail_with_two(worker: Worker, patch: pytest.MonkeyPatch) -> None:
    """Steps in which operation 2 is."""
    execute = worker._execute

    def fail(chunks: Sequence[Chunk], decodes: Decodes) -> Decodes:
        if any(chunk.forward.op_id == 2 for chunk in chunks) or 2 in decodes.column(Column.OP_ID):
            raise RuntimeError("planted")
        return execute(chunks, decodes)

    patch.setattr(worker, "_execute", fail)


def test_only_the_cause_of_a_failed_step_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = Worker()
    fail_with_two(worker, monkeypatch)
    found = worker.answers(*map(forward, (1, 2, 3)))
    assert isinstance(found[1], Forward) and isinstance(found[3], Forward)
    assert failure(found, 2) is FailureReason.FAULT


def test_logits_that_overflow_are_logged_once_and_an_adapters_are_its_own(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    worker = Worker()

    def overflow(_chunks: Sequence[Chunk], _decodes: Decodes) -> Decodes:
        raise sampling.BadLogitsError([0])

    monkeypatch.setattr(worker, "_execute", overflow)
    for op_id in range(1, 7):
        found = worker.answers(forward(op_id))
        assert failure(found, op_id) is FailureReason.FAULT
    (line,) = [record for record in caplog.records if record.levelname == "ERROR"]
    assert fields_of(line)["whose"] == "the model" and not line.exc_info


def test_only_the_cause_of_a_failed_step_of_decodes_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """Among plain decodes, too: what failed has changed nothing, and the others have their answers."""
    workers = Worker(), Worker()
    for worker in workers:
        worker.answers(*[prompt(op_id, sequence) for op_id, sequence in ((11, 1), (12, 2), (13, 3))])
    fail_with_two(workers[0], monkeypatch)
    asked = [Forward(op_id, op_id, 3, [op_id], kind=Kind.DECODE, caller=5) for op_id in (1, 2, 3)]
    found, expected = (worker.answers(*asked) for worker in workers)
    assert failure(found, 2) is FailureReason.FAULT
    for op_id in (1, 3):
        ours, theirs = found[op_id], expected[op_id]
        assert isinstance(ours, Forward) and isinstance(theirs, Forward)
        assert ours.outputs[0].token_id == theirs.outputs[0].token_id
    assert workers[0].lengths() == {1: 4, 2: 3, 3: 4}
    assert not workers[0].loop.operations_in_flight


def test_a_decode_without_an_allowed_token_fails_alone() -> None:
    """The other decodes of the step keep their results: nothing runs again."""
    worker = Worker()
    worker.answers(*[prompt(op_id, sequence) for op_id, sequence in ((11, 1), (12, 2), (13, 3))])
    nothing = OutputSpec(sampling=Sampling(logit_bias=dict.fromkeys(range(1 << 12), float("-inf"))))
    outputs = {1: OutputSpec(), 2: nothing, 3: OutputSpec(top_logprobs=1)}
    asked = [Forward(op_id, op_id, 3, [op_id], kind=Kind.DECODE, output=outputs[op_id]) for op_id in outputs]
    steps = len(worker.steps)
    found = worker.answers(*asked)
    assert worker.steps[steps:] == [[1, 2, 3]]
    assert failure(found, 2) is FailureReason.FAULT
    for op_id in (1, 3):
        assert isinstance(found[op_id], Forward)
    assert worker.lengths() == {1: 4, 2: 3, 3: 4}


def prompt(op_id: int, sequence: int) -> Forward:
    return Forward(op_id, sequence, 0, [sequence, 2, 3])


def test_a_row_without_an_allowed_token_fails_alone() -> None:
    """The other forwards keep their results: nothing runs again."""
    worker = Worker()
    forwards = [forward(op_id) for op_id in (1, 2, 3)]
    forwards[1] = dataclasses.replace(forwards[1], output=OutputSpec(mask=TokenMask(allowed=[])))
    found = worker.answers(*forwards)
    assert worker.steps == [[1, 2, 3]]
    (expected,) = Worker().answers(forwards[0]).values()
    outputs = [one.outputs for one in (expected, found[1], found[3]) if isinstance(one, Forward)]
    assert outputs == [outputs[0]] * 3
    assert failure(found, 2) is FailureReason.FAULT
    assert worker.lengths() == {1: 2, 3: 2}


def prefill_with_samples(op_id: int, draws: int) -> Forward:
    output = OutputSpec(sampling=Sampling(temperature=1.0))
    return dataclasses.replace(forward(op_id), rows=1, output=output, sample_seeds=range(draws))


def test_many_draws_are_spread_over_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other forwards are answered before all tokens of a row are drawn."""
    monkeypatch.setattr(answers, "_DRAWN_COST", 1)
    monkeypatch.setattr(extra_samples, "_BATCH_COST", 1)
    worker = Worker()
    commands: list[Forward] = [prefill_with_samples(1, 50), prefill_with_samples(2, 3), forward(3)]
    answered: dict[int, tuple[int, Forward]] = {}
    step = 0
    while len(answered) < 3:
        step += 1
        for result in worker.round(*commands):
            assert isinstance(result, Forward)
            answered[result.op_id] = step, result
        commands = []
    steps, done = zip(*(answered[op_id] for op_id in (1, 2, 3)), strict=True)
    assert steps[2] == 1 and steps[1] < 10 and steps[0] > 50
    assert [len(one.samples) for one in done] == [50, 3, 0]
    assert done[0].samples[:3] == done[1].samples


def test_few_forwards_draw_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A forward that draws takes several times the memory of its row of logits."""
    monkeypatch.setattr(answers, "_DRAWN_COST", 1)
    monkeypatch.setattr(extra_samples, "_BATCH_COST", 1)
    begun: list[int] = []

    def counted(*of_one: Any) -> sampling.RowChoices:
        begun.append(1)
        return sampling.RowChoices(*of_one)

    monkeypatch.setattr(extra_samples, "RowChoices", counted)
    worker = Worker(limits=(64, 16, 16))
    results = worker.round(*(prefill_with_samples(op_id, 3) for op_id in range(1, 31)))
    while len(results) < 30:
        results += worker.round()
        assert len(begun) - len(results) <= 16
    assert all(isinstance(result, Forward) and len(result.samples) == 3 for result in results)


def test_a_forward_that_draws_can_be_aborted_and_reset() -> None:
    worker, results = Worker(), list[Result]()
    for last in (Abort(9, target_op_id=1), Reset(1)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(answers, "_DRAWN_COST", 0)
            results += worker.round(prefill_with_samples(1, 5))
            assert worker.loop.operations_in_flight == 1
            results += worker.round(last)
        assert worker.loop.operations_in_flight == 0
        assert not worker.lengths()
    assert not any(isinstance(result, Forward) for result in results)


def test_a_lost_device_ends_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device is unusable, so no operation is retried alone, and none is answered."""
    worker, tried = Worker(), []

    def lose(chunks: Sequence[Chunk], _decodes: Decodes) -> None:
        tried.append(len(chunks))
        raise DeviceLostError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(worker, "_execute", lose)
    worker.loop.submit([forward(op_id) for op_id in (1, 2, 3)])
    with pytest.raises(DeviceLostError):
        worker.loop.run()
    assert tried == [3] and not worker._results


def test_a_limited_prefill_waits_for_decodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a step of the prefill alone would follow each step of decodes."""
    for prompter, waits in ((2, True), (1, False)):
        worker, asked = Worker(), list[int]()
        worker.answers(dataclasses.replace(forward(1), caller=1))
        prompt = Forward(9, 9, 0, list(range(300)), kind=Kind.PREFILL, prompt_len=300, caller=prompter)
        worker.round(prompt, Forward(2, 1, 2, [7], kind=Kind.DECODE, caller=1))
        monkeypatch.setattr(
            worker.loop._window, "remaining_ns", lambda _now, waiting, asked=asked: asked.append(waiting) or 0
        )
        worker.loop.take()
        assert bool(asked) is waits


def test_a_full_step_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = Worker(limits=(64, 2, 2)).loop
    monkeypatch.setattr(loop._window, "remaining_ns", lambda *_: pytest.fail("it asked how long to wait"))
    loop.submit([forward(op_id) for op_id in (1, 2, 3)])
    loop.take()
    assert loop.operations_in_flight == 3


def test_an_abort_before_begin_does_not_roll_back() -> None:
    """Another forward of the same sequence is in the middle of a prompt."""
    worker = Worker(limits=(16, 4, 4))
    prompt = Forward(2, sequence=1, position=2, token_ids=list(range(40)))
    behind = Forward(3, sequence=1, position=2, token_ids=[7])
    results = worker.round(forward(1), prompt, behind) + worker.round()
    assert 2 < worker.lengths()[1] < 42
    results += worker.round(Abort(op_id=4, target_op_id=3))
    while worker.loop.operations_in_flight:
        results += worker.round()
    assert [result.op_id for result in results if isinstance(result, Forward)] == [1, 2]
    assert worker.lengths() == {1: 42}


def test_an_integrity_check_does_not_delay_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sequences are created and released, and forwards run, between its slices."""
    monkeypatch.setattr(integrity, "PAGES_PER_SLICE", 8)
    worker = Worker(pages=200)
    worker.answers(dataclasses.replace(forward(1), token_ids=[3] * 40))
    commands: list[Command] = [
        Fork(2, 1, range(100, 200)), CheckIntegrity(3, check_pages=True), CheckIntegrity(4),
        CheckIntegrity(5, check_pages=True),
    ]  # fmt: skip
    results: list[Result] = []
    for op_id in range(10, 40):
        decode = Forward(op_id, sequence=100 + op_id, position=40, token_ids=[op_id], kind=Kind.DECODE)
        prompt = dataclasses.replace(forward(1000 + op_id), token_ids=[op_id] * 20)
        release = Release(200 + op_id, [100 + op_id - 3, 1000 + op_id - 2, 189 - op_id])
        results += worker.round(
            *commands, decode, prompt, CheckIntegrity(100 + op_id, check_pages=True), release
        )
        commands = []
        assert any(isinstance(result, Forward) and result.op_id == op_id for result in results)
    while len(results) < 1 + 3 + 30 * 4:
        worker.loop.step()
        worker.loop.flush()
        results += worker.round()
    reports = {result.op_id: result.intact for result in results if isinstance(result, IntegrityReport)}
    assert reports == {4: None, **dict.fromkeys((3, 5, *range(110, 140)), True)}
    order = [result.op_id for result in results if not isinstance(result, HeldSequences)]
    assert order.index(4) < order.index(15) < order.index(3)


def test_an_integrity_check_in_slices_finds_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(integrity, "PAGES_PER_SLICE", 2)
    worker, results = Worker(PagedAttentionExecutor.create(kv_pages=16).engine), list[Result]()
    monkeypatch.setattr(worker.engine.kv_table, "check_integrity", lambda: None)
    results += worker.round(forward(1), CheckIntegrity(2, check_pages=True))
    worker.engine.kv_table._pool._refcounts[9] += 1
    while len(results) < 3:
        results += worker.round(*([CheckIntegrity(3, check_pages=True)] if len(results) == 2 else []))
        worker.loop.step()
        worker.loop.flush()
    assert [r.intact for r in results if isinstance(r, IntegrityReport)] == [False, False]


def test_a_command_that_is_not_known_fails_alone() -> None:
    """A gateway of another version may send one."""
    worker = Worker()
    unknown = WorkerCommand(op_id=1)
    assert failure(worker.answers(unknown), 1) is FailureReason.FAULT
    assert isinstance(worker.answers(forward(2))[2], Forward)
