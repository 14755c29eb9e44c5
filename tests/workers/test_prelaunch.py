"""Prelaunched forwards: only the timing may differ from forwards that are computed on request."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable

import numpy as np
import pytest

from tests.commands import ChangeAdapters, CheckIntegrity, Command, Release, Truncate, carried_out
from tests.families import paired, some
from tests.workers import stepping
from tests.workers.late_runner import LateRunner, LateStep
from tests.workers.stepping import chosen
from tests.workers.test_adapter_table import FakeModel
from tests.workers.test_plain_decodes import OUTPUTS, Callers, answers
from workers import answers as answers_module
from workers import extra_samples, prelaunch, prelaunched_results, step_loop
from workers.adapters.table import AdapterTable
from workers.decodes import Column, Decodes
from workers.kv import integrity
from workers.kv.page_pool import IntegrityError
from workers.operations import AdapterSource, Failed, FailureReason, Forward, Kind, Reset, Result
from workers.outputs import GREEDY
from workers.prelaunch import Prelauncher
from workers.runners.base import DeviceLostError

PAGES = 64
MAX_SEQ_TOKENS = 200


class Worker(stepping.Worker):
    def __init__(self, max_seq_tokens: int = MAX_SEQ_TOKENS, pages: int = PAGES) -> None:
        super().__init__(pages=pages, limits=(64, 8, 8), max_seq_tokens=max_seq_tokens)


@pytest.fixture
def worker() -> Worker:
    return Worker()


def prefill(op_id: int, sequence: int, count: int = 5, *, told: bool = True) -> Forward:
    return Forward(
        op_id,
        sequence,
        0,
        [sequence + at for at in range(count)],
        kind=Kind.PREFILL,
        prompt_len=count,
        prelaunch=told,
    )


def decode(op_id: int, sequence: int, position: int, token: int, *, told: bool = True) -> Forward:
    return Forward(op_id, sequence, position, [token], kind=Kind.DECODE, prompt_len=5, prelaunch=told)


def running_ahead(worker: stepping.Worker) -> tuple[LateRunner, int]:
    """A text whose decode runs before it is requested, and its token."""
    token = chosen(worker.done(prefill(1, 7)))
    late = worker.compute_late()
    assert worker.round() == [] and worker.loop._in_flight.step is not None
    return late, token


def fail(*_: object, **__: object) -> None:
    raise RuntimeError("planted")


def test_a_reset_drops_prelaunched_forwards(worker: Worker) -> None:
    worker.answers(prefill(1, 7))
    worker.round()
    worker.answers(prefill(2, 8))
    # One is ready, one is queued.
    assert worker.lengths() == {7: 6, 8: 5} and worker.loop.operations_in_flight == 1
    worker.loop.submit([Reset(1)])
    worker.loop.take()
    assert worker.lengths() == {7: 5, 8: 5} and not worker.loop.operations_in_flight


@pytest.mark.parametrize("has_run", [False, True])
def test_requests_get_the_pages_of_prelaunched_forwards(has_run: bool) -> None:
    """Of one that is in the same step, in the next one: short forwards begin first."""
    worker = Worker(pages=4)
    # 16 tokens fill a page: the prelaunched forward needs another one.
    worker.answers(prefill(1, 1, count=16))
    assert worker.loop.operations_in_flight == 1
    if has_run:
        worker.round()
        assert worker.engine.kv_table.pages_available == 2
    assert isinstance(worker.answers(prefill(2, 100, count=48, told=False))[2], Forward)
    assert worker.lengths() == {1: 16, 100: 48}


def test_a_request_that_waits_for_pages_goes_before_prelaunched_forwards() -> None:
    worker = Worker(pages=6)
    answered = worker.answers(prefill(1, 1, count=16), prefill(2, 50, count=15, told=False))
    # The prelaunched forward of 1 takes a page in this step, that of 50 would in the next.
    asked = decode(3, 50, 15, chosen(answered[2])), prefill(4, 100, count=64, told=False)
    assert [result.op_id for result in worker.round(*asked) if isinstance(result, Forward)] == [3]
    worker.round()
    assert worker.lengths()[100] > 0


def test_forwards_may_be_queued_behind_each_other() -> None:
    """The forward that is prelaunched after the first is not the one after the second."""
    workers = Worker(), Worker(max_seq_tokens=0)
    ops = prefill(1, 7), decode(2, 7, 5, 3), decode(3, 7, 6, 9)
    found = [worker.answers(*ops) for worker in workers]
    for number in (1, 2, 3):
        assert chosen(found[0][number]) == chosen(found[1][number])
    workers[0].round()
    asked = decode(4, 7, 7, chosen(found[0][3]))
    assert chosen(workers[0].answers(asked)[4]) == chosen(workers[1].answers(asked)[4])


def test_prelaunched_forwards_do_not_change_fairness() -> None:
    """Under overload two callers get equal shares, also if only one has prelaunched forwards."""
    worker, answered = Worker(pages=200), {1: 0, 2: 0}
    todo = [dataclasses.replace(prefill(number + 1, number), caller=1 + number % 2) for number in range(32)]
    asked = {op.op_id: op for op in todo}
    for _ in range(100):
        results, todo = worker.round(*todo), []
        for result in results:
            op = asked.pop(result.op_id)  # type: ignore[union-attr]
            answered[op.caller] += 1
            token = chosen(result) if op.caller == 1 else chosen(result) + 1
            position = op.position + len(op.token_ids)
            op = dataclasses.replace(
                decode(op.op_id + 32, op.sequence, position, token, told=op.caller == 1), caller=op.caller
            )
            asked[op.op_id] = op
            todo.append(op)
    assert abs(answered[1] - answered[2]) <= 64, answered


def test_a_prelaunched_forward_that_fails_has_no_answer(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    token = chosen(worker.done(prefill(1, 7)))
    monkeypatch.setattr(worker, "_execute", fail)
    assert worker.round() == [] and not worker.loop.operations_in_flight
    failed = worker.answers(decode(2, 7, 5, token))[2]
    assert isinstance(failed, Failed) and failed.reason is FailureReason.FAULT


def test_a_verify_that_fails_leaves_nothing_that_was_prelaunched(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    token = chosen(worker.done(prefill(1, 7)))
    worker.round()
    assert worker.lengths() == {7: 6}
    with monkeypatch.context() as inner:
        inner.setattr(worker, "_execute", fail)
        failed = worker.answers(Forward(2, 7, 5, [token, 9], rows=2, kind=Kind.VERIFY))[2]
    assert isinstance(failed, Failed) and worker.lengths() == {7: 5}
    worker.answers(decode(3, 7, 5, token, told=False))
    assert worker.lengths() == {7: 6}


def test_no_more_is_computed_than_was_allowed(worker: Worker) -> None:
    """Also after answers of several tokens: the last request leaves nothing to undo."""
    worker.loop._prelauncher.prelaunch_unrequested = False
    allowed, length, op_id = 8, 5, 2
    token = chosen(worker.answers(dataclasses.replace(prefill(1, 7), prelaunch=allowed + 1))[1])
    kept = []
    while allowed >= 0:
        for _ in range(3):
            worker.round()
        request = dataclasses.replace(decode(op_id, 7, length, token), prelaunch=allowed)
        done = worker.answers(request)[op_id]
        assert isinstance(done, Forward)
        kept.append(done.kept)
        length, token, op_id = length + done.kept, chosen(done), op_id + 1
        allowed -= done.kept
    for _ in range(3):
        worker.round()
    assert max(kept) > 1 and worker.lengths() == {7: length}


def four_tokens(worker: Worker, ends: frozenset[int] = frozenset()) -> list[int]:
    """Of a text whose caller wants several at once, up to one of `ends`."""
    output = dataclasses.replace(GREEDY, end_token_ids=ends)
    tokens = [chosen(worker.done(dataclasses.replace(prefill(1, 7), output=output)))]
    while len(tokens) < 4:
        position = 4 + len(tokens)
        request = decode(position, 7, position, tokens[-1])
        tokens.append(chosen(worker.done(dataclasses.replace(request, output=output, prelaunch=16))))
    return tokens


def test_behind_an_end_only_what_runs_already_is_computed() -> None:
    """Its result is not known yet when the next step is launched."""

    def tokens_and_length(ends: frozenset[int]) -> tuple[list[int], int]:
        worker = Worker()
        worker.loop._prelauncher.prelaunch_unrequested = True
        worker.compute_late()
        tokens = four_tokens(worker, ends)
        for _ in range(20):
            worker.loop.step()
            worker.loop.flush()
        return tokens, worker.lengths()[7]

    tokens, length = tokens_and_length(frozenset())
    assert length > 10
    assert tokens_and_length(frozenset(tokens[-1:])) == (tokens, 9)


def test_an_unrequested_result_is_dropped(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (prelaunch, step_loop):
        monkeypatch.setattr(module, "HOLD_TIMEOUT_S", 0.0)
    worker.answers(prefill(1, 7))
    worker.round()
    worker.loop.submit([])
    worker.loop.take()
    # Idle, it waits for that long at most.
    worker.loop.stop()
    worker.loop.take()
    assert worker.lengths() == {7: 5}


@pytest.mark.parametrize("seed", some(range(40), range(5)))
def test_answers_are_the_same_with_and_without_prelaunch(seed: int) -> None:
    """The same commands give the same answers, and leave the same tokens."""
    callers, dice = Callers(seed, ahead=True), random.Random(seed)
    workers = Worker(pages=120), Worker(max_seq_tokens=0, pages=120)
    for _ in range(30):
        asked = callers.ask()
        found = [worker.answers(*asked) for worker in workers]
        assert answers(found[0]) == answers(found[1])
        callers.took(asked, found[0])
        if dice.random() < 0.3:
            # With and without time for prelaunched forwards to run.
            workers[0].round()
    workers[0].loop._prelauncher.drop_all()
    assert workers[0].tokens() == workers[1].tokens()


class SteadyCallers(Callers):
    """Most of the time all sequences go on with the chosen tokens. `stray`: how often they do anything."""

    def __init__(self, seed: int, stray: float) -> None:
        super().__init__(seed, ahead=True)
        self._stray = stray

    def ask(self) -> list[Command]:
        if not self._known or self._random.random() < self._stray:
            return super().ask()
        return [
            Forward(
                self._next_id(),
                sequence,
                length,
                [token],
                output=OUTPUTS[sequence % len(OUTPUTS)],
                kind=Kind.DECODE,
                caller=sequence % 3,
                prompt_len=1,
                prelaunch=self._random.random() < 0.85,
            )
            for sequence, (length, token) in self._known.items()
        ]


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("stray", [0.1, 0.5])
def test_answers_are_the_same_with_steps_that_are_launched_ahead(seed: int, stray: float) -> None:
    callers, dice = SteadyCallers(seed, stray), random.Random(seed)
    workers = Worker(pages=120), Worker(max_seq_tokens=0, pages=120)
    # Or those whose callers want it: of them some texts end in each step.
    only_steady = workers[0].loop._prelauncher.prelaunch_unrequested = seed % 2 == 0
    late = workers[0].compute_late()
    late.fails = lambda: dice.random() < 0.05
    for _ in range(60):
        asked = callers.ask()
        # A step can be requested by several messages.
        parts = [asked] if dice.random() < 0.6 else [asked[::2], asked[1::2]]
        found: dict[int, Result] = {}
        while len(found) < len(asked):
            for result in workers[0].round(*(parts.pop(0) if parts else ())):
                assert result.op_id > 0  # type: ignore[union-attr]
                found[result.op_id] = result  # type: ignore[union-attr]
        assert answers(found) == answers(workers[1].answers(*asked))
        callers.took(asked, found)
        if dice.random() < 0.2:
            workers[0].round()
    workers[0].loop.submit([Release(10**6, [])])
    workers[0].loop.take()
    workers[0].loop._prelauncher.drop_all()
    assert workers[0].tokens() == workers[1].tokens()
    has_changed = late.shrunk or late.joined or only_steady
    assert (late.launched_ahead > 5 and has_changed) or stray > 0.1


class Generating(Callers):
    """Most sequences go on with the chosen tokens, of which several may be answered at once."""

    def _decode(self, sequence: int) -> Forward:
        (length, token), rng = self._known[sequence], self._random
        if rng.random() < 0.1:
            return super()._decode(sequence)
        spec = OUTPUTS[sequence % len(OUTPUTS)]
        ends = frozenset(range(sequence % 4))
        output = dataclasses.replace(spec, end_token_ids=ends)
        most = rng.choice([0, 1, 3, 16])
        return dataclasses.replace(
            decode(self._next_id(), sequence, length, token), output=output, prompt_len=1, prelaunch=most
        )


@pytest.mark.parametrize(("seed", "late"), paired([0, *range(3, 40)], [False, True], (0, 3)))
def test_several_tokens_at_once_are_those_of_as_many_requests(seed: int, late: bool) -> None:
    """Whatever comes between, and if pages are scarce."""
    callers, dice = Generating(seed, ahead=True), random.Random(seed)
    workers = Worker(pages=40), Worker(max_seq_tokens=0, pages=120)
    workers[0].loop._prelauncher.prelaunch_unrequested = False
    if late:
        workers[0].compute_late()
    longest = 0
    for _ in range(60):
        asked = callers.ask()
        found = workers[0].answers(*asked)
        alone = workers[1].answers(*asked)
        for request in asked:
            done, next_one = found[request.op_id], alone[request.op_id]
            if isinstance(done, Failed) and done.reason is FailureReason.KV_EXHAUSTED:
                # There the other worker has it; nothing is asked of this sequence any more.
                assert isinstance(request, Forward)
                for worker in workers:
                    worker.answers(Release(10**6, [request.sequence]))
                callers._known.pop(request.sequence, None)
                continue
            if not isinstance(done, Forward):
                assert done == next_one
                continue
            assert isinstance(next_one, Forward) and isinstance(request, Forward)
            outputs = [*next_one.outputs]
            for token in done.appended:
                assert token == outputs[-1].token_id and token not in request.output.end_token_ids
                position = done.position + len(outputs)
                following = dataclasses.replace(request, position=position, token_ids=[token], op_id=10**6)
                (one,) = workers[1].answers(following).values()
                assert isinstance(one, Forward)
                outputs += one.outputs
            next_one.outputs, next_one.kept = outputs, next_one.kept + len(done.appended)
            longest = max(longest, done.kept)
            assert done.kept <= max(1, request.prelaunch) or request.kind is Kind.PREFILL
            assert answers({1: done}) == answers({1: next_one})
        callers.took(
            [one for one in asked if not isinstance(found[one.op_id], Failed)],
            found,
        )
        for _ in range(dice.choice([0, 0, 1, 4, 20])):
            workers[0].round()
    workers[0].loop.submit([Release(10**6, [])])
    workers[0].loop.take()
    workers[0].loop._prelauncher.drop_all()
    assert workers[0].tokens() == workers[1].tokens() and longest > 3


def more_is_answered_than_was_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    take = prelaunched_results._take
    monkeypatch.setattr(prelaunched_results, "_take", lambda ready, sequence, _: take(ready, sequence, 1000))


def ends_are_not_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prelaunch, "_ends", lambda decodes: np.zeros(decodes.size, np.bool_))


def what_is_queued_loses_what_is_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def free(prelauncher: Prelauncher) -> bool:
        ready, prelauncher.ready = prelauncher.ready, {}
        for sequence, results in ready.items():
            prelauncher._engine.undo(sequence, results[0].position)
        return bool(ready)

    monkeypatch.setattr(Prelauncher, "free_pages", free)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "plant",
    [more_is_answered_than_was_allowed, ends_are_not_seen, what_is_queued_loses_what_is_before_it],
)
def test_a_planted_bug_is_found(
    plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    def all_seeds() -> None:
        for seed in range(6):
            test_several_tokens_at_once_are_those_of_as_many_requests(seed, late=False)

    plant(monkeypatch)
    with pytest.raises((AssertionError, IntegrityError)):
        all_seeds()


def test_nothing_more_is_computed_in_advance_beside_another_caller(worker: Worker) -> None:
    """It would take more steps for as many tokens."""
    answered = worker.answers(dataclasses.replace(prefill(1, 7), prelaunch=16), prefill(2, 50, told=False))
    token = chosen(answered[2])
    for turn in range(5):
        token = chosen(worker.done(decode(10 + turn, 50, 5 + turn, token, told=False)))
    assert worker.lengths() == {7: 6, 50: 10}
    for _ in range(20):
        worker.round()
    assert worker.lengths()[7] == 6, "until it is requested"
    (done,) = worker.round(dataclasses.replace(decode(3, 7, 5, chosen(answered[1])), prelaunch=4))
    assert isinstance(done, Forward) and done.kept == 1
    for _ in range(20):
        worker.round()
    assert worker.lengths()[7] == 10


def test_requests_of_several_messages_are_answered_together(worker: Worker) -> None:
    """A message costs as much for one as for all, and while a step runs each caller's is one of its own."""
    answered = worker.answers(prefill(1, 7), prefill(2, 50), prefill(3, 90))
    worker.round()
    for number, sequence in ((1, 7), (2, 50)):
        asked = decode(10 + number, sequence, 5, chosen(answered[number]))
        worker.loop.submit([Decodes.of([asked])])
    worker.loop.submit([Truncate(20, 90, 3), Decodes.of([decode(21, 90, 3, 1)])])
    worker.loop.take()
    worker.loop.flush()
    first, second = worker._results
    assert isinstance(first, Decodes) and first.columns[Column.OP_ID].tolist() == [11, 12]
    assert second == carried_out(20)


def test_a_step_is_launched_before_the_last_one_is_read() -> None:
    worker = Worker()
    # Its decode is prelaunched: it runs when it is requested, and the next one is launched before its answer.
    late, token = running_ahead(worker)
    for turn in range(3):
        assert late.launched_ahead == turn
        (done,) = worker.round(decode(2 + turn, 7, 5 + turn, token))
        token = chosen(done)
        assert worker.lengths() == {7: 6 + turn} and late.computed == 1 + turn, "nothing twice"
    # It computes the next token; another one is asked for.
    (failed,) = worker.round(Truncate(8, 7, 4))
    assert worker.lengths() == {7: 4} and failed == carried_out(8)


def test_steps_of_steady_callers_are_launched_ahead_without_the_flag(worker: Worker) -> None:
    token = chosen(worker.done(prefill(1, 7)))
    late = worker.compute_late()
    ahead = []
    for turn in range(5):
        worker.round()
        token = chosen(worker.done(decode(2 + turn, 7, 5 + turn, token, told=False)))
        ahead.append(late.launched_ahead)
    assert ahead == [0, 0, 1, 1, 1]


@pytest.mark.parametrize("together", [False, True])
def test_a_step_in_flight_answers_one_of_two_equal_requests(worker: Worker, together: bool) -> None:
    _, token = running_ahead(worker)
    asked = [decode(2, 7, 5, token), decode(3, 7, 5, token)]
    if not together:
        worker._asked[2] = asked.pop(0)
        worker.loop.submit([Decodes.of([worker._asked[2]])])
        worker.loop.take()
    found = worker.answers(*asked)
    assert found.keys() == {2, 3} and chosen(found[2]) == chosen(found[3])
    assert worker.lengths() == {7: 6}


@pytest.mark.parametrize("pages", [3, 4])
def test_no_step_is_launched_ahead_that_not_all_have_pages_for(pages: int) -> None:
    """The first sequence needs another page for it, and the second has three quarters of one left."""
    worker = Worker(pages=pages)
    answered = worker.answers(prefill(1, 7, count=15), prefill(2, 50, count=20))
    late = worker.compute_late()
    worker.round()
    both = decode(3, 7, 15, chosen(answered[1])), decode(4, 50, 20, chosen(answered[2]))
    asked = [dataclasses.replace(one, prompt_len=one.position) for one in both]
    answered = worker.answers(*asked)
    assert late.launched_ahead == pages - 3 and late.computed == 1
    known = worker.engine.kv_table.get(7)
    assert known is not None and len(known.pages) == pages - 2
    last = worker.answers(decode(5, 7, 16, chosen(answered[3])))[5]
    assert isinstance(last, Failed) == (pages == 3)


def test_no_step_is_launched_ahead_beyond_the_longest_sequence() -> None:
    worker = Worker(max_seq_tokens=7)
    late, token = running_ahead(worker)
    for turn in range(2):
        token = chosen(worker.done(decode(2 + turn, 7, 5 + turn, token)))
    assert late.launched_ahead == 1 and not worker.loop.operations_in_flight


def test_a_loop_that_stops_answers_what_is_in_flight() -> None:
    worker = Worker()
    token = chosen(worker.answers(prefill(1, 7), prefill(2, 8))[1])
    worker.compute_late()
    worker.round()
    worker.loop.submit([Decodes.of([decode(3, 7, 5, token)])])
    worker.loop.stop()
    worker.loop.take()
    worker.loop.run()
    (done,) = worker._results
    assert isinstance(done, Decodes) and done.columns[Column.OP_ID].tolist() == [3]


def test_forwards_that_wait_for_an_adapter_expire_while_others_are_launched_ahead() -> None:
    threads: list[Callable[[], None]] = []
    adapters = AdapterTable[str](FakeModel(1), lambda _: pytest.fail("not read"), 1000, threads.append)
    worker = stepping.Worker(max_seq_tokens=MAX_SEQ_TOKENS, adapters=adapters)
    token = chosen(worker.answers(ChangeAdapters(1, [AdapterSource(3, "")]), prefill(2, 7))[2])
    worker.compute_late()
    assert worker.round(Forward(3, 8, 0, [1], adapter=3, deadline_ns=1 << 62)) == []
    adapters._waiting[0].deadline_ns = 1
    results = worker.round(decode(4, 7, 5, token)) + worker.round()
    assert Failed(3, FailureReason.TIMEOUT) in results


def test_steps_that_are_launched_ahead_count_like_others(monkeypatch: pytest.MonkeyPatch) -> None:
    worker, recorded = Worker(), list[object]()
    token = chosen(worker.done(prefill(1, 7)))
    late = worker.compute_late()
    monkeypatch.setattr(worker.loop._scheduler, "record_step", lambda *step: recorded.append(step))
    worker.round()
    for turn in range(3):
        asked = dataclasses.replace(decode(2 + turn, 7, 5 + turn, token), arrived_ns=1)
        done = worker.answers(asked)[2 + turn]
        token = chosen(done)
        assert isinstance(done, Forward) and done.queue_ns == 0 and done.batch_items == 1
        step, status = worker.loop._in_flight.step, worker.engine.stats.status()
        assert step is not None and worker.loop._scheduler.running is step.decodes
        assert status.step_age_ns and status.step_number == 3 + turn
        assert len(recorded) == turn + 1
    worker.answers(Release(8, [7]))
    status = worker.engine.stats.status()
    assert status.step_age_ns == 0 and len(recorded) == late.computed == 4
    assert status.counts.steps == 5 and status.counts.decode_operations == 3


@pytest.mark.parametrize(
    "other", [CheckIntegrity(90, check_pages=True), Forward(90, 8, 0, [1], sample_seeds=range(4))]
)
def test_other_work_is_done_beside_steps_that_could_be_launched_ahead(
    worker: Worker, monkeypatch: pytest.MonkeyPatch, other: Command
) -> None:
    """In four steps or more."""
    monkeypatch.setattr(integrity, "PAGES_PER_SLICE", 16)
    for module, name in ((answers_module, "_DRAWN_COST"), (extra_samples, "_BATCH_COST")):
        monkeypatch.setattr(module, name, 1)
    token = chosen(worker.done(prefill(1, 7)))
    worker.compute_late()
    results: list[Result] = worker.round(other)
    for turn in range(8):
        results += worker.answers(decode(2 + turn, 7, 5 + turn, token)).values()
        token = chosen(next(one for one in results if isinstance(one, Forward) and one.op_id == 2 + turn))
    assert any(one.op_id == 90 for one in results)  # type: ignore[union-attr]


@pytest.mark.parametrize(("place", "at"), [(LateRunner, "_launch_after"), (LateStep, "chosen")])
def test_a_lost_device_ends_the_loop_while_a_step_is_in_flight(
    monkeypatch: pytest.MonkeyPatch, place: type, at: str
) -> None:
    worker = Worker()
    _, token = running_ahead(worker)

    def lose(*_: object, **__: object) -> None:
        raise DeviceLostError("planted")

    monkeypatch.setattr(place, at, lose)
    with pytest.raises(DeviceLostError):
        worker.round(decode(2, 7, 5, token))


@pytest.mark.parametrize("unrequested", [True, False])
def test_what_runs_behind_an_end_is_no_answer_to_another_token(*, unrequested: bool) -> None:
    """Nor does it cut the text again, once it was not requested for a while."""
    tokens = four_tokens(Worker())
    ends, other = frozenset(tokens[-1:]), (tokens[-1] + 1) % 50
    worker, plain = Worker(), Worker()
    worker.loop._prelauncher.prelaunch_unrequested = unrequested
    late = worker.compute_late()
    assert four_tokens(worker, ends) == tokens and late.launched_ahead
    four_tokens(plain)
    request = decode(20, 7, 8, other, told=False)
    assert chosen(worker.answers(request)[20]) == chosen(plain.answers(request)[20])
    worker.loop._prelauncher.drop_expired(1 << 62)
    assert worker.lengths() == {7: 9}
