"""KV that moves from one worker to another: what arrives is what was there, and nothing else is taken."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import pytest
import torch

from service.model_names import SHIPPED_MODEL, shipped_model_dir
from tests.workers.stepping import Worker
from workers.common import worker_pb2
from workers.executors.engine import Engine
from workers.executors.llm import LlmExecutor
from workers.executors.weightless import PagedAttentionExecutor
from workers.kv.tensors import KvTensors, LayerKv
from workers.kv_messages import Exported, ExportKv, ImportKv, KvPages
from workers.operations import (
    GREEDY,
    Done,
    Failed,
    FailureReason,
    Forward,
    OutputSpec,
    Release,
    Truncate,
)
from workers.wire import to_command, to_event

torch.set_num_threads(1)

PAGE = 16
RANDOM = random.Random(7)
PROMPT = [RANDOM.randrange(12) for _ in range(5 * PAGE + 3)]
Make = Callable[[], Engine]


def weightless() -> Engine:
    return PagedAttentionExecutor.create(kv_pages=40).engine


def shipped() -> Engine:
    return LlmExecutor.load(shipped_model_dir(), kv_pages=40).engine


MODELS = pytest.mark.parametrize("make", [weightless, shipped], ids=["weightless", SHIPPED_MODEL])


def filled(make: Make, tokens: Sequence[int] = PROMPT, salt: bytes = b"") -> Worker:
    """A worker with the tokens as sequence 1."""
    worker = Worker(make())
    forward = Forward(1, sequence=1, position=0, token_ids=list(tokens), rows=1, output=GREEDY, salt=salt)
    worker.answers(forward)
    return worker


def exported(worker: Worker, first: int = 0, end: int = len(PROMPT), salt: bytes = b"") -> KvPages:
    result = worker.answers(ExportKv(9, 1, first, end, salt))[9]
    assert isinstance(result, Exported), result
    return result.pages


def imported(worker: Worker, pages: KvPages, tokens: Sequence[int] = PROMPT, salt: bytes = b"") -> object:
    command = ImportKv(10, 7, tokens[pages.first : pages.end], salt, pages)
    return worker.answers(command)[10]


def kv_of(engine: Engine, sequence: int) -> list[torch.Tensor]:
    """The keys and values of the tokens of a sequence, in plain order."""
    known = next(each for each in engine.kv_table if each.key == sequence)
    pages = torch.tensor(list(known.pages))
    found = []
    for index in range(engine.kv.num_layers):
        for of_layer in engine.kv.layer(index):
            plain = of_layer[pages] if isinstance(of_layer, torch.Tensor) else of_layer.dense(pages)
            found.append(plain.flatten(0, 1)[: len(known)].clone())
    return found


@MODELS
@pytest.mark.parametrize("chunk_pages", [1, 2, 100])
def test_keys_and_values_arrive_bit_by_bit(make: Make, chunk_pages: int) -> None:
    source, target = filled(make), filled(make, PROMPT[3:40])
    for first in range(0, len(PROMPT), chunk_pages * PAGE):
        pages = exported(source, first, min(first + chunk_pages * PAGE, len(PROMPT)))
        assert imported(target, pages) == Done(10)
    for theirs, ours in zip(kv_of(source.engine, 1), kv_of(target.engine, 7), strict=True):
        assert torch.equal(theirs, ours)


def test_a_part_of_the_heads_is_not_copied() -> None:
    """Each rank of a split model has its own: what one process has is not all."""
    source, target = filled(weightless), filled(weightless)
    pages = exported(source)
    for worker in (source, target):
        worker.engine.kv.others = mock.Mock(ranks=2)
    assert isinstance(source.answers(ExportKv(9, 1, 0, PAGE, b""))[9], Failed)
    assert isinstance(imported(target, pages), Failed)


@MODELS
def test_the_next_tokens_are_the_same(make: Make) -> None:
    source, target = filled(make), Worker(make())
    imported(target, exported(source))
    chosen = []
    for worker, sequence in ((source, 1), (target, 7)):
        token, its = 5, []
        for step in range(12):
            forward = Forward(
                100 + step, sequence=sequence, position=len(PROMPT) + step, token_ids=[token], rows=1,
                output=OutputSpec(logprob=True),
            )  # fmt: skip
            answer = worker.answers(forward)[100 + step]
            assert isinstance(answer, Forward)
            token = answer.outputs[0].token_id
            its.append((token, answer.outputs[0].logprob))
        chosen.append(its)
    assert chosen[0] == chosen[1]


def test_the_message_loses_nothing() -> None:
    pages = exported(filled(weightless))
    message = to_event(Exported(3, pages)).kv_pages
    command = worker_pb2.ImportKvCommand(sequence=7, token_ids=PROMPT, salt=b"s", pages=message)
    decoded = to_command(worker_pb2.WorkerCommand(op_id=4, import_kv=command))
    assert decoded == ImportKv(4, 7, PROMPT, b"s", pages)


@pytest.mark.parametrize(
    "changed",
    [
        {"digest": b"0" * 16},
        {"fingerprint": "another model"},
        {"layout": "little torch.float16 16 2x(2, 8)(2, 8)"},
        {"salt": b"another"},
        {"end": len(PROMPT) - 1},
        {"data": b"too short"},
    ],
    ids=lambda changed: next(iter(changed)),
)
def test_other_pages_are_refused_and_leave_nothing(changed: dict[str, Any]) -> None:
    pages = dataclasses.replace(exported(filled(weightless, salt=b"salt"), salt=b"salt"), **changed)
    target = Worker(weightless())
    before = target.engine.kv_table.usage()
    answer = target.answers(ImportKv(10, 7, PROMPT, b"salt", pages))[10]
    assert isinstance(answer, Failed) and answer.reason is FailureReason.FAULT
    assert target.engine.kv_table.usage() == before and not target.lengths()


def test_other_tokens_are_refused() -> None:
    pages = exported(filled(weightless))
    other = [*PROMPT[:-1], (PROMPT[-1] + 1) % 12]
    assert isinstance(imported(Worker(weightless()), pages, other), Failed)


def test_what_a_worker_does_not_have_is_not_exported() -> None:
    worker = filled(weightless, salt=b"one")
    reasons = {}
    for name, command in {
        "another sequence": ExportKv(2, 5, 0, PAGE, b"one"),
        "beyond its end": ExportKv(2, 1, 0, len(PROMPT) + 1, b"one"),
        "another salt": ExportKv(2, 1, 0, PAGE, b"two"),
        "not whole pages": ExportKv(2, 1, 3, PAGE, b"one"),
        "nothing": ExportKv(2, 1, PAGE, PAGE, b"one"),
    }.items():
        answer = worker.answers(command)[2]
        assert isinstance(answer, Failed)
        reasons[name] = answer.reason
    missing, fault = FailureReason.KV_MISSING, FailureReason.FAULT
    assert list(reasons.values()) == [missing, missing, fault, fault, fault]


def test_a_gap_is_refused() -> None:
    target = Worker(weightless())
    answer = imported(target, exported(filled(weightless), PAGE, 2 * PAGE))
    assert isinstance(answer, Failed) and answer.reason is FailureReason.KV_MISSING and not target.lengths()


def test_without_room_nothing_changes() -> None:
    target = Worker(PagedAttentionExecutor.create(kv_pages=3).engine)
    source = filled(weightless)
    assert imported(target, exported(source, 0, 2 * PAGE)) == Done(10)
    answer = imported(target, exported(source, 2 * PAGE))
    assert isinstance(answer, Failed) and answer.reason is FailureReason.KV_EXHAUSTED
    assert target.lengths() == {7: 2 * PAGE}
    target.answers(Release(11, (7,)))
    assert target.engine.kv_table.pages_available == 3


def test_pages_that_are_there_are_shared() -> None:
    target = filled(weightless)
    before = target.engine.kv_table.pages_available
    assert imported(target, exported(filled(weightless))) == Done(10)
    assert before - target.engine.kv_table.pages_available == 1, "only the last page, which is not full"


def test_what_is_exported_stays() -> None:
    source = filled(weightless)
    before = kv_of(source.engine, 1)
    exported(source)
    assert source.lengths() == {1: len(PROMPT)}
    assert all(map(torch.equal, before, kv_of(source.engine, 1)))
    assert source.answers(Truncate(20, 1, 4))[20] == Done(20)


def test_the_salt_survives_other_weights() -> None:
    """Their number is part of what separates the prefixes in a worker, and not of what it is asked for."""
    source = Worker(weightless())
    source.engine.forget_sequences()
    source.answers(Forward(1, sequence=1, position=0, token_ids=PROMPT, rows=1, output=GREEDY, salt=b"s"))
    assert exported(source, salt=b"s").salt == b"s"


def test_a_layout_names_all_that_differs() -> None:
    plain: dict[str, Any] = {"num_pages": 4, "page_size": 16, "dtype": torch.float32}
    layers = [LayerKv(2, 16, 16)] * 3
    others = [
        KvTensors(layers, **plain),
        KvTensors(layers, **plain | {"page_size": 32}),
        KvTensors(layers, **plain | {"dtype": torch.bfloat16}),
        KvTensors(layers[1:], **plain),
        KvTensors([*layers[1:], LayerKv(2, 16, 32)], **plain),
        KvTensors([LayerKv(2, 16, 32), *layers[1:]], **plain),
    ]
    assert len({each.layout for each in others}) == len(others)
    assert KvTensors(layers, **plain | {"num_pages": 9}).layout == others[0].layout
