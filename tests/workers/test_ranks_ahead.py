"""Ranks that launch steps ahead do the same: each text has the tokens that one rank gives it."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.commands import Release, Truncate
from tests.kernels import conftest
from tests.model_factory import make_family_model
from tests.workers import graph_ranks, stepping
from tests.workers.stepping import chosen
from tests.workers.test_joining import PENALTIES, Callers, Text
from tests.workers.test_prelaunch import decode, prefill
from workers.executors import llm
from workers.executors.llm import LlmExecutor
from workers.outputs import OutputSpec, Sampling
from workers.runners.base import DeviceLostError
from workers.runners.rank_plan import ForwardPlan, Way
from workers.runners.rank_processes import RankProcesses
from workers.runners.tensor_parallel import RankGroup

if not conftest.HAS_TRITON or not conftest.INTERPRETED:
    pytest.skip("the interpreter of Triton is needed", allow_module_level=True)

_silent_numpy = conftest._silent_numpy

PAGES = 100
PATIENCE_S = 120
SETTINGS = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
}
DRAWN = OutputSpec(sampling=Sampling(temperature=0.9, top_p=0.8, seed=4), logprob=True)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_family_model(tmp_path_factory.mktemp("model"), "qwen3", SETTINGS, seed=3)


@contextlib.contextmanager
def over_graphs() -> Iterator[None]:
    """All that is loaded runs over the buffers of graphs."""
    with pytest.MonkeyPatch.context() as patch:
        graph_ranks.start_here(patch)
        patch.setattr(llm, "new_runner", graph_ranks.new_runner)
        yield


class Ranks:
    """A worker whose ranks are processes, and the plans that rank 0 has sent."""

    def __init__(self, directory: Path) -> None:
        self.ended = threading.Event()
        with over_graphs():
            self.group = RankGroup(RankProcesses(2, [], self.ended.set))
            executor = LlmExecutor.load(directory, kv_pages=PAGES, self_check=False, ranks=self.group)
        self.worker = stepping.Worker(executor.engine, limits=(64, 8, 8), max_seq_tokens=200)
        self.worker.loop._prelauncher.prelaunch_unrequested = False
        self.plans: list[ForwardPlan] = []
        run = self.group.run

        def noted(plan: ForwardPlan) -> None:
            self.plans.append(plan)
            run(plan)

        self.group.run = noted  # type: ignore[method-assign]

    def count(self, way: Way) -> int:
        return sum(plan.way is way for plan in self.plans)


@pytest.fixture
def ranks(directory: Path) -> Iterator[Ranks]:
    made = Ranks(directory)
    yield made
    made.group.close()


@pytest.fixture(scope="module")
def _lasting(directory: Path) -> Iterator[Ranks]:
    made = Ranks(directory)
    yield made
    made.group.close()


@pytest.fixture
def lasting(_lasting: Ranks) -> Ranks:
    """For tests that end none of them: they take seconds to start."""
    _lasting.worker.answers(Release(9000, [*_lasting.worker.lengths()]))
    _lasting.plans.clear()
    return _lasting


def assert_as_on_one_rank(directory: Path, texts: list[Text], least: int) -> None:
    with over_graphs():
        executor = LlmExecutor.load(directory, kv_pages=PAGES, self_check=False)
    worker = stepping.Worker(executor.engine, limits=(64, 8, 8))
    for text in texts:
        other = Text(text.sequence, text.output, is_masked=text.is_masked, vocab=text.vocab)
        callers = Callers(worker, [other])
        while len(other.tokens) < len(text.tokens):
            callers.round()
        assert len(text.tokens) > least and text.tokens == other.tokens, text.output


def test_tokens_are_those_of_one_rank(lasting: Ranks, directory: Path) -> None:
    """Rows that are plain, drawn and penalised go on, those with new masks join, and texts end."""
    texts = [Text(1), Text(11, DRAWN), Text(21, PENALTIES), Text(31, is_masked=True, vocab=97), Text(41)]
    steps = lasting.worker.engine.stats.status().counts.steps
    callers = Callers(lasting.worker, texts)
    callers.rounds(6)
    callers.waiting = [text for text in callers.waiting if text is not texts[0]]
    callers.rounds(6)
    assert_as_on_one_rank(directory, texts, 4)
    # The first decode is a step, in which all ranks capture. Each forward is one message.
    assert lasting.count(Way.AFTER) > 6 and lasting.count(Way.LAUNCH) <= 3
    assert any(plan.places is not None and -1 in plan.places for plan in lasting.plans)
    steps = lasting.worker.engine.stats.status().counts.steps - steps
    assert steps <= len(lasting.plans) <= steps + 1, "at most one of them is not finished"


def test_what_is_undone_is_undone_on_all_ranks(lasting: Ranks, directory: Path) -> None:
    """Steps that were launched ahead are dropped by other commands, or end for prompts, and others follow."""
    texts = [Text(1), Text(11, DRAWN)]
    callers, worker = Callers(lasting.worker, texts), lasting.worker
    for turn in range(2):
        callers.rounds(3)
        worker.answers(prefill(1000 + turn, 60 + turn, count=40, told=False))
        callers.rounds(1)
        for text in list(callers.waiting):
            text.tokens = text.tokens[:-1]
            worker.answers(
                Truncate(2000 + 10 * turn + text.sequence, text.sequence, 5 + len(text.tokens) - 1)
            )
        worker.answers(Release(3000 + turn, [60 + turn]))
    callers.rounds(4)
    assert_as_on_one_rank(directory, texts, 4)
    assert lasting.count(Way.AFTER) > 4


def running_ahead(ranks: Ranks) -> int:
    """A decode is in flight. Its token."""
    token = chosen(ranks.worker.done(prefill(1, 7)))
    for turn in range(2):
        token = chosen(ranks.worker.done(decode(2 + turn, 7, 5 + turn, token)))
    assert ranks.worker.loop._in_flight.step is not None
    return token


def test_a_rank_that_ends_while_a_step_is_in_flight_ends_the_group(ranks: Ranks) -> None:
    token = running_ahead(ranks)
    ranks.group.processes.others[0].process.kill()
    assert ranks.ended.wait(PATIENCE_S)
    with pytest.raises(DeviceLostError):
        ranks.worker.answers(decode(10, 7, 7, token))


@pytest.mark.parametrize("is_announced", [False, True])
def test_a_launch_that_fails_ends_the_group_if_the_others_were_told(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, is_announced: bool
) -> None:
    ranks: Ranks = request.getfixturevalue("ranks" if is_announced else "lasting")
    token, asked = running_ahead(ranks), decode(10, 7, 7, 0)
    inner: Any = ranks.worker.engine.runner.inner  # type: ignore[attr-defined]
    place = inner._captured.buffers if is_announced else inner

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("planted")

    monkeypatch.setattr(place, "load_after" if is_announced else "_repeat", fail)
    asked = dataclasses.replace(asked, token_ids=[token])
    if is_announced:
        with pytest.raises(DeviceLostError):
            ranks.worker.answers(asked)
    else:
        assert chosen(ranks.worker.answers(asked)[10]) >= 0 and not ranks.ended.is_set()
