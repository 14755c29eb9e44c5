"""The simulator's model of a worker and the real step loop answer the same commands alike.

Both get the same messages. The real one steps as its scheduler decides, over the weightless executor; the
model is then told which forwards began and which chunks ran. After each round both must have given the same
answers, decoded by the gateway, and hold the same tokens. What is chosen next comes from the toy model in
both, so that drafts are accepted alike. The real one's logits are those of its tokens alone: its KV is right.
"""

from __future__ import annotations

import dataclasses
import functools
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from quire.v1 import types_pb2

from service.caches import effects
from service.caches.answers import CommandFailed, DecodeDone
from service.caches.requests import Append, AppendKind
from service.errors import KvExhausted
from service.pool import wire as gateway_wire
from tests.forwards import SentForward, Told, as_command
from tests.sim.appends import append, with_options
from tests.sim.model_worker import Faults, ModelWorker, Pool, message_of
from tests.sim.planted_in_kv import PLANTS
from tests.sim.schedules import quietly
from tests.sim.toy_model import line_to, next_token
from tests.token_trees import random_tree
from tests.workers.packing import HandPacker, HandSequence, Item
from workers import wire as worker_wire
from workers.common import worker_pb2
from workers.decodes import NO_DECODES, Decodes
from workers.executors.weightless import PagedAttentionExecutor
from workers.kv.tensors import KvTensors
from workers.models.capture import RowCapture
from workers.models.embedding_attention import EmbeddingAttention
from workers.models.inputs import ForwardInputs
from workers.models.model import new_pages
from workers.operations import Chunk, Failed, Forward, Result
from workers.runners.base import StepResult
from workers.sampling import SamplingRow
from workers.scheduler import Scheduler
from workers.step_loop import StepLoop

SEEDS = range(25)
ROUNDS = 40
# Small steps: prefills run in chunks, and forwards wait for one another.
STEP = SimpleNamespace(tokens=24, items=4, rows=12)
MAX_LEN = 90
# Of a shared pool prompts repeat, so that pages are shared; of an unshared one every page is another.
SMALL, LARGE = Pool(12), Pool(500)
FAULTLESS = Faults(step=0.0, control=0.0, timeout=0.0)
OUT_OF_TIME = Faults(step=0.0, control=0.0, timeout=1.0)
MUST_HAPPEN = (
    "decode", "prefill", "verify", "draft refused", "tree", "tree of which nothing is accepted",
    "score", "chunked", "cut", "fork", "truncate", "release",
    "abort of a queued forward", "abort of a begun forward", "abort came too late",
    "KV_EXHAUSTED", "WORKER_FAULT", "DEADLINE_PASSED", "kv missing",
)  # fmt: skip


class RealWorker:
    """The step loop, one round at a time; notes what began and what ran in it."""

    def __init__(self, pool: Pool) -> None:
        self.engine = PagedAttentionExecutor.create(kv_pages=pool.pages).engine
        assert self.engine.kv.page_size == pool.page_tokens
        self.results: list[Result | Decodes] = []
        self.begun: list[int] = []
        # Op ids, and how many of their tokens are computed after it.
        self.ran: list[tuple[int, int]] = []
        # Op ids that fail when they run.
        self.faulty: set[int] = set()
        self.has_right_kv = True
        scheduler = Scheduler(STEP.tokens, STEP.items, STEP.rows)
        # All is queued, so that it is seen here when each begins.
        scheduler._has_room = lambda plain: False  # type: ignore[method-assign]
        # Nothing is guessed: the model computes what it was asked for.
        self._loop = StepLoop(self.engine, scheduler, self.results.extend, max_seq_tokens=0)
        self._begin, self._execute = self.engine.begin, self.engine.execute
        self.engine.begin = self._note_begin  # type: ignore[method-assign]
        self.engine.execute = self._execute_and_choose  # type: ignore[method-assign]
        self._chunks: Sequence[Chunk] = ()
        self._step = self.engine.runner.step
        self.engine.runner.step = self._choose  # type: ignore[method-assign]

    def round(self, messages: Sequence[worker_pb2.WorkerCommand]) -> list[worker_pb2.WorkerEvent]:
        """Takes commands and runs a step. Returns the answers."""
        self.begun.clear()
        self.ran.clear()
        if messages:
            self._loop.submit([worker_wire.to_command(message) for message in messages])
        if messages or self._loop.operations_in_flight:
            self._loop.take()
            self._loop.step()
            self._loop.flush()
        self.engine.kv_table.check_integrity()
        assert self.has_right_kv, "the KV is that of other tokens"
        results, self.results[:] = list(self.results), []
        assert all(
            isinstance(result, Decodes | Forward | worker_pb2.WorkerEvent | Failed) for result in results
        )
        return [event for result in results for event in one_by_one(worker_wire.to_event(result))]  # type: ignore[arg-type]

    def held(self) -> dict[int, list[int]]:
        """The tokens of every sequence."""
        return {sequence.key: list(sequence.token_ids) for sequence in self.engine.kv_table}

    def _note_begin(self, forward: Forward) -> None:
        self.begun.append(forward.op_id)
        self._begin(forward)

    def _execute_and_choose(self, chunks: Sequence[Chunk], decodes: Decodes = NO_DECODES) -> Decodes:
        if self.faulty & {chunk.forward.op_id for chunk in chunks}:
            if len(chunks) == 1:
                self.ran.append((chunks[0].forward.op_id, 0))
            raise RuntimeError("planted")
        self._chunks = chunks
        done = self._execute(chunks, decodes)
        self.ran += [(chunk.forward.op_id, chunk.start + chunk.count) for chunk in chunks]
        return done

    def _choose(
        self, inputs: ForwardInputs, rows: Sequence[SamplingRow], capture: RowCapture | None = None
    ) -> StepResult:
        result = self._step(inputs, rows, capture)
        texts = [_before(chunk, chunk.start + index) for chunk in self._chunks for index in chunk.wanted]
        self.has_right_kv &= not texts or torch.equal(result.logits, logits_after(texts))
        chosen = [next_token(text, None) for text in texts]
        return StepResult(result.logits, torch.tensor(chosen, dtype=torch.int64))


@functools.cache
def _undisturbed() -> tuple[EmbeddingAttention, KvTensors]:
    model = EmbeddingAttention()
    return model, new_pages(model, LARGE.pages)


def logits_after(texts: Sequence[Sequence[int]]) -> torch.Tensor:
    """Of the model, after each text."""
    model, kv = _undisturbed()
    packer = HandPacker(kv.page_size, range(kv.num_pages))
    return model.logits(model.forward(packer.pack([Item(HandSequence(), text) for text in texts]), kv))


def _before(chunk: Chunk, index: int) -> list[int]:
    """The tokens of its sequence up to one of a request."""
    tokens = chunk.forward.kv.token_ids[: chunk.forward.position]
    return [*tokens, *line_to(chunk.forward.token_ids, chunk.forward.parents, index)]


class Pair:
    """Both workers in lockstep, and who asks them: only what a gateway may ask."""

    def __init__(self, seed: int, pool: Pool, seen: Counter[str]) -> None:
        self.rng = random.Random(seed)
        self.seen = seen
        self.shared = pool is LARGE
        self.real = RealWorker(pool)
        self.model = ModelWorker("model", 1, pool, self.rng, seen)
        self.model.faults = FAULTLESS
        self._last_number = 0
        # Forwards that are not answered: the sequence of each.
        self.queued: dict[int, int] = {}
        # Those whose deadline is past when they come.
        self.late: set[int] = set()
        self.answered: list[int] = []

    def run(self) -> None:
        for _ in range(ROUNDS):
            self.round(list(self._commands()))
        while self.queued:
            self.round([])
        numbers = tuple(self.model.sequences)
        self.round([effects.ReleaseSequences(self._number(), numbers)])
        usage = self.real.engine.kv_table.usage()
        assert usage.sequences == usage.pages_referenced == 0 and not self.model.sequences

    # One round of both.

    def round(self, commands: Sequence[Told]) -> None:
        messages = [message_of(as_command(command)) for command in commands]
        real = self.real.round(messages)
        self.model.inbox.extend(messages)
        self.model.take(len(messages))
        self.model.faults = OUT_OF_TIME
        for op_id in [op_id for op_id in self.queued if op_id in self.late]:
            self.model.begin(op_id)
        self.model.faults = FAULTLESS
        for op_id in self.real.begun:
            self.model.begin(op_id)
        for op_id, until in self.real.ran:
            if until:
                self.model.run(op_id, until)
            else:
                self.model.fail(op_id)
            self.seen["chunked"] += op_id not in {event.op_id for event in real}
        expected = list(self.model.outbox)
        self.model.outbox.clear()
        assert answers(real) == answers(expected)
        for event in real:
            self._note(event.op_id, decoded(event))
        busy = set(self.queued.values())
        held, wanted = self.real.held(), self.model.sequences
        assert {n: t for n, t in held.items() if n not in busy} == {
            n: t for n, t in wanted.items() if n not in busy
        }

    def _note(self, op_id: int, answer: object) -> None:
        if self.queued.pop(op_id, None) is not None:
            self.answered.append(op_id)
        if isinstance(answer, CommandFailed):
            self.seen["kv missing" if answer.kv_missing else answer.error.reason] += 1

    # Commands.

    def _commands(self) -> Iterator[Told]:
        # A command in this round is about a sequence that no other one is about.
        self._asked = set(self.queued.values())
        if self.answered and self.rng.random() < 0.1:
            yield effects.AbortForward(self._number(), self.rng.choice(self.answered))
        for op_id in [op_id for op_id in self.queued if self.rng.random() < 0.06]:
            self.answered.append(op_id)
            del self.queued[op_id]
            yield effects.AbortForward(self._number(), op_id)
        for _ in range(self.rng.choice((0, 1, 2, 4))):
            yield from self._command()

    def _command(self) -> Iterator[Told]:
        rng, kinds, number = self.rng, AppendKind, self._idle()
        choice = rng.random()
        if number is None or choice < 0.25:
            yield self._forward(self._number(), 0, rng.choice((kinds.PREFILL, kinds.PREFILL, kinds.SCORE)))
            return
        self._asked.add(number)
        length = len(self.model.sequences.get(number, ()))
        if choice < 0.7:
            kind = rng.choice((kinds.DECODE, kinds.DECODE, kinds.VERIFY, kinds.PREFILL))
            wrong = max(0, length + rng.choice((-17, -3, -1, 2)))
            yield self._forward(number, wrong if rng.random() < 0.1 else length, kind)
        elif choice < 0.8:
            beyond = rng.random() < 0.1
            new_len = length + 1 if beyond else rng.randint(0, length)
            self.seen["truncate"] += 1
            yield effects.TruncateSequence(self._number(), number, new_len)
        elif choice < 0.9 and self.shared:
            children = tuple(self._number() for _ in range(rng.randint(0, 3)))
            self._asked.update(children)
            self.seen["fork"] += 1
            yield effects.ForkSequence(self._number(), number, children)
            if children and length:
                # As a repetition is computed again.
                base = rng.randint(0, length)
                yield self._forward(children[0], base, AppendKind.DECODE, ephemeral=True)
        else:
            self.seen["release"] += 1
            yield effects.ReleaseSequences(self._number(), (number, self._number()))

    def _forward(
        self, number: int, position: int, kind: AppendKind, *, ephemeral: bool = False
    ) -> SentForward:
        rng, op_id = self.rng, self._number()
        self._asked.add(number)
        self.queued[op_id] = number
        timeout_s = rng.choice((3600.0, 3600.0, 3600.0, 3600.0, 3600.0, 1e-9))
        if timeout_s < 1:
            self.late.add(op_id)
        if rng.random() < 0.03:
            self.real.faulty.add(op_id)
        before = self.model.sequences.get(number, [])
        tokens = self._tokens(kind, before[:position])
        self.seen[kind.name.lower()] += 1
        self.seen["cut"] += position < len(before)
        rows = {AppendKind.PREFILL: rng.choice((0, 1)), AppendKind.DECODE: 1}.get(kind, len(tokens))
        accept = types_pb2.VERIFY_ACCEPT_GREEDY if kind is AppendKind.VERIFY and rng.random() < 0.8 else 0
        asked = append(kind, "", tokens, rows=rows, accept=accept)
        if kind is AppendKind.VERIFY and rng.random() < 0.5:
            asked = self._as_tree(asked, before[:position])
        return SentForward(
            op_id=op_id,
            number=number,
            position=position,
            append=asked,
            seed=0,
            prompt_len=position,
            caller=rng.randint(0, 3),
            ephemeral=ephemeral or kind is AppendKind.SCORE,
            timeout_s=timeout_s,
        )

    def _as_tree(self, asked: Append, before: list[int]) -> Append:
        """A tree in its place, which a repetition that is computed again accepts nothing of."""
        tree = random_tree(
            self.rng,
            asked.token_ids[0],
            self.rng.randint(2, 20),
            256,
            lambda path: next_token([*before, *path], None),
        )
        self.seen["tree"] += 1
        self.seen["tree of which nothing is accepted"] += not asked.accept
        asked = dataclasses.replace(asked, token_ids=tree.token_ids)
        return with_options(asked, parents=tree.parents, rows=len(tree.token_ids))

    def _tokens(self, kind: AppendKind, before: list[int]) -> list[int]:
        rng = self.rng
        if kind is AppendKind.DECODE:
            return [rng.randrange(256)]
        if kind is AppendKind.VERIFY:
            drafts = [rng.randrange(256)]
            for _ in range(rng.randint(0, 5)):
                right = next_token(before + drafts, None)
                drafts.append(right if rng.random() < 0.8 else 200)
            self.seen["draft refused"] += 200 in drafts[1:]
            return drafts
        count = rng.randint(1, max(1, min(50, MAX_LEN - len(before))))
        if self.shared and rng.random() < 0.7:
            return [(7 * i + len(before)) % 256 for i in range(count)]
        return [rng.randrange(256) for _ in range(count)]

    def _idle(self) -> int | None:
        """A sequence of which nothing is under way; seldom one that nobody knows."""
        if self.rng.random() < 0.03:
            return self._number()
        idle = [
            n for n, tokens in self.model.sequences.items() if n not in self._asked and len(tokens) < MAX_LEN
        ]
        return self.rng.choice(idle) if idle else None

    def _number(self) -> int:
        self._last_number += 1
        return self._last_number


def one_by_one(event: worker_pb2.WorkerEvent) -> list[worker_pb2.WorkerEvent]:
    """As if decodes that are answered together were answered each alone."""
    if event.WhichOneof("event") != "decodes":
        return [event]
    found = gateway_wire.to_events(worker_pb2.ConnectResponse(events=[event]))
    done: list[tuple[int, Any]] = [
        (op_id, gateway_wire.decode_answer(one) if isinstance(one, DecodeDone) else one)
        for op_id, one in found
    ]
    return [worker_pb2.WorkerEvent(op_id=op_id, forward=one) for op_id, one in done]


def decoded(event: worker_pb2.WorkerEvent) -> object:
    """What the gateway makes of an answer. Nothing where all is said by its being there."""
    answers = gateway_wire.to_events(worker_pb2.ConnectResponse(events=[event]))
    return next((answer for op_id, answer in answers if op_id == event.op_id), None)


def answers(events: Sequence[worker_pb2.WorkerEvent]) -> dict[int, object]:
    """What the gateway makes of a worker's answers, by op id, without what only a real one can say."""
    found: dict[int, object] = {}
    for event in events:
        assert event.op_id not in found, "answered twice"
        match decoded(event):
            case worker_pb2.ForwardDone() as answer:
                said = [output.token_id for output in answer.outputs]
                found[event.op_id] = (answer.kept, list(answer.kept_path), said)
            case CommandFailed(error=KvExhausted() as error):
                found[event.op_id] = (error.reason, error.metadata)
            case CommandFailed(error=error) as failed:
                found[event.op_id] = (error.reason, failed.kv_missing)
            case _:
                assert event.WhichOneof("event") == "done"
                found[event.op_id] = "done"
    return found


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """For forwards this small a second thread only waits for the first."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def run(pool: Pool) -> Counter[str]:
    """What has happened."""
    seen: Counter[str] = Counter()
    with quietly():
        for seed in SEEDS:
            Pair(seed, pool, seen).run()
    return seen


@pytest.mark.parametrize("pool", [SMALL, LARGE], ids=["pages run out", "pages are shared"])
def test_the_model_of_a_worker_answers_as_the_real_one(pool: Pool) -> None:
    seen = run(pool)
    impossible = {"fork", "cut"} if pool is SMALL else {"KV_EXHAUSTED"}
    assert {what: seen[what] for what in MUST_HAPPEN if seen[what] < 10 and what not in impossible} == {}


@pytest.mark.parametrize("plant", ["forwards", "copies"])
def test_mistakes_in_kv_are_noticed(plant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    PLANTS[plant](monkeypatch.setattr)
    with pytest.raises(AssertionError, match="the KV is that of other tokens"):
        run(LARGE)
