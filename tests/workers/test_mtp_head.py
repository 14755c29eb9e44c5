"""Drafts of a model's own head for multi-token prediction, against the head in plain torch."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.commands import Fork, Truncate
from tests.families import settings_of
from tests.model_factory import make_family_model
from tests.mtp_heads import LAYERS, MtpOracle, make_mtp_model
from tests.workers.packing import new_packer, poisoned_pages, random_texts, rows_in_chunks
from tests.workers.stepping import Worker, answered, unhurried
from tests.workers.test_drafting import next_token
from tests.workers.test_families import assert_same
from workers.common.draft_models import MTP_HEAD
from workers.executors.llm import LlmExecutor
from workers.executors.memory import StepLimits
from workers.head_drafting import HeadDrafting
from workers.models.errors import ModelError
from workers.models.weights import load_planned, plan_load
from workers.operations import Accept, Forward, Kind

VOCAB = 97
# Of a row of logits in float32, as of other recurrent models.
MAX_RELATIVE_ERROR = 1e-4


class Drafted:
    """A worker, and the logits of what it has drafted last."""

    def __init__(self, directory: Path, **settings: Any) -> None:
        settings |= {"kv_pages": 80, "self_check": False, "limits": StepLimits(512, 16)}
        self.executor = LlmExecutor.load(directory, draft=Path(MTP_HEAD), **settings)
        drafting = self.executor.drafting
        assert isinstance(drafting, HeadDrafting)
        unhurried(drafting)
        self.worker = Worker(self.executor.engine, drafting=drafting)
        self._op_ids = iter(range(1, 1 << 30))

    def next_id(self) -> int:
        return next(self._op_ids)

    def done(self, *forwards: Forward) -> list[Forward]:
        found = self.worker.answers(*forwards)
        return [answered(found[forward.op_id]) for forward in forwards]


@pytest.fixture(scope="module", params=LAYERS)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    return request.param, make_mtp_model(tmp_path_factory.mktemp("model"), request.param)


def check(oracle: MtpOracle, text: Sequence[int], drafts: Sequence[int]) -> None:
    """Each draft is the most likely token behind those before it, as far as rounding allows."""
    exact = oracle.logits(text, drafts[:-1])
    for logits, token in zip(exact, drafts, strict=True):
        assert logits.max() - logits[token] <= 2 * MAX_RELATIVE_ERROR * logits.abs().max()


def test_the_model_computes_the_same_with_it(made: tuple[str, Path]) -> None:
    """Logits, and the hidden states of all layers, in chunks."""
    _, directory = made
    decoder, _ = load_planned(plan_load(directory, mtp_head=True), pack=True)
    layers, texts = decoder.config.num_hidden_layers, random_texts(2, (1, 33, 70))
    found = rows_in_chunks(decoder, texts, poisoned_pages(decoder), new_packer(1), random.Random(1), layers)
    assert_same(directory, texts, found)


def test_drafts_are_those_of_the_head(made: tuple[str, Path]) -> None:
    name, directory = made
    drafted, oracle = Drafted(directory), MtpOracle(directory, name)
    text = [random.Random(1).randrange(VOCAB) for _ in range(37)]
    (forward,) = drafted.done(Forward(drafted.next_id(), 1, 0, text, draft_tokens=6))
    assert len(forward.drafts) == 6
    check(oracle, [*text, next_token(forward)], forward.drafts)


@pytest.mark.parametrize("made", ["qwen3_next", "deepseek_v3"], indirect=True)
def test_whatever_happens_to_a_sequence_the_head_follows(made: tuple[str, Path]) -> None:
    """Drafts are kept and rejected, in steps with callers that draft nothing; prefixes are reused."""
    name, directory = made
    drafted, oracle, dice = Drafted(directory), MtpOracle(directory, name), random.Random(name)
    texts: dict[int, list[int]] = {}
    last: dict[int, Forward] = {}
    numbers, rejected, reused = iter(range(1, 1000)), 0, 0
    for _ in range(25):
        kind = dice.random()
        idle = [number for number in texts if dice.random() < 0.7]
        if kind < 0.15 and idle:
            parent, child = dice.choice(idle), next(numbers)
            drafted.worker.answers(Fork(drafted.next_id(), parent, [child]))
            texts[child] = list(texts[parent])
            last |= {child: last[parent]} if parent in last else {}
            continue
        if kind < 0.3 and idle:
            number = dice.choice(idle)
            length = dice.randint(max(1, len(texts[number]) - 20), len(texts[number]))
            drafted.worker.answers(Truncate(drafted.next_id(), number, length))
            del texts[number][length:]
            last.pop(number, None)
            continue
        asked: list[Forward] = []
        if kind < 0.5 or not texts:
            new = next(numbers)
            texts[new] = []
            prompt = [i % VOCAB for i in range(dice.choice((1, 40, 70)))] + [dice.randrange(VOCAB)]
            asked.append(Forward(drafted.next_id(), new, 0, prompt, draft_tokens=3))
        for number in idle:
            before = last.get(number)
            token = dice.randrange(VOCAB) if before is None else next_token(before)
            drafts = list(before.drafts if before is not None and dice.random() < 0.8 else ())
            if drafts and dice.random() < 0.5:
                drafts[-1] = dice.randrange(VOCAB)
            tokens = [token, *drafts]
            asked.append(
                Forward(
                    drafted.next_id(),
                    number,
                    len(texts[number]),
                    tokens,
                    rows=len(tokens),
                    accept=Accept.CHOSEN if drafts else Accept.ALL,
                    kind=Kind.VERIFY if drafts else Kind.DECODE,
                    draft_tokens=dice.choice((0, 4)),
                )
            )
        for forward in drafted.done(*asked):
            text = texts[forward.sequence]
            text += forward.token_ids[: forward.kept]
            rejected += forward.kept < len(forward.token_ids)
            reused += forward.reused > 0
            last[forward.sequence] = forward
            assert len(forward.drafts) == forward.draft_tokens
            if forward.drafts:
                check(oracle, [*text, next_token(forward)], forward.drafts)
    assert rejected and reused
    drafted.executor.engine.release_all()
    assert not drafted.executor.engine.kv_table.usage().pages_referenced


@pytest.mark.parametrize(
    "settings", [{"quantization": "q8_0"}, {"dtype": "bfloat16", "kv_dtype": "int8"}], ids=str
)
def test_weights_and_pages_of_other_formats(settings: dict[str, Any], tmp_path: Path) -> None:
    """Of the head as of the model."""
    directory = make_mtp_model(tmp_path, "qwen3_next")
    drafted = Drafted(directory, **settings)
    (forward,) = drafted.done(Forward(drafted.next_id(), 1, 0, list(range(40)), draft_tokens=4))
    assert len(forward.drafts) == 4


def test_what_has_no_head_is_refused_by_name(tmp_path: Path) -> None:
    without = make_family_model(tmp_path / "without", *settings_of("qwen3_next"))
    with pytest.raises(ModelError, match="files have no head for multi-token prediction"):
        Drafted(without)
    with pytest.raises(ModelError, match="a llama model has no head"):
        Drafted(make_family_model(tmp_path / "llama", *settings_of("llama")))
