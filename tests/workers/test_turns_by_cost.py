"""Callers beside one who asks for much: their turns go by cost, and he does not make their steps long.

Time is that of a model, in which a step costs something anyway, and something for each unit of cost; nothing
here is measured.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import count, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.workers.scheduling import Callers, check_invariants, run_step
from workers.caller_limits import MIN_FREE_COST, CallerLimits
from workers.forward_queues import cost_of
from workers.operations import Forward
from workers.outputs import DataType, HiddenSpec, OutputSpec
from workers.scheduler import Scheduler

GREEDY, OTHER = 1, 2
DECODE_COST = 2


def quantile(waits_ns: list[int], share: float) -> int:
    return sorted(waits_ns)[int(share * (len(waits_ns) - 1))]


# What a step costs anyway in terms of a decode: a weightless worker, a model on a CPU, one on a GPU.
BASES_NS = [30 * DECODE_COST, 100 * DECODE_COST, 2000 * DECODE_COST]
# What else there is fails only where one of these does, too.
ALWAYS = [(60, 1, 3.0), (60, 32, 0.8), (60, 32, 3.0), (4000, 1, 0.8)]


@pytest.mark.parametrize(
    ("base_ns", "others", "thinks"),
    [
        pytest.param(*each, marks=() if each in ALWAYS else pytest.mark.thorough)
        for each in product(BASES_NS, (1, 32), (0.1, 0.8, 3.0))
    ],
)
def test_beside_256_forwards_of_one_nobody_waits_three_times_as_long(
    base_ns: int, others: int, thinks: float
) -> None:
    """`thinks`: how long the others are away after an answer, in steps of their own."""
    waits_ns = []
    for greedy_loops in (0, 256):
        model = Callers(base_ns, unit_ns=1)
        alone_ns = base_ns + others * DECODE_COST
        for caller in range(OTHER, OTHER + others):
            model.add(caller, 1, think_ns=int(thinks * alone_ns))
        model.add(GREEDY, greedy_loops, think_ns=alone_ns // 20)
        for _ in range(150):
            model.step()
        waits_ns.append([ns for caller in range(OTHER, OTHER + others) for ns in model.waits_ns[caller][2:]])
    alone, beside = waits_ns
    for share in (0.5, 0.99):
        assert quantile(beside, share) <= 3 * quantile(alone, share)


@pytest.mark.parametrize("loops", [[256], [64] * 4])
def test_who_is_alone_and_who_want_alike_fill_the_step(loops: list[int]) -> None:
    model = Callers(base_ns=60, unit_ns=1)
    for caller, count_of_loops in enumerate(loops, start=1):
        model.add(caller, count_of_loops)
    assert [len(model.step()) for _ in range(20)] == [256] * 20


def test_where_forwards_cost_next_to_nothing_nobody_is_bounded() -> None:
    model = Callers(base_ns=100_000, unit_ns=1)
    model.add(OTHER, 1, think_ns=300_000)
    model.add(GREEDY, 200)
    sizes = [len(model.step()) for _ in range(100)]
    assert all(size >= 200 for size in sizes[50:])


def test_the_share_shrinks_only_while_others_are_there() -> None:
    model = Callers(base_ns=60, unit_ns=1)
    model.add(OTHER, 1, think_ns=10**9)
    model.add(GREEDY, 256)
    sizes = [len(model.step()) for _ in range(30)]
    assert max(sizes[:8]) <= 1 + MIN_FREE_COST // DECODE_COST
    assert sizes[-10:] == [256] * 10


@settings(max_examples=settings().max_examples // 5)
@given(
    callers=st.lists(st.tuples(st.integers(1, 40), st.sampled_from([1, 2, 7, 16])), min_size=2, max_size=5),
    items=st.integers(2, 12),
)
def test_shares_are_even_in_cost(callers: list[tuple[int, int]], items: int) -> None:
    """Of callers who always have something waiting none gets ahead by more than a step and a forward."""
    model = Callers(base_ns=60, unit_ns=1, items=items)
    for caller, (_, tokens) in enumerate(callers, start=1):
        model.add(caller, 60, tokens)
    for _ in range(60):
        assert model.step(), "something waits"
        check_invariants(model.scheduler)
        largest = max(2 * tokens for _, tokens in callers)
        served = [model.served[caller] for caller in range(1, len(callers) + 1)]
        assert max(served) - min(served) <= 2 * largest


@settings(max_examples=settings().max_examples // 5)
@given(
    loops=st.lists(
        st.tuples(st.integers(1, 300), st.sampled_from([1, 3, 16, 40, 700])), min_size=1, max_size=5
    ),
    base_ns=st.sampled_from([1, 60, 5000]),
)
def test_nobody_starves_and_no_step_is_empty(loops: list[tuple[int, int]], base_ns: int) -> None:
    model = Callers(base_ns, unit_ns=1)
    for caller, (number, tokens) in enumerate(loops, start=1):
        model.add(caller, number, tokens)
    for _ in range(100):
        assert model.step()
    check_invariants(model.scheduler)
    assert all(model.served[caller] for caller in range(1, len(loops) + 1))


def test_who_asks_for_much_each_time_pays_for_it_the_next() -> None:
    """Also if nothing of his is queued in between."""
    model = Callers(base_ns=60, unit_ns=1)
    model.add(GREEDY, 1, 2000)
    model.add(OTHER, 6, 200)
    for _ in range(400):
        model.step()
    assert 0.6 < model.served[GREEDY] / model.served[OTHER] < 1.6


@pytest.mark.parametrize(
    ("output", "weight"),
    [
        (OutputSpec(), 1),
        (OutputSpec(logprob=True, top_logprobs=20, logprob_token_ids=tuple(range(100))), 1),
        (OutputSpec(logits=DataType.F32), 4),
        (OutputSpec(hidden=HiddenSpec([28])), 2),
        (OutputSpec(hidden=HiddenSpec(range(8))), 3),
        (OutputSpec(top_logprobs=1024, logprob_token_ids=tuple(range(4096))), 11),
    ],
)
def test_rows_count_by_what_they_return(output: OutputSpec, weight: int) -> None:
    assert output.row_weight == weight
    scheduler = Scheduler(512, 256, 256)
    for op_id in range(256):
        scheduler.add(Forward(op_id, op_id, 0, [1], output=output))
    scheduler.add(Forward(256, 256, 0, range(300), rows=300, output=output))
    rows = []
    while len(scheduler):
        rows.append(sum(chunk.rows for chunk in run_step(scheduler)))
    assert sum(rows) == 556 and max(rows) == 256 // weight


def test_a_row_that_weighs_more_than_a_step_still_runs() -> None:
    heavy = OutputSpec(top_logprobs=1024, logprob_token_ids=tuple(range(4096)), logits=DataType.F32)
    for max_rows in (1, 3, 4, 9):
        scheduler = Scheduler(64, 8, max_rows)
        for op_id in range(6):
            scheduler.add(Forward(op_id, op_id, 0, range(1 + 39 * (op_id % 2)), output=heavy))
        for _ in range(60):
            run_step(scheduler)
        assert len(scheduler) == 0


def bound_nobody(limits: CallerLimits, wanted: Mapping[int, int]) -> dict[int, int]:
    return {}


def test_the_tests_notice_a_mutant(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CallerLimits, "shares", bound_nobody)
    with pytest.raises(AssertionError):
        test_beside_256_forwards_of_one_nobody_waits_three_times_as_long(60, 8, 0.8)


def test_cost_is_tokens_and_rows_by_their_weight() -> None:
    op = Forward(1, 1, 0, range(40), rows=10, output=OutputSpec(logits=DataType.BF16))
    assert cost_of(op, 40) == 40 + 10 * 4
    assert cost_of(op, 6) == 6 + 6 * 4


def test_draws_are_counted_once_and_not_for_each_row_that_is_scored() -> None:
    seeds = range(1024)
    assert cost_of(Forward(1, 1, 0, range(40), sample_seeds=seeds), 40) == 40 + 1 + 64
    scored = cost_of(Forward(1, 1, 0, range(4000), scored=3999, sample_seeds=seeds), 4000)
    assert 8000 <= scored <= 8000 + 64


def test_a_batch_that_comes_again_and_again_alone_is_not_split() -> None:
    """Each call is a new caller: it does not delay the caller of the last one, which is gone."""
    scheduler = Scheduler(512, 256, max_rows=256)
    op_ids = count()

    def sizes_of(caller: int, items: int) -> list[int]:
        for _ in range(items):
            op_id = next(op_ids)
            scheduler.add(Forward(op_id, op_id, 0, range(1), rows=1, caller=caller))
        sizes = []
        while len(scheduler):
            sizes.append(len(run_step(scheduler)))
        return sizes

    # After two callers that were active together, and may come back, the first batches are split.
    scheduler._limits._undemanding.append({1: 20, 2: 20})
    sizes = [sizes_of(caller, 32) for caller in range(3, 20)]
    assert len(sizes[0]) > 1 and sizes[-1] == [32]


def test_a_batch_that_is_little_more_than_its_share_is_not_split() -> None:
    model = Callers(base_ns=60, unit_ns=3)
    for caller in range(100, 131):
        model.add(caller, 1, think_ns=10**9)
    assert len(model.step()) == 31
    model.add(GREEDY, 32)
    assert [len(model.step()) for _ in range(20)] == [32] * 20


@pytest.mark.parametrize(("max_batch_tokens", "least"), [(4096, 128), (512, 16), (8, 8)])
def test_where_any_chunk_doubles_a_step_prompts_get_a_32nd_of_the_largest(
    max_batch_tokens: int, least: int
) -> None:
    limits = CallerLimits(max_batch_tokens)
    limits.record_decodes({1: 2})
    for _ in range(8):
        limits.times.add(2, 500_000)
        limits.times.add_prompts(16, 2, 100_000_000)
    assert limits.max_prompt_tokens([2]) == least
