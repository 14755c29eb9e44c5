"""An engine of models with recurrent layers: random operations, against the library's plain forward."""

from __future__ import annotations

import functools
import random
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.families import some
from tests.model_factory import load_decoder
from tests.recurrent import RECURRENT
from tests.tiny_types import tiny_model
from tests.workers.packing import poison
from workers.executors.engine import Engine, KvMissing
from workers.executors.memory import new_table
from workers.kv.sequence import KvSequence
from workers.kv.state_tensors import StateTensors
from workers.kv.states import MAX_BEHIND, StateSlots
from workers.kv.table import KvTable
from workers.kv.tensors import KvTensors
from workers.models.decoder import Decoder
from workers.models.library.loading import make_library_model
from workers.models.model import Model
from workers.models.registry import FAMILIES
from workers.operations import Accept, Chunk, Forward, Kind
from workers.outputs import DataType, OutputSpec
from workers.runners.eager import EagerRunner

VOCAB, PAGES, PAGE_SIZE = 97, 80, 16
# float32 against float32, in another order of summation. The issue of exactness: under 1e-4.
MAX_RELATIVE_ERROR = 1e-4
WITH_LOGITS = OutputSpec(logits=DataType.F32)
# Few enough that states of idle sequences are taken, and close enough that there are snapshots.
SLOTS, SPACING = 14, 32
LONGEST = 200


@dataclass
class Callers:
    """What a gateway does: it knows the tokens of each sequence, and replays what the engine has lost."""

    engine: Engine
    dice: random.Random
    texts: dict[int, list[int]] = field(default_factory=dict)
    numbers: int = 0
    replayed: int = 0
    reused: int = 0

    def new(self) -> int:
        self.numbers += 1
        return self.numbers

    def begin(self, forward: Forward) -> None:
        try:
            self.engine.begin(forward)
        except KvMissing:
            known = self.texts[forward.sequence][: forward.position]
            replay = Forward(0, forward.sequence, 0, known, rows=0)
            self.run([replay])
            self.replayed += len(known) - replay.reused
            self.engine.begin(forward)

    def run(self, forwards: list[Forward], failing: Forward | None = None) -> None:
        """Several forwards in shared steps of chunks. One of them may be given up on the way."""
        for forward in forwards:
            self.begin(forward)
            self.reused += forward.reused
        left = list(forwards)
        while left:
            if failing in left and self.dice.random() < 0.5:
                assert failing is not None
                self.engine.roll_back(failing)
                left.remove(failing)
                continue
            self.engine.execute(
                [
                    Chunk(one, one.computed, min(one.remaining, self.dice.choice((1, 7, 16, 33))))
                    for one in left
                ]
            )
            for forward in [one for one in left if not one.remaining]:
                assert forward.failure is None
                self.engine.complete(forward)
                left.remove(forward)


@functools.cache
def model_of(model_type: str):  # type: ignore[no-untyped-def]  # of the library
    return make_library_model(tiny_model(model_type, **RECURRENT.get(model_type, {})))


@functools.cache
def native_model_of(model_type: str) -> Decoder:
    """The same model in native code, packed."""
    with tempfile.TemporaryDirectory() as directory:
        model_of(model_type).module.save_pretrained(directory)
        return load_decoder(Path(directory), pack=True)


def engine_of(model_type: str, slots: int = SLOTS, *, native: bool = False) -> Engine:
    model: Model = native_model_of(model_type) if native else model_of(model_type)
    kv = KvTensors(
        model.kv_layers,
        num_pages=PAGES,
        page_size=PAGE_SIZE,
        dtype=model.dtype,
        pack=model.packs_kv,
        states=StateTensors(model.state_shapes, slots, SPACING) if model.state_shapes else None,
    )
    poison(kv)
    return Engine(new_table(kv), kv, EagerRunner(model, kv), takes_trees=False)


def check(model_type: str, text: list[int], forward: Forward) -> None:
    """The outputs are those after the last tokens of a text."""
    exact = model_of(model_type).plain_logits(torch.tensor(text))[-len(forward.outputs) :].numpy()
    found = np.stack([np.frombuffer(output.logits or b"", "<f4") for output in forward.outputs])
    assert np.abs(found - exact).max() / np.abs(exact).max() < MAX_RELATIVE_ERROR


def tokens_of(dice: random.Random, count: int) -> list[int]:
    return [dice.randrange(VOCAB) for _ in range(count)]


def one_operation(callers: Callers, model_type: str) -> None:
    dice, texts, engine = callers.dice, callers.texts, callers.engine
    kind = dice.choice(("prefill", "append", "decode", "decode", "verify", "fork", "truncate", "release"))
    picked = dice.sample(sorted(texts), min(len(texts), dice.randint(1, 4)))
    picked = [number for number in picked if len(texts[number]) < LONGEST]
    if kind == "prefill" or not picked:
        # Prompts that start alike, so that snapshots are found again.
        text = [
            *(i % VOCAB for i in range(dice.choice((0, 40, 70, 100)))),
            *tokens_of(dice, dice.randint(1, 30)),
        ]
        number = callers.new()
        texts[number] = []
        forwards = {number: text}
    elif kind in ("append", "verify"):
        forwards = {
            number: tokens_of(dice, dice.randint(1, 40 if kind == "append" else 8)) for number in picked
        }
    elif kind == "decode":
        forwards = {number: tokens_of(dice, 1) for number in picked}
    else:
        number = picked[0]
        if kind == "fork":
            child = callers.new()
            engine.fork(number, [child])
            texts[child] = list(texts[number])
        elif kind == "truncate":
            length = dice.randint(1, len(texts[number]))
            engine.truncate(number, length)
            del texts[number][length:]
        elif len(texts) > 3:
            engine.release(number)
            del texts[number]
        return
    accept = Accept.CHOSEN if kind == "verify" else Accept.ALL
    made = {
        number: Forward(
            0,
            number,
            len(texts[number]),
            added,
            rows=len(added) if kind == "verify" else 1,
            output=WITH_LOGITS,
            accept=accept,
            kind=Kind.VERIFY if kind == "verify" else Kind.DECODE if kind == "decode" else Kind.PREFILL,
        )
        for number, added in forwards.items()
    }
    given_up = dice.choice(sorted(made))
    failing = made[given_up] if texts[given_up] and dice.random() < 0.2 else None
    callers.run(list(made.values()), failing)
    for number, forward in made.items():
        if forward.remaining:
            continue
        whole = texts[number] + forwards[number]
        check(model_type, whole, forward)
        texts[number] = whole[: len(texts[number]) + forward.kept]


# A convolution and Mamba 2 between attention; no attention, and tokens one by one.
ALWAYS = ("granitemoehybrid", "mamba")
# Without a state: pages have what is compressed, or the tokens.
WITHOUT_STATE = ("deepseek_v4", "openai-gpt")


@pytest.mark.parametrize("model_type", some((*RECURRENT, *WITHOUT_STATE), ALWAYS))
def test_random_operations_compute_what_the_library_does(model_type: str) -> None:
    run_random_operations(model_type, engine_of(model_type))


# One with each kind of state; those of the other families are compared in chunks by test_families.py.
KINDS = ("falcon_mamba", "granitemoehybrid", "lfm2", "qwen3_next", "kimi_linear")


@pytest.mark.parametrize(
    "model_type",
    some(sorted(RECURRENT.keys() & FAMILIES.keys()), KINDS),
)
def test_random_operations_in_native_code_compute_what_the_library_does(model_type: str) -> None:
    run_random_operations(model_type, engine_of(model_type, native=True))


def run_random_operations(model_type: str, engine: Engine) -> None:
    callers = Callers(engine, random.Random(model_type))
    for _ in range(40):
        one_operation(callers, model_type)
        engine.kv_table.check_integrity()
    engine.release_all()
    engine.kv_table.check_integrity()
    assert engine.kv_table.usage().pages_referenced == 0


@pytest.fixture
def computed() -> Iterator[list[int]]:
    """How many tokens each forward of the library has had."""
    sizes: list[int] = []
    module = model_of("granitemoehybrid").module
    note = module.register_forward_pre_hook(
        lambda _, __, asked: sizes.append(asked["input_ids"].shape[1]), with_kwargs=True
    )
    yield sizes
    note.remove()


def append(callers: Callers, number: int, tokens: list[int], **more: Any) -> Forward:
    forward = Forward(0, number, len(callers.texts[number]), tokens, output=WITH_LOGITS, **more)
    callers.run([forward])
    callers.texts[number] += tokens[: forward.kept]
    return forward


def callers_with(text: list[int], slots: int = 40) -> Callers:
    """Sequence 1 has a text."""
    callers = Callers(engine_of("granitemoehybrid", slots), random.Random(0), {1: []})
    append(callers, 1, text)
    return callers


def test_what_was_appended_last_is_undone_without_computing_anything(computed: list[int]) -> None:
    """As it is for a token that was prelaunched, and another one comes."""
    callers = callers_with([3] * 50)
    append(callers, 1, [7], kind=Kind.DECODE)
    callers.engine.undo(1, 50)
    del callers.texts[1][50:], computed[:]
    append(callers, 1, [8], kind=Kind.DECODE)
    assert computed == [1]


def test_a_cut_computes_no_more_than_what_follows_the_last_snapshot(computed: list[int]) -> None:
    callers = callers_with([i % VOCAB for i in range(190)])
    for number, length in enumerate((189, 150, 128, 127, 33, 20, 1), 2):
        callers.engine.fork(1, [number])
        callers.engine.truncate(number, length)
        callers.texts[number] = callers.texts[1][:length]
        computed.clear()
        forward = append(callers, number, [5], kind=Kind.DECODE)
        assert sum(computed) <= length % SPACING + 1
        check("granitemoehybrid", callers.texts[number], forward)
    assert not callers.replayed


def test_a_sequence_whose_state_was_taken_is_replayed(computed: list[int]) -> None:
    """Others needed the slots. Its pages are found again, but no snapshot to go on from."""
    callers = callers_with([3] * 90, slots=3)
    callers.texts[2] = []
    append(callers, 2, [4] * 90)
    computed.clear()
    forward = append(callers, 1, [5], kind=Kind.DECODE)
    assert callers.replayed == 90 and sum(computed) == 91
    check("granitemoehybrid", callers.texts[1], forward)


def test_accepted_drafts_are_computed_once_more(computed: list[int]) -> None:
    """With the next forward, and not with each one after it."""
    callers = callers_with([3] * 20)
    verify = append(callers, 1, [4, 5, 6, 7], rows=4, kind=Kind.VERIFY, accept=Accept.CHOSEN)
    assert verify.kept < 4
    for expected in ([verify.kept, 1], [1]):
        computed.clear()
        forward = append(callers, 1, [9], kind=Kind.DECODE)
        assert computed == expected
        check("granitemoehybrid", callers.texts[1], forward)


def test_a_row_has_the_same_bits_in_any_company() -> None:
    """In the same chunks: alone, and in steps with others."""
    text = [i % VOCAB for i in range(60)]
    others = [[7] * 60, list(range(60))]
    alone, together = engine_of("granitemoehybrid", 40), engine_of("granitemoehybrid", 40)
    found: dict[Engine, list[bytes | None]] = {alone: [], together: []}
    for engine, texts in ((alone, [text]), (together, [*others, text])):
        position = 0
        for size in (16, 9, 1, 1, 20, 13):
            forwards = [
                Forward(0, number, position, one[position : position + size], output=WITH_LOGITS)
                for number, one in enumerate(texts, 1)
            ]
            for forward in forwards:
                engine.begin(forward)
            engine.execute([Chunk(one, one.computed, one.remaining) for one in forwards])
            found[engine].append(forwards[-1].outputs[-1].logits)
            position += size
    assert found[alone] == found[together]


def test_no_sequence_gets_a_state_that_other_weights_have_made() -> None:
    """Its tokens are those of another one, which was computed before the weights were replaced, or after."""
    states = StateSlots(12, PAGE_SIZE, PAGE_SIZE)
    table = KvTable(PAGES, PAGE_SIZE, states)

    def append(sequence: KvSequence) -> None:
        table.reserve(sequence, PAGE_SIZE)
        states.begin(sequence)
        states.run([(sequence, PAGE_SIZE)])
        table.append(sequence, range(len(sequence), len(sequence) + PAGE_SIZE))
        states.end(sequence.key)

    before, after, last = (table.create(key) for key in range(3))
    append(before)
    table.forget_prefixes()
    for sequence in (after, last):
        for _ in range(2 + MAX_BEHIND // PAGE_SIZE):
            append(sequence)
        table.truncate(sequence, len(sequence) - PAGE_SIZE - 1)
        assert not states.is_near(sequence)
    table.check_integrity()
