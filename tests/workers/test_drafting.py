"""Drafts of a second model: which they are, and that they follow whatever happens to a sequence."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.commands import CheckIntegrity, Command, Fork, Release, Truncate
from tests.model_factory import TinyModel, make_model
from tests.workers.stepping import Worker, answered, chosen, unhurried
from workers.drafting import Drafting
from workers.executors.draft_model import difference
from workers.executors.llm import LlmExecutor
from workers.executors.memory import StepLimits
from workers.executors.weightless import PagedAttentionExecutor
from workers.kv.sizing import KvSizingError
from workers.operations import Accept, Forward, IntegrityReport, Kind
from workers.outputs import GREEDY, OutputSpec, Sampling, TokenMask

DRAWN = OutputSpec(sampling=Sampling(temperature=1.0, repetition_penalty=1.2, presence_penalty=0.5, seed=5))
MASKED = OutputSpec(
    sampling=Sampling(temperature=0.8, seed=9, logit_bias={3: 1.0}), mask=TokenMask(packed=b"\xff" * 40)
)
OUTPUTS = (GREEDY, DRAWN, MASKED)


class DraftingWorker(Worker):
    """A worker whose draft model is the model itself, with pages of its own."""

    def __init__(
        self, *, pages: int = 200, draft_pages: int = 200, step_tokens: int = 4096, max_seq_tokens: int = 4096
    ) -> None:
        model = PagedAttentionExecutor.create(kv_pages=draft_pages)
        vocab_size = model.info().vocab_size
        self.drafting = Drafting(
            model.engine,
            vocab_sizes=(vocab_size, vocab_size),
            max_seq_tokens=max_seq_tokens,
            step_tokens=step_tokens,
        )
        unhurried(self.drafting)
        super().__init__(pages=pages, drafting=self.drafting)
        self._op_ids = iter(range(1, 1 << 30))
        self.texts: dict[int, list[int]] = {}

    def ask(self, sequence: int, token_ids: Sequence[int], draft_tokens: int, output: OutputSpec) -> Forward:
        position = len(self.texts.get(sequence, ()))
        many = {"rows": len(token_ids), "accept": Accept.CHOSEN, "kind": Kind.VERIFY} if position else {}
        return Forward(
            next(self._op_ids),
            sequence,
            position,
            list(token_ids),
            output=output,
            draft_tokens=draft_tokens,
            prompt_len=min(position, 3),
            **many,  # type: ignore[arg-type]
        )

    def all_done(self, *forwards: Forward) -> list[Forward]:
        """What is answered; the texts are as long as what is kept."""
        answers = self.answers(*forwards)
        found = [answered(answers[forward.op_id]) for forward in forwards]
        for forward in found:
            text = self.texts.setdefault(forward.sequence, [])
            text += forward.token_ids[: forward.kept]
        self.drafting.engine.kv_table.check_integrity()
        return found

    def change(self, command: Command) -> None:
        self.answers(command)

    def next_id(self) -> int:
        return next(self._op_ids)


def next_token(forward: Forward) -> int:
    """The one behind what is kept of a forward."""
    return forward.outputs[forward.kept - len(forward.token_ids) - 1].token_id


@pytest.mark.parametrize("draft_pages", [200, 12])
@given(seed=st.integers(0, 1 << 32))
@settings(max_examples=max(2, settings().max_examples // 20), deadline=None)
def test_a_draft_model_that_is_the_model_is_always_right(draft_pages: int, seed: int) -> None:
    """Whatever is forked, cut and released meanwhile. Where pages are missing nothing is drafted."""
    rng, worker = random.Random(seed), DraftingWorker(draft_pages=draft_pages)
    last: dict[int, Forward | None] = {}
    outputs: dict[int, OutputSpec] = {}
    numbers = iter(range(1, 1000))
    tried = drafted = 0
    for _ in range(40):
        idle = [number for number in last if rng.random() < 0.7]
        kind = rng.random()
        if kind < 0.15 and idle:
            parent, child = rng.choice(idle), next(numbers)
            worker.change(Fork(worker.next_id(), parent, [child]))
            worker.texts[child], last[child] = list(worker.texts[parent]), last[parent]
            outputs[child] = outputs[parent]
        elif kind < 0.25 and idle:
            number = rng.choice(idle)
            length = rng.randint(1, len(worker.texts[number]))
            worker.change(Truncate(worker.next_id(), number, length))
            del worker.texts[number][length:]
            last[number] = None
        elif kind < 0.35 and len(last) > 2 and idle:
            number = rng.choice(idle)
            worker.change(Release(worker.next_id(), [number]))
            del last[number], worker.texts[number], outputs[number]
        elif kind < 0.55 or not last:
            number = next(numbers)
            outputs[number] = rng.choice(OUTPUTS)
            prompt = [rng.randrange(200) for _ in range(rng.choice([1, 5, 40]))]
            (last[number],) = worker.all_done(worker.ask(number, prompt, 0, outputs[number]))
        else:
            asked = []
            for number in idle:
                before = last[number]
                token = rng.randrange(200) if before is None else next_token(before)
                tokens = [token, *(before.drafts if before is not None else ())]
                asked.append(worker.ask(number, tokens, rng.randint(0, 5), outputs[number]))
            for forward in worker.all_done(*asked):
                # All that was drafted is what the model chooses: nothing is cut.
                assert forward.kept == len(forward.token_ids)
                last[forward.sequence] = forward
                assert len(forward.drafts) <= forward.draft_tokens
                tried += forward.draft_tokens > 0
                drafted += len(forward.drafts) == forward.draft_tokens > 0
    assert draft_pages < 200 or drafted == tried
    for number in list(last):
        worker.change(Release(worker.next_id(), [number]))
    worker.texts.clear()
    worker.all_done(worker.ask(1000, [1, 2], 1, GREEDY))
    assert worker.drafting.engine.kv_table.usage().sequences <= 1, "what is gone is dropped"


def test_a_long_prompt_is_computed_in_parts_before_anything_is_drafted() -> None:
    worker = DraftingWorker(step_tokens=50, max_seq_tokens=140)
    (forward,) = worker.all_done(worker.ask(1, [index % 90 for index in range(120)], 4, GREEDY))
    rounds = 1
    while not forward.drafts:
        (forward,) = worker.all_done(worker.ask(1, [next_token(forward)], 4, GREEDY))
        rounds += 1
    assert rounds == 3 and len(forward.drafts) == 4
    while forward.drafts:
        (forward,) = worker.all_done(worker.ask(1, [next_token(forward), *forward.drafts], 4, GREEDY))
    # The draft model has no room for more.
    assert 136 <= len(worker.texts[1]) <= 140


def test_a_draft_model_that_fails_leaves_the_answers(caplog: pytest.LogCaptureFixture) -> None:
    worker = DraftingWorker()
    (forward,) = worker.all_done(worker.ask(1, [1, 2, 3], 4, GREEDY))
    assert len(forward.drafts) == 4

    def fail(*_: object) -> None:
        raise ValueError("planted")

    execute, worker.drafting.engine.execute = worker.drafting.engine.execute, fail  # type: ignore[assignment,method-assign]
    (forward,) = worker.all_done(worker.ask(1, [next_token(forward)], 4, GREEDY))
    assert not forward.drafts
    worker.drafting.engine.execute = execute  # type: ignore[method-assign]
    (forward,) = worker.all_done(worker.ask(1, [next_token(forward)], 4, GREEDY))
    assert len(forward.drafts) == 4


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("models")
    make_model(made / "model", TinyModel(vocab_size=97))
    make_model(made / "smaller", TinyModel(vocab_size=90, num_layers=1))
    return made


def test_a_draft_model_with_fewer_tokens_drafts_those_that_it_has(directory: Path) -> None:
    settings = {"kv_pages": 20, "self_check": False, "limits": StepLimits(64, 16)}
    executor = LlmExecutor.load(directory / "model", draft=directory / "smaller", **settings)  # type: ignore[arg-type]
    assert executor.capabilities().draft_model == "smaller"
    executor.warmup()
    drafting = executor.drafting
    assert isinstance(drafting, Drafting) and drafting.engine.kv_table.usage().pages_total == 20
    worker = Worker(executor.engine, drafting=drafting)
    bias = OutputSpec(sampling=Sampling(logit_bias={95: 100.0}), mask=TokenMask(allowed=(95, 96)))
    found = worker.done(Forward(1, 1, 0, [5, 6], output=bias, draft_tokens=3))
    assert not found.drafts and chosen(found) == 95, "a token that it does not have"
    found = worker.done(Forward(2, 2, 0, [5, 6], draft_tokens=3))
    assert len(found.drafts) == 3 or chosen(found) >= 90


def test_pages_of_both_models_are_refused_together(directory: Path) -> None:
    with pytest.raises(KvSizingError, match="kv_pages"):
        LlmExecutor.load(directory / "model", draft=directory / "smaller", kv_pages=1 << 30, self_check=False)


def test_tokenizers_are_compared_token_by_token() -> None:
    def of(vocab: str, added: str = "") -> bytes:
        return f'{{"model": {{"vocab": {vocab}}}, "added_tokens": [{added}]}}'.encode()

    ours = of('{"a": 0, "b": 1}', '{"content": "<end>", "id": 2}')
    assert not difference(ours, ours) and not difference(b"", b"")
    assert not difference(ours, of('[["a", -1.0], ["b", -2.0]]', '{"content": "<end>", "id": 2}'))
    assert "no tokenizer" in difference(ours, b"") and "no tokenizer" in difference(b"", ours)
    assert "'b' as 1: its id is 3" in difference(ours, of('{"a": 0, "b": 3}'))
    assert "'<end>' as 2: which" in difference(ours, of('{"a": 0, "b": 1}'))
    assert "its token 'c'" in difference(
        ours, of('{"a": 0, "b": 1, "c": 3}', '{"content": "<end>", "id": 2}')
    )


def test_an_integrity_check_finds_errors_in_the_pages_of_the_draft_model() -> None:
    worker = DraftingWorker()
    worker.all_done(worker.ask(1, [1, 2, 3], 4, GREEDY))
    reports = worker.answers(CheckIntegrity(worker.next_id(), check_pages=True)).values()
    assert [one.intact for one in reports if isinstance(one, IntegrityReport)] == [True]
    worker.drafting.engine.kv_table._pool._refcounts[9] += 1
    reports = worker.answers(CheckIntegrity(worker.next_id(), check_pages=True)).values()
    assert [one.intact for one in reports if isinstance(one, IntegrityReport)] == [False]


def test_pages_of_a_draft_model_are_stored_as_those_of_the_model(directory: Path) -> None:
    stored = {}
    for kv_dtype in ("auto", "int8"):
        executor = LlmExecutor.load(
            directory / "model",
            draft=directory / "smaller",
            kv_pages=20,
            kv_dtype=kv_dtype,
            self_check=False,
            limits=StepLimits(64, 16),
        )
        drafting = executor.drafting
        assert isinstance(drafting, Drafting) and drafting.engine.kv.quantised == executor.engine.kv.quantised
        stored[kv_dtype] = drafting.engine.kv.bytes_per_page
        worker = Worker(executor.engine, drafting=drafting)
        found = worker.done(Forward(1, 1, 0, [5, 6], draft_tokens=3))
        assert len(found.drafts) == 3 or chosen(found) >= 90
    assert stored["int8"] < stored["auto"]
